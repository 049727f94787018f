"""Launch of the kernel that finds the results of episodes against opponents; random numbers of their choice."""

from __future__ import annotations

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import Launch
from gpu_vecenv.declare.field import boolean, f32, f64, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.rollout_storage import Rollout

OPPONENT_RESULTS = KernelSignature(
    "opponent_results",
    (
        Array("rewards", f32, const=True),
        Array("active", boolean, const=True),
        Array("learns", boolean, const=True, shape=("all_envs", "agents")),
        Array("sums", f64, shape=("num_envs", 2)),
        Array("counts", i64, shape=("num_envs", 3)),
        Scalar("first_env", i64),
        Scalar("num_envs", i64),
        Scalar("all_envs", i64),
        Scalar("agents", i64),
        Scalar("num_steps", i64),
    ),
)


def results_launch(
    rollout: Rollout, learns: torch.Tensor, first_env: int, *, sums: torch.Tensor, counts: torch.Tensor
) -> Launch:
    """A launch that finds the results of the episodes that ended in a rollout.

    Args:
        rollout: The rollout of E environments with A agents.
        learns: (E, A) bool, the agents of the side that learns.
        first_env: The first of the environments, which are the last of the rollout.
        sums: (n, 2) float64, rewards of the learning side and of the others in each environment's episode so far; the
            launch continues them. NaN: the episode does not count.
        counts: (n, 3) int64, where the learning side's wins, draws and games are written.
    """
    num_steps, all_envs, agents = rollout.rewards.shape
    program = rollout.env.functions.compile(cuda_folder() / "learner/opponents.cu", kernels=[OPPONENT_RESULTS])
    return program.prepare(
        "opponent_results",
        LaunchShape(len(sums), threads_per_block=32, work=rollout.rewards.numel()),
        rewards=rollout.rewards,
        active=rollout.active,
        learns=learns,
        sums=sums,
        counts=counts,
        first_env=first_env,
        num_envs=len(sums),
        all_envs=all_envs,
        agents=agents,
        num_steps=num_steps,
    )


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """A bijective hash of int64, the finaliser of SplitMix64: Steele, Lea and Flood, 2014."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def uniform_numbers(seed: int, clock: torch.Tensor, out: torch.Tensor) -> None:
    """Numbers in (0, 1): a function of the seed, the clock and a number's index alone, the same on every device.

    Args:
        seed: In [0, 2**64).
        clock: () int64.
        out: (…) float64.
    """
    word = torch.full((), _signed(seed), device=out.device)
    key = _splitmix64(_splitmix64(word) + clock)
    numbers = _splitmix64(key + torch.arange(1, out.numel() + 1, device=out.device) * _signed(0x9E3779B97F4A7C15))
    out.copy_(((_shifted(numbers, 12).double() + 0.5) * 2.0**-52).view_as(out))
