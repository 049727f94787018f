"""The layouts of warehouse: their texts, their arrays, their pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_vecenv.declare.drawing import BLACK, BLUE, GOLD, GREEN, WHITE, Circle, Drawing, Line, Polygon, Shape, blend
from gpu_vecenv.declare.text_layout import MAX_SIDE, parse_text_layout
from gpu_vecenv.errors import ConfigError

SizeName = Literal["tiny", "small", "medium", "large"]
SIZES: Mapping[SizeName, tuple[int, int]] = MappingProxyType(  # RWARE's: rows and columns of groups of shelves
    {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
)
TILES = ".xg"  # the index of a character is the number of its floor
CORRIDOR, STORAGE, GOAL = range(3)


class Floor(NamedTuple):
    """A warehouse as arrays, which are not to be written to."""

    tiles: npt.NDArray[np.uint8]  # (height, width): 0 corridor, 1 storage, 2 goal
    goals: npt.NDArray[np.int32]  # (goals, 2): column, row
    num_shelves: int


def layout_text(shelf_rows: int, shelf_columns: int, column_height: int) -> str:
    """RWARE's layout: groups of shelves, two wide, between corridors, and two goals in the middle of the last row.

    Raises:
        ConfigError: It would be too large.
    """
    height, width = (column_height + 1) * shelf_rows + 2, 3 * shelf_columns + 1
    if max(height, width) > MAX_SIDE:
        raise ConfigError(
            f"Warehouse: {shelf_rows} x {shelf_columns} groups of {column_height} shelves below each other are "
            f"{height} x {width} cells; expected at most {MAX_SIDE} x {MAX_SIDE}"
        )
    goals = (width // 2 - 1, width // 2)

    def tile(x: int, y: int) -> str:
        if y == height - 1:
            return "g" if x in goals else "."
        queue = x in goals and y > height - (column_height + 3)
        return "." if x % 3 == 0 or y % (column_height + 1) == 0 or queue else "x"

    return "\n".join("".join(tile(x, y) for x in range(width)) for y in range(height))


@lru_cache(maxsize=64)
def floor_of(text: str) -> Floor:
    """The arrays of a text; capital letters and blanks are allowed, as in RWARE.

    Raises:
        ConfigError: It is no rectangle, has an unknown character or no goal.
    """
    tiles = parse_text_layout("Warehouse.grid", text.lower().replace(" ", "").replace("\t", ""), TILES)
    goals = np.argwhere(tiles == GOAL)[:, ::-1].astype(np.int32)
    if not len(goals):
        raise ConfigError("Warehouse.grid has 'g' 0 times; expected at least one goal")
    tiles.flags.writeable = goals.flags.writeable = False
    return Floor(tiles, goals, int((tiles == STORAGE).sum()))


FLOOR_COLOUR, STORAGE_COLOUR, WALL_COLOUR, GOAL_COLOUR = (238, 238, 234), (222, 220, 212), (96, 100, 108), (84, 92, 112)
SHELF_COLOUR, REQUESTED_COLOUR, ROBOT_COLOUR = (164, 122, 84), (24, 160, 140), (240, 140, 40)
AHEAD = np.array([(0, 1), (0, -1), (-1, 0), (1, 0)], float)  # of a direction, y upwards


def draw_floor(state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
    """The picture: requested shelves are green; a robot that carries a shelf is blue and lies on it."""
    tiles, shelves = state["floor"], state["shelf"]
    height, width = tiles.shape
    shapes: list[Shape] = [
        _square(width / 2, height / 2, width / 2 + 0.12, WALL_COLOUR, height / 2 + 0.12),
        _square(width / 2, height / 2, width / 2, FLOOR_COLOUR, height / 2),
    ]
    for row, column in np.argwhere(tiles != CORRIDOR).tolist():
        x, y, goal = column + 0.5, height - row - 0.5, tiles[row, column] == GOAL
        shapes.append(_square(x, y, 0.48, GOAL_COLOUR if goal else STORAGE_COLOUR))
        if goal:
            shapes.append(Line([(x - 0.25, y + 0.12), (x, y - 0.15), (x + 0.25, y + 0.12)], 0.09, WHITE))
    for row, column in np.argwhere(shelves).tolist():
        shapes += _shelf(column + 0.5, height - row - 0.5, shelves[row, column] == 2)
    for i, (column, row) in enumerate(state["position"].tolist()):
        x, y, ahead = column + 0.5, height - row - 0.5, AHEAD[int(state["direction"][i])]
        colour = BLUE if state["carrying"][i] else ROBOT_COLOUR
        if state["carrying"][i] and state["has_delivered"][i]:
            colour = GREEN
        beside, middle = ahead[::-1], np.array([x, y])
        shapes += [Circle(x, y, 0.34, blend(colour, BLACK, 0.45)), Circle(x, y, 0.29, colour, i)]
        tip, base = middle + 0.25 * ahead, middle - 0.1 * ahead
        shapes.append(Polygon(np.stack([tip, base + 0.17 * beside, base - 0.17 * beside]), WHITE))
    margin = 0.03 * max(width, height) + 0.12
    return Drawing((-margin, width + margin, -margin, height + margin), shapes)


def _square(x: float, y: float, half: float, colour: tuple[int, int, int], half_height: float = 0) -> Polygon:
    corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    return Polygon([(x + half * a, y + (half_height or half) * b) for a, b in corners], colour)


def _shelf(x: float, y: float, requested: bool) -> Iterator[Shape]:
    colour = REQUESTED_COLOUR if requested else SHELF_COLOUR
    yield _square(x, y, 0.43, blend(colour, BLACK, 0.4))
    yield _square(x, y, 0.39, colour)
    for place in (-0.13, 0.13):
        yield Line([(x - 0.36, y + place), (x + 0.36, y + place)], 0.035, blend(colour, BLACK, 0.3))
    if requested:
        yield _square(x, y, 0.06, GOLD)
