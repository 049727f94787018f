"""The player page: its content and size, and that text of a film never becomes markup."""

import base64
import hashlib
import html.parser
import json
import re
import zlib

import numpy as np
import pytest
from support.films import chase, film

from gpu_vecenv.declare.drawing import BLACK, BLUE, GREEN, RED, Circle, Drawing, Line, Polygon, discs
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.watch.player import Film, page

SUBPIXEL = 1 / 32  # pixel; positions are rounded to it
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<!-- <script>",
    "<img src=x onerror='window.hacked = 1'>",
    '"></title><svg onload="window.hacked = 1">',
    "$title ${script} {policy} \\u003c \\ ' \" `${window.hacked = 1}`",
    "\u2028\u2029\u0000\u202e\ud800 ünï 游戏 &lt;b&gt; &amp;",
    "__proto__",
)


class Elements(html.parser.HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def parts(text):
    """(scripts, styles, data) of a page, as text."""
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.S)
    data = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert len(data) == 1
    return scripts, re.findall(r"<style>(.*?)</style>", text, re.S), data[0]


class Unpacked:
    """Unpacks a film from the page: an independent implementation of the format in gpu_vecenv/watch/player."""

    def __init__(self, packed):
        self.packed, self.content, self.at = packed, zlib.decompress(base64.b64decode(packed["data"])), 0
        agents, steps = len(packed["agents"]), packed["num_steps"]
        self.rewards = np.frombuffer(self.take(4 * agents * steps), "<f4").reshape(agents, steps).T
        self.active = self.flags(agents, steps + 1)
        self.terminations, self.truncations = self.flags(agents, steps), self.flags(agents, steps)
        views, layouts = self.sums(steps + 1), self.sums(steps + 1)
        orders = [self.sums(length) for length in packed["layouts"]]
        rows = {}
        for track, (_, points, _) in enumerate(packed["tracks"]):
            frames = [frame for frame, layout in enumerate(layouts) if track in orders[layout]]
            columns = [self.sums(len(frames)) for _ in range(2 * points + 2)]
            for column in range(2, 2 * points):
                columns[column] = [a + b for a, b in zip(columns[column], columns[column - 2], strict=True)]
            rows.update({(track, frame): row for frame, row in zip(frames, zip(*columns, strict=True), strict=True)})
        assert self.at == len(self.content), "bytes are left"
        self.frames = []
        for frame, (view, layout) in enumerate(zip(views, layouts, strict=True)):
            shapes = []
            for track in orders[layout]:
                kind, _, agent = packed["tracks"][track]
                *places, size, colour = rows[track, frame]
                pixels = np.array(places).reshape(-1, 2) * SUBPIXEL
                shapes.append((kind, pixels, size * SUBPIXEL, tuple(packed["colours"][colour]), agent))
            self.frames.append((packed["views"][view], shapes))

    def take(self, count):
        self.at += count
        return self.content[self.at - count : self.at]

    def flags(self, agents, rows):
        bits = np.frombuffer(self.take(-(-agents * rows // 8)), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: agents * rows].reshape(agents, rows).T.astype(bool)

    def sums(self, count):
        total, sums = 0, []
        for _ in range(count):
            value = shift = 0
            while True:
                byte = self.content[self.at]
                self.at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            total += (value >> 1) ^ -(value & 1)
            sums.append(total)
        return sums


def unpacked(text):
    return [Unpacked(packed) for packed in json.loads(parts(text)[2])["films"]]


def check_held(film, held):
    """The unpacked film equals the film, positions and sizes within half a subpixel."""
    for name in ("rewards", "active", "terminations", "truncations"):
        assert np.array_equal(getattr(held, name), getattr(film, name), equal_nan=name == "rewards"), name
    for name in ("title", "fps", "agents"):
        assert held.packed[name] == getattr(film, name)
    assert [tuple(pair) for pair in held.packed["roles"]] == list(film.roles.items())
    assert dict(held.packed["facts"]) == film.facts
    assert len(held.frames) == len(film.drawings)
    for drawing, (view, shapes) in zip(film.drawings, held.frames, strict=True):
        assert view == [*drawing.bounds, drawing.width, drawing.height, list(drawing.background)]
        assert len(shapes) == len(drawing.shapes)
        for shape, (kind, pixels, size, colour, agent) in zip(drawing.shapes, shapes, strict=True):
            assert kind == type(shape).__name__.lower() and colour == shape.colour
            assert agent == getattr(shape, "agent", None)
            points = [(shape.x, shape.y)] if kind == "circle" else shape.points
            # Half a subpixel by rounding; 1e-9 is of the float64 arithmetic, on numbers below 1e5.
            assert abs(pixels - drawing.pixels(points)).max() <= SUBPIXEL / 2 + 1e-9
            length = getattr(shape, "radius", getattr(shape, "width", 0.0)) * drawing.scale
            assert abs(size - length) <= SUBPIXEL / 2 + 1e-9


# ---------------------------------------------------------------------- content


def test_a_page_holds_its_films():
    films = [chase(30, 2, 7), chase(11, 1, 1, seed=3, title="another", fps=1000)]
    for given, held in zip(films, unpacked(page(films, "two")), strict=True):
        check_held(given, held)


def test_shapes_views_and_colours_may_change_from_frame_to_frame():
    random = np.random.default_rng(2)
    drawings = []
    for frame in range(12):
        left, bottom = random.normal(size=2) * 10**frame
        wide, high = random.uniform(0.1, 5, 2) * 10**frame
        points = np.array([left, bottom]) + random.uniform(-1, 2, (3 + frame % 4, 2)) * (wide, high)
        grey = (20 * frame,) * 3
        shapes = [
            Polygon(points, GREEN),
            Line(points[:2], wide / 9, grey),
            *discs(points, wide / 7, BLUE, range(len(points))),
            Circle(*points[0], 0, RED),
            Line(points, 0, BLACK),
        ]
        random.shuffle(shapes)
        bounds = (left, left + wide, bottom, bottom + high)
        drawings.append(Drawing(bounds, shapes[: frame % 3 * 4], 300 + frame, 4096 if frame else 1, grey))
    assert {len(drawing.shapes) for drawing in drawings} >= {0, 4, 8}
    film_ = film(drawings, {"agent": 9})
    (held,) = unpacked(page([film_], "changes"))
    check_held(film_, held)


def test_far_positions_are_clipped_to_a_million_pixels():
    drawings = [
        Drawing((0, 10, 0, 10), [Circle(x, -x, 1e300, RED), Line([(0, 0), (x, 5)], 1, RED)]) for x in (1, 1e300)
    ]
    (held,) = unpacked(page([film(drawings)], "far"))
    (_, circle, radius, _, _), (_, line, *_) = held.frames[1][1]
    assert circle.tolist() == [[1e6, 1e6]] and radius == 1e6 and line.tolist() == [[0, 600], [1e6, 300]]


def test_rewards_keep_their_bits():
    rewards = np.array([[0.1], [-0.0], [1e-45], [3e38], [np.nan], [np.inf]], np.float32)
    drawings = [Drawing((0, 1, 0, 1), [])] * 7
    (held,) = unpacked(page([film(drawings, rewards=rewards)], "bits"))
    assert held.rewards.tobytes() == rewards.tobytes()


@pytest.mark.slow
def test_500_steps_of_105_agents_are_less_than_a_megabyte():
    given = chase(500, 5, 100)  # random positions and rewards compress worse than those of games
    assert len(given.drawings[0].shapes) == 1 + 5 + 2 * 105
    text = page([given], "large")
    assert len(text.encode()) < 1_000_000
    (held,) = unpacked(text)
    assert len(held.frames) == 501 and held.rewards.shape == (500, 105)


# ---------------------------------------------------------------------- one file that loads nothing


def test_the_page_allows_its_own_script_and_style_only():
    text = page([chase(2, 1, 1)], "policy")
    scripts, styles, _ = parts(text)
    found = Elements(text).found
    (policy,) = [a["content"] for tag, a in found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def hashes(texts):
        return [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts]

    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert [rules.pop("script-src")] == hashes(scripts) and [rules.pop("style-src")] == hashes(styles)
    assert rules == {"img-src": "data:"}
    assert found.index(("meta", {"http-equiv": "Content-Security-Policy", "content": policy})) < 4, (
        "before anything else"
    )
    for tag, attributes in found:
        links = [attributes.get(name) or "" for name in ("src", "href", "action", "srcset", "data")]
        assert all(link == "" or link.startswith("data:image/svg+xml,") for link in links), (tag, links)
        assert not {name for name in attributes if name.startswith("on") or name == "style"}
    assert not re.search(
        r"url\(|@import|fetch\(|import\(|XMLHttp|WebSocket|innerHTML|insertAdjacent", "".join(scripts + styles)
    )


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_string_of_a_film_becomes_markup(hostile):
    drawings = [Drawing((0, 1, 0, 1), [])] * 3
    harmless = page([film(drawings, {"agent": 1}, ["name"], facts={"a": "b"})], "title")
    film_ = film(drawings, {hostile: 1}, [hostile], title=hostile, facts={hostile: hostile})
    text = page([film_], hostile)
    assert Elements(text).found == Elements(harmless).found, "the same elements with the same attributes"
    data = parts(text)[2]
    assert data.isascii() and not set("<>&") & set(data)
    assert text.replace(data, "") == harmless.replace(parts(harmless)[2], "")
    content = json.loads(data)
    assert content["title"] == content["films"][0]["title"] == hostile
    assert content["films"][0]["agents"] == [hostile] and content["films"][0]["facts"] == [[hostile, hostile]]
    assert content["films"][0]["roles"] == [[hostile, 1]]
    text.encode()  # what is written to a file


# ---------------------------------------------------------------------- refusals

TWO = [Drawing((0, 1, 0, 1), [Circle(0, 0, 1, RED, 0)])] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": b"x"}, ["Film.title", "b'x'", "str"]),
        ({"fps": 0}, ["Film.fps is 0", "1 … 1000"]),
        ({"fps": True}, ["Film.fps is True"]),
        ({"fps": 30.0}, ["Film.fps is 30.0"]),
        ({"agents": "agent_0"}, ["Film.agents", "'agent_0'"]),
        ({"agents": ["a", 1]}, ["Film.agents", "a str each"]),
        ({"roles": {"agent": 2}}, ["Film.roles", "1 agents in all"]),
        ({"roles": {"agent": 1, "nobody": 0}}, ["Film.roles", "'nobody': 0"]),
        ({"roles": {"agent": 2, "less": -1}}, ["Film.roles"]),
        ({"roles": {"agent": 1.0}}, ["Film.roles"]),
        ({"roles": {1: 1}}, ["Film.roles"]),
        ({"roles": ["agent"]}, ["Film.roles"]),
        ({"facts": {"seed": 7}}, ["Film.facts", "a str each"]),
        ({"facts": {7: "seed"}}, ["Film.facts"]),
        ({"facts": None}, ["Film.facts", "None"]),
        ({"drawings": TWO[:1]}, ["Film.drawings", "1 long", "at least 2"]),
        ({"drawings": [TWO[0], "picture"]}, ["Film.drawings[1]", "'picture'", "a Drawing"]),
        ({"drawings": [TWO[0], Drawing((0, 1, 0, 1), [Circle(0, 0, 1, RED, 1)])]}, ["drawings[1]", "agent 1", "0 … 0"]),
        ({"rewards": np.zeros((1, 1))}, ["Film.rewards is (1, 1) float64", "(1, 1) float32"]),
        ({"rewards": np.zeros((2, 1), np.float32)}, ["Film.rewards is (2, 1)", "2 drawings, 1 agents"]),
        ({"rewards": [[0.0]]}, ["Film.rewards is [[0.0]]"]),
        ({"active": np.ones((1, 1), bool)}, ["Film.active is (1, 1) bool", "(2, 1) bool"]),
        ({"terminations": np.ones((1, 2), bool)}, ["Film.terminations is (1, 2) bool"]),
        ({"truncations": np.ones((1, 1), np.uint8)}, ["Film.truncations is (1, 1) uint8"]),
    ],
)
def test_wrong_arguments_of_film_are_refused(changes, words):
    good = vars(film(TWO))
    with pytest.raises(EnvDefinitionError) as error:
        Film(**{**good, **changes})
    assert all(word in str(error.value) for word in [*words, "expected"]), error.value


def test_a_page_needs_films_and_a_title():
    with pytest.raises(ValueError, match=r"films are \[\]; expected at least one Film"):
        page([], "none")
    with pytest.raises(ValueError, match="expected at least one Film"):
        page([TWO[0]], "a drawing")
    with pytest.raises(ValueError, match="title is None; expected a str"):
        page([film(TWO)], None)


@pytest.mark.parametrize("agent", [-1, 1.0, "0", True])
def test_the_agent_of_a_disc_is_an_index_or_none(agent):
    with pytest.raises(EnvDefinitionError, match=r"Circle\.agent is .*; expected None or the index of an agent"):
        Circle(0, 0, 1, RED, agent)


def test_discs_of_agents():
    places = np.zeros((2, 2))
    assert [disc.agent for disc in discs(places, 1, RED)] == [None, None]
    made = discs(places, 1, RED, np.array([4, 2]))
    assert [disc.agent for disc in made] == [4, 2] and type(made[0].agent) is int
    with pytest.raises(ValueError):
        discs(places, 1, RED, [1])
