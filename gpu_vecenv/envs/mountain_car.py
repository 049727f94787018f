"""A car too weak for its hill, which must swing up; three actions."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.env import param
from gpu_vecenv.envs.valley import Valley


@dataclass(frozen=True, kw_only=True)
class MountainCar(Valley):
    """The motor drives to the left, to the right or not. Rules and defaults of Gymnasium's MountainCar-v0."""

    force: float = param(0.001, low=0, high=1e6)  # of the motor, per tick^2
    max_steps: int = param(200, low=1)  # ticks until the episode is truncated

    title = "MountainCar"

    @property
    def action_space(self) -> Discrete:
        return Discrete(3)  # accelerate to the left, not at all, to the right
