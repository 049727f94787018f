"""Steps of a game and of its original in another library, measured in the same run."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import gymnasium
import torch

from gpu_vecenv.engine.make import make
from gpu_vecenv.engine.timing import quartiles, run_seconds, spread
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError

Baseline = Literal["gymnasium", "mpe2"]
GAMES: dict[str, str] = {"gymnasium": "cartpole", "mpe2": "simple_tag"}
ACTIONS = 16  # steps of random actions, sampled beforehand and repeated; the same for both


def measure(baseline: Baseline, num_envs: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row: a step of ``num_envs`` environments called from Python, including resets of ended episodes, for both.

    VecEnv reads and writes tensors on the device; the other library runs on the CPU, with NumPy arrays.

    Raises:
        ConfigError: The library is not installed.
    """
    env = make(GAMES[baseline], num_envs, device, autoreset_mode="next_step")
    env.reset(seed=1)
    actions = []
    for _ in range(ACTIONS):
        actions.append(env.sample_actions())
        env.step(actions[-1])
    baseline_step = STEPS[baseline](env, actions)
    action_cycle, buffers = itertools.cycle(actions), env.step_buffers()
    durations = {
        "step": run_seconds(lambda: env.step(next(action_cycle), out=buffers), device),
        "baseline": run_seconds(baseline_step, torch.device("cpu")),
    }
    row: dict[str, Any] = {"baseline": baseline, "version": importlib.metadata.version(baseline)}
    row |= {"game": GAMES[baseline], "num_envs": num_envs, "num_agents": env.num_agents, "config": {}}
    medians = {stage: quartiles(runs)[1] for stage, runs in durations.items()}
    for stage, runs in durations.items():
        row |= spread(f"{stage}_us", [run * 1e6 for run in runs], 2)
        row[f"{stage}_env_steps_per_s"] = round(num_envs / medians[stage], 1)
    row["speedup"] = round(medians["baseline"] / medians["step"], 2)
    env.close()
    yield row


def _gymnasium(env: VecEnv, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """Gymnasium's vectorised CartPole, implemented in NumPy."""
    baseline = gymnasium.make_vec("CartPole-v1", num_envs=env.num_envs, vectorization_mode="vector_entry_point")
    baseline.reset(seed=1)
    action_cycle = itertools.cycle([action[:, 0].cpu().numpy() for action in actions])
    return lambda: baseline.step(next(action_cycle))


def _mpe2(env: VecEnv, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """A loop over ``num_envs`` parallel environments of MPE2, each reset when its episode has ended."""
    try:
        simple_tag = importlib.import_module("mpe2.simple_tag_v3")
    except ImportError as error:
        raise ConfigError('baseline is "mpe2", which is not installed; run: pip install mpe2') from error
    baselines = [simple_tag.parallel_env() for _ in range(env.num_envs)]
    for seed, baseline in enumerate(baselines):
        baseline.reset(seed=seed)
    names = baselines[0].possible_agents
    rows = [[dict(zip(names, row, strict=True)) for row in action.tolist()] for action in actions]
    row_cycle = itertools.cycle(rows)

    def step() -> None:
        for baseline, row in zip(baselines, next(row_cycle), strict=True):
            if baseline.agents:
                baseline.step(row)
            else:
                baseline.reset()

    return step


STEPS: dict[str, Callable[[VecEnv, list[torch.Tensor]], Callable[[], Any]]] = {
    "gymnasium": _gymnasium,
    "mpe2": _mpe2,
}
