"""An iteration of several trainers whose work is the same: each launch of a kernel is one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_vecenv.compile.recording import NotRecordableError, recorded
from gpu_vecenv.train.trainer import Trainer


class JoinedIterations:
    """Does an iteration of each trainer, the n-th work of all of them at a time.

    Args:
        works: In order.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self._works = list(works)

    def __call__(self) -> None:
        """Launch everything on torch's current stream."""
        for work in self._works:
            work()


def join_iterations(trainers: Sequence[Trainer]) -> JoinedIterations | None:
    """``Trainer.iteration_on_device`` of all; None if their work is not the same, or uses torch for its results.

    The arguments of launches are those of now, as in a CUDA graph. Compiles the kernels for joined launches.

    Args:
        trainers: That have ``networks_checked``.
    """
    try:
        each = [recorded(trainer.iteration_on_device) for trainer in trainers]
    except NotRecordableError:
        return None
    kinds = [[work.kind for work in own] for own in each]
    if any(own != kinds[0] for own in kinds):
        return None
    return JoinedIterations([first.join(others) for first, *others in zip(*each, strict=True)])
