"""Device selection, free memory and current stream. A GPU that exists but is unusable causes a warning."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gpu_vecenv.compile.toolchain import find_driver, find_torch, gpu_problem
from gpu_vecenv.errors import DeviceUnavailableError
from gpu_vecenv.escapes import warn


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device with its index, checked to be usable.

    Raises:
        DeviceUnavailableError: It does not exist; the message describes what was found. No CUDA context is created.
    """
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        problem = gpu_problem(find_driver(), find_torch())
        if problem:
            silence = 'pass device="cpu", or --device cpu, to silence this warning.'
            warn(f"{problem}\nRunning on the CPU; {silence}", stacklevel=3)
        return torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DeviceUnavailableError(f'device is {device!r}; expected "cpu", "cuda" or "cuda:<number>"') from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise DeviceUnavailableError(f'device is {device!r}; expected "cpu", "cuda" or "cuda:<number>"')
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        raise DeviceUnavailableError(
            f"device is {device!r}, but torch {torch.__version__} (built for {built}) finds no usable GPU; "
            'run "gpu-vecenv doctor" for the reason, or use the CPU: device="cpu", on a command line --device cpu'
        )
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise DeviceUnavailableError(
            f'device is {device!r}, but there are {torch.cuda.device_count()} GPUs: "cuda:0" to '
            f'"cuda:{torch.cuda.device_count() - 1}"'
        )
    return torch.device("cuda", index)


def create_primary_context(device: torch.device) -> None:
    """Let torch create the context of a GPU, with its own flags, before another library does.

    Raises:
        DeviceUnavailableError: It cannot, mostly for want of memory.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DeviceUnavailableError(
            f"torch cannot use {device}: {reason}; end other programs that use it, which nvidia-smi lists, or wait"
        ) from error


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on a GPU including torch's unused cache, on the host the available RAM."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:  # MemFree would leave out the reclaimable page cache
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of the physical memory, if known
        known = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if known else 2**62


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on a GPU.

    ``torch.cuda.current_stream`` creates an object each time, which takes longer than the rest of a launch. The private
    function that torch's compiled code calls is used where it exists.
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(device.index) if raw else torch.cuda.current_stream(device).cuda_stream)
