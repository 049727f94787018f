"""Bitwise comparison: unlike values, bits separate -0 from 0, and a NaN equals itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """A copy of the bit patterns as integers, in the shape of `values` and on the host."""
    if isinstance(values, torch.Tensor):
        host = values.detach().cpu()
        return host.clone(memory_format=torch.contiguous_format).view(_INTEGERS[host.element_size()]).numpy()
    size = values.dtype.itemsize
    return np.array(values, order="C").view("u1" if size == 1 else f"i{size}")


def equal_bits(one: Any, other: Any) -> bool:
    """Whether two tensors or arrays, or mappings or sequences of them, have equal dtypes, shapes and bits.

    Tensors may lie on different devices, and are compared with arrays too. Anything else is compared with ``==``, of
    equal type.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_bits(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor | np.ndarray) and isinstance(other, torch.Tensor | np.ndarray):
        same_dtype = str(one.dtype).removeprefix("torch.") == str(other.dtype).removeprefix("torch.")
        return same_dtype and one.shape == other.shape and np.array_equal(bits(one), bits(other))
    if isinstance(one, Sequence) and not isinstance(one, str | bytes) and type(one) is type(other):
        return len(one) == len(other) and all(map(equal_bits, one, other))
    return type(one) is type(other) and bool(one == other)
