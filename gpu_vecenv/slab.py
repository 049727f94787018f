"""Slab: the tensors that one tick writes, by default views of one contiguous buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise

import torch

ALIGNMENT = 256  # bytes; every view starts on such a boundary


@dataclass(frozen=True)
class SlabLayout:
    """Shapes and dtypes of a slab's tensors, for one environment."""

    num_envs: int
    num_agents: int
    obs_shape: tuple[int, ...]
    obs_dtype: torch.dtype
    has_final_obs: bool
    device: torch.device

    @cached_property
    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensor name -> (shape, dtype), in the order of the buffer."""
        rows = (self.num_envs, self.num_agents)
        specs = {
            "obs": ((*rows, *self.obs_shape), self.obs_dtype),
            "rewards": (rows, torch.float32),
            "terminations": (rows, torch.bool),
            "truncations": (rows, torch.bool),
            "active": (rows, torch.bool),
            "final_mask": (rows, torch.bool),
        }
        if self.has_final_obs:
            specs["final_obs"] = specs["obs"]
        return specs

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(_padded(shape, dtype) for shape, dtype in self.specs.values())

    @cached_property
    def places(self) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Name, dtype, shape, strides and first element of every view of the buffer."""
        places, start = [], 0
        for name, (shape, dtype) in self.specs.items():
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            places.append((name, dtype, shape, strides, start // dtype.itemsize))
            start += _padded(shape, dtype)
        return places


@dataclass(frozen=True)
class Slab:
    """Where a tick writes. Made by ``VecEnv.slab``; ``VecEnv.step(actions, out=slab)`` writes into it.

    ``obs`` is (num_envs, num_agents, *obs_shape), the others (num_envs, num_agents). ``final_mask`` marks the rows of
    ``final_obs`` that this tick wrote; ``final_obs`` is None unless the environment resets in the same step.
    """

    layout: SlabLayout
    obs: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor
    active: torch.Tensor
    final_mask: torch.Tensor
    final_obs: torch.Tensor | None = None

    @staticmethod
    def allocate(layout: SlabLayout) -> Slab:
        """Views of one fresh buffer."""
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
        typed = {dtype: buffer.view(dtype) for dtype in {place[1] for place in layout.places}}
        return Slab(
            layout,
            **{n: typed[kind].as_strided(shape, strides, first) for n, kind, shape, strides, first in layout.places},
        )

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
        return Slab(layout, **given, **rest)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        named = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
