"""The kitchens of overcooked: their texts, their arrays, their pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_vecenv.declare.drawing import BLACK, BLUE, RED, WHITE, Circle, Drawing, Line, Polygon, Shape, blend
from gpu_vecenv.declare.text_layout import parse_text_layout
from gpu_vecenv.errors import ConfigError

LayoutName = Literal[
    "cramped_room", "asymmetric_advantages", "coordination_ring", "forced_coordination", "counter_circuit_o_1order"
]
# The five of Carroll et al., "On the utility of learning about humans for human-AI coordination", 2019.
LAYOUTS: Mapping[LayoutName, str] = MappingProxyType(
    {
        "cramped_room": "XXPXX\nO  2O\nX1  X\nXDXSX",
        "asymmetric_advantages": "XXXXXXXXX\nO XSXOX S\nX   P 1 X\nX2  P   X\nXXXDXDXXX",
        "coordination_ring": "XXXPX\nX 1 P\nD2X X\nO   X\nXOSXX",
        "forced_coordination": "XXXPX\nO X1P\nO2X X\nD X X\nXXXSX",
        "counter_circuit_o_1order": "XXXPPXXX\nX  2   X\nD XXXX S\nX  1   X\nXXXOOXXX",
    }
)
TILES = " XPODS12"  # the index of a character is the number of its terrain; players stand on floor
FLOOR, COUNTER, POT, ONIONS, DISHES, SERVING = range(6)


class Kitchen(NamedTuple):
    """A kitchen as arrays."""

    terrain: npt.NDArray[np.uint8]  # (height, width): 0 floor, 1 counter, 2 pot, 3 onions, 4 dishes, 5 serving
    start: npt.NDArray[np.int32]  # (2, 2): column and row of each player
    num_floor: int


@lru_cache(maxsize=64)
def kitchen_of(text: str) -> Kitchen:
    """The arrays of a text, which are not to be written to. Rows may be indented: none begins with a blank.

    Raises:
        ConfigError: It is no rectangle, has an unknown character, lacks something, or its border has a gap.
    """
    rows = "\n".join(row.strip() for row in text.split("\n"))
    tiles = parse_text_layout("Overcooked.grid", rows, TILES)
    for tile in TILES[2:]:
        found = int((tiles == TILES.index(tile)).sum())
        if found == 0 or (tile in "12" and found > 1):
            times = "exactly once" if tile in "12" else "at least once"
            raise ConfigError(f"Overcooked.grid has {tile!r} {found} times; expected it {times}")
    terrain = np.where(tiles > SERVING, np.uint8(FLOOR), tiles)
    inside = np.zeros(terrain.shape, bool)
    inside[1:-1, 1:-1] = True
    if gaps := np.argwhere((terrain == FLOOR) & ~inside).tolist():
        raise ConfigError(
            f"Overcooked.grid has floor at row {gaps[0][0]}, column {gaps[0][1]}, on its border; expected X, P, O, D "
            "or S all around"
        )
    start = np.array([np.argwhere(tiles == TILES.index(digit))[0][::-1] for digit in "12"], np.int32)
    terrain.flags.writeable = start.flags.writeable = False
    return Kitchen(terrain, start, int((terrain == FLOOR).sum()))


ONION_COLOUR, SOUP_COLOUR, FLOOR_COLOUR = (226, 178, 60), (196, 92, 32), (243, 235, 218)
TOP_COLOURS = {COUNTER: (186, 144, 104), POT: (120, 120, 128), ONIONS: (150, 112, 78), DISHES: (150, 112, 78)}
SERVING_COLOUR, EDGE_COLOUR, METAL = (120, 176, 128), (150, 114, 80), (70, 72, 80)
BEFORE = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)], float)  # of an orientation, y upwards


def draw_kitchen(state: Mapping[str, np.ndarray[Any, Any]], cook_time: int) -> Drawing:
    """The picture: pots with their onions and a bar that grows while they cook, players with what they hold."""
    terrain = state["terrain"]
    height, width = terrain.shape
    shapes: list[Shape] = [_square(width / 2, height / 2, width / 2, height / 2, FLOOR_COLOUR)]
    for row, column in np.argwhere(terrain != FLOOR).tolist():
        cell = state["item"][row, column].item(), state["cooking_tick"][row, column].item() / cook_time
        shapes += _tile(int(terrain[row, column]), column + 0.5, height - row - 0.5, *cell)
    for i, colour in enumerate((BLUE, RED)):
        column, row = state["position"][i].tolist()
        x, y, before = column + 0.5, height - row - 0.5, BEFORE[int(state["orientation"][i])]
        beside = before[::-1]
        tip, base = np.array([x, y]) + 0.46 * before, np.array([x, y]) + 0.2 * before
        shapes.append(Polygon(np.stack([tip, base + 0.24 * beside, base - 0.24 * beside]), blend(colour, BLACK, 0.35)))
        shapes += [Circle(x, y, 0.33, colour, i), Circle(x, y, 0.19, WHITE)]  # the body, and a cook's hat
        shapes += _thing(int(state["held"][i]), x + 0.3 * before[0], y + 0.3 * before[1], 0.17)
    margin = 0.02 * max(width, height)
    return Drawing((-margin, width + margin, -margin, height + margin), shapes)


def _square(x: float, y: float, half_width: float, half_height: float, colour: tuple[int, int, int]) -> Polygon:
    corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    return Polygon([(x + half_width * a, y + half_height * b) for a, b in corners], colour)


def _tile(terrain: int, x: float, y: float, item: int, cooked: float) -> Iterator[Shape]:
    top = TOP_COLOURS.get(terrain, SERVING_COLOUR)
    yield _square(x, y, 0.5, 0.5, EDGE_COLOUR)
    yield _square(x, y, 0.46, 0.46, top)
    if terrain == COUNTER:
        yield from _thing(item, x, y, 0.24)
    elif terrain == ONIONS:
        for dx, dy in ((-0.19, -0.14), (0.19, -0.14), (0, 0.17)):
            yield from _thing(1, x + dx, y + dy, 0.17)
    elif terrain == DISHES:
        for k in range(3):
            yield from _thing(2, x + 0.06 * (k - 1), y + 0.09 * (k - 1), 0.27)
    elif terrain == SERVING:
        yield Line([(x - 0.25, y + 0.15), (x, y - 0.15), (x + 0.25, y + 0.15)], 0.09, WHITE)
    else:
        yield Circle(x, y + 0.06, 0.36, METAL)
        yield Circle(x, y + 0.06, 0.29, blend(BLACK, SOUP_COLOUR, cooked if item == 3 else 0))
        for k in range(item):
            angle = 2 * np.pi * (k / 3 + 0.25)
            colour = blend(ONION_COLOUR, SOUP_COLOUR, 0.6 * cooked if item == 3 else 0)
            yield Circle(x + 0.14 * np.cos(angle), y + 0.06 + 0.14 * np.sin(angle), 0.11, colour)
        if item == 3:
            yield Line([(x - 0.36, y - 0.4), (x + 0.36, y - 0.4)], 0.09, BLACK)
            if cooked > 0:
                bar = (90, 200, 110) if cooked >= 1 else (250, 210, 80)
                yield Line([(x - 0.36, y - 0.4), (x - 0.36 + 0.72 * cooked, y - 0.4)], 0.06, bar)


def _thing(item: int, x: float, y: float, size: float) -> Iterator[Shape]:
    if item == 1:
        yield Circle(x, y, 0.85 * size, blend(ONION_COLOUR, BLACK, 0.4))
        yield Circle(x, y, 0.72 * size, ONION_COLOUR)
    elif item in (2, 3):
        yield Circle(x, y, size, (150, 150, 160))
        yield Circle(x, y, 0.88 * size, WHITE)
        yield Circle(x, y, 0.6 * size, SOUP_COLOUR if item == 3 else (225, 225, 232))
