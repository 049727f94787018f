"""A game as wide as one likes: replicas of many cells, of many agents, or of agents that see much."""

from dataclasses import dataclass
from typing import Literal

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param, u8


@dataclass(frozen=True, kw_only=True)
class Wide(Env):
    """Every number that is seen depends on the replica's own random mark, on its place and on the step."""

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
