"""Windows: what ``render_mode="human"`` shows, of which environments, at what speed, and what a closed window does."""

import copy

import gymnasium
import numpy as np
import pytest

import gpu_vecenv
from gpu_vecenv.declare.drawing import BLUE
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.views.frames import Frames, checked_env_indices, env_drawing
from gpu_vecenv.views.window import Window

pygame = pytest.importorskip("pygame", reason='pip install "gpu_vecenv[render]"')
RUNNER = 4


class Quick(TagGridworld):
    """A game whose pictures nobody waits for long."""

    source = TagGridworld.source_path()
    render_fps = 1000


class Hidden(Quick):
    """Whoever draws it has failed."""

    def draw(self, state):
        raise EnvDefinitionError("somebody looked")


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    yield
    if pygame.display.get_init():
        pygame.event.clear()


@pytest.fixture
def ticks(monkeypatch):
    """Speeds that pictures were waited for at, one for each picture."""
    found = []

    class Clock:
        def tick(self, fps):
            found.append(fps)

    monkeypatch.setattr(pygame.time, "Clock", Clock)
    return found


def shown(window):
    """What a window shows, (height, width, 3)."""
    return pygame.surfarray.array3d(window._window.get_surface()).swapaxes(0, 1)


def click_close(window):
    pygame.event.post(pygame.event.Event(pygame.WINDOWCLOSE, window=window._window))


def noise(height, width, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


VIEWS = {
    "gymnasium": lambda game, **arguments: gpu_vecenv.GymnasiumEnv(game, **arguments),
    "vector": lambda game, **arguments: gpu_vecenv.GymnasiumVectorEnv(game, 3, "cpu", **arguments),
    "vector in NumPy": lambda game, **arguments: gpu_vecenv.GymnasiumVectorEnv(
        game, 3, "cpu", output="numpy", **arguments
    ),
    "parallel": lambda game, **arguments: gpu_vecenv.ParallelEnv(game, "cpu", **arguments),
    "batched": lambda game, **arguments: gpu_vecenv.BatchedParallelEnv(game, 3, "cpu", **arguments),
}


def step(env):
    """One tick of any view, by chance."""
    actions = env.vec_env.sample_actions()
    if isinstance(env, gpu_vecenv.GymnasiumEnv):
        return env.step(actions.numpy().reshape(env.action_space.shape))
    if isinstance(env, gpu_vecenv.ParallelEnv):
        return env.step(dict(zip(env.possible_agents, actions[0], strict=True)))
    return env.step(actions)


def check_runners(env, environments, columns):
    """Each tile shows its environment's runner where the state has it."""
    picture = shown(env._viewer.window)
    rows = -(-len(environments) // columns)
    height, width = (picture.shape[0] + 4) // rows, (picture.shape[1] + 4) // columns  # of a tile and the line below
    for i, environment in enumerate(environments):
        left, right, bottom, top = env_drawing(env.vec_env, environment).bounds
        column, row = env.vec_env.state["cell"][environment, RUNNER].tolist()
        x = (column + 0.5 - left) / (right - left) * (width - 4) + i % columns * width
        y = (top - row - 0.5) / (top - bottom) * (height - 4) + i // columns * height
        assert tuple(picture[int(y), int(x)]) == BLUE, f"environment {environment}"


# A window alone


def test_a_window_shows_the_pictures_it_is_given(ticks):
    window = Window("title", 25)
    for picture in (noise(40, 60), noise(40, 60, 2), noise(50, 30)):
        window.show(picture)
        assert (shown(window) == picture).all()
    assert ticks == [25] * 3 and window._window.title == "title"
    window.close()
    window.close()
    assert window.closed


def test_a_closed_window_stays_closed_and_does_not_block(ticks):
    window = Window("title", 25)
    window.show(noise(40, 60))
    click_close(window)
    for _ in range(2):
        window.show(noise(40, 60))
        assert window.closed and window._window is None
    assert ticks == [25]


def test_a_click_closes_its_own_window_alone(ticks):
    one, other = Window("one", 25), Window("other", 30)
    for window in (one, other):
        window.show(noise(40, 60))
    click_close(other)
    one.show(noise(40, 60, 2))
    assert not one.closed and (shown(one) == noise(40, 60, 2)).all() and ticks == [25, 30, 25]
    other.show(noise(40, 60, 2))
    assert other.closed and not one.closed
    one.show(noise(40, 60))
    one.close()


def test_a_window_leaves_keys_to_others_and_keeps_the_queue_short():
    window = Window("title", 1000)
    window.show(noise(40, 60))
    pygame.event.clear()
    for kind in (pygame.KEYDOWN, pygame.MOUSEMOTION, pygame.KEYUP):
        pygame.event.post(pygame.event.Event(kind))
    window.show(noise(40, 60))
    assert [event.type for event in pygame.event.get()] == [pygame.KEYDOWN, pygame.KEYUP]
    window.close()


def test_without_pygames_windows_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delattr(pygame, "Window")  # as in pygame itself, which pygame-ce has left
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match=r'pygame-ce.*pip install "gpu_vecenv\[render\]"'):
        VIEWS["batched"](Quick, render_mode="human")


# What the views show


@pytest.mark.parametrize("view", VIEWS)
def test_each_reset_and_step_is_shown(view, ticks):
    env = VIEWS[view](Quick, render_mode="human", random_start=True)
    assert {"human", "rgb_array"} == set(env.metadata["render_modes"]) and env.render_mode == "human"
    environments = list(range(env.vec_env.num_envs))
    for tick in range(4):
        env.reset(seed=3) if tick in (0, 2) else step(env)
        assert len(ticks) == tick + 1 and ticks[-1] == env.metadata["render_fps"] == 1000
        check_runners(env, environments, 1 if len(environments) == 1 else 2)
        assert env.render() is None and len(ticks) == tick + 1
    window = env._viewer.window
    env.close()
    assert window.closed and window._window is None
    env.close()


@pytest.mark.parametrize("name", sorted(name for name, game in GAMES.items() if game.draw is not Env.draw))
def test_every_game_has_a_window(name, ticks):
    env = gpu_vecenv.GymnasiumEnv(name, render_mode="human")
    env.reset(seed=3)
    step(env)
    assert (shown(env._viewer.window) == Frames(env.vec_env)[0]).all() and ticks == [env.game.render_fps] * 2
    env.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_a_frame_that_is_not_shown_is_not_drawn(view, render_mode):
    env = VIEWS[view](Hidden, render_mode=render_mode)
    env.reset(seed=1)
    for _ in range(3):
        step(env)
    env.close()


@pytest.mark.parametrize("view", ["vector", "batched"])
@pytest.mark.parametrize(
    ("given", "environments", "columns"),
    [(2, [2], 1), ([2, 0], [2, 0], 2), (range(3), [0, 1, 2], 2), (None, [0, 1, 2], 2)],
)
def test_chosen_envs_are_shown_in_their_order(view, given, environments, columns):
    env = VIEWS[view](Quick, render_mode="human", render_env_indices=given, random_start=True)
    env.reset(seed=8)
    check_runners(env, environments, columns)
    if len(environments) == 1:
        assert shown(env._viewer.window).shape == (600, 600, 3)
    env.close()


def test_many_envs_are_shown_small():
    env = gpu_vecenv.BatchedParallelEnv(Quick, 40, "cpu", render_mode="human", random_start=True)
    env.reset(seed=8)
    picture = shown(env._viewer.window)
    assert picture.shape == (800, 800, 3)  # with lines between the pictures
    check_runners(env, list(range(16)), 4)
    env.close()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, ConfigError, ["render_env_indices has 3", "0 … 2", "num_envs is 3"]),
        ([0, -1], ConfigError, ["has -1"]),
        ([], ConfigError, ["empty", "at least one"]),
        ([0, 1.0], TypeError, ["1.0", "float", "ints"]),
        ([True], TypeError, ["True", "bool"]),
        ("12", TypeError, ["'1'", "str"]),
        (2.0, TypeError, ["2.0", "float"]),
    ],
)
def test_missing_envs_are_refused(given, error, words):
    with pytest.raises(error) as refusal:
        VIEWS["batched"](Quick, render_mode="human", render_env_indices=given)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_the_first_sixteen_envs_are_shown_where_none_are_chosen():
    assert checked_env_indices(5, None) == [0, 1, 2, 3, 4]
    assert checked_env_indices(1000, None) == list(range(16))
    assert checked_env_indices(1000, np.array([999, 3])) == [999, 3]


def test_a_window_that_is_closed_leaves_the_environment_as_it_is(ticks):
    env = VIEWS["vector"](Hidden, render_mode="human")
    env._viewer.window.close()
    env.reset(seed=1)  # the game's draw would fail
    step(env)
    assert ticks == [] and env.vec_env.elapsed_steps.tolist() == [1, 1, 1]
    env.close()


def test_a_copy_has_a_window_of_its_own(ticks):
    env = VIEWS["gymnasium"](Quick, render_mode="human")
    env.reset(seed=1)
    twin = copy.deepcopy(env)
    assert twin.render_mode == "human" and twin._viewer.window._window is None
    twin.reset(seed=1)
    env.close()
    assert (shown(twin._viewer.window) != 0).any() and not twin._viewer.window.closed
    twin.close()


def test_gymnasium_and_pettingzoo_leave_the_window_to_the_environment(ticks):
    env = gymnasium.make("gpu_vecenv/TagGridworld-v0", render_mode="human")
    assert not isinstance(env, gymnasium.wrappers.HumanRendering)
    env.reset(seed=1)
    env.step(env.action_space.sample())
    env.close()
    rows = gymnasium.make_vec(
        "gpu_vecenv/TagGridworld-v0", num_envs=4, device="cpu", render_mode="human", render_env_indices=[3]
    )
    rows.reset(seed=1)
    rows.step(rows.action_space.sample())
    rows.close()
    assert ticks == [10] * 4
    turns = gpu_vecenv.aec_env("tag_gridworld", render_mode="human")
    turns.reset(seed=1)
    for _ in range(turns.num_agents):
        turns.step(0)
    assert ticks == [10] * 6  # a tick once all have acted
    turns.close()
