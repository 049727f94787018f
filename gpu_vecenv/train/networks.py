"""The default network: a multi-layer perceptron with an actor and a critic head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from gpu_vecenv.train.layers import NO_ACTIVATION, has_hooks, heads, is_plain, is_supported_mlp, layer, through

Activation = Literal["tanh", "relu"]


class ActorCritic(nn.Module):
    """A multi-layer perceptron with two outputs: the parameters of an action distribution, and a value.

    Any module with the same ``forward`` can replace it: observations (…, *obs_shape) float32 to a pair of
    float32 tensors, parameters (…, n) and values (…). For discrete actions the parameters are the logits of each head
    in turn. For a Box of k numbers they are k means and then k log standard deviations, where -1 and 1 stand for the
    bounds of the Box; with squash "beta" those of ``Sampler.sample``, 2k numbers. It draws no random numbers and must
    not synchronise with the device (a module that does is run without CUDA graphs).

    Weights are orthogonal, with gains as in Andrychowicz et al., "What matters in on-policy reinforcement learning?",
    2021: sqrt(2) for hidden layers, 0.01 for the actor head by default, 1 for the critic head.

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened.
        num_outputs: Outputs of the actor: logits, means, or all parameters of Beta distributions.
        hidden_sizes: Units of each hidden layer.
        gaussian: Append log standard deviations, parameters that do not depend on the observation and start at 0.
        activation: Of the hidden layers.
        shared_trunk: Whether actor and critic share the hidden layers.
        actor_gain: Of the weights of the actor head.
    """

    fused = False  # whether gradients come from the kernels of layers.py; set by the learner during backward()

    def __init__(
        self,
        obs_shape: Sequence[int],
        num_outputs: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        gaussian: bool = False,
        activation: Activation = "tanh",
        shared_trunk: bool = True,
        actor_gain: float = 0.01,
    ) -> None:
        super().__init__()
        self.obs_shape = tuple(obs_shape)
        sizes = [math.prod(self.obs_shape), *hidden_sizes]
        self.sizes = tuple(sizes)  # inputs of each layer, the heads included
        self.trunk = hidden_layers(sizes, activation)
        self.critic_trunk = None if shared_trunk else hidden_layers(sizes, activation)
        self.actor = orthogonal(nn.Linear(sizes[-1], num_outputs), actor_gain)
        self.critic = orthogonal(nn.Linear(sizes[-1], 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> parameters (…, n) and values (…)."""
        rows = obs.flatten(obs.ndim - len(self.obs_shape))
        if self.fused and torch.is_grad_enabled() and self._may_fuse(rows):
            return self._fused(rows)
        features = self.trunk(rows)
        if self.critic_trunk is None:  # one product for both heads reads the features, the largest tensor, once
            weight, bias = (
                torch.cat(pair) for pair in zip(self.actor.parameters(), self.critic.parameters(), strict=True)
            )
            outputs, values = nn.functional.linear(features, weight, bias).tensor_split((-1,), -1)
        else:
            outputs, values = self.actor(features), self.critic(self.critic_trunk(rows))
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs, values.squeeze(-1)

    def is_plain(self) -> bool:
        """Whether no layer was replaced or has hooks, and all weights are float32: then kernels can take its place."""
        trunks = [self.trunk] if self.critic_trunk is None else [self.trunk, self.critic_trunk]
        layers = all(map(is_supported_mlp, trunks)) and is_plain(self.actor) and is_plain(self.critic)
        return layers and type(self).forward is ActorCritic.forward and not has_hooks(self)

    def _may_fuse(self, rows: torch.Tensor) -> bool:
        """Whether the kernels of layers.py apply: also no mixed precision."""
        mixed = torch.is_autocast_enabled(rows.device.type)
        return self.is_plain() and rows.ndim == 2 and rows.dtype == torch.float32 and not mixed

    def _fused(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` of rows (n, inputs) by the kernels of layers.py; equal up to rounding."""
        features = through(self.trunk, rows)
        actor, critic = ((head.weight, head.bias) for head in (self.actor, self.critic))
        if self.critic_trunk is not None:
            outputs = layer(features, *actor, NO_ACTIVATION)
            values = layer(through(self.critic_trunk, rows), *critic, NO_ACTIVATION).squeeze(-1)
            if self.log_std is not None:
                outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
            return outputs, values
        if self.log_std is None:
            return heads(features, *actor, *critic)
        # log_std does not depend on the features: it is the bias of a head with zero weights.
        no_weight = torch.zeros_like(self.actor.weight, requires_grad=False)
        return heads(features, *actor, no_weight, self.log_std, *critic)


def hidden_layers(sizes: Sequence[int], activation: Activation, layer_norm: bool = False) -> nn.Sequential:
    """Linear layers between these numbers of units, each with an activation; orthogonal weights with gain sqrt(2).

    With ``layer_norm`` each is normalised in front of its activation.
    """
    units = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        normalized = [nn.LayerNorm(outputs)] if layer_norm else []
        layers += [orthogonal(nn.Linear(inputs, outputs), math.sqrt(2)), *normalized, units()]
    return nn.Sequential(*layers)


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """The layer, with orthogonal weights and without biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
