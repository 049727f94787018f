"""Train every game with its preset, several seeds each, and write the results.

usage: python tests/gpu/results.py FOLDER [--device cuda] [--seeds 5] [--games cartpole,pendulum]
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
import traceback
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
from gpu_vecenv.train.plots import EPISODE_METRICS, METRICS_FILE, plot_runs
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
WARM_UP = 2  # iterations: the second one captures the CUDA graphs


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """What to train."""

    device: str | None = None  # cpu or cuda
    seeds: int = 5  # of each row: 0, 1, …
    games: str = ",".join(ROWS)  # rows, by name
    minibatch_factors: str = "1"  # the preset's num_minibatches times each of these
    total_steps: int | None = None  # of every run; default: the preset's
    episodes: int = 1000  # of each evaluation
    max_seconds: float = math.inf  # then all runs end, where they are


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


class Training:
    """A run and its metrics. Made one at a time: torch captures a graph only while no other thread uses the GPU.

    ``Trainer`` has a CUDA stream of the thread that makes it.
    """

    def __init__(self, job: Job, device: torch.device, config: ResultsConfig) -> None:
        self.job, self.config = job, config
        name, values = ROWS[job.row]
        self.game = configure(name, **values)
        preset = dict(self.game.preset)
        num_envs = preset.pop("num_envs")
        preset["num_minibatches"] = preset.get("num_minibatches", PPOConfig().num_minibatches) * job.factor
        preset |= {} if config.total_steps is None else {"total_steps": config.total_steps}
        driver = "cuda_core" if device.type == "cuda" else None  # PyCUDA has one stream for all threads
        env = gpu_vecenv.VecEnv(self.game, num_envs, device, autoreset_mode="next_step", driver=driver)
        self.trainer = Trainer(env, PPOConfig(**preset), seed=job.seed)
        self.metrics: list[dict[str, float]] = []
        self.started, self.error = time.perf_counter(), ""
        self.train(WARM_UP, math.inf)

    def train(self, iterations: int, deadline: float) -> None:
        """Train up to this number of iterations, or until the deadline or the first loss that is not finite."""
        try:
            while self.trainer.iteration < iterations and time.perf_counter() < deadline:
                metrics = self.trainer.train_iteration()
                if metrics["first_episodes"]:  # means over episodes are NaN
                    metrics = {key: value for key, value in metrics.items() if not key.startswith(EPISODE_METRICS)}
                self.metrics.append({"seconds": time.perf_counter() - self.started, **metrics})
        except NonFiniteError as raised:
            self.error = str(raised)

    def finish(self, folder: Path, deadline: float) -> tuple[dict[str, Any], gpu_vecenv.GamePolicy]:
        """Train to the end; the row of the results, with the metrics that were not finite, and the policies."""
        self.train(self.trainer.num_iterations, deadline)
        path, lines, config = folder / "runs" / self.job.name, self.metrics, self.trainer.config
        path.mkdir(parents=True, exist_ok=True)
        with (path / METRICS_FILE).open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for line in lines for key in line))
            writer.writeheader()
            writer.writerows(lines)
        broken = {key for line in lines for key, value in line.items() if not math.isfinite(value)}
        row = {
            "run": self.job.name,
            "num_minibatches": config.num_minibatches,
            "seconds": lines[-1]["seconds"],
            "env_steps": lines[-1]["env_steps"],
            "complete": self.trainer.iteration == self.trainer.num_iterations,
            "error": self.error,
            "not_finite": sorted(broken),
            "largest_value_loss": max(v for line in lines for k, v in line.items() if k.startswith("value_loss")),
        }
        policy = gpu_vecenv.GamePolicy(self.game, self.trainer.policies)
        self.trainer.close()
        return (row if self.error else row | returns_of(policy, self.config.episodes)), policy


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
    results: dict[str, Any] = {**provenance(device), "rows": [], "against_scripts": []}
    if file.is_file():
        results["rows"] = json.loads(file.read_text())["rows"]
    done = {row["run"] for row in results["rows"]}
    jobs_left = [job for job in jobs if job.name not in done]
    results["runs_at_once"] = len(jobs_left)
    lock, policies = threading.Lock(), dict[str, Any]()
    all_made, started = threading.Barrier(max(len(jobs_left), 1)), time.perf_counter()

    def work(job: Job) -> None:
        try:
            with lock:
                training = Training(job, device, config)
        except BaseException:
            traceback.print_exc()  # others raise BrokenBarrierError
            all_made.abort()
            raise
        all_made.wait()
        row, policies[job.name] = training.finish(folder, started + config.max_seconds)
        with lock:
            results["rows"].append(row)
            file.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(row), flush=True)

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(len(jobs_left), 1)) as pool:
        list(pool.map(work, jobs_left))
    for row, factor in itertools.product(names, factors):
        own = [job.name for job in jobs if (job.row, job.factor) == (row, factor)]
        complete = {row["run"] for row in results["rows"] if row["complete"]}
        if not complete >= set(own):
            continue
        plot_runs([folder / "runs" / name for name in own], folder / f"{row}{'' if factor == 1 else f'-x{factor}'}.png")
        if row.startswith("tag_") and factor == 1 and policies.keys() >= set(own):
            episodes = min(config.episodes, 200 if "continuous" in row else 1000)
            for line in against_scripts([policies[name] for name in own], episodes):
                results["against_scripts"].append(line)
                print(json.dumps(line), flush=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tyro.cli(ResultsConfig, args=sys.argv[2:], prog="results.py FOLDER"))
