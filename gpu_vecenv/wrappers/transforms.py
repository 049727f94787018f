"""Functions of observations: whose row it is, grey images, small images. The rules of ``gpu_vecenv.wrappers`` hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.views.agents import role_of_agents
from gpu_vecenv.wrappers.base import ObservationWrapper, TensorEnv


class AgentIndicator(ObservationWrapper):
    """Observations that say whose they are: SuperSuit's ``agent_indicator_v0``, for rows that are agents.

    Behind the elements of a vector, or the channels of an image (height, width[, channels]), there is one for each
    agent in the order of ``game.layout.agent_names``, or for each role that has agents. The row's own holds the highest bound
    of the observation space if all are finite, else 1; the others hold 0. Rows of agents that have left keep theirs.

    Args:
        env: A GymnasiumVectorEnv, or one inside vector wrappers, whose observation space is a Box of 1 to 3 axes.
        type_only: Indicate roles, not agents.

    Raises:
        TypeError, ValueError: It is another environment or space.
    """

    def __init__(self, env: TensorEnv, type_only: bool = False) -> None:
        super().__init__(env)
        inner: Any = env.unwrapped
        game = getattr(inner, "game", None)
        if not isinstance(game, Env) or self.num_envs % game.layout.num_agents:
            raise TypeError(
                f"AgentIndicator: env is a {type(inner).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv"
            )
        box = self._box("observation", env.single_observation_space)
        if not 1 <= len(box.shape) <= 3:
            raise ValueError(f"AgentIndicator: observations have shape {box.shape}; expected 1 to 3 axes")
        roles = role_of_agents(game)
        labels = list(roles.values()) if type_only else list(roles)
        kinds = list(dict.fromkeys(labels))
        self._grid = () if len(box.shape) == 1 else box.shape[:2]
        own = (-1,) if len(box.shape) == 1 else (*self._grid, -1)
        value = box.high.max() if np.isfinite(box.high).all() else 1
        marks = np.zeros((game.layout.num_agents, len(kinds)), box.dtype)
        marks[range(game.layout.num_agents), [kinds.index(label) for label in labels]] = value
        self._constants = [torch.from_numpy(marks).repeat(self.num_envs // game.layout.num_agents, 1)]
        more = np.zeros((*self._grid, len(kinds)), box.dtype)
        low, high = (np.concatenate([b.reshape(own), m], -1) for b, m in ((box.low, more), (box.high, more + value)))
        self.single_observation_space = Box(low, high, dtype=box.dtype.type)

    def observations(self, observations: Tensor) -> Tensor:
        """With the row's mark."""
        (marks,), rows = self._constants, len(observations)
        if self._grid:
            marks = marks.view(rows, 1, 1, -1).expand(-1, *self._grid, -1)
            observations = observations.reshape(rows, *self._grid, -1)
        return torch.cat([observations, marks], -1)


class GrayscaleObservation(ObservationWrapper):
    """Images (height, width, 3) of bytes as (height, width), or (height, width, 1) with ``keep_dim``, with its weights.

    Args:
        env: An environment whose observation space is a Box of such images with bounds 0 and 255.
        keep_dim: Keep the axis of the channels.

    Raises:
        TypeError, ValueError: The space is another.
    """

    def __init__(self, env: TensorEnv, keep_dim: bool = False) -> None:
        super().__init__(env)
        box = self._box("observation", env.single_observation_space)
        _check_image(type(self).__name__, box, (3,))
        if box.shape[2:] != (3,):
            raise ValueError(f"GrayscaleObservation: images have shape {box.shape}; expected 3 channels")
        self.keep_dim = keep_dim
        self.single_observation_space = Box(0, 255, box.shape[:2] + (1,) * keep_dim, np.uint8)

    def observations(self, observations: Tensor) -> Tensor:
        """Grey."""
        red, green, blue = observations.double().unbind(-1)
        grey = (0.2125 * red + 0.7154 * green + 0.0721 * blue).to(torch.uint8)
        return grey.unsqueeze(-1) if self.keep_dim else grey


class ResizeObservation(ObservationWrapper):
    """Images (height, width[, channels]) of bytes made smaller: a new pixel is the mean of the area that it covers.

    Gymnasium's has OpenCV do that, which rounds halves by rules of its own, and so may give a mean of x.5 the other
    neighbour; and which enlarges by other means: here images do not grow.

    Args:
        env: An environment whose observation space is a Box of such images with bounds 0 and 255.
        shape: New height and width, at most the old.

    Raises:
        TypeError, ValueError: The space or the shape is wrong.
    """

    def __init__(self, env: TensorEnv, shape: tuple[int, int]) -> None:
        super().__init__(env)
        box = self._box("observation", env.single_observation_space)
        _check_image(type(self).__name__, box, (2, 3))
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise TypeError(f"ResizeObservation: shape is {shape!r}; expected a tuple of height and width")
        sizes = list(zip(box.shape[:2], shape, strict=True))
        self.shape = tuple(validate_int("shape", new, 1, old) for old, new in sizes)
        self._constants = [torch.from_numpy(_shares(old, new)) for old, new in sizes]
        self.single_observation_space = Box(0, 255, self.shape + box.shape[2:], np.uint8)

    def observations(self, observations: Tensor) -> Tensor:
        """Smaller."""
        rows, columns = self._constants
        images = observations.reshape(*observations.shape[:3], -1).float()
        small = torch.einsum("hy,wx,nyxc->nhwc", rows, columns, images)
        return small.round().to(torch.uint8).reshape(len(observations), *self.shape, *observations.shape[3:])


def _check_image(name: str, box: Box, axes: tuple[int, ...]) -> None:
    if len(box.shape) not in axes or box.dtype != np.uint8 or box.low.any() or (box.high != 255).any():
        raise ValueError(f"{name}: the observation space is {box}; expected images of uint8 with bounds 0 and 255")


def _shares(old: int, new: int) -> np.ndarray[Any, Any]:
    """(new, old) float32: which part of a new pixel, old / new wide, each old one is."""
    edges = np.arange(new + 1)[:, None] * (old / new)
    pixels = np.arange(old)
    covered = np.clip(np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels), 0, None)
    shares: np.ndarray[Any, Any] = (covered * (new / old)).astype(np.float32)
    return shares
