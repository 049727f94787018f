"""The table of docs/performance.md, from the results that are committed: ``python -m benchmarks.table``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
RESULTS = "*-peers*.json"
HEAD = ("| | environments x agents | on | gpu_vecenv | other library | ratio |", "|---|---|---|---|---|---|")
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
DIGITS = 3


def lines(folder: Path = FOLDER) -> list[str]:
    """The whole table: simulation, then training, each GPU first."""
    rows = [
        ((row["kind"], row["ours_device"] != "cuda", row["game"], row["num_envs"], row["peer"]), line(row, results))
        for results in read(folder)
        for row in results["rows"]
    ]
    return [*HEAD, *(cells for _, cells in sorted(rows))]


def read(folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """The results that are committed."""
    for path in sorted(folder.glob(RESULTS)):
        yield json.loads(path.read_text(encoding="utf-8"))


def line(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """One row: medians and, where repeats were kept, quartiles."""
    gpu = results["device"].removeprefix("NVIDIA ")
    what = row["kind"] if row.get("algorithm", "ppo") == "ppo" else f"{row['kind']} ({row['algorithm']})"
    workload = [f"{what} `{row['game']}`"]
    workload += [value for value in row.get("config", {}).values() if isinstance(value, str)]  # a layout, a scenario
    workload += [row["precision"]] if row["kind"] == "training" else []
    devices = [gpu if row[key] == "cuda" else "CPU" for key in ("ours_device", "peer_device")]
    cells = (
        ", ".join(workload),
        f"{row['num_envs']:,} x {row['num_agents']:,}",
        " and ".join(dict.fromkeys(devices)),
        rate(row["ours_env_steps_per_s"]),
        f"{row['peer']} {rate(row['theirs_env_steps_per_s'])}",
        ratio(row),
    )
    return f"| {' | '.join(cells)} |"


def rate(spread: Mapping[str, Any]) -> str:
    """A rate with its quartiles, like 24.7 M (24.4 … 25.1); without them if it was measured once."""
    middle = spread["median"] if "quartiles" in spread else spread["single"]
    scale, unit = next((scale, unit) for scale, unit in UNITS if middle >= scale or scale == 1)
    text = f"{_digits(middle / scale)} {unit}".strip()
    return text + _quartiles(value / scale for value in spread.get("quartiles", ()))


def ratio(row: Mapping[str, Any]) -> str:
    """Ours by theirs, of the pairs of repeats."""
    if "ratio" in row:
        return _digits(row["ratio"]["median"]) + _quartiles(row["ratio"]["quartiles"])
    return _digits(row["ours_env_steps_per_s"]["single"] / row["theirs_env_steps_per_s"]["single"])


def _quartiles(values: Iterable[float]) -> str:
    text = " … ".join(_digits(value) for value in values)
    return f" ({text})" if text else ""


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    rounded = float(f"{value:.{DIGITS}g}")
    whole = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    return f"{rounded:,.{max(0, DIGITS - max(whole, 1))}f}" if whole else f"{rounded:#.{DIGITS}g}"


if __name__ == "__main__":
    print(*lines(), sep="\n")
