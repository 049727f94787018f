"""Tensors whose memory kernels and CUDA graphs use, whatever a caller puts in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW_ALIGNMENT = 16  # bytes


def row_width(size: int, dtype: torch.dtype) -> int:
    """Elements from one row of ``size`` elements to the next, so that kernels may read all rows in vectors."""
    return -(-size * dtype.itemsize // ROW_ALIGNMENT) * ROW_ALIGNMENT // dtype.itemsize


class KeptTensors:
    """Tensors that stay where they are in memory, where kernels and CUDA graphs find them.

    Args:
        tensors: Those are kept.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kept = [tensor.detach() for tensor in tensors]

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors that a caller has put in the place of the others to where these were."""
        for tensor, kept in zip(tensors, self._kept, strict=True):
            if tensor.data_ptr() != kept.data_ptr() or tensor.stride() != kept.stride():
                kept.copy_(tensor.detach().clone())  # it may be another view of the same memory
                tensor.data = kept


class FlatTensors(KeptTensors):
    """Float32 tensors as consecutive parts of one, ``flat`` (n,).

    Args:
        tensors: The tensors, whose values stay.
        flat: Where they lie; None allocates.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
        values = torch.cat([x.detach().flatten() for x in tensors])
        self.flat = values if flat is None else flat.copy_(values)
        parts = self.flat.split([x.numel() for x in tensors])
        super().__init__([part.view_as(x) for part, x in zip(parts, tensors, strict=True)])
        self.adopt(tensors)
