"""The GRU of the default recurrent network by the kernels of ``gru_kernels.py``, with its gradients.

Shapes: L steps, R rows, n inputs, u units of a cell, C cells: one, or two, the actor's and the critic's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.train.gru_kernels import GATES, INPUT_SHIFTS, INPUT_STARTS, STATE_STARTS, GruKernels, blocks_of
from gpu_vecenv.train.layerwise import multiply
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.recurrent import RecurrentCells


def recurrent_cells(policy: Policy) -> list[RecurrentCells]:
    """The recurrent layers of a policy: one, or that of an actor and that of a central critic."""
    return [module for module in policy.modules() if isinstance(module, RecurrentCells)]


def why_not_gru(layers: Sequence[RecurrentCells], functions: FunctionManager, precision: Precision) -> str | None:
    """Why no ``GruLayer`` each computes recurrent layers, in a few words; None if they can. See ``why_not_cells``."""
    cores = functions.backend.tensor_cores
    if cores is None:
        return "no tensor cores"
    if any(layer.count > len(INPUT_SHIFTS) for layer in layers):
        return "more than two cells side by side"
    if any(layer.kind != "gru" for layer in layers):
        return "an LSTM"
    if any(layer.units % 4 for layer in layers):
        return "units that are no multiple of 4"
    fits = all(blocks_of(layer.units, precision, cores) for layer in layers)
    return None if fits else "a GRU too large for shared memory"


class GruLayer:
    """GRU cells whose products with the state are kernels; those with the inputs, and of the weights, are torch's.

    Args:
        functions: The FunctionManager of the tensors' device.
        units: Of a cell, see ``why_not_gru``.
        precision: Of the products. "tf32" is that of torch's products while they are launched.
        count: C, one or two.
    """

    def __init__(self, functions: FunctionManager, units: int, precision: Precision, count: int = 2) -> None:
        self.kernels = GruKernels(functions, units, precision, count)

    def step(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """See ``CellKernels``."""
        own = [x.detach().to(self.kernels.dtype) for x in features]
        inputs = of_inputs(own, cells.weight_ih.detach()).unflatten(1, (1, -1))
        parameters = [p.detach() for p in (cells.weight_hh, cells.bias_ih, cells.bias_hh)]
        next_state = torch.empty_like(state)
        outputs = self.kernels.forward(inputs, parameters, state.contiguous(), None, next_state=next_state)
        return outputs[:, 0].unbind(), next_state

    def sequence(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See ``CellKernels``."""
        parameters = cells.weight_ih, cells.weight_hh, cells.bias_ih, cells.bias_hh
        own = [x.to(self.kernels.dtype) for x in features]
        outputs: tuple[torch.Tensor, ...] = _Sequence.apply(  # type: ignore[no-untyped-call]
            self.kernels, state.contiguous(), active.contiguous(), *parameters, *own
        )
        return outputs


def of_inputs(features: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """The products (C, rows, 3 u) of inputs (rows, n), of all cells or of each, with weights (C, 3 u, n)."""
    weight = weight.to(features[0].dtype)
    if len(features) == 1:
        of_all: torch.Tensor = torch.mm(features[0], weight.flatten(0, 1).T)
        return of_all.view(len(of_all), *weight.shape[:2]).movedim(1, 0)
    out = features[0].new_empty((len(weight), len(features[0]), weight.shape[1]))
    for cell, rows in enumerate(features):
        torch.mm(rows, weight[cell].T, out=out[cell])
    return out


class _Sequence(torch.autograd.Function):
    """See ``GruLayer.sequence``. Second derivatives are not supported."""

    @staticmethod
    def forward(
        ctx: Any, kernels: GruKernels, state: torch.Tensor, active: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh, *features = tensors
        inputs = of_inputs(features, weight_ih).unflatten(1, active.shape)
        cells = weight_hh, bias_ih, bias_hh
        previous = torch.empty((kernels.count, *active.shape, kernels.units), dtype=kernels.dtype, device=state.device)
        outputs = kernels.forward(inputs, cells, state, active, previous=previous)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs, previous, active, *tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs, previous, active, weight_ih, weight_hh, bias_ih, bias_hh, *features = ctx.saved_tensors
        given = [g if g is None else g.contiguous() for g in gradients]
        kernels, units, size = ctx.kernels, ctx.kernels.units, GATES * ctx.kernels.units
        of_gates, sums = kernels.backward(inputs, (weight_hh, bias_ih, bias_hh), active, previous, given)
        of_gates, order = of_gates.flatten(0, 1), kernels.order
        # Those of the inputs' gates of both cells are neighbours, and those of the states' gates of each.
        of_inputs = of_gates[:, INPUT_STARTS[0] * units :][:, : kernels.count * size]
        parts = of_inputs.split(kernels.count * size // len(features), 1)
        of_weight_ih, of_weight_hh = torch.empty_like(weight_ih), torch.empty_like(weight_hh)
        rows_of_features = of_weight_ih.view(len(features), -1, weight_ih.shape[2])
        for part, rows, out in zip(parts, features, rows_of_features, strict=True):
            multiply(part.T, rows, out=out)
        for start, rows, out in zip(STATE_STARTS, previous.flatten(1, 2), of_weight_hh, strict=False):
            multiply(of_gates[:, start * units :][:, :size].T, rows, out=out)
        of_features: list[torch.Tensor | None] = [None] * len(features)
        if any(ctx.needs_input_grad[-len(features) :]):
            weights = weight_ih.flatten(0, 1).index_select(0, order.inputs).to(kernels.dtype)
            of_parts = weights.split(len(weights) // len(features))
            of_features = [torch.mm(part, weight) for part, weight in zip(parts, of_parts, strict=True)]
        of_cells = [
            of_weight_ih.flatten(0, 1).index_select(0, order.weight_ih).view_as(weight_ih),
            of_weight_hh.flatten(0, 1).index_select(0, order.weight_hh).view_as(weight_hh),
            sums.index_select(0, order.bias_ih).view_as(bias_ih),
            sums.index_select(0, order.bias_hh).view_as(bias_hh),
        ]
        return (None, None, None, *of_cells, *of_features)
