"""An economy: workers with MultiDiscrete actions, a planner with a Box of tax rates, clerks with Discrete actions."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class Economy(Env):
    """Workers earn more the farther right they work, and leave one after the other; the planner taxes them."""

    num_workers: int = param(3, low=1)
    num_clerks: int = param(1, low=0)
    num_rates: int = param(3, low=1)  # a tax, and subsidies
    length: int = param(4, low=2)
    max_steps: int = param(8, low=1)

    state = (Field("place", i32, ("num_workers",)), Field("rate", f32, ("num_rates",)))
    masks_actions = True
    obs_dim = {"worker": 3, "planner": 2, "clerk": 2}  # noqa: RUF012

    @property
    def roles(self):
        return {"worker": self.num_workers, "planner": 1, "clerk": self.num_clerks}

    @property
    def action_space(self):
        subsidies = self.num_rates - 1
        low, high = np.array([0.0] + subsidies * [-1.0], np.float32), np.array([1.0] + subsidies * [2.0], np.float32)
        # Of workers: left, stay, right; rest, work.
        return {"worker": MultiDiscrete([3, 2]), "planner": Box(low, high), "clerk": Discrete(4)}


@dataclass(frozen=True, kw_only=True)
class OpenEconomy(Economy):
    """Without masks: workers that would leave the road stay, and may work where they earn nothing."""

    masks_actions = False
    source = Path(__file__).with_suffix(".cu")
