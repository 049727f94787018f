"""Trained policies for the page: their layers as JSON, which policy.js computes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_vecenv.declare.obs_parts import EntityList
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.encoders import EncodedActorCritic, EntityEncoder, ImageEncoder, PartsEncoder
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.q_networks import QNetwork, RecurrentQNetwork
from gpu_vecenv.train.q_policy import QPolicy
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentCells, RecurrentTower

Layer = dict[str, Any]


def policies_json(policies: Iterable[Policy]) -> list[dict[str, Any]]:
    """One object for each policy, once: the numbers of its agents, its layers, its distribution.

    Raises:
        ConfigError: A network is none of the default ones that policy.js computes.
    """
    return [policy_json(one) for one in dict.fromkeys(policies)]


def policy_json(policy: Policy) -> dict[str, Any]:
    """One policy, see ``policies_json``."""
    network, name = policy.network, policy.view.name
    if isinstance(network, ActorCritic):
        layers, head = _layers(network.trunk, name), network.actor
    elif isinstance(network, Tower):
        layers, head = _layers(network.trunk, name), network.head
    elif isinstance(network, RecurrentActorCritic):
        layers = [*_layers(network.trunk, name), _cell(network.cells), *_layers(network.post, name)]
        head = network.actor
    elif isinstance(network, RecurrentTower):
        layers = [*_layers(network.trunk, name), _cell(network.cells), *_layers(network.post, name)]
        head = network.head
    elif isinstance(network, RecurrentQNetwork):
        layers, head = [*_layers(network.trunk, name), _cell(network.cells)], network.head
    elif isinstance(network, QNetwork):
        layers, head = [*_encoder(network.encoder, name), *_layers(network.trunk, name)], network.head
    elif isinstance(network, EncodedActorCritic):
        encoder, trunk = network.trunk
        assert isinstance(trunk, nn.Sequential)
        layers, head = [*_encoder(encoder, name), *_layers(trunk, name)], network.actor
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
        "agent_ids": policy.agent_ids,
        "mean": None if mean is None else _numbers(mean),
        "std": None if std is None else _numbers(std),
        "layers": [*layers, _linear(head)],
        "log_std": None if log_std is None else _numbers(log_std),
        "head_sizes": list(policy.view.head_sizes),
        "bounds": np.asarray(policy.view.bounds).tolist(),
        "squash": policy.squash,
        "epsilon": policy.epsilon.item() if isinstance(policy, QPolicy) else None,
    }


def _layers(modules: nn.Sequential, name: str) -> list[Layer]:
    return [_layer(module, name) for module in modules]


def _encoder(encoder: nn.Module | None, name: str) -> list[Layer]:
    if encoder is None:
        return []
    if isinstance(encoder, ImageEncoder):
        return _layers(encoder.convolutions, name)
    assert isinstance(encoder, PartsEncoder)
    own = encoder.own_columns.tolist()
    lists = [_entities(one, entities) for one, entities in zip(encoder.lists, encoder.parts.entities, strict=True)]
    return [{"kind": "entities", "own": own, "lists": lists, "size": encoder.size}]


def _entities(encoder: nn.Module, entities: EntityList) -> Layer:
    assert isinstance(encoder, EntityEncoder)
    return {
        "columns": [list(columns) for columns in entities.columns],
        "presence": entities.presence,
        "first": _linear(encoder.of_entity),
        "of_own": None if encoder.of_own is None else _numbers(encoder.of_own.weight),
        "second": _linear(encoder.layers[0]),
        "activation": type(encoder.activation).__name__.lower(),
    }


def _layer(module: nn.Module, name: str) -> Layer:
    if isinstance(module, nn.Linear):
        return _linear(module)
    if isinstance(module, nn.Tanh | nn.ReLU):
        return {"kind": type(module).__name__.lower()}
    if isinstance(module, nn.LayerNorm):
        return {
            "kind": "layer_norm",
            "weight": _numbers(module.weight),
            "bias": _numbers(module.bias),
            "eps": module.eps,
        }
    if isinstance(module, nn.Conv2d) and module.bias is not None:
        filters, channels, height, width = module.weight.shape
        shape = {"filters": filters, "channels": channels, "kernel": [height, width]}
        sizes = {"stride": _pair(module.stride), "padding": _pair(module.padding)}
        return {"kind": "conv", **shape, **sizes, "weight": _numbers(module.weight), "bias": _numbers(module.bias)}
    raise ConfigError(f"the network of {name} has a {type(module).__name__}, which the page does not compute")


def _linear(module: nn.Module) -> Layer:
    assert isinstance(module, nn.Linear)
    outputs, inputs = module.weight.shape
    bias = torch.zeros(outputs) if module.bias is None else module.bias
    return {
        "kind": "linear",
        "inputs": inputs,
        "outputs": outputs,
        "weight": _numbers(module.weight),
        "bias": _numbers(bias),
    }


def _cell(cells: RecurrentCells) -> Layer:
    """The actor's cell, the first one."""
    own = {name: getattr(cells, name)[0] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    sizes = {"inputs": own["weight_ih"].shape[1], "units": cells.units}
    return {"kind": cells.kind, **sizes, **{name: _numbers(tensor) for name, tensor in own.items()}}


def _pair(sizes: int | str | Sequence[int]) -> list[int]:
    assert not isinstance(sizes, str)
    return [sizes, sizes] if isinstance(sizes, int) else list(sizes)


def _numbers(tensor: torch.Tensor) -> str:
    """float32 in base64."""
    array: np.ndarray[Any, Any] = tensor.detach().cpu().float().contiguous().numpy()
    return base64.b64encode(array.tobytes()).decode()
