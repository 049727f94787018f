"""Maps drawn in characters: arrays for shared fields of the state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_vecenv.errors import ConfigError

MAX_SIDE = 256  # rows, columns


def parse_text_layout(what: str, text: str, tiles: str) -> npt.NDArray[np.uint8]:
    r"""The rows of a map as numbers, (height, width) uint8: each character's index in ``tiles``.

    Args:
        what: What the text is, for errors: "Overcooked.grid".
        text: One row per line. Blank lines at its ends and the indentation that all other lines share are left out.
        tiles: The characters that may occur, up to 256.

    Raises:
        ConfigError: There are no rows, their lengths differ, there are too many, or a character is unknown.

    Example:
        ``parse_text_layout("grid", "XXX\nX X", "X ")`` is ``[[0, 0, 0], [0, 1, 0]]``.
    """
    rows = text.split("\n")
    filled = [y for y, row in enumerate(rows) if row.strip()] or [0]
    indentation = min(len(rows[y]) - len(rows[y].lstrip()) for y in filled)
    rows = [row[indentation:] for row in rows[filled[0] : filled[-1] + 1]]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1 or not 1 <= lengths[0] <= MAX_SIDE or len(rows) > MAX_SIDE:
        raise ConfigError(
            f"{what} has {len(rows)} rows of {', '.join(map(str, lengths))} characters; expected 1 … {MAX_SIDE} rows "
            f"of one length, 1 … {MAX_SIDE}"
        )
    for y, row in enumerate(rows):
        if unknown := sorted(set(row) - set(tiles)):
            raise ConfigError(
                f"{what}: row {y}, {row!r}, has {', '.join(map(repr, unknown))}; expected some of {tiles!r}"
            )
    return np.array([[tiles.index(character) for character in row] for row in rows], np.uint8)
