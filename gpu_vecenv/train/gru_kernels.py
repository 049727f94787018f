"""GRU cells over whole sequences by the kernels of ``cuda/learner/gru.cu``; all other products are torch's.

Shapes: L steps, R rows, n inputs, u units of a cell, C cells: one, or two, the actor's and the critic's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu_vecenv.compile.backends import LaunchShape, TensorCores
from gpu_vecenv.compile.function_manager import FunctionManager, Launch
from gpu_vecenv.declare.field import boolean, f32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.policy import Precision

GATES = 3  # the same as GATES in gru.cu
KINDS = 4  # of products, those of `Kind` in gru.cu, which asserts their bytes
WARPS = 8  # of a block, about
# Where the gates of inputs and of states begin in a row of gradients, of each cell, in gates, and how far they are
# moved on from the order r, z, n: see place_of in gru.cu.
INPUT_STARTS, INPUT_SHIFTS = (1, 4), (0, 1)
STATE_STARTS, STATE_SHIFTS = (0, 5), (1, 0)
MAX_THREADS = 512  # of a multiprocessor, as a thread needs about 128 registers, or with two tiles 256
BUFFERS = (4, 2, 1)  # of tiles of factors in shared memory: the more, the fewer barriers

_COMMON = (
    Array("inputs", None, const=True, strided=True),
    Scalar("cell_stride", i64),  # elements from the inputs of one cell to the other's
    Scalar("row_stride", i64),
    Array("weights", f32, const=True),
    Array("input_biases", f32, const=True),
    Array("state_biases", f32, const=True),
    Array("active", boolean, const=True, optional=True, shape=("steps", "rows")),
    Scalar("steps", i64),
    Scalar("rows", i64),
)
GRU_FORWARD = KernelSignature(
    "gru_forward",
    (
        *_COMMON,
        Array("states", f32, const=True),
        Array("outputs", None),
        Array("previous", None, optional=True),
        Array("next_states", f32, optional=True),
    ),
)
GRU_BACKWARD = KernelSignature(
    "gru_backward",
    (
        *_COMMON,
        Array("previous", None, const=True),
        Array("first_gradients", None, const=True, optional=True),
        Array("second_gradients", None, const=True, optional=True),
        Array("gate_gradients", None),
        Array("sums", f32),
    ),
)
_TYPES: dict[Precision, str] = {"float32": "Float32", "tf32": "Tf32", "bfloat16": "Bfloat16"}


def row_warps(units: int) -> int:
    """Warps of a block that have the same units, each 16 rows of its own."""
    return max(1, WARPS // -(-units // 16))


def threads_of(units: int) -> int:
    """Threads of a block."""
    return 32 * -(-units // 16) * row_warps(units)


def shared_bytes(units: int, precision: Precision, warp_tiles: int = 1, buffers: int = 1) -> int:
    """Shared memory of a block: the weights and biases of a cell, and tiles of its rows."""
    columns, rows = 16 * -(-units // 16), 16 * warp_tiles * row_warps(units)
    biases = 4 * KINDS * columns
    if precision == "bfloat16":
        return 2 * (GATES * columns + buffers * rows) * (columns + 8) + biases
    return 4 * (GATES * columns * (columns + 4) + buffers * columns * (rows + 4)) + biases


def blocks_of(
    units: int, precision: Precision, cores: TensorCores, warp_tiles: int = 1, buffers: int = BUFFERS[-1]
) -> int:
    """Blocks that a multiprocessor holds at a time; 0 if none fits."""
    size = shared_bytes(units, precision, warp_tiles, buffers)
    if size > cores.block_shared_bytes:
        return 0
    of_threads = max(1, MAX_THREADS // warp_tiles // threads_of(units))
    return min(cores.shared_bytes // (size + cores.reserved_shared_bytes), of_threads)


def buffers_of(units: int, precision: Precision, cores: TensorCores, warp_tiles: int = 1) -> int:
    """The most buffers with which a multiprocessor holds as many blocks as with one."""
    most = blocks_of(units, precision, cores, warp_tiles)
    return next(n for n in BUFFERS if blocks_of(units, precision, cores, warp_tiles, n) == most)


def gru_source(units: int, precision: Precision, cores: TensorCores, warp_tiles: int = 1, count: int = 2) -> str:
    """The constants of so many cells in C++."""
    buffers = buffers_of(units, precision, cores, warp_tiles)
    numbers = {
        "CELLS": count,
        "UNITS": units,
        "ROW_WARPS": row_warps(units),
        "WARP_TILES": warp_tiles,
        "BUFFERS": buffers,
        "SHARED_BYTES": shared_bytes(units, precision, warp_tiles, buffers),
        "MIN_BLOCKS": blocks_of(units, precision, cores, warp_tiles),
    }
    lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    opening = [f"#define BFLOAT16 {int(precision == 'bfloat16')}", f"#define PRECISION {_TYPES[precision]}"]
    return "\n".join([*opening, "namespace gru {", *lines, "}"]) + "\n"


class GateOrder:
    """Indices of rows that bring gates, of ``units`` rows each, from one order to another.

    Attributes:
        inputs: The rows of the inputs' weights (C * 3 u,) in the order of the gradients of their gates.
        weight_ih, weight_hh: From the gradients of weights in that order, and in that of each cell's states' gates, to
            the order of the parameters, (C * 3 u,).
        bias_ih, bias_hh: The same of biases, from the sums (C * 4 u,).
    """

    def __init__(self, units: int, count: int, device: torch.device) -> None:
        def rows(starts: Sequence[int], shifts: Sequence[int]) -> torch.Tensor:
            places = zip(starts, shifts, range(count), strict=False)
            gates = torch.tensor(
                [start + (gate + shift) % GATES for start, shift, _ in places for gate in range(GATES)]
            )
            return (gates[:, None] * units + torch.arange(units)).flatten().to(device)

        side_by_side = (0, GATES)
        self.inputs = rows(side_by_side, [-shift for shift in INPUT_SHIFTS])
        self.weight_ih, self.weight_hh = rows(side_by_side, INPUT_SHIFTS), rows(side_by_side, STATE_SHIFTS)
        self.bias_ih, self.bias_hh = rows(INPUT_STARTS, INPUT_SHIFTS), rows(STATE_STARTS, STATE_SHIFTS)


class GruProgram:
    """The kernels whose warps have so many tiles of 16 rows, one or two. The bits of a row do not depend on it."""

    def __init__(
        self, functions: FunctionManager, units: int, precision: Precision, count: int, warp_tiles: int
    ) -> None:
        cores = functions.backend.tensor_cores
        assert cores is not None
        blocks = blocks_of(units, precision, cores, warp_tiles)
        buffers = buffers_of(units, precision, cores, warp_tiles)
        self.warp_tiles = warp_tiles
        self._count, self._rows, self._threads = count, 16 * warp_tiles * row_warps(units), threads_of(units)
        self._shared_bytes = shared_bytes(units, precision, warp_tiles, buffers)
        self.most_blocks = max(count, cores.multiprocessors * blocks // count * count)
        self._program = functions.compile(
            cuda_folder() / "learner/gru.cu",
            kernels=[GRU_FORWARD, GRU_BACKWARD],
            constants=gru_source(units, precision, cores, warp_tiles, count),
        )
        self._launches: dict[tuple[str, int], Launch] = {}

    def _tiles(self, rows: int) -> int:
        """Tiles of so many rows, of all cells."""
        return self._count * -(-rows // self._rows)

    def waves(self, rows: int) -> int:
        """Tiles that the busiest blocks take one after the other."""
        return -(-self._tiles(rows) // self.most_blocks)

    def launch(self, kernel: str, rows: int) -> Launch:
        """The launch of a kernel for so many rows."""
        blocks = max(self._count, min(self.most_blocks, self._tiles(rows)))
        if (kernel, blocks) not in self._launches:
            shape = LaunchShape(
                blocks * self._threads, threads_per_block=self._threads, shared_bytes=self._shared_bytes
            )
            self._launches[kernel, blocks] = self._program.prepare(kernel, shape)
        return self._launches[kernel, blocks]


class GruKernels:
    """GRU cells over sequences: forward and backward pass in one launch each, whatever the number of steps.

    Of a row, the bits of a step depend on its inputs and the state before it alone: they are the same in a rollout, one
    step a launch, and in a sequence. What inputs add to the gates is torch's product, whose rounding may depend on the
    number of rows.

    Args:
        functions: The FunctionManager of the tensors' device.
        units: Of a cell.
        precision: Of the products. With "bfloat16", inputs, outputs and gradients are stored so; states are float32.
        count: C, one or two.
    """

    def __init__(self, functions: FunctionManager, units: int, precision: Precision, count: int = 2) -> None:
        self.units, self.count = units, count
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.order = GateOrder(units, count, functions.device)
        cores = functions.backend.tensor_cores
        assert cores is not None
        # Where shared memory holds one block, a second tile of its warps hides the latency of the first one's loads;
        # where it holds more, other blocks do. All are compiled here, as graphs cannot be captured while one is.
        alone = blocks_of(units, precision, cores) == 1 and blocks_of(units, precision, cores, 2) == 1
        numbers = (1, 2) if alone and threads_of(units) <= MAX_THREADS // 2 else (1,)
        self.programs = [GruProgram(functions, units, precision, count, number) for number in numbers]

    def program_of(self, rows: int) -> GruProgram:
        """The program that takes the least time for so many rows."""
        # A step of two tiles takes about 1.5 times as long.
        return min(self.programs, key=lambda program: program.waves(rows) * (1 + program.warp_tiles))

    def forward(
        self,
        inputs: torch.Tensor,
        cells: Sequence[torch.Tensor],
        state: torch.Tensor,
        active: torch.Tensor | None,
        *,
        previous: torch.Tensor | None = None,
        next_state: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The outputs (C, L, R, u) of all steps, of ``dtype``.

        Args:
            inputs: What inputs add to the gates, without biases, (C, L, R, 3 u) of ``dtype``: of a cell and step,
                rows with one stride.
            cells: Weights (C, 3 u, u) of the state; biases (C, 3 u) of inputs and of states.
            state: (R, C u) float32, before the first step.
            active: (L, R) bool; the state after a step in which it is False is 0. None of one step alone.
            previous: (C, L, R, u) of ``dtype``; where the state before each step is written.
            next_state: (R, C u) float32; where the state after the last step is written, active or not.
        """
        _, steps, rows, _ = inputs.shape
        outputs = torch.empty((self.count, steps, rows, self.units), dtype=self.dtype, device=inputs.device)
        if rows:
            self.program_of(rows).launch("gru_forward", rows)(
                **self._common(inputs, cells, active),
                states=state,
                outputs=outputs,
                previous=previous,
                next_states=next_state,
            )
        return outputs

    def backward(
        self,
        inputs: torch.Tensor,
        cells: Sequence[torch.Tensor],
        active: torch.Tensor,
        previous: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients (L, R, 4 C u) of the gates, of ``dtype``, and their sums over steps and rows, (4 C u,) float32.

        Of the first cell those with respect to what the state adds to n, of r, of z, and with respect to what the
        input adds to n; then of the second one to n by the input, of r, of z, and to n by the state.

        Args:
            inputs: As of ``forward``, like the next three.
            cells: Weights and biases.
            active: Flags.
            previous: States that ``forward`` wrote.
            gradients: With respect to the outputs of each cell, (L, R, u) of ``dtype``; None: 0.
        """
        _, steps, rows, _ = inputs.shape
        columns = self.count * KINDS * self.units
        of_gates = torch.empty((steps, rows, columns), dtype=self.dtype, device=inputs.device)
        sums = torch.empty((-(-rows // 16), columns), device=inputs.device)
        if rows:
            self.program_of(rows).launch("gru_backward", rows)(
                **self._common(inputs, cells, active),
                previous=previous,
                first_gradients=gradients[0],
                second_gradients=gradients[-1],
                gate_gradients=of_gates,
                sums=sums,
            )
        return of_gates, sums.sum(0)

    def _common(
        self, inputs: torch.Tensor, cells: Sequence[torch.Tensor], active: torch.Tensor | None
    ) -> dict[str, Any]:
        weights, input_biases, state_biases = cells
        _, steps, rows, gates = inputs.shape
        # One axis for steps and rows: the stride of an axis of length 1 is arbitrary.
        flat = inputs.view(self.count, steps * rows, gates)
        return {
            "inputs": flat,
            "cell_stride": flat.stride(0),
            "row_stride": flat.stride(1),
            "weights": weights,
            "input_biases": input_biases,
            "state_biases": state_biases,
            "active": active,
            "steps": steps,
            "rows": rows,
        }
