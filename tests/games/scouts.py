"""Scouts and a pilot: roles with images of their own sizes and Discrete choices of their own number, masked."""

from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, i32, param, u8


@dataclass(frozen=True, kw_only=True)
class Scouts(Env):
    """Everybody counts up; scouts leave one after the other, the pilot stays."""

    num_scouts: int = param(2, low=0)
    max_steps: int = param(6, low=1)

    state = (Field("colour", i32, ("num_agents",)),)
    masks_actions = True
    obs_dtype = np.dtype(u8)
    obs_shape = {"scout": (1, 2, 3), "pilot": (2, 3, 3)}  # noqa: RUF012
    action_space = {"scout": Discrete(2), "pilot": Discrete(4)}  # noqa: RUF012

    @property
    def roles(self):
        return {"scout": self.num_scouts, "pilot": 1}
