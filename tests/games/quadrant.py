"""A bright pixel of an image: which quarter is it in?"""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, i32, param, u8


@dataclass(frozen=True, kw_only=True)
class Quadrant(Env):
    """One step: the choice that names the quarter of the bright pixel is paid 1."""

    side: int = param(10, low=2)

    state = (Field("pixel", i32, (2,)),)
    obs_dtype = u8
    action_space = Discrete(4)

    @property
    def obs_shape(self):
        return (self.side, self.side, 1)
