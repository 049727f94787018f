"""examples/connect_four_search.py: values are those of a plain recursion, tactics are seen, matches count right."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from oracles import connect_four as oracle
from support.scripts import imported_script

import gpu_vecenv

EXAMPLE = Path(__file__).parents[2] / "examples" / "connect_four_search.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported_script(EXAMPLE) as module:
        yield module


def planes(*rows: str) -> torch.Tensor:
    """The observation of the player of "x" from the lowest rows."""
    cells = np.array([list(row) for row in [*["......."] * (6 - len(rows)), *rows]])
    return torch.from_numpy(np.stack([cells == "x", cells == "o"], 2).astype(np.float32))


def negamax(board: np.ndarray, player: int, depth: int, example: ModuleType) -> list[int]:
    """The same values, one position after the other, by the rules in NumPy."""
    values = []
    for column, is_open in enumerate(oracle.open_columns(board)):
        if not is_open:
            values.append(example.ILLEGAL)
            continue
        after = oracle.drop(board, column, player)
        if oracle.has_line(after, player, 4):
            values.append(example.WIN + depth)
        elif depth == 1 or not oracle.open_columns(after).any():
            values.append(0)
        else:
            values.append(-max(negamax(after, 1 - player, depth - 1, example)))
    return values


@pytest.mark.parametrize(("depth", "moves", "positions"), [(1, 24, 60), (2, 20, 20), (3, 16, 4), (3, 38, 30)])
def test_values_are_those_of_a_plain_recursion(
    example: ModuleType, depth: int, moves: int, positions: int, random_seed: int
) -> None:
    env = gpu_vecenv.make("connect_four", positions, "cpu", opening_moves=moves)
    obs, _ = env.reset(seed=random_seed)
    boards, players = env.state["board"].numpy().astype(int), env.state["player"].flatten().tolist()
    seen = obs[torch.arange(positions), players]
    found = example.move_values(example.bits(seen[..., 0]), example.bits(seen[..., 1]), depth)
    expected = [negamax(board, player, depth, example) for board, player in zip(boards, players, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (("xxx....",), 1, {3}),
        (("ooo....", "xxx...."), 2, {3}),  # wins, and does not need to block
        (("x......", "ooo.x.."), 2, {3}),  # blocks
        (("..oo...", "..xx..."), 3, {1, 4}),  # two ends that are open
        (("..oo...",), 2, set(range(7))),  # the threat lies beyond the horizon
        (("..oo...",), 4, {1, 4}),  # and here within
        (("xo.....", "ox.....", "xo.....", "ox.....", "xo.....", "ox....."), 1, {2, 3, 4, 5, 6}),  # open columns alone
    ],
)
def test_the_best_moves_are_played_at_random(
    example: ModuleType, rows: tuple[str, ...], depth: int, columns: set[int]
) -> None:
    act = example.search(depth, seed=1, chunk=50)
    actions = act(planes(*rows).expand(120, 6, 7, 2))
    assert actions.shape == (120,) and actions.dtype == torch.int32
    assert set(actions.tolist()) == columns
    again = example.search(depth, seed=1, chunk=120)(planes(*rows).expand(120, 6, 7, 2))
    assert torch.equal(actions, again)


def test_a_match_counts_each_game_once(example: ModuleType, device: str) -> None:
    def first_open(obs: torch.Tensor) -> torch.Tensor:
        return (obs[..., 0, :, :] == 0).all(-1).int().argmax(-1)

    def last_open(obs: torch.Tensor) -> torch.Tensor:
        return 6 - (obs[..., 0, :, :] == 0).all(-1).flip(-1).int().argmax(-1)

    score = example.match(first_open, last_open, 6, seed=1, device=device)
    assert (score.wins, score.draws, score.games) == ((3, 0), (0, 0), (3, 3)) and score.win_rate == 0.5
    assert str(score) == "50.0% won (3/3 as first, 0/3 as second player), 0 drawn"
    chance = example.match(None, None, 400, seed=1, device=device)
    # The first player wins 55.5 % of random games, the second 44.2 %: 111 and 88 of 200, standard deviation 7.
    assert 60 < chance.wins[0] < 160 and 40 < chance.wins[1] < 140


def test_a_deeper_search_wins(example: ModuleType, device: str) -> None:
    assert example.match(example.search(2, 1, device), None, 40, 1, device).win_rate > 0.75


@pytest.mark.slow
def test_depth_5_beats_depth_1(example: ModuleType, device: str) -> None:
    assert example.match(example.search(5, 1, device), example.search(1, 2, device), 60, 1, device).win_rate > 0.7


@pytest.mark.slow
def test_policies_of_a_trainer_play(example: ModuleType, device: str) -> None:
    env = gpu_vecenv.make("connect_four", 4, device, autoreset_mode="next_step")
    trainer = gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig(total_steps=64, num_steps=16, hidden_sizes=(8,)), seed=1)
    for greedy in (True, False):
        player = example.trained(trainer.policies["player"], 1, greedy=greedy)
        assert sum(example.match(player, None, 20, 1, device).games) == 20
