"""The tables of docs/benchmarks.md, from the results that are committed: of rates by ``python -m benchmarks.table``.

``python -m benchmarks.table scores`` prints the seconds to scores.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
RESULTS = "*-peers*.json"
SCORES = "*-reaching.json"
HEAD = ("| | environments x agents | gpu_vecenv | other library | ratio |", "|---|---|---|---|---|")
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
DIGITS = 3
Reached = Sequence[Mapping[str, float]]  # of each seed the "seconds" and "env_steps" until it has a score
NEVER = {"seconds": math.inf, "env_steps": math.inf}


def lines(folder: Path = FOLDER) -> list[str]:
    """All tables, each of one computer and one commit, GPUs and the newest first, each with its commands below it."""
    computers = sorted(read(folder), key=_computer)
    parts = sorted((list(group) for _, group in groupby(computers, _computer)), key=_date, reverse=True)
    return [line for on_gpu in (True, False) for part in parts if _gpu(part[0]) == on_gpu for line in _part(part)]


def _computer(results: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("device", "commit", "cpu", "processors")
    return tuple(str(results.get(key, "")) for key in keys)


def _gpu(results: Mapping[str, Any]) -> bool:
    return str(results["device"]).startswith("NVIDIA")


def _date(part: Sequence[Mapping[str, Any]]) -> str:
    return max(results["date"] for results in part)


def _part(part: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where it was measured, the table, the commands."""
    first, versions = part[0], {}
    for results in part:
        versions |= {name: version for name, version in results["versions"].items() if name != "torch"}
    versions.pop("gpu_vecenv", None)
    processors = first.get("processors")
    cpu = (
        f"{processors} processor{'s' * (processors != 1)} of an {first['cpu']}".replace("(R)", "") if processors else ""
    )
    where = first["device"] if _gpu(first) else cpu.replace(" Processor", "")
    torch = first.get("torch") or first["versions"]["torch"]
    others = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    yield f"**{where}**, commit `{first['commit']}`, {_date(part)}, torch {torch}; {others}."
    yield ""
    rows = [
        (row["kind"], row["game"], row["num_envs"], row["peer"], line(row)) for each in part for row in each["rows"]
    ]
    yield from (*HEAD, *(cells for *_, cells in sorted(rows)), "")
    yield from ("```sh", *map(_command, part), "```", "")


def _command(results: Mapping[str, Any]) -> str:
    words = [f"python -m benchmarks {results['peer']}"]
    if _gpu(results):
        words.append("--device cuda")
    elif processors := results.get("processors"):
        words.append(f"--processors {processors}")
    if any("as published" in row.get("script", "") for row in results["rows"]):
        words.append("--published FOLDER")
    if results["repeats"] != 10:
        words.append(f"--repeats {results['repeats']}")
    return " ".join(words)


def read(folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """The results that are committed."""
    for path in sorted(folder.glob(RESULTS)):
        yield json.loads(path.read_text(encoding="utf-8"))


def line(row: Mapping[str, Any]) -> str:
    """One row: medians and, where repeats were kept, quartiles."""
    what = row["kind"] if row.get("algorithm", "ppo") == "ppo" else f"{row['kind']} ({row['algorithm']})"
    workload = [f"{what} `{row['game']}`"]
    workload += [value for value in row.get("config", {}).values() if isinstance(value, str)]  # a layout, a scenario
    workload += [row["precision"]] if row["kind"] == "training" else []
    cells = (
        ", ".join(workload),
        f"{row['num_envs']:,} x {row['num_agents']:,}",
        rate(row["ours_env_steps_per_s"]),
        f"{row['peer']} {rate(row['theirs_env_steps_per_s'])}",
        ratio(row),
    )
    return f"| {' | '.join(cells)} |"


def rate(spread: Mapping[str, Any]) -> str:
    """A rate with its quartiles, like 24.7 M (24.4 … 25.1); without them if it was measured once."""
    middle = spread["median"] if "quartiles" in spread else spread["single"]
    scale, unit = next((scale, unit) for scale, unit in UNITS if middle >= scale or scale == 1)
    text = f"{digits(middle / scale)} {unit}".strip()
    return text + quartiles(value / scale for value in spread.get("quartiles", ()))


def ratio(row: Mapping[str, Any]) -> str:
    """Ours by theirs, of the pairs of repeats."""
    return digits(row["ratio"]["median"]) + quartiles(row["ratio"]["quartiles"])


def quartiles(values: Iterable[float]) -> str:
    """Two numbers in brackets; nothing where there are none."""
    text = " … ".join(digits(value) for value in values)
    return f" ({text})" if text else ""


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    rounded = float(f"{value:.{DIGITS}g}")
    whole = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    return f"{rounded:,.{max(0, DIGITS - max(whole, 1))}f}" if whole else f"{rounded:#.{DIGITS}g}"


def score_lines(folder: Path = FOLDER) -> list[str]:
    """Tables of the seconds to scores, of ``benchmarks.reaching``, each with its device and what it is below it."""
    return [line for path in sorted(folder.glob(SCORES)) for line in _scores(json.loads(path.read_text("utf-8")))]


def _scores(results: Mapping[str, Any]) -> Iterator[str]:
    pairs: dict[tuple[str, str], tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for row in results["rows"]:
        ours, theirs = pairs.setdefault((row["game"], row["algorithm"]), ([], []))
        (ours if row["side"] == "gpu_vecenv" else theirs).append(row)
    yield from ("| | score | gpu_vecenv | other library | ratio |", "|---|---|---|---|---|")
    for (game, _), pair in pairs.items():
        title = pair[1][0]["title"]
        for goal in sorted({goal for side in pair for row in side for goal in row["reached"]}, key=float):
            yield _score(game, goal, *([row["reached"].get(goal, NEVER) for row in side] for side in pair), title)
        ends = [[{"seconds": row["seconds"], "env_steps": row["curve"][-1][1]} for row in side] for side in pair]
        steps = min(end["env_steps"] for end in ends[0])
        if steps > max(at["env_steps"] for row in pair[0] for at in row["reached"].values()):
            yield _score(game, f"all {steps / 1e6:.0f} M env-steps", *ends, title)
    first = results["rows"][0]["provenance"]
    yield ""
    yield f"*{first['device']}, commit {first['commit']}, torch {first['torch']}. {results['what']}*"
    yield ""


def _score(game: str, goal: str, ours: Reached, theirs: Reached, title: str) -> str:
    """Medians over the seeds, with quartiles where there are several."""
    mine, other = (_quartiles(side, "seconds")[1] for side in (ours, theirs))
    ratio = digits(other / mine) if math.isfinite(mine) and math.isfinite(other) else ""
    return f"| `{game}` | {goal} | {_told(ours)} | {title} {_told(theirs)} | {ratio} |"


def _told(reached: Reached) -> str:
    lower, middle, upper = _quartiles(reached, "seconds")
    if math.isinf(middle):
        return f"reached by {len(reached) - reached.count(NEVER)} of {len(reached)}"
    ends = f"{lower:.1f}", f"{upper:.1f}" if math.isfinite(upper) else "not reached"
    spread = f" ({' … '.join(ends)})" if len(reached) > 1 else ""
    return f"{middle:.1f} s{spread}, {_quartiles(reached, 'env_steps')[1] / 1e6:.2f} M"


def _quartiles(reached: Reached, what: str) -> Sequence[float]:
    """Of the seeds, each of them the number of one: between two it is the lower one, as means with NEVER are none."""
    found: Sequence[float] = np.quantile([at[what] for at in reached], (0.25, 0.5, 0.75), method="lower").tolist()
    return found


if __name__ == "__main__":
    print(*(score_lines() if sys.argv[1:] == ["scores"] else lines()), sep="\n")
