"""Wrappers of image observations: grayscale and downscaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.wrappers.base import ObservationWrapper, TensorEnv


class GrayscaleObservation(ObservationWrapper):
    """Convert uint8 images (height, width, 3) to (height, width), or (height, width, 1) with ``keep_dim``.

    Args:
        env: An environment whose observation space is a uint8 Box of such images with bounds 0 and 255.
        keep_dim: Keep the channel axis.

    Raises:
        TypeError, ValueError: The observation space is not of this kind.
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
        """Grayscale images, with the weights of Gymnasium."""
        red, green, blue = observations.double().unbind(-1)
        grey = (0.2125 * red + 0.7154 * green + 0.0721 * blue).to(torch.uint8)
        return grey.unsqueeze(-1) if self.keep_dim else grey


class ResizeObservation(ObservationWrapper):
    """Downscale uint8 images (height, width[, channels]): a new pixel is the mean of the area that it covers.

    Gymnasium's uses OpenCV, which may round a mean of x.5 the other way. It also enlarges images; this one does not.

    Args:
        env: An environment whose observation space is a uint8 Box of such images with bounds 0 and 255.
        shape: New height and width, at most the old ones.

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
        self._constants = [torch.from_numpy(_area_weights(old, new)) for old, new in sizes]
        self.single_observation_space = Box(0, 255, self.shape + box.shape[2:], np.uint8)

    def observations(self, observations: Tensor) -> Tensor:
        """Downscaled images."""
        rows, columns = self._constants
        images = observations.reshape(*observations.shape[:3], -1).float()
        small = torch.einsum("hy,wx,nyxc->nhwc", rows, columns, images)
        return small.round().to(torch.uint8).reshape(len(observations), *self.shape, *observations.shape[3:])


def _check_image(name: str, box: Box, axes: tuple[int, ...]) -> None:
    if len(box.shape) not in axes or box.dtype != np.uint8 or box.low.any() or (box.high != 255).any():
        raise ValueError(f"{name}: the observation space is {box}; expected images of uint8 with bounds 0 and 255")


def _area_weights(old: int, new: int) -> np.ndarray[Any, Any]:
    """Weights (new, old) float32 of the old pixels in the mean of each new pixel, which is old / new wide."""
    edges = np.arange(new + 1)[:, None] * (old / new)
    pixels = np.arange(old)
    covered = np.clip(np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels), 0, None)
    weights: np.ndarray[Any, Any] = (covered * (new / old)).astype(np.float32)
    return weights
