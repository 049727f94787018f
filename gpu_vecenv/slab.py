"""Slab: the tensors that one tick writes, by default views of one contiguous buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gpu_vecenv.device import current_stream

ALIGNMENT = 256  # bytes; every view starts on such a boundary
STOCK = 8  # slabs made at a time at most
STOCK_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}  # and their bytes


@dataclass(frozen=True)
class SlabLayout:
    """Shapes and dtypes of a slab's tensors, for one environment.

    ``batch`` is (num_envs, num_agents), or (num_envs * num_agents,) where agents are rows; ``num_choices`` counts the
    entries of an agent's action mask, 0 without one.
    """

    batch: tuple[int, ...]
    obs_shape: tuple[int, ...]
    obs_dtype: torch.dtype
    has_final_obs: bool
    num_choices: int
    device: torch.device

    @cached_property
    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensor name -> (shape, dtype), in the order of the buffer."""
        rows = self.batch
        specs = {
            "obs": ((*rows, *self.obs_shape), self.obs_dtype),
            "rewards": (rows, torch.float32),
            "terminations": (rows, torch.bool),
            "truncations": (rows, torch.bool),
            "active": (rows, torch.bool),
            "final_mask": (rows, torch.bool),
        }
        if self.num_choices:
            specs["action_mask"] = ((*rows, self.num_choices), torch.bool)
        if self.has_final_obs:  # the last: whoever copies a slab to the host may leave it out
            specs["final_obs"] = specs["obs"]
        return specs

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(_padded(shape, dtype) for shape, dtype in self.specs.values())

    @property
    def nbytes_without_final_obs(self) -> int:
        """Bytes of the buffer before ``final_obs``, its last part."""
        return self.nbytes - (_padded(*self.specs["final_obs"]) if self.has_final_obs else 0)

    @cached_property
    def places(self) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Name, dtype, shape, strides and first element of every view of the buffer."""
        places, start = [], 0
        for name, (shape, dtype) in self.specs.items():
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            places.append((name, dtype, shape, strides, start // dtype.itemsize))
            start += _padded(shape, dtype)
        return places


class Slab(NamedTuple):
    """Where a tick writes. Made by ``VecEnv.slab``; ``VecEnv.step(actions, out=slab)`` writes into it.

    ``obs`` is (num_envs, num_agents, *obs_shape), the others (num_envs, num_agents); one axis of num_envs * num_agents
    where agents are rows. ``final_mask`` marks the rows of ``final_obs`` that this tick wrote; ``final_obs`` is None
    unless the environment resets in the same step. ``action_mask`` (…, num_logits) is None unless the game declares it.
    """

    layout: SlabLayout
    pointers: tuple[int, ...]  # addresses of the tensors below, in their order; 0 for None
    obs: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor
    active: torch.Tensor
    final_mask: torch.Tensor
    action_mask: torch.Tensor | None = None
    final_obs: torch.Tensor | None = None

    @staticmethod
    def allocate(layout: SlabLayout, buffer: torch.Tensor | None = None) -> Slab:
        """Views of one buffer of ``layout.nbytes`` bytes, a fresh one unless given."""
        if buffer is None:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
        return _views(layout, buffer, 1)[0]

    @staticmethod
    def around(layout: SlabLayout, given: dict[str, torch.Tensor]) -> Slab:
        """A slab of the caller's tensors; those not given are allocated.

        Raises:
            TypeError, ValueError: A given tensor has an unknown name, or another shape, dtype or device, or is not
                contiguous.
        """
        specs = layout.specs
        for name, tensor in given.items():
            if name not in specs:
                raise TypeError(f"slab: unknown tensor {name!r}; expected some of {', '.join(specs)}")
            shape, dtype = specs[name]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"slab: {name} is a {type(tensor).__name__}; expected a torch tensor")
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != layout.device:
                raise ValueError(
                    f"slab: {name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                    f"expected {shape} {dtype} on {layout.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"slab: {name} has strides {tensor.stride()}; expected a contiguous tensor")
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in given.items())
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"slab: {name} and {other} share memory; expected tensors apart from each other")
        rest = {
            name: torch.empty(shape, dtype=dtype, device=layout.device)
            for name, (shape, dtype) in specs.items()
            if name not in given
        }
        named = {name: {**given, **rest}.get(name) for name in Slab._fields[2:]}
        pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in named.values())
        return Slab(layout, pointers, **named)  # type: ignore[arg-type]  # around() has what is never None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {name: tensor for name, tensor in zip(Slab._fields[2:], self[2:], strict=True) if tensor is not None}


class SlabStock:
    """Fresh slabs for one environment. Small ones are made several at a time, as parts of one buffer.

    To make a tensor costs a microsecond or more on the host, and a slab has eight; split off in one call they cost a
    fraction. What a slab shows keeps its whole buffer alive, at most STOCK_BYTES.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self._layout = layout
        self._many = max(1, min(STOCK, STOCK_BYTES[layout.device.type] // max(1, layout.nbytes)))
        self._stocks: dict[int, list[Slab]] = {}  # stream -> slabs: memory is reused in the order of its stream

    def take(self) -> Slab:
        """A slab that nobody has had before."""
        stream = 0
        if self._layout.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return Slab.allocate(self._layout)  # from the memory that the graph keeps for itself
            stream = current_stream(self._layout.device)
        stock = self._stocks.get(stream)
        if not stock:
            # Whatever mode the first taker is in, later ones may want gradients of what they compute from a slab.
            with torch.inference_mode(False):
                size, device = self._many * self._layout.nbytes, self._layout.device
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
                stock = self._stocks[stream] = _views(self._layout, buffer, self._many)
        return stock.pop()


def _views(layout: SlabLayout, buffer: torch.Tensor, many: int) -> list[Slab]:
    """``many`` slabs, one after the other in one buffer.

    ``unsafe_split_with_sizes`` gives tensors that autograd takes for unrelated, each with a version of its own: to
    write into one does not spoil another that some graph has saved. They do not overlap.
    """
    offsets: dict[str, int] = {}
    tensors: dict[str, list[torch.Tensor]] = {}
    for dtype in dict.fromkeys(place[1] for place in layout.places):
        sizes, names, end = [], [], 0  # of pieces, in elements; a gap has no name
        for name, kind, shape, _, first in layout.places:
            if kind == dtype:
                sizes += [first - end, math.prod(shape)]
                names += ["", name]
                end = first + math.prod(shape)
                offsets[name] = first * dtype.itemsize
        sizes.append(layout.nbytes // dtype.itemsize - end)
        names.append("")
        pieces = buffer.view(dtype).unsafe_split_with_sizes(sizes * many)
        for place, name in enumerate(names):
            if name:
                shape = layout.specs[name][0]
                own = pieces[place :: len(names)]
                tensors[name] = [piece.view(shape) for piece in own] if len(shape) > 1 else list(own)
    fields = Slab._fields[2:]
    columns: list[Sequence[Any]] = [tensors.get(name, [None] * many) for name in fields]
    starts = range(buffer.data_ptr(), buffer.data_ptr() + many * layout.nbytes, layout.nbytes)
    pointers = [tuple(start + offsets[name] if name in offsets else 0 for name in fields) for start in starts]
    return [Slab(layout, *parts) for parts in zip(pointers, *columns, strict=True)]


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
