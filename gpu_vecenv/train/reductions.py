"""What several processes add up: gradients of a minibatch, and statistics of a rollout, each in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gpu_vecenv.train.distributed import World

ALIGNMENT = 64  # float32 numbers, 256 bytes: as torch aligns its memory


class GradientBucket:
    """Gradients and metrics of all learners in one tensor, which processes average by one all-reduce a minibatch.

    Args:
        sizes: Learner -> its numbers.
        num_updates: Learner -> its minibatches in an iteration.
        world: The processes.
        device: Where the tensor is.

    Attributes:
        parts: Learner -> its part of the tensor, (size,) float32, each 256 bytes aligned.
        num_updates: The most minibatches that a learner has.
    """

    def __init__(
        self, sizes: Mapping[str, int], num_updates: Mapping[str, int], world: World, device: torch.device
    ) -> None:
        self._world, self._counts = world, dict(num_updates)
        self.num_updates = max(self._counts.values(), default=0)
        # Those with fewer minibatches are the last: what is left for the others is the beginning of the tensor.
        order = sorted(sizes, key=lambda name: -self._counts[name])
        starts, self._ends, end = dict[str, int](), dict[str, int](), 0
        for name in order:
            starts[name], self._ends[name] = end, end + sizes[name]
            end += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
        self._flat = torch.zeros(end, device=device)
        self.parts = {name: self._flat[starts[name] : self._ends[name]] for name in sizes}

    def names(self, minibatch: int) -> list[str]:
        """The learners that have a minibatch of this number."""
        return [name for name, count in self._counts.items() if minibatch < count]

    def average(self, minibatch: int) -> None:
        """Average the parts of ``names(minibatch)`` over all processes."""
        self._world.all_reduce_mean(self._flat[: max(self._ends[name] for name in self.names(minibatch))])


class SummedTensors:
    """Tensors that processes sum, in place, by one all-reduce.

    Args:
        tensors: Contiguous, float64.
        world: The processes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], world: World) -> None:
        self._world, self._tensors = world, [tensor.view(-1) for tensor in tensors]
        sizes = [len(tensor) for tensor in self._tensors]
        self._flat = self._tensors[0] if len(sizes) == 1 else self._tensors[0].new_zeros(sum(sizes))
        self._parts = list(self._flat.split(sizes))

    @torch.no_grad()
    def __call__(self) -> None:
        """Sum them; nothing with one process."""
        if self._world.size == 1:
            return
        if len(self._parts) > 1:
            torch.cat(self._tensors, out=self._flat)
        self._world.all_reduce_sum(self._flat)
        if len(self._parts) > 1:
            torch._foreach_copy_(self._tensors, self._parts)
