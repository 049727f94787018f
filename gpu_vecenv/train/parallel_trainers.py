"""ParallelTrainers: several trainers in one process, whose iterations run at the same time on a GPU.

Where the iterations of all are the same launches of kernels, each launch is one for all trainers, see
``joined_iterations``. Otherwise each trainer has a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, capture_stream, ordered_on
from gpu_vecenv.train.joined_iterations import JoinedIterations, join_iterations
from gpu_vecenv.train.metrics import read_totals
from gpu_vecenv.train.trainer import Trainer

# Streams, at most; further trainers share them. Torch keeps a cuBLAS workspace for each, see ``capture_stream``.
MAX_BRANCHES = 16
Result: TypeAlias = dict[str, Any] | NonFiniteError


class ParallelTrainers:
    """Runs iterations of several trainers, each bit-identical to its iteration alone.

    On a GPU an iteration of all is one CUDA graph where all learners have kernels. If these are the same, as with
    trainers that differ in nothing but the seed, each launch is one for all trainers; else their iterations are
    parallel branches of the graph. Where torch computes gradients, each trainer has graphs and a stream of its own. On
    the CPU they run in turn. The trainers share nothing but compiled kernels.

    Args:
        trainers: On one device, each on an environment of its own, in one process. They keep the streams that they get.
        join: Whether launches may be joined; False always takes branches.

    Raises:
        TypeError: One is not a trainer.
        ConfigError: There are none, or they are on several devices, share an environment, or are of several processes.
    """

    def __init__(self, trainers: Sequence[Trainer], *, join: bool = True) -> None:
        for trainer in trainers:
            if not isinstance(trainer, Trainer):
                raise TypeError(f"trainers has a {type(trainer).__name__}; expected trainers")
        if not trainers:
            raise ConfigError("there are no trainers; expected at least one")
        self.device = trainers[0].env.device
        devices = {str(trainer.env.device) for trainer in trainers}
        if len(devices) > 1:
            raise ConfigError(f"the trainers are on {sorted(devices)}; expected one device")
        if len({id(trainer.env) for trainer in trainers}) < len(trainers):
            raise ConfigError("trainers share an environment; expected one environment for each")
        if len(trainers) > 1 and trainers[0].world.size > 1:
            raise ConfigError(
                f"{len(trainers)} trainers in each of {trainers[0].world.size} processes; expected one process for all"
            )
        backend = trainers[0].env.functions.backend
        self._trainers, self._joins = set(trainers), join and backend.parameter_bytes is not None
        self._stream: torch.cuda.Stream | None = None
        self._branches: dict[Trainer, torch.cuda.Stream] = {}
        if self.device.type == "cuda" and len(trainers) > 1:
            thread = threading.get_ident()
            self._stream = capture_stream(backend, thread)
            for index, trainer in enumerate(trainers):
                stream = capture_stream(backend, thread, 1 + index % MAX_BRANCHES)
                assert stream is not None
                self._branches[trainer] = stream
                trainer.use_stream(stream)
        graphs = self._stream is not None and all(trainer.graphs for trainer in trainers)
        self._graph_pool = GraphPool() if graphs else None
        self._graphed: dict[tuple[Trainer, ...], GraphedCallable] = {}  # of the trainers that run together

    def train_interval(self, trainers: Sequence[Trainer], log_interval: int = 1) -> list[Result]:
        """``Trainer.train_interval`` of some of the trainers: for each its metrics, or the error of a loss.

        Raises:
            CapacityError: Not enough device memory.
            ConfigError: One is not of this object's trainers.
        """
        log_interval = validate_int("log_interval", log_interval, 1)
        if not self._trainers.issuperset(trainers):
            raise ConfigError("trainers has one that ParallelTrainers was not made with; expected some of its own")
        if not trainers:
            return []
        if len(trainers) == 1 or (self._stream is None and not self._joins):
            return [_result(partial(trainer.train_interval, log_interval)) for trainer in trainers]
        with ordered_on(self._stream, self.device):
            launching = tuple(trainers)
            while launching:
                self._launch(launching)
                launching = tuple(t for t in launching if t.iteration % log_interval and t.iteration < t.num_iterations)
            totals = read_totals([trainer.metrics_reader for trainer in trainers])
            results = [_result(partial(t.read_iteration, read)) for t, read in zip(trainers, totals, strict=True)]
        failed = {t for t, result in zip(trainers, results, strict=True) if isinstance(result, NonFiniteError)}
        ended = failed | {t for t in trainers if t.iteration >= t.num_iterations}
        for together in [together for together in self._graphed if ended.intersection(together)]:
            del self._graphed[together]  # and with it the memory of its graph
        return results

    def _launch(self, trainers: tuple[Trainer, ...]) -> None:
        """Start an iteration of each."""
        for trainer in trainers:
            with trainer.capacity_errors():
                trainer.prepare_iteration()
        if all(trainer.by_kernels and trainer.networks_checked for trainer in trainers):
            if trainers not in self._graphed:
                self._graphed[trainers] = self._graphed_iterations(trainers)
            self._graphed[trainers]()
            if self.joins(trainers):
                for trainer in trainers:
                    trainer.timer.follow(trainers[0].timer)
        else:
            _Branches(trainers, self._branches, Trainer.enqueue_iteration)()
        for trainer in trainers:
            trainer.count_iteration()

    def _graphed_iterations(self, trainers: tuple[Trainer, ...]) -> GraphedCallable:
        joined = join_iterations(trainers) if self._joins else None
        if joined is not None:
            return GraphedCallable(joined, "the iterations", self._graph_pool)
        each = _Branches(trainers, self._branches, Trainer.enqueue_iteration)
        one = _Branches(trainers, self._branches, Trainer.iteration_on_device)
        return GraphedCallable(one, "the iterations", self._graph_pool, each)

    def joins(self, trainers: Sequence[Trainer]) -> bool:
        """Whether each launch of the last iteration of these trainers was one for all of them."""
        graphed = self._graphed.get(tuple(trainers))
        return graphed is not None and isinstance(graphed.call, JoinedIterations)


class _Branches:
    """Calls a function of each trainer on the trainer's stream; all of them begin, and are joined, together.

    Without streams it calls them in turn.
    """

    def __init__(
        self, trainers: Sequence[Trainer], streams: Mapping[Trainer, torch.cuda.Stream], call: Callable[[Trainer], None]
    ) -> None:
        self._trainers, self._call = list(trainers), call
        self._streams = [streams[trainer] for trainer in trainers if trainer in streams]

    def __call__(self) -> None:
        if not self._streams:
            for trainer in self._trainers:
                with trainer.training():
                    self._call(trainer)
            return
        current = torch.cuda.current_stream()
        for stream in self._streams:  # before any of the work: a branch must not wait for another one
            stream.wait_stream(current)
        for trainer, stream in zip(self._trainers, self._streams, strict=True):
            with torch.cuda.stream(stream), trainer.training():
                self._call(trainer)
        for stream in self._streams:
            current.wait_stream(stream)


def _result(iteration: Callable[[], dict[str, float]]) -> Result:
    try:
        return dict(iteration())
    except NonFiniteError as error:
        return error
