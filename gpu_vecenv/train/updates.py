"""Updates: all minibatches of an iteration, of all learners, with the collectives of several processes."""

from __future__ import annotations

from collections.abc import Mapping
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
        if self._world.size == 1:
            for learner in self._learners.values():
                learner.all_minibatches()
            return
        for k in range(self._bucket.num_updates):
            learners = self._with_minibatch(k)
            for learner in learners:
                learner.gradient_by_kernels(k)
            self._bucket.average(k)
            for learner in learners:
                learner.optimizer_step()

    def in_stages(self) -> None:
        """Each stage of a learner a CUDA graph, collectives between them."""
        if self._world.size == 1:
            for learner in self._learners.values():
                learner.update()
            return
        for k in range(self._bucket.num_updates):
            learners = self._with_minibatch(k)
            for learner in learners:
                learner.local_gradient(k)
            self._bucket.average(k)
            for learner in learners:
                learner.stages["optimizer_step"]()

    def _with_minibatch(self, number: int) -> list[Learner[Any]]:
        return [self._learners[name] for name in self._bucket.names(number)]
