"""The layers of the default networks as JSON, which network.js computes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_vecenv.declare.obs_parts import EntityList
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.encoders import EntityEncoder, ImageEncoder, PartsEncoder
from gpu_vecenv.train.recurrent import RecurrentCells

Layer = dict[str, Any]


def layers_json(modules: nn.Sequential, name: str) -> list[Layer]:
    """Hidden layers, encoders among them, of the policy of this name.

    Raises:
        ConfigError: One of them is none that network.js computes.
    """
    found = []
    for module in modules:
        if isinstance(module, nn.Sequential):
            found += layers_json(module, name)
        elif isinstance(module, ImageEncoder | PartsEncoder):
            found += encoder_json(module, name)
        else:
            found.append(_layer(module, name))
    return found


def encoder_json(encoder: nn.Module | None, name: str) -> list[Layer]:
    """An encoder's layers; none of None."""
    if encoder is None:
        return []
    if isinstance(encoder, ImageEncoder):
        return layers_json(encoder.convolutions, name)
    assert isinstance(encoder, PartsEncoder)
    own = encoder.own_columns.tolist()
    lists = [_entities(one, entities) for one, entities in zip(encoder.lists, encoder.parts.entities, strict=True)]
    return [{"kind": "entities", "own": own, "lists": lists, "size": encoder.size}]


def linear_json(module: nn.Module) -> Layer:
    """A linear layer."""
    assert isinstance(module, nn.Linear)
    outputs, inputs = module.weight.shape
    bias = torch.zeros(outputs) if module.bias is None else module.bias
    return {
        "kind": "linear",
        "inputs": inputs,
        "outputs": outputs,
        "weight": numbers_json(module.weight),
        "bias": numbers_json(bias),
    }


def cell_json(cells: RecurrentCells, index: int = 0) -> Layer:
    """One of several cells: the first one is the actor's, the second the critic's."""
    own = {name: getattr(cells, name)[index] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    sizes = {"inputs": own["weight_ih"].shape[1], "units": cells.units}
    return {"kind": cells.kind, **sizes, **{name: numbers_json(tensor) for name, tensor in own.items()}}


def numbers_json(tensor: torch.Tensor) -> str:
    """float32 in base64."""
    array: np.ndarray[Any, Any] = tensor.detach().cpu().float().contiguous().numpy()
    return base64.b64encode(array.tobytes()).decode()


def _entities(encoder: nn.Module, entities: EntityList) -> Layer:
    assert isinstance(encoder, EntityEncoder)
    return {
        "columns": [list(columns) for columns in entities.columns],
        "presence": entities.presence,
        "first": linear_json(encoder.of_entity),
        "of_own": None if encoder.of_own is None else numbers_json(encoder.of_own.weight),
        "second": linear_json(encoder.layers[0]),
        "activation": type(encoder.activation).__name__.lower(),
    }


def _layer(module: nn.Module, name: str) -> Layer:
    if isinstance(module, nn.Linear):
        return linear_json(module)
    if isinstance(module, nn.Tanh | nn.ReLU):
        return {"kind": type(module).__name__.lower()}
    if isinstance(module, nn.LayerNorm):
        return {
            "kind": "layer_norm",
            "weight": numbers_json(module.weight),
            "bias": numbers_json(module.bias),
            "eps": module.eps,
        }
    if isinstance(module, nn.Conv2d) and module.bias is not None:
        filters, channels, height, width = module.weight.shape
        shape = {"filters": filters, "channels": channels, "kernel": [height, width]}
        sizes = {"stride": _pair(module.stride), "padding": _pair(module.padding)}
        weights = {"weight": numbers_json(module.weight), "bias": numbers_json(module.bias)}
        return {"kind": "conv", **shape, **sizes, **weights}
    raise ConfigError(f"the network of {name} has a {type(module).__name__}, which the page does not compute")


def _pair(sizes: int | str | Sequence[int]) -> list[int]:
    assert not isinstance(sizes, str)
    return [sizes, sizes] if isinstance(sizes, int) else list(sizes)
