"""Work that is captured once as a CUDA graph and replayed; and the time that its stages take."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def capture_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """A stream for work that is captured: one a thread, as a capture takes all that comes into its stream.

    Not one for each user: torch keeps cuBLAS' workspace of every stream that has seen a matrix product, some 65 MB on
    an H200, as long as the process lives.
    """
    return torch.cuda.Stream(device)


class GraphPool:
    """Memory that graphs which never run at the same time share for what they make on the way."""

    def __init__(self) -> None:
        self.reset_handle()

    def reset_handle(self) -> None:
        """Later graphs take other graph_pool: a capture that failed leaves its own unusable."""
        self.handle: Any = torch.cuda.graph_pool_handle()


class GraphedCallable:
    """A call without arguments or result: run as it is the first time, as a CUDA graph from then on.

    The first call warms up what a capture may not do, as cuBLAS' workspaces and Triton's compilations. What cannot be
    captured goes on as it is, with one warning that says why. A replay launches the same kernels with the same
    arguments: the same bits.

    Args:
        call: Works on the same tensors each time, and never looks at their values.
        name: What the warning calls it.
        graph_pool: Of the graph; None never captures.
    """

    def __init__(self, call: Callable[[], None], name: str, graph_pool: GraphPool | None) -> None:
        self.call, self.name, self.graph_pool = call, name, graph_pool
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

    def _capture(self, graph_pool: GraphPool) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # to collect what holds a module or a stream would call the driver, which ends a capture
        try:
            with torch.cuda.graph(graph, pool=graph_pool.handle, stream=torch.cuda.current_stream()):
                self.call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            graph_pool.reset_handle()
            self.graph_pool = None
            torch.cuda.synchronize()
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture complains of what came before it
                cause = cause.__context__
            reason = str(cause).splitlines()[0]
            warnings.warn(f"{self.name} cannot be captured as a CUDA graph and runs without: {reason}", stacklevel=3)
        else:
            self.graph = graph
        finally:
            if collecting:
                gc.enable()


class StageTimer:
    """Marks within repeated work, and the shares of time between them.

    On a GPU a mark is an event in the stream, also inside of a graph; on the CPU it is the clock. Where torch has no
    events for graphs (before 2.8), marks inside of one are left out.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, float | torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        """Here and now."""
        if self.device.type == "cpu":
            self._marks[name] = time.perf_counter()
            return
        if name not in self._marks:
            try:
                self._marks[name] = torch.cuda.Event(enable_timing=True, external=True)
            except TypeError:
                if torch.cuda.is_current_stream_capturing():
                    return
                self._marks[name] = torch.cuda.Event(enable_timing=True)
        event = self._marks[name]
        assert isinstance(event, torch.cuda.Event)
        event.record()

    def seconds(self, start: str, end: str) -> float:
        """Between two marks; the device must have come past both. 0 where one is missing."""
        one, other = self._marks.get(start), self._marks.get(end)
        if isinstance(one, float) and isinstance(other, float):
            return other - one
        if isinstance(one, torch.cuda.Event) and isinstance(other, torch.cuda.Event):
            return float(one.elapsed_time(other)) / 1e3
        return 0.0
