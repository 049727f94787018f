"""The scripted policies of examples/tag_baselines.py: moves on the grid, and results against random play."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.scripts import imported_script

from gpu_vecenv import VecEnv, configure

EXAMPLE = Path(__file__).parents[2] / "examples" / "tag_baselines.py"
STAY, COLUMN_UP, COLUMN_DOWN, ROW_UP, ROW_DOWN = range(5)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported_script(EXAMPLE) as module:
        yield module


def grid(device: str, cells: list[list[int]], **config: Any) -> tuple[VecEnv, torch.Tensor]:
    """One environment with taggers and, last, the runner on these cells; and its observations."""
    env = VecEnv(configure("tag_gridworld", num_taggers=len(cells) - 1, **config), 1, device)
    env.reset(seed=0)
    env.state["cell"][0] = torch.tensor(cells, device=env.device)
    return env, env.observe()


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


@pytest.mark.parametrize("num_neighbors", [3, "all"])
@pytest.mark.parametrize("role", ["tagger", "runner"])
def test_what_is_observed_is_the_state(example: ModuleType, role: str, num_neighbors: Any, device: str) -> None:
    """Of an egocentric observation, after some steps: own motion and place, and those of the agents seen."""
    config: dict[str, Any] = {"num_taggers": 2, "num_runners": 3, "num_neighbors": num_neighbors, "side": 5.0}
    env = VecEnv(configure("tag_continuous", egocentric=True, **config), 20, device)
    obs, _ = env.reset(seed=4)
    for _ in range(30):
        obs = env.step(env.sample_actions())[0]
    here, (x, heading, speed) = env.game.layout.role_slices[role], map(env.state.get, ("position", "heading", "speed"))
    own, playing = example.ObservedState(env.game, role), env.state["in_game"][:, here]
    assert playing.any()
    sight = own.update(obs[:, here])
    near = {"rtol": 0, "atol": 1e-4}  # float32's rounding of places up to 5, after a turn and back
    for found, expected in ((own.low, x), (own.high, x), (own.speed, speed), (example.direction(own.heading), None)):
        expected = example.direction(heading) if expected is None else expected
        torch.testing.assert_close(found[playing], expected[:, here][playing], **near)
    velocity = speed[..., None] * example.direction(heading)
    moves = sight.speed[..., None] * example.direction(sight.heading)
    for seen, of in ((sight.position, x[:, None] - x[:, here, None]), (moves, velocity[:, None].expand(-1, 5, 5, 2))):
        apart = (seen[..., None, :] - of[:, : seen.shape[1], None]).abs().amax(-1)  # from each of the five
        assert apart.amin(-1)[sight.there & playing[..., None]].max() < near["atol"]


@pytest.mark.slow
@pytest.mark.parametrize("egocentric", [False, True])
def test_scripts_on_the_square_beat_random_actions(example: ModuleType, egocentric: bool, device: str) -> None:
    game = configure("tag_continuous", num_taggers=4, num_runners=12, max_steps=150, egocentric=egocentric)

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
    """7 episodes in rounds of at most 3 environments: of the third only 1 counts; scripts restart with each round."""
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
