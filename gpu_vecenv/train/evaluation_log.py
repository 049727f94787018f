"""Evaluations during training as a table, evaluations.csv in a run's folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from gpu_vecenv.files import replace_file
from gpu_vecenv.train.selection import MatchResult

COLUMNS = ("iteration", "env_steps", "seconds", *MatchResult._fields)


class EvaluationLog:
    """Writes a row for each match of an evaluation; the file is replaced as a whole.

    Args:
        path: The file.
        done: Iterations before a resume, of which rows are kept; None: a new run, and an old file is removed.
    """

    def __init__(self, path: Path, done: int | None = None) -> None:
        self._path, self._rows = path, list[list[str]]()
        if done is None:
            path.unlink(missing_ok=True)
        elif path.is_file():
            with path.open(newline="") as file:
                rows = list(csv.reader(file))[1:]
            self._rows = [row for row in rows if int(row[0]) <= done]
            self._write()

    def __call__(self, iteration: int, env_steps: int, seconds: float, results: Iterable[MatchResult]) -> None:
        """Add the rows of an evaluation after ``seconds`` of training, in place of others of this iteration."""
        kept = [row for row in self._rows if int(row[0]) < iteration]  # a resumed run may repeat its last evaluation
        self._rows = kept + [[str(value) for value in (iteration, env_steps, seconds, *result)] for result in results]
        self._write()

    def _write(self) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([COLUMNS, *self._rows])
        replace_file(self._path, text.getvalue().encode())
