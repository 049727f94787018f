"""Train every game with its preset, 10 seeds, and keep the returns for tables of interquartile means.

usage: python tests/gpu/preset_figures.py FOLDER [--device cuda] [--games cartpole,pendulum] [--seeds 10]
           [--preset sample-efficient] [--algorithm mappo] [--learner JSON] [--opponents JSON]
           [--first-seed 5] [--max-seconds 540]

The seeds of a game are trained at the same time; each has ten evaluations of 32 episodes during training, with sampled
actions, and two of 320 episodes of its final policies, sampled and greedy. A role's return is that against opponents
that act at random. The call that has spent --max-seconds ends at the next evaluation, with exit code 3 if more is left:
the same command continues, training bit-identically. Other hyper-parameters than the preset's are
--learner '{"num_minibatches": 64}', other opponents in training --opponents '{"members": ["snapshots"]}', none
--opponents null, in another FOLDER. FOLDER/policies has the checkpoints, FOLDER/figures.json everything else; the table
is

    python tests/gpu/figures.py FOLDER/figures.json SB3_FOLDER/figures.json
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import UNFINISHED, Settings, opened
from preset_runs import (
    ROWS,
    AlgorithmName,
    Group,
    PresetName,
    Unfinished,
    changes_of,
    checked_rows,
    make_trainer,
    returns_of,
)

from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What to train."""

    device: str | None = None  # cpu or cuda; by default cuda if usable
    games: str = ",".join(ROWS)  # rows of preset_runs.py
    preset: PresetName = "fast"
    algorithm: AlgorithmName = "ppo"  # another one has the preset's sizes of a run and its own default options
    critic: Literal["own", "central"] = "own"  # with "ppo", of every run; own: the preset's
    total_steps: int | None = None  # of every run; default: the preset's
    learner: str = "{}"  # JSON, with "ppo": hyper-parameters beside those of the preset
    opponents: str | None = None  # JSON, with "ppo": of every run, null: none; default: the preset's


def main(folder: Path, options: Options) -> int:
    """Train what is missing; the exit code."""
    torch.set_num_threads(1)
    device = resolve_device(options.device)
    games = checked_rows(options.games, options.preset)
    if options.algorithm != "ppo" and (options.learner != "{}" or options.opponents):
        raise SystemExit(
            f"--algorithm {options.algorithm} has its own hyper-parameters and no opponents; expected no --learner and "
            "no --opponents beside it"
        )
    own = {"ppo": f"--preset {options.preset}", "mappo": "--preset mappo"}
    side = f"gpu_vecenv, {own.get(options.algorithm, f'--algorithm {options.algorithm}')}"
    if options.critic == "central":
        side += " --critic central"
    figures = opened(folder, replace(options, games=""), provenance(device), side=side)
    deadline = time.perf_counter() + options.max_seconds
    for row, (game, preset) in games.items():
        changes = changes_of(options.total_steps, options.learner)
        if options.critic == "central":
            changes["critic"] = options.critic
        left = {f"{row}-seed{seed}": seed for seed in options.seed_range if not figures.has(row, seed)}
        if not left:
            continue
        trainers = {
            name: make_trainer(game, preset | changes, seed, device, options.algorithm, options.opponents)
            for name, seed in left.items()
        }
        with Group(trainers, figures, options) as group:
            try:
                group.train(deadline)
            except Unfinished:
                return UNFINISHED
            for name, seed in left.items():
                result = {"learner": asdict(trainers[name].config), "num_envs": trainers[name].env.num_envs}
                if not group.kept[name]["error"]:
                    for how in ("sampled", "greedy"):
                        result[how] = returns_of(trainers[name], options.episodes, how == "greedy")
                group.complete(name, row, seed, result)
        if time.perf_counter() >= deadline:
            return UNFINISHED
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
