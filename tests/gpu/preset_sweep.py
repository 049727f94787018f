"""Sweep minibatches, epochs and learning rate of every game's preset: at most 40 trials of 3 seeds each.

usage: python tests/gpu/preset_sweep.py FOLDER [--device cuda] [--games simple_spread] [--total-steps 4000000]
           [--trials 40] [--seeds 3] [--first-seed 1000] [--preset sample-efficient] [--max-seconds 540]
           [--numbers 0,3,5] [--learner JSON]

Trial 0 is the preset; the others are drawn from GRID, the same in every call. Seeds are those from --first-seed on:
results that are reported have 0, 1, … A role's return is that against the other roles' policies of trial 0 with the
same seed, so that trials of games with opponents can be compared; in a zero-sum game of one role it is that of each
side in turn. The call that has spent --max-seconds ends at the next part of a trial, with exit code 3 if more is left:
the same command continues. FOLDER/figures.json has everything, FOLDER/GAME.md the trials in their order.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import UNFINISHED, Figures, Settings, opened
from preset_runs import ROWS, Group, PresetName, Unfinished, changes_of, checked_rows, make_trainer, returns_of

from gpu_vecenv import Env, PPOConfig, load_policy
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.role_view import sides_of_game

ROWS_OF_A_MINIBATCH = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # (step, environment) pairs
NUM_EPOCHS = (2, 4, 8, 16)
LEARNING_RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What to train."""

    seeds: int = 3
    first_seed: int = 1000
    trials: int = 40  # of each game
    points: int = 2
    episodes: int = 100  # of the evaluation of each run
    device: str | None = None  # cpu or cuda; by default cuda if usable
    games: str = ",".join(ROWS)  # rows of preset_runs.py
    preset: PresetName = "fast"
    total_steps: int | None = None  # of every run; default: the preset's
    numbers: str | None = None  # of the trials to run, such as 0,3,5; default: all
    learner: str = "{}"  # JSON: hyper-parameters of every trial beside those of the preset


def trials_of(row: str, preset: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What each trial changes: nothing, then different draws from the grid, in an order that depends on the row."""
    steps = preset["num_envs"] * preset.get("num_steps", PPOConfig().num_steps)
    rows_of = [rows for rows in ROWS_OF_A_MINIBATCH if rows <= steps and steps % rows == 0]
    if not rows_of:  # as with 10 environments and 500 steps: the nearest sizes into which the steps can be cut
        divisors = [rows for rows in range(1, steps + 1) if steps % rows == 0]
        rows_of = sorted({min(divisors, key=lambda rows: abs(rows - wanted)) for wanted in ROWS_OF_A_MINIBATCH})
    minibatches = [steps // rows for rows in rows_of]
    grid = [
        {"num_minibatches": number, "num_epochs": epochs, "learning_rate": rate}
        for number, epochs, rate in itertools.product(minibatches, NUM_EPOCHS, LEARNING_RATES)
    ]
    default = asdict(PPOConfig())
    same = {key: preset.get(key, default[key]) for key in ("num_minibatches", "num_epochs", "learning_rate")}
    grid = [trial for trial in grid if trial != same]
    random.Random(row).shuffle(grid)
    return [{}, *grid[: count - 1]]


def main(folder: Path, options: Options) -> int:
    """Train what is missing; the exit code."""
    torch.set_num_threads(1)
    device = resolve_device(options.device)
    games = checked_rows(options.games, options.preset)
    figures = opened(
        folder,
        replace(options, games="", trials=0, numbers=None),
        provenance(device),
        side=f"sweep of --preset {options.preset}",
    )
    deadline = time.perf_counter() + options.max_seconds
    for row, (game, preset) in games.items():
        preset |= changes_of(options.total_steps, options.learner)
        trials = trials_of(row, preset, options.trials)
        numbers = range(len(trials)) if options.numbers is None else [int(n) for n in options.numbers.split(",")]
        if unknown := sorted(set(numbers) - set(range(len(trials)))):
            raise SystemExit(f"--numbers has {unknown}; expected trials of {row}, 0 to {len(trials) - 1}")
        for number in numbers:
            try:
                run_trial(game, row, number, preset, trials[number], device, options, figures, deadline)
            except Unfinished:
                return UNFINISHED
        text = "\n".join(summary(row, [run for run in figures.contents["runs"] if run["game"] == row])) + "\n"
        (folder / f"{row}.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    return 0


def run_trial(
    game: Env,
    row: str,
    number: int,
    preset: Mapping[str, Any],
    changes: Mapping[str, Any],
    device: torch.device,
    options: Options,
    figures: Figures,
    deadline: float,
) -> None:
    """Train and evaluate the seeds of a trial that are missing. Raises Unfinished."""
    trial, seeds = f"{row}-trial{number}", options.seed_range
    left = {f"{trial}-seed{seed}": seed for seed in seeds if not figures.has(trial, seed)}
    if not left:
        return
    beside = {"game": row, "trial": number, "changes": dict(changes)}
    try:
        trainers = {name: make_trainer(game, {**preset, **changes}, seed, device) for name, seed in left.items()}
    except ConfigError as error:  # as where minibatches do not divide the sequences of a recurrent network
        for seed in left.values():
            figures.add(trial, seed, {**beside, "error": str(error), "seconds": 0.0, "env_steps": 0})
        return
    with Group(trainers, figures, options) as group:
        group.train(deadline)
        for name, seed in left.items():
            result = dict(beside)
            if not group.kept[name]["error"]:
                others = None
                reference = group.checkpoint(f"{row}-trial0-seed{seed}")
                if len(sides_of_game(game)) > 1 and reference.is_file():
                    others = dict(load_policy(reference, device=device).policies)
                result["sampled"] = returns_of(trainers[name], options.episodes, others=others)
            group.complete(name, trial, seed, result)
            if number:  # the preset's are the opponents of later trials
                group.checkpoint(name).unlink(missing_ok=True)
    if time.perf_counter() >= deadline:
        raise Unfinished


def summary(row: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A Markdown table of a game's trials, the best one first."""
    by_trial: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_trial.setdefault(run["trial"], []).append(run)
    good = {number: found for number, found in by_trial.items() if not any(run.get("error") for run in found)}
    yield f"{row}: {len(by_trial)} trials, {len(by_trial) - len(good)} with errors\n"
    if not good:
        return
    roles = list(next(iter(good.values()))[0]["sampled"])
    means = {
        role: {number: statistics.fmean(run["sampled"][role] for run in found) for number, found in good.items()}
        for role in roles
    }
    spread = {role: statistics.pstdev(values.values()) or 1.0 for role, values in means.items()}
    score = {number: sum(means[role][number] / spread[role] for role in roles) for number in good}
    yield f"| trial | minibatches | epochs | learning rate | {' | '.join(roles)} | seconds |"
    yield f"|{'---|' * (5 + len(roles))}"
    for number in sorted(good, key=lambda number: -score[number]):
        found, changes = good[number], good[number][0]["changes"]
        cells = ["preset" if not changes else str(number)]
        cells += [str(changes.get(key, "")) for key in ("num_minibatches", "num_epochs", "learning_rate")]
        for role in roles:
            scores = [run["sampled"][role] for run in found]
            cells.append(f"{means[role][number]:.2f} ({min(scores):.2f} … {max(scores):.2f})")
        yield f"| {' | '.join(cells)} | {found[0]['seconds']:.1f} |"


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
