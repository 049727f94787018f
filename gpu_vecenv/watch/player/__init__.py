"""The player: one self-contained HTML page that plays episodes in a browser.

The page contains its films as numbers, which its scripts unpack and draw. Positions are rounded to 1/32 of a pixel of
the drawing, so that the error in x and in y is at most 1/64 pixel.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_vecenv.declare.drawing import Circle, Colour, Drawing, Line, Points, Polygon
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.watch.inline_page import inline_page, read

SUBPIXELS = 32  # position units per pixel
MAX_PIXELS = 1e6  # positions are clipped to this distance from the upper left corner
# Of all players, see player_script; a page's own scripts follow.
PLAYER_SCRIPTS = (
    *("elements.js", "paint.js", "stage.js", "events.js"),
    *("bytes.js", "webm.js", "mp4.js", "gif.js", "save.js", "player.js"),
)
SCRIPTS = ("film.js", "plot.js", "page.js")
FOLDER = Path(__file__).parent

Array = np.ndarray[Any, Any]
Drawn = Circle | Line | Polygon


@dataclass(frozen=True, kw_only=True)
class Film:
    """One episode of T steps and A agents, as drawings.

    Args:
        title: Short title.
        drawings: T + 1 drawings, from the reset on.
        agents: Names in agent order, such as "tagger_0".
        roles: Role -> number of agents, in agent order.
        rewards: (T, A) float32. Sums that are not finite are gaps in the plot.
        active: (T + 1, A) bool, agents whose episode has not ended.
        terminations: (T, A) bool.
        truncations: (T, A) bool.
        facts: Name -> text, shown below the film: configuration, seed, digest.
        fps: Steps per second at speed 1, 1 … 1000.

    Raises:
        EnvDefinitionError: An argument has another type, dtype or size, or a disc has an agent that does not exist.
    """

    title: str
    drawings: Sequence[Drawing]
    agents: Sequence[str]
    roles: Mapping[str, int]
    rewards: Array
    active: Array
    terminations: Array
    truncations: Array
    facts: Mapping[str, str]
    fps: int

    def __post_init__(self) -> None:
        def expect(held: bool, name: str, got: Any, expected: str) -> None:
            if not held:
                raise EnvDefinitionError(f"Film.{name} is {got}; expected {expected}")

        names, facts, steps = self.agents, self.facts, len(self.drawings) - 1
        expect(isinstance(self.title, str), "title", repr(self.title), "a str")
        expect(_texts(names) and len(names) > 0, "agents", repr(names), "names, a str each")
        shared = isinstance(self.roles, Mapping) and _texts(list(self.roles)) and all(map(_whole, self.roles.values()))
        shared = shared and min(self.roles.values(), default=0) >= 1 and sum(self.roles.values()) == len(names)
        expect(shared, "roles", repr(self.roles), f"role -> number of agents, {len(names)} agents in all")
        texts = isinstance(facts, Mapping) and _texts([*facts, *facts.values()])
        expect(texts, "facts", repr(facts), "name -> text, a str each")
        expect(_whole(self.fps) and 1 <= self.fps <= 1000, "fps", repr(self.fps), "an int, 1 … 1000 steps per second")
        expect(steps >= 1, "drawings", f"{steps + 1} long", "at least 2: one after the reset and one after each step")
        for step, drawing in enumerate(self.drawings):
            expect(isinstance(drawing, Drawing), f"drawings[{step}]", repr(drawing), "a Drawing")
            owners = [shape.agent for shape in drawing.shapes if isinstance(shape, Circle) and shape.agent is not None]
            last = max(owners, default=0)
            expect(last < len(names), f"drawings[{step}]", f"one with agent {last}", f"agents 0 … {len(names) - 1}")
        for name, dtype, rows in (
            ("rewards", np.dtype(np.float32), steps),
            ("active", np.dtype(np.bool_), steps + 1),
            ("terminations", np.dtype(np.bool_), steps),
            ("truncations", np.dtype(np.bool_), steps),
        ):
            value, shape = getattr(self, name), (rows, len(names))
            array = isinstance(value, np.ndarray)
            got = f"{value.shape} {value.dtype}" if array else repr(value)
            good = array and value.dtype == dtype and value.shape == shape
            expect(good, name, got, f"{shape} {dtype}: {steps + 1} drawings, {len(names)} agents")


def page(films: Sequence[Film], title: str) -> str:
    """One self-contained HTML page that plays the films side by side and synchronously.

    Needs ``DecompressionStream``: Chrome and Edge 97, Firefox 113, Safari 16.4 or later.

    Raises:
        ValueError: There is no film, or the title is not a str.
    """
    films = list(films) if isinstance(films, Iterable) else [films]
    if not films or not all(isinstance(film, Film) for film in films):
        raise ValueError(f"page: films are {films!r:.200}; expected at least one Film")
    if not isinstance(title, str):
        raise ValueError(f"page: title is {title!r}; expected a str")
    content = {"title": title, "subpixels": SUBPIXELS, "films": [_packed(film) for film in films]}
    return inline_page(FOLDER, player_script() + _scripts(SCRIPTS), content)


def player_script() -> str:
    """JavaScript of all players, of films and of live play: stage, timeline, events, view, keys.

    It is the first part of a page's module, whose ``page.html`` has the controls that ``inline_page`` inserts.
    """
    return _scripts(PLAYER_SCRIPTS)


def _scripts(names: Iterable[str]) -> str:
    return "".join(read(FOLDER / name) for name in names)


def _texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _packed(film: Film) -> dict[str, Any]:
    """A film as JSON; the arrays are in ``data``: bytes, deflated, in base64.

    The bytes are the rewards, float32, agent-major; the flags ``active``, ``terminations`` and ``truncations``, eight
    per byte; then varints: the view and the layout of each frame, the layouts, and the tracks. A **track** is one shape
    over the frames that contain it, stored as differences between frames. A **layout** lists the tracks of a frame in
    drawing order.
    """
    views: dict[Any, int] = {}
    colours: dict[Colour, int] = {}
    layouts: dict[Any, tuple[int, list[int]]] = {}
    tracks: dict[Any, int] = {}
    rows: defaultdict[int, list[list[int]]] = defaultdict(list)  # per track
    shown = []  # view and layout of each frame
    for drawing in film.drawings:
        view = drawing.bounds, drawing.width, drawing.height, drawing.background
        shapes = [shape for shape in drawing.shapes if isinstance(shape, Drawn)]
        kinds = tuple(_kind(shape) for shape in shapes)
        if kinds not in layouts:
            layouts[kinds] = len(layouts), _tracks(kinds, tracks)
        layout, order = layouts[kinds]
        shown.append((views.setdefault(view, len(views)), layout))
        positions = iter(_positions(drawing, shapes))
        for shape, (_, count, _), track in zip(shapes, kinds, order, strict=True):
            row = [number for _ in range(count) for number in next(positions)]
            rows[track].append([*row, _size(drawing, shape), colours.setdefault(shape.colour, len(colours))])
    numbers: list[Array] = [np.diff(np.array(shown), axis=0, prepend=0).T.ravel()]
    numbers += [np.diff(order, prepend=0) for _, order in layouts.values()]
    numbers += [_differences(np.array(rows[track])) for track in sorted(rows)]
    flags = (film.active, film.terminations, film.truncations)
    content = [
        film.rewards.T.astype("<f4").tobytes(),
        *(np.packbits(flag.T.ravel(), bitorder="little").tobytes() for flag in flags),
        _varints(np.concatenate(numbers)),
    ]
    return {
        "title": film.title,
        "num_steps": len(film.drawings) - 1,
        "fps": film.fps,
        "agents": list(film.agents),
        "roles": list(film.roles.items()),
        "facts": list(film.facts.items()),
        "views": [[*bounds, *others] for bounds, *others in views],
        "colours": list(colours),
        "layouts": [len(order) for _, order in layouts.values()],
        "tracks": [kind for kind, _ in tracks],
        "data": base64.b64encode(zlib.compress(b"".join(content), 9)).decode(),
    }


def _kind(shape: Drawn) -> tuple[str, int, int | None]:
    """Identifies a shape across frames: its kind, number of points and agent."""
    if isinstance(shape, Circle):
        return "circle", 1, shape.agent
    return "line" if isinstance(shape, Line) else "polygon", len(shape.points), None


def _tracks(kinds: Sequence[Any], tracks: dict[Any, int]) -> list[int]:
    """The track of each shape: the n-th shape of a kind is the n-th of that kind in every frame. Adds new tracks."""
    counts: Counter[Any] = Counter()
    order = []
    for kind in kinds:
        order.append(tracks.setdefault((kind, counts[kind]), len(tracks)))
        counts[kind] += 1
    return order


def _positions(drawing: Drawing, shapes: Sequence[Drawn]) -> list[list[int]]:
    """All points of all shapes, in subpixels from the upper left corner of the picture."""
    points: list[Any] = []
    for shape in shapes:
        own: Points = ((shape.x, shape.y),) if isinstance(shape, Circle) else shape.points
        points.extend(own)
    pixels = drawing.pixels(np.array(points).reshape(-1, 2)).clip(-MAX_PIXELS, MAX_PIXELS)
    positions: list[list[int]] = np.rint(pixels * SUBPIXELS).astype(np.int64).tolist()
    return positions


def _size(drawing: Drawing, shape: Drawn) -> int:
    """A disc's radius or a line's width, in subpixels."""
    size = shape.radius if isinstance(shape, Circle) else shape.width if isinstance(shape, Line) else 0.0
    return round(min(size * drawing.scale, MAX_PIXELS) * SUBPIXELS)


def _differences(rows: Array) -> Array:
    """Differences of a track's rows (frames, 2 points + 2): between consecutive points, then between frames."""
    rows = rows.copy()
    rows[:, 2:-2] -= rows[:, :-4].copy()
    return np.diff(rows, axis=0, prepend=0).T.ravel()


def _varints(numbers: Array) -> bytes:
    """Zigzag varints: the sign in the lowest bit, then seven bits per byte; the top bit marks that more follow.

    Protocol Buffers call this sint64: https://protobuf.dev/programming-guides/encoding/#signed-ints
    """
    numbers = numbers.astype(np.int64)
    unsigned = (numbers << 1) ^ (numbers >> 63)
    rest = unsigned[:, None] >> np.arange(0, 63, 7)
    kept = rest > 0
    kept[:, 0] = True
    more = np.zeros_like(kept)
    more[:, :-1] = kept[:, 1:]
    return ((rest & 127) | (more << 7)).astype(np.uint8)[kept].tobytes()
