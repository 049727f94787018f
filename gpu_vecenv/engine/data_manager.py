"""DataManager: every tensor of an environment, by name, allocated once on one device and updated in place."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from gpu_vecenv.absent import OF_DATA_MANAGER, absent_attribute
from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.field import known_dtype
from gpu_vecenv.errors import UnknownNameError

TORCH_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.bool_): torch.bool,
}
ArrayLike = np.ndarray[Any, Any] | torch.Tensor


def tensor_of(what: str, array: ArrayLike) -> torch.Tensor:
    """An array or dense tensor as a tensor, a copy where torch cannot share its memory; or TypeError, ValueError."""
    if isinstance(array, torch.Tensor):
        if array.layout is not torch.strided or array.is_meta:
            raise TypeError(f"{what} is a {array.layout} tensor on {array.device}; expected a dense one with values")
        return array
    if array.dtype not in TORCH_TYPES:
        raise ValueError(f"{what} has dtype {array.dtype}; expected one of {', '.join(map(str, TORCH_TYPES))}")
    shareable = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if shareable else array.copy())


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error that lists the nearest names, with and without the prefix of fields of the game."""
    full = {short: long for long in known for short in (long, long.removeprefix("state_"))}
    near = dict.fromkeys(full[short] for short in difflib.get_close_matches(str(name), full, n=3, cutoff=0.5))
    names = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted({*full.values()})) or 'none'}"
    return UnknownNameError(f"no {what} {name!r}; {names}")


class Fields(dict[str, torch.Tensor]):
    """Field name -> tensor."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise unknown_name("field", name, self)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        """Raise TypeError: the environment's memory is that of its tensors."""
        raise TypeError(
            f"state[{name!r}] is set to a {type(value).__name__}; expected a write into its tensor, such as "
            f"state[{name!r}].copy_(tensor) or state[{name!r}][mask] = number"
        )


class DataManager(Mapping[str, torch.Tensor]):
    """Named tensors on one device. ``data[name]`` is the live tensor: kernels and torch share its memory."""

    def __init__(self, device: torch.device) -> None:
        check_kind("device", device, torch.device, "a torch.device")
        self.device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, torch.Tensor] = {}  # allocations of the tensors that have guard items

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise unknown_name("tensor", name, self) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_DATA_MANAGER)

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | torch.dtype, *, guard_items: int = 0
    ) -> torch.Tensor:
        """A new zeroed tensor under a new name.

        With ``guard_items``, that many items precede the first entry of the first axis and follow each of them,
        outside of the tensor's view; ``memory`` returns the allocation from the first entry on.

        Raises:
            KeyError: The name is taken.
            ValueError: The dtype has no counterpart in device code.
        """
        check_kind("allocate: name", name, str, "a str")
        if name in self._tensors:
            raise KeyError(f"{name!r} is already allocated; push() replaces its values")
        if not isinstance(shape, tuple | list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise TypeError(f"allocate({name!r}): shape is {shape!r:.200}; expected a tuple of ints >= 0")
        if type(guard_items) is not int or not 0 <= guard_items < 2**31:
            raise TypeError(f"allocate({name!r}): guard_items is {guard_items!r:.200}; expected an int >= 0")
        known = dtype if isinstance(dtype, torch.dtype) else known_dtype(dtype)
        kind = known if isinstance(known, torch.dtype) or known is None else TORCH_TYPES.get(known)
        if kind not in TORCH_TYPES.values():
            raise ValueError(
                f"allocate({name!r}): dtype is {dtype}; expected one of {', '.join(map(str, TORCH_TYPES))}"
            )
        with torch.inference_mode(False):  # a tensor of the caller's inference mode could not be written outside of it
            if guard_items:
                size = math.prod(shape[1:])
                rows = torch.zeros(guard_items + shape[0] * (size + guard_items), dtype=kind, device=self.device)
                self._memory[name] = rows[guard_items:].view(shape[0], size + guard_items)
                self._tensors[name] = self._memory[name][:, :size].view(shape)
            else:
                self._tensors[name] = torch.zeros(shape, dtype=kind, device=self.device)
        return self._tensors[name]

    def memory(self, name: str) -> torch.Tensor:
        """The allocation that kernels get: the tensor, contiguous, with its guard items."""
        return self._memory[name] if name in self._memory else self[name]

    def push(self, name: str, array: ArrayLike) -> torch.Tensor:
        """Copy an array to the device; a new name is allocated first.

        Raises:
            TypeError: It is neither an array nor a dense tensor.
            ValueError: Shape or dtype differ from those of the tensor with this name, or tensors do not have the dtype.
        """
        check_kind("push: name", name, str, "a str")
        check_kind(f"push({name!r}): array", array, (np.ndarray, torch.Tensor), "an array or a tensor")
        source = tensor_of(f"push({name!r}): array", array)
        target = self._tensors.get(name)
        if target is None:
            target = self.allocate(name, tuple(source.shape), source.dtype)
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"push({name!r}): got {tuple(source.shape)} {source.dtype}; "
                f"expected {tuple(target.shape)} {target.dtype}"
            )
        return target.copy_(source.detach())

    def pull(self, name: str) -> np.ndarray[Any, Any]:
        """A copy on the host. Synchronises with the device.

        Raises:
            UnknownNameError: There is no such tensor; fields of the game have the prefix ``state_``.
        """
        check_kind("pull: name", name, str, "a str")
        array: np.ndarray[Any, Any] = self[name].cpu().numpy().copy()
        return array

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of every tensor, on the device."""
        return {name: tensor.clone() for name, tensor in self.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], names: Sequence[str] | None = None) -> None:
        """Copy values into all tensors, or those in ``names``; everything is checked before the first copy.

        Raises:
            TypeError, ValueError: The names, a shape or a dtype differ, or a value is not a dense tensor with data.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}; expected a mapping, name -> tensor")
        if names is not None:
            check_kind("load_state_dict: names", names, (tuple, list), f"a list of some of {sorted(self)}")
            if unknown := [name for name in names if name not in list(self)]:
                raise ValueError(f"load_state_dict: names has {unknown}; expected some of {sorted(self)}")
        targets = {name: self[name] for name in (self if names is None else names)}
        if set(state) != set(targets):
            raise ValueError(f"state has {sorted(state, key=str)}; expected {sorted(targets)}")
        for name, tensor in targets.items():
            if not isinstance(state[name], torch.Tensor):
                raise TypeError(f"{name!r} is a {type(state[name]).__name__}; expected a tensor")
            if state[name].layout != torch.strided or state[name].is_meta:
                raise ValueError(
                    f"{name!r} is {state[name].layout} on {state[name].device}; expected a dense tensor with data"
                )
            if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ValueError(
                    f"{name!r} is {tuple(state[name].shape)} {state[name].dtype}; "
                    f"expected {tuple(tensor.shape)} {tensor.dtype}"
                )
        for name, tensor in targets.items():
            tensor.copy_(state[name].detach())
