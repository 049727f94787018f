"""Validation of the arguments of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.layout import FieldLayout, GameLayout
from gpu_vecenv.engine.data_manager import TORCH_TYPES, ArrayLike
from gpu_vecenv.errors import ConfigError, InvalidActionError, InvalidSeedError, nearest

UNBOUNDED = 2**62  # size of a head that a role does not have: any value is valid


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


def _validate_array(game: str, what: str, field: FieldLayout, array: ArrayLike, shape: tuple[int, ...]) -> ArrayLike:
    if not isinstance(array, np.ndarray | torch.Tensor):
        raise TypeError(f"{what}: {field.name!r} is a {type(array).__name__}; expected an array")
    if tuple(array.shape) != shape or _torch_type(array) != TORCH_TYPES[field.dtype]:
        raise ConfigError(
            f"{game}, {what}: {field.name!r} is {tuple(array.shape)} {array.dtype}; expected {shape} {field.dtype}"
        )
    return array


def _check_mapping(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a {type(given).__name__}; expected a mapping, name of a state field -> its values")


def _torch_type(array: ArrayLike) -> torch.dtype | None:
    return array.dtype if isinstance(array, torch.Tensor) else TORCH_TYPES.get(array.dtype)


def shared_field_arrays(game: Env, given: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Shared field -> its values: the game's own, overridden by those given; or TypeError, ConfigError."""
    layout = game.layout
    _check_mapping("arrays", given)
    fields = {field.name: field for field in layout.fields if field.shared}
    arrays = {**game.arrays(), **given}
    if set(arrays) != set(fields):
        missing, unknown = sorted(set(fields) - set(arrays)), sorted(set(arrays) - set(fields), key=str)
        raise ConfigError(
            f"{layout.name}: arrays must give its shared fields {sorted(fields)}; missing {missing}, unknown {unknown}"
        )
    return {name: _validate_array(layout.name, "arrays", f, arrays[name], f.shape) for name, f in fields.items()}


def initial_state_arrays(layout: GameLayout, given: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Field -> its initial states, the same number for each field; or TypeError, ConfigError."""
    _check_mapping("initial_states", given)
    fields = {field.name: field for field in layout.fields if not field.shared}
    if unknown := sorted(set(given) - set(fields), key=str):
        raise ConfigError(f"{layout.name}, initial_states: unknown fields {unknown}; known: {sorted(fields)}")
    sizes = {len(array) if np.ndim(array) else 0 for array in given.values()}  # type checked with the shape
    if given and (len(sizes) > 1 or 0 in sizes):
        raise ConfigError(
            f"{layout.name}, initial_states: expected the same number of initial states for every field, at least 1; "
            f"{', '.join(map(repr, given))} have {sorted(sizes)}"
        )
    if max(sizes, default=0) >= 2**31:
        raise ConfigError(f"{layout.name}, initial_states: got {max(sizes):,} initial states; expected fewer than 2^31")
    return {
        name: _validate_array(layout.name, "initial_states", fields[name], array, (len(array), *fields[name].shape))
        for name, array in given.items()
    }


def validate_mask(mask: Any, num_envs: int, device: torch.device) -> torch.Tensor:
    """A reset mask on the device, (num_envs,) bool, or TypeError, ValueError."""
    if not isinstance(mask, np.ndarray | torch.Tensor) or mask.dtype not in (torch.bool, np.bool_):
        raise TypeError(f"reset: mask is {getattr(mask, 'dtype', type(mask).__name__)}; expected bool, torch or NumPy")
    if mask.shape != (num_envs,):
        raise ValueError(f"reset: mask has shape {tuple(mask.shape)}; expected ({num_envs},)")
    if isinstance(mask, torch.Tensor) and mask.device != device:
        raise ValueError(f"reset: mask is on {mask.device}; expected {device}")
    return torch.as_tensor(mask).to(device).contiguous()


def reset_mask(options: Any) -> Any:
    """The only option of ``reset``, ``{"reset_mask": mask}``; None without it.

    Raises:
        TypeError, ConfigError: ``options`` is no dictionary, or has another key.
    """
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise TypeError(f"reset: options is a {type(options).__name__}; expected a dict")
    unknown = sorted(set(options) - {"reset_mask"}, key=str)
    if unknown:
        raise ConfigError(f"reset: options has {unknown}; {nearest(str(unknown[0]), ['reset_mask'])}")
    return options.get("reset_mask")


class ActionValidator:
    """Validates actions for one environment.

    Args:
        layout: The configured game.
        batch: Leading axes of the actions, (num_envs, num_agents) or (num_envs * num_agents,).
        device: The device of the actions.
    """

    def __init__(self, layout: GameLayout, batch: tuple[int, ...], device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.shape = (*batch, *layout.action.shape)
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.kinds = (torch.float32,) if layout.action.continuous else (torch.int32, torch.int64)
        self.names = [str(kind).removeprefix("torch.") for kind in self.kinds]  # the same in NumPy

    def __call__(self, actions: Any) -> torch.Tensor:
        """The actions, contiguous; or TypeError, ValueError for a wrong dtype, shape or device."""
        if not isinstance(actions, torch.Tensor):
            raise TypeError(f"step: actions are a {type(actions).__name__}; expected a torch tensor on {self.device}")
        if actions.dtype not in self.kinds:
            raise TypeError(
                f"step: actions have dtype {actions.dtype}; expected {' or '.join(map(str, self.kinds))}"
                + ("" if self.layout.action.continuous else " (use actions.long())")
            )
        if actions.shape != self.shape:
            raise ValueError(
                f"step: actions have shape {tuple(actions.shape)}; expected {self.shape} (no broadcasting)"
            )
        if actions.device != self.device:
            raise ValueError(f"step: actions are on {actions.device}; expected {self.device}")
        if actions.layout != torch.strided:
            raise ValueError(f"step: actions are {actions.layout}; expected a dense tensor")
        if actions.requires_grad:
            raise TypeError("step: actions require a gradient, but step is not differentiable; use actions.detach()")
        return actions if actions.is_contiguous() else actions.contiguous()

    def array(self, actions: Any, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """Actions as a NumPy array, int32, int64 or float32, of ``shape`` (by default that of the action tensor).

        Raises:
            TypeError, ValueError: They have another dtype or shape.
        """
        array, shape = np.asarray(actions), self.shape if shape is None else shape
        if isinstance(actions, int) and not -(2**63) <= actions < 2**63:
            raise InvalidActionError(
                f"step: action {actions} does not fit in 64 bits; expected a value of the action space"
            )
        if array.dtype.name not in self.names and not (isinstance(actions, int) and not isinstance(actions, bool)):
            raise TypeError(f"step: actions have dtype {array.dtype}; expected {' or '.join(self.names)}")
        if array.shape != shape:
            raise ValueError(f"step: actions have shape {array.shape}; expected {shape} (no broadcasting)")
        return array

    def is_surely_valid(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether every value is valid for every role; action masks are not checked.

        One or two passes over host memory; if True, ``values``, which checks agent by agent, is not needed.
        """
        action = self.layout.action
        columns = array.reshape(-1, action.heads).T
        if action.continuous:
            bounds = zip(columns, action.low, action.high, strict=True)
            return all(low <= column.min() and column.max() <= high for column, low, high in bounds)
        least = (min(sizes) for sizes in zip(*self._sizes, strict=True))
        # As unsigned integers, negative values are too large.
        return all(
            bool((column.view(f"u{column.itemsize}") < size).all()) for column, size in zip(columns, least, strict=True)
        )

    def tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A copy on the device in the shape of the action tensor; on a GPU through pinned memory, asynchronously."""
        if self.device.type == "cpu":
            return torch.tensor(array, device="cpu").view(self.shape)
        staged = torch.empty(
            self.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True, device="cpu"
        )
        staged.numpy()[...] = array.reshape(self.shape)
        return staged.to(self.device, non_blocking=True)

    def values(self, actions: torch.Tensor, active: torch.Tensor, action_mask: torch.Tensor | None) -> None:
        """Validate the values; synchronises with their device. Raises InvalidActionError.

        ``active`` is (num_envs, num_agents) bool; actions of inactive agents are not checked. ``action_mask`` is
        (num_envs, num_agents, num_logits) bool, the allowed choices. All on one device.
        """
        layout, action = self.layout, self.layout.action
        rows = actions.view(-1, layout.num_agents, action.heads)
        if action.continuous:
            low, high = self._table("bounds", (action.low, action.high), actions.device)
            expected = f"[{list(action.low)}, {list(action.high)}]"
            wrong = ~((rows >= low) & (rows <= high))
        else:
            sizes = self._table("sizes", self._sizes, actions.device)
            expected = f"0 to size - 1, sizes {dict(action.sizes)}"
            wrong = (rows < 0) & (sizes < UNBOUNDED) | (rows >= sizes)
            if action_mask is not None:
                first = self._table("first", [*accumulate(action.head_sizes[:-1], initial=0)], actions.device)
                largest = self._table("largest", [size - 1 for size in action.head_sizes], actions.device)
                mask = action_mask.view(-1, layout.num_agents, action.num_logits)
                expected += ", and allowed by info['action_mask']"
                wrong |= ~mask.gather(-1, first + torch.minimum(rows.clamp(min=0), largest)) & (sizes < UNBOUNDED)
        wrong &= active.view(-1, layout.num_agents, 1)
        if not bool(wrong.any()):
            return
        indices = wrong.nonzero()
        env_index, agent, head = indices[0].tolist()
        raise InvalidActionError(
            f"step: {len(indices)} invalid action values; the first: environment {env_index}, agent "
            f"{layout.agent_names[agent]}, number {head}: {rows[env_index, agent, head].item()}; "
            f"expected {expected}"
        )

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        action = self.layout.action
        sizes = [action.sizes[role] for role in self.layout.agent_roles]
        return tuple((*s, *[UNBOUNDED] * (action.heads - len(s))) for s in sizes)

    def _table(self, name: str, values: Sequence[Any], device: torch.device) -> torch.Tensor:
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.tensor(values, device=device)
        return self._tables[name, device]
