"""Metrics of an iteration: read from the device in one copy, and checked; which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from gpu_vecenv.engine.vec_env import Fault
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.episode_log import EpisodeLog
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, StageTimer
from gpu_vecenv.train.learner import LEARNER_METRICS, LOSS_METRICS, Learner
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
    """A metric that is NaN or infinite, the iteration in which it is for the first time, and the likely cause."""

    iteration: int
    metric: str
    value: float
    likely_cause: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.metric} is {self.value}; {self.likely_cause}"


class MetricsReader:
    """Metrics of the learners, number of episodes that ended, and means over the latest episodes, in all processes.

    Args:
        rollout: Of the iterations.
        learners: By policy.
        episode_log: Of the rollout's environment.
        world: The processes.
        graph_pool: Memory pool of the CUDA graph that gathers the metrics; None runs without.
    """

    def __init__(
        self,
        rollout: Rollout,
        learners: Mapping[str, Learner],
        episode_log: EpisodeLog,
        world: World,
        graph_pool: GraphPool | None,
    ) -> None:
        self._rollout, self._learners, self._episode_log, self._world = rollout, learners, episode_log, world
        self._learned = [f"{metric}_{name}" for name in learners for metric in LEARNER_METRICS]
        self._counts: list[str] = []
        self._values = torch.zeros(0)
        self._gather = GraphedCallable(self._gather_values, "the metrics", graph_pool)

    def _gather_values(self) -> None:
        rollout, faults, episodes = self._rollout, self._rollout.env.faults(), self._episode_log
        learned = [learner.metrics_of_iteration().double() / self._world.size for learner in self._learners.values()]
        counts = {
            "episodes": episodes.add_ended(),
            "first_episodes": episodes.in_first_episode().sum(),
            "faults": (faults & ~int(Fault.NONFINITE)).count_nonzero(),
            "nonfinite_envs": (faults & int(Fault.NONFINITE)).bool().sum(),
        }
        for role, where in rollout.env.game.layout.role_slices.items() if rollout.shaping is not None else ():
            active = rollout.active[:-1, :, where]
            counts[f"active_{role}"] = active.sum()
            counts[f"shaped_reward_{role}"] = rollout.rewards[:, :, where].where(active, 0).sum(dtype=torch.float64)
        values = torch.cat([*learned, torch.stack([x.double() for x in counts.values()]), episodes.latest.sum(0)])
        if not self._counts:
            self._counts, self._values = list(counts), torch.empty_like(values)
        self._values.copy_(values)

    def __call__(self, iteration: int) -> dict[str, float]:
        """Read them, once an iteration, after all updates.

        The means are NaN as long as "first_episodes", the number of environments in their first episode, is not 0.

        Raises:
            NonFiniteError: A loss is NaN or infinite, or an environment received an invalid action.
        """
        rollout, env = self._rollout, self._rollout.env
        self._episode_log.begin_update()
        self._gather()
        self._world.all_reduce_sum(self._values)
        env.clear_episode_statistics()
        names, read = [*self._learned, *self._counts], self._values.tolist()
        *totals, num_latest = read[len(names) :]
        metrics = dict(zip(names, read[: len(names)], strict=True))
        means = dict.fromkeys((f"return_{role}" for role in env.game.layout.roles), 0.0)  # of roles without agents
        for name, total in zip(self._episode_log.names, totals, strict=True):
            means[name] = math.nan if metrics["first_episodes"] or not num_latest else total / num_latest
        for role in env.game.layout.role_slices if rollout.shaping is not None else ():
            metrics[f"shaped_reward_{role}"] /= max(metrics.pop(f"active_{role}"), 1)
        losses = {name: metrics[name] for name in self._learned if name.startswith(LOSS_METRICS)}
        _check(rollout, losses, metrics.pop("faults"), iteration)
        if not env.build.end_on_nonfinite:
            del metrics["nonfinite_envs"]
        return {
            **metrics,
            "episode_length": means.pop("length"),
            "terminated_fraction": means.pop("terminated"),
            **means,
        }


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
            missing = name.startswith(EPISODE_METRICS) and metrics["first_episodes"]
            if isinstance(value, str) or math.isfinite(value) or missing or name in self._known:
                continue
            self._known.add(name)
            cause = next(cause for start, cause in CAUSES.items() if name.startswith(start))
            found.append(NonFiniteMetric(int(metrics["iteration"]), name, value, cause))
        return found


def _check(rollout: Rollout, losses: Mapping[str, float], faults: float, iteration: int) -> None:
    """Raise NonFiniteError, with the likely cause, if a loss is not finite or environments have faults."""
    reasons, advice = [], "try a smaller learning_rate or max_grad_norm"
    if not all(map(math.isfinite, losses.values())):
        reasons.append(f"losses {losses} are not finite")
    if faults:
        reasons.append(f"{faults:.0f} environments received invalid actions and were truncated")
        advice = f"a network returned NaN ({advice}), or an action mask forbids every choice"
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
    raise NonFiniteError(f"iteration {iteration}: {' and '.join(reasons)}; {advice}")


def time_fractions(timer: StageTimer, seconds: float) -> dict[str, float]:
    """Fractions of an iteration's time: update, and the rollout's stages in proportion to those of one step.

    Where no step was timed, as the rollout is one launch, the whole rollout is in place of its stages.
    """
    update, rollout = timer.seconds("collected", "updated"), timer.seconds("start", "collected")
    if not timer.has("step_end"):
        return {"rollout_time_fraction": rollout / seconds, "update_time_fraction": update / seconds}
    stages = {name: timer.seconds(name, end) for name, end in pairwise(("policy", "sampling", "env", "step_end"))}
    step = sum(stages.values())
    fractions = {
        f"{name}_time_fraction": rollout / seconds * stage / step if step else 0.0 for name, stage in stages.items()
    }
    return fractions | {"update_time_fraction": update / seconds}
