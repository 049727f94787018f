"""Train every game with its preset, several seeds each, and write what came of it. Takes hours on a CPU.

usage: python tests/gpu/results.py FOLDER [--device cuda] [--seeds 5] [--workers 12] [--games cartpole,pendulum]

Each run is the command line's: gpu-vecenv train GAME --seed SEED --out FOLDER/runs/GAME-seedSEED. FOLDER/results.json
holds the returns of 1,000 episodes each, FOLDER/GAME.png the curves. For the games of tag, policies also play against
the scripts of examples/tag_baselines.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
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
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.plots import plot_runs, read_metrics

ROOT = Path(__file__).resolve().parents[2]
# Name of the row -> what is trained. The longest come first, so that the last ones fill the gaps.
ROWS = {
    "tag_continuous": "tag_continuous",
    "simple_tag": "simple_tag",
    "simple_adversary": "simple_adversary",
    "simple_spread": "simple_spread",
    "tag_gridworld-random_start": "tag_gridworld --random-start",
    "tag_gridworld": "tag_gridworld",
    "acrobot": "acrobot",
    "continuous_mountain_car": "continuous_mountain_car",
    "mountain_car": "mountain_car",
    "pendulum": "pendulum",
    "cartpole": "cartpole",
}


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """What to train."""

    device: str | None = None  # cpu or cuda
    seeds: int = 5  # of each row: 0, 1, …
    workers: int = 12  # runs at the same time
    games: str = ",".join(ROWS)  # rows, by name
    episodes: int = 1000  # of each evaluation


def train(row: str, seed: int, folder: Path, device: str | None) -> Path:
    """One run; its folder."""
    run = folder / "runs" / f"{row}-seed{seed}"
    command = [sys.executable, "-m", "gpu_vecenv.cli", "train", *ROWS[row].split(), "--seed", str(seed)]
    command += ["--out", str(run), "--episodes", "10", *(["--device", device] if device else [])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return run


def row_of(run: Path, device: str, episodes: int) -> dict[str, Any]:
    """What came of a run."""
    policy, metrics = gpu_vecenv.load_policy(run, device=device), read_metrics(run)
    env = gpu_vecenv.VecEnv(policy.game, 1000, device)
    roles = list(policy.policies)
    row: dict[str, Any] = {"run": run.name, "seconds": metrics[-1]["seconds"], "env_steps": metrics[-1]["env_steps"]}
    row["random"] = evaluate(env, dict.fromkeys(roles), episodes)
    row["sampled"] = evaluate(env, policy.policies, episodes)
    row["greedy"] = evaluate(env, policy.policies, episodes, greedy=True)
    env.close()
    return row


def against_scripts(runs: list[Path], device: str, episodes: int) -> Iterator[dict[str, Any]]:
    """Every tagger against every runner: chance, script, what was trained (all seeds)."""
    spec = importlib.util.spec_from_file_location("tag_baselines", ROOT / "examples" / "tag_baselines.py")
    assert spec and spec.loader
    scripts = importlib.util.module_from_spec(spec)
    sys.modules["tag_baselines"] = scripts
    spec.loader.exec_module(scripts)
    torch.manual_seed(0)  # of the policies' draws
    policies = [gpu_vecenv.load_policy(run, device=device) for run in runs]
    game = policies[0].game
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
    device, rows = str(resolve_device(config.device)), config.games.split(",")
    if unknown := set(rows) - set(ROWS):
        raise SystemExit(f"unknown rows {sorted(unknown)}; known: {', '.join(ROWS)}")
    jobs = [(row, seed) for row in ROWS if row in rows for seed in range(config.seeds)]
    with ThreadPoolExecutor(config.workers) as pool:
        runs = list(pool.map(lambda job: train(*job, folder, config.device), jobs))
    results: dict[str, Any] = {**provenance(resolve_device(config.device)), "runs_at_once": config.workers, "rows": []}
    results["against_scripts"] = []
    for row in rows:
        own = [run for run, (name, _) in zip(runs, jobs, strict=True) if name == row]
        plot_runs(own, folder / f"{row}.png")
        for run in own:
            results["rows"].append(row_of(run, device, config.episodes))
            print(json.dumps(results["rows"][-1]), flush=True)
        if row.startswith("tag_"):
            for line in against_scripts(own, device, min(config.episodes, 200 if "continuous" in row else 1000)):
                results["against_scripts"].append(line)
                print(json.dumps(line), flush=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tyro.cli(ResultsConfig, args=sys.argv[2:], prog="results.py FOLDER"))
