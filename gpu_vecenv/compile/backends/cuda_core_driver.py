"""Loads and launches cubins with NVIDIA's cuda.core."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver as bindings
from cuda.core import Device, ObjectCode

from gpu_vecenv.compile.backends import Launcher, LaunchShape, parameter_spans, symbol
from gpu_vecenv.compile.device import current_stream
from gpu_vecenv.errors import DeviceFaultError


class CudaCoreDriver:
    """cuda.core on one device."""

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # torch must create the primary context, with its own flags
        self.device = device
        Device(device.index).set_current()

    def load(self, cubin: bytes) -> Any:
        Device(self.device.index).set_current()
        return ObjectCode.from_cubin(cubin)

    def launcher(self, module: Any, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        try:
            function = module.get_kernel(symbol(kernel))
        except Exception as error:  # cuda.core does not export the class
            raise AttributeError(str(error)) from error
        # Always, since the limit without the attribute also counts the kernel's static shared memory.
        if shape.shared_bytes > 0:
            attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = bindings.cuKernelSetAttribute(
                attribute, shape.shared_bytes, function.handle, bindings.CUdevice(self.device.index)
            )
            if int(status) != 0:
                raise DeviceFaultError(f"{kernel}: {shape.shared_bytes} bytes of shared memory refused: {status!r}")
        # cuda.core's own launch packs the parameters each time; here the driver reads them from the struct.
        handle = bindings.CUfunction(int(function.handle))  # cuLaunchKernel accepts a CUkernel as a CUfunction
        struct = ctypes.addressof(arguments)
        fields = [struct + offset for offset, _ in parameter_spans(arguments)]
        addresses = (ctypes.c_void_p * len(fields))(*fields)
        parameters = ctypes.addressof(addresses)
        grid, block, shared = (shape.grid, 1, 1), (shape.threads_per_block, 1, 1), shape.shared_bytes

        def launch(kept_alive: tuple[Any, ...] = (function, arguments, addresses)) -> None:
            (status,) = bindings.cuLaunchKernel(
                handle, *grid, *block, shared, bindings.CUstream(current_stream(self.device)), parameters, 0
            )
            if int(status) != 0:
                raise DeviceFaultError(f"cuLaunchKernel returned {status!r}")

        return launch
