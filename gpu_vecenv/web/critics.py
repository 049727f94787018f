"""The critics of policies as JSON, which critic.js computes."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.encoders import EncodedActorCritic
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.q_policy import QPolicy
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentTower
from gpu_vecenv.web.layers import Layer, cell_json, layers_json, linear_json, numbers_json


def critic_json(policy: Policy, trunk: int) -> dict[str, Any]:
    """What gives the values of a policy, by its ``kind``.

    "q": the policy's own outputs. "own" and "central": ``layers``, behind the first ``shared`` ones of the policy, and
    ``return_mean`` and ``return_std``, which turn their output into returns; a central critic has the normalisation of
    its inputs too. "none": ``reason`` says why the page has no values.

    Args:
        policy: One whose network the page computes.
        trunk: Number of layers of its network's trunk.
    """
    if isinstance(policy, QPolicy):
        return {"kind": "q"}
    normalizer = policy.return_normalizer
    scale = {
        "return_mean": 0.0 if normalizer is None else normalizer.mean.item(),
        "return_std": 1.0 if normalizer is None else normalizer.std.item(),
    }
    if policy.critic is None:
        return {"kind": "own", **_own(policy, trunk), **scale}
    try:
        layers = _tower(policy.critic, policy.view.name)
    except ConfigError as error:
        return {"kind": "none", "reason": f"none: {error}"}
    mean, std = (None, None) if policy.state_normalizer is None else policy.state_normalizer.statistics()
    return {
        "kind": "central",
        "obs_shape": [layers[0]["inputs"] - policy.view.num_agents * policy.agent_ids],
        "obs_scale": policy.obs_scale,
        "mean": None if mean is None else numbers_json(mean),
        "std": None if std is None else numbers_json(std),
        "shared": 0,
        "layers": layers,
        **scale,
    }


def _own(policy: Policy, trunk: int) -> dict[str, Any]:
    """The layers of a critic that is part of the policy's network."""
    network, name = policy.network, policy.view.name
    assert isinstance(network, ActorCritic | EncodedActorCritic | RecurrentActorCritic)
    own = network.critic_trunk
    layers = [] if own is None else layers_json(own, name)
    if isinstance(network, RecurrentActorCritic):
        layers += [cell_json(network.cells, 1), *layers_json(network.critic_post, name)]
    return {"shared": trunk if own is None else 0, "layers": [*layers, linear_json(network.critic)]}


def _tower(critic: nn.Module, name: str) -> list[Layer]:
    """The layers of a default central critic."""
    if isinstance(critic, Tower):
        return [*layers_json(critic.trunk, name), linear_json(critic.head)]
    if isinstance(critic, RecurrentTower):
        layers = [*layers_json(critic.trunk, name), cell_json(critic.cells), *layers_json(critic.post, name)]
        return [*layers, linear_json(critic.head)]
    raise ConfigError(f"the critic of {name} is a {type(critic).__name__}, which the page does not compute")
