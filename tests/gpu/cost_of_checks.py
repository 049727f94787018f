"""What looking costs: each step's look at the actions, end_on_nonfinite, guard bands, and the host's look at a call.

    python3 tests/gpu/cost_of_checks.py RESULTS.json

A step in a captured graph, beside the same kernel without its look at the actions, and with what is off by default.
The ways take turns, so that a card that slows down slows all of them. Medians of the turns, and quartiles under the
same names in `kernel_us_quartiles` and `call_us_quartiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from measurements import REPEATS, Measurements, arguments

from gpu_vecenv.bench.games import compared_game, repeat_step
from gpu_vecenv.compile import function_manager
from gpu_vecenv.engine.timing import captured, quartiles, run_seconds, seconds
from gpu_vecenv.engine.vec_env import VecEnv

SIZES = (("tag_gridworld", 2000), ("tag_gridworld", 1_000_000), ("tag_continuous", 2000), ("cartpole", 1_000_000))
QUICK = (("cartpole", 3),)
STEPS = 20
LOOK = "    int outside = 0, nonfinite = 0;\n"  # where actions.cuh begins to look
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
    buffers = env.step_buffers()
    env.reset(seed=1, out=buffers)
    actions = env.sample_actions()
    env.step(actions, out=buffers)

    launch = repeat_step(env)

    def run() -> None:
        for _ in range(STEPS):
            launch()

    again = captured(run, env.device)
    return lambda: (again(), buffers, actions)[0]  # a graph knows addresses only


def microseconds(figure: str, times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Medians under ``figure`` and quartiles under ``<figure>_quartiles``, each by name."""
    found = {name: [round(value * 1e6, 3) for value in quartiles(taken)] for name, taken in times.items()}
    medians = {name: median for name, (_, median, _) in found.items()}
    return {figure: medians, f"{figure}_quartiles": {name: [first, third] for name, (first, _, third) in found.items()}}


def measure(name: str, num_envs: int, device: torch.device, turns: int) -> dict[str, Any]:
    """One game: microseconds of a step by each way, and of the host's part of a call."""
    envs = {way: VecEnv(compared_game(name), num_envs, device, **options) for way, options in WAYS.items()}
    with unlooked():
        envs["no look at actions"] = VecEnv(compared_game(name), num_envs, device)
    runs = {way: steps(env) for way, env in envs.items()}
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(turns):
        for way, run in runs.items():
            times[way].append(seconds(run, device) / STEPS)
    env = envs["default"]
    actions, buffers = env.sample_actions(), env.step_buffers()
    host = {
        "call of step": run_seconds(lambda: env.step(actions, out=buffers), device),
        "its look at dtype, shape and device": run_seconds(lambda: env._action_check(actions), device),
    }
    for each in envs.values():
        each.close()
    return {**microseconds("kernel_us", times), **microseconds("call_us", host)}


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    measurements = Measurements(given)
    for name, num_envs in QUICK if given.quick else SIZES:
        key = {"game": name, "num_envs": num_envs}
        turns = 2 if given.quick else REPEATS
        measurements.measure(key, lambda: measure(name, num_envs, given.device, turns))  # noqa: B023


if __name__ == "__main__":
    main()
