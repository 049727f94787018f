"""Metrics of an iteration: read from the device in one copy, checked, and averaged over the episodes that ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch

from gpu_vecenv.engine.vec_env import Fault
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.episode_log import in_first_episode
from gpu_vecenv.train.graph import StageTimer
from gpu_vecenv.train.learner import LEARNER_METRICS, LOSS_METRICS, Learner
from gpu_vecenv.train.rollout_storage import Rollout


def read_metrics(rollout: Rollout, learners: Mapping[str, Learner], world: World, iteration: int) -> dict[str, float]:
    """Metrics of the learners, and of the episodes that ended since the last metrics, in all processes.

    Until every environment has ended its first episode "episodes" is 0 and the means are NaN: so far short episodes
    alone have ended. The first means are those of all episodes since the start.

    Raises:
        NonFiniteError: A loss is NaN or infinite, or an environment received an invalid action.
    """
    env, roles = rollout.env, rollout.env.game.layout.roles
    statistics, faults = env.episode_statistics(), env.faults()
    names = [f"{metric}_{name}" for name in learners for metric in LEARNER_METRICS]
    means = [learner.metrics_of_iteration().double() / world.size for learner in learners.values()]
    sums = {
        "episodes": statistics["episodes"].sum().double(),
        "episode_length": statistics["lengths"].sum().double(),
        "terminated_fraction": statistics["terminations"].sum().double(),
        "in_first_episode": in_first_episode(env).sum().double(),
        "faults": (faults & ~int(Fault.NONFINITE)).count_nonzero().double(),
        "nonfinite_envs": (faults & int(Fault.NONFINITE)).bool().sum().double(),
    }
    for role, where in env.game.layout.role_slices.items():
        sums[f"return_{role}"] = statistics["returns"][:, where].double().sum()
    values = torch.cat([*means, torch.stack(list(sums.values()))])
    world.all_reduce_sum(values)
    metrics = dict(zip([*names, *sums], values.tolist(), strict=True))
    if metrics.pop("in_first_episode"):
        metrics["episodes"] = 0.0
    else:
        env.clear_episode_statistics()
    agents = {f"return_{role}": max(count, 1) for role, count in roles.items()}
    for name in ("episode_length", "terminated_fraction", *agents):
        count = metrics["episodes"] * agents.get(name, 1)
        metrics[name] = metrics[name] / count if count else math.nan
    losses = {name: metrics[name] for name in names if name.startswith(LOSS_METRICS)}
    _check(rollout, losses, metrics.pop("faults"), iteration)
    if not env.build.end_on_nonfinite:
        del metrics["nonfinite_envs"]
    return metrics


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
    if advice.startswith("the game's"):
        advice += ": mend its step() or observe(), or make the environments with end_on_nonfinite=True"
    raise NonFiniteError(f"iteration {iteration}: {' and '.join(reasons)}; {advice}")


def time_fractions(timer: StageTimer, seconds: float) -> dict[str, float]:
    """Fractions of an iteration's time: update, and the rollout's stages in proportion to those of one step."""
    update, rollout = timer.seconds("collected", "updated"), timer.seconds("start", "collected")
    stages = {name: timer.seconds(name, end) for name, end in pairwise(("policy", "sampling", "env", "step_end"))}
    step = sum(stages.values())
    fractions = {
        f"{name}_time_fraction": rollout / seconds * stage / step if step else 0.0 for name, stage in stages.items()
    }
    return fractions | {"update_time_fraction": update / seconds}
