"""Players of the commons and workers of the economy, ten seeds each: what the examples print, kept for docs/results.md.

usage: python tests/gpu/societies.py FOLDER [VARIANT…] [--seeds 10] [--device cuda] [--total-steps N]
           [--max-seconds 540]
       python tests/gpu/societies.py FOLDER --tables docs/results

Each run is a command of its own, whose file FOLDER/VARIANT-seedK.json is kept: the same call again runs what is
missing, with exit code 3 if more is left when --max-seconds are over. With --tables nothing is run: the files become
commons.json and economy.json of another folder, and the tables of docs/results.md are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import UNFINISHED
from measurements import ROOT

from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.seed_statistics import bootstrap_interval

COMMONS = "examples/commons.py --num-envs 256 --total-steps 4000000"
ECONOMY = "examples/economy_taxes.py --num-envs 64 --total-steps 10000000"
VARIANTS = {
    **{
        f"{game}-{reward}": f"{COMMONS} --game {game} --common-reward {reward}"
        for game in ("harvest", "cleanup")
        for reward in ("none", "mean")
    },
    **{
        f"economy-{model}": f"{ECONOMY} --tax-model {model}"
        for model in ("planner", "free_market", "us_federal", "saez")
    },
}
FILES = {"commons.json": ("harvest", "cleanup"), "economy.json": ("economy",)}
DIGITS = {"utility": 3, "equality": 2, "sustainability": 1, "peace": 2, "productivity": 0, "product": 0}
Row = dict[str, Any]


def printed_table(text: str) -> list[Row]:
    """The rows of a table that an example has printed: words as they are, numbers as float, NaN as None."""

    def cell(word: str) -> str | float | None:
        try:
            return None if math.isnan(value := float(word)) else value
        except ValueError:
            return word

    heads, *lines = (line.split() for line in text.splitlines() if line.strip())
    return [dict(zip(heads, map(cell, words), strict=True)) for words in lines]


def run(command: str) -> list[Row]:
    """What an example prints; its errors stay on the screen."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, *command.split()]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{command} has failed with {done.returncode}")
    return printed_table(done.stdout)


def run_missing(folder: Path, names: Sequence[str], given: argparse.Namespace) -> int:
    """All runs without a file, seed by seed; the exit code."""
    device, deadline = resolve_device(given.device), time.perf_counter() + given.max_seconds
    origin, ran = provenance(device), False
    for seed in range(given.seeds):
        for name in names:
            file = folder / f"{name}-seed{seed}.json"
            if file.exists():
                continue
            if ran and time.perf_counter() > deadline:
                return UNFINISHED
            ran = True
            steps = "" if given.total_steps is None else f" --total-steps {given.total_steps}"
            command, started = f"{VARIANTS[name]}{steps} --seed {seed} --device {device}", time.perf_counter()
            result = {"variant": name, "seed": seed, "command": command, "rows": run(command)}
            result |= {"seconds": time.perf_counter() - started, **origin}
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, (json.dumps(result, indent=1) + "\n").encode())
            print(f"{file.name}: {result['seconds']:.0f} s", flush=True)
    return 0


def together(folder: Path, games: Sequence[str]) -> dict[str, Any]:
    """The runs of games in one: their commit and versions, and the rows of each variant and seed."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*-seed*.json"))]
    runs = [one for one in runs if one["variant"].partition("-")[0] in games]
    own = ("variant", "seed", "command", "rows", "seconds")
    origins = [{key: value for key, value in one.items() if key not in own} for one in runs]
    if any(origin != origins[0] for origin in origins):
        sys.exit(f"{folder} has runs of different commits, devices or versions; expected those of one")
    order = list(VARIANTS)
    runs.sort(key=lambda one: (order.index(one["variant"]), one["seed"]))
    return {**(origins[0] if runs else {}), "runs": [{key: one[key] for key in own} for one in runs]}


def table(contents: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: a line for each variant and row of its example; those of random players and workers once each."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for one in contents["runs"]:
        game, _, variant = one["variant"].partition("-")
        for row in one["rows"]:
            trained = row.get("players", row.get("workers")) == "trained"
            names = (game,) if "players" in row else ()
            names += (variant if trained else "random",) + ((row["taxes"],) if "taxes" in row else ())
            first = next(other["variant"] for other in contents["runs"] if other["variant"].startswith(f"{game}-"))
            if trained or one["variant"] == first:
                found.setdefault(names, []).append(row)
    for names, rows in found.items():
        numbers = [name for name in rows[0] if name in DIGITS]
        yield f"| {' | '.join([*names, f'{len(rows)}', *(cell(rows, name) for name in numbers)])} |"


def cell(rows: Sequence[Row], name: str) -> str:
    """Interquartile mean with its interval, and the lowest seed; how many seeds lack the number, if some do.

    Of one seed the number alone.
    """
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return "none"
    k = DIGITS[name]
    if len(rows) == 1:
        return f"{values[0]:.{k}f}"
    interval = bootstrap_interval(values)
    without = f", {len(rows) - len(values)} none" if len(values) < len(rows) else ""
    return f"{interval.value:.{k}f} [{interval.low:.{k}f}, {interval.high:.{k}f}], {min(values):.{k}f}{without}"


def main() -> int:
    """Run what is missing, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--seeds", type=int, default=10, help="0, 1, …")
    parser.add_argument("--device", help="default: cuda if usable, else cpu")
    parser.add_argument("--total-steps", type=int, help="of each run")
    parser.add_argument("--max-seconds", type=float, default=540)
    parser.add_argument("--tables", type=Path, help="where commons.json and economy.json are written")
    given = parser.parse_args()
    if unknown := sorted(set(given.variants) - set(VARIANTS)):
        parser.error(f"no variants {', '.join(unknown)}; expected some of {', '.join(VARIANTS)}")
    if given.tables is None:
        return run_missing(given.folder, given.variants or list(VARIANTS), given)
    for name, games in FILES.items():
        contents = together(given.folder, games)
        if contents["runs"]:
            replace_file(given.tables / name, (json.dumps(contents, indent=1) + "\n").encode())
            print("\n".join(table(contents)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
