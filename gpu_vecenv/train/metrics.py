"""Metrics of an iteration: read from the device in one copy, and checked; which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.episode_log import EpisodeLog
from gpu_vecenv.train.graph import StageTimer
from gpu_vecenv.train.learner import Learner
from gpu_vecenv.train.opponents import Opponents
from gpu_vecenv.train.plots import EPISODE_METRICS
from gpu_vecenv.train.rollout_storage import Rollout

# Start of a metric's name -> likely cause if it is not finite.
CAUSES = {
    "return_": "rewards of the game are NaN or infinite: mend its step(), or make the environments with "
    "end_on_nonfinite=True",
    "explained_variance": "returns or values are not finite, or so large that their squares overflow: make rewards "
    "smaller, or try normalize_returns or a smaller learning_rate",
    "": "a number in it is not finite or overflows",
}


class NonFiniteMetric(NamedTuple):
    """A metric that is NaN or infinite, the iteration of the first metrics in which it is, and the likely cause."""

    iteration: int
    metric: str
    value: float
    likely_cause: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.metric} is {self.value}; {self.likely_cause}"


COUNTS = ("episodes", "first_episodes", "faults", "nonfinite_envs", "iterations")  # as EpisodeLog's launch has them


class MetricsReader:
    """Metrics of the iterations since the last read, in all processes; the host reads them in one copy.

    Means over minibatches are means over these iterations too, numbers of episodes are sums. Means over episodes are
    those over the latest ones, and faults are counted, as they are at the end of the last iteration. A loss that is not
    finite, or an invalid action, stops all learners until the next read, which raises.

    Args:
        rollout: Of the iterations.
        learners: By policy.
        episode_log: Of the rollout's environment.
        world: The processes.
        opponents: Of the rollout's environments; None: there are none.

    Attributes:
        stopped: (1,) float64: not 0 where the learners skip all updates.
    """

    def __init__(
        self,
        rollout: Rollout,
        learners: Mapping[str, Learner[Any]],
        episode_log: EpisodeLog,
        world: World,
        opponents: Opponents | None = None,
    ) -> None:
        self._rollout, self._learners, self._episode_log, self._world = rollout, learners, episode_log, world
        self._learned = [f"{metric}_{name}" for name, one in learners.items() for metric in one.metric_names()]
        self._losses = [f"{metric}_{name}" for name, one in learners.items() for metric in one.loss_metrics]
        self._roles = dict(rollout.env.game.layout.role_slices) if rollout.shaping is not None else {}
        columns = episode_log.num_sums - len(COUNTS)
        self._opponents = opponents
        self._matches = [] if opponents is None else opponents.match_names
        self._members = {name: one for name, one in learners.items() if one.envs.num_envs < rollout.env.num_envs}
        # Of the game's own metrics, as they are after the last step of an iteration.
        self._states = {f"state_{name}": rollout.env.state[name] for name in rollout.env.game.state_metrics}
        results = 3 * len(self._matches), 2 * len(self._members), len(self._states)
        sizes = len(self._learned), 2 * len(self._roles), *results
        self._sizes = *sizes, columns, len(COUNTS)
        self._totals = torch.zeros(sum(self._sizes) + 1, dtype=torch.float64, device=rollout.rewards.device)
        parts = self._totals.split([*sizes, columns + len(COUNTS), 1])
        learned, self._shaped, self._results, self._of_members, self._of_states, episodes, self.stopped = parts
        self._take_in_episodes = episode_log.launch_into(episodes, clears=True)
        faults = episodes[columns + COUNTS.index("faults")]
        each = learned.split([len(learner.metric_names()) for learner in learners.values()])
        for learner, totals in zip(learners.values(), each, strict=True):
            learner.report_to(totals, faults, self.stopped)

    def begin_iteration(self) -> None:
        """The host's part of an iteration's metrics, before its kernels are launched."""
        self._episode_log.begin_update()

    def count_iteration(self) -> None:
        """The host's part after they are launched."""
        self._episode_log.cleared()

    def add_iteration(self) -> None:
        """Add the metrics of an iteration, after all its updates, and clear the statistics of episodes; on the device.

        It may be part of a CUDA graph.
        """
        self._episode_log.take_in(self._take_in_episodes)
        for learner in self._learners.values():
            learner.add_metrics()
        if self._roles:
            active = [self._rollout.active[:-1, :, where] for where in self._roles.values()]
            rewards = [self._rollout.rewards[:, :, where] for where in self._roles.values()]
            sums = [x.where(a, 0).sum(dtype=torch.float64) for x, a in zip(rewards, active, strict=True)]
            self._shaped += torch.stack([*(a.sum().double() for a in active), *sums])

        if self._states:
            self._of_states += torch.stack([field.double().mean() for field in self._states.values()])
        if self._opponents is not None:
            self._results += self._opponents.match_results()
        if self._members:
            self._of_members.copy_(torch.stack([x for one in self._members.values() for x in self._episodes(one)]))

    def _episodes(self, learner: Learner[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the latest episodes in a member's environments: sum of the returns of an agent of its roles, and number.

        The sum is NaN until each of these environments has ended an episode.
        """
        layout, log = self._rollout.env.game.layout, self._episode_log
        latest = learner.envs.of(log.latest)
        agents = {f"return_{role}": layout.roles[role] for role in learner.policy.view.roles}
        returns = [latest[:, log.names.index(name)] * count for name, count in agents.items() if count]
        total = torch.stack(returns).sum(0) / sum(agents.values())
        return torch.where((latest[:, -1] > 0).all(), total.sum(), torch.nan), latest[:, -1].sum()

    def discard(self) -> None:
        """Begin anew without a read."""
        self._totals.zero_()

    def totals(self) -> torch.Tensor:
        """What ``read_totals`` reads, of all processes."""
        self._world.all_reduce_sum(self._totals)
        return self._totals

    def __call__(self, totals: Iterable[float], iterations: str) -> dict[str, float]:
        """The metrics in what ``read_totals`` read; ``iterations`` says of which iterations, for errors.

        The means are NaN as long as "first_episodes", the number of environments in their first episode, is not 0.

        Raises:
            NonFiniteError: A loss is NaN or infinite, or an environment received an invalid action.
        """
        rollout, env = self._rollout, self._rollout.env
        read = iter(totals)
        learned, shaped, results, of_members, of_states, episodes, counts = (list(islice(read, n)) for n in self._sizes)
        *counts, iterations_read = counts  # each in all processes
        metrics = {name: value / iterations_read for name, value in zip(self._learned, learned, strict=True)}
        metrics |= {name: value / iterations_read for name, value in zip(self._states, of_states, strict=True)}
        metrics |= dict(zip(COUNTS, counts, strict=False))
        for k, role in enumerate(self._roles):
            metrics[f"shaped_reward_{role}"] = shaped[len(self._roles) + k] / max(shaped[k], 1)
        for k, match in enumerate(self._matches):
            wins, draws, games = results[3 * k : 3 * k + 3]
            metrics[f"games_{match}"] = games
            metrics[f"win_rate_{match}"] = (wins + draws / 2) / games if games else math.nan
        *sums, num_latest = episodes
        means = dict.fromkeys((f"return_{role}" for role in env.game.layout.roles), 0.0)  # of roles without agents
        for name, total in zip(self._episode_log.names, sums, strict=True):
            means[name] = math.nan if metrics["first_episodes"] or not num_latest else total / num_latest
        for k, name in enumerate(self._members):
            means[f"return_{name}"] = of_members[2 * k] / (of_members[2 * k + 1] or math.nan)
        losses = {name: metrics[name] for name in self._losses}
        _check(rollout, losses, metrics.pop("faults"), iterations)
        if not env.build.end_on_nonfinite:
            del metrics["nonfinite_envs"]
        return {
            **metrics,
            "episode_length": means.pop("length"),
            "terminated_fraction": means.pop("terminated"),
            **means,
        }


def read_totals(readers: Sequence[MetricsReader]) -> list[list[float]]:
    """What each reader has gathered, in one copy to the host, which waits for the device; they begin anew."""
    totals = [reader.totals() for reader in readers]
    values = iter((totals[0] if len(totals) == 1 else torch.cat(totals)).tolist())
    for reader in readers:
        reader.discard()
    return [list(islice(values, len(own))) for own in totals]


class NonFiniteMetrics:
    """Finds metrics that are NaN or infinite, each of them once.

    Args:
        known: Names of metrics that have been found before.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)

    def __call__(self, metrics: Mapping[str, float | str]) -> list[NonFiniteMetric]:
        """Those that are not finite for the first time. Means over episodes are NaN until there are any."""
        found = []
        for name, value in metrics.items():
            if isinstance(value, str) or math.isfinite(value) or name in self._known:
                continue
            if name.startswith(EPISODE_METRICS) and metrics["first_episodes"]:
                continue
            if name.startswith("win_rate_") and not metrics["games_" + name.removeprefix("win_rate_")]:
                continue
            self._known.add(name)
            cause = next(cause for start, cause in CAUSES.items() if name.startswith(start))
            found.append(NonFiniteMetric(int(metrics["iteration"]), name, value, cause))
        return found


def _check(rollout: Rollout, losses: Mapping[str, float], faults: float, iterations: str) -> None:
    """Raise NonFiniteError, with the likely cause, if a loss is not finite or environments have faults."""
    reasons, advice = [], "try a smaller learning_rate or max_grad_norm"
    if not all(map(math.isfinite, losses.values())):
        reasons.append(f"losses {losses} are not finite")
    if faults:
        reasons.append(f"{faults:.0f} environments received invalid actions and were truncated")
        advice = f"a network returned NaN ({advice}), an action mask forbids every choice, or an opponent's function "
        advice += "returned an action that its role does not have"
    if not reasons:
        return
    if not bool(rollout.obs.isfinite().all()):
        advice = "the game's observations are not finite"
    elif not faults and not bool(rollout.rewards.isfinite().all()):  # after a fault they are NaN
        advice = "the game's rewards are not finite"
        if rollout.shaping is not None:
            advice = f"rewards that {rollout.shaping.name} returned are not finite"
    if advice.startswith("the game's"):
        advice += ": mend its step() or observe(), or make the environments with end_on_nonfinite=True"
    raise NonFiniteError(f"{iterations}: {' and '.join(reasons)}; {advice}")


def time_fractions(timer: StageTimer, seconds: float) -> dict[str, float]:
    """Fractions of an iteration's time: update, and the rollout's stages in proportion to those of one step.

    Where no step was timed, as the rollout is one launch, the whole rollout is in place of its stages. There are none
    where an iteration is one graph and torch has no events in graphs (before 2.8).
    """
    if not timer.has("updated"):
        return {}
    update, rollout = timer.seconds("collected", "updated"), timer.seconds("start", "collected")
    if not timer.has("step_end"):
        return {"rollout_time_fraction": rollout / seconds, "update_time_fraction": update / seconds}
    stages = {name: timer.seconds(name, end) for name, end in pairwise(("policy", "sampling", "env", "step_end"))}
    step = sum(stages.values())
    fractions = {
        f"{name}_time_fraction": rollout / seconds * stage / step if step else 0.0 for name, stage in stages.items()
    }
    return fractions | {"update_time_fraction": update / seconds}
