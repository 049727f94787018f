"""Iterations of PPO with the default network, by its kernels and by torch, one after the other on one GPU.

    python3 tests/gpu/learner_speed.py RESULTS.json              # the rows of docs/performance.md
    python3 tests/gpu/learner_speed.py RESULTS.json recurrent    # networks with a GRU
    python3 tests/gpu/learner_speed.py RESULTS.json thresholds   # from how many agents on kernels are faster

Networks of 2 x 256 units have kernels layer by layer, see ``gpu_vecenv/train/layerwise.py``. Of a recurrent network
only the GRU has kernels, see ``gpu_vecenv/train/gru.py``; its row also has how many iterations of the row of a
perceptron, "beside", one of its own takes.

A row has medians and quartiles of ten iterations after three: milliseconds, and of iterations of less than 0.3 s those
of one where the host reads metrics once in ten; env-steps per second, and the memory at its peak.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments, milliseconds

import gpu_vecenv.train.sequences
import gpu_vecenv.train.trainer
from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.engine.timing import quartiles
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
Row = tuple[str, str, dict[str, Any], int, dict[str, Any]]  # name, game, its configuration, environments, PPO's
ROWS: dict[str, tuple[Row, ...]] = {
    "table": (
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
        ("tag_continuous, 2 x 256, TF32, 250 steps, A2C", "tag_continuous", {}, 100, {**WARPDRIVE, **ONE_STEP}),
        ("tag_continuous, 2 x 256, TF32, 250 steps", "tag_continuous", {}, 100, WARPDRIVE),
        ("tag_continuous, 2 x 256, TF32, 2,000 x 250, A2C", "tag_continuous", {}, 2000, {**WARPDRIVE, **ONE_STEP}),
    ),
    "recurrent": (
        ("tag_continuous gru, TF32", "tag_continuous", {}, 2000, {**TAG, **GRU}),
        ("tag_continuous gru, bfloat16", "tag_continuous", {}, 2000, {**TAG, **GRU, "precision": "bfloat16"}),
        ("tag_continuous gru, float32", "tag_continuous", {}, 2000, {**TAG, **GRU, "precision": "float32"}),
        ("simple_spread 128, TF32", "simple_spread", {}, 1024, {**SPREAD, "precision": "tf32"}),
        ("simple_spread gru 128, TF32", "simple_spread", {}, 1024, {**SPREAD, **GRU, "precision": "tf32"}),
        ("simple_spread gru 128, float32", "simple_spread", {}, 1024, {**SPREAD, **GRU}),
    ),
    # MIN_STEP_ROWS in policy_kernels.py
    "thresholds": tuple(
        (f"cartpole, 2 x 256, {kind}, {num_envs:,} agents", "cartpole", {}, num_envs, {**STEPS, "precision": kind})
        for kind in ("float32", "tf32")
        for num_envs in (256, 2048, 8192, 32_768, 65_536, 131_072)
    ),
}
QUICK: dict[str, Any] = {"num_steps": 2, "hidden_sizes": (8, 8), "num_epochs": 1, "num_minibatches": 1}
QUICK_ENVS = 2
ALL_ROWS = [row for rows in ROWS.values() for row in rows]
# Of each row with a GRU that of a perceptron.
BESIDE = {
    "tag_continuous gru, TF32": "tag_continuous, TF32",
    "tag_continuous gru, bfloat16": "tag_continuous, TF32",
    "tag_continuous gru, float32": "tag_continuous, TF32",
    "simple_spread gru 128, TF32": "simple_spread 128, TF32",
    "simple_spread gru 128, float32": "simple_spread 128, TF32",
}
SHORT = 0.3  # seconds: of longer iterations the host reads each
WARM_UP, INTERVAL = 3, 10


def measured(
    game: str, values: dict[str, Any], num_envs: int, config: dict[str, Any], repeats: int, device: torch.device
) -> dict[str, Any]:
    """Medians and quartiles of a trainer's iterations."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    env = VecEnv(compared_game(game, **values), num_envs, device)
    trainer = Trainer(env, PPOConfig(total_steps=10**12, **config))
    metrics: dict[str, float] = {}

    def seconds() -> float:
        nonlocal metrics
        start = time.perf_counter()
        metrics = trainer.train_iteration()
        return time.perf_counter() - start

    def seconds_in_interval() -> float:
        start = time.perf_counter()
        trainer.train_interval(INTERVAL)
        return (time.perf_counter() - start) / INTERVAL

    warm_up = [seconds() for _ in range(WARM_UP)]
    each = [seconds() for _ in range(repeats)]
    _, median, _ = quartiles(each)
    row = {
        **milliseconds("milliseconds", each),
        "env_steps_per_s": round(trainer.env_steps_per_iteration / median),
        "agent_steps_per_s": round(trainer.env_steps_per_iteration * env.num_agents / median),
        "update_time_fraction": round(metrics["update_time_fraction"], 4),
    }
    if warm_up[-1] < SHORT:
        while trainer.iteration % INTERVAL:
            trainer.train_iteration()
        row |= milliseconds("milliseconds_in_intervals", [seconds_in_interval() for _ in range(repeats)])
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    trainer.close()
    env.close()
    return row


def by_torch(*_: object) -> Choice:
    """In the place of ``choose_kernels``."""
    return Choice(None, "measured for comparison", "measured for comparison")


def no_cells(*_: object) -> str:
    """In the place of ``why_not_cells``."""
    return "measured for comparison"


WAYS = {"kernels": (choose_kernels, why_not_cells), "torch": (by_torch, no_cells)}


def row_of(*sizes: Any, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """Both ways; ``beside``: the row whose iterations one of this row is counted in."""
    row: dict[str, Any] = {}
    for way, (choose, why_not) in WAYS.items():
        gpu_vecenv.train.trainer.choose_kernels = choose
        gpu_vecenv.train.sequences.why_not_cells = why_not
        row[way] = measured(*sizes)
    if beside is not None:
        count = row["kernels"]["milliseconds"] / beside["kernels"]["milliseconds"]
        row |= {"beside": beside["name"], "iterations_of_it": round(count, 2)}
    return row


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__, rows=tuple(ROWS))
    policy_kernels.MIN_STEP_ROWS = 0  # kernels layer by layer also where torch would be faster
    measurements = Measurements(given)
    repeats = 2 if given.quick else REPEATS

    def measure(row: Row) -> dict[str, Any]:
        name, game, values, num_envs, config = row
        if given.quick:
            num_envs, config = QUICK_ENVS, {**config, **QUICK}
        beside = next((measure(other) for other in ALL_ROWS if other[0] == BESIDE.get(name)), None)
        key = {"name": name, "num_envs": num_envs, "num_steps": config["num_steps"]}
        sizes = game, values, num_envs, config, repeats, given.device
        return measurements.measure(key, lambda: row_of(*sizes, beside=beside))

    for row in ROWS[given.rows]:
        measure(row)


if __name__ == "__main__":
    main()
