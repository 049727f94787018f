"""Fails a test where the host waits for the GPU."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """What waits for the GPU in this block raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
