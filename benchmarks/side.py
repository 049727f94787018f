"""The process of one side: ``python -m benchmarks.side NAME`` with a Request as JSON in the first line of its input.

It prints one JSON line when it is ready, and one for each further line of input, which is one timed repeat. Between
repeats it waits for input and has no work on the device, so that the other side is alone while it is measured. In an
environment without gpu_vecenv, the modules of ``benchmarks.peers`` are all that it imports.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import time  # perf_counter is one clock for all processes of a Linux computer
from typing import IO, Any

from benchmarks.workload import Request

MIN_SECONDS = 0.3  # of a repeat of a simulation: a run is repeated until it takes as long
QUICK_SECONDS = 0.01


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions, with Python's; distributions that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def serve(name: str, requests: IO[str], replies: IO[str]) -> None:
    """Prepare the side ``name`` of the first line, then time one repeat for each further line."""
    values = json.loads(requests.readline())
    min_seconds = QUICK_SECONDS if values.pop("quick") else MIN_SECONDS
    request = Request.from_dict(values)
    if request.processors:  # before libraries start their threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request.processors])
    start = time.perf_counter()
    side = importlib.import_module("benchmarks.ours" if name == "gpu_vecenv" else f"benchmarks.peers.{name}")
    prepared = side.prepare(request)
    prepared.run()  # compiles what is compiled at the first call
    preparation = time.perf_counter() - start
    runs = 1
    if request.workload.kind == "simulation":
        start = time.perf_counter()
        prepared.run()
        runs = max(1, math.ceil(min_seconds / (time.perf_counter() - start)))
    _reply(
        replies,
        ready=True,
        num_agents=prepared.num_agents,
        versions=versions(side.PEER.packages),
        preparation_s=round(preparation, 3),
        runs_per_repeat=runs,
        **prepared.facts,
    )
    for _ in requests:
        start = time.perf_counter()
        for _ in range(runs):
            prepared.run()
        seconds = time.perf_counter() - start
        _reply(replies, started=start, seconds=seconds, env_steps=runs * request.workload.env_steps)


def _reply(replies: IO[str], **values: Any) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()


if __name__ == "__main__":
    # Libraries print to standard output: what they print goes to standard error.
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, protocol)
    protocol.flush()
    sys.stderr.flush()
    os._exit(0)  # some libraries crash while they are unloaded; all results have been written
