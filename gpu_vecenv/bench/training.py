"""Training throughput, end to end: rollout, update and logged metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpu_vecenv.bench.games import compared_game, named
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.timing import NUM_RUNS, quartiles, spread, synchronize
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

# WarpDrive's: game, num_envs, steps per iteration, units of both hidden layers.
CONFIGURATIONS = (
    ("tag_continuous", 100, 250, 256),
    ("tag_continuous", 2000, 250, 256),
    ("tag_gridworld", 2000, 100, 32),
    ("cartpole", 10_000, 50, 32),
)
# (num_epochs, num_minibatches): WarpDrive's, and this trainer's defaults.
UPDATES = {(1, 1): "one step on the whole batch", (4, 4): "4 epochs of 4 minibatches"}
WARM_UP, RUNS = 3, NUM_RUNS  # iterations; measurements
AGENT_STEPS_PER_RUN, MAX_SECONDS = 10_000_000, 2.0  # or this many seconds, whichever ends first
SHARES = tuple(f"{part}_time_fraction" for part in ("rollout", "policy", "sampling", "env", "update"))


def num_rows(precisions: Sequence[Precision]) -> int:
    """Rows of ``measure``."""
    return len(CONFIGURATIONS) * len(UPDATES) * len(precisions)


def measure(device: torch.device, precisions: Sequence[Precision], graphs: bool = True) -> Iterator[dict[str, Any]]:
    """One row for each of WarpDrive's configurations, kind of update and precision."""
    for name, num_envs, num_steps, units in CONFIGURATIONS:
        for epochs, minibatches in UPDATES:
            config = PPOConfig(
                total_steps=10**12,
                num_steps=num_steps,
                num_epochs=epochs,
                num_minibatches=minibatches,
                hidden_sizes=(units, units),
            )
            for row in measure_game(compared_game(name), num_envs, config, device, precisions, graphs):
                yield {**row, "units": units}  # of both layers


def measure_game(
    game: Env,
    num_envs: int,
    config: PPOConfig,
    device: torch.device,
    precisions: Sequence[Precision],
    graphs: bool = True,
) -> Iterator[dict[str, Any]]:
    """One row for each precision."""
    kind = config.num_epochs, config.num_minibatches
    for precision in precisions:
        yield {
            **named(game, num_envs),
            "num_steps": config.num_steps,
            "units": list(config.hidden_sizes),
            "update": UPDATES.get(kind, "{} epochs of {} minibatches".format(*kind)),
            "precision": precision,
            **_rates(game, num_envs, replace(config, precision=precision), device, graphs),
        }


def _rates(game: Env, num_envs: int, config: PPOConfig, device: torch.device, graphs: bool) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    first_env_index = World.current().rank * num_envs
    env = VecEnv(game, num_envs, device, autoreset_mode="next_step", first_env_index=first_env_index)
    trainer = Trainer(env, config, graphs=graphs)
    for _ in range(WARM_UP):
        start = time.perf_counter()
        metrics = trainer.train_iteration()
    each, env_steps = time.perf_counter() - start, trainer.env_steps_per_iteration
    planned = min(AGENT_STEPS_PER_RUN // (env_steps * env.num_agents), math.ceil(MAX_SECONDS / each))
    num_iterations = torch.tensor(max(1, planned), device=device)
    World.current().broadcast(num_iterations)  # the same in every process
    iterations, seconds = int(num_iterations), []
    for _ in range(RUNS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(iterations):
            metrics = trainer.train_iteration()
        seconds.append((time.perf_counter() - start) / iterations)
    _, each, _ = quartiles(seconds)
    row: dict[str, Any] = {
        **spread("iteration_ms", [run * 1e3 for run in seconds], 3),
        "env_steps_per_s": round(env_steps / each),
        "agent_steps_per_s": round(env_steps * env.num_agents / each),
    }
    row |= {
        name: round(value, 4) for name, value in metrics.items() if name.endswith("_time_fraction") and name in SHARES
    }
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    trainer.close()
    return row
