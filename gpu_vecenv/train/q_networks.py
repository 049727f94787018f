"""Default Q-networks: hidden layers, behind an encoder or in front of a recurrent layer, and one head.

They return values too, as the networks of every policy do: the largest Q value of each head, summed up. Nothing uses
these, as masks are not known here, and they have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from gpu_vecenv.train.encoders import ImageEncoder, PartsEncoder
from gpu_vecenv.train.networks import Activation, hidden_layers, orthogonal
from gpu_vecenv.train.recurrent import CellKind, RecurrentCells, layer_sizes


class QNetwork(nn.Module):
    """Q values of each choice: an encoder, if there is one, hidden layers and a head.

    Attributes:
        parts: Of the observations, which the encoder takes apart; None: they have none.

    Args:
        obs_shape: Shape of one agent's observation; without an encoder several axes are flattened.
        head_sizes: Choices of each head.
        hidden_sizes: Units of each hidden layer.
        activation: Of the hidden layers.
        layer_norm: Whether each of them is normalised in front of its activation.
        encoder: In front of them, whose outputs are (…, ``size``).
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        head_sizes: Sequence[int],
        hidden_sizes: Sequence[int],
        *,
        activation: Activation = "relu",
        layer_norm: bool = True,
        encoder: ImageEncoder | PartsEncoder | None = None,
    ) -> None:
        super().__init__()
        self.obs_axes, self.head_sizes = len(obs_shape), tuple(head_sizes)
        self.encoder, self.parts = encoder, None if encoder is None else encoder.parts
        sizes = [math.prod(obs_shape) if encoder is None else encoder.size, *hidden_sizes]
        self.trunk = hidden_layers(sizes, activation, layer_norm)
        self.head = orthogonal(nn.Linear(sizes[-1], sum(head_sizes)), 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> Q values (…, n) and the sums of their maxima (…)."""
        features = obs.flatten(obs.ndim - self.obs_axes) if self.encoder is None else self.encoder(obs)
        return _with_maxima(self.head(self.trunk(features)), self.head_sizes)


class RecurrentQNetwork(nn.Module):
    """Q values of each choice: hidden layers, the last of which is a GRU or LSTM, and a head.

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened.
        head_sizes: Choices of each head.
        hidden_sizes: Units of each hidden layer.
        cell: Kind of the recurrent layer.
        activation: Of the hidden layers in front of it.
        layer_norm: Whether each of these is normalised in front of its activation.

    Raises:
        ConfigError: ``hidden_sizes`` is empty.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        head_sizes: Sequence[int],
        hidden_sizes: Sequence[int],
        *,
        cell: CellKind = "gru",
        activation: Activation = "relu",
        layer_norm: bool = True,
    ) -> None:
        super().__init__()
        self.obs_axes, self.head_sizes = len(obs_shape), tuple(head_sizes)
        *sizes, units = layer_sizes(math.prod(obs_shape), hidden_sizes, cell)
        self.trunk = hidden_layers(sizes, activation, layer_norm)
        self.cells = RecurrentCells(cell, sizes[-1], units, count=1)
        self.head = orthogonal(nn.Linear(units, sum(head_sizes)), 1.0)
        self.recurrent_state_size = self.cells.state_size

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step: Q values (rows, n), the sums of their maxima (rows,) and the next state.

        Args:
            obs: (rows, *obs_shape).
            state: (rows, recurrent_state_size) float32; 0 where ``obs`` is the first of an episode.
        """
        (features,), next_state = self.cells.step([self.trunk(obs.flatten(1))], state)
        return *_with_maxima(self.head(features), self.head_sizes), next_state

    def sequence(
        self, obs: torch.Tensor, state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several steps: Q values (steps, rows, n) and the sums of their maxima (steps, rows).

        Args:
            obs: (steps, rows, *obs_shape).
            state: (rows, recurrent_state_size) float32, before the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        rows = obs.flatten(0, 1).flatten(1)
        (features,) = self.cells.sequence([self.trunk], rows, state, active)
        return _with_maxima(self.head(features), self.head_sizes)


def _with_maxima(values: torch.Tensor, head_sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    first, *others = (head.amax(-1) for head in values.detach().split(list(head_sizes), -1))
    return values, sum(others, first)
