"""A car too weak for its hill, which must swing up; the action is the motor's force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.drawing import Drawing
from gpu_vecenv.env import Env, Field, f32, param
from gpu_vecenv.envs.mountain_car import drawn_hill
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ContinuousMountainCar(Env):
    """The motor may be throttled. Rules and defaults of Gymnasium's MountainCarContinuous-v0."""

    min_position: float = param(-1.2, low=-1e6, high=1e6)  # where a wall stops the car
    max_position: float = param(0.6, low=-1e6, high=1e6)  # which the car does not pass
    max_speed: float = param(0.07, low=0, high=1e6)  # per tick
    goal_position: float = param(0.45, low=-1e6, high=1e6)  # of the flag, at or beyond which the episode ends
    goal_velocity: float = param(0.0, low=-1e6, high=1e6)  # per tick, with which at least the flag must be reached
    power: float = param(0.0015, low=0, high=1e6)  # per tick^2, of the motor at action 1
    gravity: float = param(0.0025, low=0, high=1e6)  # per tick^2, on the steepest slope
    goal_reward: float = param(100.0, low=-1e6, high=1e6)  # added at the flag
    action_cost: float = param(0.1, low=-1e6, high=1e6)  # times the square of the action, taken at every tick
    start_low: float = param(-0.6, low=-1e6, high=1e6)  # least position at the start
    start_high: float = param(-0.4, low=-1e6, high=1e6)  # largest position at the start
    max_steps: int = param(999, low=1)  # ticks until the episode is truncated

    state = (
        Field("position", f32),  # in [min_position, max_position]
        Field("velocity", f32),  # per tick, in [-max_speed, max_speed]
    )
    terminated_means = "the car reached the flag"
    title = "MountainCarContinuous"

    def validate(self) -> None:
        for low, high in (("min_position", "max_position"), ("start_low", "start_high")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"ContinuousMountainCar.{low} = {getattr(self, low)} exceeds {high} = {getattr(self, high)}"
                )

    @property
    def observation_space(self) -> Box:
        low = np.array([self.min_position, -self.max_speed], np.float32)
        high = np.array([self.max_position, self.max_speed], np.float32)
        return Box(low, high, dtype=np.float32)

    @property
    def action_space(self) -> Box:
        return Box(-1.0, 1.0, (1,), np.float32)  # of the motor's power

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        return drawn_hill(self.min_position, self.max_position, self.goal_position, float(state["position"]))
