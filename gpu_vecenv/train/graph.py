"""CUDA graphs of callables, and timing of their stages."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gpu_vecenv.compile.backends import Backend
from gpu_vecenv.compile.recording import recorder
from gpu_vecenv.escapes import warn
from gpu_vecenv.train.distributed import World, release_before_the_group

EXTERNAL_EVENTS: dict[str, Any] = (
    {"external": True} if "external" in inspect.signature(torch.cuda.Event.__new__).parameters else {}
)


_capture_streams: dict[tuple[torch.device, str | None, int, int], torch.cuda.Stream | None] = {}


def capture_stream(backend: Backend, thread: int, branch: int = 0) -> torch.cuda.Stream | None:
    """A stream for graph capture, one per thread: a capture records everything in its stream. None on the host.

    Trainers of one thread and driver share it, and those that run at the same time one for each branch: torch keeps a
    cuBLAS workspace for each stream with a matrix product, some 65 MB on an H200, until the process ends.
    """
    key = backend.device, backend.driver_name, thread, branch
    if key not in _capture_streams:
        _capture_streams[key] = backend.new_stream()
    return _capture_streams[key]


@contextmanager
def ordered_on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Run on a stream, in order with the caller's work before and after; no effect if it is None or the caller's."""
    if stream is None or (callers := torch.cuda.current_stream(device)) == stream:
        yield
        return
    stream.wait_stream(callers)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        callers.wait_stream(stream)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, device: torch.device, *, allow_tf32: bool) -> Iterator[None]:
    """Run on a stream, in order with the caller's, with TF32 products or without; no effect if it is None."""
    if stream is None:
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    matmul.allow_tf32 = cudnn.allow_tf32 = allow_tf32
    cudnn.deterministic = True
    try:
        with ordered_on(stream, device):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before


class GraphPool:
    """Memory pool that graphs share for their temporaries; they must never run concurrently."""

    def __init__(self) -> None:
        self.reset_handle()

    def reset_handle(self) -> None:
        """Use a new pool for later graphs: a failed capture makes its pool unusable."""
        self.handle: Any = torch.cuda.graph_pool_handle()


def captured(call: Callable[[], None], handle: Any = None) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a callable, on the current stream, which is not the default one.

    Args:
        call: Without arguments or result.
        handle: Of the memory pool; None: one of its own.

    Raises:
        RuntimeError: It cannot be captured; ``first_line`` has the reason. The pool cannot be used again.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The thread of torch.distributed that watches NCCL calls the driver, which would invalidate a global capture.
    mode = "thread_local" if dist.is_available() and dist.is_initialized() else "global"
    collecting = gc.isenabled()
    gc.disable()  # destructors of modules or streams would call the driver, which invalidates the capture
    try:
        with torch.cuda.graph(graph, pool=handle, stream=torch.cuda.current_stream(), capture_error_mode=mode):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        raise
    finally:
        if collecting:
            gc.enable()
    return graph


def first_line(error: BaseException) -> str:
    """Of the first error that led to this one: that of ending a capture says less."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0]


class GraphedCallable:
    """A callable without arguments or result: eager the first time, a CUDA graph from then on.

    The first call warms up what is not allowed during capture, such as allocating cuBLAS workspaces or compiling with
    Triton. A callable that cannot be captured stays eager, with one warning that gives the reason. Eager calls and
    replays are bit-identical.

    Args:
        call: Must use the same tensors each time and must not read their values on the host.
        name: Name for the warning.
        graph_pool: Memory pool of the graph; None never captures.
        parts: Does the same in several GraphedCallables. It takes the place of a callable that cannot be captured,
            without a warning: that of the part which cannot says more. With several processes there is one.
        world: The processes of the callable's collectives: all of them replay a graph, or none does.
    """

    def __init__(
        self,
        call: Callable[[], None],
        name: str,
        graph_pool: GraphPool | None,
        parts: Callable[[], None] | None = None,
        world: World | None = None,
    ) -> None:
        self.call, self.name, self.graph_pool, self._parts = call, name, graph_pool, parts
        self._world = world or World()
        self.graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> None:
        """Run or replay."""
        if self.graph is None and self.graph_pool is not None and self._warm:
            self._capture(self.graph_pool)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.call()
            self._warm = True

    def release(self) -> None:
        """Destroy the graph; the next call is eager again."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self._warm = None, False

    def _capture(self, graph_pool: GraphPool) -> None:
        graph, reason = None, "it cannot be in another process"
        try:
            graph = captured(self.call, graph_pool.handle)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = first_line(error)
        some_failed, _ = self._world.all_agree(graph is None, False)
        if not some_failed:
            self.graph = graph
            if self._world.size > 1:
                release_before_the_group(self)
            return
        graph_pool.reset_handle()
        self.graph_pool = None
        if self._parts is not None:
            self.call = self._parts
        how = "without one" if self._parts is None else "in parts"
        if self._parts is None or self._world.size > 1:
            warn(f"{self.name} cannot be captured as a CUDA graph and runs {how}: {reason}", stacklevel=3)


class StageTimer:
    """Times between marks in repeated work.

    On a GPU a mark is a CUDA event, which graphs can contain; on the CPU it is the clock. Versions of torch without
    external events (before 2.8) have no marks inside graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, float | torch.cuda.Event] = {}
        self._source = self._marks  # of the marks that are read

    def follow(self, other: StageTimer) -> None:
        """Read the marks of another timer, in whose work this one's is, from now on; or again those of this."""
        self._source = other._marks

    def mark(self, name: str) -> None:
        """Record the time of a mark."""
        if (record := recorder()) is not None:
            record(RecordedMark(self, name))
            return
        if self.device.type == "cpu":
            self._marks[name] = time.perf_counter()
            return
        if not EXTERNAL_EVENTS and torch.cuda.is_current_stream_capturing():
            self._marks.pop(name, None)
            return
        if name not in self._marks:
            self._marks[name] = torch.cuda.Event(enable_timing=True, **EXTERNAL_EVENTS)
        event = self._marks[name]
        assert isinstance(event, torch.cuda.Event)
        event.record()

    def has(self, name: str) -> bool:
        """Whether a mark is recorded."""
        return name in self._source

    def seconds(self, start: str, end: str) -> float:
        """Seconds between two marks, which the device must have completed; 0 if one is missing."""
        a, b = self._source.get(start), self._source.get(end)
        if isinstance(a, float) and isinstance(b, float):
            return b - a
        if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
            return float(a.elapsed_time(b)) / 1e3
        return 0.0


@dataclass(frozen=True)
class RecordedMark:
    """A mark that was recorded. Of several that are joined the first timer has it; the others can ``follow`` it."""

    timer: StageTimer
    name: str

    @property
    def kind(self) -> Hashable:
        """The mark's name."""
        return self.name

    def join(self, others: Sequence[RecordedMark]) -> Callable[[], None]:
        """A function that marks the time in this timer alone."""
        return partial(self.timer.mark, self.name)
