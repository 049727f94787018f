"""Connect Four against PettingZoo's own, against rules in NumPy for other boards, and by its count of positions."""

import numpy as np
import pytest
import torch
from oracles import connect_four as oracle
from pettingzoo.classic.connect_four.connect_four import raw_env

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.engine.vec_env import Fault
from gpu_vecenv.errors import ConfigError

# Distinct positions after each number of moves, of games without errors that end with a line or a full board: sequence
# A212693 of the On-Line Encyclopedia of Integer Sequences, computed by John Tromp.
POSITIONS = (1, 7, 49, 238, 1120, 4263, 16422, 54859, 184275, 558186, 1662623)
BOARDS = [
    {"num_rows": 4, "num_columns": 5, "line_length": 3},
    {"num_rows": 7, "num_columns": 3, "line_length": 4},
    {"num_rows": 2, "num_columns": 9, "line_length": 2},
    {"num_rows": 1, "num_columns": 8, "line_length": 3},
    {"num_rows": 9, "num_columns": 10, "line_length": 3, "max_steps": 12},
    {"num_rows": 5, "num_columns": 5, "line_length": 4, "max_steps": 20},
]


def made(num_envs: int, device: str = "cpu", **config) -> VecEnv:
    env = gpu_vecenv.make("connect_four", num_envs, device, autoreset_mode="disabled", **config)
    env.reset(seed=3)
    return env


def place(env: VecEnv, boards: torch.Tensor, players: torch.Tensor | int) -> None:
    """Let every environment play on from a board (num_envs, rows, columns)."""
    env.reset()
    env.state["board"].copy_(boards)
    env.state["player"].copy_(torch.as_tensor(players).expand(env.num_envs))
    env.observe()


def picture(*rows: str) -> torch.Tensor:
    """A board from its lowest rows: "." empty, "x" player 0, "o" player 1."""
    cells = [[".xo".index(cell) for cell in row] for row in rows]
    return torch.tensor([[0] * 7] * (6 - len(rows)) + cells, dtype=torch.uint8)


def compare_with_pettingzoo(games: int, seed: int, device: str) -> dict[str, int]:
    """Plays games of random moves in both, compares everything after every step, and counts how they end."""
    env = gpu_vecenv.make("connect_four", games, device, autoreset_mode="disabled")
    obs, info = env.reset(seed=seed)
    theirs = [raw_env() for _ in range(games)]
    for each in theirs:
        each.reset()
    playing, ends = np.ones(games, bool), {"first wins": 0, "second wins": 0, "drawn": 0}
    rewards, terminations, truncations = np.zeros((games, 2)), np.zeros((games, 2), bool), np.zeros((games, 2), bool)
    while True:
        boards, masks, acting = (x.cpu().numpy() for x in (obs, info["action_mask"], info["acting"]))
        for e in np.flatnonzero(playing):
            for i, agent in enumerate(theirs[e].possible_agents):
                seen, selected = theirs[e].observe(agent), theirs[e].agent_selection == agent
                np.testing.assert_array_equal(boards[e, i], seen["observation"])
                assert rewards[e, i] == theirs[e].rewards[agent]
                assert terminations[e, i] == theirs[e].terminations[agent]
                assert truncations[e, i] == theirs[e].truncations[agent]
                if not terminations[e, i]:
                    assert acting[e, i] == selected
                    np.testing.assert_array_equal(masks[e, i], seen["action_mask"] if selected else [1] * 7)
            if terminations[e].any():
                playing[e] = False
                ends[{1: "first wins", -1: "second wins", 0: "drawn"}[int(rewards[e, 0])]] += 1
        if not playing.any():
            return ends
        actions = env.sample_actions()
        chosen = actions.cpu().numpy()
        for e in np.flatnonzero(playing):
            theirs[e].step(int(chosen[e, theirs[e].possible_agents.index(theirs[e].agent_selection)]))
        env.reset(mask=torch.as_tensor(~playing, device=env.device))  # those that have ended play another game, unseen
        obs, *outputs, info = env.step(actions)
        rewards, terminations, truncations = (x.cpu().numpy() for x in outputs)


def test_random_games_agree_with_pettingzoo(random_seed, device):
    ends = compare_with_pettingzoo(40, random_seed, device)
    assert sum(ends.values()) == 40


@pytest.mark.slow
def test_a_thousand_random_games_agree_with_pettingzoo(random_seed, device):
    ends = compare_with_pettingzoo(1000, random_seed, device)
    # By chance the first player wins 55.5 %, the second 44.2 %, and 0.3 % are drawn: each bound is off by more than 7
    # standard deviations of 1,000 games.
    assert 440 < ends["first wins"] < 680 and 320 < ends["second wins"] < 560


def test_names_and_spaces_are_those_of_pettingzoo():
    ours, theirs = gpu_vecenv.parallel_env("connect_four", "cpu", output="numpy"), raw_env()
    assert ours.possible_agents == theirs.possible_agents
    for agent in theirs.possible_agents:
        planes, own = theirs.observation_space(agent)["observation"], ours.observation_space(agent)
        assert ours.action_space(agent) == theirs.action_space(agent)
        assert own.shape == planes.shape
        assert (own.low.min(), own.high.max()) == (planes.low.min(), planes.high.max())


@pytest.mark.parametrize("config", BOARDS, ids=str)
def test_boards_of_any_size_agree_with_the_rules(config, random_seed, device):
    count, ended, won = 8, 0, 0
    env = made(count, device, **config)
    game = env.game
    env.reset(seed=random_seed)
    empty = np.zeros((game.num_rows, game.num_columns), int)
    boards, elapsed = [empty] * count, np.zeros(count, int)
    for _ in range(64):
        actions = env.sample_actions()
        obs, rewards, terminations, truncations, info = (
            {key: value.cpu().numpy() for key, value in part.items()} if isinstance(part, dict) else part.cpu().numpy()
            for part in env.step(actions)
        )
        for e in range(count):
            player, other = elapsed[e] % 2, 1 - elapsed[e] % 2
            boards[e] = oracle.drop(boards[e], int(actions[e, player]), player)
            elapsed[e] += 1
            line, is_open = oracle.has_line(boards[e], player, game.line_length), oracle.open_columns(boards[e])
            over = line or not is_open.any()
            cut = not over and elapsed[e] >= game.max_steps
            assert (rewards[e, player], rewards[e, other]) == ((1, -1) if line else (0, 0))
            assert terminations[e].tolist() == [over, over] and truncations[e].tolist() == [cut, cut]
            for i in range(2):
                np.testing.assert_array_equal(obs[e, i], oracle.observation(boards[e], i))
            if not (over or cut):
                np.testing.assert_array_equal(info["action_mask"][e, other], is_open)
            ended, won = ended + (over or cut), won + line
        over = (terminations | truncations)[:, 0]
        env.reset(mask=torch.as_tensor(over, device=env.device))
        boards, elapsed = [empty if over[e] else boards[e] for e in range(count)], np.where(over, 0, elapsed)
    assert 0 < won <= ended


def encode(boards: torch.Tensor) -> torch.Tensor:
    """Boards (n, 6, 7) -> (n,) int64, another one for each: 7 bits a column, a 1 and above it the pieces."""
    found = torch.zeros(len(boards), dtype=torch.int64, device=boards.device)
    for column in range(7):
        bits = torch.ones_like(found)
        for row in range(5, -1, -1):
            piece = boards[:, row, column].long()
            bits = torch.where(piece > 0, 2 * bits + piece - 1, bits)
        found = found << 7 | bits
    return found


def children(env: VecEnv, boards: torch.Tensor, player: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All distinct boards after one move from these, and which of them have no further move: the game's own step."""
    size, found, ended = env.num_envs, [], []
    is_open = boards[:, 0] == 0
    parents, columns = is_open.nonzero(as_tuple=True)
    for start in range(0, len(parents), size):
        chosen, column = parents[start : start + size], columns[start : start + size]
        padded = boards[chosen[torch.arange(size) % len(chosen)]]
        place(env, padded, player)
        moves = column[torch.arange(size) % len(chosen)].int()
        assert torch.equal(env.action_mask[:, player], is_open[chosen[torch.arange(size) % len(chosen)]])
        _, _, terminations, _, info = env.step(torch.stack([moves, moves], 1))
        assert torch.equal(terminations[:, 0], terminations[:, 1]) and not info["fault"].any()
        found.append(env.state["board"][: len(chosen)].clone())
        ended.append(terminations[: len(chosen), 0].clone())
    after, over = torch.cat(found), torch.cat(ended)
    codes, inverse = encode(after).unique(return_inverse=True)
    first = torch.full_like(codes, len(after)).scatter_reduce_(0, inverse, torch.arange(len(after)), "amin")
    return after[first], over[first]


def count_positions(plies: int) -> list[int]:
    env = made(16_384, "cpu")
    boards, counts = torch.zeros((1, 6, 7), dtype=torch.uint8), [1]
    for ply in range(plies):
        boards, over = children(env, boards, ply % 2)
        counts.append(len(boards))
        boards = boards[~over]
    return counts


@pytest.mark.parametrize(
    "plies",
    [
        6,
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(10, marks=pytest.mark.exhaustive),
    ],
)
def test_the_number_of_positions_after_each_move_is_the_known_one(plies):
    assert count_positions(plies) == list(POSITIONS[: plies + 1])


@pytest.mark.parametrize(
    ("rows", "player", "column", "won"),
    [
        (("xxx....",), 0, 3, True),
        (("xxx.x..",), 0, 3, True),
        (("...ooo.",), 1, 6, True),
        (("xx..xx.",), 0, 2, False),
        (("o......", "o......", "o......"), 1, 0, True),
        (("...x...", "..xo...", ".xoo...", "xooo..."), 0, 4, False),
        (("..x....", ".xo....", "xoo...."), 0, 3, False),
        (("..xo...", ".xoo...", "xooo..."), 0, 3, True),
        (("...x...", "...ox..", "...oox.", "...oxo."), 0, 6, True),
        ((".....x.", "xx...oo"), 0, 6, False),
        (("xx.x...",), 0, 2, True),
    ],
)
def test_lines_win_in_every_direction_and_do_not_leave_the_board(rows, player, column, won):
    env = made(1)
    place(env, picture(*rows)[None], player)
    _, rewards, terminations, truncations, _ = env.step(torch.tensor([[column, column]], dtype=torch.int32))
    expected = [0.0, 0.0] if not won else [1.0, -1.0] if player == 0 else [-1.0, 1.0]
    assert rewards.tolist() == [expected] and terminations.tolist() == [[won, won]] and not truncations.any()


@pytest.mark.parametrize("max_steps", [42, 1])
def test_a_full_board_without_a_line_is_a_draw_also_at_the_time_limit(max_steps):
    env = made(1, max_steps=max_steps)
    place(env, picture(*("xxoo.xo", *("ooxxoox", "xxooxxo") * 2, "ooxxoox"))[None], 0)
    _, rewards, terminations, truncations, _ = env.step(torch.tensor([[4, 0]], dtype=torch.int32))
    assert rewards.tolist() == [[0, 0]] and terminations.all() and not truncations.any()
    assert env.state["board"].ne(0).all()


def test_a_move_into_a_full_column_is_a_fault_and_not_the_other_player_s_win():
    """PettingZoo's TerminateIllegalWrapper gives the one who chose it -1; here the environment's episode is void."""
    env = made(2)
    full = picture(*(("x......", "o......") * 3))
    place(env, full[None].expand(2, 6, 7), 0)
    assert env.action_mask[0].tolist() == [[False] + [True] * 6, [True] * 7]  # the other player's action is ignored
    _, rewards, terminations, truncations, info = env.step(torch.tensor([[0, 0], [1, 0]], dtype=torch.int32))
    assert rewards[0].isnan().all() and truncations[0].all() and not terminations.any() and not truncations[1].any()
    assert info["fault"].tolist() == [[True, True], [False, False]] and env.faults()[0] & Fault.INVALID_ACTION
    assert torch.equal(env.state["board"][0], full) and env.state["board"][1, 5, 1] == 1


def test_the_waiting_player_s_action_is_ignored():
    env = made(1)
    env.step(torch.tensor([[3, 99]], dtype=torch.int32))
    env.step(torch.tensor([[-5, 3]], dtype=torch.int32))
    assert torch.equal(env.state["board"][0], picture("...o...", "...x...")) and not env.faults().any()


def test_pieces_that_slip_fall_into_any_open_column(device):
    count = 20_000
    for slip in (0.0, 0.4, 1.0):
        env = made(count, device, slip=slip)
        start = picture(*(("x......", "o......") * 3)).to(env.device)
        place(env, start[None].expand(count, 6, 7), 0)
        env.step(torch.full((count, 2), 3, dtype=torch.int32, device=env.device))
        shares = (env.state["board"][:, 5] == 1).double().mean(0)[1:].cpu()
        expected = torch.full((6,), slip / 6, dtype=torch.float64)
        expected[2] += 1 - slip
        # Six standard deviations of a share of 20,000: one in 5e8 draws of a share is further away.
        assert ((shares - expected).abs() <= 6 * (expected * (1 - expected) / count).sqrt()).all(), slip
        assert torch.equal(env.state["board"][:, :, 0], start[:, 0].expand(count, 6)) and not env.faults().any()


@pytest.mark.parametrize("moves", [1, 2, 7, 20])
def test_games_begin_with_random_moves(moves, device):
    env = gpu_vecenv.make("connect_four", 500, device, opening_moves=moves)
    _, info = env.reset(seed=5)
    boards = env.state["board"].cpu().numpy()
    pieces = (boards > 0).sum((1, 2))
    assert (pieces == moves).mean() > (0.99 if moves < 20 else 0.5) and (pieces <= moves).all()
    for board, count in zip(boards, pieces, strict=True):
        assert ((board == 1).sum(), (board == 2).sum()) == (-(-count // 2), count // 2)
        assert (np.diff((board > 0).astype(int), axis=0) >= 0).all(), "a piece hangs in the air"
        assert not any(oracle.has_line(board, player, 4) for player in range(2))
    assert moves > 2 or len(np.unique(boards, axis=0)) == 7**moves
    assert torch.equal(info["acting"].cpu(), torch.from_numpy(pieces[:, None] % 2 == np.arange(2)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"line_length": 8}, r"line_length is 8 on a board of 6 x 7; expected at most 7"),
        ({"opening_moves": 42}, r"opening_moves is 42 on a board of 42 cells; expected at most 41"),
    ],
)
def test_games_that_cannot_be_won_or_played_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        gpu_vecenv.configure("connect_four", **config)
