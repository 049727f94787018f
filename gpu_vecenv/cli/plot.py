"""``gpu-vecenv plot``: learning curves of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gpu_vecenv.cli.options import PROGRAM, Command
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable
from gpu_vecenv.train.plots import plot_runs
from gpu_vecenv.train.run_folder import run_folders


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw the learning curves of runs.

    RUN is the folder of a run, or of several seeds, which become one line with a band.
    """

    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN...")]]  # run folders, one or more
    out: Path = Path("curves.png")  # file of the figure, .png or .svg
    metrics: tuple[str, ...] = ()  # columns of metrics.csv; none: returns and episode lengths
    x: Literal["env_steps", "seconds", "both"] = "env_steps"  # the horizontal axis; both: side by side
    smooth: int = param(1, low=1)  # window of the running mean, in iterations

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.runs:
            raise ConfigError(f"plot needs at least one run folder: {PROGRAM} plot runs/one runs/other")

    def __call__(self) -> None:
        """Draw them."""
        runs = [folder for run in self.runs for folder in run_folders(run)]
        if not plot_runs(runs, self.out, metrics=self.metrics, x=self.x, smooth=self.smooth):
            raise ConfigError('curves need matplotlib: pip install "gpu_vecenv[train]"')
        print(printable(f"drew {self.out}"))
