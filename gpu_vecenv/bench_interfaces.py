"""What the interfaces cost on the host: Gymnasium's step beside the bare launch, SB3's beside a naive adapter."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gpu_vecenv.bench import provenance, wait
from gpu_vecenv.device import resolve_device
from gpu_vecenv.gymnasium_env import GymnasiumVectorEnv

RUNS = 7  # the least counts
# game, replicas, configuration: 4,096 and 65,536 rows
SIZES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("cartpole", 4096, {}),
    ("cartpole", 65_536, {}),
    ("tag_gridworld", 1024, {"num_taggers": 3}),
    ("tag_gridworld", 16_384, {"num_taggers": 3}),
)


@dataclass(frozen=True)
class InterfaceBenchConfig:
    """Measure what a step costs through an interface, host included, eagerly."""

    through: tuple[Literal["gymnasium", "sb3"], ...] = ("gymnasium", "sb3")  # interfaces
    device: str | None = None  # cpu, cuda, cuda:1; by default cuda if usable
    json: Path | None = None  # where to write the rows as well


def microseconds(step: Callable[[], Any], device: torch.device) -> float:
    """Least wall time of one call over some runs; the device is waited for at the end of each run.

    The least, not the median: what is measured is work on the host, to which other processes only add.
    """
    for _ in range(20):
        step()
    times = []
    for _ in range(RUNS):
        wait(device)
        start, calls = time.perf_counter(), 0
        while calls < 20 or time.perf_counter() - start < 0.2:
            step()
            calls += 1
        wait(device)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return round(min(times), 2)


def through_gymnasium(game: str, num_envs: int, device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """``VectorEnv.step`` and ``VecEnv.step`` beside the launch of the same kernel alone."""
    env = GymnasiumVectorEnv(game, num_envs, device, **config)
    env.reset(seed=1)
    actions, slab = env.sample_actions(), env.vec_env.slab()
    view = microseconds(lambda: env.step(actions), device)
    machine = microseconds(lambda: env.vec_env.step(actions), device)
    env.vec_env.step(actions, out=slab)  # the launch alone goes on writing into this slab
    launch = microseconds(env.vec_env.repeat_step, device)
    return {"step_us": view, "vec_env_step_us": machine, "launch_us": launch, "overhead_us": round(view - launch, 2)}


def through_sb3(game: str, num_envs: int, device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """The adapter's step beside four ``.cpu()`` calls, with and without what SB3 demands beside the arrays."""
    adapter = importlib.import_module("gpu_vecenv.adapters.sb3").make(game, num_envs, device, **config)
    adapter.reset()
    env = GymnasiumVectorEnv(game, num_envs, device, **config)
    env.reset(seed=1)
    actions = itertools.cycle([env.action_space.sample() for _ in range(16)])

    def four_copies() -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
        *outputs, info = env.step(torch.from_numpy(next(actions)).to(device))
        return [tensor.cpu().numpy() for tensor in outputs], info

    def naive() -> None:
        (_, _, terminations, truncations), info = four_copies()
        infos: list[dict[str, Any]] = [{} for _ in range(env.num_envs)]
        done = np.flatnonzero(terminations | truncations)
        final = info["final_obs"].cpu().numpy() if len(done) else None
        for row in done:
            assert final is not None
            infos[row] = {"terminal_observation": final[row], "TimeLimit.truncated": truncations[row]}

    def adapted_and_read() -> None:
        _, _, dones, infos = adapter.step(next(actions))
        for row in np.flatnonzero(dones):
            infos[row]

    face = GymnasiumVectorEnv(game, num_envs, device, output="numpy", **config)
    face.reset(seed=1)
    row: dict[str, float] = {
        "naive_us": microseconds(naive, device),
        "adapter_us": microseconds(lambda: adapter.step(next(actions)), device),
        "adapter_and_infos_us": microseconds(adapted_and_read, device),
        "four_copies_us": microseconds(four_copies, device),
        "numpy_face_us": microseconds(lambda: face.step(next(actions)), device),
    }
    for name, plain in (("adapter", "naive"), ("adapter_and_infos", "naive"), ("numpy_face", "four_copies")):
        row[f"{name}_times_faster"] = round(row[f"{plain}_us"] / row[f"{name}_us"], 2)
    return row


def run(config: InterfaceBenchConfig) -> dict[str, Any]:
    """Measure, print one JSON line per row, and return what was measured."""
    device = resolve_device(config.device)
    measured = {"gymnasium": through_gymnasium, "sb3": through_sb3}
    rows: list[dict[str, Any]] = []
    results = {**provenance(device), "rows": rows}
    for interface in config.through:
        for game, num_envs, settings in SIZES:
            row = {"through": interface, "game": game, "num_envs": num_envs, "config": settings}
            row |= measured[interface](game, num_envs, device, settings)
            print(json.dumps(row), flush=True)
            rows.append(row)
    if config.json:
        config.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    import tyro

    run(tyro.cli(InterfaceBenchConfig, prog="python -m gpu_vecenv.bench_interfaces"))
