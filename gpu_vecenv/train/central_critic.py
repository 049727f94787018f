"""A central critic: values from what all agents of an environment observe, or from a state that the game declares.

The state is the same for all agents of an environment, or has parts that are an agent's own.

Actors keep to their own observations, so that trained agents act alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.train.layers import NO_ACTIVATION, has_hooks, is_plain, is_supported_mlp, layer, through
from gpu_vecenv.train.networks import Activation, hidden_layers, orthogonal

Critic = Literal["own", "central"]


class Context(NamedTuple):
    """What networks read beside a row's own observation; the leading axes are those of the observations.

    ``agents`` are numbers among the policy's agents; None stands for 0, 1, … along the last leading axis.
    """

    state: torch.Tensor | None = None  # (…, S) float32 or uint8, for a central critic; axes of size 1 are expanded
    agents: torch.Tensor | None = None  # (…,) int64


NO_CONTEXT = Context()


def state_size(game: Env) -> int:
    """Length of a central critic's state, S.

    Of the fields in the game's ``critic_state`` and of an agent's row of those in ``agent_critic_state``, or of the
    observations of all agents, padded to the widest role.
    """
    layout = game.layout
    if not declares_state(game):
        return layout.num_agents * layout.obs_size
    sizes = {field.name: field.size for field in layout.fields}
    of_agents = sum(sizes[name] for name in layout.agent_critic_state) // layout.num_agents
    return sum(sizes[name] for name in layout.critic_state) + of_agents


def declares_state(game: Env) -> bool:
    """Whether a game declares a state for critics, which is not the observations of all agents then."""
    return bool(game.layout.critic_state or game.layout.agent_critic_state)


class Tower(nn.Module):
    """A multi-layer perceptron with one head: an actor, or a central critic.

    Weights are as in ``ActorCritic``.

    Args:
        inputs: Length of a row.
        outputs: Of the head.
        hidden_sizes: Units of each hidden layer.
        head_gain: Of the orthogonal weights of the head.
        gaussian: Append log standard deviations, parameters that do not depend on the row and start at 0.
        activation: Of the hidden layers.
    """

    fused = False  # whether gradients come from the kernels of layers.py; set by the learner during backward()

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden_sizes: Sequence[int],
        *,
        head_gain: float,
        gaussian: bool = False,
        activation: Activation = "tanh",
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden_sizes]
        self.sizes = tuple(sizes)  # inputs of each layer, the head included
        self.trunk = hidden_layers(sizes, activation)
        self.head = orthogonal(nn.Linear(sizes[-1], outputs), head_gain)
        self.log_std = nn.Parameter(torch.zeros(outputs)) if gaussian else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (…, inputs) float32 -> (…, outputs), followed by the log standard deviations."""
        if self.fused and torch.is_grad_enabled() and self._may_fuse(rows):
            outputs = layer(through(self.trunk, rows), self.head.weight, self.head.bias, NO_ACTIVATION)
        else:
            outputs = self.head(self.trunk(rows))
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs

    def is_plain(self) -> bool:
        """Whether kernels can take its place, as of ``ActorCritic``."""
        layers = is_supported_mlp(self.trunk) and is_plain(self.head)
        return layers and type(self).forward is Tower.forward and not has_hooks(self)

    def _may_fuse(self, rows: torch.Tensor) -> bool:
        """Whether the kernels of layers.py apply, as in ``ActorCritic``."""
        mixed = torch.is_autocast_enabled(rows.device.type)
        return self.is_plain() and rows.ndim == 2 and rows.dtype == torch.float32 and not mixed
