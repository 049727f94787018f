"""Load and launch a cubin by NVIDIA's cuda.core."""

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
        torch.zeros(1, device=device)  # torch makes the primary context, with its own flags
        self.device = device
        Device(device.index).set_current()

    def load(self, cubin: bytes) -> Any:
        Device(self.device.index).set_current()
        return ObjectCode.from_cubin(cubin)

    def launcher(self, module: Any, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        try:
            function = module.get_kernel(symbol(kernel))
        except Exception as error:  # of a class that cuda.core keeps to itself
            raise AttributeError(str(error)) from error
        if shape.shared_bytes > 0:  # with static shared memory it may pass what needs no leave
            attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = bindings.cuKernelSetAttribute(
                attribute, shape.shared_bytes, function.handle, bindings.CUdevice(self.device.index)
            )
            if int(status) != 0:
                raise DeviceFaultError(f"{kernel}: {shape.shared_bytes} bytes of shared memory refused: {status!r}")
        # cuda.core packs the parameters at each launch; the driver reads them from the struct, where they do not move.
        handle = bindings.CUfunction(int(function.handle))  # to the driver a CUkernel is a CUfunction too
        struct = ctypes.addressof(arguments)
        fields = [struct + offset for offset, _ in parameter_spans(arguments)]
        addresses = (ctypes.c_void_p * len(fields))(*fields)
        where = ctypes.addressof(addresses)
        grid, block, shared = (shape.grid, 1, 1), (shape.threads_per_block, 1, 1), shape.shared_bytes

        def launch(kept: tuple[Any, ...] = (function, arguments, addresses)) -> None:  # as long as the function
            (status,) = bindings.cuLaunchKernel(
                handle, *grid, *block, shared, bindings.CUstream(current_stream(self.device)), where, 0
            )
            if int(status) != 0:
                raise DeviceFaultError(f"cuLaunchKernel gives {status!r}")

        return launch
