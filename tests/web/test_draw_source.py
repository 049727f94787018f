"""The translated ``draw``: in Node.js the shapes of every game, and Python's operators on arrays."""

import dataclasses
import importlib
import itertools
import json
import sys
from functools import lru_cache

import numpy as np
import pytest
from support.node import require_node, run_node

import gpu_vecenv
from gpu_vecenv.declare.drawing import BLUE, RED, Circle, Drawing, Line, Polygon, blend, discs, square_bounds
from gpu_vecenv.declare.env import Env, Field, f32, i32
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.web import javascript
from gpu_vecenv.web.javascript import draw_source

require_node()
KINDS = {"b": "b", "f": "f"}
# Python computes with the state's float32 numbers in float32 where both sides are arrays, the page in doubles.
RELATIVE = 1e-5
COLOUR = 1  # a share that is rounded to float32 may round to the colour beside


def described(state):
    return {
        name: {"data": np.ravel(array).tolist(), "shape": list(array.shape), "kind": KINDS.get(array.dtype.kind, "i")}
        for name, array in state.items()
    }


def drawn_in_node(game, states, tmp_path):
    script = tmp_path / "draw.js"
    script.write_text(draw_source(game))
    return run_node("drawing.js", {"states": [described(state) for state in states]}, "numpy.js", script)


def plain(drawing):
    kinds = {Circle: "circle", Line: "line", Polygon: "polygon"}
    shapes = [{"kind": kinds[type(shape)], **dataclasses.asdict(shape)} for shape in drawing.shapes]
    return json.loads(json.dumps({**dataclasses.asdict(drawing), "shapes": shapes}))


def check_equal(found, expected):
    for key in ("width", "height", "background"):
        assert found[key] == expected[key]
    assert found["bounds"] == pytest.approx(expected["bounds"])
    assert len(found["shapes"]) == len(expected["shapes"])
    scale = max(map(abs, expected["bounds"]))
    for one, other in zip(found["shapes"], expected["shapes"], strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if key in ("kind", "agent"):
                assert one[key] == value
            elif key == "colour":
                assert one[key] == pytest.approx(value, abs=COLOUR)
            else:
                assert np.array(one[key]) == pytest.approx(np.array(value), rel=RELATIVE, abs=RELATIVE * scale)


def states_of(env, steps):
    env.reset(seed=3)
    for _ in range(steps):
        env.step(env.sample_actions())
        shared = {field.name for field in env.layout.fields if field.shared}
        yield {n: (t if n in shared else t[0]).numpy().copy() for n, t in env.state.items()}


@pytest.mark.parametrize("name", GAMES)
def test_a_game_is_drawn_with_the_same_shapes(name, tmp_path):
    game = gpu_vecenv.configure(name)
    states = list(states_of(gpu_vecenv.VecEnv(game, 1, "cpu"), 30))
    drawings = drawn_in_node(game, states, tmp_path)
    for state, found in zip(states, drawings, strict=True):
        check_equal(found, plain(game.draw(state)))


def test_randomised_parameters_have_the_values_of_the_environment(tmp_path):
    game = dataclasses.replace(gpu_vecenv.configure("cartpole"), randomize={"half_length": (0.2, 2.0)})
    states = list(states_of(gpu_vecenv.VecEnv(game, 1, "cpu"), 90))[::6]
    assert len({state["half_length"].item() for state in states}) > 1
    for state, found in zip(states, drawn_in_node(game, states, tmp_path), strict=True):
        check_equal(found, plain(game.with_drawn_values(state).draw(state)))


PIECES = {"a": 3, "b": (1, 2)}
NUMBERS = np.array([[1.5, -2.0, 0.0], [4.0, 5.0, -6.5]])


@lru_cache
def twice(x, factor=2):
    return factor * x


def spiral(count):
    for k in range(count):
        if k == 2:
            continue
        yield Circle(k, -k, twice(0.5, factor=k), RED)
        if k > 4:
            break


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sketch(Env):
    """A game that is only drawn; each way to compute gives numbers for lines."""

    count: int = 4
    state = (Field("place", f32, ("num_agents", 2)), Field("number", i32, ()))
    roles = {"agent": 3}  # noqa: RUF012
    obs_dim = 1
    action_space = gpu_vecenv.Discrete(2) if hasattr(gpu_vecenv, "Discrete") else None

    @property
    def half(self):
        return self.count / 2

    def ways(self, state):
        place, number = state["place"], int(state["number"])
        x, *rest = place[:, 0]
        total = 0
        while total < 7:
            total += 2
        order = np.argsort(-place[:, 1], kind="stable")
        matrix = np.stack([np.cos(place[:, 0]), np.sin(place[:, 0])], axis=1)
        table = np.zeros((2, 3))
        table[1, 0] = 5
        table[:, 2] = [7, 8]
        yield [x, rest[-1], total, self.half, -number // 3, -number % 3, number**2, 7 & 5, 7 | 8, 1 << 3]
        yield [*order.tolist(), *np.flatnonzero(place[:, 0] > 0), *np.where(place[:, 0] > 0, 1, place[:, 1])]
        yield [*(matrix @ NUMBERS.T[:2]).ravel(), *NUMBERS[::-1, 1:].ravel(), *NUMBERS.sum(0), *NUMBERS.max(axis=1)]
        yield [*table.ravel(), *np.argwhere(NUMBERS < 0).ravel(), *NUMBERS[NUMBERS < 0], *NUMBERS[[1, 0], [2, 1]]]
        yield [round(2.5), round(-0.5), round(3.5), int(-2.7), abs(-3), float(True), min(3, 2), sum([1, 2])]
        yield [len(PIECES), PIECES["b"][1], PIECES.get("z", 8), *(v for k, v in {"p": 1, "q": 2}.items() if k != "p")]
        yield [1 if 0 < number <= 5 else 2, 3 if "a" in PIECES and not number else 4, number or 6, None is None]
        yield [*np.linspace(0, 1, 4), *np.arange(2, 11, 3), *np.clip(NUMBERS, -1, 2).ravel(), np.hypot(3, 4)]
        yield [*[a * b for a in range(3) for b in range(a) if b % 2 == 0], *sorted([3, 1, 2]), *reversed([1, 2])]
        yield [*(i + v for i, v in enumerate(NUMBERS[0], start=1)), max([1, 9, 4]), (n := 4) + n]
        yield [*np.concatenate([NUMBERS, NUMBERS + 10], axis=1)[1], *np.split(np.arange(5), [2])[1], *NUMBERS.T.shape]
        yield [*NUMBERS.reshape(3, -1)[:, 0], *(NUMBERS * [1, 2, 3])[0], *(NUMBERS - NUMBERS[:, None, 0])[1]]
        yield [
            *(rest + rest),
            NUMBERS.size,
            *([1, 2] * 2),
            [4, 5, 6][-1],
            *[4, 5, 6][::2],
            (1, 2) == (1, 2),
            NUMBERS.ndim,
        ]
        counts = dict[tuple[int, int], int]()
        for pair in itertools.pairwise([1, 2, 1, 2]):
            counts[pair] = counts.get(pair, 0) + 1
        yield [*counts.values(), counts[(1, 2)], (2, 1) in counts, *np.diff(NUMBERS[0]), len(list[int]())]
        yield [
            NUMBERS.any(),
            (NUMBERS > 0).all(),
            NUMBERS.argmin(),
            *NUMBERS.astype(int)[0],
            ~number,
            *~(NUMBERS[0] > 0),
        ]

    def corner(self, factor):
        return factor * self.count

    def ring(self, state):
        """Functions in functions, which read variables as they are when called, and starred arguments with others."""
        scale = 1

        def around(angles):
            half = scale / 2
            return half * np.cos(angles), half * np.sin(angles)

        def both():
            yield Circle(*around(state["number"]), colour=RED, radius=0.1)
            yield Line([around(k) for k in range(3)], colour=BLUE, width=0.2)

        scale = self.count
        return both()

    def draw(self, state):
        shapes = [*self.ring(state)]
        shapes += [Line([(k, float(v)) for k, v in enumerate(way)] + [(0, 0)], 1, BLUE) for way in self.ways(state)]
        shapes += spiral(9)
        shapes += discs(state["place"], 0.5, blend(RED, BLUE, 0.3), agents=range(3))
        circles = shapes[-3:]
        return Drawing(square_bounds(circles, half=1.0), shapes, height=300)


class Inherited(Sketch):
    def corner(self, factor):
        return super().corner(factor) + 0.5

    def draw(self, state):
        return Drawing((0, self.corner(2), 0, 1), [])


def test_inherited_methods_are_called(tmp_path):
    game = Inherited.__new__(Inherited)
    object.__setattr__(game, "count", 5)
    object.__setattr__(game, "randomize", ())
    (found,) = drawn_in_node(game, [{}], tmp_path)
    assert found["bounds"] == [0, 10.5, 0, 1]


def test_python_on_arrays_computes_the_same_numbers(tmp_path):
    game = Sketch.__new__(Sketch)
    object.__setattr__(game, "count", 5)
    object.__setattr__(game, "randomize", ())
    states = [
        {"place": np.array([(0.5, 2), (-1, 3), (2, 1)], np.float64), "number": np.array(number, np.int32)}
        for number in (0, 4, 7)
    ]
    for state, found in zip(states, drawn_in_node(game, states, tmp_path), strict=True):
        check_equal(found, plain(Sketch.draw(game, state)))


def test_every_counterpart_is_in_the_scripts(tmp_path):
    script = tmp_path / "names.js"
    script.write_text(f"const draw = () => [{', '.join(f'{n} === undefined' for _, n in javascript.COUNTERPARTS)}];")
    assert not any(run_node("drawing.js", {"states": [{}]}, "numpy.js", script)[0])


@pytest.mark.parametrize(
    "body, what",
    [
        ("try:\n        pass\n    except ValueError:\n        pass", "try:"),
        ("import os", "import os"),
        ("open('x')", "open"),
        ("np.random.rand()", "np.random.rand"),
        ("with a:\n        pass", "with a:"),
        ("f(x=1)", "f(x=1)"),
        ("np.clip(*f, a_max=1)", "np.clip(*f, a_max=1)"),
        ("np.stack(f, axis=0, kind=1)", "np.stack(f, axis=0, kind=1)"),
        ("def inner(x=1):\n        pass", "def inner(x=1):"),
        ("def inner(*x):\n        pass", "*args and **kwargs"),
        ("f'{state}'", "f'{state}'"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(body, what, tmp_path, monkeypatch):
    source = f"import numpy as np\n\n\ndef draw(self, state):\n    f = state\n    {body}\n"
    (tmp_path / "odd_draw.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_draw", raising=False)
    odd_draw = importlib.import_module("odd_draw")
    kind = type("Odd", (type(gpu_vecenv.configure("cartpole")),), {"draw": odd_draw.draw})
    with pytest.raises(EnvDefinitionError) as caught:
        draw_source(kind())
    assert f"odd_draw.py:6: draw uses {what}, which has no counterpart in a page" in str(caught.value)


def test_a_game_without_draw_is_refused():
    game = gpu_vecenv.configure("cartpole")
    kind = type("Plain", (type(game),), {"draw": Env.draw})
    with pytest.raises(EnvDefinitionError, match=r"Plain has no method draw, .*gpu-vecenv new my_game"):
        draw_source(kind())
