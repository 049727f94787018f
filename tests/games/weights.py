"""A game that observes its parameters and derived constants; others of its parameters decide what may not vary."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.env import Env, Field, f32, param
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Weights(Env):
    """It observes its parameters and what follows from them, in Python and in C++."""

    k: float = 3.0  # as a macro, it would be part of many a header
    mass: float = param(2.0, low=0.0)
    lever: float = 0.7
    size: float = 2.0
    bound: float = 1.0
    slope: float = 1.0
    limit: float = 1.0
    branch: float = 1.0
    power: float = 1.0
    double: float = 1.0
    place: float = 1.0
    num_steps: int = 5
    text: str = "x"

    state = (
        Field("place", f32),
        Field("levels", f32, ("num_levels",), shared=True),
        Field("cells", f32, ("num_cells",)),
    )
    derived = ("total", "root", "cached", "sign", "squared")
    action_space = Discrete(2)

    @property
    def num_cells(self):
        return int(self.size)

    @property
    def num_levels(self):
        return 3

    @property
    def observation_space(self):
        return Box(-self.bound, np.inf, (12,), np.float32)

    @property
    def total(self):
        return self.mass * self.lever / 3 - 1

    @property
    def root(self):
        return -np.sqrt(np.float64(2) * self.mass * self.lever + abs(self.lever - 5))

    @cached_property
    def cached(self):
        return 1 / (3 - +self.mass)

    @property
    def sign(self):
        return 1.0 if self.branch > 0 else -1.0

    @property
    def squared(self):
        return self.power**2

    def arrays(self):
        return {"levels": np.linspace(0, self.slope, 3, dtype=np.float32)}

    def validate(self):
        if self.mass > 10 * self.lever:
            raise ConfigError(f"mass = {self.mass} exceeds ten times lever = {self.lever}")
