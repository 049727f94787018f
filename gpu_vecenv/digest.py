"""Fingerprints of trajectories: equal on CPU and GPU exactly when every bit of every output and of the state is."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from gpu_vecenv.backends import LaunchShape
from gpu_vecenv.env import device_folder
from gpu_vecenv.function_manager import FunctionManager
from gpu_vecenv.vec_env import VecEnv


class Digest:
    """64 bits per replica, fed tensor after tensor, on their device."""

    def __init__(self, functions: FunctionManager, num_envs: int) -> None:
        self.program = functions.compile(device_folder() / "digest.cu")
        self.words = torch.zeros(num_envs, dtype=torch.int64, device=functions.device)

    def add(self, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Feed a tensor (num_envs, …); only replicas where ``mask`` (num_envs, …) begins with True."""
        replicas, count = len(self.words), math.prod(tensor.shape[1:])
        for given in (tensor, tensor if mask is None else mask):
            if given.ndim == 0 or given.shape[0] != replicas:
                raise ValueError(f"digest: got {tuple(given.shape)}; expected ({replicas}, …), replicas first")
        stride = 0 if mask is None else math.prod(mask.shape[1:])
        self.program.prepare(
            "digest",
            LaunchShape(replicas, work=tensor.numel()),
            [
                tensor,
                np.int32(tensor.element_size()),
                np.int32(tensor.is_floating_point()),
                np.int64(count),
                mask,
                np.int64(stride),
                self.words,
                np.int64(replicas),
            ],
        )()

    def add_state(self, env: VecEnv) -> None:
        """Feed everything that an environment keeps per replica."""
        for tensor in env.state_dict().values():
            self.add(tensor)

    def hex(self) -> str:
        """One fingerprint of all replicas, as 16 hexadecimal digits. Waits for the device."""
        words = self.words.cpu().numpy().astype(np.uint64)
        with np.errstate(over="ignore"):
            odd = np.uint64(2) * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
            return f"{int((words * odd).sum(dtype=np.uint64)):016x}"


def trajectory_digest(env: VecEnv, seed: int, steps: int, state_every: int = 1) -> Digest:
    """Reset, then step with random actions; every output and, every so many steps, all state is fed."""
    digest = Digest(env.functions, env.num_envs)
    obs, info = env.reset(seed=seed)
    _feed(digest, [obs, info["active"]])
    slab = env.slab()
    for step in range(steps):
        actions = env.sample_actions()
        *outputs, info = env.step(actions, out=slab)
        _feed(digest, [actions, *outputs, info["active"]])
        if "final_obs" in info:
            digest.add(info["final_obs"], info["_final_obs"])
            digest.add(info["_final_obs"])
        if (step + 1) % state_every == 0 or step + 1 == steps:
            digest.add_state(env)
    return digest


def _feed(digest: Digest, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        digest.add(tensor)
