"""A game of any size: many cells, many agents, or large observations."""

from dataclasses import dataclass
from typing import Literal

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param, u8


@dataclass(frozen=True, kw_only=True)
class Wide(Env):
    """Every observed number depends on a random mark of the environment, on its position and on the step."""

    crowd: int = param(1, low=1)
    width: int = param(1, low=1)
    depth: int = param(1, low=1)
    max_steps: int = param(2, low=1)
    numbers: Literal["bytes", "floats"] = "bytes"

    state = (Field("mark", i32), Field("cell", u8, ("depth",)))
    action_space = Discrete(2)

    @property
    def roles(self):
        return {"agent": self.crowd}

    @property
    def obs_dim(self):
        return self.width

    @property
    def obs_dtype(self):
        return u8 if self.numbers == "bytes" else f32
