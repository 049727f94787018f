"""Reward shaping in Python: a function of the caller's gives the rewards that policies are trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from gpu_vecenv.train.user_functions import naming, qualified_name


class Transition(NamedTuple):
    """One step of E environments with A agents, as ``VecEnv.step`` in "next_step" mode takes and gives it.

    All tensors are on the environment's device. Rows of agents that are not active, because they have left the game or
    because this step only resets their environment, count nowhere, whatever their reward.

    Attributes:
        obs: (E, A, *obs_shape), before the step; smaller roles are zero-padded.
        actions: As the environment took them: (E, A[, heads]) int32; of a Box (E, A, n) float32.
        rewards: (E, A) float32, the game's own.
        next_obs: Like ``obs``, after the step and before any reset.
        terminations: (E, A) bool.
        truncations: (E, A) bool.
        active: (E, A) bool, agents whose reward counts; all of them acted, unless the game declares turns or team
            reward.
    """

    obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_obs: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor
    active: torch.Tensor


RewardFunction: TypeAlias = Callable[[Transition], torch.Tensor]  # returns rewards, (E, A) float32


class Shaping:
    """Calls a reward function and checks what it returns; no check reads values on the host.

    Args:
        reward: The function.

    Raises:
        TypeError: It is not callable.
    """

    def __init__(self, reward: RewardFunction) -> None:
        if not callable(reward):
            raise TypeError(
                f"reward is a {type(reward).__name__}; expected a function, Transition -> tensor of rewards, or None"
            )
        self.reward, self.name = reward, qualified_name(reward)

    def __call__(self, transition: Transition) -> torch.Tensor:
        """The rewards of a transition, (E, A) float32; 0 for agents that were not active.

        Raises:
            ConfigError: The function raised a TypeError or ValueError.
            TypeError: The function returned no tensor, or one of another dtype.
            ValueError: The shape or device is another, or the function wrote to the transition.
        """
        versions = [tensor._version for tensor in transition]
        with naming(self.name):
            shaped = self.reward(transition)
        like = transition.rewards
        if not isinstance(shaped, torch.Tensor):
            raise TypeError(f"{self.name} returned a {type(shaped).__name__}; expected a torch tensor")
        if shaped.dtype != torch.float32:
            raise TypeError(f"{self.name} returned {shaped.dtype}; expected torch.float32 (use .float())")
        if shaped.shape != like.shape or shaped.device != like.device:
            raise ValueError(
                f"{self.name} returned a tensor {tuple(shaped.shape)} on {shaped.device}; expected a reward for each "
                f"agent, (num_envs, num_agents) = {tuple(like.shape)} on {like.device}"
            )
        if written := [n for n, x, v in zip(Transition._fields, transition, versions, strict=True) if x._version != v]:
            raise ValueError(
                f"{self.name} wrote to {', '.join(written)} of its transition; expected new tensors: write to a clone()"
            )
        return torch.where(transition.active, shaped, 0.0)
