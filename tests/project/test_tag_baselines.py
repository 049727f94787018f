"""The scripts of examples/tag_baselines.py: what they do in situations made by hand, and whom they catch."""

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpu_vecenv import VecEnv, configure

EXAMPLE = Path(__file__).parents[2] / "examples" / "tag_baselines.py"
STAY, COLUMN_UP, COLUMN_DOWN, ROW_UP, ROW_DOWN = range(5)
QUARTER = math.pi / 2


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("tag_baselines", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["tag_baselines"] = importlib.util.module_from_spec(spec)  # its dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tag_baselines"]


def grid(device: str, cells: list[list[int]], **config: Any) -> tuple[VecEnv, torch.Tensor]:
    """One replica with taggers and, last, the runner on these cells; and what they see."""
    env = VecEnv(configure("tag_gridworld", num_taggers=len(cells) - 1, **config), 1, device)
    env.reset(seed=0)
    env.state["cell"][0] = torch.tensor(cells, device=env.device)
    return env, env.observe()


def square(
    device: str, position: list[list[float]], heading: list[float], **config: Any
) -> tuple[VecEnv, torch.Tensor]:
    """One replica with agents at rest at these positions; and what they see."""
    env = VecEnv(configure("tag_continuous", **config), 1, device)
    env.reset(seed=0)
    env.state["position"][0] = torch.tensor(position, device=env.device)
    env.state["heading"][0] = torch.tensor(heading, device=env.device)
    return env, env.observe()


def turned(angle: torch.Tensor) -> torch.Tensor:
    """The same angle in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def same_turn(a: torch.Tensor, b: torch.Tensor, within: float) -> bool:
    return bool((turned(a - b).abs() <= within).all())


# ---------------------------------------------------------------------- tag_gridworld


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    ("runner", "moves"),
    [
        ([6, 5], [COLUMN_UP, COLUMN_UP]),
        ([4, 5], [COLUMN_DOWN, COLUMN_DOWN]),
        ([5, 6], [ROW_UP, ROW_UP]),
        ([5, 4], [ROW_DOWN, ROW_DOWN]),
        ([9, 2], [COLUMN_UP, COLUMN_UP]),
        ([6, 0], [ROW_DOWN, ROW_DOWN]),
        ([7, 7], [COLUMN_UP, ROW_UP]),  # as far on both axes: even and odd taggers differ
        ([2, 2], [COLUMN_DOWN, ROW_DOWN]),
        ([5, 5], [STAY, STAY]),
    ],
)
def test_taggers_on_the_grid_step_towards_the_runner(
    example: ModuleType, runner: list[int], moves: list[int], full: bool, device: str
) -> None:
    env, obs = grid(device, [[5, 5], [5, 5], runner], grid=10, full_observation=full)
    actions = example.pursuit(env.game)(obs[:, :2])
    assert actions.dtype == torch.int32
    assert actions.tolist() == [moves]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    ("tagger", "runner", "move"),
    [
        ([4, 5], [5, 5], {COLUMN_UP, ROW_UP, ROW_DOWN}),  # all leave it two steps away
        ([5, 2], [5, 0], {COLUMN_UP, COLUMN_DOWN}),  # at the wall, sideways
        ([2, 2], [0, 0], {STAY}),  # in the corner every other move is towards the tagger
        ([1, 0], [0, 0], {ROW_UP}),
        ([9, 10], [10, 10], {ROW_DOWN}),
        ([10, 8], [10, 9], {ROW_UP, COLUMN_DOWN}),
    ],
)
def test_the_runner_on_the_grid_gets_away_and_not_into_walls(
    example: ModuleType, tagger: list[int], runner: list[int], move: set[int], full: bool, device: str
) -> None:
    env, obs = grid(device, [tagger, runner], grid=10, full_observation=full, wall_penalty=100.0)
    actions = example.flee(env.game)(obs[:, 1:])
    assert actions.dtype == torch.int32 and actions.shape == (1, 1)
    assert actions.item() in move
    rewards = env.step(torch.cat([torch.zeros_like(actions), actions], 1))[1]
    assert rewards.min().item() > -1  # no wall


def test_the_runner_on_the_grid_heeds_the_nearest_tagger_first(example: ModuleType, device: str) -> None:
    # Away from the nearest, though that is towards the three others.
    env, obs = grid(device, [[4, 4], [8, 8], [9, 9], [10, 10], [5, 5]], grid=10)
    assert example.flee(env.game)(obs[:, 4:]).item() in {COLUMN_UP, ROW_UP}
    # As far from the nearest either way: the row leads away from the others as well.
    env, obs = grid(device, [[4, 5], [9, 5], [10, 5], [5, 5]], grid=10)
    assert example.flee(env.game)(obs[:, 3:]).item() in {ROW_UP, ROW_DOWN}


# ---------------------------------------------------------------------- tag_continuous


@pytest.mark.slow
def test_agents_find_their_heading_and_bounds_of_their_position(example: ModuleType, device: str) -> None:
    env = VecEnv(configure("tag_continuous", num_taggers=4, num_runners=12, max_steps=40), 8, device)
    game, where = env.game, env.game.layout.role_slices
    scripts = {"tagger": example.pursuit(game), "runner": example.flee(game)}
    obs, _ = env.reset(seed=4)
    widths, sure, playing = [], 0, 0
    for _ in range(100):  # episodes end and begin anew on the way
        state, old = env.state, {name: tensor.clone() for name, tensor in env.state.items()}
        time = env.elapsed_steps.clone()
        actions = env.sample_actions()
        for role, script in scripts.items():
            actions[:, where[role]] = script(obs[:, where[role]])
        for role, script in scripts.items():
            own, there = script.own, old["in_game"][:, where[role]] & (time > 0)[:, None]
            playing += there.count_nonzero().item()
            there &= own.sure
            sure += there.count_nonzero().item()
            # 1e-3: float32 sums of 40 steps, and the observation's own rounding.
            assert same_turn(own.heading[there], old["heading"][:, where[role]][there], 1e-3)
            position = old["position"][:, where[role]][there]
            assert bool((own.low >= 0).all() and (own.high <= game.side).all())
            assert bool((own.low[there] <= position + 1e-3).all() and (position <= own.high[there] + 1e-3).all())
            widths.append((own.high - own.low)[there].mean().item() if there.any() else math.nan)
        obs = env.step(actions)[0]
        for role, script in scripts.items():
            own, there = script.own, state["in_game"][:, where[role]] & (env.elapsed_steps > 0)[:, None]
            for name in ("speed", "acceleration"):
                truth = state[name][:, where[role]][there]
                torch.testing.assert_close(getattr(own, name)[there], truth, rtol=0, atol=1e-5, msg=name)
    assert env.faults().count_nonzero().item() == 0
    # Unsure is who was stopped by an edge at every step so far, or saw nobody who moves otherwise.
    assert sure > 0.95 * playing > 500
    assert min(width for width in widths if width == width) < game.side / 4


@pytest.mark.parametrize("see", [1, 3, "all"])
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("aside", [[4.0, 3.0], [-4.0, 3.0], [3.0, -5.0], [-2.0, -6.0]])
def test_a_tagger_turns_to_the_runner(
    example: ModuleType, aside: list[float], quarter: int, see: Any, device: str
) -> None:
    """The second step: at the first nobody has moved, so that no one can know where it heads."""
    config = {"num_taggers": 1, "num_runners": 1, "num_neighbors": see, "tagging_distance": 0.001}
    places = [[10.0, 10.0], [10.0 + aside[0], 10.0 + aside[1]]]
    env, obs = square(device, places, [quarter * QUARTER, QUARTER], **config)
    script = example.pursuit(env.game)
    still = torch.zeros(1, 1, 2, dtype=torch.int32, device=env.device)
    obs = env.step(torch.cat([script(obs[:, :1]), still], 1))[0]
    position, heading = env.state["position"][0], env.state["heading"][0, 0].clone()
    way = position[1] - position[0]
    wanted = turned(torch.atan2(way[1], way[0]) - heading)
    actions = script(obs[:, :1])
    turn = env.state["turn_level"][actions[0, 0, 1].long()]
    half = (env.game.max_turn - env.game.min_turn) / (env.game.turn_levels - 1) / 2
    # What no turn reaches in one step is made by the largest to that side.
    reachable = wanted.clamp(env.game.min_turn, env.game.max_turn)
    assert (turn - reachable).abs().item() <= half + 1e-3
    if wanted.abs().item() > half:
        assert turn.sign().item() == wanted.sign().item()
    assert env.state["acceleration_level"][actions[0, 0, 0].long()].item() == pytest.approx(0.1)  # far: faster


def test_a_tagger_leaves_a_runner_to_the_tagger_that_is_nearer(example: ModuleType, device: str) -> None:
    places = [[10.0, 10.0], [12.0, 10.0], [13.0, 10.0], [4.0, 10.0]]  # two taggers, two runners
    env, obs = square(device, places, [QUARTER] * 4, num_taggers=2, num_runners=2)
    script = example.pursuit(env.game)
    for _ in range(4):
        actions = torch.zeros(1, 4, 2, dtype=torch.int32, device=env.device)
        actions[:, :2] = script(obs[:, :2])
        obs = env.step(actions)[0]
    x = env.state["position"][0, :, 0].tolist()
    assert x[0] < 9.5 and x[1] > 12.0  # the nearest runner of both is the one at 13


def test_a_runner_runs_away_and_slides_along_the_edge(example: ModuleType, device: str) -> None:
    env, obs = square(device, [[13.0, 10.0], [15.0, 10.5]], [0.0, 0.0], num_taggers=1, num_runners=1)
    script = example.flee(env.game)
    for _ in range(30):
        actions = torch.zeros(1, 2, 2, dtype=torch.int32, device=env.device)
        actions[:, 1:] = script(obs[:, 1:])
        obs = env.step(actions)[0]
    x, y = env.state["position"][0, 1].tolist()
    assert x > 19.9 and y > 19.9  # not where it met the edge, but in the corner, as far as it gets


def test_a_runner_that_sees_no_tagger_leaves_the_others(example: ModuleType, device: str) -> None:
    places = [[1.0, 10.0], [12.0, 10.0], [13.0, 10.0]]  # each runner sees the other alone
    env, obs = square(device, places, [QUARTER] * 3, num_taggers=1, num_runners=2, num_neighbors=1)
    script = example.flee(env.game)
    for _ in range(6):
        actions = torch.zeros(1, 3, 2, dtype=torch.int32, device=env.device)
        actions[:, 1:] = script(obs[:, 1:])
        actions[:, 2] = torch.tensor([env.game.acceleration_levels, 0])
        obs = env.step(actions)[0]
    assert env.state["position"][0, 1, 0].item() < 11  # away from the other, though that is towards the tagger


def test_an_agent_without_neighbours_keeps_its_heading_or_speed(example: ModuleType, device: str) -> None:
    env, obs = square(device, [[5.0, 5.0], [15.0, 5.0]], [0.0, 0.0], num_taggers=1, num_runners=1)
    nobody = torch.zeros_like(obs)
    assert example.pursuit(env.game)(nobody[:, :1]).tolist() == [[[0, 0]]]
    assert example.flee(env.game)(nobody[:, 1:]).tolist() == [[[env.game.acceleration_levels, 0]]]


# ---------------------------------------------------------------------- whole episodes


def test_scripts_on_the_grid_beat_random_actions(example: ModuleType, device: str) -> None:
    game = configure("tag_gridworld")
    results = {
        (tag, run): example.play(
            game,
            {"tagger": example.pursuit(game) if tag else None, "runner": example.flee(game) if run else None},
            64,
            seed=3,
            device=device,
            episodes=100,
        )
        for tag in (False, True)
        for run in (False, True)
    }
    share = {key: result["terminated_fraction"] for key, result in results.items()}
    assert share[True, False] == share[True, True] == 1  # of 500 episodes of other seeds too
    assert share[False, False] < 0.4  # 0.19 in 500 episodes; 0.4 is five standard deviations of 100 away
    assert share[False, True] < 0.05  # 0 in 500
    assert results[True, False]["episode_length"] < 30  # 18 in 500; at random 95
    assert results[True, True]["return_tagger"] > 9 > 3 > results[False, False]["return_tagger"]
    assert results[False, True]["return_runner"] > results[False, False]["return_runner"]
    assert results[False, True]["episodes"] == 100


@pytest.mark.slow
def test_scripts_on_the_square_beat_random_actions(example: ModuleType, device: str) -> None:
    game = configure("tag_continuous", num_taggers=4, num_runners=12, max_steps=150)

    def play(tag: bool, run: bool) -> dict[str, float]:
        actors = {"tagger": example.pursuit(game) if tag else None, "runner": example.flee(game) if run else None}
        return example.play(game, actors, 16, seed=3, device=device, episodes=16)

    results = {(tag, run): play(tag, run) for tag in (False, True) for run in (False, True)}
    tagged = {key: result["return_tagger"] * 4 / 10 for key, result in results.items()}  # of 12 runners
    assert results[True, False]["terminated_fraction"] == 1 and results[True, False]["episode_length"] < 60  # 33 seen
    assert results[False, False]["terminated_fraction"] == 0
    assert tagged[False, False] < 6 < 7 < tagged[True, True] < 11  # 3.5 and 8.3 seen
    assert tagged[False, True] < 1 < 2 < tagged[False, False]  # 0.06 seen
    assert results[True, False] == play(True, False)  # nothing but the seed decides


def test_other_games_have_no_script(example: ModuleType) -> None:
    for script in (example.pursuit, example.flee):
        with pytest.raises(TypeError, match="no script plays cartpole; expected tag_gridworld or tag_continuous"):
            script(configure("cartpole"))


def test_play_counts_the_requested_episodes(example: ModuleType, device: str) -> None:
    """7 episodes in rounds of at most 3 replicas: the third plays 3 and counts 1; a script starts each round anew."""
    game = configure("tag_continuous", num_taggers=2, num_runners=3, max_steps=20, tagger_step_reward=1.0)
    results = example.play(game, {"tagger": example.pursuit(game)}, 3, 5, device, 7)
    assert results["episodes"] == 7
    assert 0 < results["episode_length"] <= 20
    tags = (results["return_tagger"] - results["episode_length"]) * 2 / 10
    assert tags * 7 == pytest.approx(round(tags * 7), abs=1e-3)  # a whole number of runners in 7 episodes


def test_main_prints_the_four_pairings(
    example: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    example.main("tag_gridworld", episodes=4, num_envs=2, device=device)
    said = capsys.readouterr().out
    assert re.findall(r"(random|pursuit) +\S +(random|flee) +\S +([\d.]+)%", said)[3] == ("pursuit", "flee", "100.0")
    assert len(re.findall(r"[\d.]+%", said)) == 4
