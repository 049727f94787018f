"""The recurrent default network: hidden layers, then a GRU or LSTM each for actor and critic, then two heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.networks import Activation, hidden_layers, orthogonal

CellKind = Literal["gru", "lstm"]
GATES: dict[CellKind, int] = {"gru": 3, "lstm": 4}
PARTS: dict[CellKind, int] = {"gru": 1, "lstm": 2}  # of a cell's state: the hidden one, and that of the cell


def kept(state: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The state (…, rows, n) for the next observation: 0 unless the row's agent is ``active`` (rows,) before the step.

    In "next_step" mode an agent that is not active has left, or its episode has ended and the step resets it. NaN is
    dropped too.
    """
    return torch.where(active[..., None], state, 0)


class RecurrentCells(nn.Module):
    """Two GRU or LSTM cells of the same size, of the actor and of the critic, with the equations of torch.nn.

    The two are one matrix product, and one kernel for each elementwise operation.

    Args:
        kind: Of the cells.
        inputs: Of each.
        units: Of each.
    """

    def __init__(self, kind: CellKind, inputs: int, units: int) -> None:
        super().__init__()
        self.kind, self.units = kind, units
        rows = GATES[kind] * units
        self.weight_ih = nn.Parameter(torch.empty(2, rows, inputs))
        self.weight_hh = nn.Parameter(torch.empty(2, rows, units))
        self.bias_ih = nn.Parameter(torch.zeros(2, rows))
        self.bias_hh = nn.Parameter(torch.zeros(2, rows))
        with torch.no_grad():
            for gate in (*self.weight_ih.flatten(0, 1).split(units), *self.weight_hh.flatten(0, 1).split(units)):
                nn.init.orthogonal_(gate)
            if kind == "lstm":
                self.bias_ih[:, units : 2 * units] = 1  # forget gates begin open: Jozefowicz et al. 2015

    @property
    def state_size(self) -> int:
        """Numbers in the state of a row."""
        return PARTS[self.kind] * 2 * self.units

    def parts(self, state: torch.Tensor) -> torch.Tensor:
        """The state (rows, state_size) as (parts, 2, rows, units), a view."""
        return state.view(-1, PARTS[self.kind], 2, self.units).movedim(0, 2)

    def flat(self, parts: torch.Tensor) -> torch.Tensor:
        """The inverse of ``parts``."""
        return parts.movedim(2, 0).flatten(1)

    def of_inputs(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the inputs add to the gates, (2, rows, gates * units).

        Args:
            features: Inputs (rows, inputs), of both cells or of each.
        """
        if len(features) == 1:
            both = nn.functional.linear(features[0], self.weight_ih.flatten(0, 1), self.bias_ih.flatten())
            return both.float().view(-1, 2, self.weight_ih.shape[1]).movedim(1, 0)
        return torch.baddbmm(self.bias_ih[:, None], torch.stack(list(features)), self.weight_ih.mT).float()

    def forward(self, inputs: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """The next state, (parts, 2, rows, units) float32; its first part are the outputs.

        Args:
            inputs: (2, rows, gates * units), from ``of_inputs``.
            parts: The state, (parts, 2, rows, units).
        """
        hidden, units = torch.baddbmm(self.bias_hh[:, None], parts[0], self.weight_hh.mT).float(), self.units
        if self.kind == "gru":
            reset, update = (inputs[..., : 2 * units] + hidden[..., : 2 * units]).sigmoid().chunk(2, -1)
            new = (inputs[..., 2 * units :] + reset * hidden[..., 2 * units :]).tanh()
            return (new + update * (parts[0] - new))[None]
        enter, forget, new, leave = (inputs + hidden).chunk(4, -1)
        cell = forget.sigmoid() * parts[1] + enter.sigmoid() * new.tanh()
        return torch.stack([leave.sigmoid() * cell.tanh(), cell])


class RecurrentActorCritic(nn.Module):
    """Like ``ActorCritic``, with a GRU or LSTM as the last hidden layer; actor and critic have a state each.

    Any module with ``recurrent_state_size`` and the same ``forward`` can replace it. Its rows are independent: an
    output depends on the row's observation and state alone, not on other rows, random numbers or earlier calls.
    ``sequence`` is optional, and must give what calls of ``forward`` for each step give.

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened, uint8 is scaled to [0, 1].
        num_outputs: Outputs of the actor: logits, means, or all parameters of Beta distributions.
        hidden_sizes: Units of each hidden layer; the last one is the recurrent layer, one for the actor and one for the
            critic.
        cell: Kind of the recurrent layer.
        gaussian: Append log standard deviations, parameters that do not depend on the observation and start at 0.
        activation: Of the hidden layers in front of the recurrent one.
        shared_trunk: Whether actor and critic share these layers.
        actor_gain: Of the weights of the actor head.

    Raises:
        ConfigError: ``hidden_sizes`` is empty.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        num_outputs: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        cell: CellKind = "gru",
        gaussian: bool = False,
        activation: Activation = "tanh",
        shared_trunk: bool = True,
        actor_gain: float = 0.01,
    ) -> None:
        super().__init__()
        if not hidden_sizes:
            raise ConfigError(f"hidden_sizes is {tuple(hidden_sizes)}; network {cell!r} needs at least one size")
        self.obs_shape = tuple(obs_shape)
        *sizes, units = math.prod(self.obs_shape), *hidden_sizes
        self.trunk = hidden_layers(sizes, activation)
        self.critic_trunk = None if shared_trunk else hidden_layers(sizes, activation)
        self.cells = RecurrentCells(cell, sizes[-1], units)
        self.actor = orthogonal(nn.Linear(units, num_outputs), actor_gain)
        self.critic = orthogonal(nn.Linear(units, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None
        self.recurrent_state_size = self.cells.state_size

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step: parameters (rows, n), values (rows,) and the next state (rows, recurrent_state_size).

        Args:
            obs: (rows, *obs_shape).
            state: (rows, recurrent_state_size) float32; 0 where ``obs`` is the first of an episode.
        """
        parts = self.cells(self._of_inputs(obs), self.cells.parts(state))
        return *self._heads(parts[0]), self.cells.flat(parts)

    def sequence(
        self, obs: torch.Tensor, state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several steps: parameters (steps, rows, n) and values (steps, rows).

        Only the products with the state are computed step by step.

        Args:
            obs: (steps, rows, *obs_shape).
            state: (rows, recurrent_state_size) float32, before the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        inputs = self._of_inputs(obs.flatten(0, 1)).unflatten(1, obs.shape[:2])
        parts, outputs = self.cells.parts(state), list[torch.Tensor]()
        for t, is_active in enumerate(active):
            parts = self.cells(inputs[:, t], parts)
            outputs.append(parts[0])
            parts = kept(parts, is_active)
        return self._heads(torch.stack(outputs, 1))

    def _of_inputs(self, obs: torch.Tensor) -> torch.Tensor:
        rows = obs.flatten(1)
        rows = rows.float() / 255 if obs.dtype == torch.uint8 else rows
        trunks = [self.trunk] if self.critic_trunk is None else [self.trunk, self.critic_trunk]
        return self.cells.of_inputs([trunk(rows) for trunk in trunks])

    def _heads(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters (…, n) and values (…) of the cells' outputs (2, …, units)."""
        outputs, values = self.actor(features[0]), self.critic(features[1]).squeeze(-1)
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs, values


def recurrent_weights(sizes: Sequence[int], cell: CellKind) -> list[tuple[int, ...]]:
    """Shapes of the weights of RecurrentCells, behind layers of these sizes, inputs first, of which it is the last."""
    rows = GATES[cell] * sizes[-1]
    return [(2, rows, sizes[-2]), (2, rows, sizes[-1])]
