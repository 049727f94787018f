"""Players of the commons and workers of the economy, ten seeds each, by the examples' functions, for docs/results.md.

usage: python tests/gpu/societies.py FOLDER [VARIANT…] [--seeds 10] [--device cuda] [--total-steps N]
           [--max-seconds 540]
       python tests/gpu/societies.py FOLDER --tables docs/results

The seeds of a variant are trained at the same time. FOLDER/VARIANT-seedK.json is what is measured of one. The call that
has spent --max-seconds ends with exit code 3 if more is left: the same command continues, bit-identically. With
--tables nothing is run: the files become commons.json and economy.json of another folder, and the tables of
docs/results.md are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import commons
import economy_taxes
from figures import UNFINISHED
from measurements import refuse_changes

from gpu_vecenv import GamePolicy, Trainer, configure
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.seed_statistics import bootstrap_interval

Row = dict[str, Any]
EPISODES = 32  # of each measurement
PARTS = 20  # of a training, each with a checkpoint at its end
SIZES = {"max_steps": 1000, "period": 100, "saez_buffer_size": 500}
FILES = {"commons.json": ("harvest", "cleanup"), "economy.json": ("economy",)}
DIGITS = {"utility": 3, "equality": 2, "sustainability": 1, "peace": 2, "productivity": 0, "product": 0}


@dataclass(frozen=True)
class Variant:
    """What is trained, and what is measured of it."""

    total_steps: int
    make_trainer: Callable[[int, int, str], Trainer]  # (total_steps, seed, device)
    rows: Callable[[Trainer, int, str], Iterator[Row]]  # (trained, seed, device)


def of_commons(game: str, common_reward: str) -> Variant:
    """Seven players on Melting Pot's map."""
    played = configure(game, common_reward=common_reward)

    def rows(trainer: Trainer, seed: int, device: str) -> Iterator[Row]:
        for players, found in commons.societies(played, trainer.policies["player"], EPISODES, seed + 1, device):
            yield {"players": players, **{name: _number(value) for name, value in found.items()}}

    return Variant(4_000_000, lambda steps, *of: commons.make_trainer(played, steps, 256, *of), rows)


def of_economy(tax_model: Any) -> Variant:
    """Workers under one tax model, measured under each."""

    def rows(trainer: Trainer, seed: int, device: str) -> Iterator[Row]:
        policy = GamePolicy(trainer.env.game, trainer.policies)
        for taxes, workers, found in economy_taxes.economies(policy, EPISODES, seed + 1, device, **SIZES):
            numbers = dict(zip(("productivity", "equality", "product"), map(_number, found), strict=True))
            yield {"taxes": taxes, "workers": workers, **numbers}

    return Variant(
        10_000_000, lambda steps, *of: economy_taxes.make_trainer(tax_model, steps, 64, 200, *of, **SIZES), rows
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


VARIANTS: dict[str, Callable[[], Variant]] = {
    **{
        f"{game}-{reward}": partial(of_commons, game, reward)
        for game in ("harvest", "cleanup")
        for reward in ("none", "mean")
    },
    **{f"economy-{model}": partial(of_economy, model) for model in ("planner", "free_market", "us_federal", "saez")},
}


def run_missing(folder: Path, names: Sequence[str], given: argparse.Namespace) -> int:
    """All runs without a file, variant by variant; the exit code."""
    device, deadline = resolve_device(given.device), time.perf_counter() + given.max_seconds
    origin = provenance(device)
    for name in names:
        seeds = [seed for seed in range(given.seeds) if not (folder / f"{name}-seed{seed}.json").exists()]
        if not seeds:
            continue
        variant, progress = VARIANTS[name](), folder / "unfinished" / name
        steps = given.total_steps or variant.total_steps
        with ExitStack() as stack:
            trainers = {}
            for seed in seeds:
                trainers[seed] = trainer = variant.make_trainer(steps, seed, str(device))
                stack.callback(trainer.env.close)
                stack.callback(trainer.close)
            seconds = train(list(trainers.values()), progress, {**origin, "seeds": seeds}, deadline)
            if seconds is None:
                return UNFINISHED
            for seed, trainer in trainers.items():
                result = {"variant": name, "seed": seed, "rows": list(variant.rows(trainer, seed, str(device)))}
                result |= {"env_steps": steps, "at_once": len(seeds), "seconds": seconds, **origin}
                replace_file(folder / f"{name}-seed{seed}.json", (json.dumps(result, indent=1) + "\n").encode())
        print(f"{name}: {len(seeds)} seeds, {seconds:.0f} s", flush=True)
    return 0


def train(trainers: Sequence[Trainer], progress: Path, origin: Mapping[str, Any], deadline: float) -> float | None:
    """Train from the checkpoints in ``progress`` to the end: the seconds of training, None where the deadline passes.

    Raises:
        SystemExit: The checkpoints are of another commit, device or version, or of other seeds.
        NonFiniteError: A loss is not finite.
    """
    progress.mkdir(parents=True, exist_ok=True)
    state, together = progress / "state.json", ParallelTrainers(trainers)
    kept: dict[str, Any] = {"part": 0, "seconds": 0.0, **origin}
    if state.exists():
        kept = json.loads(state.read_text(encoding="utf-8"))
        refuse_changes(state, kept, origin)
        for index, trainer in enumerate(trainers):
            trainer.load(progress / f"{index}-part{kept['part']}.safetensors")
    for part in range(kept["part"] + 1, PARTS + 1):
        started, target = time.perf_counter(), part * trainers[0].num_iterations // PARTS
        if trainers[0].iteration < target:
            for result in together.train_interval(trainers, target):
                if isinstance(result, NonFiniteError):
                    raise result
        kept |= {"part": part, "seconds": kept["seconds"] + time.perf_counter() - started}
        for index, trainer in enumerate(trainers):
            trainer.save(progress / f"{index}-part{part}.safetensors")
        replace_file(state, (json.dumps(kept, indent=1) + "\n").encode())
        for old in progress.glob(f"*-part{part - 1}.safetensors"):
            old.unlink()
        if part < PARTS and time.perf_counter() > deadline:
            return None
    return float(kept["seconds"])


def together(folder: Path, games: Sequence[str]) -> dict[str, Any]:
    """The runs of games in one: their commit and versions, and the rows of each variant and seed."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*-seed*.json"))]
    runs = [one for one in runs if one["variant"].partition("-")[0] in games]
    own = ("variant", "seed", "rows", "env_steps", "at_once", "seconds")
    origins = [{key: value for key, value in one.items() if key not in own} for one in runs]
    if any(origin != origins[0] for origin in origins):
        sys.exit(f"{folder} has runs of different commits, devices or versions; expected those of one")
    order = list(VARIANTS)
    runs.sort(key=lambda one: (order.index(one["variant"]), one["seed"]))
    return {**(origins[0] if runs else {}), "runs": [{key: one[key] for key in own} for one in runs]}


def table(contents: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: a line for each variant and row of its example; those of random players and workers once each."""
    found: dict[tuple[str, ...], list[Row]] = {}
    first: dict[str, str] = {}  # game -> the variant whose random players are in the table
    for one in contents["runs"]:
        game, _, variant = one["variant"].partition("-")
        for row in one["rows"]:
            trained = row.get("players", row.get("workers")) == "trained"
            names = (game,) if "players" in row else ()
            names += (variant if trained else "random",) + ((row["taxes"],) if "taxes" in row else ())
            if trained or one["variant"] == first.setdefault(game, one["variant"]):
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
