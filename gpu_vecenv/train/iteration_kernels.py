"""Launches of what begins and ends the updates of an iteration: schedules, explained variance, metrics of learners."""

from __future__ import annotations

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.ppo import SCHEDULED

TILE_BLOCK = 256  # threads per block; the same as TILE_BLOCK in iteration.cu
TILE_ROWS = 2048  # that a block adds up; the same as TILE_ROWS in iteration.cu
MOMENTS = 5  # of returns and their errors
OTHER_SUMS = 4  # over environments: episodes that ended, first episodes, two kinds of faults

BEGIN_UPDATE = KernelSignature(
    "begin_update",
    (
        Array("iteration", i64, shape=()),
        Array("progress", f64, shape=()),
        Scalar("num_iterations", i64),
        Scalar("num_epochs", i64),
        Array("schedules", f64, const=True, shape=(len(SCHEDULED), 2)),
        *(Array(name, f32, shape=()) for name in SCHEDULED),
        Array("epoch", i64, shape=()),
        Array("stopped", f64, const=True, shape=()),
        Array("skip_update", f32, shape=()),
        Array("metric_sums", f32, shape=("num_metrics",)),
        Scalar("num_metrics", i32),
    ),
)
EXPLAINED_VARIANCE = KernelSignature(
    "explained_variance",
    (
        Array("indices", i64, const=True, shape=("rows",)),
        Array("returns", f32, const=True),
        Array("errors", f32, const=True),
        Array("active", boolean, const=True),
        Array("explained_variance", f32, shape=()),
        Array("parts", f64),
        Array("ticket", i32, shape=()),
        Scalar("rows", i64),
    ),
)
LEARNER_METRICS = KernelSignature(
    "learner_metrics",
    (
        Array("metric_sums", f32, const=True, shape=("num_metrics",)),
        Array("explained_variance", f32, const=True, shape=()),
        Array("learning_rate", f32, const=True, shape=()),
        Array("faults", f64, const=True, shape=()),
        Array("totals", f64),
        Array("stopped", f64, shape=()),
        Scalar("num_metrics", i32),
        Scalar("num_losses", i32),
        Scalar("num_updates", i32),
    ),
)
_STATISTICS = ("returns", "lengths", "terminations", "episodes")
EPISODE_METRICS = KernelSignature(
    "episode_metrics",
    (
        Array("returns", f64, strided=True),
        *(Array(name, i64, strided=True) for name in _STATISTICS[1:]),
        Array("fault", i32, const=True, strided=True),
        *(Scalar(f"{name}_stride", i64) for name in (*_STATISTICS, "fault")),
        Array("bounds", i64, const=True),  # the first agent of each role, and the end of the last one
        Array("before", f64),
        Array("latest", f64),
        Array("sums", f64),
        Array("parts", f64),
        Array("ticket", i32, shape=()),
        Scalar("num_envs", i64),
        Scalar("agents", i64),
        Scalar("roles", i32),
        Scalar("clears", boolean),
    ),
)


def _program(functions: FunctionManager) -> Program:
    kernels = [BEGIN_UPDATE, EXPLAINED_VARIANCE, LEARNER_METRICS, EPISODE_METRICS]
    return functions.compile(cuda_folder() / "learner/iteration.cu", kernels=kernels)


def begin_update_launch(
    functions: FunctionManager,
    num_iterations: int,
    num_epochs: int,
    *,
    schedules: torch.Tensor,
    iteration: torch.Tensor,
    progress: torch.Tensor,
    scheduled: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    epoch: torch.Tensor,
    skip_update: torch.Tensor,
    metric_sums: torch.Tensor,
) -> Launch:
    """A launch that begins the updates of an iteration.

    It takes ``stopped`` () float64: unless it is 0, all updates are skipped.

    Args:
        functions: The FunctionManager of the tensors' device.
        num_iterations: Of the run.
        num_epochs: Of an iteration.
        schedules: (3, 2) float64, learning rate, clip and entropy coefficient at the start and at the end of the run.
        iteration: (1,) int64, iterations done so far. The launch makes it, and ``progress``, those of the next one.
        progress: () float64, the fraction of the run that is done.
        scheduled: Learning rate, clip and entropy coefficient, () float32 each.
        epoch: (1,) int64, the number of the iteration's first epoch.
        skip_update: () float32.
        metric_sums: (n,) float32, set to 0.
    """
    return _program(functions).prepare(
        "begin_update",
        LaunchShape(len(metric_sums), threads_per_block=32),
        iteration=iteration,
        progress=progress,
        num_iterations=num_iterations,
        num_epochs=num_epochs,
        schedules=schedules,
        **dict(zip(SCHEDULED, scheduled, strict=True)),
        epoch=epoch,
        skip_update=skip_update,
        metric_sums=metric_sums,
        num_metrics=len(metric_sums),
    )


def explained_variance_launch(
    functions: FunctionManager,
    indices: torch.Tensor,
    returns: torch.Tensor,
    errors: torch.Tensor,
    active: torch.Tensor,
    *,
    out: torch.Tensor,
) -> Launch:
    """A launch of ``ppo.explained_variance`` of the samples at ``indices``.

    Args:
        functions: The FunctionManager of the tensors' device.
        indices: (rows,) int64, which count through the next three.
        returns: (T, E, A) float32.
        errors: (T, E, A) float32.
        active: (T + 1, E, A) bool.
        out: () float32.
    """
    rows, device = len(indices), indices.device
    tiles = -(-rows // TILE_ROWS)
    return _program(functions).prepare(
        "explained_variance",
        LaunchShape(tiles, threads_per_item=TILE_BLOCK, threads_per_block=TILE_BLOCK, work=rows),
        indices=indices,
        returns=returns,
        errors=errors,
        active=active,
        explained_variance=out,
        parts=torch.zeros(max(1, tiles) * MOMENTS, dtype=torch.float64, device=device),
        ticket=torch.zeros(1, dtype=torch.int32, device=device),
        rows=rows,
    )


def learner_metrics_launch(
    functions: FunctionManager,
    *,
    metric_sums: torch.Tensor,
    explained_variance: torch.Tensor,
    learning_rate: torch.Tensor,
    num_losses: int,
    num_updates: int,
    faults: torch.Tensor,
    totals: torch.Tensor,
    stopped: torch.Tensor,
) -> Launch:
    """A launch that adds the metrics of a learner's iteration to ``totals``.

    Args:
        functions: The FunctionManager of the tensors' device.
        metric_sums: (n,) float32, over the minibatches up to the first that is skipped; the last counts those skipped.
        explained_variance: () float32.
        learning_rate: () float32, of the last minibatch.
        num_losses: So many of them must be finite.
        num_updates: Minibatches of an iteration.
        faults: () float64, the number of environments with an invalid action.
        totals: (n + 2,) float64.
        stopped: () float64, set to 1 if a loss is not finite or an environment had an invalid action.
    """
    return _program(functions).prepare(
        "learner_metrics",
        LaunchShape(len(metric_sums) + 2, threads_per_block=32),
        metric_sums=metric_sums,
        explained_variance=explained_variance,
        learning_rate=learning_rate,
        faults=faults,
        totals=totals,
        stopped=stopped,
        num_metrics=len(metric_sums),
        num_losses=num_losses,
        num_updates=num_updates,
    )


def episode_metrics_launch(
    env: VecEnv,
    *,
    bounds: torch.Tensor,
    before: torch.Tensor,
    latest: torch.Tensor,
    sums: torch.Tensor,
    clears: bool,
) -> Launch:
    """A launch that takes in the episodes that have ended since the last one, see ``EpisodeLog``.

    Args:
        env: The environment.
        bounds: (roles + 1,) int64, the first agent of each role, and the end of the last one.
        before: (num_envs, roles + 3) float64, the statistics at the last launch.
        latest: Like ``before``, sums over the latest episodes. Where their number is -1, the next one does not count.
        sums: (roles + 3 + OTHER_SUMS + 1,) float64: those of ``latest`` over all environments; the number of episodes
            that ended, of environments without one that did, with a fault other than NONFINITE, and with that one; the
            number of launches.
        clears: Whether the statistics of episodes begin anew and ``sums`` counts the episodes since it was 0; otherwise
            it counts those since the last launch.
    """
    statistics = env.episode_statistics()
    tensors = {name: statistics[name] for name in _STATISTICS}
    tensors["fault"] = env.faults()
    num_envs, device = env.num_envs, env.device
    tiles, agents = -(-num_envs // TILE_BLOCK), env.layout.num_agents
    return _program(env.functions).prepare(
        "episode_metrics",
        LaunchShape(tiles, threads_per_item=TILE_BLOCK, threads_per_block=TILE_BLOCK, work=num_envs * agents),
        **tensors,
        **{f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()},
        bounds=bounds,
        before=before,
        latest=latest,
        sums=sums,
        parts=torch.zeros(tiles * (len(sums) - 1), dtype=torch.float64, device=device),
        ticket=torch.zeros(1, dtype=torch.int32, device=device),
        num_envs=num_envs,
        agents=agents,
        roles=len(bounds) - 1,
        clears=clears,
    )
