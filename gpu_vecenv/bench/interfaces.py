"""Overhead of interfaces and adapters: wall time of a step through them and of VecEnv.step."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gpu_vecenv.bench.games import repeat_step
from gpu_vecenv.engine.make import make
from gpu_vecenv.engine.timing import runs_in_turn, spread
from gpu_vecenv.errors import ConfigError, nearest
from gpu_vecenv.views.batched_env import BatchedParallelEnv
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv

Games = tuple[tuple[str, int, dict[str, Any]], ...]
Prepare = Callable[[Any, list[torch.Tensor]], Callable[[], Any]]  # (env, actions of rows) -> the call to measure
ACTIONS = 16  # steps of random actions, sampled beforehand and repeated
# game, num_envs, configuration: 4,096 and 65,536 rows each
DISCRETE: Games = (
    ("cartpole", 4096, {}),
    ("cartpole", 65_536, {}),
    ("tag_gridworld", 1024, {"num_taggers": 3}),
    ("tag_gridworld", 16_384, {"num_taggers": 3}),
)
FEW: Games = (
    ("cartpole", 64, {}),
    ("tag_gridworld", 64, {"num_taggers": 3}),
)  # this adapter has one object per environment
CONTINUOUS: Games = (
    ("pendulum", 4096, {}),
    ("pendulum", 65_536, {}),
    ("simple_spread", 1024, {"num_agents": 4, "continuous_actions": True}),
    ("simple_spread", 16_384, {"num_agents": 4, "continuous_actions": True}),
)


def num_rows(name: str) -> int:
    """Rows of ``measure``."""
    return len(INTERFACES[name][0])


def measure(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row for each size."""
    games, prepare = INTERFACES[name]
    for game, num_envs, config in games:
        vec_env = make(game, num_envs, device, agents_as_envs=True, **config)
        vec_env.reset(seed=1)
        actions = []
        for _ in range(ACTIONS):
            actions.append(vec_env.sample_actions())
            vec_env.step(actions[-1])
        given, buffers = itertools.cycle(actions), vec_env.step_buffers()
        vec_env.step(actions[0], out=buffers)  # repeat_step writes into these buffers
        of_launch = microseconds({"launch_us": repeat_step(vec_env)}, device)
        env = _made(name, game, num_envs, device, config)
        through = {"interface_us": prepare(env, actions), "vec_env_step_us": lambda: vec_env.step(next(given))}  # noqa: B023
        row: dict[str, Any] = {"interface": name, "game": game, "num_envs": num_envs, "config": config}
        row |= microseconds(through, device, "overhead_us") | of_launch
        vec_env.close()
        if name == "sb3":
            row |= microseconds(_naive(game, num_envs, device, config, actions), device)
        yield row


def microseconds(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, difference: str | None = None
) -> dict[str, Any]:
    """Wall time of one call of each in microseconds, with quartiles, under its name.

    Runs of all are measured in turn. ``difference`` is the name of the first one's time less the second one's.
    """
    for call in calls.values():
        for _ in range(20):
            call()
    runs = [[1e6 * run for run in own] for own in runs_in_turn(list(calls.values()), device)]
    found: dict[str, Any] = {}
    for name, own in zip(calls, runs, strict=True):
        found |= spread(name, own, 2)
    if difference is not None:
        found |= spread(difference, [one - other for one, other in zip(*runs, strict=True)], 2)
    return found


def check_known(names: tuple[str, ...]) -> None:
    """Raise ConfigError if a name is not that of an interface."""
    for name in names:
        if name not in INTERFACES:
            raise ConfigError(f"interface is {name!r}; {nearest(name, INTERFACES)}")


def _made(name: str, game: str, num_envs: int, device: torch.device, config: dict[str, Any]) -> Any:
    if name == "gymnasium":
        return GymnasiumVectorEnv(game, num_envs, device, **config)
    if name == "batched":
        return BatchedParallelEnv(game, num_envs, device, **config)
    return importlib.import_module(f"gpu_vecenv.adapters.{name}").make(game, num_envs, device, **config)


def _rows(env: Any, actions: list[Any]) -> Callable[[], Any]:
    """Steps with unchanged actions."""
    env.reset()
    given = itertools.cycle(actions)
    return lambda: env.step(next(given))


def _columns(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """Actions as a dictionary by agent; Discrete actions with a last axis of length 1."""
    agents = list(env.possible_agents)
    return _rows(env, [_split(action, agents) for action in actions])


def _split(action: torch.Tensor, agents: list[str]) -> Any:
    parts = action.unflatten(0, (-1, len(agents))).unbind(1)
    return {agent: part if part.dim() > 1 else part[:, None] for agent, part in zip(agents, parts, strict=True)}


def _skrl(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    if getattr(env, "num_agents", 1) > 1:
        return _columns(env, actions)
    return _rows(env, [action if action.dim() > 1 else action[:, None] for action in actions])


def _on_host(actions: list[torch.Tensor]) -> list[Any]:
    return [action.cpu().numpy() for action in actions]


def _arrays(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """NumPy rows; reads the infos of rows that are done, as the libraries do."""
    env.reset()
    given = itertools.cycle(_on_host(actions))

    def step() -> None:
        _, _, dones, infos = env.step(next(given))
        for row in np.flatnonzero(dones):
            infos[row]

    return step


def _numpy_view(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """NumPy rows."""
    return _rows(env, _on_host(actions))


def _tianshou(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """With the reset of rows that are done, as in its collector."""
    env.reset()
    given = itertools.cycle(_on_host(actions))

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(next(given))
        done = np.flatnonzero(terminated | truncated)
        if len(done):
            env.reset(done)

    return step


def _torchrl(env: Any, actions: list[torch.Tensor]) -> Callable[[], Any]:
    """With the partial reset, as in its collectors."""
    data = env.reset()
    counts = [len(agents) for agents in env.group_map.values()]
    parts = [action.unflatten(0, (-1, sum(counts))).split(counts, 1) for action in actions]
    given = itertools.cycle([dict(zip(env.group_map, part, strict=True)) for part in parts])

    def step() -> None:
        nonlocal data
        for group, action in next(given).items():
            data[group, "action"] = action
        _, data = env.step_and_maybe_reset(data)

    return step


INTERFACES: dict[str, tuple[Games, Prepare]] = {
    "gymnasium": (DISCRETE, _rows),
    "batched": (DISCRETE, _columns),
    "sb3": (DISCRETE, _arrays),
    "torchrl": (DISCRETE, _torchrl),
    "benchmarl": (DISCRETE, _torchrl),
    "skrl": (DISCRETE, _skrl),
    "rsl_rl": (CONTINUOUS, _rows),
    "rl_games": (DISCRETE, _rows),
    "tianshou": (DISCRETE, _tianshou),
    "rllib": (DISCRETE, _numpy_view),
    "pufferlib": (DISCRETE, _numpy_view),
    "cleanrl": (CONTINUOUS, _rows),
    "supersuit": (FEW, _numpy_view),
}


def _naive(
    game: str, num_envs: int, device: torch.device, config: dict[str, Any], actions: list[torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """Simpler implementations to compare SB3's adapter with: four ``.cpu()`` calls, and a dictionary for every row."""
    env = GymnasiumVectorEnv(game, num_envs, device, **config)
    env.reset(seed=1)
    given = itertools.cycle(_on_host(actions))

    def four_copies() -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
        *outputs, info = env.step(torch.from_numpy(next(given)).to(device))
        return [tensor.cpu().numpy() for tensor in outputs], info

    def naive() -> None:
        (_, _, terminations, truncations), info = four_copies()
        infos: list[dict[str, Any]] = [{} for _ in range(env.num_envs)]
        done = np.flatnonzero(terminations | truncations)
        final = info["final_obs"].cpu().numpy() if len(done) else None
        for row in done:
            assert final is not None
            infos[row] = {"terminal_observation": final[row], "TimeLimit.truncated": truncations[row]}

    numpy_view = GymnasiumVectorEnv(game, num_envs, device, output="numpy", **config)
    return {"naive_us": naive, "four_copies_us": four_copies, "numpy_view_us": _numpy_view(numpy_view, actions)}
