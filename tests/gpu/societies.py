"""Players of the commons and workers of the economy, ten seeds each, by the examples' functions, for docs/results.md.

usage: python tests/gpu/societies.py FOLDER [--device cuda] [--variants harvest-none,harvest-mean] [--seeds 10]
           [--max-seconds 540]
       python tests/gpu/societies.py FOLDER --tables docs/results

The seeds of a variant are trained at the same time, and measured after equal parts of the training and at its end. The
call that has spent --max-seconds ends after the next part, with exit code 3 if more is left: the same command
continues, training bit-identically. Random players are measured with a game's first variant. FOLDER/figures.json has
everything. With --tables nothing is run: it becomes commons.json and economy.json of another folder, and the tables of
docs/results.md are printed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import commons
import economy_taxes
from figures import UNFINISHED, Settings, opened
from preset_runs import EVAL_SEED, Group, Unfinished

from gpu_vecenv import GamePolicy, Trainer, configure
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.seed_statistics import bootstrap_interval

Row = dict[str, Any]
SIZES = {"max_steps": 1000, "period": 100, "saez_buffer_size": 500}
FILES = {"commons.json": ("harvest", "cleanup"), "economy.json": ("economy",)}
Kinds = Mapping[str, None]  # of players or workers; None: they act at random
DIGITS = {"utility": 3, "equality": 2, "sustainability": 1, "peace": 2, "productivity": 0, "product": 0}


@dataclass(frozen=True)
class Variant:
    """What is trained, and what is measured of it: during training numbers by name, at the end rows of a table."""

    total_steps: int
    make_trainer: Callable[[int, int, str], Trainer]  # (total_steps, seed, device)
    point: Callable[[Trainer, int], Mapping[str, float | None]]  # (trainer, episodes)
    rows: Callable[[Trainer, Kinds, int, int], Iterator[Row]]  # (trained, kinds beside it, episodes, seed)


def of_commons(game: str, common_reward: str) -> Variant:
    """Seven players on Melting Pot's map."""
    played = configure(game, common_reward=common_reward)

    def point(trainer: Trainer, episodes: int) -> Mapping[str, float | None]:
        policy, device = trainer.policies["player"], str(trainer.env.device)
        return numbers(commons.society(played, policy, episodes, EVAL_SEED + trainer.seed, device))

    def rows(trainer: Trainer, beside: Kinds, episodes: int, seed: int) -> Iterator[Row]:
        kinds = {**beside, "trained": trainer.policies["player"]}
        for players, found in commons.societies(played, kinds, episodes, seed, str(trainer.env.device)):
            yield {"players": players, **numbers(found)}

    return Variant(4_000_000, lambda steps, *of: commons.make_trainer(played, steps, 256, *of), point, rows)


def of_economy(tax_model: Any) -> Variant:
    """Workers under one tax model, measured under each; during training under that one."""

    def point(trainer: Trainer, episodes: int) -> Mapping[str, float | None]:
        found = trainer.evaluate(episodes, seed=EVAL_SEED + trainer.seed)
        return {name: found[f"state_{name}"] for name in ("productivity", "equality")}

    def rows(trainer: Trainer, beside: Kinds, episodes: int, seed: int) -> Iterator[Row]:
        kinds = {**beside, "trained": GamePolicy(trainer.env.game, trainer.policies)}
        device = str(trainer.env.device)
        for taxes, workers, found in economy_taxes.economies(kinds, episodes, seed, device, **SIZES):
            measured = dict(zip(("productivity", "equality", "product"), found, strict=True))
            yield {"taxes": taxes, "workers": workers, **numbers(measured)}

    def make_trainer(steps: int, *of: Any) -> Trainer:
        return economy_taxes.make_trainer(tax_model, steps, 64, 200, *of, **SIZES)

    return Variant(10_000_000, make_trainer, point, rows)


def numbers(found: Mapping[str, float]) -> dict[str, float | None]:
    """None in place of NaN, which JSON does not have."""
    return {name: None if math.isnan(value) else value for name, value in found.items()}


VARIANTS: dict[str, Callable[[], Variant]] = {
    **{
        f"{game}-{reward}": partial(of_commons, game, reward)
        for game in ("harvest", "cleanup")
        for reward in ("none", "mean")
    },
    **{f"economy-{model}": partial(of_economy, model) for model in ("free_market", "us_federal", "saez", "planner")},
}


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What to train."""

    episodes: int = 32  # of each measurement at the end
    device: str | None = None  # cpu or cuda; by default cuda if usable
    variants: str = ",".join(VARIANTS)
    total_steps: int | None = None  # of every run; default: the variant's
    tables: Path | None = None  # where commons.json and economy.json are written

    @property
    def lasting(self) -> dict[str, Any]:
        """Of all calls; which variants and where to is of one."""
        return {key: value for key, value in super().lasting.items() if key not in ("variants", "tables")}


def game_of(row: str) -> str:
    """The game of a variant."""
    return row.partition("-")[0]


def first_of(game: str) -> str:
    """The variant with which random players are measured."""
    return next(row for row in VARIANTS if game_of(row) == game)


def run_missing(folder: Path, options: Options) -> int:
    """All runs that figures.json does not have, variant by variant; the exit code."""
    torch.set_num_threads(1)
    device = resolve_device(options.device)
    deadline = time.perf_counter() + options.max_seconds
    figures = opened(folder, options, provenance(device), side="gpu_vecenv, by the examples' functions")
    figures.contents["measured"] = "societies"
    for row in options.variants.split(","):
        left = {f"{row}-seed{seed}": seed for seed in options.seed_range if not figures.has(row, seed)}
        if not left:
            continue
        variant = VARIANTS[row]()
        steps = options.total_steps or variant.total_steps
        trainers = {name: variant.make_trainer(steps, seed, str(device)) for name, seed in left.items()}
        beside: Kinds = {"random": None} if row == first_of(game_of(row)) else {}
        with Group(trainers, figures, options, lambda t, v=variant: v.point(t, options.curve_episodes)) as group:
            try:
                group.train(deadline)
            except Unfinished:
                return UNFINISHED
            for name, seed in left.items():
                rows: list[Row] = []
                if not group.kept[name]["error"]:
                    rows = list(variant.rows(trainers[name], beside, options.episodes, seed + 1))
                group.complete(name, row, seed, {"rows": rows})
        if time.perf_counter() >= deadline:
            return UNFINISHED
    return 0


def of_games(contents: Mapping[str, Any], games: Sequence[str]) -> dict[str, Any]:
    """The runs of some games, in the order of VARIANTS."""
    order = list(VARIANTS)
    runs = [run for run in contents["runs"] if game_of(run["row"]) in games]
    runs.sort(key=lambda run: (order.index(run["row"]), run["seed"]))
    return {**{key: value for key, value in contents.items() if key != "unfinished"}, "runs": runs}


def table(contents: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: a line for each variant and row of its example; those of random players and workers once each."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for run in contents["runs"]:
        game, _, variant = run["row"].partition("-")
        for row in run["rows"]:
            trained = row.get("players", row.get("workers")) == "trained"
            names = (game,) if "players" in row else ()
            names += (variant if trained else "random",) + ((row["taxes"],) if "taxes" in row else ())
            if trained or run["row"] == first_of(game):
                found.setdefault(names, []).append(row)
    for names, rows in found.items():
        measured = [name for name in rows[0] if name in DIGITS]
        yield f"| {' | '.join([*names, f'{len(rows)}', *(cell(rows, name) for name in measured)])} |"


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


def main(folder: Path, options: Options) -> int:
    """Run what is missing, or print tables."""
    if unknown := sorted(set(options.variants.split(",")) - set(VARIANTS)):
        raise SystemExit(f"no variants {', '.join(unknown)}; expected some of {', '.join(VARIANTS)}")
    if options.tables is None:
        return run_missing(folder, options)
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    for name, games in FILES.items():
        contents = of_games(figures, games)
        if contents["runs"]:
            replace_file(options.tables / name, (json.dumps(contents, indent=1) + "\n").encode())
            print("\n".join(table(contents)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
