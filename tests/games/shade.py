"""A game whose observations and rewards are a table that all environments share."""

from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class Shade(Env):
    """Each step shows the table and pays its first entry."""

    max_steps: int = param(6, low=1)

    state = (
        Field("stage", i32, shared=True),
        Field("table", f32, (3,), shared=True),
    )
    obs_dim = 4
    action_space = Discrete(2)

    def arrays(self):
        return {"stage": np.array(1, np.int32), "table": np.zeros(3, np.float32)}
