"""Trained policies for the page: their layers and critics as JSON, which policy.js and critic.js compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.encoders import EncodedActorCritic
from gpu_vecenv.train.fixed_policy import FixedPolicy
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.q_networks import QNetwork, RecurrentQNetwork
from gpu_vecenv.train.q_policy import QPolicy
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentTower
from gpu_vecenv.web.critics import critic_json
from gpu_vecenv.web.layers import Layer, cell_json, encoder_json, layers_json, linear_json, numbers_json


def policies_json(policies: Iterable[Policy]) -> list[dict[str, Any]]:
    """One object for each policy with a network, once: the numbers of its agents, layers, distribution, critic.

    Raises:
        ConfigError: A network is none of the default ones that policy.js computes.
    """
    return [policy_json(one) for one in dict.fromkeys(policies) if not isinstance(one, FixedPolicy)]


def policy_json(policy: Policy) -> dict[str, Any]:
    """One policy, see ``policies_json``."""
    network, name, rest = policy.network, policy.view.name, list[Layer]()
    if isinstance(network, ActorCritic | EncodedActorCritic):
        trunk, head = layers_json(network.trunk, name), network.actor
    elif isinstance(network, Tower):
        trunk, head = layers_json(network.trunk, name), network.head
    elif isinstance(network, RecurrentActorCritic):
        trunk, head = layers_json(network.trunk, name), network.actor
        rest = [cell_json(network.cells), *layers_json(network.post, name)]
    elif isinstance(network, RecurrentTower):
        trunk, head = layers_json(network.trunk, name), network.head
        rest = [cell_json(network.cells), *layers_json(network.post, name)]
    elif isinstance(network, RecurrentQNetwork):
        trunk, rest, head = layers_json(network.trunk, name), [cell_json(network.cells)], network.head
    elif isinstance(network, QNetwork):
        trunk, rest, head = encoder_json(network.encoder, name), layers_json(network.trunk, name), network.head
    else:
        raise ConfigError(
            f"the network of {name} is a {type(network).__name__}, which the page does not compute; expected a "
            "default network; leave --run or --watch out to do without it"
        )
    log_std = getattr(network, "log_std", None)  # networks of Q values have none
    normalizer = policy.obs_normalizer
    mean, std = (None, None) if normalizer is None else normalizer.statistics()
    return {
        "name": name,
        "agents": list(policy.view.agent_numbers),
        "obs_shape": list(policy.view.obs_shape),
        "obs_scale": policy.obs_scale,
        "agent_ids": policy.agent_ids,
        "mean": None if mean is None else numbers_json(mean),
        "std": None if std is None else numbers_json(std),
        "layers": [*trunk, *rest, linear_json(head)],
        "log_std": None if log_std is None else numbers_json(log_std),
        "head_sizes": list(policy.view.head_sizes),
        "bounds": np.asarray(policy.view.bounds).tolist(),
        "squash": policy.squash,
        "epsilon": policy.epsilon.item() if isinstance(policy, QPolicy) else None,
        "critic": critic_json(policy, len(trunk)),
    }
