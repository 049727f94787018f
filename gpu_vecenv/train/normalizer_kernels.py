"""Launches of the kernels of normalizers: moments of a rollout's samples, and the update from them.

``Normalizer.moments`` and ``Normalizer.update_from_moments`` in ``normalizers.py`` are their reference in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.env_ranges import EnvRanges
from gpu_vecenv.train.normalizers import Normalizer
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.train.rollout_storage import Rollout

MOMENTS_BLOCK = 256  # threads per block; the same as MOMENTS_BLOCK in normalizers.cu
TILE_ROWS = 1024  # samples that a block adds up; the same as TILE_ROWS in normalizers.cu
MAX_LANE_BITS = 5  # of the number of neighbouring threads that read neighbouring numbers of an observation

OBS_MOMENTS = KernelSignature(
    "obs_moments",
    (
        Array("obs", None, const=True, strided=True),
        Scalar("bytes", boolean),  # uint8, otherwise float32
        Scalar("stride", i64),  # elements from one agent's observation to the next agent's
        Array("offsets", i64, const=True, shape=("size",)),
        Array("indices", i64, const=True, shape=("rows",)),
        Array("active", boolean, const=True),
        Array("acting", boolean, const=True, optional=True),
        Array("mean", f64, const=True, shape=("size",)),
        Array("moments", f64),
        Array("parts", f64),
        Array("tickets", i32),
        Scalar("rows", i64),
        Scalar("size", i64),
        Scalar("lanes", i64),  # a power of two
        Scalar("groups", i64),  # of lanes in a block
        Scalar("lane_bits", i32),
        Scalar("lane_mask", i32),
    ),
)
REWARD_MOMENTS = KernelSignature(
    "reward_moments",
    (
        Array("rewards", f32, const=True),
        Array("terminations", boolean, const=True),
        Array("truncations", boolean, const=True),
        Array("active", boolean, const=True),
        Array("indices", i64, const=True, shape=("rows",)),  # of the first step
        Array("reward_sums", f32, shape=("rows",)),
        Array("mean", f64, const=True, shape=()),
        Array("moments", f64, shape=(3,)),
        Array("parts", f64),
        Array("ticket", i32, shape=()),
        Scalar("gamma", f32),
        Scalar("num_steps", i64),
        Scalar("step", i64),  # samples from one step to the next
        Scalar("rows", i64),
    ),
)
UPDATE_NORMALIZER = KernelSignature(
    "update_normalizer",
    (
        Array("mean", f64, shape=("size",)),
        Array("var", f64, shape=("size",)),
        Array("count", f64, shape=()),
        Array("moments", f64),
        Scalar("size", i64),
    ),
)


def _program(functions: FunctionManager) -> Program:
    kernels = [OBS_MOMENTS, REWARD_MOMENTS, UPDATE_NORMALIZER]
    return functions.compile(cuda_folder() / "learner/normalizers.cu", kernels=kernels)


@dataclass(frozen=True)
class NormalizerUpdate:
    """The update of one normalizer.

    Attributes:
        add_samples: Adds the moments of a rollout's active samples to ``moments``.
        moments: (1 + 2 * size,) float64, as ``Normalizer.moments`` has them.
        apply: Updates the normalizer from ``moments`` and sets these to 0.
    """

    add_samples: Callable[[], None]
    moments: torch.Tensor
    apply: Launch


def update_launch(functions: FunctionManager, normalizer: Normalizer, moments: torch.Tensor) -> Launch:
    """A launch that updates a normalizer from ``moments``, (1 + 2 * size,) float64, and sets these to 0."""
    size = normalizer.mean.numel()
    statistics = {"mean": normalizer.mean, "var": normalizer.var, "count": normalizer.count}
    shape = LaunchShape(MOMENTS_BLOCK, threads_per_block=MOMENTS_BLOCK, work=size)
    return _program(functions).prepare("update_normalizer", shape, **statistics, moments=moments, size=size)


def obs_update(normalizer: Normalizer, rollout: Rollout, view: RoleView, indices: torch.Tensor) -> NormalizerUpdate:
    """Of observations.

    Args:
        normalizer: Of the role's observations.
        rollout: The samples.
        view: Of the role.
        indices: (rows,) int64, its samples, which count through (T, E, A).
    """
    functions, table = rollout.env.functions, rollout.obs[:-1].flatten(0, 2)
    offsets = torch.arange(table[0].numel(), device=table.device).view(table[0].shape)[tuple(view.obs_slice)]
    launch, moments = moments_launch(
        functions,
        table,
        offsets.flatten().contiguous(),
        indices,
        rollout.learned,
        normalizer.mean,
        acting=rollout.acting,
    )
    return NormalizerUpdate(launch, moments, update_launch(functions, normalizer, moments))


def state_update(
    normalizer: Normalizer, rollout: Rollout, view: RoleView, indices: torch.Tensor, envs: EnvRanges
) -> NormalizerUpdate:
    """Of a central critic's states, of the steps at which any of the view's agents is active.

    Of states with parts that are an agent's own those of active agents.

    Args:
        normalizer: Of the states.
        rollout: The samples.
        view: Of the policy's agents.
        indices: (rows,) int64, their samples, which count through (T, E, A).
        envs: The environments in which it acts.
    """
    functions, states = rollout.env.functions, rollout.critic_states()[:-1]
    table = states.flatten(0, 2)
    rows, offsets = (torch.arange(n, device=table.device) for n in table.shape)
    if states.shape[2] > 1:
        own_launch, moments = moments_launch(functions, table, offsets, indices, rollout.learned, normalizer.mean)
        return NormalizerUpdate(own_launch, moments, update_launch(functions, normalizer, moments))
    active = torch.zeros(rollout.active[:-1].shape[:2], dtype=torch.bool, device=table.device)
    own_rows = envs.of(rows.view(active.shape), 1).flatten().contiguous()
    launch, moments = moments_launch(functions, table, offsets, own_rows, active, normalizer.mean)

    def add_samples() -> None:
        torch.any(rollout.learned[:-1, :, view.agents], -1, out=active)
        launch()

    return NormalizerUpdate(add_samples, moments, update_launch(functions, normalizer, moments))


def moments_launch(
    functions: FunctionManager,
    table: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    active: torch.Tensor,
    mean: torch.Tensor,
    acting: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor]:
    """A launch that adds the moments of rows to a tensor, (1 + 2 * size,) float64, and this tensor.

    Args:
        functions: The FunctionManager of the tensors' device.
        table: (n, …) float32 or uint8; its rows may have a stride.
        offsets: (size,) int64, of the numbers in a row.
        indices: (rows,) int64, of rows of the table.
        active: n bools: where they are False, rows do not count.
        mean: (…) float64, size numbers from which deviations are taken.
        acting: n bools: rows do not count where they are False either; None: only ``active`` decides.
    """
    device, rows, size = indices.device, len(indices), mean.numel()
    lane_bits = min(MAX_LANE_BITS, max(0, size - 1).bit_length())
    tiles, columns = -(-rows // TILE_ROWS), -(-size >> lane_bits)
    moments = torch.zeros(1 + 2 * size, dtype=torch.float64, device=device)
    launch = _program(functions).prepare(
        "obs_moments",
        LaunchShape(tiles * columns, threads_per_item=MOMENTS_BLOCK, threads_per_block=MOMENTS_BLOCK, work=rows * size),
        obs=table,
        bytes=table.dtype == torch.uint8,
        stride=table.stride(0),
        offsets=offsets,
        indices=indices,
        active=active,
        acting=acting,
        mean=mean,
        moments=moments,
        parts=torch.zeros(3 * tiles * columns << lane_bits, dtype=torch.float64, device=device),
        tickets=torch.zeros(max(1, columns), dtype=torch.int32, device=device),
        rows=rows,
        size=size,
        lanes=1 << lane_bits,
        groups=MOMENTS_BLOCK >> lane_bits,
        lane_bits=lane_bits,
        lane_mask=(1 << lane_bits) - 1,
    )
    return launch, moments


def reward_update(
    normalizer: Normalizer, rollout: Rollout, indices: torch.Tensor, reward_sums: torch.Tensor, gamma: float
) -> NormalizerUpdate:
    """Of discounted sums of rewards.

    Args:
        normalizer: Of the returns.
        rollout: The samples.
        indices: (T * rows,) int64, the policy's samples, which count through (T, E, A).
        reward_sums: (E, …) float32, rows in all: the sums of each agent's episode so far; the launch continues them.
        gamma: The discount.
    """
    functions, device, rows = rollout.env.functions, indices.device, reward_sums.numel()
    moments, tiles = torch.zeros(3, dtype=torch.float64, device=device), -(-rows // MOMENTS_BLOCK)
    launch = _program(functions).prepare(
        "reward_moments",
        LaunchShape(
            tiles, threads_per_item=MOMENTS_BLOCK, threads_per_block=MOMENTS_BLOCK, work=rollout.rewards.numel()
        ),
        rewards=rollout.rewards,
        terminations=rollout.terminations,
        truncations=rollout.truncations,
        active=rollout.learned,
        indices=indices[:rows],
        reward_sums=reward_sums,
        mean=normalizer.mean,
        moments=moments,
        parts=torch.zeros(3 * tiles, dtype=torch.float64, device=device),
        ticket=torch.zeros(1, dtype=torch.int32, device=device),
        gamma=gamma,
        num_steps=len(rollout.rewards),
        step=rollout.rewards[0].numel(),
        rows=rows,
    )
    return NormalizerUpdate(launch, moments, update_launch(functions, normalizer, moments))
