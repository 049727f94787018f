"""Throughput of several seeds trained at a time on one GPU, by that of one alone; with joined launches and as branches.

    python3 tests/gpu/seeds_speed.py RESULTS.json

CartPole with 512 environments a seed. Medians and quartiles of ten blocks of iterations, all ways in turn. Logs are not
written. Less than two minutes where the kernels were compiled before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments, milliseconds, ratios

from gpu_vecenv import VecEnv
from gpu_vecenv.engine.timing import quartiles
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

GAME, NUM_ENVS = "cartpole", 512  # of each seed
CONFIG = {"shared_trunk": False, "num_steps": 32, "precision": "tf32"}
WAYS = {  # name: seeds, whether launches may be joined
    "one": (1, True),
    "8 joined": (8, True),
    "8 branches": (8, False),
    "16 joined": (16, True),
    "16 branches": (16, False),
}
LOG_INTERVALS = (1, 10)  # iterations between two reads
WARM_UP, ITERATIONS = 20, 100


class Seeds:
    """Trainers of so many seeds, and what trains them."""

    def __init__(self, count: int, join: bool) -> None:
        before = torch.cuda.memory_allocated()
        self.trainers = [
            Trainer(
                VecEnv(configure(GAME), NUM_ENVS, "cuda", autoreset_mode="next_step"),
                PPOConfig(total_steps=10**12, **CONFIG),
                seed=seed,
            )
            for seed in range(count)
        ]
        self.together = ParallelTrainers(self.trainers, join=join)
        self.timed(WARM_UP, 1)
        self.bytes = torch.cuda.memory_allocated() - before

    def timed(self, iterations: int, log_interval: int) -> float:
        """Seconds of an iteration of all."""
        torch.cuda.synchronize()
        start, end = time.perf_counter(), self.trainers[0].iteration + iterations
        while self.trainers[0].iteration < end:
            self.together.train_interval(self.trainers, log_interval)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / iterations

    def seconds_of_graph(self) -> float:
        """Of an iteration on the device alone, without the host's work between two."""
        graphs = [graphed.graph for graphed in self.together._graphed.values()]
        graph = graphs[0] if graphs else self.trainers[0]._graphed_iteration.graph
        assert graph is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.together._stream or self.trainers[0]._stream):
            start.record()
            for _ in range(ITERATIONS):
                graph.replay()
            end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / ITERATIONS


def rows_of(log_interval: int, ways: Mapping[str, Seeds]) -> dict[str, dict[str, Any]]:
    """For each way milliseconds of an iteration, env-steps per second, and their ratio to one seed's."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, seeds in ways.items():
            times[name].append(seeds.timed(ITERATIONS, log_interval))
    rows = {}
    for name, seeds in ways.items():
        count = len(seeds.trainers)
        of_one = [count * seconds for seconds in times["one"]]
        rows[name] = {
            "seeds": count,
            "joined": seeds.together.joins(seeds.trainers),
            **milliseconds("ms", times[name]),
            "device_ms": round(1e3 * seeds.seconds_of_graph(), 4),
            "env_steps_per_s": round(count * seeds.trainers[0].env_steps_per_iteration / quartiles(times[name])[1]),
            **ratios("throughput_ratio", of_one, times[name]),
            "bytes": seeds.bytes,
        }
    return rows


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    measurements = Measurements(given, config={"game": GAME, "num_envs": NUM_ENVS, **CONFIG})
    if len(measurements.rows) == len(WAYS) * len(LOG_INTERVALS):
        return
    ways = {name: Seeds(count, join) for name, (count, join) in WAYS.items()}
    for log_interval in LOG_INTERVALS:
        for name, row in rows_of(log_interval, ways).items():
            measurements.measure({"name": name, "log_interval": log_interval}, lambda: row)  # noqa: B023


if __name__ == "__main__":
    main()
