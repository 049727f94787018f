"""``gpu-vecenv bench``: throughput measurements."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_vecenv.bench.command import BenchConfig, run
from gpu_vecenv.cli.options import Command


@dataclass(frozen=True)
class Bench(BenchConfig, Command):
    """Measure steps, training or interfaces against the memory bandwidth; the same as python -m gpu_vecenv.bench."""

    def __call__(self) -> None:
        """Measure and print."""
        run(self)
