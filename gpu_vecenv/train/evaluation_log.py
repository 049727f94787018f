"""Evaluations during training as a table, evaluations.csv in a run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu_vecenv.train.logger import kept_rows, replace_table
from gpu_vecenv.train.selection import MatchResult

COLUMNS = ("iteration", "env_steps", "seconds", *MatchResult._fields)


class EvaluationLog:
    """Writes a row for each match of an evaluation; the file is replaced as a whole.

    Args:
        path: The file.
        done: Iterations before a resume, of which rows are kept; None: a new run, and an old file is removed.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(self, path: Path, done: int | None = None) -> None:
        self._path, self._rows = path, list[Mapping[str, object]]()
        if done is None:
            path.unlink(missing_ok=True)
        elif path.is_file():
            self._rows = [*kept_rows(path, done)[1]]
            replace_table(path, COLUMNS, self._rows)

    def __call__(self, iteration: int, env_steps: int, seconds: float, results: Iterable[MatchResult]) -> None:
        """Add the rows of an evaluation after ``seconds`` of training, in place of others of this iteration."""
        # A resumed run may repeat its last evaluation.
        self._rows = [row for row in self._rows if int(str(row["iteration"])) < iteration]
        when = {"iteration": iteration, "env_steps": env_steps, "seconds": seconds}
        self._rows += [{**when, **result._asdict()} for result in results]
        replace_table(self._path, COLUMNS, self._rows)
