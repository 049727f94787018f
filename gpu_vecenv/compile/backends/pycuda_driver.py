"""Loads and launches cubins with PyCUDA in the device's primary context, which torch uses too."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pycuda.driver as cuda
import torch

from gpu_vecenv.compile.backends import Launcher, LaunchShape, parameter_spans, symbol
from gpu_vecenv.compile.device import current_stream

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: independent of the default stream, as torch's streams are
_handles: list[weakref.ref[Any]] = []
_streams: dict[int, Any] = {}  # PyCUDA's streams that torch uses too, by their handles


def _track_handles(*handles: Any) -> None:
    # Dead references are removed here: a KeyboardInterrupt during a weak reference's callback would be lost.
    _handles[:] = [reference for reference in _handles if reference() is not None]
    _handles.extend(map(weakref.ref, handles))


def _leak_handles() -> None:
    # CUDA does not work in a forked process, where PyCUDA's destructors would abort: the objects are never destroyed.
    for reference in _handles:
        if (handle := reference()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


os.register_at_fork(after_in_child=_leak_handles)


class _Module:
    """A module. PyCUDA must unload it with its context current, so ``load`` does, after this object is destroyed."""

    def __init__(self, module: Any, dropped: list[Any]) -> None:
        self.module, self._dropped = module, dropped

    def __del__(self) -> None:
        self._dropped.append(self.module)


class PyCudaDriver:
    """PyCUDA on one device."""

    def __init__(self, device: torch.device) -> None:
        cuda.init()
        self.device = device
        self._dropped: list[Any] = []  # unused modules, unloaded when the next one is loaded
        self.context = cuda.Device(device.index).retain_primary_context()
        _track_handles(self.context)
        self._default_fork = self._new_fork()
        self._forks: dict[int, tuple[Any, torch.cuda.ExternalStream]] = {}  # by the handle of torch's stream

    def _new_fork(self) -> tuple[Any, torch.cuda.ExternalStream]:
        """A stream of PyCUDA, also as torch's."""
        with self._current():
            stream = cuda.Stream()
        _track_handles(stream)
        return stream, torch.cuda.ExternalStream(stream.handle, device=self.device)

    def _fork(self, handle: int) -> tuple[Any, torch.cuda.ExternalStream]:
        """The fork of a stream of torch: its own, so that kernels on several streams overlap.

        No stream is made during a capture, which other calls of the driver may invalidate: what is captured without a
        launch before is correct, but waits for other branches.
        """
        if handle not in self._forks:
            if torch.cuda.is_current_stream_capturing():
                return self._default_fork
            self._forks[handle] = self._new_fork()
        return self._forks[handle]

    def new_stream(self) -> torch.cuda.Stream:
        """A stream on which this driver launches directly.

        On a stream of torch's own each launch is a branch, which costs time: in a graph each kernel would depend on all
        kernels before it.
        """
        with self._current():
            stream = cuda.Stream(NON_BLOCKING)
        _track_handles(stream)
        _streams[stream.handle] = stream
        return torch.cuda.ExternalStream(stream.handle, device=self.device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        # PyCUDA aborts the process if its own stack of contexts is not empty at exit.
        self.context.push()
        try:
            yield
        finally:
            cuda.Context.pop()

    def load(self, cubin: bytes) -> _Module:
        with self._current():
            self._dropped.clear()
            module = cuda.module_from_buffer(cubin)
        _track_handles(module)
        return _Module(module, self._dropped)

    def launcher(self, loaded: _Module, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        end = sum(parameter_spans(arguments)[-1])  # excludes the padding after the last field
        with self._current():
            try:
                function = loaded.module.get_function(symbol(kernel))
            except cuda.LogicError as error:
                raise AttributeError(str(error)) from error
            # Always, since the limit without the attribute also counts the kernel's static shared memory.
            if shape.shared_bytes > 0:
                function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shape.shared_bytes)
            function.prepare([f"{end}s"])
        grid, block, shared = (shape.grid, 1, shape.launches), (shape.threads_per_block, 1, 1), shape.shared_bytes

        def launch(kept_alive: _Module = loaded) -> None:
            handle = current_stream(self.device)
            if handle == 0 or handle in _streams:  # the default stream is None
                stream = _streams.get(handle)
                function.prepared_async_call(grid, block, stream, bytes(arguments)[:end], shared_size=shared)
                return
            # PyCUDA cannot use a stream of torch: fork a stream of its own from torch's and join it again.
            current = torch.cuda.current_stream(self.device)
            stream, fork = self._fork(handle)
            fork.wait_stream(current)
            function.prepared_async_call(grid, block, stream, bytes(arguments)[:end], shared_size=shared)
            current.wait_stream(fork)

        return launch
