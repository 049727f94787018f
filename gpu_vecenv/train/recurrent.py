"""The recurrent default networks: hidden layers, then a GRU or LSTM, then a head; actor and critic in one or apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.layers import has_hooks, is_supported_mlp, through
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


class CellKernels(Protocol):
    """What computes cells in place of torch, see ``GruLayer`` and ``CellLayer``."""

    def step(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The outputs (R, u) of each cell in one step, and the next state (R, state_size) float32. Without gradients.

        Args:
            cells: The cells, of u units.
            features: Inputs (R, n), of all cells or of each.
            state: (R, state_size) float32.
        """

    def sequence(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs (L, R, u) of each cell in L steps.

        Args:
            cells: The cells, of u units.
            features: Inputs (L * R, n), of all cells or of each.
            state: (R, state_size) float32, before the first step; it gets no gradient.
            active: (L, R) bool; the state after a step in which it is False is 0.
        """


class RecurrentCells(nn.Module):
    """GRU or LSTM cells of the same size, such as those of actor and critic, with the equations of torch.nn.

    All of them are one matrix product, and one kernel for each elementwise operation.

    Args:
        kind: Of the cells.
        inputs: Of each.
        units: Of each.
        count: Number of cells.
    """

    kernels: CellKernels | None = None  # in place of torch; set while a trainer computes, see ``RecurrentStates``

    def __init__(self, kind: CellKind, inputs: int, units: int, count: int = 2) -> None:
        super().__init__()
        self.kind, self.units, self.count = kind, units, count
        of_inputs, of_states = recurrent_weights((inputs, units), kind, count)
        self.weight_ih, self.weight_hh = nn.Parameter(torch.empty(of_inputs)), nn.Parameter(torch.empty(of_states))
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.zeros(of_states[:2])) for _ in range(2))
        with torch.no_grad():
            for gate in (*self.weight_ih.flatten(0, 1).split(units), *self.weight_hh.flatten(0, 1).split(units)):
                nn.init.orthogonal_(gate)
            if kind == "lstm":
                self.bias_ih[:, units : 2 * units] = 1  # forget gates begin open: Jozefowicz et al. 2015

    def __getstate__(self) -> dict[str, Any]:
        """Copies have no kernels: these hold compiled code."""
        return {name: value for name, value in self.__dict__.items() if name != "kernels"}

    @property
    def state_size(self) -> int:
        """Numbers in the state of a row."""
        return PARTS[self.kind] * self.count * self.units

    def parts(self, state: torch.Tensor) -> torch.Tensor:
        """The state (rows, state_size) as (parts, count, rows, units), a view."""
        return state.view(-1, PARTS[self.kind], self.count, self.units).movedim(0, 2)

    def flat(self, parts: torch.Tensor) -> torch.Tensor:
        """The inverse of ``parts``."""
        return parts.movedim(2, 0).flatten(1)

    def of_inputs(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the inputs add to the gates, (count, rows, gates * units).

        Args:
            features: Inputs (rows, inputs), of all cells or of each.
        """
        if len(features) == 1:
            of_all = nn.functional.linear(features[0], self.weight_ih.flatten(0, 1), self.bias_ih.flatten())
            return of_all.float().view(-1, self.count, self.weight_ih.shape[1]).movedim(1, 0)
        return torch.baddbmm(self.bias_ih[:, None], torch.stack(list(features)), self.weight_ih.mT).float()

    def forward(self, inputs: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """The next state, (parts, count, rows, units) float32; its first part are the outputs.

        Args:
            inputs: (count, rows, gates * units), from ``of_inputs``.
            parts: The state, (parts, count, rows, units).
        """
        hidden, units = torch.baddbmm(self.bias_hh[:, None], parts[0], self.weight_hh.mT).float(), self.units
        if self.kind == "gru":
            reset, update = (inputs[..., : 2 * units] + hidden[..., : 2 * units]).sigmoid().chunk(2, -1)
            new = (inputs[..., 2 * units :] + reset * hidden[..., 2 * units :]).tanh()
            return (new + update * (parts[0] - new))[None]
        enter, forget, new, leave = (inputs + hidden).chunk(4, -1)
        cell = forget.sigmoid() * parts[1] + enter.sigmoid() * new.tanh()
        return torch.stack([leave.sigmoid() * cell.tanh(), cell])

    @property
    def usable_kernels(self) -> CellKernels | None:
        """The kernels, unless cells were replaced, have hooks or other weights than float32."""
        is_plain = type(self) is RecurrentCells and not has_hooks(self) and self.weight_hh.dtype == torch.float32
        return self.kernels if is_plain else None

    def step(
        self, features: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Outputs of each cell, (rows, units), and the next state (rows, state_size).

        Args:
            features: Inputs (rows, inputs), of all cells or of each.
            state: (rows, state_size) float32.
        """
        kernels = self.usable_kernels
        if kernels is not None and not torch.is_grad_enabled():
            return kernels.step(self, features, state)
        parts = self(self.of_inputs(features), self.parts(state))
        return parts[0].unbind(), self.flat(parts)

    def sequence(
        self, trunks: Sequence[nn.Module], rows: torch.Tensor, state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of each cell for several steps, (steps, rows, units).

        Only the products with the state are computed step by step, or by kernels, unless the gradient of ``state`` is
        needed.

        Args:
            trunks: The layers in front, of all cells or of each.
            rows: Their inputs, (steps * rows, n).
            state: (rows, state_size) float32, before the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        kernels = self.usable_kernels
        if kernels is not None and not state.requires_grad:
            return kernels.sequence(self, [_through(trunk, rows) for trunk in trunks], state, active)
        inputs = self.of_inputs([trunk(rows) for trunk in trunks]).unflatten(1, active.shape)
        parts, outputs = self.parts(state), list[torch.Tensor]()
        for t, is_active in enumerate(active):
            parts = self(inputs[:, t], parts)
            outputs.append(parts[0])
            parts = kept(parts, is_active)
        return torch.stack(outputs, 1).unbind()


class RecurrentActorCritic(nn.Module):
    """Like ``ActorCritic``, with a GRU or LSTM as the last hidden layer; actor and critic have a state each.

    Any module with ``recurrent_state_size`` and the same ``forward`` can replace it. Its rows are independent: an
    output depends on the row's observation and state alone, not on other rows, random numbers or earlier calls.
    ``sequence`` is optional, and must give what calls of ``forward`` for each step give.

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened.
        num_outputs: Outputs of the actor: logits, means, or all parameters of Beta distributions.
        hidden_sizes: Units of each hidden layer; the last one is the recurrent layer, one for the actor and one for the
            critic.
        cell: Kind of the recurrent layer.
        gaussian: Append log standard deviations, parameters that do not depend on the observation and start at 0.
        activation: Of the other hidden layers.
        shared_trunk: Whether actor and critic share the layers in front of the recurrent one.
        actor_gain: Of the weights of the actor head.
        post_hidden_sizes: Units of further hidden layers behind the recurrent one, of the actor and of the critic.

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
        post_hidden_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.obs_shape = tuple(obs_shape)
        *sizes, units = layer_sizes(math.prod(self.obs_shape), hidden_sizes, cell)
        self.trunk = hidden_layers(sizes, activation)
        self.critic_trunk = None if shared_trunk else hidden_layers(sizes, activation)
        self.cells = RecurrentCells(cell, sizes[-1], units)
        post_sizes = [units, *post_hidden_sizes]
        self.post, self.critic_post = (hidden_layers(post_sizes, activation) for _ in range(2))
        self.actor = orthogonal(nn.Linear(post_sizes[-1], num_outputs), actor_gain)
        self.critic = orthogonal(nn.Linear(post_sizes[-1], 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None
        self.recurrent_state_size = self.cells.state_size

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step: parameters (rows, n), values (rows,) and the next state (rows, recurrent_state_size).

        Args:
            obs: (rows, *obs_shape).
            state: (rows, recurrent_state_size) float32; 0 where ``obs`` is the first of an episode.
        """
        rows = self._rows(obs)
        outputs, next_state = self.cells.step([trunk(rows) for trunk in self._trunks], state)
        return *self._heads(*outputs), next_state

    def sequence(
        self, obs: torch.Tensor, state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several steps: parameters (steps, rows, n) and values (steps, rows).

        Args:
            obs: (steps, rows, *obs_shape).
            state: (rows, recurrent_state_size) float32, before the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        rows = self._rows(obs.flatten(0, 1))
        return self._heads(*self.cells.sequence(self._trunks, rows, state, active))

    @property
    def _trunks(self) -> list[nn.Module]:
        return [self.trunk] if self.critic_trunk is None else [self.trunk, self.critic_trunk]

    def _rows(self, obs: torch.Tensor) -> torch.Tensor:
        """Inputs (rows, n) of the trunks."""
        return obs.flatten(1)

    def _heads(self, of_actor: torch.Tensor, of_critic: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters (…, n) and values (…) of the cells' outputs (…, units) each."""
        outputs, values = self.actor(self.post(of_actor)), self.critic(self.critic_post(of_critic)).squeeze(-1)
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs, values


class RecurrentTower(nn.Module):
    """Like ``Tower``, with a GRU or LSTM as the last hidden layer: an actor, or a central critic, with memory.

    Args:
        inputs: Length of a row.
        outputs: Of the head.
        hidden_sizes: Units of each hidden layer, the last one of which is the recurrent layer.
        cell: Kind of the recurrent layer.
        head_gain: Of the orthogonal weights of the head.
        gaussian: Append log standard deviations, parameters that do not depend on the row and start at 0.
        activation: Of the other hidden layers.
        post_hidden_sizes: Units of further hidden layers behind the recurrent one.

    Raises:
        ConfigError: ``hidden_sizes`` is empty.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden_sizes: Sequence[int],
        *,
        cell: CellKind,
        head_gain: float,
        gaussian: bool = False,
        activation: Activation = "tanh",
        post_hidden_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        *sizes, units = layer_sizes(inputs, hidden_sizes, cell)
        self.trunk = hidden_layers(sizes, activation)
        self.cells = RecurrentCells(cell, sizes[-1], units, count=1)
        self.post = hidden_layers([units, *post_hidden_sizes], activation)
        self.head = orthogonal(nn.Linear([units, *post_hidden_sizes][-1], outputs), head_gain)
        self.log_std = nn.Parameter(torch.zeros(outputs)) if gaussian else None
        self.recurrent_state_size = self.cells.state_size

    def forward(self, rows: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: outputs (rows, n), followed by the log standard deviations, and the next state.

        Args:
            rows: (rows, inputs) float32.
            state: (rows, recurrent_state_size) float32; 0 where the row is the first of an episode.
        """
        (features,), next_state = self.cells.step([self.trunk(rows)], state)
        return self._of_head(features), next_state

    def sequence(self, rows: torch.Tensor, state: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Several steps: outputs (steps, rows, n), as of ``forward``.

        Args:
            rows: (steps, rows, inputs) float32.
            state: (rows, recurrent_state_size) float32, before the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        (features,) = self.cells.sequence([self.trunk], rows.flatten(0, 1), state, active)
        return self._of_head(features)

    def _of_head(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.post(features))
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs


def _through(trunk: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A trunk's outputs for rows (n, inputs), whose backward pass is by the kernels of layers.py where they apply."""
    mixed = torch.is_autocast_enabled(rows.device.type)
    fits = rows.dtype == torch.float32 and not mixed and is_supported_mlp(trunk)
    outputs: torch.Tensor = through(trunk, rows) if fits else trunk(rows)
    return outputs


def recurrent_weights(sizes: Sequence[int], cell: CellKind, count: int = 2) -> list[tuple[int, ...]]:
    """Shapes of the weights of RecurrentCells, behind layers of these sizes, inputs first, of which it is the last."""
    rows = GATES[cell] * sizes[-1]
    return [(count, rows, sizes[-2]), (count, rows, sizes[-1])]


def layer_sizes(inputs: int, hidden_sizes: Sequence[int], cell: CellKind) -> list[int]:
    """Inputs of each layer and outputs of the last, the recurrent one; ConfigError unless there is one."""
    if not hidden_sizes:
        raise ConfigError(f"hidden_sizes is {tuple(hidden_sizes)}; network {cell!r} needs at least one size")
    return [inputs, *hidden_sizes]


def default_state_size(kind: str, hidden_sizes: Sequence[int]) -> int:
    """Numbers in the state of a row of each cell of a default network of a kind; 0 if it is not recurrent."""
    return next((parts * hidden_sizes[-1] for cell, parts in PARTS.items() if cell == kind and hidden_sizes), 0)
