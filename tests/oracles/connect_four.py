"""Connect Four for boards of any size in NumPy, from the rules alone: lines are found in every row, column, diagonal.

A board is (rows, columns) int, row 0 on top; 0: empty, 1 and 2: a piece of player 0 or 1.
"""

from collections.abc import Iterator

import numpy as np


def open_columns(board: np.ndarray) -> np.ndarray:
    """(columns,) bool: columns that are not full."""
    return (board == 0).any(0)


def drop(board: np.ndarray, column: int, player: int) -> np.ndarray:
    """The board after the player's piece has fallen to the lowest empty cell of an open column."""
    after = board.copy()
    after[np.flatnonzero(board[:, column] == 0).max(), column] = player + 1
    return after


def straight_lines(board: np.ndarray) -> Iterator[np.ndarray]:
    """All rows, columns and diagonals, from end to end."""
    yield from board
    yield from board.T
    for way in (board, board[::-1]):
        for offset in range(1 - board.shape[0], board.shape[1]):
            yield np.diagonal(way, offset)


def has_line(board: np.ndarray, player: int, length: int) -> bool:
    """Whether ``length`` pieces of the player are side by side in a row, column or diagonal."""
    wanted = str(player + 1) * length
    return any(wanted in "".join(map(str, line)) for line in straight_lines(board))


def observation(board: np.ndarray, agent: int) -> np.ndarray:
    """(rows, columns, 2) uint8: own pieces, the other player's."""
    return np.stack([board == agent + 1, board == 2 - agent], axis=2).astype(np.uint8)
