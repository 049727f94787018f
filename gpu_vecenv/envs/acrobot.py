"""Acrobot: two links that hang from a pivot and swing up by a torque on the joint between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLACK, BLUE, BROWN, GREY, Drawing, Line, discs
from gpu_vecenv.declare.env import Env, Field, f32, param
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Acrobot(Env):
    """The goal is to swing the tip above a height. Rules and defaults of Gymnasium's Acrobot-v1."""

    gravity: float = param(9.8, low=0, high=1e6)  # m/s^2
    link_length_1: float = param(1.0, low=0, high=1e6)  # m, from the pivot to the joint
    link_mass_1: float = param(1.0, low=1e-3, high=1e6)  # kg
    link_mass_2: float = param(1.0, low=1e-3, high=1e6)  # kg
    link_com_pos_1: float = param(0.5, low=0, high=1e6)  # m, from the pivot to the centre of mass of link 1
    link_com_pos_2: float = param(0.5, low=0, high=1e6)  # m, from the joint to the centre of mass of link 2
    link_moi: float = param(1.0, low=1e-3, high=1e6)  # kg m^2, moment of inertia of each link
    max_velocity_1: float = param(4 * math.pi, low=0, high=1e6)  # rad/s, of link 1
    max_velocity_2: float = param(9 * math.pi, low=0, high=1e6)  # rad/s, of link 2
    torque: float = param(1.0, low=0, high=1e6)  # N m, of actions 0 (negative) and 2 (positive)
    torque_noise_max: float = param(0.0, low=0, high=1e6)  # N m, of the noise: uniform in [-this, this), every step
    book_or_nips: Literal["book", "nips"] = "book"  # equations of Sutton and Barto's book, or of Sutton's paper
    goal_height: float = param(1.0, low=-2, high=2)  # of the tip above the pivot, for links of length 1
    dt: float = param(0.2, low=1e-6, high=1e3)  # s, of a step
    reset_low: float = param(-0.1, low=-1e6, high=1e6)  # rad, rad/s: lower bound of the initial state
    reset_high: float = param(0.1, low=-1e6, high=1e6)  # rad, rad/s: upper bound of the initial state
    max_steps: int = param(500, low=1)  # steps until the episode is truncated

    state = (
        Field("theta", f32, (2,)),  # rad: link 1 from hanging, link 2 from link 1; in [-pi, pi] after a step
        Field("theta_dot", f32, (2,)),  # rad/s
    )
    derived = ("nips",)
    termination_label = "the tip swung above the goal"
    render_fps = 15
    title = "Acrobot"
    reset_options = ("low", "high")
    gymnasium_time_limit = True
    reward_threshold = -100.0
    preset = MappingProxyType(
        {
            "num_envs": 64,
            "total_steps": 2_000_000,
            "num_steps": 128,
            "num_epochs": 8,
            "num_minibatches": 64,
            "learning_rate": 0.002,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    sample_efficient_preset = MappingProxyType(
        {
            "num_envs": 16,
            "total_steps": 1_000_000,
            "num_steps": 256,
            "num_epochs": 8,
            "num_minibatches": 16,
            "learning_rate": 0.001,
            "gae_lambda": 0.94,
            "entropy_coefficient": 0.0,
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    version = 1

    def validate(self) -> None:
        if self.reset_low > self.reset_high:
            raise ConfigError(f"Acrobot.reset_low = {self.reset_low} exceeds reset_high = {self.reset_high}")

    @property
    def nips(self) -> bool:
        """Whether the equations are the paper's."""
        return self.book_or_nips == "nips"

    def initial_ranges(self, options: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        bounds = options.get("low", self.reset_low), options.get("high", self.reset_high)
        return dict.fromkeys(("theta", "theta_dot"), bounds)

    @property
    def observation_space(self) -> Box:
        high = np.array([1, 1, 1, 1, self.max_velocity_1, self.max_velocity_2], np.float32)
        return Box(-high, high, dtype=np.float32)

    @property
    def action_space(self) -> Discrete:
        return Discrete(3)  # torque on the joint: negative, none, positive

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        first, second = float(state["theta"][0]), float(state["theta"].sum())
        joint = self.link_length_1 * math.sin(first), -self.link_length_1 * math.cos(first)
        tip = joint[0] + math.sin(second), joint[1] - math.cos(second)
        half = 1.1 * (self.link_length_1 + 1)
        shapes = [
            Line([(-half, self.goal_height), (half, self.goal_height)], 0.02, GREY),
            Line([(0, 0), joint], 0.16, BLUE),
            Line([joint, tip], 0.16, BROWN),
            *discs([(0, 0), joint], 0.06, BLACK),
        ]
        return Drawing((-half, half, -half, half), shapes, 500, 500)
