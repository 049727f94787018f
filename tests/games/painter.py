"""One painter: an image as observation, a continuous action."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.declare.env import Env, Field, param, u8


@dataclass(frozen=True, kw_only=True)
class Painter(Env):
    """Paints the pixel it points at; a full line ends the episode."""

    height: int = param(4, low=1)
    width: int = param(5, low=1)
    max_steps: int = param(12, low=1)

    state = (Field("canvas", u8, ("height", "width")),)
    obs_dtype = np.dtype(np.uint8)
    action_space = Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32))

    @property
    def obs_shape(self):
        return (self.height, self.width, 3)


@dataclass(frozen=True, kw_only=True)
class Stencil(Painter):
    """Its observations are declared as flags."""

    source = Path(__file__).with_suffix(".cu")

    @property
    def observation_space(self):
        return Box(0, 1, self.obs_shape, np.uint8)
