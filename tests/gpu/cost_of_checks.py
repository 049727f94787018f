"""What looking costs: each step's look at the actions, end_on_nonfinite, guard bands, and the host's look at a call.

    python3 tests/gpu/cost_of_checks.py RESULTS.json

A step in a captured graph, beside the same kernel without its look at the actions, and with what is off by default.
The ways take turns, so that a card that slows down slows all of them; the median of the turns counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu_vecenv.bench.games import compared_game, repeat_step
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import captured, provenance, seconds
from gpu_vecenv.engine.vec_env import VecEnv

SIZES = (("tag_gridworld", 2000), ("tag_gridworld", 1_000_000), ("tag_continuous", 2000), ("cartpole", 1_000_000))
STEPS, TURNS = 20, 5
LOOK = "    int outside = 0, non_finite = 0;\n"  # where actions.cuh begins to look
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "end_on_nonfinite": {"end_on_nonfinite": True},
    "guards": {"guards": True},
}


@contextmanager
def unlooked() -> Iterator[None]:
    """Kernels compiled here do not look at the actions."""
    text_of = function_manager.game_source

    def without(*arguments: Any) -> str:
        text = text_of(*arguments)
        assert text.count(LOOK) == 1
        return text.replace(LOOK, f"    return 0;\n{LOOK}")

    with mock.patch.object(function_manager, "game_source", without):
        yield


def steps(env: VecEnv) -> Callable[[], None]:
    """``STEPS`` launches of the step kernel, on tensors that it keeps; what the host looks at is looked at once."""
    kept = buffers, actions = env.step_buffers(), env.sample_actions()
    env.reset(seed=1, out=buffers)
    env.step(actions, out=buffers)

    launch = repeat_step(env)

    def run() -> None:
        for _ in range(STEPS):
            launch()

    again = captured(run, env.device)
    return lambda: (again(), kept)[0]  # a graph knows addresses only


def measure(name: str, num_envs: int, device: torch.device) -> dict[str, Any]:
    """One game: microseconds of a step by each way, and of the host's part of a call."""
    envs = {way: VecEnv(compared_game(name), num_envs, device, **arguments) for way, arguments in WAYS.items()}
    with unlooked():
        envs["no look at actions"] = VecEnv(compared_game(name), num_envs, device)
    runs = {way: steps(env) for way, env in envs.items()}
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(TURNS):
        for way, run in runs.items():
            times[way].append(seconds(run, device) / STEPS * 1e6)
    row = {way: round(statistics.median(taken), 3) for way, taken in times.items()}
    env = envs["default"]
    actions, buffers = env.sample_actions(), env.step_buffers()
    eager = seconds(lambda: env.step(actions, out=buffers), device, of=min) * 1e6
    look = seconds(lambda: env._action_check(actions), device, of=min) * 1e6
    host = {"call of step": round(eager, 3), "its look at dtype, shape and device": round(look, 3)}
    for each in envs.values():
        each.close()
    return {"game": name, "num_envs": num_envs, "kernel_us": row, "call_us": host}


def main(results: str) -> None:
    """Measure, print and write."""
    device = resolve_device(None)
    rows = []
    for name, num_envs in SIZES:
        rows.append(measure(name, num_envs if device.type == "cuda" else num_envs // 100 or 1, device))
        print(json.dumps(rows[-1]), flush=True)
    Path(results).write_text(json.dumps({**provenance(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
