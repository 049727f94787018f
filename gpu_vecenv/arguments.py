"""Checks of what callers hand to an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpu_vecenv.data_manager import TORCH_TYPES, ArrayLike
from gpu_vecenv.env import Env, Field
from gpu_vecenv.errors import ConfigError, InvalidSeedError


def count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer argument in its range, or TypeError, ValueError."""
    expected = f"an int >= {least}" + ("" if most is None else f" and <= {most}")
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected {expected}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; expected {expected}")
    return int(value)


def checked_seed(seed: Any) -> int:
    """A seed, or InvalidSeedError."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise InvalidSeedError(f"reset: seed is {seed!r} ({type(seed).__name__}); expected an int in [0, 2**64 - 1]")
    if not 0 <= seed < 2**64:
        raise InvalidSeedError(f"reset: seed is {seed}; expected an int in [0, 2**64 - 1]")
    return int(seed)


def _checked_array(game: Env, what: str, field: Field, array: ArrayLike, shape: tuple[int, ...]) -> ArrayLike:
    if not isinstance(array, np.ndarray | torch.Tensor):
        raise TypeError(f"{what}: {field.name!r} is a {type(array).__name__}; expected an array")
    if tuple(array.shape) != shape or _torch_type(array) != TORCH_TYPES[field.dtype]:
        raise ConfigError(
            f"{type(game).__name__}, {what}: {field.name!r} is {tuple(array.shape)} {array.dtype}; "
            f"expected {shape} {field.dtype}"
        )
    return array


def _torch_type(array: ArrayLike) -> torch.dtype | None:
    return array.dtype if isinstance(array, torch.Tensor) else TORCH_TYPES.get(array.dtype)


def shared_arrays(game: Env, given: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Shared field -> its values: the game's own, overridden by those given; or ConfigError."""
    fields = {field.name: field for field in game.state if field.shared}
    arrays = {**game.arrays(), **given}
    if set(arrays) != set(fields):
        missing, unknown = sorted(set(fields) - set(arrays)), sorted(set(arrays) - set(fields))
        raise ConfigError(
            f"{type(game).__name__}: arrays must give its shared fields {sorted(fields)}; "
            f"missing {missing}, unknown {unknown}"
        )
    return {name: _checked_array(game, "arrays", f, arrays[name], game.shape(f)) for name, f in fields.items()}


def pool_arrays(game: Env, given: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Field -> its saved starts, the same number for each field; or ConfigError."""
    fields = {field.name: field for field in game.state if not field.shared}
    if unknown := sorted(set(given) - set(fields)):
        raise ConfigError(f"{type(game).__name__}, starts: unknown fields {unknown}; known: {sorted(fields)}")
    sizes = {len(array) if np.ndim(array) else 0 for array in given.values()}  # type checked with the shape
    if given and (len(sizes) > 1 or 0 in sizes):
        raise ConfigError(
            f"{type(game).__name__}, starts: every field needs the same number of starts, at least 1; "
            f"{', '.join(map(repr, given))} have {sorted(sizes)}: expected one number"
        )
    return {
        name: _checked_array(game, "starts", fields[name], array, (len(array), *game.shape(fields[name])))
        for name, array in given.items()
    }
