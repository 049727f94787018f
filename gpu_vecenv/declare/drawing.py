"""Drawing primitives: the picture of one environment as plain data, shapes in the game's own units."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpu_vecenv.declare.config import finite_float
from gpu_vecenv.errors import EnvDefinitionError

Colour = tuple[int, int, int]  # red, green, blue, 0 … 255
Points = Sequence[tuple[float, float]] | np.ndarray[Any, Any]

WHITE: Colour = (255, 255, 255)
BLACK: Colour = (30, 30, 30)
GREY: Colour = (140, 140, 140)
PALE: Colour = (225, 225, 225)
# Okabe and Ito's vermillion, bluish green, blue and yellow, which people with any kind of colour vision can tell apart.
RED: Colour = (213, 94, 0)
GREEN: Colour = (0, 158, 115)
BLUE: Colour = (0, 114, 178)
GOLD: Colour = (240, 228, 66)
BROWN: Colour = (200, 152, 104)
# For agents of one role, each its own: light and dark ones in turn, as hues alone are too few for some eyes.
IDENTITIES: tuple[Colour, ...] = (
    BLUE,
    (240, 120, 0),
    BLACK,
    (160, 200, 240),
    (0, 0, 160),
    (80, 40, 0),
    (160, 40, 80),
    (0, 160, 160),
)


@dataclass(frozen=True)
class Shape:
    """Base of the shapes of a drawing. Arrays and NumPy scalars become plain numbers and tuples.

    Raises:
        EnvDefinitionError: A number is not finite, a size is negative, points are not (n, 2), or a colour or an
            agent index is invalid.
    """

    min_points: ClassVar[int] = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for field in dataclasses.fields(self):
            name, value = f"{kind}.{field.name}", getattr(self, field.name)
            if field.name == "colour":
                value = _colour(name, value)
            elif field.name == "points":
                value = _points(name, value, self.min_points)
            elif field.name == "agent":
                value = _agent(name, value)
            else:
                value = _number(name, value)
                if value < 0 and field.name in ("radius", "width"):
                    raise EnvDefinitionError(f"{name} is {value}; expected a number >= 0")
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True)
class Circle(Shape):
    """A filled disc, drawn at least one pixel large."""

    x: float
    y: float
    radius: float
    colour: Colour
    agent: int | None = None  # index of the agent drawn here, which the player can follow


@dataclass(frozen=True)
class Line(Shape):
    """A polyline with round ends and joints, drawn at least one pixel wide."""

    points: Points  # at least 2
    width: float  # in the drawing's units
    colour: Colour

    min_points = 2


@dataclass(frozen=True)
class Polygon(Shape):
    """A filled polygon; an edge joins the last point to the first."""

    points: Points  # at least 3
    colour: Colour

    min_points = 3


@dataclass(frozen=True)
class Drawing:
    """A picture of one environment. x increases to the right, y upwards.

    Args:
        bounds: Left, right, bottom, top of the visible area, in the game's units. It is centred and scaled to fit, with
            the same scale on both axes.
        shapes: In drawing order: later ones cover earlier ones. Parts outside of the picture are clipped.
        width: Pixels, 1 … 4096.
        height: Pixels, 1 … 4096.
        background: Colour of the background.

    Raises:
        EnvDefinitionError: A number is not finite or out of range, a colour is invalid, points are not (n, 2).
    """

    bounds: tuple[float, float, float, float]
    shapes: Sequence[Shape]
    width: int = 600
    height: int = 600
    background: Colour = WHITE

    def __post_init__(self) -> None:
        four = isinstance(self.bounds, Sequence | np.ndarray) and len(self.bounds) == 4
        bounds = tuple(_number("Drawing.bounds", value) for value in self.bounds) if four else ()
        if not four or not (bounds[0] < bounds[1] and bounds[2] < bounds[3]):
            raise EnvDefinitionError(
                f"Drawing.bounds is {self.bounds!r}; expected (left, right, bottom, top), left < right and bottom < top"
            )
        object.__setattr__(self, "bounds", bounds)
        if not isinstance(self.shapes, Sequence):
            raise EnvDefinitionError(
                f"Drawing.shapes is {self.shapes!r:.200}; expected a list of Circle, Line or Polygon"
            )
        object.__setattr__(self, "shapes", tuple(self.shapes))
        for shape in self.shapes:
            if not isinstance(shape, Shape):
                raise EnvDefinitionError(f"Drawing.shapes has {shape!r}; expected Circle, Line or Polygon")
        for name in ("width", "height"):
            pixels = getattr(self, name)
            if type(pixels) is not int or not 1 <= pixels <= 4096:
                raise EnvDefinitionError(f"Drawing.{name} is {pixels!r}; expected an int, 1 … 4096 pixels")
        object.__setattr__(self, "background", _colour("Drawing.background", self.background))

    @property
    def scale(self) -> float:
        """Pixels per unit."""
        left, right, bottom, top = self.bounds
        return min(self.width / (right - left), self.height / (top - bottom))

    def pixels(self, points: Any) -> np.ndarray[Any, Any]:
        """Positions in pixels from the upper left corner: (…, 2) in units -> (…, 2) float64."""
        left, right, bottom, top = self.bounds
        middle = np.array([(left + right) / 2, (bottom + top) / 2])
        centre = np.array([self.width / 2, self.height / 2])
        return np.asarray(centre + (np.asarray(points, np.float64) - middle) * (self.scale, -self.scale))


def discs(positions: Any, radius: float, colour: Colour, agents: Iterable[int] | None = None) -> list[Circle]:
    """Discs of one size and colour at positions (n, 2); ``agents``: the indices of the agents that they show."""
    rows = np.asarray(positions).tolist()
    owners = itertools.repeat(None, len(rows)) if agents is None else agents
    return [Circle(x, y, radius, colour, agent) for (x, y), agent in zip(rows, owners, strict=True)]


def square_bounds(circles: Iterable[Circle], half: float = 0.0) -> tuple[float, float, float, float]:
    """Bounds of a square around (0, 0) that contains all circles with a margin; its half side is at least ``half``."""
    for circle in circles:
        half = max(half, 1.05 * (max(abs(circle.x), abs(circle.y)) + circle.radius))
    return -half, half, -half, half


def blend(colour: Colour, other: Colour, share: float) -> Colour:
    """Mix of two colours; ``share``, 0 … 1, is the weight of the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _number(name: str, value: Any) -> float:
    number = finite_float(value)
    if number is None:
        raise EnvDefinitionError(f"{name} is {value!r}; expected a finite number: is the environment's state finite?")
    return number


def _agent(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        index = operator.index(value)  # accepts NumPy integers
    except TypeError:
        index = -1
    if index < 0 or isinstance(value, bool):
        raise EnvDefinitionError(f"{name} is {value!r}; expected None or the index of an agent, an int >= 0")
    return index


def _points(name: str, value: Any, least: int) -> tuple[tuple[float, float], ...]:
    try:
        points = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < least:
        raise EnvDefinitionError(f"{name} is {value!r}; expected at least {least} points (x, y)")
    return tuple((_number(name, x), _number(name, y)) for x, y in points.tolist())


def _colour(name: str, value: Any) -> Colour:
    if not (
        isinstance(value, tuple | list)
        and len(value) == 3
        and all(type(part) is int and 0 <= part <= 255 for part in value)
    ):
        raise EnvDefinitionError(f"{name} is {value!r}; expected (red, green, blue), ints 0 … 255")
    red, green, blue = value
    return red, green, blue
