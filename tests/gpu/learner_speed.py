"""Iterations of PPO with the default network, by its kernels and by torch, alternately on one GPU.

    python3 tests/gpu/learner_speed.py RESULTS.json

A row has medians of eight iterations after three: milliseconds, env-steps per second, and the memory at its peak; and
the milliseconds of an iteration where the host reads metrics once in ten.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import gpu_vecenv.train.trainer
from gpu_vecenv import VecEnv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

SEPARATE = {"shared_trunk": False, "num_steps": 32}
TAG = {"num_steps": 25, "precision": "tf32"}
A2C = {
    "num_steps": 5,
    "num_epochs": 1,
    "num_minibatches": 1,
    "hidden_sizes": (32, 32),
    "normalize_advantages": False,
    "precision": "tf32",
}
# Name, game, its configuration, environments, PPO's configuration.
ROWS: tuple[tuple[str, str, dict[str, Any], int, dict[str, Any]], ...] = (
    ("cartpole, TF32", "cartpole", {}, 16_384, {**SEPARATE, "precision": "tf32"}),
    ("cartpole, bfloat16", "cartpole", {}, 16_384, {**SEPARATE, "precision": "bfloat16"}),
    ("cartpole, float32", "cartpole", {}, 16_384, SEPARATE),
    ("simple_spread, TF32", "simple_spread", {}, 4096, {**SEPARATE, "precision": "tf32"}),
    ("tag_continuous, TF32", "tag_continuous", {}, 2000, TAG),
    ("tag_continuous, TF32, 1 epoch", "tag_continuous", {}, 2000, {**TAG, "num_epochs": 1}),
    (
        "tag_gridworld of 1,000 agents, TF32, A2C",
        "tag_gridworld",
        {"num_taggers": 999, "full_observation": False},
        2000,
        A2C,
    ),
)
WARM_UP, ITERATIONS, INTERVAL = 3, 8, 10


def measured(game: str, values: dict[str, Any], num_envs: int, config: dict[str, Any]) -> dict[str, float]:
    """Medians of a trainer's iterations."""
    torch.cuda.reset_peak_memory_stats()
    env = VecEnv(configure(game, **values), num_envs, "cuda")
    trainer = Trainer(env, PPOConfig(total_steps=10**12, **config))
    seconds = []
    for _ in range(WARM_UP + ITERATIONS):
        start = time.perf_counter()
        metrics = trainer.train_iteration()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARM_UP:])
    in_intervals = []
    for _ in range(3):
        start = time.perf_counter()
        trainer.train_interval(INTERVAL)
        in_intervals.append((time.perf_counter() - start) / INTERVAL)
    row = {
        "milliseconds": 1e3 * median,
        "env_steps_per_s": trainer.env_steps_per_iteration / median,
        "agent_steps_per_s": trainer.env_steps_per_iteration * env.num_agents / median,
        "milliseconds_in_intervals": 1e3 * statistics.median(in_intervals),
        "update_time_fraction": metrics["update_time_fraction"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    trainer.close()
    env.close()
    torch.cuda.empty_cache()
    return row


def main(file: Path) -> None:
    """Measure all rows and write them."""
    kernels = gpu_vecenv.train.trainer.why_not_fused
    rows = []
    for name, game, values, num_envs, config in ROWS:
        row: dict[str, Any] = {"name": name, "num_envs": num_envs, "num_steps": config["num_steps"]}
        for way, reason in (("kernels", kernels), ("torch", lambda *_: "measured for comparison")):
            gpu_vecenv.train.trainer.why_not_fused = reason
            row[way] = measured(game, values, num_envs, config)
        rows.append(row)
        print(json.dumps(row), flush=True)
    gpu_vecenv.train.trainer.why_not_fused = kernels
    file.write_text(json.dumps({**provenance(resolve_device("cuda")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
