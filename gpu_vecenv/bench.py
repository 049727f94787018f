"""Throughput of games, and cost of interfaces, one JSON line per row: ``python -m gpu_vecenv.bench --help``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from gpu_vecenv import bench_interfaces, bench_training
from gpu_vecenv.device import resolve_device
from gpu_vecenv.distributed import World, joined
from gpu_vecenv.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.measurement import captured, provenance, seconds, wait
from gpu_vecenv.policy import Precision
from gpu_vecenv.prologue import machine_fields
from gpu_vecenv.registry import configure
from gpu_vecenv.sampler import Sampler
from gpu_vecenv.vec_env import VecEnv

STEPS_PER_RUN = 20  # ticks timed together; on a GPU one captured graph
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
    """Measure steps of games: fixed random actions ("step"), and sampling from logits plus step ("tick").

    Or, by --through, what a step costs through interfaces and adapters, the host's work included, beside the machine's.
    Or, by --training, rollouts and updates end to end; under torchrun by all processes together.
    """

    game: str | None = None  # a game's name; without it a fixed suite is run
    num_envs: int | None = None  # replicas (with --game); by default 2000
    config: str = "{}"  # the game's configuration as JSON (with --game)
    through: tuple[str, ...] = ()  # gymnasium, or adapters: sb3, torchrl, … ; measured on games of their own
    training: bool = False  # WarpDrive's configurations, trained end to end
    precision: tuple[Precision, ...] = ("float32",)  # of matrix products (with --training): float32, tf32, bfloat16
    device: str | None = None  # cpu, cuda, cuda:1; by default cuda if usable
    driver: str | None = None  # pycuda or cuda_core (CUDA only)
    team: int | None = None  # lanes per replica (CUDA only)
    json: Path | None = None  # where to write the rows as well


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(STEPS_PER_RUN):
            target.copy_(source)

    return 2 * source.nbytes * STEPS_PER_RUN / seconds(run, device)


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

    row |= _rates("step", _per_step(step, device), game, num_envs, bandwidth)
    sampler = Sampler(env)
    parameters = torch.zeros((num_envs, game.num_agents, sampler.num_parameters), device=device)
    sample = sampler.sample(parameters)

    def tick() -> None:
        for _ in range(STEPS_PER_RUN):
            env.step(sampler.sample(parameters, out=sample).actions, out=slab)

    row |= _rates("tick", _per_step(tick, device), game, num_envs, bandwidth)
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    row["faults"] = int(env.faults().count_nonzero())
    env.close()
    return row


def _per_step(run: Callable[[], None], device: torch.device) -> float:
    return seconds(captured(run, device), device) / STEPS_PER_RUN


def _rates(stage: str, duration: float, game: Env, num_envs: int, bandwidth: float) -> dict[str, Any]:
    moved = num_envs * bytes_per_env_step(game)
    return {
        f"{stage}_us": round(duration * 1e6, 2),
        f"{stage}_env_steps_per_s": round(num_envs / duration),
        f"{stage}_agent_steps_per_s": round(num_envs * game.num_agents / duration),
        f"{stage}_bytes": moved,
        f"{stage}_share_of_copy_bandwidth": round(moved / duration / bandwidth, 4),
    }


def run(config: BenchConfig) -> dict[str, Any]:
    """Measure, print one JSON line per row, and return what was measured."""
    if config.training:
        results = _training(config)
    else:
        device = resolve_device(config.device)
        results = _through(config, device) if config.through else _games(config, device)
    if World.current().rank == 0:
        print(json.dumps({key: value for key, value in results.items() if key != "rows"}))
        if config.json:
            config.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _training(config: BenchConfig) -> dict[str, Any]:
    given = (config.game, config.num_envs, config.config, config.through, config.driver, config.team)
    if given != (None, None, "{}", (), None, None):
        raise ConfigError("training measures its own games; expected no game, num_envs, config, through, driver, team")
    with joined(config.device) as (world, own):
        device = resolve_device(own)
        results = {**provenance(device), "processes": world.size, "rows": []}
        for row in bench_training.measure(device, config.precision):
            results["rows"].append(row)
            if world.rank == 0:
                print(json.dumps(row), flush=True)
    return results


def _through(config: BenchConfig, device: torch.device) -> dict[str, Any]:
    if (config.game, config.num_envs, config.config, config.driver, config.team) != (None, None, "{}", None, None):
        raise ConfigError("through measures its own games; expected no game, num_envs, config, driver and team")
    bench_interfaces.check_known(config.through)
    results = {**provenance(device), "rows": []}
    for name in config.through:
        results["rows"] += bench_interfaces.measure(name, device)
    return results


def _games(config: BenchConfig, device: torch.device) -> dict[str, Any]:
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
    return results


if __name__ == "__main__":
    run(tyro.cli(BenchConfig, prog="python -m gpu_vecenv.bench"))
