"""What experiments have in common: their arguments, metrics and failures, and the command that runs one."""

import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Union

import tyro

TESTS = Path(__file__).resolve().parents[1]
NAMES = ("saves", "damage", "resume", "cache", "leaks", "soak", "rng", "large", "interrupts")
NOTHING = "nothing"
# What every environment's steps go through, beside the device code.
ENGINE = [
    "gpu_vecenv/engine/vec_env.py",
    "gpu_vecenv/engine/step_buffers.py",
    "gpu_vecenv/engine/data_manager.py",
    "gpu_vecenv/compile/codegen.py",
    "gpu_vecenv/compile/engine_kernels.py",
    "gpu_vecenv/declare/layout.py",
    "gpu_vecenv/compile/backends/*.py",
]
SHOWN = 20  # failures that are printed
Metrics = dict[str, Any]


@dataclass(kw_only=True)
class Experiment:
    """One experiment. Its fields are its arguments; a subclass gives ``measure``."""

    count: int
    """How often."""
    seed: int = 0
    """Of all that is random."""
    device: str = "cpu"
    """cpu or cuda."""
    json: Path | None = None
    """A file for the metrics."""
    planted: bool = False
    """Plant faults, too: the experiment must see each of them."""
    receipt: bool = False
    """Plant faults, and write a receipt, which is bound to the sources."""
    failures: list[str] = field(init=False, default_factory=list)

    depends_on: ClassVar[tuple[str, ...]] = ()  # files beside the engine's whose change makes a receipt stale

    def measure(self) -> Metrics:
        """The metrics; what goes wrong is added to ``failures``."""
        raise NotImplementedError

    def plant(self) -> Metrics:
        """Fault -> what the experiment says when it is planted."""
        return {}

    def check(self, holds: bool, failure: str) -> bool:
        """Note a failure unless something holds."""
        if not holds:
            self.failures.append(failure)
        return holds

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def run(self) -> Metrics:
        """Metrics with the arguments before them, the time and the number of failures after them."""
        begin = time.monotonic()
        metrics: Metrics = {}
        try:
            metrics = self.measure()
            if self.planted or self.receipt:
                metrics["planted"] = self.plant()
                for fault, seen in metrics["planted"].items():
                    self.check(seen != NOTHING, f"{fault}: it was planted, and nothing was said")
        except Exception:
            self.failures.append(traceback.format_exc())
        arguments = {"experiment": self.name, "count": self.count, "seed": self.seed, "device": self.device}
        seconds = round(time.monotonic() - begin, 1)
        return {**arguments, **metrics, "seconds": seconds, "failures": len(self.failures)}


def said(planted: Experiment) -> str:
    """The first failure of an experiment in which there is a fault."""
    planted.measure()
    return planted.failures[0].strip().splitlines()[-1] if planted.failures else NOTHING


def live_memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    """First and last but one of consecutive pieces."""
    for first in range(0, total, size):
        yield first, min(first + size, total)


def environment() -> dict[str, str]:
    """Of a child process: it finds the package and the experiments, and uses one thread."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def metrics_of(name: str, *arguments: object) -> Metrics:
    """Run an experiment as a command of its own and read its metrics.

    Raises:
        AssertionError: Its exit status is not 0.
    """
    command = [sys.executable, str(TESTS / "reliability"), name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def kind_of(name: str) -> type[Experiment]:
    """The experiment of this name."""
    return getattr(importlib.import_module(f"reliability.{name}"), name.capitalize())


def main() -> int:
    """Run what the command line says; the exit status."""
    chosen, prog, arguments = sys.argv[1:2], "tests/reliability", sys.argv[1:]
    if chosen and chosen[0] in NAMES:  # only this one is imported
        experiment = tyro.cli(kind_of(chosen[0]), prog=f"{prog} {chosen[0]}", args=arguments[1:])
    else:
        experiment = tyro.cli(Union[tuple(map(kind_of, NAMES))], prog=prog, args=arguments)  # noqa: UP007
    metrics = experiment.run()
    for failure in experiment.failures[:SHOWN]:
        print(f"failure: {failure}")
    if experiment.json is not None:
        experiment.json.write_text(json.dumps({**metrics, "what": experiment.failures}, indent=1) + "\n")
    if experiment.receipt and not experiment.failures:
        from receipts import write

        planted = metrics.pop("planted")
        write(
            experiment.name,
            what=type(experiment).__doc__ or "",
            command=f"python tests/reliability {' '.join(sys.argv[1:])}",
            metrics=metrics,
            planted=planted,
            python=[*ENGINE, *experiment.depends_on, f"tests/reliability/{experiment.name}.py"],
            device=None if experiment.device.startswith("cuda") else platform.machine(),
        )
    print(json.dumps(metrics))
    return int(bool(experiment.failures))
