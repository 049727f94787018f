"""Base of all experiments: arguments, metrics and failures; and the command that runs one."""

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
from support.fuzzing import fuzz_seed

TESTS = Path(__file__).resolve().parents[1]
NAMES = ("saves", "damage", "resume", "cache", "leaks", "soak", "rng", "large", "interrupts", "calls", "injections")
NOTHING = "nothing"
# Sources, other than device code, on which every step depends.
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
    """One experiment. Its fields are its arguments; subclasses implement ``measure``."""

    count: int
    """Number of repetitions."""
    seed: int = field(default_factory=fuzz_seed)
    """Seed of all random choices; by default a fresh one."""
    device: str = "cpu"
    """cpu or cuda."""
    json: Path | None = None
    """File for the metrics."""
    planted: bool = False
    """Also plant faults: the experiment must find each of them."""
    receipt: bool = False
    """Plant faults and write a receipt with hashes of the sources."""
    failures: list[str] = field(init=False, default_factory=list)

    depends_on: ClassVar[tuple[str, ...]] = ()  # additional files whose change makes a receipt stale

    def measure(self) -> Metrics:
        """Returns the metrics; adds problems to ``failures``."""
        raise NotImplementedError

    def plant(self) -> Metrics:
        """Planted fault -> message of the experiment."""
        raise NotImplementedError

    def check(self, holds: bool, failure: str) -> bool:
        """Add a failure unless ``holds``."""
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
                    self.check(seen != NOTHING, f"{fault}: it was planted and not found")
        except Exception:
            self.failures.append(traceback.format_exc())
        arguments = {"experiment": self.name, "count": self.count, "seed": self.seed, "device": self.device}
        seconds = round(time.monotonic() - begin, 1)
        return {**arguments, **metrics, "seconds": seconds, "failures": len(self.failures)}


def said(planted: Experiment) -> str:
    """The first failure of an experiment with a planted fault."""
    planted.measure()
    return planted.failures[0].strip().splitlines()[-1] if planted.failures else NOTHING


def live_memory() -> int:
    """Resident set size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges."""
    for first in range(0, total, size):
        yield first, min(first + size, total)


def environment() -> dict[str, str]:
    """Environment of a child process: the package and the experiments on PYTHONPATH, one thread."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def metrics_of(name: str, *arguments: object) -> Metrics:
    """Run an experiment as a command and read its metrics.

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
    """Run the experiment on the command line; returns the exit status."""
    chosen, prog, arguments = sys.argv[1:2], "tests/reliability", sys.argv[1:]
    if chosen and chosen[0] in NAMES:  # only this one is imported
        experiment = tyro.cli(kind_of(chosen[0]), prog=f"{prog} {chosen[0]}", args=arguments[1:])
    else:
        experiment = tyro.cli(Union[tuple(map(kind_of, NAMES))], prog=prog, args=arguments)  # noqa: UP007
    metrics = experiment.run()
    for failure in experiment.failures[:SHOWN]:
        print(f"failure: {failure}")
    if experiment.failures:
        print(f"to repeat it: --seed {experiment.seed}")
    if experiment.json is not None:
        experiment.json.write_text(json.dumps({**metrics, "what": experiment.failures}, indent=1) + "\n")
    if experiment.receipt and not experiment.failures:
        from receipts import write

        given = [*sys.argv[1:], *([] if "--seed" in sys.argv else ["--seed", str(experiment.seed)])]
        planted = metrics.pop("planted")
        write(
            experiment.name,
            what=type(experiment).__doc__ or "",
            command=f"python tests/reliability {' '.join(given)}",
            metrics=metrics,
            planted=planted,
            python=[*ENGINE, *experiment.depends_on, f"tests/reliability/{experiment.name}.py"],
            device=None if experiment.device.startswith("cuda") else platform.machine(),
        )
    print(json.dumps(metrics))
    return int(bool(experiment.failures))
