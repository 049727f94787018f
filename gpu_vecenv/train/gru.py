"""The GRU of the default recurrent network by the kernels of ``gru_kernels.py``, with its gradients.

Shapes: L steps, R rows, n inputs, u units of a cell. There are two cells, the actor's and the critic's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.train.gru_kernels import CELLS, GATES, GruKernels, blocks_of
from gpu_vecenv.train.layerwise import multiply
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentCells


def why_not_gru(policy: Policy, functions: FunctionManager, precision: Precision) -> str | None:
    """Why torch computes a recurrent layer step by step, in a few words; None if ``GruLayer`` can."""
    network, cores = policy.network, functions.backend.tensor_cores
    if not isinstance(network, RecurrentActorCritic):
        return "not the default network"
    if cores is None:
        return "no tensor cores"
    if network.cells.kind != "gru":
        return "an LSTM"
    if network.cells.units % 4:
        return "units that are no multiple of 4"
    return None if blocks_of(network.cells.units, precision, cores) else "a GRU too large for shared memory"


class GruLayer:
    """GRU cells whose products with the state are kernels; those with the inputs, and of the weights, are torch's.

    Args:
        functions: The FunctionManager of the tensors' device.
        units: Of a cell, see ``why_not_gru``.
        precision: Of the products. "tf32" is that of torch's products while they are launched.
    """

    def __init__(self, functions: FunctionManager, units: int, precision: Precision) -> None:
        self.kernels = GruKernels(functions, units, precision)

    def step(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs (2, R, u) of one step, and the next state (R, 2 u) float32. Without gradients.

        Args:
            cells: The cells.
            features: Inputs (R, n), of both cells or of each.
            state: (R, 2 u) float32.
        """
        own = [x.detach().to(self.kernels.dtype) for x in features]
        inputs = of_inputs(own, cells.weight_ih.detach()).unflatten(1, (1, -1))
        parameters = [p.detach() for p in (cells.weight_hh, cells.bias_ih, cells.bias_hh)]
        next_state = torch.empty_like(state)
        outputs = self.kernels.forward(inputs, parameters, state.contiguous(), None, next_state=next_state)
        return outputs[:, 0], next_state

    def sequence(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs (L, R, u) of each cell.

        Args:
            cells: The cells.
            features: Inputs (L * R, n), of both cells or of each.
            state: (R, 2 u) float32, before the first step; it gets no gradient.
            active: (L, R) bool; the state after a step in which it is False is 0.
        """
        parameters = cells.weight_ih, cells.weight_hh, cells.bias_ih, cells.bias_hh
        own = [x.to(self.kernels.dtype) for x in features]
        outputs: tuple[torch.Tensor, torch.Tensor] = _Sequence.apply(  # type: ignore[no-untyped-call]
            self.kernels, state.contiguous(), active.contiguous(), *parameters, *own
        )
        return outputs


def of_inputs(features: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """The products (2, rows, 3 u) of inputs (rows, n), of both cells or of each, with weights (2, 3 u, n)."""
    weight = weight.to(features[0].dtype)
    if len(features) == 1:
        both: torch.Tensor = torch.mm(features[0], weight.flatten(0, 1).T)
        return both.view(len(both), CELLS, weight.shape[1]).movedim(1, 0)
    out = features[0].new_empty((CELLS, len(features[0]), weight.shape[1]))
    for cell, rows in enumerate(features):
        torch.mm(rows, weight[cell].T, out=out[cell])
    return out


class _Sequence(torch.autograd.Function):
    """See ``GruLayer.sequence``. Second derivatives are not supported."""

    @staticmethod
    def forward(
        ctx: Any, kernels: GruKernels, state: torch.Tensor, active: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_ih, weight_hh, bias_ih, bias_hh, *features = tensors
        inputs = of_inputs(features, weight_ih).unflatten(1, active.shape)
        cells = weight_hh, bias_ih, bias_hh
        previous = torch.empty((CELLS, *active.shape, kernels.units), dtype=kernels.dtype, device=state.device)
        outputs = kernels.forward(inputs, cells, state, active, previous=previous)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs, previous, active, *tensors)
        return outputs[0], outputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs, previous, active, weight_ih, weight_hh, bias_ih, bias_hh, *features = ctx.saved_tensors
        given = [g if g is None else g.contiguous() for g in gradients]
        kernels, units = ctx.kernels, ctx.kernels.units
        of_gates, sums = kernels.backward(inputs, (weight_hh, bias_ih, bias_hh), active, previous, given)
        of_gates, size = of_gates.flatten(0, 1), GATES * units
        # Of the inputs, in the order r, z, n of the actor's cell and n, r, z of the critic's, without a gap; of the
        # states of each cell, n, r, z and r, z, n.
        of_inputs, of_states = of_gates[:, units : units + CELLS * size], (of_gates[:, :size], of_gates[:, -size:])
        parts = of_inputs.split(CELLS * size // len(features), 1)
        of_weight_ih, of_weight_hh = torch.empty_like(weight_ih), torch.empty_like(weight_hh)
        rows_of_features = of_weight_ih.view(len(features), -1, weight_ih.shape[2])
        for part, rows, out in zip(parts, features, rows_of_features, strict=True):
            multiply(part.T, rows, out=out)
        for part, rows, out in zip(of_states, previous.flatten(1, 2), of_weight_hh, strict=True):
            multiply(part.T, rows, out=out)
        of_features: list[torch.Tensor | None] = [None] * len(features)
        if ctx.needs_input_grad[-1]:
            weights = torch.cat([weight_ih[0], weight_ih[1].roll(units, 0)]).to(kernels.dtype)
            of_parts = weights.split(len(weights) // len(features))
            of_features = [torch.mm(part, weight) for part, weight in zip(parts, of_parts, strict=True)]
        of_cells = [
            torch.stack([of_weight_ih[0], of_weight_ih[1].roll(-units, 0)]),
            torch.stack([of_weight_hh[0].roll(-units, 0), of_weight_hh[1]]),
            torch.stack([sums[units : units + size], sums[units + size : -units].roll(-units)]),
            torch.stack([sums[:size].roll(-units), sums[-size:]]),
        ]
        return (None, None, None, *of_cells, *of_features)
