"""Train every game with its preset, several seeds each, and write the results.

usage: python tests/gpu/results.py FOLDER [--device cuda] [--seeds 5] [--games cartpole,pendulum]
           [--minibatch-factors 1,4,16] [--preset sample-efficient]

Each run equals the command line's, gpu-vecenv train GAME --seed SEED --preset PRESET, with the number of minibatches
times a factor.
Every game has a process of its own; the seeds of a game run together, as with ``train --seeds``.

FOLDER/results.json holds the returns of each run and the metrics that were not finite; games that it has are not
repeated. FOLDER/GAME.png has the curves, FOLDER/runs the metrics. For the games of tag, policies also play against the
scripts of examples/tag_baselines.py.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import gpu_vecenv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.curriculum import preset_curriculum
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.plots import EPISODE_METRICS, METRICS_FILE, plot_runs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
# Name of the row -> game and its configuration. The longest come first, so that the last ones fill the gaps.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "tag_continuous": ("tag_continuous", {"egocentric": False}),
    "tag_continuous-v1": ("tag_continuous", {}),
    "tag_continuous-small": ("tag_continuous", {"num_taggers": 4, "num_runners": 8, "max_steps": 200}),
    "skirmish": ("skirmish", {}),
    "connect_four": ("connect_four", {}),
    "simple_tag": ("simple_tag", {}),
    "simple_adversary": ("simple_adversary", {}),
    "simple_spread": ("simple_spread", {}),
    "overcooked": ("overcooked", {}),
    "overcooked-advantages": ("overcooked", {"layout_name": "asymmetric_advantages"}),
    "overcooked-ring": ("overcooked", {"layout_name": "coordination_ring"}),
    "overcooked-forced": ("overcooked", {"layout_name": "forced_coordination"}),
    "overcooked-circuit": ("overcooked", {"layout_name": "counter_circuit_o_1order"}),
    "harvest": ("harvest", {}),
    "cleanup": ("cleanup", {}),
    "economy": ("economy", {}),
    "pursuit": ("pursuit", {}),
    "warehouse": ("warehouse", {"num_agents": 4, "reward_type": "global"}),
    "tag_gridworld-random_start": ("tag_gridworld", {"random_start": True}),
    "tag_gridworld": ("tag_gridworld", {}),
    "acrobot": ("acrobot", {}),
    "continuous_mountain_car": ("continuous_mountain_car", {}),
    "mountain_car": ("mountain_car", {}),
    "pendulum": ("pendulum", {}),
    "cartpole": ("cartpole", {}),
}


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """What to train."""

    device: str | None = None  # cpu or cuda
    seeds: int = 5  # of each row: 0, 1, …
    games: str = ",".join(ROWS)  # rows, by name
    preset: Literal["fast", "sample-efficient"] = "fast"  # of the games
    minibatch_factors: str = "1"  # the preset's num_minibatches times each of these
    total_steps: int | None = None  # of every run; default: the preset's
    episodes: int = 1000  # of each evaluation
    processes: int = 16  # at a time
    max_seconds: float = math.inf  # of training, for each game; then its runs end, where they are

    @property
    def factors(self) -> list[int]:
        """Of the numbers of minibatches."""
        return [int(factor) for factor in self.minibatch_factors.split(",")]


def run_name(row: str, factor: int, seed: int | None = None) -> str:
    """Of a run's folder and its row in the results; without a seed, of the picture of all seeds."""
    return f"{row}{'' if factor == 1 else f'-x{factor}'}{'' if seed is None else f'-seed{seed}'}"


def make_trainer(row: str, factor: int, seed: int, device: torch.device, config: ResultsConfig) -> Trainer:
    """As the command line makes it."""
    name, values = ROWS[row]
    game = configure(name, **values)
    preset = dict(game.own_preset if config.preset == "fast" else game.sample_efficient_preset)
    num_envs = preset.pop("num_envs")
    preset["num_minibatches"] = preset.get("num_minibatches", PPOConfig().num_minibatches) * factor
    preset |= {} if config.total_steps is None else {"total_steps": config.total_steps}
    env = gpu_vecenv.VecEnv(game, num_envs, device, autoreset_mode="next_step")
    opponents = preset_opponents(game, num_envs) if config.preset == "fast" else None
    how: dict[str, Any] = {"opponents": opponents, "curriculum": preset_curriculum(game)}
    return Trainer(env, PPOConfig(**preset), seed=seed, **how)


def train(trainers: list[Trainer], deadline: float) -> tuple[list[list[dict[str, float]]], list[str]]:
    """Train all to their ends, their first losses that are not finite, or the deadline: metrics and errors of each."""
    together, started = ParallelTrainers(trainers), time.perf_counter()
    metrics: list[list[dict[str, float]]] = [[] for _ in trainers]
    errors = [""] * len(trainers)
    running = list(trainers)
    while running and time.perf_counter() < deadline:
        for trainer, result in zip(running, together.train_interval(running), strict=True):
            index = trainers.index(trainer)
            if isinstance(result, NonFiniteError):
                errors[index] = str(result)
                continue
            if result["first_episodes"]:  # means over episodes are NaN
                result = {key: value for key, value in result.items() if not key.startswith(EPISODE_METRICS)}
            metrics[index].append({"seconds": time.perf_counter() - started, **result})
        running = [t for t in running if not errors[trainers.index(t)] and t.iteration < t.num_iterations]
    return metrics, errors


def train_factor(row: str, factor: int, folder: Path, config: ResultsConfig, deadline: float) -> dict[str, Any]:
    """Train all seeds of a game with one number of minibatches, and evaluate: rows of the results."""
    device = resolve_device(config.device)
    trainers = [make_trainer(row, factor, seed, device, config) for seed in range(config.seeds)]
    all_metrics, errors = train(trainers, deadline)
    rows, policies = [], []
    for seed, (trainer, lines, error) in enumerate(zip(trainers, all_metrics, errors, strict=True)):
        name = run_name(row, factor, seed)
        path = folder / "runs" / name
        path.mkdir(parents=True, exist_ok=True)
        with (path / METRICS_FILE).open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for line in lines for key in line))
            writer.writeheader()
            writer.writerows(lines)
        result = {
            "run": name,
            "num_minibatches": trainer.config.num_minibatches,
            "seconds": lines[-1]["seconds"],
            "env_steps": lines[-1]["env_steps"],
            "complete": trainer.iteration == trainer.num_iterations,
            "error": error,
            "not_finite": sorted({key for line in lines for key, value in line.items() if not math.isfinite(value)}),
            "largest_value_loss": max(v for line in lines for k, v in line.items() if k.startswith("value_loss")),
        }
        policy = gpu_vecenv.GamePolicy(trainer.env.game, trainer.policies)
        rows.append(result if error else result | returns_of(policy, config.episodes))
        policies.append(policy)
        print(json.dumps(rows[-1]), flush=True)
    scripts: list[dict[str, Any]] = []
    if row.startswith("tag_") and factor == 1 and all(result["complete"] for result in rows):
        scripts = list(against_scripts(policies, min(config.episodes, 200 if "continuous" in row else 1000)))
    for trainer in trainers:
        trainer.close()
        trainer.env.close()
    return {"rows": rows, "against_scripts": scripts}


def train_row(row: str, folder: Path, config: ResultsConfig) -> dict[str, Any]:
    """Train a game with each number of minibatches; a failure ends the game, what came before it stays."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rows": [], "against_scripts": []}
    deadline = time.perf_counter() + config.max_seconds
    for factor in config.factors:
        if time.perf_counter() >= deadline:
            break
        try:
            for key, lines in train_factor(row, factor, folder, config, deadline).items():
                results[key] += lines
        except Exception:
            traceback.print_exc()
            break
    return results


def returns_of(policy: Any, episodes: int) -> dict[str, Any]:
    """Evaluations of a run's policies: random, sampled and greedy actions, and each role against random others."""
    env = gpu_vecenv.VecEnv(policy.game, min(episodes, 1000), policy.device)
    roles: dict[str, Any] = dict.fromkeys(policy.policies)
    row = {"random": evaluate(env, roles, episodes)}
    row["sampled"] = evaluate(env, policy.policies, episodes)
    row["greedy"] = evaluate(env, policy.policies, episodes, greedy=True)
    if len(roles) > 1:
        row |= {f"{role} trained": evaluate(env, {**roles, role: policy[role]}, episodes) for role in roles}
    env.close()
    return row


def against_scripts(policies: list[Any], episodes: int) -> Iterator[dict[str, Any]]:
    """Every tagger against every runner: chance, script, what was trained (all seeds)."""
    spec = importlib.util.spec_from_file_location("tag_baselines", ROOT / "examples" / "tag_baselines.py")
    assert spec and spec.loader
    scripts = importlib.util.module_from_spec(spec)
    sys.modules["tag_baselines"] = scripts
    spec.loader.exec_module(scripts)
    torch.manual_seed(0)  # of the policies' draws
    game, device = policies[0].game, policies[0].device
    taggers: dict[str, list[Any]] = {"random": [None], "pursuit": [scripts.pursuit(game)]}
    runners: dict[str, list[Any]] = {"random": [None], "flee": [scripts.flee(game)]}
    taggers["trained"] = [policy["tagger"].act for policy in policies]
    runners["trained"] = [policy["runner"].act for policy in policies]
    for (name, hunting), (other, fleeing) in itertools.product(taggers.items(), runners.items()):
        pairs = list(itertools.product(hunting, fleeing))
        pairs = pairs[:: len(fleeing) + 1] if len(pairs) > len(policies) else pairs  # seed by seed
        results = [
            scripts.play(game, {"tagger": t, "runner": r}, min(episodes, 1000), 1, device, episodes) for t, r in pairs
        ]
        mean = {key: statistics.fmean(result[key] for result in results) for key in results[0]}
        yield {"game": repr(game), "tagger": name, "runner": other, **mean}


def main(folder: Path, config: ResultsConfig) -> None:
    """Train, evaluate, draw, write."""
    names = config.games.split(",")
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"unknown rows {sorted(unknown)}; known: {', '.join(ROWS)}")
    if config.preset != "fast" and (without := [n for n in names if not configure(ROWS[n][0]).sample_efficient_preset]):
        raise SystemExit(f"no preset for few env-steps: {', '.join(without)}; leave them out of --games")
    file = folder / "results.json"
    results: dict[str, Any] = {**provenance(resolve_device(config.device)), "rows": [], "against_scripts": []}
    if file.is_file():
        results |= {key: json.loads(file.read_text())[key] for key in ("rows", "against_scripts")}
    done = {row["run"] for row in results["rows"]}
    expected = {
        row: [run_name(row, *job) for job in itertools.product(config.factors, range(config.seeds))] for row in names
    }
    left = [row for row in names if not done.issuperset(expected[row])]
    folder.mkdir(parents=True, exist_ok=True)
    results["runs_at_once"] = min(len(left), config.processes) * config.seeds
    failed = False
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(config.processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(train_row, row, folder, config) for row in left]):
            made = future.result()
            failed |= len(made["rows"]) < config.seeds * len(config.factors)
            results["rows"] += [row for row in made["rows"] if row["run"] not in done]
            results["against_scripts"] += made["against_scripts"]
            file.write_text(json.dumps(results, indent=1) + "\n")
    complete = {row["run"] for row in results["rows"] if row["complete"]}
    for row, factor in itertools.product(names, config.factors):
        runs = [run_name(row, factor, seed) for seed in range(config.seeds)]
        if complete.issuperset(runs):
            plot_runs([folder / "runs" / run for run in runs], folder / f"{run_name(row, factor)}.png")
    raise SystemExit(failed)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes))
