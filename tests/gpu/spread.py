"""Run the commands of a file side by side, each on one GPU of several.

usage: python tests/gpu/spread.py JOBS FOLDER [--max-seconds 1500] [--gpus 4]

A line of JOBS is a share of a GPU, a name and a command: 1 for all of it, 0.5 beside one other. Lines start in their
order, each on the first GPU with so much left, with CUDA_VISIBLE_DEVICES set; what they print goes to FOLDER/NAME.txt.
A line that begins with the number of a GPU and a colon, as 2:0.5, waits for that one. Commands still running at the end
are interrupted, and those not begun are left out; FOLDER/jobs.json has all exit codes and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

PATIENCE_S = 20  # from SIGINT to SIGKILL
INTERVAL_S = 0.5


@dataclass
class Job:
    """A line of the file.

    Attributes:
        share: Of a GPU.
        gpu: The one that it waits for; None: any.
    """

    share: Fraction
    gpu: int | None
    name: str
    command: str

    @classmethod
    def of(cls, line: str) -> Job:
        """The job that a line describes."""
        where, name, command = line.split(maxsplit=2)
        gpu, _, share = where.rpartition(":")
        return cls(Fraction(share), int(gpu) if gpu else None, name, command)

    def start(self, gpu: int, folder: Path) -> subprocess.Popen[bytes]:
        """Begin it."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        with (folder / f"{self.name}.txt").open("ab") as output:
            return subprocess.Popen(
                ["bash", "-c", self.command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command with all that it has started, and kill what is left of it."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=PATIENCE_S)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(jobs: list[Job], folder: Path, gpus: int, deadline: float) -> dict[str, dict[str, Any]]:
    """Exit code, seconds and GPU of each job that was begun."""
    free = [Fraction(1)] * gpus
    waiting, running = list(jobs), dict[str, tuple[Job, int, float, subprocess.Popen[bytes]]]()
    done: dict[str, dict[str, Any]] = {}
    while waiting or running:
        over = time.monotonic() > deadline
        for name, (job, gpu, started, process) in list(running.items()):
            interrupted = over and process.poll() is None
            if interrupted:
                stop(process)
            if process.poll() is not None:
                free[gpu] += job.share
                done[name] = {"code": process.returncode, "seconds": time.monotonic() - started, "gpu": gpu}
                done[name] |= {"interrupted": True} if interrupted else {}
                (folder / "jobs.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
                del running[name]
        if over:
            break
        for job in list(waiting):
            places = [k for k in range(gpus) if job.gpu in (None, k) and free[k] >= job.share]
            if places:
                gpu = max(places, key=lambda k: free[k])
                free[gpu] -= job.share
                running[job.name] = (job, gpu, time.monotonic(), job.start(gpu, folder))
                waiting.remove(job)
        time.sleep(INTERVAL_S)
    return done


def main() -> int:
    """Run all; 1 if one has failed or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    lines = given.jobs.read_text(encoding="utf-8").splitlines()
    jobs = [Job.of(line) for line in lines if line.strip() and not line.startswith("#")]
    given.folder.mkdir(parents=True, exist_ok=True)
    done = run(jobs, given.folder, given.gpus, time.monotonic() + given.max_seconds)
    for name, result in done.items():
        print(f"{name}: exit code {result['code']} after {result['seconds']:.0f} s on GPU {result['gpu']}")
    return int(len(done) < len(jobs) or any(result["code"] for result in done.values()))


if __name__ == "__main__":
    sys.exit(main())
