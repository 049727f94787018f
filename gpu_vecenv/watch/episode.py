"""``rollout``: one episode as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, nearest
from gpu_vecenv.train.evaluation import STEPS_PER_SYNC, RolePolicies, RolePolicy, evaluation_env, steps_until_all_done
from gpu_vecenv.train.game_policy import GamePolicy

STATE_ARRAYS = ("obs", "active")  # recorded T + 1 times, as fields are
TRANSITION_ARRAYS = ("actions", "rewards", "terminations", "truncations")  # T times


@torch.no_grad()
def rollout(
    env: VecEnv,
    policy: GamePolicy | Mapping[str, RolePolicy] | Callable[[torch.Tensor], torch.Tensor] | None = None,
    env_index: int = 0,
    fields: Sequence[str] = (),
    *,
    greedy: bool = False,
    seed: int = 1,
) -> dict[str, np.ndarray[Any, Any]]:
    """Play one whole episode in a new environment like ``env`` and return it; ``env`` itself is not stepped.

    Step t takes ``obs[t]`` and ``actions[t]`` of the agents that are active in ``active[t]``, and gives ``rewards[t]``,
    ``terminations[t]``, ``truncations[t]``, ``obs[t + 1]`` and the fields at t + 1. An episode has T steps; at t = T no
    agent is active.

    Actions are sampled from the random streams of the environment: the episode is the first one of environment
    ``env_index`` of ``env`` after ``reset(seed=seed)``. It is recorded on the device and copied to the host every 16
    steps, so a function is called up to 15 times after the end of the episode.

    Args:
        env: Game, configuration, device and shared fields are taken from it.
        policy: A GamePolicy; role -> policy, function or None (random policy), as for ``evaluate``; a function from all
            agents' observations (1, num_agents, *obs_shape) to actions (1, num_agents[, heads]); or None, a random
            policy.
        env_index: Index of the environment; it may be ``env.num_envs`` or larger.
        fields: State fields to record as well.
        greedy: Take the most probable action instead of sampling.
        seed: Seed of the random streams.

    Returns:
        Name -> array. (T + 1, …): "obs" (num_agents, *obs_shape), "active" (num_agents,) bool, and each field with its
        own shape and dtype (a shared one without the time axis). (T, …): "actions" (num_agents[, heads]) int32
        or float32, "rewards" (num_agents,) float32, "terminations" and "truncations" (num_agents,) bool.

    Raises:
        TypeError, ValueError, InvalidSeedError: An argument has a wrong type or range.
        ConfigError: An unknown field, or one with the name of another array; or a role has no policy.
        NonFiniteError: A policy outputs NaN or excludes every choice, or a function returns an invalid action.

    Example:
        >>> env = gpu_vecenv.make("tag_gridworld", num_envs=1, max_steps=10)
        >>> episode = gpu_vecenv.rollout(env, fields=["cell"], seed=1)  # by a random policy
        >>> episode["obs"].shape[1:], episode["rewards"].shape[1:], episode["cell"].shape[1:]
        ((5, 21), (5,), (5, 2))
    """
    if not isinstance(env, VecEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv (of a view: view.vec_env)")
    game = env.game
    env_index = validate_int("env_index", env_index, 0, 2**63 - 1 - env.first_env_index)
    known = {field.name: field for field in game.layout.fields}
    check_kind("fields", fields, (tuple, list), 'a sequence of names of state fields, such as ("cell",)')
    check_flag("greedy", greedy)
    for name in fields:
        if name not in known:
            raise ConfigError(f"{type(game).__name__} has no state field {name!r}; {nearest(str(name), known)}")
        if name in STATE_ARRAYS + TRANSITION_ARRAYS:
            raise ConfigError(f"the state field {name!r} has the name of an array that is always recorded; rename it")
    per_step = [name for name in fields if not known[name].shared]
    eval_env = evaluation_env(env, 1, first_env_index=env.first_env_index + env_index)
    try:
        act = _actions_of(eval_env, policy, greedy)
        kind = TORCH_TYPES[game.layout.action.dtype]
        on_device: dict[str, list[torch.Tensor]] = {name: [] for name in (*STATE_ARRAYS, *per_step, *TRANSITION_ARRAYS)}
        on_host: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in on_device}

        def record(**tensors: torch.Tensor) -> None:
            for name, tensor in tensors.items():
                on_device[name].append(tensor[0])

        obs, info = eval_env.reset(seed=seed)
        record(obs=obs, active=info["active"], **{name: eval_env.state[name].clone() for name in per_step})
        for _ in steps_until_all_done(eval_env):
            actions = act(obs, info.get("action_mask"))
            obs, rewards, terminations, truncations, info = eval_env.step(actions)
            record(actions=actions.to(kind, copy=True), rewards=rewards)
            record(terminations=terminations, truncations=truncations)
            record(obs=obs, active=info["active"], **{name: eval_env.state[name].clone() for name in per_step})
            if len(on_device["actions"]) == STEPS_PER_SYNC:
                for name, tensors in on_device.items():
                    on_host[name].append(torch.stack(tensors).cpu().numpy())
                    tensors.clear()
        shared = {name: eval_env.state[name].cpu().numpy().copy() for name in fields if known[name].shared}
    finally:
        eval_env.close()
    arrays = {name: np.concatenate(pieces) for name, pieces in on_host.items()}
    steps = int(arrays["active"].any(1).argmin())  # the first step without active agents
    episode = {name: array[: steps if name in TRANSITION_ARRAYS else steps + 1] for name, array in arrays.items()}
    return episode | shared


def _actions_of(
    eval_env: VecEnv, policy: Any, greedy: bool
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Function from observations and action masks to actions."""
    if policy is None:
        return lambda obs, action_mask: eval_env.sample_actions()
    if isinstance(policy, (GamePolicy, Mapping)):
        return RolePolicies(eval_env, policy, greedy)
    if not callable(policy):
        raise TypeError(
            f"policy is a {type(policy).__name__}; expected a GamePolicy, role -> policy, a function or None"
        )
    return lambda obs, action_mask: policy(obs)
