"""Running statistics on the device: mean and variance of rows, and metrics of the latest episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RunningMeanStd:
    """Mean and variance of all rows, weighted equally; the equivalent of ``gymnasium.wrappers.utils.RunningMeanStd``.

    ``mean`` and ``var`` (*shape) and ``count`` () are float64: after 10^9 rows a batch of 64 changes a mean by less
    than float32 resolves. Updates replace these tensors and never write into them.

    Args:
        epsilon: Weight of the initial values, mean 0 and variance 1, in rows.
        shape: Shape of one row.
    """

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] = ()) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.var = torch.ones(shape, dtype=torch.float64)
        self.count = torch.tensor(epsilon, dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        """Move to this device."""
        self.mean, self.var, self.count = self.mean.to(device), self.var.to(device), self.count.to(device)

    def update(self, rows: Tensor, counted: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            rows: (n, *shape), any dtype.
            counted: (n,) bool, the rows that count; the others may hold any value, including NaN. None counts all. If
                no row counts, nothing changes.
        """
        if counted is None:
            counted = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        size = counted.sum()
        counted = counted.view(-1, *[1] * self.mean.ndim)
        # Differences from the running mean: a mean far from 0 does not cost precision.
        deviations = torch.where(counted, rows - self.mean, 0)
        delta = deviations.sum(0) / size.clamp(min=1)
        var = torch.where(counted, (deviations - delta).square(), 0).sum(0) / size.clamp(min=1)
        self.mean, self.var, self.count = merge_moments(self.mean, self.var, self.count, size, delta, var)

    def std(self, epsilon: float) -> Tensor:
        """Square root of variance plus epsilon, (*shape) float64."""
        return (self.var + epsilon).sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of ``mean``, ``var`` and ``count``."""
        return {"mean": self.mean.clone(), "var": self.var.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``.

        Raises:
            ValueError: A name, shape or dtype is wrong; nothing has changed.
        """
        loaded = checked_state_dict(state, self.state_dict())
        self.mean, self.var, self.count = loaded["mean"], loaded["var"], loaded["count"]


def merge_moments(
    mean: Tensor, var: Tensor, count: Tensor, size: Tensor, delta: Tensor, batch_var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count with a batch of ``size`` rows, whose mean is ``mean + delta``.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
    equation 2.1.
    """
    total = count + size
    share = size / total  # in this form an empty batch leaves mean and variance bitwise equal
    return mean + delta * share, var + (batch_var - var) * share + delta.square() * share * (1 - share), total


def checked_state_dict(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a saved state on the devices of ``own``, whose names, shapes and dtypes it must have; or ValueError."""

    def described(state: Mapping[str, Any]) -> dict[str, str]:
        return {
            name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            for name, value in sorted(state.items())
        }

    if described(state) != described(own):
        raise ValueError(f"load_state_dict: the state is {described(state)}; expected {described(own)}")
    return {name: tensor.detach().to(own[name].device, copy=True) for name, tensor in state.items()}


class EpisodeRingBuffer:
    """The metrics of the latest ``size`` episodes, in a ring on the device.

    Args:
        size: Number of episodes to keep, at least 1.
        width: Metrics per episode.
    """

    def __init__(self, size: int, width: int) -> None:
        self.size = size
        # Row ``size`` receives what is not kept, so that the number of writes does not depend on values.
        self._ring = torch.zeros((size + 1, width), dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    def to(self, device: torch.device) -> None:
        """Move to this device."""
        self._ring, self._count = self._ring.to(device), self._count.to(device)

    def add(self, ended: Tensor, metrics: Tensor) -> None:
        """Add the rows of ``metrics`` (n, width) float64 where ``ended`` (n,) bool is True, in their order."""
        rank = ended.cumsum(0)  # 1 for the first of them
        kept = ended & (rank > rank[-1] - self.size)  # the last ``size`` of them
        indices = torch.where(kept, (self._count + rank - 1) % self.size, self.size)
        self._ring = self._ring.index_put((indices,), metrics)
        self._count = self._count + rank[-1]

    def count(self) -> int:
        """Number of episodes added so far. Synchronises with the device."""
        return int(self._count)

    def read(self) -> list[list[float]]:
        """Each metric of the kept episodes, oldest first. Synchronises with the device."""
        count = self.count()
        indices = [index % self.size for index in range(max(0, count - self.size), count)]
        metrics: list[list[float]] = self._ring.cpu()[indices].T.tolist()
        return metrics
