"""MountainCarContinuous: an underpowered car in a valley; the action is the motor's force."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.declare.env import param
from gpu_vecenv.envs.mountain_car_base import MountainCarBase


@dataclass(frozen=True, kw_only=True)
class ContinuousMountainCar(MountainCarBase):
    """The action is the motor's force, clipped to [-1, 1]. Rules and defaults: Gymnasium's MountainCarContinuous-v0."""

    goal_position: float = param(0.45, low=-1e6, high=1e6)  # of the flag, at or beyond which the episode ends
    power: float = param(0.0015, low=0, high=1e6)  # per step^2, of the motor at action 1
    goal_reward: float = param(100.0, low=-1e6, high=1e6)  # added at the flag
    action_cost: float = param(0.1, low=-1e6, high=1e6)  # times the square of the action, subtracted at every step
    max_steps: int = param(999, low=1)  # steps until the episode is truncated

    clip_actions = False  # as in Gymnasium, the force is clipped, but the cost is that of the action as given
    title = "MountainCarContinuous"
    reward_threshold = 90.0
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 13_000_000,
            "num_steps": 256,
            "num_minibatches": 16,
            "learning_rate": 0.001,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    sample_efficient_preset = MappingProxyType(
        {
            "num_envs": 8,
            "total_steps": 20_000,
            "num_steps": 250,
            "num_epochs": 10,
            "num_minibatches": 25,
            "learning_rate": 0.002,
            "gamma": 0.9999,
            "gae_lambda": 0.98,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )

    @property
    def action_space(self) -> Box:
        return Box(-1.0, 1.0, (1,), np.float32)  # of the motor's power
