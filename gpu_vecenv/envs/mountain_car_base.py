"""Base of the two mountain cars: state, limits, picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.declare.drawing import BLACK, GOLD, GREY, PALE, Drawing, Line, Polygon, discs
from gpu_vecenv.declare.env import Env, Field, f32, param
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MountainCarBase(Env):
    """An underpowered car in a valley. Abstract: a subclass declares the action."""

    min_position: float = param(-1.2, low=-1e6, high=1e6)  # position of a wall that stops the car
    max_position: float = param(0.6, low=-1e6, high=1e6)  # the car cannot go further
    max_speed: float = param(0.07, low=0, high=1e6)  # per step
    goal_position: float = param(0.5, low=-1e6, high=1e6)  # of the flag, at or beyond which the episode ends
    goal_velocity: float = param(0.0, low=-1e6, high=1e6)  # per step: minimum velocity at the flag
    gravity: float = param(0.0025, low=0, high=1e6)  # per step^2, on the steepest slope
    reset_low: float = param(-0.6, low=-1e6, high=1e6)  # lower bound of the initial position
    reset_high: float = param(-0.4, low=-1e6, high=1e6)  # upper bound of the initial position

    state: ClassVar[tuple[Field, ...]] = (
        Field("position", f32),  # in [min_position, max_position]
        Field("velocity", f32),  # per step, in [-max_speed, max_speed]
    )
    termination_label: ClassVar[str] = "the car reached the flag"
    reset_options: ClassVar[tuple[str, ...]] = ("low", "high")
    gymnasium_time_limit: ClassVar[bool] = True

    def validate(self) -> None:
        for low, high in (("min_position", "max_position"), ("reset_low", "reset_high")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"{type(self).__name__}.{low} = {getattr(self, low)} exceeds {high} = {getattr(self, high)}"
                )

    def initial_ranges(self, options: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        return {"position": (options.get("low", self.reset_low), options.get("high", self.reset_high))}

    @property
    def observation_space(self) -> Box:
        low = np.array([self.min_position, -self.max_speed], np.float32)
        high = np.array([self.max_position, self.max_speed], np.float32)
        return Box(low, high, dtype=np.float32)

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        low, high, goal, car = self.min_position, self.max_position, self.goal_position, float(state["position"])
        xs = np.linspace(low, high, 200)
        ground = np.stack([xs, _height(xs)], 1)
        foot = _height(goal)
        slope = math.atan(3 * 0.45 * math.cos(3 * car))
        turn = np.array([[math.cos(slope), math.sin(slope)], [-math.sin(slope), math.cos(slope)]])
        body = np.array([(-0.06, 0.02), (-0.06, 0.06), (-0.03, 0.08), (0.03, 0.08), (0.06, 0.06), (0.06, 0.02)])
        wheels = np.array([(-0.035, 0.02), (0.035, 0.02)])
        position = np.array([car, _height(car)])
        shapes = [
            Polygon([*ground, (high, -1), (low, -1)], PALE),
            Line(ground, 0.008, GREY),
            Line([(goal, foot), (goal, foot + 0.16)], 0.006, BLACK),
            Polygon([(goal, foot + 0.16), (goal, foot + 0.1), (goal + 0.08, foot + 0.13)], GOLD),
            Polygon(body @ turn + position, BLACK),
            *discs(wheels @ turn + position, 0.02, GREY),
        ]
        return Drawing((low - 0.1, high + 0.1, 0, 1.25), shapes, height=400)


def _height(x: Any) -> Any:
    return 0.55 + 0.45 * np.sin(3 * x)
