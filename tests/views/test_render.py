import os
import subprocess
import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

import gpu_vecenv
from gpu_vecenv.declare.drawing import (
    BLACK,
    BLUE,
    BROWN,
    GOLD,
    GREEN,
    GREY,
    RED,
    WHITE,
    Circle,
    Drawing,
    Line,
    Polygon,
    blend,
    discs,
    square_bounds,
)
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import ClosedEnvError, ConfigError, EnvDefinitionError, ResetNeededError
from gpu_vecenv.views.frames import (
    Frames,
    checked_render_mode,
    env_drawing,
    rasterise,
    render_metadata,
    tiled,
    write_video,
)
from gpu_vecenv.views.gymnasium_env import GymnasiumEnv, GymnasiumVectorEnv

pytest.importorskip("pygame", reason='pip install "gpu_vecenv[render]"')

DRAWN = sorted(name for name, game in GAMES.items() if game.draw is not Env.draw)


class Watched(TagGridworld):
    """A game that keeps what its ``draw`` was given."""

    source = TagGridworld.source_path()
    seen: ClassVar[list[dict[str, Any]]] = []

    def draw(self, state):
        self.seen.append(dict(state))
        return super().draw(state)


class Undrawn(TagGridworld):
    source = TagGridworld.source_path()
    draw = Env.draw


class Misdrawn(TagGridworld):
    source = TagGridworld.source_path()

    def draw(self, state):
        return "a picture"


@pytest.fixture
def seen():
    Watched.seen.clear()
    return Watched.seen


def begun(game, num_envs=1, device="cpu", **arguments):
    env = gpu_vecenv.make(game, num_envs, device, **arguments)
    env.reset(seed=5)
    return env


def picture(game, **state):
    """The frame, and its drawing, of a game's environment with these values; the other fields are 0."""
    game = gpu_vecenv.configure(game)
    fields = {field.name: np.zeros(field.shape, field.dtype) for field in game.layout.fields}
    given = {name: np.array(value, fields[name].dtype) for name, value in state.items()}
    assert all(value.shape == fields[name].shape for name, value in given.items())
    drawing = game.draw({**fields, **given})
    return rasterise(drawing), drawing


def colour_at(frame, drawing, point):
    """The picture's colour at a place in the game's units; written out anew here, bounds in the middle, y upwards."""
    left, right, bottom, top = drawing.bounds
    height, width, _ = frame.shape
    scale = min(width / (right - left), height / (top - bottom))
    column = width / 2 + (point[0] - (left + right) / 2) * scale
    row = height / 2 - (point[1] - (bottom + top) / 2) * scale
    return tuple(frame[int(row), int(column)].tolist())


def where(frame, colour):
    """(rows, columns) of the pixels that have exactly this colour."""
    return np.nonzero((frame == colour).all(2))


# ---------------------------------------------------------------------- shapes


def test_x_grows_to_the_right_and_y_upwards():
    drawing = Drawing((0, 60, 0, 40), [Circle(10.5, 30.5, 3, RED), Circle(50.5, 5.5, 3, BLUE)], 60, 40)
    frame = rasterise(drawing)
    assert frame.shape == (40, 60, 3) and frame.dtype == np.uint8 and frame.flags.c_contiguous
    assert tuple(frame[9, 10]) == RED and tuple(frame[34, 50]) == BLUE
    assert drawing.pixels([(10.5, 30.5), (50.5, 5.5)]).tolist() == [[10.5, 9.5], [50.5, 34.5]]


def test_bounds_lie_in_the_middle_at_one_scale():
    square = Polygon([(5, 5), (6, 5), (6, 6), (5, 6)], BLACK)
    frame = rasterise(Drawing((5, 6, 5, 6), [square], 300, 100))
    assert (frame[:, 102:198] == BLACK).all() and (frame[:, :98] == WHITE).all() and (frame[:, 202:] == WHITE).all()


def test_a_circle_covers_its_radius():
    frame = rasterise(Drawing((0, 100, 0, 100), [Circle(50, 50, 20, GREEN)], 100, 100))
    rows, columns = np.mgrid[:100, :100] + 0.5
    distance = np.hypot(rows - 50, columns - 50)
    # A pixel's centre is at most 0.71 pixels from its corners, and pygame's circle is exact to a quarter of a pixel.
    assert (frame[distance < 19] == GREEN).all() and (frame[distance > 21] == WHITE).all()


@pytest.mark.parametrize("end", [(80, 20), (20, 80), (80, 80), (20, 20), (20, 50)])
def test_a_line_is_as_wide_as_it_says_with_round_ends(end):
    start = np.array([50.0, 50.0])
    frame = rasterise(Drawing((0, 100, 0, 100), [Line([start, end], 12, BLUE)], 100, 100))
    rows, columns = np.mgrid[:100, :100] + 0.5
    points = np.stack([columns, 100 - rows], 2) - start
    along = np.array(end) - start
    nearest = np.clip(points @ along / (along @ along), 0, 1)[..., None] * along
    distance = np.linalg.norm(points - nearest, axis=2)
    # As for circles; the arc of an end is a polygon of 15 sides, 0.04 pixels inside at this radius.
    assert (frame[distance < 5] == BLUE).all() and (frame[distance > 7] == WHITE).all()


def test_a_line_of_several_pieces_passes_through_its_points():
    frame = rasterise(Drawing((0, 100, 0, 100), [Line([(10, 10), (10, 90), (90, 90)], 4, RED)], 100, 100))
    assert tuple(frame[50, 10]) == tuple(frame[10, 50]) == tuple(frame[10, 10]) == RED
    assert tuple(frame[50, 50]) == WHITE


def test_a_later_shape_lies_on_an_earlier_one():
    shapes = [Circle(5, 5, 4, RED), Circle(5, 5, 4, BLUE)]
    assert tuple(rasterise(Drawing((0, 10, 0, 10), shapes, 10, 10))[5, 5]) == BLUE
    assert tuple(rasterise(Drawing((0, 10, 0, 10), shapes[::-1], 10, 10))[5, 5]) == RED


@pytest.mark.parametrize("background", [(1, 2, 3), (254, 253, 252), (127, 0, 255)])
def test_colours_stay_exactly_as_given(background):
    frame = rasterise(Drawing((0, 10, 0, 10), [], 31, 17, background))
    assert (frame == background).all()


def test_edges_are_smooth():
    frame = rasterise(Drawing((0, 10, 0, 10), [Circle(5, 5, 3, (0, 0, 0))], 100, 100))
    assert len(np.unique(frame)) > 5


@pytest.mark.parametrize(
    "shape", [Circle(500, 500, 0, BLACK), Line([(500, 500), (500, 501)], 0, BLACK), Circle(500, 500, 1e-9, BLACK)]
)
def test_no_disc_or_line_is_too_small_to_be_seen(shape):
    assert (rasterise(Drawing((0, 1000, 0, 1000), [shape], 50, 50)) != WHITE).any()


def test_what_lies_outside_is_cut_off():
    shapes = [
        Circle(1e30, 0, 1, RED),
        Circle(-50, 5, 10, RED),
        Line([(1e30, 1e30), (1e30, 2e30)], 1, RED),
        Polygon([(20, 0), (1e30, 0), (1e30, 10)], RED),
    ]
    assert (rasterise(Drawing((0, 10, 0, 10), shapes, 20, 20)) == WHITE).all()


def test_a_disc_larger_than_the_picture_fills_it():
    assert (rasterise(Drawing((0, 10, 0, 10), [Circle(5, 5, 1e30, RED)], 20, 20)) == RED).all()


def test_drawings_are_plain_data():
    at = np.array([[1, 2], [3, 4]], np.float32)
    line = Line(at, np.float32(2), RED)
    assert line == Line([(1, 2), (3, 4)], 2, RED) and line.points == ((1.0, 2.0), (3.0, 4.0))
    assert type(line.points[0][0]) is type(line.width) is float
    drawing = Drawing((0, 1, 0, 1), [line])
    at[:] = 0
    assert drawing == Drawing((0, 1, 0, 1), [Line([(1, 2), (3, 4)], 2, RED)]) and hash(drawing)
    assert discs(np.ones((2, 2), np.float32), 3, RED) == [Circle(1, 1, 3, RED)] * 2


def test_a_square_around_circles_holds_them_all():
    circles = [Circle(0, -7, 1, RED), Circle(3, 0, 2, RED)]
    left, right, bottom, top = square_bounds(circles, 2)
    assert left == bottom == -right == -top and top > 8
    assert square_bounds(circles, 20) == (-20, 20, -20, 20)


def test_a_blend_goes_from_one_colour_to_the_other():
    assert [blend((0, 100, 200), (100, 100, 0), share) for share in (0, 0.5, 1)] == [
        (0, 100, 200),
        (50, 100, 100),
        (100, 100, 0),
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Circle(float("nan"), 0, 1, RED), ["Circle.x", "nan", "finite"]),
        (lambda: Circle(0, np.float32("inf"), 1, RED), ["Circle.y", "inf"]),
        (lambda: Circle(0, 0, -1, RED), ["Circle.radius", "-1"]),
        (lambda: Circle(0, 0, "wide", RED), ["Circle.radius", "'wide'"]),
        (lambda: Circle(0, 0, 1, (0, 0, 256)), ["Circle.colour", "256"]),
        (lambda: Circle(0, 0, 1, "red"), ["Circle.colour", "'red'", "0 … 255"]),
        (lambda: Line([(0, 0)], 1, RED), ["Line.points", "at least 2"]),
        (lambda: Line([(0, 0), (0, np.nan)], 1, RED), ["Line.points", "finite"]),
        (lambda: Line([(0, 0), (1, 1)], -1, RED), ["Line.width", "-1"]),
        (lambda: Polygon([(0, 0), (1, 1)], RED), ["Polygon.points", "at least 3"]),
        (lambda: Polygon(np.zeros((4, 3)), RED), ["Polygon.points", "(x, y)"]),
        (lambda: Polygon([(0, 0), (1,)], RED), ["Polygon.points"]),
        (lambda: Drawing((0, 1, 0), []), ["Drawing.bounds", "left < right"]),
        (lambda: Drawing((1, 1, 0, 1), []), ["Drawing.bounds", "left < right"]),
        (lambda: Drawing((0, 1, 2, 1), []), ["Drawing.bounds", "bottom < top"]),
        (lambda: Drawing((0, np.inf, 0, 1), []), ["Drawing.bounds", "inf"]),
        (lambda: Drawing((0, 1, 0, 1), ["disc"]), ["Drawing.shapes", "'disc'", "Polygon"]),
        (lambda: Drawing((0, 1, 0, 1), [], width=0), ["Drawing.width", "0", "4096"]),
        (lambda: Drawing((0, 1, 0, 1), [], height=600.0), ["Drawing.height", "600.0"]),
        (lambda: Drawing((0, 1, 0, 1), [], background=None), ["Drawing.background", "None"]),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, words):
    with pytest.raises(EnvDefinitionError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


# ---------------------------------------------------------------------- games


def test_the_bundled_games_are_drawn():
    classic = {"cartpole", "mountain_car", "continuous_mountain_car", "acrobot", "pendulum"}
    assert {"tag_gridworld", "tag_continuous", *classic} <= set(DRAWN)
    assert {"simple_spread", "simple_tag", "simple_adversary"} <= set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_only_scenery_reaches_the_edge_of_a_picture(name):
    env = begun(name)
    for _ in range(5):
        frame = Frames(env)[0]
        edge = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        assert (edge.max(1) == edge.min(1)).all() and edge.min() >= min(GREY), "players are coloured or dark"
        assert (frame != edge[0]).any()
        for _ in range(20):
            env.step(env.sample_actions())


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_follows_from_the_state_alone(name):
    env, other = begun(name, 3), begun(name, 3)
    frames = Frames(env)[:]
    assert all((a == b).all() for a, b in zip(frames, Frames(other), strict=True))
    fixed = ("tag_gridworld", "connect_four", "overcooked")
    assert name in fixed or not (frames[0] == frames[1]).all(), "two starts look alike"


def test_grid_agents_are_in_their_cells():
    cells = [[3, 0], [3, 19], [20, 20], [0, 7], [11, 12]]
    frame, drawing = picture("tag_gridworld", cell=cells)
    assert colour_at(frame, drawing, (11.5, 12.5)) == BLUE
    assert all(colour_at(frame, drawing, (column + 0.5, row + 0.5)) == RED for column, row in cells[:-1])
    rows, columns = where(frame, RED)
    scale = drawing.scale
    found = np.stack([(columns + 0.5) / scale + drawing.bounds[0], drawing.bounds[3] - (rows + 0.5) / scale], 1)
    assert {tuple(cell) for cell in np.floor(found).astype(int).tolist()} == {tuple(cell) for cell in cells[:-1]}


def test_taggers_on_one_cell_are_all_seen():
    apart, _ = picture("tag_gridworld", cell=[[3, 3], [5, 5], [7, 7], [9, 9], [0, 0]])
    together, _ = picture("tag_gridworld", cell=[[3, 3], [3, 3], [3, 3], [3, 3], [0, 0]])
    overlap = len(where(apart, RED)[0]) - len(where(together, RED)[0])
    assert 0 <= overlap < 0.1 * len(where(apart, RED)[0])  # discs side by side share at most their blurred edges


def test_a_caught_runner_is_seen_among_taggers():
    frame, drawing = picture("tag_gridworld", cell=[[3, 3]] * 5)
    assert colour_at(frame, drawing, (3.5, 3.5)) == BLUE and len(where(frame, RED)[0])


@pytest.mark.parametrize("grid", [1, 49, 50, 1000, 32767])
def test_agents_on_grids_of_all_sizes_are_seen(grid):
    frame, drawing = picture(TagGridworld(grid=grid), cell=[[grid, grid]] * 4 + [[grid // 2, 0]])
    assert colour_at(frame, drawing, (grid // 2 + 0.5, 0.5)) == BLUE and len(where(frame, RED)[0])
    assert len(drawing.shapes) < 200


def tag_continuous(**changes):
    game = TagContinuous(num_taggers=1, num_runners=2, side=10.0)
    state = {
        "position": [[2, 3], [8, 3], [5, 9]],
        "heading": [0, np.pi / 2, np.pi],
        "in_game": [True, True, True],
    }
    return picture(game, **{**state, **changes})


def test_tag_shows_roles_by_colour_where_the_agents_are():
    frame, drawing = tag_continuous()
    assert [colour_at(frame, drawing, at) for at in [(2, 3), (8, 3), (5, 9)]] == [RED, BLUE, BLUE]
    frame, drawing = tag_continuous(position=[[2, 3], [1, 1], [5, 9]])
    assert colour_at(frame, drawing, (1, 1)) == BLUE and colour_at(frame, drawing, (8, 3)) == WHITE


def test_a_tagged_runner_is_faded():
    frame, drawing = tag_continuous(in_game=[True, False, True])
    faded = colour_at(frame, drawing, (8, 3))
    assert faded not in (WHITE, BLUE) and min(np.subtract(WHITE, faded)) > 0 and min(np.subtract(faded, BLUE)) > 0


def test_a_line_shows_the_heading_of_an_agent():
    frame, drawing = tag_continuous()
    ahead = 1.5 * 10 / 90  # between the disc's edge and the step's end
    steps = [(2 + ahead, 3), (8, 3 + ahead), (5 - ahead, 9)]
    assert [colour_at(frame, drawing, at) for at in steps] == [BLACK] * 3
    frame, drawing = tag_continuous(heading=[np.pi, np.pi / 2, 0])
    assert colour_at(frame, drawing, steps[0]) != BLACK and colour_at(frame, drawing, (2 - ahead, 3)) == BLACK


def test_a_taggers_reach_is_its_tagging_distance():
    for distance in (0.1, 0.3):
        game = TagContinuous(num_taggers=1, num_runners=1, side=10.0, tagging_distance=distance)
        frame, drawing = picture(game, position=[[5, 5], [0, 0]], in_game=[True, True])
        assert colour_at(frame, drawing, (5, 5 - 10 * distance + 0.1)) != WHITE
        assert colour_at(frame, drawing, (5, 5 - 10 * distance - 0.1)) == WHITE


@pytest.mark.parametrize("position", [-1.5, 0.0, 2.0])
def test_the_cart_is_at_its_position(position):
    frame, drawing = picture("cartpole", x=position, theta=0.0)
    columns = where(frame, BLACK)[1]
    middle = (columns.min() + columns.max() + 1) / 2
    assert abs(middle - (300 + position * drawing.scale)) <= 1  # pixel


@pytest.mark.parametrize("angle", [-0.2, 0.2, 3.0])
def test_the_pole_leans_to_the_right_at_positive_angles(angle):
    frame, drawing = picture("cartpole", x=0.5, theta=angle)
    assert colour_at(frame, drawing, (0.5 + 0.95 * np.sin(angle), 0.95 * np.cos(angle))) == BROWN


@pytest.mark.parametrize("name", ["mountain_car", "continuous_mountain_car"])
@pytest.mark.parametrize("goal", [-0.9, 0.3, 0.5])
def test_the_flag_is_at_the_goal_on_the_hill(name, goal):
    game = GAMES[name](goal_position=goal)
    frame, drawing = picture(game, position=-0.5)
    rows, columns = where(frame, GOLD)
    pole = drawing.pixels((goal, 0.55 + 0.45 * np.sin(3 * goal)))
    assert abs(columns.min() - pole[0]) <= 3 and rows.max() < pole[1]  # 3: the pole is in front of the cloth's edge
    assert colour_at(frame, drawing, (goal, 0.55 + 0.45 * np.sin(3 * goal) + 0.05))[0] < 140


@pytest.mark.parametrize("name", ["mountain_car", "continuous_mountain_car"])
@pytest.mark.parametrize("position", [-1.2, -0.5, 0.3])
def test_the_car_stands_on_the_hill_at_its_position(name, position):
    frame, drawing = picture(name, position=position)
    slope = np.arctan(1.35 * np.cos(3 * position))
    up = 0.05 * np.array([-np.sin(slope), np.cos(slope)])  # across the ground
    on_the_ground = np.array([position, 0.55 + 0.45 * np.sin(3 * position)])
    assert colour_at(frame, drawing, on_the_ground + up) == BLACK
    assert colour_at(frame, drawing, on_the_ground - up)[0] > 200


@pytest.mark.parametrize("angle", [[0.5, 1.0], [-2.0, 0.3], [3.0, 0.0]])
def test_the_acrobots_links_hang_at_their_angles(angle):
    frame, drawing = picture("acrobot", theta=angle)
    first, second = angle[0], angle[0] + angle[1]
    elbow = np.array([np.sin(first), -np.cos(first)])
    tip = elbow + np.array([np.sin(second), -np.cos(second)])
    assert colour_at(frame, drawing, elbow / 2) == BLUE and colour_at(frame, drawing, elbow) == BLACK
    assert colour_at(frame, drawing, (elbow + tip) / 2) == colour_at(frame, drawing, tip) == BROWN


def test_the_acrobots_goal_is_a_line_at_its_height():
    for height in (0.5, 1.0):
        frame, drawing = picture(GAMES["acrobot"](goal_height=height), theta=[0.0, 0.0])
        assert (
            colour_at(frame, drawing, (1.5, height))[0] < 200
            and colour_at(frame, drawing, (1.5, 1.5 - height)) == WHITE
        )


@pytest.mark.parametrize("angle", [0.0, 0.7, -2.5])
def test_the_pendulum_turns_counter_clockwise_from_upright(angle):
    frame, drawing = picture("pendulum", theta=angle)
    end = np.array([-np.sin(angle), np.cos(angle)])
    assert colour_at(frame, drawing, 0.95 * end) == RED and colour_at(frame, drawing, -0.5 * end) == WHITE


def test_landmarks_show_on_the_agents_that_cover_them():
    frame, drawing = picture(
        "simple_spread", position=[[0, 0], [0.8, -0.5], [-0.8, 0]], landmark=[[0.1, 0], [0.5, 0.9], [-0.2, -0.9]]
    )
    assert [colour_at(frame, drawing, at) for at in [(-0.05, 0), (0.8, -0.5), (-0.8, 0)]] == [BLUE] * 3
    assert [colour_at(frame, drawing, at) for at in [(0.1, 0), (0.5, 0.9), (-0.2, -0.9)]] == [BLACK] * 3


def test_adversaries_are_red_good_agents_blue_and_obstacles_grey():
    frame, drawing = picture(
        "simple_tag",
        position=[[0, 0], [0.8, -0.5], [-0.8, 0], [0, 0.8]],
        landmark=[[0.5, 0.5], [-0.5, -0.8]],
    )
    assert [colour_at(frame, drawing, at) for at in [(0, 0), (0.8, -0.5), (-0.8, 0)]] == [RED] * 3
    assert colour_at(frame, drawing, (0, 0.8)) == BLUE
    assert [colour_at(frame, drawing, at) for at in [(0.65, 0.5), (-0.5, -0.65)]] == [GREY] * 2


def test_without_obstacles_none_is_drawn():
    frame, _ = picture(GAMES["simple_tag"](num_obstacles=0))
    assert len(where(frame, GREY)[0]) == 0


@pytest.mark.parametrize("goal", [0, 1])
def test_the_goal_is_marked_among_the_landmarks(goal):
    places = [(0.5, 0.5), (-0.5, -0.8)]
    frame, drawing = picture("simple_adversary", position=[[0, 0], [0.8, -0.5], [-0.8, 0]], landmark=places, goal=goal)
    assert [colour_at(frame, drawing, at) for at in [(0, 0), (0.8, -0.5), (-0.8, 0)]] == [RED, BLUE, BLUE]
    assert colour_at(frame, drawing, places[goal]) == BLACK and colour_at(frame, drawing, places[1 - goal]) == GREY


def test_a_particle_that_wandered_off_is_still_in_the_picture():
    frame, drawing = picture("simple_spread", position=[[30, -40], [0, 0], [0, 1]])
    assert colour_at(frame, drawing, (30, -40)) == BLUE


def test_a_state_that_is_not_finite_is_named():
    env = begun("pendulum")
    env.state["theta"][0] = float("nan")
    with pytest.raises(EnvDefinitionError, match="finite"):
        Frames(env)[0]


# ---------------------------------------------------------------------- frames


def test_a_frame_is_drawn_when_it_is_looked_at(seen):
    frames = GymnasiumVectorEnv(Watched, 5, "cpu", render_mode="rgb_array")
    frames.reset(seed=1)
    frames = frames.render()
    assert len(frames) == 25 and len(seen) == 0
    frames[7]
    assert len(seen) == 1
    frames[3:5]
    assert len(seen) == 3


def test_draw_gets_the_state_of_one_env(seen, device):
    env = begun(Watched, 3, device, random_start=True)
    env.step(env.sample_actions())
    Frames(env)[1]
    (state,) = seen
    assert set(state) == {"cell", "elapsed_steps", "active"} and {type(value) for value in state.values()} == {
        np.ndarray
    }
    assert state["cell"].tolist() == env.state["cell"][1].tolist()
    assert state["elapsed_steps"].shape == () and state["elapsed_steps"] == 1
    assert state["active"].shape == (5,) and state["active"].all()


def test_draw_is_given_shared_fields_whole():
    given = {}

    class Shared(TagContinuous):
        source = TagContinuous.source_path()

        def draw(self, state):
            given.update(state)
            return super().draw(state)

    Frames(begun(Shared, 2))[1]
    assert given["turn_level"].shape == (21,) and given["position"].shape == (110, 2)


def test_draw_cannot_change_the_state():
    class Meddling(TagGridworld):
        source = TagGridworld.source_path()

        def draw(self, state):
            for value in state.values():
                value[...] = 0
            return super().draw(state)

    env = begun(Meddling, 2)
    before = env.state_dict()
    Frames(env)[1]
    assert all((env.state_dict()[name] == value).all() for name, value in before.items())


def test_agents_of_an_env_share_its_frame(seen):
    env = begun(Watched, 3, random_start=True)
    frames = Frames(env, copies=5)
    assert len(frames) == 15
    for place in (0, 4, 5, 14):
        frames[place]
    cells = env.state["cell"].tolist()
    assert [state["cell"].tolist() for state in seen] == [cells[0], cells[0], cells[1], cells[2]]


def test_frames_are_a_sequence():
    env = begun("tag_gridworld", 3, random_start=True)
    frames = Frames(env)
    pictures = list(frames)
    assert len(pictures) == 3
    for picture in pictures:
        assert picture.shape == (600, 600, 3) and picture.dtype == np.uint8
        assert picture.flags.c_contiguous and picture.flags.writeable
    assert (frames[-1] == pictures[2]).all() and (frames[np.int64(1)] == pictures[1]).all()
    backwards = frames[::-1]
    assert type(backwards) is list and all((a == b).all() for a, b in zip(backwards, pictures[::-1], strict=True))
    assert frames[3:] == []
    for place in (3, -4):
        with pytest.raises(IndexError, match=f"frame {place} of 3"):
            frames[place]


def test_frames_show_the_state_at_their_construction():
    """Also when they are kept in a list and drawn after further steps."""
    env = begun("tag_gridworld")
    frames = Frames(env)
    before = frames[0]
    env.state["cell"][0, -1] = torch.tensor([13, 4])
    assert (frames[0] == before).all() and not (Frames(env)[0] == before).all()
    env.close()
    assert (frames[0] == before).all()


@pytest.mark.parametrize(("mode", "time"), [("same_step", 0), ("next_step", 2), ("disabled", 2)])
def test_an_episode_that_has_ended_is_seen_at_its_end_or_at_the_new_start(seen, mode, time):
    env = begun(Watched, autoreset_mode=mode, max_steps=2)
    for _ in range(2):
        env.step(env.sample_actions())
    Frames(env)[0]
    assert seen[0]["elapsed_steps"] == time


def test_a_picture_is_the_same_on_every_device(device):
    here, there = begun("tag_continuous", 2), begun("tag_continuous", 2, device)
    assert (Frames(here)[1] == Frames(there)[1]).all()


def test_frames_need_a_reset_and_an_open_environment():
    env = gpu_vecenv.make("tag_gridworld", 1, "cpu")
    with pytest.raises(ResetNeededError, match="render before reset"):
        Frames(env)
    env.reset(seed=1)
    env.close()
    with pytest.raises(ClosedEnvError, match="render after close"):
        Frames(env)


def test_a_draw_that_gives_no_drawing_is_named():
    with pytest.raises(EnvDefinitionError, match=r"Misdrawn\.draw returned 'a picture'; expected a Drawing"):
        Frames(begun(Misdrawn))[0]


# ---------------------------------------------------------------------- render modes


def test_metadata_names_the_modes_and_the_speed():
    assert render_metadata(TagGridworld()) == {"render_modes": ["human", "rgb_array"], "render_fps": 10}
    assert render_metadata(Undrawn()) == {"render_modes": [], "render_fps": 10}


def test_an_unknown_render_mode_is_refused_with_the_valid_ones():
    assert checked_render_mode(TagGridworld(), None) is None
    assert checked_render_mode(TagGridworld(), "rgb_array") == "rgb_array"
    with pytest.raises(gymnasium.error.UnsupportedMode, match=r"'ansi'; TagGridworld has 'human', 'rgb_array'"):
        GymnasiumVectorEnv("tag_gridworld", 2, "cpu", render_mode="ansi")


def test_a_game_without_draw_says_how_to_add_it():
    assert checked_render_mode(Undrawn(), None) is None
    with pytest.raises(gymnasium.error.UnsupportedMode, match=r"Undrawn has no method draw.*draw\(self, state\)"):
        GymnasiumEnv(Undrawn, render_mode="rgb_array")
    with pytest.raises(EnvDefinitionError, match=r"Undrawn cannot be rendered: .*gpu-vecenv new my_game"):
        Undrawn().draw({})


def test_without_pygame_the_message_says_what_to_install(monkeypatch):
    env = begun("tag_gridworld")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match=r'pip install "gpu_vecenv\[render\]"'):
        Frames(env)[0]
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="pygame"):
        GymnasiumEnv("tag_gridworld", render_mode="rgb_array")
    GymnasiumEnv("tag_gridworld").close()


@pytest.mark.slow
def test_importing_the_package_does_not_load_pygame_and_drawing_opens_no_display():
    code = (
        "import sys, gpu_vecenv\n"
        "assert 'pygame' not in sys.modules\n"
        "from gpu_vecenv.declare.drawing import Drawing\n"
        "from gpu_vecenv.views.frames import rasterise\n"
        "assert rasterise(Drawing((0, 1, 0, 1), [])).shape == (600, 600, 3)\n"
        "assert not sys.modules['pygame'].display.get_init()\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYGAME", "SDL", "DISPLAY"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "pygame greets on the standard output"


def test_gymnasium_makes_environments_that_render():
    rows = gymnasium.make_vec("gpu_vecenv/TagGridworld-v0", num_envs=4, device="cpu", render_mode="rgb_array")
    rows.reset(seed=1)
    frames = rows.render()
    assert len(frames) == rows.num_envs == 20 and frames[19].shape == (600, 600, 3)
    assert rows.metadata["render_fps"] == 10 and rows.render_mode == "rgb_array"

    one = gymnasium.make("gpu_vecenv/CartPole-v1", render_mode="rgb_array")
    one.reset(seed=1)
    assert one.render().shape == (400, 600, 3)
    silent = gymnasium.make("gpu_vecenv/CartPole-v1")
    silent.reset(seed=1)
    assert silent.unwrapped.render() is None


# ---------------------------------------------------------------------- tiles


def plain(colour, height=20, width=30):
    return np.full((height, width, 3), colour, np.uint8)


@pytest.mark.parametrize(
    ("count", "columns", "grid"),
    [
        (1, None, (1, 1)),
        (2, None, (1, 2)),
        (4, None, (2, 2)),
        (5, None, (2, 3)),
        (9, None, (3, 3)),
        (10, None, (3, 4)),
        (3, 1, (3, 1)),
        (3, 5, (1, 5)),
    ],
)
def test_tiles_lie_row_by_row(count, columns, grid):
    frames = [plain((10 * i, 0, 200)) for i in range(count)]
    picture = tiled(frames, columns)
    assert picture.dtype == np.uint8 and picture.shape == (grid[0] * 24 - 4, grid[1] * 34 - 4, 3)
    for i, frame in enumerate(frames):
        row, column = divmod(i, grid[1])
        assert (picture[row * 24 : row * 24 + 20, column * 34 : column * 34 + 30] == frame).all()
    covered = count * 20 * 30
    assert (picture == BLACK).all(2).sum() == picture.shape[0] * picture.shape[1] - covered


def test_tiles_are_taken_from_frames_and_arrays():
    env = begun("tag_gridworld", 3, random_start=True)
    frames = Frames(env, scale=0.25)
    picture = tiled(frames)
    assert (picture == tiled(np.stack(frames[:]))).all() and (picture[:150, 154:304] == frames[1]).all()
    picture[:] = 0
    assert frames[0].any(), "the picture is fresh memory"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tiled([]), ["frames is empty", "at least one"]),
        (lambda: tiled([plain(RED)], 0), ["columns is 0", "positive"]),
        (lambda: tiled([plain(RED)], 1.0), ["columns is 1.0"]),
        (lambda: tiled([plain(RED), plain(RED, 21)]), ["(21, 30, 3)", "(20, 30, 3)", "equal size"]),
        (lambda: tiled([plain(RED).astype(float)]), ["float64", "uint8"]),
        (lambda: tiled([plain(RED)[..., 0]]), ["(20, 30)", "(height, width, 3)"]),
    ],
)
def test_frames_that_fit_no_grid_are_refused(call, words):
    with pytest.raises(ConfigError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("scale", [0.25, 0.5, 2])
def test_frames_have_the_requested_size(scale):
    env = begun("cartpole")
    env.state["x"][0] = 1.5
    (frame,) = Frames(env, scale=scale)
    assert frame.shape == (400 * scale, 600 * scale, 3)
    columns = where(frame, BLACK)[1]
    expected = frame.shape[1] / 2 + 1.5 * scale * env_drawing(env, 0).scale
    assert abs((columns.min() + columns.max() + 1) / 2 - expected) <= 1  # pixel


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf])
def test_a_scale_is_a_number_above_0(scale):
    with pytest.raises(ConfigError, match=f"scale is {scale}; expected a number above 0"):
        Frames(begun("cartpole"), scale=scale)


# ---------------------------------------------------------------------- films


@pytest.fixture(scope="module")
def imageio():
    pytest.importorskip("imageio_ffmpeg", reason='pip install "gpu_vecenv[render]"')
    return pytest.importorskip("imageio")


def film(imageio, path):
    """Frames of a film, (n, height, width, 3), and what it says of itself."""
    with imageio.get_reader(path) as reader:
        return np.stack([np.asarray(frame)[..., :3] for frame in reader]), reader.get_meta_data()


DISC = (58, 110, 200)  # no part is 0 or 255, where the codec clips


def middle(frame, colour):
    """(x, y) of a disc of this colour in a decoded frame.

    H.264 halves the resolution of colours and rounds them: up to 40 of 255 in a disc of 8 pixels, whose rim it blurs.
    """
    rows, columns = np.nonzero((np.abs(frame.astype(int) - colour) < 40).all(2))
    return np.array([columns.mean() + 0.5, rows.mean() + 0.5])


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
@pytest.mark.parametrize(("height", "width"), [(60, 80), (61, 79)])
def test_a_film_has_the_frames_it_was_given(imageio, tmp_path, name, height, width):
    places = [(15 + 5 * i, 20 + 3 * i) for i in range(7)]
    frames = [
        rasterise(Drawing((0, width, 0, height), [Circle(x, height - y, 8, DISC)], width, height)) for x, y in places
    ]
    write_video(iter(frames), tmp_path / name, fps=10)
    found, says = film(imageio, tmp_path / name)
    even = name == "a.mp4"
    assert found.shape == (7, height + height % 2 * even, width + width % 2 * even, 3)
    assert says.get("fps", 1000 / says["duration"]) == 10
    luma = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601; H.264 keeps it at full resolution, but for some rounding
    for frame, given, place in zip(found, frames, places, strict=True):
        assert np.abs(middle(frame, DISC) - place).max() < 1  # pixel, see above
        assert np.abs(frame[:height, :width] @ luma - given @ luma).max() < 16  # of 255


def test_a_film_replaces_an_earlier_one(imageio, tmp_path):
    for count in (5, 2):
        write_video([plain(RED)] * count, str(tmp_path / "a.mp4"), fps=5)
    assert len(film(imageio, tmp_path / "a.mp4")[0]) == 2 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("frames", "name", "fps", "error", "words"),
    [
        ([plain(RED)], "a.avi", 10, ConfigError, ["a.avi", ".mp4 or .gif"]),
        ([plain(RED)], "a", 10, ConfigError, [".mp4 or .gif"]),
        ([plain(RED)], "a.mp4", 0, ConfigError, ["fps is 0"]),
        ([plain(RED)], "a.mp4", np.nan, ConfigError, ["fps is nan"]),
        ([], "a.mp4", 10, ConfigError, ["frames is empty"]),
        ([plain(RED)[0]], "a.mp4", 10, ConfigError, ["(30, 3)", "(height, width, 3)"]),
        ([plain(RED)], "none/a.mp4", 10, FileNotFoundError, ["no folder", "none"]),
    ],
)
def test_a_film_that_cannot_be_written_is_refused_before_a_file_is_made(tmp_path, frames, name, fps, error, words):
    with pytest.raises(error) as refusal:
        write_video(frames, tmp_path / name, fps)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert list(tmp_path.iterdir()) == []


def test_frames_of_two_sizes_make_no_film(imageio, tmp_path):
    with pytest.raises(ConfigError, match=r"\(20, 40, 3\) uint8 beside \(20, 30, 3\) uint8"):
        write_video([plain(RED), plain(RED, 20, 40)], tmp_path / "a.gif", 10)


@pytest.mark.parametrize("library", ["imageio", "imageio_ffmpeg"])
def test_a_film_without_its_library_says_what_to_install(imageio, monkeypatch, tmp_path, library):
    monkeypatch.delitem(sys.modules, "imageio.plugins.ffmpeg", raising=False)  # it imports its library once
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        gymnasium.error.DependencyNotInstalled, match=r'videos need.*pip install "gpu_vecenv\[render\]"'
    ):
        write_video([plain(RED)], tmp_path / "a.mp4", 10)


def cell_middle(env, environment, agent):
    """Where the middle of an agent's cell is in its environment's frame, (x, y) in pixels."""
    left, _, _, top = (drawing := env_drawing(env, environment)).bounds
    column, row = env.state["cell"][environment, agent].tolist()
    return np.array([column + 0.5 - left, top - row - 0.5]) * drawing.scale


def test_gymnasium_films_an_episode(imageio, tmp_path):
    pytest.importorskip("moviepy")
    env = gymnasium.make("gpu_vecenv/TagGridworld-v0", render_mode="rgb_array", random_start=True, max_steps=3)
    env = gymnasium.wrappers.RecordVideo(env, str(tmp_path / "films"), lambda episode: episode == 1)
    vec_env, places = env.unwrapped.vec_env, []
    for seed in (4, 5):
        env.reset(seed=seed)
        places, over = [cell_middle(vec_env, 0, 4)], False
        while not over:
            *_, terminated, truncated, _ = env.step(vec_env.sample_actions()[0].numpy())
            places.append(cell_middle(vec_env, 0, 4))
            over = terminated or truncated
    env.close()
    (path,) = tmp_path.glob("films/*.mp4")
    frames, says = film(imageio, path)
    assert frames.shape == (len(places), 600, 600, 3) and says["fps"] == 10
    for frame, place in zip(frames, places, strict=True):
        assert np.abs(middle(frame, BLUE) - place).max() < 1  # pixel, see ``middle``


@pytest.mark.filterwarnings("ignore:.*autoreset mode is same-step")
@pytest.mark.parametrize(("mode", "first_only"), [("same_step", True), ("next_step", False)])
def test_gymnasium_films_vector_environments(imageio, tmp_path, first_only, mode):
    pytest.importorskip("moviepy")
    env = gymnasium.make_vec(
        "gpu_vecenv/Acrobot-v1", num_envs=4, device="cpu", render_mode="rgb_array", autoreset_mode=mode
    )
    env = gymnasium.wrappers.vector.RecordVideo(
        env, str(tmp_path / "films"), record_first_only=first_only, video_length=3
    )
    env.reset(seed=1)
    vec_env, joints = env.unwrapped.vec_env, []
    for step in range(4):
        angles = vec_env.state["theta"][:, 0].double().numpy()
        drawing = env_drawing(vec_env, 0)
        joints.append(drawing.pixels(np.stack([np.sin(angles), -np.cos(angles)], 1)))
        vec_env.state["theta"][:, 0] += torch.arange(4) + 0.1 * step  # far apart
        env.step(vec_env.sample_actions())
    env.close()
    (path,) = tmp_path.glob("films/*.mp4")
    frames, says = film(imageio, path)
    assert says["fps"] == 15 and frames.shape == ((4, 500, 500, 3) if first_only else (4, 1000, 1000, 3))
    for frame, at in zip(frames, joints, strict=True):
        for environment, (x, y) in enumerate(at[:1] if first_only else at):
            row, column = int(y) + environment // 2 * 500, int(x) + environment % 2 * 500
            assert frame[row, column].max() < 70, "a joint is black, and stands on coloured links"
