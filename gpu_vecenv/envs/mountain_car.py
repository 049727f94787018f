"""MountainCar: an underpowered car in a valley; three actions."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import param
from gpu_vecenv.envs.mountain_car_base import MountainCarBase


@dataclass(frozen=True, kw_only=True)
class MountainCar(MountainCarBase):
    """The motor accelerates left, not at all or right. Rules and defaults of Gymnasium's MountainCar-v0."""

    force: float = param(0.001, low=0, high=1e6)  # of the motor, per step^2
    max_steps: int = param(200, low=1)  # steps until the episode is truncated

    title = "MountainCar"
    reward_threshold = -110.0
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 10_000_000,
            "num_steps": 200,
            "num_epochs": 2,
            "num_minibatches": 200,
            "learning_rate": 0.002,
            "gae_lambda": 0.98,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    sample_efficient_preset = MappingProxyType(
        {
            "num_envs": 64,
            "total_steps": 998_400,
            "num_steps": 200,
            "num_epochs": 8,
            "num_minibatches": 50,
            "learning_rate": 0.001,
            "gae_lambda": 0.98,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )

    @property
    def action_space(self) -> Discrete:
        return Discrete(3)  # accelerate to the left, not at all, to the right
