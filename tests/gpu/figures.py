"""Returns of many seeds: the file that keeps them, and the table of interquartile means that docs/results.md has.

usage: python tests/gpu/figures.py FIGURES.json [MORE.json …]     prints the table
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_vecenv.files import replace_file
from gpu_vecenv.train.seed_statistics import bootstrap_interval

INTERVAL = "IQM [95 %]"
HEADS = ("game", "role", "trained by", "seeds", "env-steps", "seconds", f"sampled: {INTERVAL}", "worst seed")
HEADS += (f"greedy: {INTERVAL}", "worst seed")
UNFINISHED = 3  # exit code: the same command continues


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How runs are measured."""

    seeds: int = 10  # of each game
    first_seed: int = 0  # the others follow
    points: int = 10  # of the curve: evaluations during training
    curve_episodes: int = 32  # of each of them
    episodes: int = 320  # of the evaluation of the final policy
    max_seconds: float = 540.0  # of this call

    @property
    def seed_range(self) -> range:
        """The seeds of each game."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def lasting(self) -> dict[str, Any]:
        """What decides the results: the same in every call with a folder."""
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in ("max_seconds", "device", "seeds", "first_seed", "processes")
        }


@dataclass
class Figures:
    """What FOLDER/figures.json has, written at every change."""

    path: Path
    contents: dict[str, Any]

    def has(self, row: str, seed: int) -> bool:
        """Whether the run is complete."""
        return any((run["row"], run["seed"]) == (row, seed) for run in self.contents["runs"])

    def save(self) -> None:
        """Write the file."""
        replace_file(self.path, (json.dumps(self.contents, indent=1) + "\n").encode())

    def add(self, row: str, seed: int, result: Mapping[str, Any]) -> None:
        """Keep a complete run, with the part it comes from."""
        part = len(self.contents["parts"]) - 1
        self.contents["runs"].append({"row": row, "seed": seed, "part": part, **result})
        self.save()
        said = {key: result[key] for key in ("env_steps", "seconds", "sampled", "greedy", "error") if key in result}
        print(json.dumps({"row": row, "seed": seed, **said}), flush=True)


def opened(folder: Path, settings: Settings, origin: Mapping[str, Any], *, side: str) -> Figures:
    """The figures so far; SystemExit where they are of other settings."""
    path = folder / "figures.json"
    contents: dict[str, Any] = {"side": side, "settings": settings.lasting, "parts": [], "runs": []}
    if path.is_file():
        contents = json.loads(path.read_text(encoding="utf-8"))
        if (contents["side"], contents["settings"]) != (side, settings.lasting):
            raise SystemExit(
                f"{path} is of {contents['side']} with {contents['settings']}, not of {side} with {settings.lasting}; "
                "expected another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not contents["parts"] or contents["parts"][-1] != dict(origin):
        contents["parts"].append(dict(origin))
    return Figures(path, contents)


def table(files: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, game by game, with a line of each file for each role."""
    lines = [
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
    ]
    order = list(dict.fromkeys(run["row"] for contents in files for run in contents["runs"]))
    for row in order:
        for contents in files:
            lines += rows_of(contents, row)
    return "\n".join(lines) + "\n"


def rows_of(contents: Mapping[str, Any], row: str) -> Iterator[str]:
    """The lines of a game in a file."""
    runs = [run for run in contents["runs"] if run["row"] == row]
    good = [run for run in runs if not run.get("error")]
    if not runs:
        return
    if not good:
        yield f"| {row} | | {contents['side']} | {len(runs)}, all ended with errors | | | | | | |"
        return
    failed = f", {len(runs) - len(good)} more ended with errors" if len(good) < len(runs) else ""
    steps = f"{good[0]['env_steps']:,}"
    seconds = statistics.median(run["seconds"] for run in good)
    for role in good[0]["sampled"]:
        cells = []
        digits = 2 if all(abs(run[how][role]) <= 1 for run in good for how in ("sampled", "greedy")) else 1
        for how in ("sampled", "greedy"):
            scores = [run[how][role] for run in good]
            found = bootstrap_interval(scores)
            numbers = [f"{number:.{digits}f}" for number in (found.value, found.low, found.high, min(scores))]
            cells += ["{} [{}, {}]".format(*numbers[:3]), numbers[3]]
        beside = [row, role, contents["side"], f"{len(good)}{failed}", steps, f"{seconds:.1f} s", *cells]
        yield f"| {' | '.join(beside)} |"


if __name__ == "__main__":
    if len(sys.argv) < 2 or "--help" in sys.argv:
        sys.exit(__doc__)
    print(table([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]), end="")
