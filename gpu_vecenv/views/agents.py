"""Agents by name: spaces, slices of the padded tensors, and checks of action dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import AgentKeyError, nearest

LISTED = 8  # names listed in an error message


def versioned_name(requested: str | type[Env] | Env, game: Env | type[Env]) -> str:
    """Name in PettingZoo's style, ``tag_continuous_v1``, of a game that was requested as ``requested``."""
    version = game.played_version if isinstance(game, Env) else game.version
    return f"{requested if isinstance(requested, str) else game.name()}_v{version}"


def role_of_agents(game: Env) -> dict[str, str]:
    """Agent name -> role, in agent order."""
    roles = (role for role in game.layout.agent_roles)
    return dict(zip(game.layout.agent_names, roles, strict=True))


def agent_spaces(roles: Mapping[str, str], spaces: Mapping[str, Space[Any]]) -> dict[str, Any]:
    """Key -> an independent copy of its role's space: seeding one does not seed the others."""
    own = {key: copy.deepcopy(spaces[role]) for key, role in roles.items()}
    for space in own.values():
        space.seed()  # deepcopy copies the random generator too
    return own


def agent_space(spaces: Mapping[str, Space[Any]], agent: str) -> Space[Any]:
    """The space of an agent. AgentKeyError if there is no such agent."""
    if agent not in spaces:
        raise AgentKeyError(f"no agent {agent!r}; {nearest(str(agent), spaces)}")
    return spaces[agent]


def role_obs(game: Env, role: str, obs: Any) -> Any:
    """Observations (…, *obs_shape), torch or NumPy, without the padding of this role; a view."""
    return obs[(..., *game.layout.observation.own(role))]


def joint_space(game: Env) -> Box:
    """The space of ``joint_obs`` of one environment."""
    spaces = [game.layout.observation.spaces[role] for role in game.layout.agent_roles]
    low, high = (np.concatenate([getattr(s, bound).ravel() for s in spaces]) for bound in ("low", "high"))
    return Box(low, high, dtype=game.layout.observation.dtype.type)


def joint_obs(game: Env, obs: torch.Tensor) -> torch.Tensor:
    """Unpadded observations of all agents concatenated, (num_envs, elements); a view of ``obs`` if none is padded."""
    if not game.layout.observation.padded:
        return obs.flatten(1)
    roles = game.layout.role_slices.items()
    return torch.cat([role_obs(game, role, obs[:, agents]).flatten(1) for role, agents in roles], 1)


def action_mask_slices(game: Env) -> dict[str, list[slice]]:
    """Role -> slice of an agent's action mask for each of its action heads; without roles that have a Box."""
    action = game.layout.action
    first = [0, *accumulate(action.head_sizes)]
    return {
        role: [slice(at, at + n) for at, n in zip(first, sizes, strict=False)]
        for role, sizes in action.sizes.items()
        if role not in action.bounds
    }


def only_with_masks(game: Env, method: Callable[[], Any]) -> Callable[[], Any]:
    """``method``, which returns action masks. AttributeError if the game has none."""
    if not game.layout.masks_actions:
        raise AttributeError(f"{type(game).__name__} has no action masks: masks_actions is False")
    return method


def sample_mask(mask: Any, slices: Iterable[slice], space: Space[Any]) -> Any:
    """The mask as ``space.sample`` takes it: one for a Discrete space, else a tuple with one for each head. Views."""
    masks = tuple(mask[..., slice_] for slice_ in slices)
    return masks[0] if isinstance(space, Discrete) else masks


def check_keys(actions: Any, expected: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError, or AgentKeyError unless the keys of ``actions`` are exactly those ``expected``."""
    if not isinstance(actions, Mapping):
        raise TypeError(f"step: actions are a {type(actions).__name__}; expected a dict of agent -> action")
    if len(actions) == len(expected) and all(key in actions for key in expected):
        return
    wrong = {
        "no action for": [key for key in expected if key not in actions],
        "an action for an agent that has ended:": [key for key in actions if key in known and key not in expected],
        "an action for an unknown agent:": [key for key in actions if key not in known],
    }
    found = "; ".join(f"{what} {_listed(keys)}" for what, keys in wrong.items() if keys)
    raise AgentKeyError(f"step: {found}. Expected one action for each of: {_listed(expected) or 'none, call reset()'}")


def _listed(names: Collection[Any]) -> str:
    first = ", ".join(map(str, list(names)[:LISTED]))
    return first if len(names) <= LISTED else f"{first} and {len(names) - LISTED} more"
