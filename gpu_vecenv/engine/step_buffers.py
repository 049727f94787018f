"""StepBuffers: the tensors that one step writes, by default views of one contiguous buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gpu_vecenv.compile.device import current_stream

ALIGNMENT = 256  # bytes; every view starts on such a boundary
POOL_SIZE = 16  # step buffers allocated at a time, at most
POOL_BYTES = {"cuda": 128 << 20, "cpu": 1 << 20}  # and their bytes at most


@dataclass(frozen=True)
class StepBuffersLayout:
    """Shapes and dtypes of the step buffers of one environment.

    ``batch`` is (num_envs, num_agents), or (num_envs * num_agents,) with ``agents_as_envs``; ``num_choices`` counts
    the entries of an agent's action mask, 0 without one; ``tracks_acting`` is that of the game. In a debug build
    ``guard_rows`` rows precede those of the first environment and follow those of each, outside of every view; no
    kernel may write them.
    """

    batch: tuple[int, ...]
    obs_shape: tuple[int, ...]
    obs_dtype: torch.dtype
    has_final_obs: bool
    num_choices: int
    device: torch.device
    guard_rows: int = 0
    tracks_acting: bool = False

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
            "fault": (rows, torch.bool),
        }
        if self.num_choices:
            specs["action_mask"] = ((*rows, self.num_choices), torch.bool)
        if self.tracks_acting:
            specs["acting"] = (rows, torch.bool)
        if self.has_final_obs:  # last, so that a copy to the host can leave it out
            specs["final_obs"] = specs["obs"]
        return specs

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(self._bytes_of(shape, dtype) for shape, dtype in self.specs.values())

    def guarded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor with its guard rows."""
        return (shape[0], shape[1] + self.guard_rows, *shape[2:]) if self.guard_rows else shape

    @property
    def nbytes_without_final_obs(self) -> int:
        """Bytes of the buffer before ``final_obs``, its last part."""
        return self.nbytes - (self._bytes_of(*self.specs["final_obs"]) if self.has_final_obs else 0)

    def _bytes_before(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of a tensor's guard rows before the first environment."""
        return _padded((self.guard_rows, *shape[2:]), dtype) if self.guard_rows else 0

    def _bytes_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self._bytes_before(shape, dtype) + _padded(self.guarded(shape), dtype)

    @cached_property
    def views(self) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Name, dtype, shape, strides and first element of every view of the buffer."""
        views, start = [], 0
        for name, (shape, dtype) in self.specs.items():
            memory = self.guarded(shape)
            start += self._bytes_before(shape, dtype)
            strides = tuple(math.prod(memory[axis + 1 :]) for axis in range(len(shape)))
            views.append((name, dtype, shape, strides, start // dtype.itemsize))
            start += _padded(memory, dtype)
        return views


class StepBuffers(NamedTuple):
    """The tensors that a step writes, made by ``VecEnv.step_buffers``, for ``VecEnv.step(actions, out=buffers)``.

    ``obs`` is (num_envs, num_agents, *obs_shape), the others (num_envs, num_agents); one axis of num_envs * num_agents
    with ``agents_as_envs``. ``final_mask`` marks the rows of ``final_obs`` that this step wrote; ``final_obs`` is None
    unless the environment resets in the same step. ``fault`` marks the rows of environments without a step, because
    of an invalid action or after their end. ``action_mask`` (…, num_logits) is None unless the game declares it, and
    ``acting`` unless the game declares turns or team reward.
    """

    layout: StepBuffersLayout
    pointers: tuple[int, ...]  # addresses of the tensors below, in their order; 0 for None
    obs: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor
    active: torch.Tensor
    final_mask: torch.Tensor
    fault: torch.Tensor
    action_mask: torch.Tensor | None = None
    final_obs: torch.Tensor | None = None
    acting: torch.Tensor | None = None

    @staticmethod
    def allocate(layout: StepBuffersLayout, buffer: torch.Tensor | None = None) -> StepBuffers:
        """Views of one buffer of ``layout.nbytes`` bytes, a fresh one unless given."""
        if buffer is None:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
        typed = {dtype: buffer.view(dtype) for dtype in {view[1] for view in layout.views}}
        named = {n: typed[kind].as_strided(shape, strides, at) for n, kind, shape, strides, at in layout.views}
        return StepBuffers._of(layout, named)

    @staticmethod
    def allocate_several(layout: StepBuffersLayout) -> tuple[list[StepBuffers], dict[str, torch.Tensor]]:
        """Step buffers that share a few allocations, and these: name of a tensor -> (number of buffers, *its shape).

        As many as POOL_SIZE and POOL_BYTES permit, at least one.
        """
        many = max(1, min(POOL_SIZE, POOL_BYTES[layout.device.type] // max(1, layout.nbytes)))
        chunks: dict[str, Sequence[Any]] = {}
        starts: dict[str, Sequence[int]] = {}
        allocations: dict[str, torch.Tensor] = {}
        # inference_mode of the first caller must not affect later ones, which may need gradients of what they compute
        # from these tensors. Unsafe chunks, which do not overlap, are unrelated to autograd: writing into one does not
        # invalidate another that a graph has saved.
        with torch.inference_mode(False):
            for name, (shape, dtype) in layout.specs.items():
                whole = torch.empty((many * shape[0], *shape[1:]), dtype=dtype, device=layout.device)
                chunks[name] = whole.unsafe_chunk(many)
                allocations[name] = whole.view(many, *shape)
                size, first = math.prod(shape) * dtype.itemsize, whole.data_ptr()
                starts[name] = range(first, first + many * size, size)
        fields = StepBuffers._fields[2:]
        pointers = zip(*(starts.get(name, [0] * many) for name in fields), strict=True)
        tensors = (chunks.get(name, [None] * many) for name in fields)
        return [StepBuffers(layout, *parts) for parts in zip(pointers, *tensors, strict=True)], allocations

    @staticmethod
    def around(layout: StepBuffersLayout, given: dict[str, torch.Tensor]) -> StepBuffers:
        """Step buffers of the caller's tensors; those not given are allocated.

        Raises:
            TypeError, ValueError: A given tensor has an unknown name, or another shape, dtype or device, or is not
                contiguous.
        """
        specs = layout.specs
        for name, tensor in given.items():
            if name not in specs:
                raise TypeError(f"step_buffers: unknown tensor {name!r}; expected some of {', '.join(specs)}")
            shape, dtype = specs[name]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"step_buffers: {name} is a {type(tensor).__name__}; expected a torch tensor")
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != layout.device:
                raise ValueError(
                    f"step_buffers: {name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                    f"expected {shape} {dtype} on {layout.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"step_buffers: {name} has strides {tensor.stride()}; expected a contiguous tensor")
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in given.items())
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"step_buffers: {name} and {other} share memory; expected tensors that do not overlap")
        rest = {
            name: torch.empty(shape, dtype=dtype, device=layout.device)
            for name, (shape, dtype) in specs.items()
            if name not in given
        }
        return StepBuffers._of(layout, given | rest)

    def with_final_obs(self, final_obs: torch.Tensor) -> StepBuffers:
        """The same buffers, but final observations are written to another tensor."""
        pointers = list(self.pointers)
        pointers[StepBuffers._fields.index("final_obs") - 2] = final_obs.data_ptr()
        return self._replace(pointers=tuple(pointers), final_obs=final_obs)

    @staticmethod
    def _of(layout: StepBuffersLayout, named: Mapping[str, torch.Tensor]) -> StepBuffers:
        tensors: list[Any] = [named.get(name) for name in StepBuffers._fields[2:]]
        return StepBuffers(layout, tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors), *tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {
            name: tensor for name, tensor in zip(StepBuffers._fields[2:], self[2:], strict=True) if tensor is not None
        }


class StepBuffersPool:
    """Unused step buffers for one environment; small ones are allocated several at a time.

    Creating a tensor costs at least a microsecond on the host, and step buffers have up to nine; chunks of one tensor,
    created in one call, cost a fraction of that. A tensor keeps the memory of its neighbours alive, POOL_BYTES at most.
    """

    def __init__(self, layout: StepBuffersLayout) -> None:
        self._layout = layout
        # By stream: memory is reused in the order of its stream.
        self._pools: dict[int, list[StepBuffers]] = {}

    def take(self) -> StepBuffers:
        """Step buffers that have not been returned before."""
        if self._layout.guard_rows:
            return StepBuffers.allocate(self._layout)
        stream = 0
        if self._layout.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return StepBuffers.allocate(self._layout)  # in the memory pool of the graph
            stream = current_stream(self._layout.device)
        pool = self._pools.get(stream)
        if not pool:
            pool = self._pools[stream] = StepBuffers.allocate_several(self._layout)[0]
        return pool.pop()


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
