"""The map of economy: its text, its arrays, who starts where with which skill, its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_vecenv.declare.drawing import (
    BLACK,
    GOLD,
    IDENTITIES,
    WHITE,
    Circle,
    Colour,
    Drawing,
    Polygon,
    Shape,
    blend,
)
from gpu_vecenv.declare.text_layout import parse_text_layout

# quadrant_25x25_20each_30clump of the AI Economist.
QUADRANT = """
    WWWWW..W....@.W..........
    WW.W........@.W......W.WW
    .W..........@.........W.W
    SW.S.S......@............
    ............@...W......W.
    .SS......................
    .S.......................
    .........................
    .........................
    S......S....@............
    ............@............
    ............@............
    @@@@@....@@@@@@@....@@@@@
    .S..........@............
    S.S.........@............
    ...S........@............
    SS.......................
    .SS......................
    SS.......................
    ..S......................
    ............@............
    ............@............
    ............@............
    ............@............
    S...........@............
"""
TILES = ".@SW"  # the index of a character is the number of its terrain
EMPTY, WATER, STONE_SOURCE, WOOD_SOURCE = range(4)


class Land(NamedTuple):
    """A map as arrays, which are not to be written to."""

    terrain: npt.NDArray[np.uint8]  # (height, width): 0 empty, 1 water, 2 source of stone, 3 of wood
    sources: npt.NDArray[np.int32]  # (sources, 2): row, column


@lru_cache(maxsize=64)
def land_of(text: str) -> Land:
    """The arrays of a text.

    Raises:
        ConfigError: It is no rectangle or has an unknown character.
    """
    terrain = parse_text_layout("Economy.grid", text, TILES)
    sources = np.argwhere(terrain >= STONE_SOURCE).astype(np.int32)
    terrain.flags.writeable = sources.flags.writeable = False
    return Land(terrain, sources)


@lru_cache(maxsize=64)
def ranked_skills(num_workers: int, most: float) -> npt.NDArray[np.float32]:
    """What a house pays the workers, from the least skilled to the most, relative to the payment of one without skill.

    As in the AI Economist: means over 100,000 sorted samples of NumPy's generator with seed 1.

    Args:
        num_workers: Workers, N.
        most: The largest skill.

    Returns:
        (N,) float32, ascending, not to be written to.
    """
    samples = np.random.RandomState(1).pareto(4, size=(100_000, num_workers))
    samples = np.sort(np.minimum(most, (most - 1) * samples + 1), axis=1)
    skills = np.asarray(samples.mean(axis=0), np.float32)
    skills.flags.writeable = False
    return skills


def ranked_starts(num_workers: int, height: int, width: int) -> npt.NDArray[np.int32]:
    """Where workers start, from the least skilled to the most.

    A quarter of them in each corner: above right, below left, above left, below right; four in a row there.

    Returns:
        (num_workers, 2) int32: row, column.
    """
    corners = (0, width - 1, 1, -1), (height - 1, 0, -1, 1), (0, 0, 1, 1), (height - 1, width - 1, -1, -1)
    starts, placed = [], [0] * 4
    for rank in range(num_workers):
        corner = 4 * rank // num_workers
        row, column, down, right = corners[corner]
        line, place = divmod(placed[corner], 4)
        starts.append((row + down * line, column + right * place))
        placed[corner] += 1
    return np.array(starts, np.int32)


GRASS, SHORE, SEA = (232, 236, 214), (150, 190, 214), (112, 166, 204)
STONE_COLOUR, WOOD_COLOUR = (150, 150, 156), (60, 130, 78)
BARE = {STONE_SOURCE: (206, 204, 200), WOOD_SOURCE: (196, 206, 168)}  # sources where nothing has grown again
PANEL = 0.44  # of the map's width, to its right: coin of the workers above, marginal tax rates below


def draw_settlement(state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
    """The picture: the map, and beside it bars of the workers' coin and of the brackets' tax rates."""
    terrain, tile = state["terrain"], state["tile"]
    height, width = terrain.shape
    shapes: list[Shape] = [
        _box(-0.12, -0.12, width + 0.12, height + 0.12, (96, 100, 108)),
        _box(0, 0, width, height, GRASS),
    ]
    for row, column in np.argwhere((terrain != EMPTY) | (tile != 0)).tolist():
        shapes += _cell(int(terrain[row, column]), int(tile[row, column]), column, height - row - 1)
    for i, (row, column) in enumerate(state["loc"].tolist()):
        x, y = column + 0.5, height - row - 0.5
        shapes += [Circle(x, y, 0.46, WHITE), Circle(x, y, 0.4, worker_colour(i), i)]
        shapes.append(Circle(x, y, 0.16, blend(worker_colour(i), WHITE, 0.6)))
    right = width * (1 + PANEL)
    coin, rates = state["coin"].tolist(), state["rates"].tolist()
    most = 10.0
    while most < max(coin):  # a scale that jumps seldom
        most *= 2
    shapes += _bars(coin, most, (width + 1, height * 0.55, right, height), [worker_colour(i) for i in range(len(coin))])
    shapes += _bars(rates, 1.0, (width + 1, 0, right, height * 0.45), [blend(GOLD, BLACK, 0.25)] * len(rates))
    margin = 0.03 * max(width, height)
    return Drawing((-margin, right + margin, -margin, height + margin), shapes, width=840, height=600)


def worker_colour(i: int) -> Colour:
    """The colour of worker i and of its houses."""
    return IDENTITIES[i % len(IDENTITIES)]


def _cell(terrain: int, tile: int, x: float, y: float) -> Iterator[Shape]:
    if terrain == WATER:
        yield _box(x, y, x + 1, y + 1, SEA)
        yield Polygon([(x + 0.15, y + 0.4), (x + 0.5, y + 0.55), (x + 0.85, y + 0.4), (x + 0.5, y + 0.48)], SHORE)
    elif terrain == STONE_SOURCE:
        yield _box(x, y, x + 1, y + 1, BARE[terrain])
        if tile:
            shape = (0.12, 0.2), (0.88, 0.2), (0.78, 0.66), (0.45, 0.84), (0.2, 0.6)
            yield Polygon([(x + a, y + b) for a, b in shape], STONE_COLOUR)
            light = (0.45, 0.84), (0.2, 0.6), (0.4, 0.5)
            yield Polygon([(x + a, y + b) for a, b in light], blend(STONE_COLOUR, WHITE, 0.5))
    elif terrain == WOOD_SOURCE:
        yield _box(x, y, x + 1, y + 1, BARE[terrain])
        if tile:
            yield _box(x + 0.42, y + 0.08, x + 0.58, y + 0.4, (120, 84, 52))
            yield Polygon([(x + 0.12, y + 0.3), (x + 0.88, y + 0.3), (x + 0.5, y + 0.95)], WOOD_COLOUR)
    else:
        colour = worker_colour(tile - 1)
        yield _box(x + 0.16, y + 0.08, x + 0.84, y + 0.55, blend(colour, WHITE, 0.45))
        yield _box(x + 0.42, y + 0.08, x + 0.58, y + 0.36, blend(colour, BLACK, 0.4))
        yield Polygon([(x + 0.06, y + 0.52), (x + 0.94, y + 0.52), (x + 0.5, y + 0.95)], colour)


def _bars(
    values: list[float], most: float, area: tuple[float, float, float, float], colours: list[Colour]
) -> Iterator[Shape]:
    left, bottom, right, top = area
    yield _box(left, bottom, right, top, (242, 242, 240))
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom + share * (top - bottom)
        yield _box(left, y - 0.03, right, y + 0.03, (214, 214, 212))
    step = (right - left) / len(values)
    for k, (value, colour) in enumerate(zip(values, colours, strict=True)):
        x = left + (k + 0.15) * step
        height = min(max(value / most, 0.0), 1.0) * (top - bottom)
        yield _box(x, bottom, x + 0.7 * step, bottom + max(height, 0.06), colour)


def _box(left: float, bottom: float, right: float, top: float, colour: Colour) -> Polygon:
    return Polygon([(left, bottom), (right, bottom), (right, top), (left, top)], colour)
