"""What plots show of a run's evaluations: curves against fixed opponents, and the returns of random play."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gpu_vecenv.errors import ConfigError

EVALUATIONS_FILE, EVALUATION_FILE = "evaluations.csv", "evaluation.json"  # while it trains, at the end
ALL_RANDOM = "all random"  # of the final evaluation: all roles act randomly
FROZEN, NONE = "frozen", "none"  # opponents where nothing else learns: all others are frozen, or there are none
Points: TypeAlias = list[dict[str, float]]  # env_steps, seconds and mean_return of each evaluation


def read_evaluations(run: Path) -> dict[tuple[str, str], Points]:
    """Role and opponent -> the evaluations in RUN/evaluations.csv; none without that file.

    Raises:
        ConfigError: The file is damaged; the message names the line.
    """
    path, found = Path(run) / EVALUATIONS_FILE, dict[tuple[str, str], Points]()
    if not path.is_file():
        return found
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                point = {name: float(row[name]) for name in ("env_steps", "seconds", "mean_return")}
                found.setdefault((row["role"], row["opponent"]), []).append(point)
        except (csv.Error, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}, is damaged: {error!r}") from error
    return found


def read_random_returns(run: Path) -> dict[str, float]:
    """Role -> its mean return where all act randomly, of RUN/evaluation.json; none without that file.

    Raises:
        ConfigError: The file is damaged.
    """
    path = Path(run) / EVALUATION_FILE
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8")).get(ALL_RANDOM, {})
        start = "return_"
        return {name.removeprefix(start): float(value) for name, value in results.items() if name.startswith(start)}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def roles_that_learn(metrics: Sequence[str]) -> set[str]:
    """The roles that policies in training play, by the columns of metrics.csv."""
    roles = {name.removeprefix("return_") for name in metrics if name.startswith("return_")}
    policies = [name.removeprefix("learning_rate_") for name in metrics if name.startswith("learning_rate_")]
    parts = [part for policy in policies for part in policy.split("+")]
    return {part if part in roles else part.rpartition("_")[0] for part in parts} & roles
