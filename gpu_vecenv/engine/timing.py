"""Timing and provenance for benchmarks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends.host import num_host_threads
from gpu_vecenv.files import cuda_folder

NUM_RUNS = 10  # runs that one result summarises
MIN_SECONDS, MAX_SECONDS = 0.1, 1.0  # of a run; at least 3 calls unless they exceed MAX_SECONDS


def run_seconds(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Wall time of one call in each of several runs of many calls; each run ends with a synchronisation."""
    (times,) = runs_in_turn([call], device)
    return times


def runs_in_turn(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[list[float]]:
    """``run_seconds`` of each, a run of each in turn: their k-th runs are as fast as the computer is at that time."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(NUM_RUNS):
        for call, own in zip(calls, times, strict=True):
            own.append(_run(call, device))
    return times


def _run(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one of many calls."""
    synchronize(device)
    start, calls, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < MIN_SECONDS or (calls < 3 and elapsed < MAX_SECONDS):
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if device.type == "cuda" and calls % 20 == 0:  # a launch returns before its kernel ends
            synchronize(device)
    synchronize(device)
    return (time.perf_counter() - start) / calls


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, the median of several runs."""
    return statistics.median(run_seconds(call, device))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value three times itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def spread(name: str, values: Sequence[float], digits: int) -> dict[str, Any]:
    """The median under ``name`` and the quartiles under ``<name>_quartiles``, with so many digits after the point."""
    lower, median, upper = (round(value, digits) for value in quartiles(values))
    return {name: median, f"{name}_quartiles": [lower, upper]}


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
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name() or platform.machine()
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


def processor_name() -> str | None:
    """The CPU's name; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
