"""A page to watch episodes in: one HTML file that needs nothing but a browser.

The page holds its films as numbers, which its scripts unpack and draw. Places are rounded to 1/32 of a pixel of the
drawing's own picture: what is shown is at most 1/64 of such a pixel from the game's numbers, in x and in y.
"""

from __future__ import annotations

import base64
import hashlib
import json
import string
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_vecenv.declare.drawing import Circle, Colour, Drawing, Line, Points, Polygon
from gpu_vecenv.errors import EnvDefinitionError

SUBPIXELS = 32  # of a place, per pixel
FARTHEST = 1e6  # pixels from the picture's corner; what lies beyond is put there
SCRIPTS = ("film.js", "stage.js", "plot.js", "page.js")  # one module
# All that is in the page comes with it, and nothing of what it shows is ever run.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"
)

Array = np.ndarray[Any, Any]
Drawn = Circle | Line | Polygon


@dataclass(frozen=True, kw_only=True)
class Film:
    """One episode of T steps and A agents, ready to be shown.

    Args:
        title: What this film is, in a few words.
        drawings: T + 1 pictures: that of the start and one after each step.
        agents: Names by place, such as "tagger_0".
        roles: Role -> how many agents it has, in agent order.
        rewards: (T, A) float32. A sum that is not finite leaves a gap in the plot.
        active: (T + 1, A) bool: whose next action counts.
        terminations: (T, A) bool.
        truncations: (T, A) bool.
        facts: What the caption says: configuration, seed, digest.
        fps: Ticks a second at the usual speed, 1 … 1000.

    Raises:
        EnvDefinitionError: A part is not of the type, dtype or size above, or a disc belongs to no agent.
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
        expect(_texts(names) and len(names) > 0, "agents", repr(names), "their names, a str each")
        shared = isinstance(self.roles, Mapping) and _texts(list(self.roles)) and all(map(_whole, self.roles.values()))
        shared = shared and min(self.roles.values(), default=0) >= 1 and sum(self.roles.values()) == len(names)
        expect(shared, "roles", repr(self.roles), f"role -> how many, {len(names)} agents in all")
        texts = isinstance(facts, Mapping) and _texts([*facts, *facts.values()])
        expect(texts, "facts", repr(facts), "name -> text, a str each")
        expect(_whole(self.fps) and 1 <= self.fps <= 1000, "fps", repr(self.fps), "an int, 1 … 1000 steps a second")
        expect(steps >= 1, "drawings", f"{steps + 1} long", "at least 2: the start and one after each step")
        for place, drawing in enumerate(self.drawings):
            expect(isinstance(drawing, Drawing), f"drawings[{place}]", repr(drawing), "a Drawing")
            owners = [shape.agent for shape in drawing.shapes if isinstance(shape, Circle) and shape.agent is not None]
            last = max(owners, default=0)
            expect(last < len(names), f"drawings[{place}]", f"one with agent {last}", f"agents 0 … {len(names) - 1}")
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
    """One HTML page that plays the films side by side and in step; it loads nothing from anywhere.

    Browsers: Chrome and Edge 97, Firefox 113, Safari 16.4 and later; they have ``DecompressionStream``.

    Raises:
        ValueError: There is no film, or the title is no text.
    """
    films = list(films)
    if not films or not all(isinstance(film, Film) for film in films):
        raise ValueError(f"page: films are {films!r}; expected at least one Film")
    if not isinstance(title, str):
        raise ValueError(f"page: title is {title!r}; expected a str")
    content = {"title": title, "subpixels": SUBPIXELS, "films": [_packed(film) for film in films]}
    # Escaped like this it is the same JSON, and nothing in it can end the element that it stands in.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    parts = {"script": "".join(map(_part, SCRIPTS)), "style": _part("page.css")}
    policy = POLICY.format_map({name: _hash(text) for name, text in parts.items()})
    return string.Template(_part("page.html")).substitute(parts, policy=policy, data=data)


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a policy calls this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _packed(film: Film) -> dict[str, Any]:
    """A film as JSON. What there is much of lies in ``data``: bytes, deflated, in base64.

    The bytes are the rewards, agent after agent, float32; the flags ``active``, ``terminations`` and ``truncations``,
    eight to a byte; then whole numbers of seven bits a byte: the view of each frame, its layout, the layouts, and the
    tracks. A **track** is one shape through the frames that have it, so that its numbers change little from one to the
    next, and changes are what is stored. A **layout** says which tracks a frame has, in the order of drawing.
    """
    views: dict[Any, int] = {}
    colours: dict[Colour, int] = {}
    layouts: dict[Any, tuple[int, list[int]]] = {}
    tracks: dict[Any, int] = {}
    rows: defaultdict[int, list[list[int]]] = defaultdict(list)  # of each track
    shown = []  # of each frame: view, layout
    for drawing in film.drawings:
        view = drawing.bounds, drawing.width, drawing.height, drawing.background
        shapes = [shape for shape in drawing.shapes if isinstance(shape, Drawn)]
        kinds = tuple(_kind(shape) for shape in shapes)
        if kinds not in layouts:
            layouts[kinds] = len(layouts), _tracks(kinds, tracks)
        layout, order = layouts[kinds]
        shown.append((views.setdefault(view, len(views)), layout))
        positions = iter(_places(drawing, shapes))
        for shape, (_, count, _), track in zip(shapes, kinds, order, strict=True):
            row = [number for _ in range(count) for number in next(positions)]
            rows[track].append([*row, _size(drawing, shape), colours.setdefault(shape.colour, len(colours))])
    numbers: list[Array] = [np.diff(np.array(shown), axis=0, prepend=0).T.ravel()]
    numbers += [np.diff(order, prepend=0) for _, order in layouts.values()]
    numbers += [_changes(np.array(rows[track])) for track in sorted(rows)]
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
    """What a shape has in common with itself in another frame: its kind, how many points, whose body it is."""
    if isinstance(shape, Circle):
        return "circle", 1, shape.agent
    return "line" if isinstance(shape, Line) else "polygon", len(shape.points), None


def _tracks(kinds: Sequence[Any], tracks: dict[Any, int]) -> list[int]:
    """The track of each shape: the n-th of its kind in one frame is the n-th in the others; new tracks are added."""
    before: Counter[Any] = Counter()
    order = []
    for kind in kinds:
        order.append(tracks.setdefault((kind, before[kind]), len(tracks)))
        before[kind] += 1
    return order


def _places(drawing: Drawing, shapes: Sequence[Drawn]) -> list[list[int]]:
    """Every point of every shape in turn, in steps from the picture's upper left corner."""
    points: list[Any] = []
    for shape in shapes:
        own: Points = ((shape.x, shape.y),) if isinstance(shape, Circle) else shape.points
        points.extend(own)
    pixels = drawing.pixels(np.array(points).reshape(-1, 2)).clip(-FARTHEST, FARTHEST)
    positions: list[list[int]] = np.rint(pixels * SUBPIXELS).astype(np.int64).tolist()
    return positions


def _size(drawing: Drawing, shape: Drawn) -> int:
    """A disc's radius or a line's width, in steps."""
    size = shape.radius if isinstance(shape, Circle) else shape.width if isinstance(shape, Line) else 0.0
    return round(min(size * drawing.scale, FARTHEST) * SUBPIXELS)


def _changes(rows: Array) -> Array:
    """Of a track's rows (frames, 2 points + 2): each point from the one before, then each row from the one before."""
    rows = rows.copy()
    rows[:, 2:-2] -= rows[:, :-4].copy()
    return np.diff(rows, axis=0, prepend=0).T.ravel()


def _varints(numbers: Array) -> bytes:
    """Whole numbers, small ones in few bytes: sign in the lowest bit, then seven bits a byte, the top bit: more follow.

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
