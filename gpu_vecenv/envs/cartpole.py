"""CartPole: a pole on a cart, kept upright by pushing the cart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLACK, BROWN, GREY, Circle, Drawing, Line, Polygon
from gpu_vecenv.declare.env import Env, Field, f32, param
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Cartpole(Env):
    """Pushes to the left and right keep the pole upright. Rules and defaults of Gymnasium's CartPole-v1."""

    gravity: float = param(9.8, low=0, high=1e6)  # m/s^2
    cart_mass: float = param(1.0, low=1e-3, high=1e6)  # kg
    pole_mass: float = param(0.1, low=1e-3, high=1e6)  # kg
    half_length: float = param(0.5, low=1e-3, high=1e6)  # m, from the joint to the pole's centre of mass
    force_mag: float = param(10.0, low=0, high=1e6)  # N, of a push
    dt: float = param(0.02, low=1e-6, high=1e3)  # s, of a step
    semi_implicit: bool = False  # True: semi-implicit Euler; False: explicit Euler
    x_threshold: float = param(2.4, low=0, high=1e6)  # m: the episode ends where |x| is larger
    theta_threshold: float = param(math.radians(12), low=0, high=1e6)  # rad: the episode ends where |theta| is larger
    reset_low: float = param(-0.05, low=-1e6, high=1e6)  # m, m/s, rad, rad/s: lower bound of the initial state
    reset_high: float = param(0.05, low=-1e6, high=1e6)  # m, m/s, rad, rad/s: upper bound of the initial state
    sutton_barto_reward: bool = False  # True: -1 on termination, else 0; False: 1 at every step, the last one included
    max_steps: int = param(500, low=1)  # steps until the episode is truncated

    state = (
        Field("x", f32),  # m, of the cart
        Field("x_dot", f32),  # m/s
        Field("theta", f32),  # rad, 0 is upright
        Field("theta_dot", f32),  # rad/s
    )
    termination_label = "the pole fell or the cart left the track"
    render_fps = 50
    title = "CartPole"
    reset_options = ("low", "high")
    gymnasium_time_limit = True
    reward_threshold = 475.0
    preset = MappingProxyType(
        {
            "num_envs": 64,
            "total_steps": 500_000,
            "num_steps": 32,
            "num_epochs": 8,
            "learning_rate": 0.002,
            "entropy_coefficient": 0.0,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    sample_efficient_preset = MappingProxyType(
        {
            "num_envs": 8,
            "total_steps": 99_840,
            "num_steps": 64,
            "num_epochs": 10,
            "learning_rate": 0.002,
            "final_clip": 0.0,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "entropy_coefficient": 0.0,
            "shared_trunk": False,
        }
    )
    version = 1

    def validate(self) -> None:
        if self.reset_low > self.reset_high:
            raise ConfigError(f"Cartpole.reset_low = {self.reset_low} exceeds reset_high = {self.reset_high}")

    def initial_ranges(self, options: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        bounds = options.get("low", self.reset_low), options.get("high", self.reset_high)
        return dict.fromkeys(("x", "x_dot", "theta", "theta_dot"), bounds)

    @property
    def observation_space(self) -> Box:
        high = np.array([2 * self.x_threshold, np.inf, 2 * self.theta_threshold, np.inf], np.float32)
        return Box(-high, high, dtype=np.float32)

    @property
    def action_space(self) -> Discrete:
        return Discrete(2)  # push to the left, to the right

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        x, angle, pole = float(state["x"]), float(state["theta"]), 2 * self.half_length
        left, right, bottom, top = x - 0.2 * pole, x + 0.2 * pole, -0.2 * pole, 0.04 * pole
        end = self.x_threshold
        shapes = [
            Line([(-end, bottom), (end, bottom)], 0.02 * pole, GREY),
            Polygon([(left, bottom), (left, top), (right, top), (right, bottom)], BLACK),
            Line([(x, 0), (x + pole * math.sin(angle), pole * math.cos(angle))], 0.08 * pole, BROWN),
            Circle(x, 0, 0.03 * pole, GREY),
        ]
        half = end + 0.5 * pole
        return Drawing((-half, half, -1.1 * pole, 1.1 * pole), shapes, height=400)
