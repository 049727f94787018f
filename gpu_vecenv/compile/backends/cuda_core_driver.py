"""Loads and launches cubins with NVIDIA's cuda.core."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch
from cuda.bindings import driver as bindings
from cuda.core import Device

from gpu_vecenv.compile.backends import Launcher, LaunchShape, parameter_spans, symbol
from gpu_vecenv.compile.device import current_stream
from gpu_vecenv.errors import DeviceFaultError


def _checked(call: Any, *arguments: Any) -> Any:
    """The result of a function of the driver's interface, which returns its status first."""
    status, *results = call(*arguments)
    if int(status) != 0:
        raise DeviceFaultError(f"{call.__name__} returned {status!r}")
    return results[0] if results else None


class _Module:
    """A module. The first ``load`` after this object is destroyed unloads it: a destructor may run during a capture."""

    def __init__(self, handle: Any, dropped: deque[Any]) -> None:
        self.handle, self._dropped = handle, dropped

    def __del__(self) -> None:
        self._dropped.append(self.handle)


class CudaCoreDriver:
    """cuda.core on one device; modules are those of the driver's interface, which are unloaded, as a library is not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._dropped: deque[Any] = deque()  # unused modules, unloaded when the next one is loaded
        Device(device.index).set_current()

    def load(self, cubin: bytes) -> _Module:
        Device(self.device.index).set_current()
        for _ in range(len(self._dropped)):
            module = self._dropped.popleft()
            (status,) = bindings.cuModuleUnload(module)
            if int(status) != 0:  # another thread captures a stream
                self._dropped.append(module)
        return _Module(_checked(bindings.cuModuleLoadData, cubin), self._dropped)

    def new_stream(self) -> torch.cuda.Stream:
        """A stream on which this driver launches directly, as it does on all of torch's."""
        return torch.cuda.Stream(self.device)

    def launcher(self, loaded: _Module, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        try:
            function = _checked(bindings.cuModuleGetFunction, loaded.handle, symbol(kernel).encode())
        except DeviceFaultError as error:
            raise AttributeError(f"{kernel}: {error}") from error
        # Always, since the limit without the attribute also counts the kernel's static shared memory.
        if shape.shared_bytes > 0:
            attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(bindings.cuFuncSetAttribute, function, attribute, shape.shared_bytes)
        # cuda.core's own launch packs the parameters each time; here the driver reads them from the struct.
        struct = ctypes.addressof(arguments)
        fields = [struct + offset for offset, _ in parameter_spans(arguments)]
        addresses = (ctypes.c_void_p * len(fields))(*fields)
        parameters = ctypes.addressof(addresses)
        grid, block = (shape.grid, 1, shape.launches), (shape.threads_per_block, 1, 1)
        shared = shape.shared_bytes

        def launch(kept_alive: tuple[Any, ...] = (loaded, arguments, addresses)) -> None:
            (status,) = bindings.cuLaunchKernel(
                function, *grid, *block, shared, bindings.CUstream(current_stream(self.device)), parameters, 0
            )
            if int(status) != 0:
                raise DeviceFaultError(f"cuLaunchKernel returned {status!r}")

        return launch
