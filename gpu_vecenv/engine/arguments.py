"""Validation of the arguments of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium.vector
import numpy as np
import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.layout import FieldLayout, GameLayout
from gpu_vecenv.engine.data_manager import TORCH_TYPES, ArrayLike, tensor_of
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, InvalidSeedError

AutoresetMode = Literal["same_step", "next_step", "disabled"]
MODES: dict[AutoresetMode, int] = {"next_step": 0, "same_step": 1, "disabled": 2}  # step.cuh, enum AutoresetMode


def validate_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer argument in its range, or TypeError, ValueError."""
    expected = f"an int >= {least}" + ("" if most is None else f" and <= {most}")
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected {expected}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; expected {expected}")
    return int(value)


def construct(kind: type[Any], arguments: Mapping[str, Any]) -> Any:
    """An environment from its constructor's arguments. Module-level, because ``pickle`` and ``copy`` call it."""
    return kind(**arguments)


def validate_seed(seed: Any) -> int:
    """A seed, or InvalidSeedError."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise InvalidSeedError(f"reset: seed is {seed!r} ({type(seed).__name__}); expected an int in [0, 2**64 - 1]")
    if not 0 <= seed < 2**64:
        raise InvalidSeedError(f"reset: seed is {seed}; expected an int in [0, 2**64 - 1]")
    return int(seed)


def validate_seeds(seed: Any, num_envs: int) -> int | tuple[int, ...]:
    """One seed for all environments, or one for each; or InvalidSeedError."""
    shape = seed.shape if isinstance(seed, np.ndarray) else (len(seed),) if isinstance(seed, Sequence) else ()
    if shape == () or isinstance(seed, str | bytes):
        return validate_seed(seed)
    if shape != (num_envs,):
        raise InvalidSeedError(
            f"reset: seed has shape {shape}; expected one int, or one for each of the {num_envs} environments"
        )
    return tuple(map(validate_seed, seed))


def validate_autoreset_mode(mode: Any) -> AutoresetMode:
    """The autoreset mode by name: of a member of Gymnasium's AutoresetMode, its value or its name; or ValueError."""
    for known in MODES:
        if isinstance(mode, gymnasium.vector.AutoresetMode | str) and mode in (
            known,
            gymnasium.vector.AutoresetMode[known.upper()],
            gymnasium.vector.AutoresetMode[known.upper()].value,
        ):
            return known
    raise ValueError(f"autoreset_mode is {mode!r}; expected one of {', '.join(map(repr, MODES))}")


def _validate_array(
    game: str, what: str, field: FieldLayout, array: ArrayLike, shape: tuple[int, ...], *, leading: int = 0
) -> torch.Tensor:
    """The array as a tensor, or TypeError or ConfigError unless it has ``shape`` after so many axes of any size."""
    sizes = str(shape) if not leading else f"(number of states{''.join(f', {n}' for n in shape)})"
    expected = f"{sizes} {field.dtype}"
    if not isinstance(array, np.ndarray | torch.Tensor):
        raise TypeError(f"{what}: {field.name!r} is a {type(array).__name__}; expected an array {expected}")
    found = tuple(array.shape)
    if len(found) < leading or found[leading:] != shape or _torch_type(array) != TORCH_TYPES[field.dtype]:
        raise ConfigError(f"{game}, {what}: {field.name!r} is {found} {array.dtype}; expected {expected}")
    return tensor_of(f"{game}, {what}: {field.name!r}", array)


def _check_mapping(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a {type(given).__name__}; expected a mapping, name of a state field -> its values")


def _torch_type(array: ArrayLike) -> torch.dtype | None:
    return array.dtype if isinstance(array, torch.Tensor) else TORCH_TYPES.get(array.dtype)


def shared_field_arrays(game: Env, given: Mapping[str, ArrayLike]) -> dict[str, torch.Tensor]:
    """Shared field -> its values: the game's own, overridden by those given; or TypeError, ConfigError."""
    layout = game.layout
    _check_mapping("arrays", given)
    fields = {field.name: field for field in layout.fields if field.shared}
    own = game.arrays()
    if not isinstance(own, Mapping):
        raise EnvDefinitionError(
            f"{layout.name}: arrays() returns {own!r:.200}; expected a mapping, name of a shared field -> array"
        )
    arrays = {**own, **given}
    if set(arrays) != set(fields):
        missing, unknown = sorted(set(fields) - set(arrays)), sorted(set(arrays) - set(fields), key=str)
        wrong = [f"{what} {names}" for what, names in (("lack", missing), ("have the unknown", unknown)) if names]
        raise ConfigError(
            f"{layout.name}: arrays {' and '.join(wrong)}; expected the shared fields {sorted(fields)}, from the "
            "game's method arrays() or from arrays= of make"
        )
    return {name: _validate_array(layout.name, "arrays", f, arrays[name], f.shape) for name, f in fields.items()}


def initial_state_arrays(layout: GameLayout, given: Mapping[str, ArrayLike]) -> dict[str, torch.Tensor]:
    """Field -> its initial states, the same number for each field; or TypeError, ConfigError."""
    _check_mapping("initial_states", given)
    fields = {field.name: field for field in layout.fields if not field.shared}
    if unknown := sorted(set(given) - set(fields), key=str):
        raise ConfigError(f"{layout.name}, initial_states: unknown fields {unknown}; expected some of {sorted(fields)}")
    sizes = {len(array) if np.ndim(array) else 0 for array in given.values()}  # type checked with the shape
    if given and (len(sizes) > 1 or 0 in sizes):
        raise ConfigError(
            f"{layout.name}, initial_states: expected the same number of initial states for every field, at least 1; "
            f"{', '.join(map(repr, given))} have {sorted(sizes)}"
        )
    if max(sizes, default=0) >= 2**31:
        raise ConfigError(f"{layout.name}, initial_states: got {max(sizes):,} initial states; expected fewer than 2^31")
    return {
        name: _validate_array(layout.name, "initial_states", fields[name], array, fields[name].shape, leading=1)
        for name, array in given.items()
    }


def validate_mask(mask: Any, num_envs: int, device: torch.device) -> torch.Tensor:
    """A reset mask on the device, (num_envs,) bool, or TypeError, ValueError."""
    if not isinstance(mask, np.ndarray | torch.Tensor) or mask.dtype not in (torch.bool, np.bool_):
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"reset: mask is {found}; expected bool, a tensor or NumPy array, ({num_envs},)")
    if mask.shape != (num_envs,):
        raise ValueError(f"reset: mask has shape {tuple(mask.shape)}; expected ({num_envs},)")
    if isinstance(mask, torch.Tensor) and mask.device != device:
        raise ValueError(f"reset: mask is on {mask.device}; expected {device}")
    return tensor_of("reset: mask", mask).to(device).contiguous()
