"""Selects the backend of a device, and reports which CUDA driver packages work."""

from __future__ import annotations

import torch

from gpu_vecenv.compile.backends import Backend


def select(device: torch.device, driver: str | None = None) -> Backend:
    """The backend of a device; ``driver`` is "pycuda" or "cuda_core" (CUDA only), by default the first that works."""
    if device.type == "cpu":
        if driver is not None:
            raise ValueError(f"driver is {driver!r}, but the device is {device}; expected None, or a CUDA device")
        from gpu_vecenv.compile.backends.host import HostBackend

        return HostBackend()
    from gpu_vecenv.compile.backends.cuda import CudaBackend

    return CudaBackend(device, driver)


def working_drivers() -> dict[str, str]:
    """CUDA driver name -> "works", or the reason why it does not. Launches a kernel with each on the current GPU."""
    if not torch.cuda.is_available():
        return {}
    from gpu_vecenv.compile.backends.cuda import DRIVERS, probe

    device = torch.device("cuda", torch.cuda.current_device())
    return {name: probe(name, device) or "works" for name in DRIVERS}
