"""Train every game with its preset, several seeds each, and write the results.

usage: python tests/gpu/results.py FOLDER [--device cuda] [--seeds 5] [--workers 24] [--games cartpole,pendulum]
           [--minibatch-factors 1,4,16]

Each run equals the command line's, gpu-vecenv train GAME --seed SEED, with the number of minibatches times a factor.
Runs share one process, a thread and a CUDA stream each, so that their small kernels overlap.

FOLDER/results.json holds the returns of each run and the metrics that were not finite; runs that it has are not
repeated. FOLDER/GAME.png has the curves, FOLDER/runs the metrics. For the games of tag, policies also play against the
scripts of examples/tag_baselines.py.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

import gpu_vecenv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.plots import METRICS_FILE, plot_runs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
# Name of the row -> game and its configuration. The longest come first, so that the last ones fill the gaps.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "tag_continuous": ("tag_continuous", {}),
    "simple_tag": ("simple_tag", {}),
    "simple_adversary": ("simple_adversary", {}),
    "simple_spread": ("simple_spread", {}),
    "tag_gridworld-random_start": ("tag_gridworld", {"random_start": True}),
    "tag_gridworld": ("tag_gridworld", {}),
    "acrobot": ("acrobot", {}),
    "continuous_mountain_car": ("continuous_mountain_car", {}),
    "mountain_car": ("mountain_car", {}),
    "pendulum": ("pendulum", {}),
    "cartpole": ("cartpole", {}),
}
CONSTRUCTION = threading.Lock()  # weights are initialised with torch's global generator


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """What to train."""

    device: str | None = None  # cpu or cuda
    seeds: int = 5  # of each row: 0, 1, …
    workers: int = 24  # runs at the same time
    games: str = ",".join(ROWS)  # rows, by name
    minibatch_factors: str = "1"  # the preset's num_minibatches times each of these
    total_steps: int | None = None  # of every run; default: the preset's
    episodes: int = 1000  # of each evaluation


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    factor: int
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its row in the results."""
        return f"{self.row}{'' if self.factor == 1 else f'-x{self.factor}'}-seed{self.seed}"


def train(job: Job, folder: Path, device: torch.device, config: ResultsConfig) -> tuple[dict[str, Any], Any]:
    """Train; the row of the results, with the metrics that were not finite in some iteration, and the policies."""
    name, values = ROWS[job.row]
    game = configure(name, **values)
    preset = dict(game.preset)
    num_envs = preset.pop("num_envs")
    preset["num_minibatches"] = preset.get("num_minibatches", PPOConfig().num_minibatches) * job.factor
    preset |= {} if config.total_steps is None else {"total_steps": config.total_steps}
    driver = "cuda_core" if device.type == "cuda" else None  # PyCUDA has one stream for all threads
    with CONSTRUCTION:
        env = gpu_vecenv.VecEnv(game, num_envs, device, autoreset_mode="next_step", driver=driver)
        trainer = Trainer(env, PPOConfig(**preset), seed=job.seed)
    lines, started, error = list[dict[str, float]](), time.perf_counter(), ""
    try:
        while trainer.iteration < trainer.num_iterations:
            lines.append({"seconds": time.perf_counter() - started, **trainer.train_iteration()})
    except NonFiniteError as raised:
        error = str(raised)
    path = folder / "runs" / job.name
    path.mkdir(parents=True, exist_ok=True)
    with (path / METRICS_FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    row: dict[str, Any] = {"run": job.name, "num_minibatches": preset["num_minibatches"], "error": error}
    row["not_finite"] = sorted({key for line in lines for key, value in line.items() if not math.isfinite(value)})
    row |= {"seconds": lines[-1]["seconds"], "env_steps": lines[-1]["env_steps"]}
    row["largest_value_loss"] = max(v for line in lines for k, v in line.items() if k.startswith("value_loss"))
    policy = gpu_vecenv.GamePolicy(game, trainer.policies)
    trainer.close()
    return (row if error else row | returns_of(policy, config.episodes)), policy


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
    device, names = resolve_device(config.device), config.games.split(",")
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"unknown rows {sorted(unknown)}; known: {', '.join(ROWS)}")
    factors = [int(factor) for factor in config.minibatch_factors.split(",")]
    jobs = [Job(*job) for job in itertools.product(names, factors, range(config.seeds))]
    file = folder / "results.json"
    results: dict[str, Any] = {**provenance(device), "runs_at_once": config.workers, "rows": [], "against_scripts": []}
    if file.is_file():
        results["rows"] = json.loads(file.read_text())["rows"]
    done, writing, policies = {row["run"] for row in results["rows"]}, threading.Lock(), dict[str, Any]()

    def work(job: Job) -> None:
        row, policies[job.name] = train(job, folder, device, config)
        with writing:
            results["rows"].append(row)
            file.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(row), flush=True)

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    # Games whose precision differs change torch's global setting: one group after the other.
    for _, group in itertools.groupby(jobs, lambda job: configure(ROWS[job.row][0]).preset.get("precision")):
        with ThreadPoolExecutor(config.workers) as pool:
            list(pool.map(work, [job for job in group if job.name not in done]))
    for row, factor in itertools.product(names, factors):
        own = [job.name for job in jobs if (job.row, job.factor) == (row, factor)]
        runs = [path for name in own if (path := folder / "runs" / name).is_dir()]
        plot_runs(runs, folder / f"{row}{'' if factor == 1 else f'-x{factor}'}.png")
        if row.startswith("tag_") and factor == 1 and policies.keys() >= set(own):
            episodes = min(config.episodes, 200 if "continuous" in row else 1000)
            for line in against_scripts([policies[name] for name in own], episodes):
                results["against_scripts"].append(line)
                print(json.dumps(line), flush=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tyro.cli(ResultsConfig, args=sys.argv[2:], prog="results.py FOLDER"))
