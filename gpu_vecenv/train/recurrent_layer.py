"""RecurrentLayer: the GRU or LSTM of the default recurrent networks, for networks of your own."""

from __future__ import annotations

import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_choice, check_kind
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.recurrent import GATES, CellKind, RecurrentCells
from gpu_vecenv.train.recurrent_cells import cell_kernels

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


class RecurrentLayer(nn.Module):
    """A GRU or LSTM over sequences in which episodes end, with the equations of torch.nn.GRUCell and LSTMCell.

    On a GPU its steps are computed by kernels: of a GRU that fits in shared memory one launch forward and one back for
    all steps, else one product and one kernel for each step. torch computes it elsewhere, in a call whose ``state``
    needs a gradient, and in a copy of the layer.

    Args:
        inputs: Length of an input row.
        units: Outputs of a row.
        kind: "gru" or "lstm".
        env: On whose device the layer is and whose kernels it has; None: torch computes it, on any device.
        precision: Of the kernels' matrix products: "float32", "tf32" or "bfloat16", in which outputs are bfloat16.

    Attributes:
        state_size: Numbers in the state of a row: units, of an LSTM twice as many.

    Raises:
        TypeError, ValueError: ``inputs`` or ``units`` is no positive int, or ``env`` no ``VecEnv``.
        ConfigError: ``kind`` or ``precision`` is none of these.

    Example:
        >>> layer = gpu_vecenv.RecurrentLayer(18, 64)
        >>> state = torch.zeros((6, layer.state_size))  # of six rows, at the first observations of their episodes
        >>> active = torch.ones((10, 6), dtype=torch.bool)
        >>> layer.sequence(torch.randn(10, 6, 18), state, active).shape
        torch.Size([10, 6, 64])
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        kind: CellKind = "gru",
        *,
        env: VecEnv | None = None,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        inputs, units = validate_int("inputs", inputs, 1), validate_int("units", units, 1)
        check_choice("kind", kind, tuple(GATES), ConfigError)
        check_choice("precision", precision, PRECISIONS, ConfigError)
        self.cells = RecurrentCells(kind, inputs, units, count=1)
        self.state_size = self.cells.state_size
        if env is not None:
            check_kind("env", env, VecEnv, "a VecEnv (of a view: view.vec_env)")
            self.cells.to(env.device)
            self.cells.kernels = cell_kernels(env.functions, self.cells, precision)

    def forward(self, rows: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: outputs (R, units), and the next state (R, state_size) float32.

        Args:
            rows: (R, inputs) float32.
            state: (R, state_size) float32; 0 where the row is the first of an episode.
        """
        (outputs,), next_state = self.cells.step([rows], state)
        return outputs, next_state

    def sequence(self, rows: torch.Tensor, state: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Several steps: outputs (L, R, units), as of ``forward``. A GRU's state after the last one is its output.

        Args:
            rows: (L, R, inputs) float32.
            state: (R, state_size) float32, before the first step.
            active: (L, R) bool; the state after a step in which it is False is 0.
        """
        (outputs,) = self.cells.sequence([nn.Identity()], rows.flatten(0, 1), state, active)
        return outputs
