"""Comparison of the benchmark's rows with those of an earlier run, read from its JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_vecenv.errors import ConfigError

# Two rows match if they agree in all of these keys that both have, and in their configurations.
SAME = ("game", "num_envs", "num_agents", "num_steps", "units", "update", "precision")
MODES = (
    "interface",
    "baseline",
    "update",
)  # keys that only one kind of row has; both rows must have the same value or none
PROVENANCE_KEYS = (
    *("commit", "device_source_sha256", "device", "processors", "driver", "torch", "cuda", "python", "gpu_vecenv"),
)
RATE = "env_steps_per_s"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run: its file, device and versions, and rows."""

    path: Path
    provenance: Mapping[str, Any]
    rows: tuple[Row, ...]

    def ratios(self, row: Row) -> dict[str, float] | None:
        """Stage -> env-steps/s of ``row`` by those of the earlier row; None if no row matches."""
        earlier = self.find(row)
        if earlier is None:
            return None
        now, before = rates(row), rates(earlier)
        return {stage: round(now[stage] / before[stage], 3) for stage in now if stage in before}

    def find(self, row: Row) -> Row | None:
        """The first earlier row that matches."""
        row = json.loads(json.dumps(row))  # tuples become lists, as in the file

        def same(old: Row) -> bool:
            kinds = all(row.get(key) == old.get(key) for key in MODES)
            sizes = all(row[key] == old[key] for key in SAME if key in row and key in old)
            return kinds and sizes and row.get("config", {}) == old.get("config", {})

        return next((old for old in self.rows if same(old)), None)

    def differences(self, provenance: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Differences in device and versions: key -> [then, now]."""
        keys = [
            key for key in PROVENANCE_KEYS if key in self.provenance and self.provenance[key] != provenance.get(key)
        ]
        return {key: [self.provenance[key], provenance.get(key)] for key in keys}


def read(path: Path) -> EarlierRun:
    """Read a file written by ``--json``.

    Raises:
        FileNotFoundError: The file does not exist.
        ConfigError: The file is damaged, or is not a result of the benchmark.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} to compare with; expected a file written by --json")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ConfigError(f"{path} is not JSON, or damaged: {error}; expected a file written by --json") from error
    rows = contents.get("rows") if isinstance(contents, dict) else None
    if not isinstance(rows, list) or not {"commit", "device", "torch"} <= set(contents):
        raise ConfigError(f"{path} is not a result of this benchmark; expected a file written by --json")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("game"), str) or type(row.get("num_envs")) is not int:
            raise ConfigError(f"{path}, rows[{number}], is damaged; expected a game and its num_envs")
        if wrong := [stage for stage, rate in rates(row).items() if not _positive(rate)]:
            raise ConfigError(f"{path}, rows[{number}], is damaged: {wrong[0]} has no positive rate")
    return EarlierRun(path, {key: value for key, value in contents.items() if key != "rows"}, tuple(rows))


def rates(row: Row) -> dict[str, Any]:
    """Stage -> env-steps/s; for rows of interfaces, which have times only, computed from the time and num_envs."""
    found = {key.removesuffix(RATE).rstrip("_") or "iteration": row[key] for key in row if key.endswith(RATE)}
    for key in ("interface_us", "vec_env_step_us") if "interface" in row else ():
        if key in row:
            found[key.removesuffix("_us")] = 1e6 * row["num_envs"] / row[key] if _positive(row[key]) else row[key]
    return found


def _positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and number > 0
