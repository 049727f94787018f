"""Pendulum: a weak motor swings a pendulum up and holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.declare.drawing import BLACK, RED, Circle, Drawing, Line
from gpu_vecenv.declare.env import Env, Field, f32, param


@dataclass(frozen=True, kw_only=True)
class Pendulum(Env):
    """The goal is to swing the pendulum up and keep it upright. Rules and defaults of Gymnasium's Pendulum-v1."""

    gravity: float = param(10.0, low=0, high=1e6)  # m/s^2
    mass: float = param(1.0, low=1e-3, high=1e6)  # kg
    length: float = param(1.0, low=1e-3, high=1e6)  # m
    max_torque: float = param(2.0, low=0, high=1e6)  # N m
    max_speed: float = param(8.0, low=0, high=1e6)  # rad/s
    dt: float = param(0.05, low=1e-6, high=1e3)  # s, of a step
    reset_theta: float = param(math.pi, low=0, high=1e6)  # rad: the initial theta is uniform in [-this, this)
    reset_theta_dot: float = param(1.0, low=0, high=1e6)  # rad/s: likewise for theta_dot
    max_steps: int = param(200, low=1)  # steps until the episode is truncated

    state = (
        Field("theta", f32),  # rad, 0 is upright; outside [-pi, pi] by at most one step
        Field("theta_dot", f32),  # rad/s
    )
    render_fps = 20
    title = "Pendulum"
    reset_options = ("x_init", "y_init")  # Gymnasium's names of reset_theta and reset_theta_dot
    gymnasium_time_limit = True
    preset = MappingProxyType(
        {
            "num_envs": 64,
            "total_steps": 1_000_000,
            "num_steps": 64,
            "num_epochs": 10,
            "learning_rate": 0.001,
            "gamma": 0.9,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    sample_efficient_preset = MappingProxyType(
        {
            "num_envs": 4,
            "total_steps": 100_000,
            "num_steps": 1024,
            "num_epochs": 10,
            "num_minibatches": 64,
            "learning_rate": 0.001,
            "gamma": 0.9,
            "entropy_coefficient": 0.0,
            "shared_trunk": False,
        }
    )
    version = 1

    def initial_ranges(self, options: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        theta, theta_dot = options.get("x_init", self.reset_theta), options.get("y_init", self.reset_theta_dot)
        return {"theta": (-theta, theta), "theta_dot": (-theta_dot, theta_dot)}

    @property
    def observation_space(self) -> Box:
        high = np.array([1.0, 1.0, self.max_speed], np.float32)
        return Box(-high, high, dtype=np.float32)

    @property
    def action_space(self) -> Box:
        return Box(-self.max_torque, self.max_torque, (1,), np.float32)  # N m

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        angle, size = float(state["theta"]), self.length
        end = -size * math.sin(angle), size * math.cos(angle)  # counter-clockwise from upright
        half = 1.3 * size
        shapes = [Line([(0, 0), end], 0.2 * size, RED), Circle(0, 0, 0.05 * size, BLACK)]
        return Drawing((-half, half, -half, half), shapes, 500, 500)
