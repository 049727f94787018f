"""Actions: casts to the dtypes of the engine, and validation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.errors import InvalidActionError

UNSIGNED = {4: np.uint32, 8: np.uint64}  # bytes of an integer -> type
UNBOUNDED = 2**62  # size of a head that a role does not have: any value is valid
Array = np.ndarray[Any, Any]


class ActionValidator:
    """Casts and validates actions for one environment.

    The action tensor is int32, int64 or, if a role has a Box, float32. The actions of one role alone, ``role`` in the
    methods, are of its own kind: int32 or int64 for discrete heads, float32 for a Box.

    Args:
        layout: The configured game.
        batch: Leading axes of the actions, (num_envs, num_agents) or (num_envs * num_agents,).
        device: The device of the actions.
    """

    def __init__(self, layout: GameLayout, batch: tuple[int, ...], device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.shape = (*batch, *layout.action.shape)
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._mixed = layout.action.mixed

    def _is_float(self, role: str | None) -> bool:
        """Whether actions, of one role or (None) of all, are floats."""
        action = self.layout.action
        return not action.discrete if role is None else role in action.bounds

    def __call__(
        self, actions: Any, shape: tuple[int, ...] | None = None, name: str = "actions", role: str | None = None
    ) -> torch.Tensor:
        """The action tensor, contiguous and otherwise as it is; or TypeError, ValueError: no value is cast.

        ``shape`` is the shape expected, None for that of the action tensor; ``name`` is what messages call it.
        """
        kinds = (torch.float32,) if self._is_float(role) else (torch.int32, torch.int64)
        if not isinstance(actions, torch.Tensor):
            raise TypeError(
                f"step: {name} {_are(name)} a {type(actions).__name__}; expected a torch tensor on {self.device}: "
                f'use torch.as_tensor(…, device="{self.device}"), or a Gymnasium view, which casts'
            )
        if actions.dtype not in kinds:
            raise TypeError(
                f"step: {name} {_have(name)} dtype {actions.dtype}; expected {' or '.join(map(str, kinds))}"
                + f" (use actions.{'float' if self._is_float(role) else 'long'}())"
            )
        self._check_shape(actions.shape, self.shape if shape is None else shape, name)
        self._check_tensor(actions, name)
        if not actions.is_contiguous() or actions.is_neg():
            return actions.resolve_neg().contiguous()  # the memory of a lazy negation holds the values before it
        return actions

    def cast(
        self, actions: Any, shape: tuple[int, ...] | None = None, name: str = "actions", role: str | None = None
    ) -> torch.Tensor | Array:
        """Actions of any numeric type as int32, int64 or float32, of ``shape``.

        Tensors, and objects with ``__dlpack__`` such as JAX arrays, stay on their device, and no value is read on the
        host: for a discrete action a number that is no integer becomes -1, which is invalid. All else (Python numbers,
        lists, NumPy arrays of any strides and byte order) becomes a NumPy array; such a number raises then.

        Args:
            actions: The actions.
            shape: Shape expected; None is that of the action tensor.
            name: What messages call them.
            role: The role whose actions these are; None: those of all agents.

        Raises:
            TypeError: They are not numbers, bool included, or require a gradient.
            ValueError: They have another shape or device.
            InvalidActionError: A value on the host is no integer, or has more than 64 bits.
        """
        shape = self.shape if shape is None else shape
        tensor = _as_tensor(actions)
        if tensor is None:
            return self._cast_array(actions, shape, name, role)
        return self._cast_tensor(tensor, shape, name, role)

    def array(
        self, actions: Any, shape: tuple[int, ...] | None = None, name: str = "actions", role: str | None = None
    ) -> Array:
        """``cast`` to a NumPy array in any case; tensors may be on the CPU too."""
        shape = self.shape if shape is None else shape
        tensor = _as_tensor(actions)
        if tensor is None:
            return self._cast_array(actions, shape, name, role)
        self._check_tensor(tensor, name, host_too=True)
        tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor  # which NumPy lacks
        return self._cast_array(tensor.resolve_conj().resolve_neg().cpu().numpy(), shape, name, role)

    def tensor(self, array: Array, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The actions on the device in this shape; None: that of the action tensor.

        On a GPU a copy through pinned memory, asynchronously; on the CPU a view, valid while the array is not written.
        """
        shape = self.shape if shape is None else shape
        if self.device.type == "cpu":
            return torch.from_numpy(array if array.flags.writeable else array.copy()).view(shape)
        staged = torch.empty(
            shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True, device="cpu"
        )
        staged.numpy()[...] = array.reshape(shape)
        return staged.to(self.device, non_blocking=True)

    def is_surely_valid(self, array: Array) -> bool:
        """Whether every value is valid for every role; action masks are not checked.

        One or two passes over host memory; if True, ``values``, which checks agent by agent, is not needed.
        """
        action = self.layout.action
        if self._mixed:
            return False
        if action.continuous:
            return not (np.isnan(array) if self.layout.clips_actions else ~np.isfinite(array)).any()
        if array.size == 1:
            return bool(0 <= array.item() < self._least[0])
        columns = array.reshape(-1, action.heads).T
        # As unsigned integers, negative values are too large.
        return all(
            bool((column.view(UNSIGNED[column.itemsize]) < size).all())
            for column, size in zip(columns, self._least, strict=True)
        )

    def host_values(self, array: Array, active: Array, action_mask: Array | None) -> None:
        """``values`` of arrays."""
        if action_mask is not None or not self.is_surely_valid(array):
            mask = None if action_mask is None else torch.from_numpy(action_mask)
            self.values(torch.from_numpy(array.copy()), torch.from_numpy(active), mask)

    def values(self, actions: torch.Tensor, active: torch.Tensor, action_mask: torch.Tensor | None) -> None:
        """Validate the values; synchronises with their device. Raises InvalidActionError.

        ``active`` is (num_envs, num_agents) bool; actions of inactive agents are not checked. ``action_mask`` is
        (num_envs, num_agents, num_logits) bool, the allowed choices. All on one device.
        """
        layout, action = self.layout, self.layout.action
        rows = actions.view(-1, layout.num_agents, action.heads)
        wrong = torch.zeros_like(rows, dtype=torch.bool)
        if not action.discrete:
            not_numbers = rows.isnan() if layout.clips_actions else ~rows.isfinite()
            wrong |= not_numbers & self._table("in a box", self._in_box, actions.device)
        if not action.continuous:
            wrong |= self._wrong_choices(rows, action_mask)
        wrong &= active.view(-1, layout.num_agents, 1)
        if not bool(wrong.any()):
            return
        indices = wrong.nonzero()
        env_index, agent, head = indices[0].tolist()
        if layout.agent_roles[agent] in action.bounds:
            expected = "a number" if layout.clips_actions else "a finite number"
        else:
            expected = f"0 to {self._sizes[agent][head] - 1}"
            expected += "" if action_mask is None else ", and allowed by info['action_mask']"
        raise InvalidActionError(
            f"step: {len(indices)} invalid action values; the first: environment {env_index}, agent "
            f"{layout.agent_names[agent]}, number {head}: {rows[env_index, agent, head].item()}; "
            f"expected {expected}"
        )

    def _wrong_choices(self, rows: torch.Tensor, action_mask: torch.Tensor | None) -> torch.Tensor:
        """Which of (num_envs, num_agents, heads) numbers are no choice of a discrete head."""
        action, device = self.layout.action, rows.device
        sizes = self._table("sizes", self._sizes, device)
        exists = sizes < UNBOUNDED
        wrong = (rows < 0) & exists | (rows >= sizes)
        if self._mixed:
            wrong = exists & (wrong | (rows != rows.trunc()))
        if action_mask is not None:
            first = self._table("first", [*accumulate(action.head_sizes[:-1], initial=0)], device)
            largest = self._table("largest", [size - 1 for size in action.head_sizes], device)
            mask = action_mask.view(-1, self.layout.num_agents, action.num_logits)
            choices = torch.minimum(rows[..., : len(first)].nan_to_num().clamp(min=0), largest).long()
            wrong[..., : len(first)] |= ~mask.gather(-1, first + choices) & exists[:, : len(first)]
        return wrong

    def _check_tensor(self, actions: torch.Tensor, name: str, host_too: bool = False) -> None:
        if actions.device != self.device and not (host_too and actions.device.type == "cpu"):
            raise ValueError(f"step: {name} {_are(name)} on {actions.device}; expected {self.device}")
        if actions.layout != torch.strided:
            raise ValueError(f"step: {name} {_are(name)} {actions.layout}; expected a dense tensor")
        if actions.requires_grad:
            raise TypeError(f"step: {name} with requires_grad, but step is not differentiable; use .detach()")

    def _check_shape(self, actual: Sequence[int], shape: tuple[int, ...], name: str) -> None:
        if tuple(actual) != shape:
            raise ValueError(f"step: {name} {_have(name)} shape {tuple(actual)}; expected {shape} (no broadcasting)")

    def _dtype_error(self, dtype: Any, name: str, role: str | None) -> TypeError:
        expected = "numbers" if self._is_float(role) else "integers"
        return TypeError(f"step: {name} {_have(name)} dtype {dtype}; expected {expected}")

    def _cast_tensor(self, actions: torch.Tensor, shape: tuple[int, ...], name: str, role: str | None) -> torch.Tensor:
        dtype, is_float = actions.dtype, self._is_float(role)
        if dtype is torch.bool or dtype.is_complex or actions.is_quantized:
            raise self._dtype_error(dtype, name, role)
        self._check_shape(actions.shape, shape, name)
        self._check_tensor(actions, name)
        if dtype not in ((torch.float32,) if is_float else (torch.int32, torch.int64)):
            if is_float and role is None and self._mixed:
                in_box = self._table("in a box", self._in_box, actions.device)
                rows = actions.to(torch.float64).reshape(-1, *in_box.shape)
                # What is no choice must not become one by rounding to float32.
                actions = torch.where(in_box | (rows == rows.trunc()), rows, -1).to(torch.float32).view(shape)
            elif is_float:
                actions = actions.to(torch.float32)
            elif dtype.is_floating_point:
                whole = actions.to(torch.float64)  # holds every value of the other dtypes
                actions = torch.where((whole == whole.trunc()) & (whole.abs() < 2**31), whole, -1).to(torch.int64)
            else:
                actions = actions.to(torch.int64)
        return actions.resolve_neg() if actions.is_neg() else actions

    def _cast_array(self, actions: Any, shape: tuple[int, ...], name: str, role: str | None) -> Array:
        try:
            array = np.asarray(actions)
        except (ValueError, OverflowError) as error:  # lists of unequal lengths
            raise ValueError(f"step: {name}: {error}; expected shape {shape}") from error
        dtype = array.dtype
        if dtype not in ((np.float32,) if self._is_float(role) else (np.int32, np.int64)):
            if array is not actions and any(type(value) is int and value.bit_length() > 63 for value in array.flat):
                raise InvalidActionError(f"step: {name}: {actions!r:.128} does not fit in 64 bits; expected an action")
            if dtype.kind not in "iuf":
                raise self._dtype_error(dtype, name, role)
            self._check_shape(array.shape, shape, name)
            return self._cast_values(array, name, role)
        self._check_shape(array.shape, shape, name)
        return array if array.flags.c_contiguous else array.copy()  # torch takes no negative strides

    def _cast_values(self, array: Array, name: str, role: str | None) -> Array:
        is_float = self._is_float(role)
        kept: Any = np.True_
        if is_float and role is None and self._mixed and array.dtype.kind == "f":
            rows = array.reshape(-1, *np.shape(self._in_box))
            kept = (self._in_box | (rows == np.trunc(rows))).reshape(array.shape)
        elif not is_float and array.dtype.kind == "f":
            kept = (array == np.trunc(array)) & (np.abs(array) < 2**31)
        elif not is_float:
            kept = array < 2**63 if array.dtype.kind == "u" else np.True_
        if not np.all(kept):
            first = int(np.flatnonzero(~kept)[0])
            sizes = self._sizes if role is None else self.layout.action.sizes[role]
            last = np.ravel(sizes)[first % np.size(sizes)] - 1
            raise InvalidActionError(
                f"step: {name}: {array.flat[first]} is no choice of a discrete action; expected an integer in "
                f"[0, {last}]"
            )
        with np.errstate(over="ignore"):  # infinite: clipped, or invalid
            return array.astype(np.float32 if is_float else np.int64)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """Choices of each agent's heads; UNBOUNDED where it has no discrete head."""
        action = self.layout.action
        sizes = [() if role in action.bounds else action.sizes[role] for role in self.layout.agent_roles]
        return tuple((*s, *[UNBOUNDED] * (action.heads - len(s))) for s in sizes)

    @cached_property
    def _in_box(self) -> Array:
        """(num_agents, heads): whether this number of an agent's action is an element of its role's Box."""
        action = self.layout.action
        elements = [len(action.bounds.get(role, ((),))[0]) for role in self.layout.agent_roles]
        return np.arange(action.heads) < np.array(elements)[:, None]

    @cached_property
    def _least(self) -> tuple[int, ...]:
        """Choices of each head that every role has."""
        return tuple(min(sizes) for sizes in zip(*self._sizes, strict=True))

    def _table(self, name: str, values: Sequence[Any] | Array, device: torch.device) -> torch.Tensor:
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.as_tensor(values, device=device)
        return self._tables[name, device]


def _as_tensor(actions: Any) -> torch.Tensor | None:
    """A tensor, or an array of another library as a view of its memory; None of what NumPy takes."""
    if isinstance(actions, torch.Tensor):
        return actions
    if isinstance(actions, np.ndarray | np.generic) or not hasattr(actions, "__dlpack__"):
        return None
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(actions)
    return tensor


def _are(name: str) -> str:
    return "are" if name.endswith("s") else "is"


def _have(name: str) -> str:
    return "have" if name.endswith("s") else "has"
