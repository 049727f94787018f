"""Timing and provenance for benchmarks."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends.host import num_host_threads
from gpu_vecenv.files import cuda_folder

NUM_RUNS = 7  # runs that one result summarises
MIN_SECONDS, MAX_SECONDS = 0.1, 1.0  # of a run; at least 3 calls unless they exceed MAX_SECONDS


def seconds(
    call: Callable[[], Any], device: torch.device, *, of: Callable[[Iterable[float]], float] = statistics.median
) -> float:
    """Wall time of one call: ``of`` over several runs of many calls each; each run ends with a synchronisation.

    The median estimates the usual time, ``min`` the time without interference by other processes.
    """
    call()
    times = []
    for _ in range(NUM_RUNS):
        synchronize(device)
        start, calls, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < MIN_SECONDS or (calls < 3 and elapsed < MAX_SECONDS):
            call()
            calls += 1
            elapsed = time.perf_counter() - start
            if device.type == "cuda" and calls % 20 == 0:  # a launch returns before its kernel ends
                synchronize(device)
        synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return of(times)


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``call`` as a CUDA graph; unchanged on the host."""
    if device.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def synchronize(device: torch.device) -> None:
    """Wait until all work of a GPU is done; returns at once on the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def provenance(device: torch.device) -> dict[str, Any]:
    """Provenance of a benchmark result: commit, hash of the device code, device, processors, versions.

    Outside of a git checkout, $GPU_VECENV_COMMIT is the commit.
    """
    text = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(cuda_folder().rglob("*.cu*"))))
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607 - the caller's git, on $PATH
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "gpu_vecenv": __version__,
        "commit": described or os.environ.get("GPU_VECENV_COMMIT"),
        "device_source_sha256": text.hexdigest(),
        "device": name,
        "processors": num_host_threads(),  # of the host, available to this process
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
