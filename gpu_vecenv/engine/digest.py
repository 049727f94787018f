"""Digests of trajectories: equal if all outputs and the declared state are bitwise equal, on any device."""

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
from gpu_vecenv.engine.vec_env import Info, Outputs, VecEnv
from gpu_vecenv.files import cuda_folder

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
    """SHA-256 of all sources that a game's outputs and digests depend on; the same on every device."""
    return hashlib.sha256(
        (game_source(game.layout) + (cuda_folder() / "engine/digest.cu").read_text(encoding="utf-8")).encode()
    ).hexdigest()


class Digest:
    """A digest of 64 bits per environment, updated on the device."""

    def __init__(self, functions: FunctionManager, num_envs: int) -> None:
        self.program = functions.compile(cuda_folder() / "engine/digest.cu", kernels=[DIGEST_KERNEL])
        self.words = torch.zeros(num_envs, dtype=torch.int64, device=functions.device)
        self._launches: dict[tuple[torch.dtype, int], Launch] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor (num_envs, …), of bool or of numbers of 8, 32 or 64 bits.

        Raises:
            ValueError, TypeError: The tensor is of other environments, on another device, or of another dtype.
        """
        num_envs, count = len(self.words), math.prod(tensor.shape[1:])
        if tensor.ndim == 0 or tensor.shape[0] != num_envs:
            raise ValueError(f"digest: got {tuple(tensor.shape)}; expected ({num_envs}, …), environments first")
        if tensor.device != self.words.device:
            raise ValueError(f"digest: got a tensor on {tensor.device}; expected one on {self.words.device}")
        if tensor.element_size() not in (1, 4, 8) or tensor.is_complex():
            raise TypeError(f"digest: got {tensor.dtype}; expected real elements of 1, 4 or 8 bytes: convert them")
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
        """Add inputs or outputs of a step; with ``agents_as_envs`` each row is added to its environment."""
        for tensor in tensors:
            self.add(tensor.reshape(len(self.words), -1))

    def add_final_obs(self, final_obs: torch.Tensor, mask: torch.Tensor) -> None:
        """Add final observations and their mask; rows outside the mask count as 0."""
        rows = final_obs.reshape(mask.numel(), -1)
        self.add_outputs(mask, rows.masked_fill(~mask.reshape(-1, 1), 0))

    def add_reset(self, obs: torch.Tensor, info: Info) -> None:
        """Add the outputs of ``VecEnv.reset``."""
        self.add_outputs(obs, *_masks(info))

    def add_step(self, actions: torch.Tensor, outputs: Outputs) -> None:
        """Add the actions and outputs of ``VecEnv.step``."""
        *tensors, info = outputs
        self.add_outputs(actions, *tensors, *_masks(info))
        if "final_obs" in info:
            self.add_final_obs(info["final_obs"], info["_final_obs"])

    def add_state(self, env: VecEnv) -> None:
        """Add the state that the game declares, without shared fields, which have no environment axis."""
        for field in env.game.layout.fields:
            if not field.shared:
                self.add(env.state[field.name])

    def hex(self) -> str:
        """The digest of all environments, 16 hexadecimal digits. Synchronises with the device."""
        words = self.words.cpu().numpy().astype(np.uint64)
        with np.errstate(over="ignore"):
            odd = np.uint64(2) * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
            return f"{int((words * odd).sum(dtype=np.uint64)):016x}"


def _masks(info: Info) -> list[torch.Tensor]:
    return [info[name] for name in ("active", "action_mask", "acting") if name in info]


def trajectory_digest(env: VecEnv, seed: int, steps: int, state_every: int = 1) -> Digest:
    """The digest of a reset and ``steps`` random steps: all outputs, and the state every ``state_every`` steps."""
    digest = Digest(env.functions, env.num_envs)
    digest.add_reset(*env.reset(seed=seed))
    buffers = env.step_buffers()
    for step in range(steps):
        actions = env.sample_actions()
        digest.add_step(actions, env.step(actions, out=buffers))
        if (step + 1) % state_every == 0 or step + 1 == steps:
            digest.add_state(env)
    return digest
