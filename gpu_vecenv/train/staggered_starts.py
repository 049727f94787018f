"""Staggered starts: the first episode of each environment begins as if some of its steps had passed."""

from __future__ import annotations

import torch

from gpu_vecenv.engine.vec_env import VecEnv

# 2^64 divided by the golden ratio, odd, as an int64: multiples of it, modulo 2^64, are spread evenly however many they
# are (Knuth, "The art of computer programming", volume 3, section 6.4).
SPREAD = 0x9E3779B97F4A7C15 - 2**64


def staggered_steps(env: VecEnv) -> torch.Tensor:
    """The elapsed steps with which each environment's first episode begins, (num_envs,) int32 on its device.

    They are spread evenly over 0 … ``max_steps`` - 1, and a function of ``max_steps`` and of the environment's global
    index alone. All are 0 for games that declare no ``max_steps``.
    """
    limit = getattr(env.game, "max_steps", None)
    limit = limit if type(limit) is int and 0 < limit < 2**31 else 1
    index = torch.arange(env.num_envs, device=env.device) + env.first_env_index
    fraction = (index * SPREAD >> 32) & (2**32 - 1)  # in units of 2^-32
    return (fraction * limit >> 32).to(torch.int32)


def stagger(env: VecEnv) -> torch.Tensor:
    """Let the episodes that an environment has just begun be in the middle; observations change, see ``observe``.

    Returns:
        (num_envs,) bool: the environments whose episode is shorter for it.
    """
    steps = staggered_steps(env)
    env.elapsed_steps.copy_(steps)
    return steps > 0
