"""``gpu-vecenv bench``: throughput measurements."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_vecenv.bench.command import BenchConfig, run
from gpu_vecenv.cli.options import Command


@dataclass(frozen=True)
class Bench(BenchConfig, Command):
    """Measure the throughput of steps, training or interfaces.

    The same as python -m gpu_vecenv.bench; beside it stands the memory bandwidth.
    """

    def __call__(self) -> None:
        """Measure and print."""
        run(self)
