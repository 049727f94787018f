"""What the page's inspector shows of policies and games: critics, and the names of the parts of observations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.train.encoders import EncodedActorCritic, ImageEncoder, PartsEncoder
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.web.policies import Layer, _encoder, _layers, _linear


def critics_json(policies: Iterable[Policy]) -> list[dict[str, Any] | None]:
    """One object for each policy, once: the layers of its critic, and mean and std that turn its output into returns.

    None for a critic with a memory, and for a central one: the page has neither its memory nor the state that it reads.
    """
    return [_critic(policy) for policy in dict.fromkeys(policies)]


def _critic(policy: Policy) -> dict[str, Any] | None:
    network, name = policy.network, policy.view.name
    if policy.critic is not None or not isinstance(network, ActorCritic | EncodedActorCritic):
        return None
    trunk = network.trunk if network.critic_trunk is None else network.critic_trunk
    normalizer = policy.return_normalizer
    return {
        "layers": [*_trunk(trunk, name), _linear(network.critic)],
        "mean": 0.0 if normalizer is None else normalizer.mean.item(),
        "std": 1.0 if normalizer is None else normalizer.std.item(),
    }


def _trunk(trunk: nn.Sequential, name: str) -> list[Layer]:
    if not isinstance(trunk[0], ImageEncoder | PartsEncoder):
        return _layers(trunk, name)
    assert isinstance(trunk[1], nn.Sequential)
    return [*_encoder(trunk[0], name), *_layers(trunk[1], name)]


def obs_parts_json(game: Env) -> dict[str, list[tuple[str, list[int]]]]:
    """Role -> the parts of its observation, (name, indices) in their order; without roles that declare none."""
    found = {}
    for role, parts in game.layout.observation.parts.items():
        rows = [(name, list(columns)) for name, columns in parts.own.items()]
        for entities in parts.entities:
            rows += [(f"{entities.name} {k}", list(columns)) for k, columns in enumerate(entities.columns)]
        found[role] = sorted(rows, key=lambda row: row[1])
    return found
