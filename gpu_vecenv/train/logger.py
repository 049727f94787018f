"""Metrics logging: metrics.csv, TensorBoard, Weights & Biases, and the progress of the run."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import replace_file
from gpu_vecenv.progress import OnProgress
from gpu_vecenv.train.metrics import NonFiniteMetric, NonFiniteMetrics
from gpu_vecenv.train.plots import EPISODE_METRICS, METRICS_FILE
from gpu_vecenv.train.populations import without_members

NONFINITE_FILE = "nonfinite.csv"
NO_COLUMNS: Mapping[str, type] = MappingProxyType({})
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


class RunLog:
    """Writes rows of metrics to ``metrics.csv``, to TensorBoard if installed, and shows the run's progress.

    Metrics that are NaN or infinite for the first time are also rows of ``nonfinite.csv``, with the likely cause.

    Args:
        folder: The run folder.
        num_iterations: Iterations of the whole run.
        num_envs: Environments of all processes.
        on_progress: Shows the progress of the run.
        done: Iterations before a resume; later rows of an interrupted run are removed.
        wandb: Weights & Biases project to log to.

    Raises:
        ConfigError: ``wandb`` is given but not installed, or a table is damaged. Nothing was written.
    """

    def __init__(
        self,
        folder: Path,
        num_iterations: int,
        num_envs: int,
        on_progress: OnProgress,
        *,
        done: int = 0,
        wandb: str | None = None,
    ) -> None:
        path, self._nonfinite_path = folder / METRICS_FILE, folder / NONFINITE_FILE
        names, rows = kept_rows(path, done, {"env_steps": int})
        self._nonfinite_rows: list[Mapping[str, object]] = [*kept_rows(self._nonfinite_path, done, {"metric": str})[1]]
        self._nonfinite = NonFiniteMetrics(str(row["metric"]) for row in self._nonfinite_rows)
        steps = int(rows[-1]["env_steps"]) if rows else 0
        with contextlib.ExitStack() as held:
            self._wandb = _wandb(wandb, folder, done)  # before the first file: raises if wandb is missing
            if self._wandb is not None:
                held.callback(self._wandb.finish)
            folder.mkdir(parents=True, exist_ok=True)
            replace_table(path, names, rows)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | NO_FOLLOW), "a", newline="")
            held.callback(self._file.close)
            self._csv = csv.DictWriter(self._file, names, extrasaction="ignore") if names else None
            self._log_nonfinite()
            self._events = _tensorboard(folder / "tensorboard", steps)
            if self._events is not None:
                held.callback(self._events.close)
            self._held = held.pop_all()
        self._num_iterations, self._num_envs, self._on_progress = num_iterations, num_envs, on_progress

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _log_nonfinite(self) -> None:
        if self._nonfinite_rows:
            replace_table(self._nonfinite_path, NonFiniteMetric._fields, self._nonfinite_rows)
        else:
            self._nonfinite_path.unlink(missing_ok=True)

    def __call__(self, metrics: Mapping[str, float | str]) -> None:
        """Log a row of metrics. Means over episodes are left empty until there are any."""
        if self._csv is None:
            self._csv = csv.DictWriter(self._file, list(metrics), extrasaction="ignore")
            self._csv.writeheader()
        if found := self._nonfinite(metrics):
            self._nonfinite_rows += [metric._asdict() for metric in found]
            self._log_nonfinite()
        if metrics["first_episodes"]:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(EPISODE_METRICS)}
        self._csv.writerow(metrics)
        self._file.flush()
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        step = int(numbers["env_steps"])
        if self._events is not None:
            self._events.file_writer.add_summary(_summary(numbers), step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        returns = " ".join(
            f"{name.removeprefix('return_')} {numbers[name]:.2f}"
            for name in without_members(numbers)
            if name.startswith("return_")
        )
        shown = f"return: {returns}  episode: {numbers.get('episode_length', 0):.0f} steps"
        if first := numbers["first_episodes"]:
            shown = f"no returns yet: first episodes are running in {first:,.0f} of {self._num_envs:,} environments"
        iteration, rate = int(numbers["iteration"]), numbers["agent_steps_per_s"]
        text = f"iteration {iteration} of {self._num_iterations}  {rate_text(rate)}  {shown}"
        self._on_progress(iteration / self._num_iterations, text)


def rate_text(agent_steps_per_s: float) -> str:
    """A rate in words, from 10,000 on in thousands."""
    in_thousands = agent_steps_per_s >= 1e4
    return f"{agent_steps_per_s / (1e3 if in_thousands else 1):,.0f}{'k' * in_thousands} agent-steps/s"


def kept_rows(
    path: Path, done: int, columns: Mapping[str, type] = NO_COLUMNS
) -> tuple[list[str], list[dict[str, str]]]:
    """The columns of a table, if there are any, and its complete rows of the first ``done`` iterations.

    Args:
        path: The file.
        done: Number of iterations.
        columns: Columns that they must have beside "iteration", and the type of their values: int or str.

    Raises:
        ConfigError: The file is damaged; the message names the line.
    """
    if not done or not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        rows = []
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"it has more than {len(reader.fieldnames or ())} columns")
                if None in row.values() or int(row["iteration"]) > done:
                    continue
                for name, kind in columns.items():
                    kind(row[name])  # raises unless it is one
                rows.append(row)
        except (csv.Error, KeyError, ValueError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}, is damaged: {error!r}") from error
        return list(reader.fieldnames or ()), rows


def replace_table(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write a table anew, also in the place of a symbolic link; an empty file if it has no columns."""
    text = io.StringIO(newline="")
    if names:
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


def _tensorboard(folder: Path, steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    if folder.is_symlink():
        folder.unlink()
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    return SummaryWriter(str(folder), purge_step=steps + 1 if steps else None)


def _summary(metrics: Mapping[str, float]) -> Any:
    """All metrics as one event, which takes a fifth of the time of an event for each, as ``add_scalar`` writes."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    tags = {name.replace("_", "/", 1) if name.startswith("return_") else name: x for name, x in metrics.items()}
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()])


def _wandb(project: str | None, folder: Path, done: int) -> Any:
    if project is None:
        return None
    try:
        import wandb
    except ImportError:
        raise ConfigError("wandb is not installed; run: pip install wandb, or omit --wandb") from None
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / "wandb_id"
    run_id = id_file.read_text().strip() if done and id_file.is_file() else None
    run = wandb.init(project=project, name=folder.name, dir=str(folder), id=run_id, resume="allow")
    replace_file(id_file, f"{run.id}\n".encode())
    return run
