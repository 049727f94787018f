"""Fingerprints of trajectories: equal on CPU and GPU when every bit of every output and of the declared state is."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.compile.function_manager import FunctionManager, Launch
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import boolean, i32, i64, u64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.engine.vec_env import Info, VecEnv
from gpu_vecenv.files import cuda_folder

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Info]  # of a step

DIGEST_KERNEL = KernelSignature(
    "digest",
    (
        Array("data", None, const=True, shape=("num_envs", "count")),
        Scalar("size", i32),
        Scalar("is_float", boolean),
        Scalar("count", i64),
        Array("out", u64, shape=("num_envs",)),
        Scalar("num_envs", i64),
    ),
)


def source_sha256(game: Env) -> str:
    """SHA-256 of all text that decides the bits of a game and of its digests; the same on every device."""
    return hashlib.sha256(
        (game_source(game.layout) + (cuda_folder() / "engine/digest.cu").read_text(encoding="utf-8")).encode()
    ).hexdigest()


class Digest:
    """64 bits per environment, fed tensor after tensor, on their device."""

    def __init__(self, functions: FunctionManager, num_envs: int) -> None:
        self.program = functions.compile(cuda_folder() / "engine/digest.cu", kernels=[DIGEST_KERNEL])
        self.words = torch.zeros(num_envs, dtype=torch.int64, device=functions.device)
        self._launches: dict[tuple[torch.dtype, int], Launch] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Feed a tensor (num_envs, …)."""
        num_envs, count = len(self.words), math.prod(tensor.shape[1:])
        if tensor.ndim == 0 or tensor.shape[0] != num_envs:
            raise ValueError(f"digest: got {tuple(tensor.shape)}; expected ({num_envs}, …), environments first")
        if tensor.device != self.words.device:
            raise ValueError(f"digest: got a tensor on {tensor.device}; expected one on {self.words.device}")
        key = tensor.dtype, count
        if key not in self._launches:
            self._launches[key] = self.program.prepare(
                "digest",
                LaunchShape(num_envs, work=tensor.numel()),
                size=tensor.element_size(),
                is_float=tensor.is_floating_point(),
                count=count,
                out=self.words,
                num_envs=num_envs,
            )
        self._launches[key](data=tensor.contiguous())

    def add_outputs(self, *tensors: torch.Tensor) -> None:
        """Feed inputs or outputs of a step; with agents_as_envs a row counts for its environment."""
        for tensor in tensors:
            self.add(tensor.reshape(len(self.words), -1))

    def add_final_obs(self, final_obs: torch.Tensor, mask: torch.Tensor) -> None:
        """Feed last observations and their mask; what is not meant counts as 0."""
        rows = final_obs.reshape(mask.numel(), -1)
        self.add_outputs(mask, rows.masked_fill(~mask.reshape(-1, 1), 0))

    def add_reset(self, obs: torch.Tensor, info: Info) -> None:
        """Feed what ``VecEnv.reset`` returns."""
        self.add_outputs(obs, *_masks(info))

    def add_step(self, actions: torch.Tensor, outputs: Outputs) -> None:
        """Feed what ``VecEnv.step`` takes and returns."""
        *tensors, info = outputs
        self.add_outputs(actions, *tensors, *_masks(info))
        if "final_obs" in info:
            self.add_final_obs(info["final_obs"], info["_final_obs"])

    def add_state(self, env: VecEnv) -> None:
        """Feed the state that the game declares; shared fields belong to no environment and are left out."""
        for field in env.game.layout.fields:
            if not field.shared:
                self.add(env.state[field.name])

    def hex(self) -> str:
        """One digest of all environments, as 16 hexadecimal digits. Waits for the device."""
        words = self.words.cpu().numpy().astype(np.uint64)
        with np.errstate(over="ignore"):
            odd = np.uint64(2) * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
            return f"{int((words * odd).sum(dtype=np.uint64)):016x}"


def _masks(info: Info) -> list[torch.Tensor]:
    return [info[name] for name in ("active", "action_mask") if name in info]


def trajectory_digest(env: VecEnv, seed: int, steps: int, state_every: int = 1) -> Digest:
    """Reset, then step with random actions; every output and, every so many steps, the declared state is fed.

    With agents_as_envs each row counts for its environment.
    """
    digest = Digest(env.functions, env.num_envs)
    digest.add_reset(*env.reset(seed=seed))
    buffers = env.step_buffers()
    for step in range(steps):
        actions = env.sample_actions()
        digest.add_step(actions, env.step(actions, out=buffers))
        if (step + 1) % state_every == 0 or step + 1 == steps:
            digest.add_state(env)
    return digest
