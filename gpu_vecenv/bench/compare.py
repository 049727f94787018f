"""Rows of the benchmark beside those of an earlier run, which is read from its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_vecenv.errors import ConfigError

# Rows are of the same thing where all of these agree that both have, and their configurations.
SAME = ("game", "num_envs", "num_agents", "num_steps", "units", "update", "precision")
MODES = ("interface", "baseline", "update")  # a key that only rows of this kind have, and must share
PROVENANCE_KEYS = ("commit", "device_source_sha256", "device", "processors", "torch", "cuda", "python", "gpu_vecenv")
RATE = "env_steps_per_s"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run: its file, what it says of its machine, and its rows."""

    path: Path
    provenance: Mapping[str, Any]
    rows: tuple[Row, ...]

    def ratios(self, row: Row) -> dict[str, float] | None:
        """Stage -> env-steps/s of ``row`` by those of the earlier row; None where there is no such row."""
        found = self.find(row)
        if found is None:
            return None
        now, before = rates(row), rates(found)
        return {stage: round(now[stage] / before[stage], 3) for stage in now if stage in before}

    def find(self, row: Row) -> Row | None:
        """The earlier row of the same thing."""
        row = json.loads(json.dumps(row))  # tuples become lists, as in the file

        def same(old: Row) -> bool:
            kinds = all(row.get(key) == old.get(key) for key in MODES)
            sizes = all(row[key] == old[key] for key in SAME if key in row and key in old)
            return kinds and sizes and row.get("config", {}) == old.get("config", {})

        return next((old for old in self.rows if same(old)), None)

    def differences(self, provenance: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What was not the same about machine and versions: key -> [then, now]."""
        keys = [
            key for key in PROVENANCE_KEYS if key in self.provenance and self.provenance[key] != provenance.get(key)
        ]
        return {key: [self.provenance[key], provenance.get(key)] for key in keys}


def read(path: Path) -> EarlierRun:
    """A file that the benchmark's ``--json`` has written.

    Raises:
        FileNotFoundError: There is none.
        ConfigError: It is damaged, or something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} to compare with; expected what --json has written")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ConfigError(f"{path} is no JSON, or damaged: {error}; expected what --json has written") from error
    rows = told.get("rows") if isinstance(told, dict) else None
    if not isinstance(rows, list) or not {"commit", "device", "torch"} <= set(told):
        raise ConfigError(f"{path} is no result of this benchmark; expected what --json has written")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("game"), str) or type(row.get("num_envs")) is not int:
            raise ConfigError(f"{path}, rows[{number}], is damaged; expected a game and its num_envs")
        if wrong := [stage for stage, rate in rates(row).items() if not _positive(rate)]:
            raise ConfigError(f"{path}, rows[{number}], is damaged: {wrong[0]} has no rate above 0")
    return EarlierRun(path, {key: value for key, value in told.items() if key != "rows"}, tuple(rows))


def rates(row: Row) -> dict[str, Any]:
    """Stage -> env-steps/s. Of interfaces, whose rows have times alone, the rate of num_envs in that time."""
    found = {key.removesuffix(RATE).rstrip("_") or "iteration": row[key] for key in row if key.endswith(RATE)}
    for key in ("interface_us", "vec_env_step_us") if "interface" in row else ():
        if key in row:
            found[key.removesuffix("_us")] = 1e6 * row["num_envs"] / row[key] if _positive(row[key]) else row[key]
    return found


def _positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and number > 0
