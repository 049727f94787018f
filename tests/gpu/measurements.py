"""Files of measurements: all rows are of one commit, device and versions, and may be measured in several calls."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpu_vecenv.compile.device import resolve_device  # noqa: E402
from gpu_vecenv.engine import timing  # noqa: E402

REPEATS = timing.NUM_RUNS  # of everything that has quartiles


def arguments(description: str | None, **choices: tuple[str, ...]) -> argparse.Namespace:
    """The command line: the file, the device, and a choice of rows where there is one; its first value is the default.

    ``device`` is a torch.device; ``quick`` reduces times to those of tests, so that figures mean nothing.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON; rows that it has are kept, if they are of the same commit")
    for name, values in choices.items():
        parser.add_argument(name, nargs="?", choices=values, default=values[0])
    parser.add_argument("--device", help="default: cuda if usable, else cpu")
    parser.add_argument("--quick", action="store_true", help="sizes of tests: the figures mean nothing")
    given = parser.parse_args()
    given.device = resolve_device(given.device)
    if given.quick:
        timing.NUM_RUNS, timing.MIN_SECONDS = 2, 0.0
    return given


class Measurements:
    """The rows of a file, which is written after each.

    Args:
        given: What ``arguments`` returned. Rows of the file are kept.
        common: What the rows have in common, besides commit, device and versions.

    Raises:
        SystemExit: The file's rows are of another commit, device or version, or have other things in common.
    """

    def __init__(self, given: argparse.Namespace, **common: Any) -> None:
        self.file = file = given.file
        quick = {"quick": True} if given.quick else {}
        self.common: dict[str, Any] = json.loads(json.dumps({**timing.provenance(given.device), **quick, **common}))
        self.rows: list[dict[str, Any]] = []
        if file.exists():
            earlier = json.loads(file.read_text(encoding="utf-8"))
            refuse_changes(file, earlier, self.common)
            self.rows = earlier["rows"]

    def measure(self, key: Mapping[str, Any], call: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The row that has this key; if there is none, measured by ``call``, printed and written."""
        key = json.loads(json.dumps(key))
        for row in self.rows:
            if key.items() <= row.items():
                return row
        self.rows.append(json.loads(json.dumps({**key, **call()})))
        print(json.dumps(self.rows[-1]), flush=True)
        self.file.write_text(json.dumps({**self.common, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        return self.rows[-1]


def refuse_changes(file: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """SystemExit where a file has rows of another commit, device or version."""
    if changed := sorted((key for key in now if earlier.get(key) != now[key]), key=lambda key: key != "commit"):
        different = ", ".join(f"{key} {earlier.get(key)}, now {now[key]}" for key in changed)
        raise SystemExit(
            f"{file} has rows of {different}; expected the same, as all rows of a file are of one commit and computer. "
            "Give another file, or move this one away"
        )


def blocks_in_turn(
    ways: Mapping[str, Callable[[], object]], iterations: int, device: torch.device, repeats: int = REPEATS
) -> dict[str, list[float]]:
    """Seconds of an iteration of each way in each repeat, all ways in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, iterate in ways.items():
            timing.synchronize(device)
            start = time.perf_counter()
            for _ in range(iterations):
                iterate()
            timing.synchronize(device)
            times[name].append((time.perf_counter() - start) / iterations)
    return times


def milliseconds(name: str, seconds: list[float]) -> dict[str, Any]:
    """Median and quartiles."""
    return timing.spread(name, [1e3 * each for each in seconds], 3)


def ratios(name: str, seconds: list[float], by: list[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios of repeats that were measured one after the other."""
    return timing.spread(name, [one / other for one, other in zip(seconds, by, strict=True)], 4)
