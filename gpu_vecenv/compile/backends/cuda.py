"""The CUDA backend: compiles cubins, and loads and launches them with PyCUDA or cuda.core."""

from __future__ import annotations

import ctypes
import importlib
import threading
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from gpu_vecenv.compile.backends import (
    GroupShape,
    Launcher,
    LaunchShape,
    TensorCores,
    group_constants,
    structure,
)
from gpu_vecenv.compile.backends.cuda_compiler import FLAGS, compile_cubin, compiler, parameter_bytes
from gpu_vecenv.compile.device import create_primary_context
from gpu_vecenv.declare.kernels import Array, KernelSignature
from gpu_vecenv.errors import DeviceFaultError, DeviceUnavailableError

DRIVERS = {"pycuda": "PyCudaDriver", "cuda_core": "CudaCoreDriver"}  # in the order of preference
ITEMS_PER_THREAD = 16  # the same as MAX_ITEMS_PER_THREAD in staging.cuh
# One thread per agent up to 256 agents, then one for eight agents. On an H200 1,000 agents are fastest with 256
# threads, 10,000 with the maximum of 1024.
MIN_THREADS_BEFORE_SHARING, AGENTS_PER_THREAD, MAX_THREADS_PER_ENV = 256, 8, 1024
_FAULTS: dict[torch.device, str] = {}  # after a fault the GPU is unusable for every environment of the process


class CudaBackend:
    """One GPU."""

    suffix = ".cubin"

    def __init__(self, device: torch.device, driver: str | None = None) -> None:
        if driver is not None and driver not in DRIVERS:
            raise ValueError(f"driver is {driver!r}; expected one of {', '.join(DRIVERS)}")
        self.device = device
        if self.fault is not None:
            raise DeviceFaultError(f"{device} is unusable in this process; restart it: {self.fault}")
        properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of them
        self.architecture = f"sm_{properties.major}{properties.minor}"
        self.shared_limit = properties.shared_memory_per_block_optin
        self.processor_name: str = properties.name
        self.resident_threads: int = properties.multi_processor_count * properties.max_threads_per_multi_processor
        self.tensor_cores = None
        self.traces_accesses = False
        if properties.major >= 8:
            self.tensor_cores = TensorCores(
                properties.multi_processor_count,
                properties.shared_memory_per_multiprocessor,
                properties.shared_memory_per_block_optin,
            )
        self.driver_name = driver or first_working_driver(device)
        self.driver = load_driver(self.driver_name, device)

    @property
    def fault(self) -> str | None:
        return _FAULTS.get(self.device)

    @property
    def identity(self) -> str:
        return "\n".join([compiler(), *FLAGS, self.architecture])

    @property
    def parameter_bytes(self) -> int:
        return parameter_bytes(compiler())

    def device_constants(self, shape: GroupShape) -> str:
        return cuda_constants(shape.threads_per_env, self.shared_limit, shape.threads_per_block)

    def default_threads_per_env(self, num_agents: int, largest_array: int = 0) -> int:
        return default_threads_per_env(num_agents, largest_array)

    def compile(self, text: str, target: Path) -> None:
        target.write_bytes(compile_cubin(text, self.architecture))

    def new_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self.driver.new_stream()
        return stream

    def load(self, file: BinaryIO) -> CudaModule:
        file.seek(0)
        with torch.cuda.device(self.device):
            return CudaModule(self.driver, self.driver.load(file.read()))


class CudaModule:
    """A loaded cubin."""

    def __init__(self, driver: Any, module: Any) -> None:
        self.driver, self.module = driver, module

    def launcher(self, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        device = self.driver.device
        try:
            with torch.cuda.device(device):
                launch = self.driver.launcher(self.module, kernel, arguments, shape)
        except (AttributeError, DeviceFaultError):
            raise
        except Exception as error:  # the two drivers have error classes of their own
            raise DeviceFaultError(
                f"{kernel}: {device} refuses blocks of {shape.threads_per_block} threads with {shape.shared_bytes} "
                f"bytes of shared memory: {error}"
            ) from error

        def launch_on_device() -> None:
            _bind_thread(device)
            try:
                if torch.cuda.current_device() == device.index:
                    launch()
                else:
                    with torch.cuda.device(device):
                        launch()
            except Exception as error:
                message = (
                    f"{kernel}: launch of {shape.grid} blocks of {shape.threads_per_block} threads with "
                    f"{shape.shared_bytes} bytes of shared memory on {device} failed: {error}"
                )
                if _is_unusable(device):
                    _FAULTS.setdefault(device, message)
                    message += "; the device is unusable in this process, because of this kernel or an earlier one: "
                    message += "restart it"
                raise DeviceFaultError(message) from error

        return launch_on_device


def _is_unusable(device: torch.device) -> bool:
    """Whether the context is lost, not only the launch that failed."""
    try:
        if torch.cuda.is_current_stream_capturing():  # waiting would break the capture
            return False
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def cuda_constants(threads_per_env: int, shared_limit: int, threads_per_block: int | None = None) -> str:
    """Definitions that depend on the GPU: group size, groups per block, and the limit of shared memory per block."""
    shape = GroupShape.of(threads_per_env, threads_per_block)
    return group_constants(
        shape.threads_per_env,
        shape.threads_per_block // shape.threads_per_env,
        max(1, 32 // shape.threads_per_env),
        shared_limit,
    )


def default_threads_per_env(num_agents: int, largest_array: int = 0) -> int:
    """The next power of two up to 32; above, a multiple of 32, with several agents per thread from 257 agents on.

    Up to 32 agents more, and up to 32, where a thread would have more than ``ITEMS_PER_THREAD`` of the environment's
    ``largest_array``: then neighbouring threads write neighbouring items, and the state can be staged.
    """
    if num_agents <= 32:
        least = max(num_agents, min(32, -(-largest_array // ITEMS_PER_THREAD)))
        return 1 << (least - 1).bit_length()
    threads = min(num_agents, max(MIN_THREADS_BEFORE_SHARING, -(-num_agents // AGENTS_PER_THREAD)), MAX_THREADS_PER_ENV)
    return -(-threads // 32) * 32


@cache
def load_driver(name: str, device: torch.device) -> Any:
    """The named driver on a device, or DeviceUnavailableError with the reason."""
    create_primary_context(device)
    try:
        module = importlib.import_module(f"gpu_vecenv.compile.backends.{name}_driver")
        with torch.cuda.device(device):  # drivers change the current device
            return getattr(module, DRIVERS[name])(device)
    except Exception as error:
        raise DeviceUnavailableError(f"driver {name!r} does not work: {type(error).__name__}: {error}") from error


PROBE_KERNEL = KernelSignature("probe", (Array("x", np.int32),))
PROBE = 'extern "C" __global__ void kernel_probe(int* x) { x[0] = 42; }'


@cache
def probe(name: str, device: torch.device) -> str | None:
    """None if the driver can launch a kernel, else the reason why it cannot."""
    create_primary_context(device)  # not below: a lack of memory that passes must not be cached
    try:
        driver = load_driver(name, device)
        properties = torch.cuda.get_device_properties(device)
        module = driver.load(compile_cubin(PROBE, f"sm_{properties.major}{properties.minor}"))
        x = torch.zeros(1, dtype=torch.int32, device=device)
        arguments: Any = structure(PROBE_KERNEL)
        arguments.x = x.data_ptr()
        with torch.cuda.device(device):
            driver.launcher(module, "probe", arguments, LaunchShape(1, threads_per_block=1))()
        return None if x.item() == 42 else "its launch had no effect"
    except Exception as error:
        return str(error)


def first_working_driver(device: torch.device) -> str:
    """PyCUDA if it can launch a kernel, else cuda.core, else DeviceUnavailableError with both reasons."""
    reasons = {}
    for name in DRIVERS:
        reasons[name] = probe(name, device)
        if reasons[name] is None:
            return name
    raise DeviceUnavailableError(
        f"no CUDA driver package can launch a kernel on {device}: "
        + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        + '. Install the extra that matches torch.version.cuda: pip install "gpu_vecenv[cuda13]" (or cuda12)'
    )


_bound = threading.local()


def _bind_thread(device: torch.device) -> None:
    # A new thread has no current CUDA context; its first call of the runtime makes the primary one current.
    if not getattr(_bound, "done", False) and not torch.cuda.is_current_stream_capturing():
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()
        _bound.done = True
