"""Throughput of several seeds trained at a time on one GPU, by that of one alone.

    python3 tests/gpu/seeds_speed.py RESULTS.json

Medians of blocks of iterations, one and all alternately; the goal is five times the throughput with eight seeds. Logs
are not written. Where it is missed the row says so; nothing fails.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv import VecEnv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

CONFIG = {"shared_trunk": False, "num_steps": 32, "precision": "tf32"}
# Name, game, environments of each seed, seeds, iterations between two reads, goal.
ROWS: tuple[tuple[str, str, int, int, int, float | None], ...] = (
    ("cartpole", "cartpole", 512, 8, 1, 5.0),
    ("cartpole, read every 10 iterations", "cartpole", 512, 8, 10, 5.0),
    ("cartpole, 2 seeds", "cartpole", 512, 2, 1, None),
    ("cartpole, 16 seeds", "cartpole", 512, 16, 1, None),
    ("cartpole, 4,096 environments", "cartpole", 4096, 8, 1, None),
    ("tag_gridworld", "tag_gridworld", 512, 8, 1, None),
)
WARM_UP, BLOCKS, ITERATIONS = 20, 7, 40


def measure(game: str, num_envs: int, seeds: int, log_interval: int) -> dict[str, Any]:
    """Milliseconds of an iteration of one and of all, env-steps per second, their ratio, and bytes."""
    row: dict[str, Any] = {}

    def made(count: int) -> tuple[list[Trainer], ParallelTrainers]:
        trainers = [
            Trainer(
                VecEnv(configure(game), num_envs, "cuda", autoreset_mode="next_step"),
                PPOConfig(total_steps=10**12, **CONFIG),
                seed=seed,
            )
            for seed in range(count)
        ]
        return trainers, ParallelTrainers(trainers)

    def timed(trainers: list[Trainer], together: ParallelTrainers, iterations: int) -> float:
        torch.cuda.synchronize()
        start, end = time.perf_counter(), trainers[0].iteration + iterations
        while trainers[0].iteration < end:
            together.train_interval(trainers, log_interval)
        return (time.perf_counter() - start) / iterations

    ways: dict[str, tuple[list[Trainer], ParallelTrainers]] = {}
    for way, count in (("one", 1), ("all", seeds)):
        before = torch.cuda.memory_allocated()
        ways[way] = made(count)
        timed(*ways[way], WARM_UP)
        row[f"{way}_bytes"] = torch.cuda.memory_allocated() - before
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(BLOCKS):
        for way, (trainers, together) in ways.items():
            times[way].append(timed(trainers, together, ITERATIONS))
    for way, (trainers, _) in ways.items():
        median = statistics.median(times[way])
        row[f"{way}_ms"] = round(1e3 * median, 4)
        row[f"{way}_env_steps_per_s"] = round(len(trainers) * trainers[0].env_steps_per_iteration / median)
        for trainer in trainers:
            trainer.close()
    row["throughput_ratio"] = round(row["all_env_steps_per_s"] / row["one_env_steps_per_s"], 3)
    return row


def main(file: Path) -> None:
    """Measure all rows and write them."""
    rows = []
    for name, game, num_envs, seeds, log_interval, goal in ROWS:
        sizes = {"num_envs": num_envs, "seeds": seeds, "log_interval": log_interval}
        row = {"name": name, **sizes, **measure(game, num_envs, seeds, log_interval), "goal": goal}
        if goal is not None:
            row["reached"] = row["throughput_ratio"] >= goal
        rows.append(row)
        print(json.dumps(row), flush=True)
    text = {**provenance(resolve_device("cuda")), "config": CONFIG, "rows": rows}
    file.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
