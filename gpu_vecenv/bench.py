"""Throughput against the memory roofline, one JSON line per row: ``python -m gpu_vecenv.bench --help``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from gpu_vecenv._version import __version__
from gpu_vecenv.device import resolve_device
from gpu_vecenv.env import Env, device_folder
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.prologue import machine_fields
from gpu_vecenv.registry import configure
from gpu_vecenv.sampler import Sampler
from gpu_vecenv.vec_env import VecEnv

STEPS_PER_RUN = 20  # ticks timed together; on a GPU one captured graph
RUNS = 5  # the median counts
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
SUITE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("tag_gridworld", 2000, {}),
    ("tag_gridworld", 100_000, {}),
    ("tag_gridworld", 1_000_000, {}),
    ("tag_continuous", 100, {}),
    ("tag_continuous", 2000, {}),
    ("tag_continuous", 2000, {"num_taggers": 100, "num_runners": 900}),
    ("cartpole", 100_000, {}),
    ("cartpole", 1_000_000, {}),
    ("acrobot", 100_000, {}),
    ("pendulum", 100_000, {}),
    ("simple_spread", 100_000, {}),
    ("simple_tag", 100_000, {}),
)


@dataclass(frozen=True)
class BenchConfig:
    """Measure steps of games: fixed random actions ("step"), and sampling from logits plus step ("tick")."""

    game: str | None = None  # a game's name; without it a fixed suite is run
    num_envs: int | None = None  # replicas (with --game); by default 2000
    config: str = "{}"  # the game's configuration as JSON (with --game)
    device: str | None = None  # cpu, cuda, cuda:1; by default cuda if usable
    driver: str | None = None  # pycuda or cuda_core (CUDA only)
    team: int | None = None  # lanes per replica (CUDA only)
    json: Path | None = None  # where to write the rows as well


def time_per_step(run: Callable[[], None], device: torch.device, *, graph: bool = True) -> float:
    """Median seconds of one tick; ``run`` does STEPS_PER_RUN of them. On a GPU it becomes a graph, if so wanted."""
    if device.type == "cuda" and graph:
        run()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    run()
    seconds = []
    for _ in range(RUNS):
        wait(device)
        start, repeats = time.perf_counter(), 0
        while repeats < 3 or time.perf_counter() - start < 0.05:
            run()
            repeats += 1
            if device.type == "cuda" and repeats % 20 == 0:
                wait(device)
        wait(device)
        seconds.append((time.perf_counter() - start) / repeats / STEPS_PER_RUN)
    return statistics.median(seconds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(STEPS_PER_RUN):
            target.copy_(source)

    return 2 * source.nbytes / time_per_step(run, device, graph=False)


def bytes_per_env_step(game: Env) -> int:
    """The fewest bytes that one tick of one replica moves: state in and out, actions in, outputs out."""
    fields = [*game.state, *(f for f in machine_fields(game) if not f.name.startswith("completed"))]
    state = sum(int(np.prod(game.shape(f))) * f.dtype.itemsize for f in fields if not f.shared)
    per_agent = (
        game.obs_size * game.observation.dtype.itemsize + 4 + 4 + 4 * game.action.heads
    )  # obs, reward, four flags, action
    return 2 * state + game.num_agents * per_agent


def measure(
    game: Env, num_envs: int, device: torch.device, bandwidth: float, driver: str | None, team: int | None
) -> dict[str, Any]:
    """One row."""
    start = time.perf_counter()
    env = VecEnv(game, num_envs, device, driver=driver, team=team)
    slab = env.slab()
    env.reset(seed=1, out=slab)
    actions = []
    for _ in range(STEPS_PER_RUN):
        actions.append(env.sample_actions())
        env.step(actions[-1], out=slab)
        if len(actions) == 1:
            wait(device)
            first_step = time.perf_counter() - start
    row: dict[str, Any] = {"game": game.name(), "num_envs": num_envs, "num_agents": game.num_agents}
    row["config"] = {
        f.name: getattr(game, f.name) for f in dataclasses.fields(game) if getattr(game, f.name) != f.default
    }
    row["first_step_s"] = round(first_step, 3)

    def step() -> None:
        for action in actions:
            env.step(action, out=slab)

    row |= _rates("step", time_per_step(step, device), game, num_envs, bandwidth)
    if not game.action.continuous:
        sampler = Sampler(env)
        logits = torch.zeros((num_envs, game.num_agents, sampler.num_logits), device=device)
        sample = sampler.sample(logits)

        def tick() -> None:
            for _ in range(STEPS_PER_RUN):
                env.step(sampler.sample(logits, out=sample).actions, out=slab)

        row |= _rates("tick", time_per_step(tick, device), game, num_envs, bandwidth)
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    row["faults"] = int(env.faults().count_nonzero())
    env.close()
    return row


def _rates(stage: str, seconds: float, game: Env, num_envs: int, bandwidth: float) -> dict[str, Any]:
    moved = num_envs * bytes_per_env_step(game)
    return {
        f"{stage}_us": round(seconds * 1e6, 2),
        f"{stage}_env_steps_per_s": round(num_envs / seconds),
        f"{stage}_agent_steps_per_s": round(num_envs * game.num_agents / seconds),
        f"{stage}_bytes": moved,
        f"{stage}_share_of_copy_bandwidth": round(moved / seconds / bandwidth, 4),
    }


def wait(device: torch.device) -> None:
    """For all that a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def provenance(device: torch.device) -> dict[str, Any]:
    """What a figure needs beside it: commit, hash of the device text, device, versions.

    Where the tree is no git checkout, $GPU_VECENV_COMMIT names the commit.
    """
    text = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(device_folder().glob("*.cu*"))))
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "gpu_vecenv": __version__,
        "commit": described or os.environ.get("GPU_VECENV_COMMIT"),
        "device_text_sha256": text.hexdigest(),
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def run(config: BenchConfig) -> dict[str, Any]:
    """Measure, print one JSON line per row, and return what was measured."""
    device = resolve_device(config.device)
    if config.game is None and (config.config != "{}" or config.num_envs is not None):
        raise ConfigError("num_envs and config belong to one game; expected game as well")
    settings = json.loads(config.config)
    if not isinstance(settings, dict):
        raise ConfigError(f"config is {config.config!r}; expected a JSON object")
    suite = [(config.game, config.num_envs or 2000, settings)] if config.game else SUITE
    rows = [(configure(name, **settings), num_envs) for name, num_envs, settings in suite]
    bandwidth = copy_bandwidth(device)
    results = {**provenance(device), "copy_bytes_per_s": round(bandwidth), "rows": []}
    for game, num_envs in rows:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        row = measure(game, num_envs, device, bandwidth, config.driver, config.team)
        print(json.dumps(row), flush=True)
        results["rows"].append(row)
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}))
    if config.json:
        config.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    run(tyro.cli(BenchConfig, prog="python -m gpu_vecenv.bench"))
