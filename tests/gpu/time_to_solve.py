"""Seconds to train CartPole-v1 to a mean return of 475 over the latest episode of each environment.

    python3 tests/gpu/time_to_solve.py RESULTS.json

From before the environment is made, so that trainer and CUDA graphs count; kernels are compiled before. Medians and
quartiles of ten seeds, and the slowest. The host reads metrics once in five iterations.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments

from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure
from gpu_vecenv.engine.timing import spread

NUM_ENVS, QUICK = (256, 1024, 4096), (8,)
RETURN, MOST_SECONDS, READ_INTERVAL = 475, 20, 5
CONFIG = PPOConfig(
    total_steps=10**9,
    num_steps=32,
    num_epochs=4,
    num_minibatches=4,
    hidden_sizes=(64, 64),
    learning_rate=3e-3,
    gamma=0.98,
    gae_lambda=0.8,
    entropy_coefficient=0.0,
)


def trained(num_envs: int, seed: int, device: torch.device, most_seconds: float) -> tuple[float, bool]:
    """Seconds of one run, and whether it reached the return; a run of too many seconds ends without it."""
    start, length = time.perf_counter(), 0.0
    env = VecEnv(configure("cartpole"), num_envs, device, autoreset_mode="next_step")
    trainer = Trainer(env, CONFIG, seed=seed)
    # NaN until each environment has ended an episode
    while not length >= RETURN and time.perf_counter() - start < most_seconds:
        length = trainer.train_interval(READ_INTERVAL)["episode_length"]
    seconds = time.perf_counter() - start
    trainer.close()
    env.close()
    return seconds, length >= RETURN


def row_of(num_envs: int, seeds: int, device: torch.device, most_seconds: float) -> dict[str, Any]:
    """All seeds; a run before them compiles."""
    trained(num_envs, 0, device, most_seconds)
    runs = [trained(num_envs, seed, device, most_seconds) for seed in range(seeds)]
    seconds = [each for each, _ in runs]
    return {
        "seeds": seeds,
        "unsolved": sum(not is_solved for _, is_solved in runs),
        **spread("seconds_to_solve", seconds, 3),
        "seconds_of_the_slowest": round(max(seconds), 3),
    }


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    measurements = Measurements(given)
    seeds, most_seconds = (2, 0.1) if given.quick else (REPEATS, MOST_SECONDS)
    for num_envs in QUICK if given.quick else NUM_ENVS:
        key = {"game": "cartpole", "num_envs": num_envs}
        measurements.measure(key, lambda: row_of(num_envs, seeds, given.device, most_seconds))  # noqa: B023


if __name__ == "__main__":
    main()
