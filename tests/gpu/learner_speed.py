"""Iterations of PPO with the default network, by its kernels and by torch, alternately on one GPU.

    python3 tests/gpu/learner_speed.py RESULTS.json            # all rows
    python3 tests/gpu/learner_speed.py RESULTS.json "2 x 256"  # those with this in their names

Networks of 2 x 256 units have kernels layer by layer, see ``gpu_vecenv/train/layerwise.py``. Of a recurrent network
only the GRU has kernels, see ``gpu_vecenv/train/gru.py``; its row also tells how many iterations of the row of a
perceptron, "beside", one of its own takes, if that row was measured.

A row has medians of eight iterations after three: milliseconds, env-steps per second, and the memory at its peak; and
the milliseconds of an iteration where the host reads metrics once in ten. Of iterations of more than 0.3 s it has the
fourth alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import gpu_vecenv.train.sequences
import gpu_vecenv.train.trainer
from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.train import policy_kernels
from gpu_vecenv.train.policy_kernels import Choice, choose_kernels
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.recurrent_cells import why_not_cells
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
WIDE = {"num_steps": 25, "num_epochs": 1, "hidden_sizes": (256, 256)}
WARPDRIVE = {"num_steps": 250, "hidden_sizes": (256, 256), "precision": "tf32"}
GRU = {"network": "gru"}
# JaxMARL's ippo_rnn_mpe: a dense layer of 128 units in front of a GRU of as many.
SPREAD = {"num_steps": 128, "hidden_sizes": (128, 128)}
STEPS = {"num_steps": 32, "hidden_sizes": (256, 256)}
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1, "normalize_advantages": False}
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
    ("tag_continuous, 2 x 256, bfloat16", "tag_continuous", {}, 2000, {**WIDE, "precision": "bfloat16"}),
    ("tag_continuous, 2 x 256, TF32", "tag_continuous", {}, 2000, {**WIDE, "precision": "tf32"}),
    ("tag_continuous gru, TF32", "tag_continuous", {}, 2000, {**TAG, **GRU}),
    ("tag_continuous gru, bfloat16", "tag_continuous", {}, 2000, {**TAG, **GRU, "precision": "bfloat16"}),
    ("tag_continuous gru, float32", "tag_continuous", {}, 2000, {**TAG, **GRU, "precision": "float32"}),
    ("simple_spread 128, TF32", "simple_spread", {}, 1024, {**SPREAD, "precision": "tf32"}),
    ("simple_spread gru 128, TF32", "simple_spread", {}, 1024, {**SPREAD, **GRU, "precision": "tf32"}),
    ("simple_spread gru 128, float32", "simple_spread", {}, 1024, {**SPREAD, **GRU}),
    # WarpDrive's, but for the longest.
    ("tag_continuous, 2 x 256, TF32, 250 steps, A2C", "tag_continuous", {}, 100, {**WARPDRIVE, **ONE_STEP}),
    ("tag_continuous, 2 x 256, TF32, 250 steps", "tag_continuous", {}, 100, WARPDRIVE),
    ("tag_continuous, 2 x 256, TF32, 2,000 x 250, A2C", "tag_continuous", {}, 2000, {**WARPDRIVE, **ONE_STEP}),
    # From which number of agents in a step on kernels layer by layer are faster: MIN_STEP_ROWS in policy_kernels.py.
    *(
        (
            f"cartpole, 2 x 256, {kind}, {num_envs:,} agents",
            "cartpole",
            {},
            num_envs,
            {**STEPS, "precision": kind},
        )
        for kind in ("float32", "tf32")
        for num_envs in (256, 2048, 8192, 32_768, 65_536, 131_072)
    ),
)
# Of each row with a GRU that of a perceptron.
BESIDE = {
    "tag_continuous gru, TF32": "tag_continuous, TF32",
    "tag_continuous gru, bfloat16": "tag_continuous, TF32",
    "tag_continuous gru, float32": "tag_continuous, TF32",
    "simple_spread gru 128, TF32": "simple_spread 128, TF32",
    "simple_spread gru 128, float32": "simple_spread 128, TF32",
}
SHORT = 0.3  # seconds: of longer iterations one is measured
WARM_UP, ITERATIONS, INTERVAL = 3, 8, 10


def measured(game: str, values: dict[str, Any], num_envs: int, config: dict[str, Any]) -> dict[str, float]:
    """Medians of a trainer's iterations."""
    torch.cuda.reset_peak_memory_stats()
    env = VecEnv(compared_game(game, **values), num_envs, "cuda")
    trainer = Trainer(env, PPOConfig(total_steps=10**12, **config))
    seconds = []

    def measure(iterations: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for _ in range(iterations):
            start = time.perf_counter()
            metrics = trainer.train_iteration()
            seconds.append(time.perf_counter() - start)
        return metrics

    measure(WARM_UP)
    is_short = seconds[-1] < SHORT
    metrics = measure(ITERATIONS if is_short else 1)
    median = statistics.median(seconds[WARM_UP:])
    in_intervals = []
    for _ in range(3 if is_short else 0):
        start = time.perf_counter()
        trainer.train_interval(INTERVAL)
        in_intervals.append((time.perf_counter() - start) / INTERVAL)
    row = {
        "milliseconds": 1e3 * median,
        "env_steps_per_s": trainer.env_steps_per_iteration / median,
        "agent_steps_per_s": trainer.env_steps_per_iteration * env.num_agents / median,
        "milliseconds_in_intervals": 1e3 * statistics.median(in_intervals or [median]),
        "update_time_fraction": metrics["update_time_fraction"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    trainer.close()
    env.close()
    torch.cuda.empty_cache()
    return row


def by_torch(*_: object) -> Choice:
    """In the place of ``choose_kernels``."""
    return Choice(None, "measured for comparison", "measured for comparison")


def no_cells(*_: object) -> str:
    """In the place of ``why_not_cells``."""
    return "measured for comparison"


def main(file: Path, part_of_name: str = "") -> None:
    """Measure all rows whose names have this part, and write them."""
    policy_kernels.MIN_STEP_ROWS = 0  # kernels layer by layer also where torch would be faster
    rows = []
    for name, game, values, num_envs, config in ROWS:
        if part_of_name not in name:
            continue
        row: dict[str, Any] = {"name": name, "num_envs": num_envs, "num_steps": config["num_steps"]}
        for way, choose, why_not in (("kernels", choose_kernels, why_not_cells), ("torch", by_torch, no_cells)):
            gpu_vecenv.train.trainer.choose_kernels = choose
            gpu_vecenv.train.sequences.why_not_cells = why_not
            row[way] = measured(game, values, num_envs, config)
        beside = next((other for other in rows if other["name"] == BESIDE.get(name)), None)
        if beside is not None:
            row["beside"] = beside["name"]
            row["iterations_of_it"] = row["kernels"]["milliseconds"] / beside["kernels"]["milliseconds"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    gpu_vecenv.train.trainer.choose_kernels = choose_kernels
    gpu_vecenv.train.sequences.why_not_cells = why_not_cells
    file.write_text(json.dumps({**provenance(resolve_device("cuda")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
