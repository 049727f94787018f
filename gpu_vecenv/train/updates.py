"""Updates: all minibatches of an iteration, of all learners, with the collectives of several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.learner import Learner
from gpu_vecenv.train.reductions import GradientBucket


class Updates:
    """The updates of learners from a rollout: one after the other, or with several processes side by side.

    Several processes average the gradients of the n-th minibatch of all learners by one all-reduce. Learners share
    nothing, so that their order changes no bit.

    Args:
        learners: By policy.
        bucket: Has the learners' gradients.
        world: The processes.
    """

    def __init__(self, learners: Mapping[str, Learner[Any]], bucket: GradientBucket, world: World) -> None:
        self._learners, self._bucket, self._world = learners, bucket, world

    def on_device(self) -> None:
        """By the networks' kernels; may be part of a CUDA graph."""
        self._run(
            lambda learner: learner.all_minibatches(),
            lambda learner, k: learner.gradient_by_kernels(k),
            lambda learner: learner.optimizer_step(),
        )

    def in_stages(self) -> None:
        """Each stage of a learner a CUDA graph, collectives between them."""
        self._run(
            lambda learner: learner.update(),
            lambda learner, k: learner.local_gradient(k),
            lambda learner: learner.stages["optimizer_step"](),
        )

    def _run(
        self,
        update: Callable[[Learner[Any]], None],
        gradient: Callable[[Learner[Any], int], None],
        step: Callable[[Learner[Any]], None],
    ) -> None:
        """All minibatches of a learner of one process, or the two halves of each minibatch."""
        if self._world.size == 1:
            for learner in self._learners.values():
                update(learner)
            return
        for k in range(self._bucket.num_updates):
            learners = [self._learners[name] for name in self._bucket.names(k)]
            for learner in learners:
                gradient(learner, k)
            self._bucket.average(k)
            for learner in learners:
                step(learner)
