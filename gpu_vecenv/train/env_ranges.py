"""EnvRanges: the environments in which a policy acts, contiguous ranges of one size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EnvRanges:
    """Environments of a rollout: contiguous ranges of one size.

    Args:
        firsts: The first environment of each range, in ascending order.
        size: Environments of a range.

    Example:
        ``EnvRanges((0, 4), 2).of(torch.arange(8))`` is ``tensor([0, 1, 4, 5])``.
    """

    firsts: tuple[int, ...]
    size: int

    @property
    def num_envs(self) -> int:
        """Environments of all ranges."""
        return len(self.firsts) * self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of each range its environments."""
        return tuple(slice(first, first + self.size) for first in self.firsts)

    def of(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The rows of these environments on an axis of all of them, range after range; a view of a single range."""
        parts = [tensor.narrow(axis, first, self.size) for first in self.firsts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def parts(self, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The environments of each range, and its part of rows (num_envs, …) like those of ``of``."""
        return zip(self.slices, rows.split(self.size), strict=True)

    def positions(self, num_envs: int) -> torch.Tensor:
        """Of each of all environments its row among those of ``of``, (num_envs,) int64 on the CPU; 0 for others."""
        rows = torch.zeros(num_envs, dtype=torch.int64)
        rows[self.of(torch.arange(num_envs))] = torch.arange(self.num_envs)
        return rows


def all_envs(num_envs: int) -> EnvRanges:
    """All environments, one range."""
    return EnvRanges((0,), num_envs)
