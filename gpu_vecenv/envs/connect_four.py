"""Connect Four: two players drop pieces into columns; who first has four in a row wins. PettingZoo's classic game."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLACK, BLUE, GOLD, RED, WHITE, Circle, Drawing, Line, Polygon, blend
from gpu_vecenv.declare.env import Env, Field, FixedArgument, i32, param, u8
from gpu_vecenv.errors import ConfigError

WAYS = ((0, 1), (1, 0), (1, 1), (1, -1))  # rows and columns from one piece of a line to the next


@dataclass(frozen=True, kw_only=True)
class ConnectFour(Env):
    """Players take turns in dropping a piece into a column; four (``line_length``) in a line win."""

    num_rows: int = param(6, low=1, high=32)  # of the board
    num_columns: int = param(7, low=1, high=32)  # of the board
    line_length: int = param(4, low=2)  # pieces in a row, column or diagonal that win
    opening_moves: int = param(0, low=0)  # random moves without a line, with which every game begins
    slip: float = param(0.0, low=0, high=1)  # probability that a piece falls into a random open column instead
    max_steps: int = param(42, low=1)  # steps until the episode is truncated; 42: the cells of the default board

    state = (
        Field("board", u8, ("num_rows", "num_columns")),  # 0: empty, 1 and 2: a piece of player 0 or 1; row 0 is on top
        Field("player", i32),  # 0 or 1, who acts in the coming step
    )
    takes_turns = True
    zero_sum = True
    masks_actions = True
    roles: ClassVar[Mapping[str, int]] = MappingProxyType({"player": 2})
    termination_label = "a line, or the board is full"
    render_fps = 2
    preset = MappingProxyType(
        {
            "num_envs": 4096,
            "total_steps": 200_000_000,
            "num_epochs": 2,
            "num_minibatches": 32,
            "learning_rate": 0.001,
            "gae_lambda": 0.8,
            "entropy_coefficient": 0.05,
            "final_entropy_coefficient": 0.01,
            "hidden_sizes": (256, 256),
            "activation": "relu",
            "shared_trunk": False,
        }
    )
    reference_arguments = MappingProxyType(
        {
            **Env.reference_arguments,
            "screen_scaling": FixedArgument(9, "the board is drawn to the scale of the picture"),
        }
    )
    version = 3

    @property
    def observation_space(self) -> Box:
        return Box(0, 1, (self.num_rows, self.num_columns, 2), np.uint8)  # own pieces, the other player's

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.num_columns)

    def validate(self) -> None:
        if self.line_length > max(self.num_rows, self.num_columns):
            raise ConfigError(
                f"ConnectFour: line_length is {self.line_length} on a board of {self.num_rows} x {self.num_columns}; "
                f"expected at most {max(self.num_rows, self.num_columns)}, as nobody could win"
            )
        if self.opening_moves >= (cells := self.num_rows * self.num_columns):
            raise ConfigError(
                f"ConnectFour: opening_moves is {self.opening_moves} on a board of {cells} cells; "
                f"expected at most {cells - 1}, so that a player can move"
            )

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        rows, columns, board = self.num_rows, self.num_columns, state["board"]
        edge = 0.15  # of the frame around the cells
        corners = [(-edge, -edge), (columns + edge, -edge), (columns + edge, rows + edge), (-edge, rows + edge)]
        shapes: list[Circle | Line | Polygon] = [Polygon(corners, BLUE)]
        for row, column in np.ndindex(rows, columns):
            x, y, piece = column + 0.5, rows - row - 0.5, int(board[row, column])
            colour = (WHITE, RED, GOLD)[piece]
            shapes.append(Circle(x, y, 0.42, blend(colour if piece else BLUE, BLACK, 0.3)))
            shapes.append(Circle(x, y, 0.36, colour))
        for cells in self._lines(board):
            ends = [(column + 0.5, rows - row - 0.5) for row, column in (cells[0], cells[-1])]
            shapes.append(Line(ends, 0.12, BLACK))
        # The next player's piece waits above the board; none does once the game is over.
        player, over = int(state["player"].item()), self._lines(board) or board.all()
        if not over:
            shapes.append(Circle(columns / 2, rows + 0.6, 0.36, (RED, GOLD)[player], player))
        side, margin = max(columns, rows + 1.1), 0.4
        middle = columns / 2
        bounds = (middle - side / 2 - margin, middle + side / 2 + margin, -margin, side + margin)
        return Drawing(bounds, shapes)

    def _lines(self, board: np.ndarray[Any, Any]) -> list[list[tuple[int, int]]]:
        """The cells, row and column, of each ``line_length`` pieces of one player in a line."""
        found = []
        for row, column in zip(*board.nonzero(), strict=True):
            for down, right in WAYS:
                cells = [(int(row) + k * down, int(column) + k * right) for k in range(self.line_length)]
                inside = 0 <= cells[-1][0] < self.num_rows and 0 <= cells[-1][1] < self.num_columns
                if inside and all(board[cell] == board[row, column] for cell in cells):
                    found.append(cells)
        return found
