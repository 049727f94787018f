"""How fast training is, end to end: rollout, update and the figures of the log."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu_vecenv.distributed import World
from gpu_vecenv.measurement import wait
from gpu_vecenv.policy import Precision
from gpu_vecenv.ppo import PPOConfig
from gpu_vecenv.registry import configure
from gpu_vecenv.trainer import Trainer
from gpu_vecenv.vec_env import VecEnv

# WarpDrive's own: game, replicas, ticks per iteration, units of both hidden layers.
CONFIGURATIONS = (
    ("tag_continuous", 100, 250, 256),
    ("tag_continuous", 2000, 250, 256),
    ("tag_gridworld", 2000, 100, 32),
    ("cartpole", 10_000, 50, 32),
)
# WarpDrive makes one step on the whole batch; the others are passes and minibatches of this trainer's defaults.
UPDATES = {"one step on the whole batch": (1, 1), "4 epochs of 4 minibatches": (4, 4)}
WARM_UP, RUNS = 3, 5  # iterations; measurements, of which the median counts
AGENT_STEPS_PER_RUN = 10_000_000
SHARES = ("policy_share", "sampling_share", "env_share", "update_share")


def measure(device: torch.device, precisions: Sequence[Precision], graphs: bool = True) -> Iterator[dict[str, Any]]:
    """One row for each configuration, kind of update and precision."""
    for name, num_envs, num_steps, units in CONFIGURATIONS:
        for update, (epochs, minibatches) in UPDATES.items():
            for precision in precisions:
                config = PPOConfig(
                    total_steps=10**12,
                    num_steps=num_steps,
                    num_epochs=epochs,
                    num_minibatches=minibatches,
                    hidden_sizes=(units, units),
                    precision=precision,
                )
                shares = {"game": name, "num_envs": num_envs, "num_steps": num_steps, "units": units}
                yield {
                    **shares,
                    "update": update,
                    "precision": precision,
                    **_rates(name, num_envs, config, device, graphs),
                }


def _rates(name: str, num_envs: int, config: PPOConfig, device: torch.device, graphs: bool) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    first = World.current().rank * num_envs  # each process has as many
    env = VecEnv(configure(name), num_envs, device, autoreset_mode="next_step", first_replica=first)
    trainer = Trainer(env, config, graphs=graphs)
    for _ in range(WARM_UP):
        figures = trainer.train_iteration()
    seconds = []
    env_steps = trainer.env_steps_per_iteration
    iterations = max(1, AGENT_STEPS_PER_RUN // (env_steps * env.num_agents))  # the same number in every process
    for _ in range(RUNS):
        wait(device)
        start = time.perf_counter()
        for _ in range(iterations):
            figures = trainer.train_iteration()
        seconds.append((time.perf_counter() - start) / iterations)
    each = statistics.median(seconds)
    row: dict[str, Any] = {
        "iteration_ms": round(each * 1e3, 3),
        "env_steps_per_s": round(env_steps / each),
        "agent_steps_per_s": round(env_steps * env.num_agents / each),
    }
    row |= {name: round(value, 4) for name, value in figures.items() if name.endswith("_share") and name in SHARES}
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    trainer.close()
    return row
