"""GRU and LSTM cells of any size: of each step one matrix product by torch, and one kernel for all that is elementwise.

The kernels are those of ``cuda/learner/recurrent_cells.cu``. Cells that fit those of ``gru.py`` are faster by these.

Shapes: L steps, R rows, n inputs, u units of a cell, C cells, g gates: three of a GRU, four of an LSTM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch
from gpu_vecenv.declare.field import boolean, f32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.gru import GruLayer, of_inputs, recurrent_cells, why_not_gru
from gpu_vecenv.train.layerwise import multiply
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.recurrent import CellKernels, CellKind, RecurrentCells

_COMMON = (
    Array("inputs", None, const=True, strided=True),
    Scalar("cell_stride", i64),  # elements from the inputs of one cell to the next one's
    Scalar("row_stride", i64),
    Array("input_biases", f32, const=True),
    Array("state_biases", f32, const=True),
    Array("active", boolean, const=True, optional=True, shape=("steps", "rows")),
    Scalar("step", i64),
    Scalar("steps", i64),
    Scalar("rows", i64),
)
CELLS_FORWARD = KernelSignature(
    "cells_forward",
    (
        *_COMMON,
        Array("hidden", None, const=True),
        Array("states", f32, const=True),
        Array("next_states", f32),
        Array("outputs", None),
        Array("previous", None, optional=True),
        Array("previous_cells", f32, optional=True),
    ),
)
CELLS_BACKWARD = KernelSignature(
    "cells_backward",
    (
        *_COMMON,
        Array("hidden", None),
        Array("previous", None, const=True),
        Array("previous_cells", f32, const=True, optional=True),
        Array("output_gradients", None, const=True),
        Array("products", None, const=True, optional=True),
        Array("carried", f32),
        Array("gate_gradients", None),
    ),
)


def why_not_cells(policy: Policy, functions: FunctionManager) -> str | None:
    """Why torch computes recurrent layers step by step, in a few words; None if a ``CellLayer`` each can."""
    if sum(layer.state_size for layer in recurrent_cells(policy)) != policy.recurrent_state_size:
        return "not the default network"
    return None if _computes_cells(functions) else "no GPU"


def _computes_cells(functions: FunctionManager) -> bool:
    return functions.device.type != "cpu" or functions.backend.tensor_cores is not None


def cell_kernels(functions: FunctionManager, cells: RecurrentCells, precision: Precision) -> CellKernels | None:
    """The fastest kernels of a recurrent layer; None where there are none, on a CPU.

    Args:
        functions: The FunctionManager of the tensors' device.
        cells: The layer.
        precision: Of the matrix products.
    """
    if not _computes_cells(functions):
        return None
    if why_not_gru([cells], functions, precision) is None:
        return GruLayer(functions, cells.units, precision, cells.count)
    return CellLayer(functions, cells, precision)


def cells_source(kind: CellKind, units: int, count: int, precision: Precision) -> str:
    """The constants of so many cells in C++."""
    return (
        f"#define BFLOAT16 {int(precision == 'bfloat16')}\n"
        f"constexpr bool LSTM = {str(kind == 'lstm').lower()};\n"
        f"constexpr int UNITS = {units}, CELLS = {count};\n"
    )


class CellLayer:
    """Cells of which a step is one matrix product and one kernel, forward and back.

    All that inputs add to the gates, and all gradients of parameters and inputs, are products for all steps at once.
    Of a row, the bits of the elementwise part depend neither on the rows beside it nor on the number of steps; the
    rounding of torch's products may depend on the number of rows.

    Args:
        functions: The FunctionManager of the tensors' device.
        cells: The cells.
        precision: Of the products. "tf32" is that of torch's products while they are launched. With "bfloat16",
            factors, results of products, and outputs are stored so; states and gates are float32.
    """

    def __init__(self, functions: FunctionManager, cells: RecurrentCells, precision: Precision) -> None:
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._program = functions.compile(
            cuda_folder() / "learner/recurrent_cells.cu",
            kernels=[CELLS_FORWARD, CELLS_BACKWARD],
            constants=cells_source(cells.kind, cells.units, cells.count, precision),
        )
        self._launches: dict[tuple[str, int], Launch] = {}

    def launch(self, kernel: str, items: int, **arguments: object) -> None:
        """Launch a kernel for so many units of cells in rows."""
        if items == 0:
            return
        if (kernel, items) not in self._launches:
            self._launches[kernel, items] = self._program.prepare(kernel, LaunchShape(items))
        self._launches[kernel, items](**arguments)

    def step(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """See ``CellKernels``."""
        weight_ih, weight_hh, *biases = (
            p.detach() for p in (cells.weight_ih, cells.weight_hh, cells.bias_ih, cells.bias_hh)
        )
        inputs = of_inputs([x.detach().to(self.dtype) for x in features], weight_ih)
        state = state.contiguous()
        hidden = torch.bmm(cells.parts(state)[0].to(self.dtype), weight_hh.to(self.dtype).mT)
        outputs, next_state = hidden.new_empty((*hidden.shape[:2], cells.units)), torch.empty_like(state)
        self.launch(
            "cells_forward",
            outputs.numel(),
            **_common(inputs, biases, None, 1),
            step=0,
            hidden=hidden,
            states=state,
            next_states=next_state,
            outputs=outputs,
            previous=None,
            previous_cells=None,
        )
        return outputs.unbind(), next_state

    def sequence(
        self, cells: RecurrentCells, features: Sequence[torch.Tensor], state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See ``CellKernels``."""
        parameters = cells.weight_ih, cells.weight_hh, cells.bias_ih, cells.bias_hh
        own = [x.to(self.dtype) for x in features]
        outputs: tuple[torch.Tensor, ...] = _Sequence.apply(  # type: ignore[no-untyped-call]
            self, cells, state.contiguous(), active.contiguous(), *parameters, *own
        )
        return outputs


def _common(
    inputs: torch.Tensor, biases: Sequence[torch.Tensor], active: torch.Tensor | None, steps: int
) -> dict[str, Any]:
    """Arguments of both kernels; inputs are (C, L R, g u)."""
    return {
        "inputs": inputs,
        "cell_stride": inputs.stride(0),
        "row_stride": inputs.stride(1),
        "input_biases": biases[0],
        "state_biases": biases[1],
        "active": active,
        "steps": steps,
        "rows": inputs.shape[1] // steps,
    }


class _Sequence(torch.autograd.Function):
    """See ``CellLayer.sequence``. Second derivatives are not supported."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: CellLayer,
        cells: RecurrentCells,
        state: torch.Tensor,
        active: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh, *features = tensors
        inputs, weights = of_inputs(features, weight_ih), weight_hh.to(layer.dtype).mT
        outputs = inputs.new_empty((cells.count, *active.shape, cells.units))
        previous, next_state = torch.empty_like(outputs), torch.empty_like(state)
        previous_cells = torch.empty_like(outputs, dtype=state.dtype) if cells.kind == "lstm" else None
        previous[:, 0] = cells.parts(state)[0]
        common = _common(inputs, (bias_ih, bias_hh), active, len(active))
        for step in range(len(active)):
            layer.launch(
                "cells_forward",
                outputs[:, 0].numel(),
                **common,
                step=step,
                hidden=torch.bmm(previous[:, step], weights),
                states=state,
                next_states=next_state,
                outputs=outputs,
                previous=previous,
                previous_cells=previous_cells,
            )
            state = next_state
        ctx.layer, ctx.kind = layer, cells.kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs, previous, previous_cells, active, *tensors)
        return outputs.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs, previous, previous_cells, active, weight_ih, weight_hh, bias_ih, bias_hh, *features = ctx.saved_tensors
        layer, weights, flat_previous = ctx.layer, weight_hh.to(ctx.layer.dtype), previous.flatten(1, 2)
        given = [previous[0].new_zeros(previous.shape[1:]) if g is None else g for g in gradients]
        of_outputs = (given[0][None] if len(given) == 1 else torch.stack(given)).contiguous()
        # The states' products again, in one for all steps: it takes less time than to keep and read them.
        hidden = torch.bmm(flat_previous, weights.mT)
        of_gates = inputs.new_empty((len(active), inputs.shape[1] // len(active), *weight_hh.shape[:2]))
        of_states = of_gates.movedim(2, 0) if ctx.kind == "lstm" else hidden.view(-1, *active.shape, hidden.shape[2])
        carried = torch.empty(previous[:, 0].shape, device=inputs.device)
        common, products = _common(inputs, (bias_ih, bias_hh), active, len(active)), None
        for step in reversed(range(len(active))):
            layer.launch(
                "cells_backward",
                carried.numel(),
                **common,
                step=step,
                hidden=hidden,
                previous=previous,
                previous_cells=previous_cells,
                output_gradients=of_outputs,
                products=products,
                carried=carried,
                gate_gradients=of_gates,
            )
            if step > 0:
                products = torch.bmm(of_states[:, step], weights)
        of_gates, of_states = of_gates.flatten(0, 1), of_states.flatten(1, 2)
        of_weight_ih, of_weight_hh = torch.empty_like(weight_ih), torch.empty_like(weight_hh)
        for part, rows, out in zip(of_states, flat_previous, of_weight_hh, strict=True):
            multiply(part.T, rows, out=out)
        parts = of_gates.flatten(1).chunk(len(features), 1)  # of all cells, or of each
        of_parts = of_weight_ih.flatten(0, 1).chunk(len(features))
        for part, rows, out in zip(parts, features, of_parts, strict=True):
            multiply(part.T, rows, out=out)
        of_features: list[torch.Tensor | None] = [None] * len(features)
        if any(ctx.needs_input_grad[-len(features) :]):
            input_weights = weight_ih.to(layer.dtype).flatten(0, 1).chunk(len(features))
            of_features = [torch.mm(part, weight) for part, weight in zip(parts, input_weights, strict=True)]
        of_bias_ih, of_bias_hh = of_gates.sum(0, dtype=torch.float32), of_states.sum(1, dtype=torch.float32)
        return (None, None, None, None, of_weight_ih, of_weight_hh, of_bias_ih, of_bias_hh, *of_features)
