"""pursuit against PettingZoo's own environment, which gets the same starts and the same moves of evaders; its rules."""

import numpy as np
import pytest
import torch
from pettingzoo.sisl.pursuit.pursuit import parallel_env, raw_env
from pettingzoo.sisl.pursuit.utils import agent_utils
from pettingzoo.sisl.pursuit.utils.controllers import PursuitPolicy

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.errors import ConfigError

MOVES = [(-1, 0), (1, 0), (0, 1), (0, -1), (0, 0)]
LEFT, RIGHT, DOWN, UP, STAY = range(5)
# Rewards of either side are sums of three terms up to 5 in float32, or in float64: each rounds by less than 2^-24 of 5.
ROUNDING = 2e-6
CONFIGS = {
    "defaults": ({}, 25),
    "crowded": ({"x_size": 6, "y_size": 5, "n_pursuers": 9, "n_evaders": 3, "max_cycles": 40}, 90),
    "own rewards": ({"x_size": 5, "y_size": 7, "n_evaders": 4, "shared_reward": False, "tag_reward": -0.3}, 60),
    "on their cell": ({"x_size": 6, "y_size": 8, "surround": False, "constraint_window": 0.8, "max_cycles": 30}, 70),
    "frozen": ({"x_size": 5, "y_size": 5, "freeze_evaders": True, "surround": False, "n_catch": 1, "n_evaders": 5}, 60),
    "one against one": ({"x_size": 2, "y_size": 3, "n_pursuers": 1, "n_evaders": 1, "obs_range": 4}, 60),
}


class Replayed(PursuitPolicy):
    """Moves evaders as those of this library moved."""

    def __init__(self):
        self.moves = []

    def act(self, state):
        return self.moves.pop(0)


class Reference:
    """PettingZoo's environment beside environment ``index`` of ours."""

    def __init__(self, env: VecEnv, index: int, config: dict, starts: list):
        self.env, self.index, self.controller, self.starts = env, index, Replayed(), starts
        self.parallel = parallel_env(**config, evader_controller=self.controller)
        self.inner = self.parallel.unwrapped.env

    def field(self, name: str) -> np.ndarray:
        return self.env.state[name][self.index].cpu().numpy().copy()

    def begin(self) -> None:
        """A new episode from our start."""
        self.starts += [*self.field("pursuer_position"), *self.field("evader_position")]
        self.parallel.reset()
        assert not self.starts, "as many start there"
        self.places = self.field("evader_position")

    def step(self, actions: np.ndarray) -> tuple[dict, ...]:
        """Outputs of its step, in which the evaders move as ours have moved."""
        now = self.field("evader_position")
        walks = ~self.field("caught")
        self.controller.moves = [MOVES.index(tuple(way)) for way in (now - self.places)[walks].tolist()]
        self.places = now
        outputs = self.parallel.step(dict(zip(self.parallel.possible_agents, actions.tolist(), strict=True)))
        assert not self.controller.moves, "as many evaders are left there"
        return outputs

    def compare_state(self, what: str) -> None:
        layers = self.inner.pursuer_layer, self.inner.evader_layer
        pursuers, evaders = ([layer.get_position(i).tolist() for i in range(layer.n_agents())] for layer in layers)
        caught = self.field("caught")
        np.testing.assert_array_equal(self.field("pursuer_position"), pursuers, what)
        np.testing.assert_array_equal(
            self.field("evader_position")[~caught].reshape(-1, 2), np.reshape(evaders, (-1, 2))
        )
        np.testing.assert_array_equal(caught, self.inner.evaders_gone, what)
        wall = self.env.state["wall"].cpu().numpy()
        maps = np.stack([wall, self.field("pursuers"), self.field("evaders")], -1)
        np.testing.assert_array_equal(maps, np.abs(self.inner.model_state[:3]).transpose(2, 1, 0), what)


@pytest.fixture
def starts(monkeypatch):
    """Cells in which PettingZoo places the next agents, in its corner if there are none."""
    cells = []
    monkeypatch.setattr(agent_utils, "feasible_position_exp", lambda *_, **__: cells.pop(0) if cells else (0, 0))
    return cells


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_agrees_with_pettingzoo(name, starts, random_seed, device):
    (config, steps), count = CONFIGS[name], 2
    env = gpu_vecenv.make("pursuit", count, device, autoreset_mode="disabled", **config)
    theirs = [Reference(env, index, config, starts) for index in range(count)]
    random = np.random.default_rng(random_seed)
    env.reset(seed=random_seed)
    for reference in theirs:
        reference.begin()
    agents, caught = theirs[0].parallel.possible_agents, 0
    for step in range(steps):
        actions = random.integers(0, 5, (count, env.num_agents), np.int32)
        ours = [x.cpu().numpy() for x in env.step(torch.tensor(actions, device=device))[:4]]
        for e, reference in enumerate(theirs):
            outputs, what = reference.step(actions[e]), f"environment {e}, step {step}"
            seen, rewards, terminations, truncations = ([out[agent] for agent in agents] for out in outputs[:4])
            np.testing.assert_array_equal(ours[0][e], seen, what)
            np.testing.assert_allclose(ours[1][e], rewards, rtol=ROUNDING, atol=ROUNDING, err_msg=what)
            assert (ours[2][e].tolist(), ours[3][e].tolist()) == (terminations, truncations), what
            reference.compare_state(what)
        ended = (ours[2] | ours[3]).all(1)
        if ended.any():
            env.reset(mask=torch.tensor(ended, device=device))
            for e in np.flatnonzero(ended):
                theirs[e].begin()
        caught += env.state["caught"].sum().item()
    assert env.faults().sum() == 0
    assert caught > 0 or name in ("defaults", "one against one"), "nobody was caught"


def test_names_spaces_and_defaults_are_those_of_pettingzoo():
    ours, theirs = gpu_vecenv.parallel_env("pursuit", "cpu", output="numpy"), raw_env()
    assert ours.possible_agents == theirs.possible_agents
    for agent in theirs.possible_agents:
        assert ours.action_space(agent) == theirs.action_space(agent)
        assert ours.observation_space(agent) == theirs.observation_space(agent)
    game = gpu_vecenv.configure("pursuit", n_pursuers=3, n_evaders=5, max_cycles=7, evader_controller=None)
    assert (game.num_pursuers, game.num_evaders, game.max_steps) == (3, 5, 7)
    for name in ("x_size", "y_size", "obs_range", "n_catch", "surround", "freeze_evaders", "shared_reward"):
        assert getattr(ours.game, name) == getattr(theirs.env, name), name
    for name in ("tag_reward", "catch_reward", "urgency_reward", "constraint_window"):
        assert getattr(ours.game, name) == getattr(theirs.env, name), name
    with pytest.raises(ConfigError, match="evader_controller"):
        gpu_vecenv.configure("pursuit", evader_controller=lambda state: 4)


# ---------------------------------------------------------------------- single rules


PARKED = [(6, 14), (8, 14), (10, 14), (6, 0), (8, 0), (10, 0)]  # where no evader is near


def placed(pursuers, evaders, device) -> VecEnv:
    """One environment with six pursuers, the others parked, and three evaders, the others caught, that stay.

    A pursuer gets 100 for taking part in catching, and 1/6 for each evader beside it after each move of a pursuer.
    """
    rewards = {"tag_reward": 1.0, "catch_reward": 100.0, "urgency_reward": 0.0, "shared_reward": False}
    sizes = {"num_pursuers": 6, "num_evaders": 3, "max_steps": 2, "obs_range": 5}
    env = gpu_vecenv.make("pursuit", 1, device, autoreset_mode="disabled", freeze_evaders=True, **sizes, **rewards)
    env.reset(seed=1)
    env.state["pursuer_position"].copy_(torch.tensor([[*pursuers, *PARKED[len(pursuers) :]]]))
    env.state["evader_position"].copy_(torch.tensor([[*evaders, *[(0, 0)] * (3 - len(evaders))]]))
    env.state["caught"][0, len(evaders) :] = True
    return env


def played(env: VecEnv, *actions: int) -> tuple[list[bool], list[int]]:
    """Of one step in which the other pursuers stay: who took part in catching, and evaders beside it, summed."""
    given = torch.tensor([[*actions, *[STAY] * (6 - len(actions))]], dtype=torch.int32, device=env.device)
    rewards = env.step(given)[1][0].cpu()
    return (rewards >= 100).tolist(), (rewards % 100 * 6).round().int().tolist()


@pytest.mark.parametrize(
    ("evader", "pursuers"),
    [
        ((2, 2), [(1, 2), (3, 2), (2, 1), (2, 3)]),
        ((0, 0), [(1, 0), (0, 1)]),  # in a corner
        ((15, 6), [(15, 5), (15, 7), (14, 6)]),  # at an edge
        ((4, 8), [(3, 8), (4, 7), (4, 9)]),  # beside the building, which is from 5 to 11 and from 4 to 12
    ],
    ids=str,
)
def test_an_evader_is_caught_when_no_cell_beside_it_is_left(evader, pursuers, device):
    number = len(pursuers)
    env = placed([*pursuers, evader], [evader, (8, 3)], device)
    assert played(env)[0] == [True] * number + [False] * (6 - number)  # the one on its cell takes no part
    assert env.state["caught"][0].tolist() == [True, False, True]
    for k in range(number):
        env = placed([*pursuers[:k], *pursuers[k + 1 :], evader], [evader, (8, 3)], device)
        assert not any(played(env)[0]) and env.state["caught"][0].tolist() == [False, False, True]


def test_two_evaders_at_once_are_worth_as_much_as_one(device):
    env = placed([(0, 1), (1, 0), (3, 3)], [(0, 0), (0, 0), (8, 3)], device)
    shared = [True, True, False, False, False, False]
    assert played(env) == (shared, [12, 12, 0, 0, 0, 0]) and env.state["caught"][0].tolist() == [True, True, False]
    assert played(env) == ([False] * 6, [0] * 6)


def test_tags_count_by_the_moves_of_all_pursuers(device):
    """The second of six pursuers comes beside an evader: after five of six moves it is there."""
    env = placed([(0, 15), (2, 2)], [(4, 2)], device)
    assert played(env, STAY, RIGHT)[1] == [0, 5, 0, 0, 0, 0]
    assert played(env, STAY, LEFT)[1] == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("pursuer", "evader", "tags"), [((0, 7), (0, 7), 1), ((0, 0), (0, 0), 2), ((2, 2), (2, 2), 0), ((0, 0), (0, 1), 1)]
)
def test_at_the_edge_of_the_map_evaders_on_the_own_cell_count(pursuer, evader, tags, device):
    assert played(placed([pursuer], [evader], device))[1] == [6 * tags, 0, 0, 0, 0, 0]


def test_an_episode_that_ends_in_its_last_step_is_truncated(device):
    for before, ends in ((0, [True, False]), (1, [False, True])):
        env = placed([(0, 1), (1, 0)], [(0, 0)], device)
        env.elapsed_steps.fill_(before)
        outputs = env.step(torch.full((1, 6), STAY, dtype=torch.int32, device=device))
        assert [outputs[2].all().item(), outputs[3].all().item()] == ends


def test_observations_follow_from_written_positions(device):
    env = placed([(0, 0), (1, 2)], [(1, 2), (1, 2), (6, 6)], device)
    obs = env.observe()[0].cpu().numpy()
    assert obs[0, :2, :, 0].all() and obs[0, :, :2, 0].all() and not obs[0, 2:, 2:, 0].any()  # beyond the corner
    assert np.argwhere(obs[0, ..., 1]).tolist() == [[2, 2], [4, 3]]  # rows, columns
    assert np.argwhere(obs[0, ..., 2]).tolist() == [[4, 3]] and obs[0, 4, 3, 2] == 2


# ---------------------------------------------------------------------- chance


def test_evaders_make_each_move_equally_often(device):
    """On the open floor; five standard errors of a share of 20,000 draws are 0.0142."""
    env = gpu_vecenv.make("pursuit", 4000, device, num_pursuers=1, num_evaders=5, autoreset_mode="disabled")
    env.reset(seed=4)
    env.state["evader_position"].copy_(torch.tensor([2, 2]).expand(4000, 5, 2))
    env.step(torch.full((4000, 1), STAY, dtype=torch.int32, device=device))
    ways = (env.state["evader_position"] - 2).flatten(0, 1).tolist()
    shares = [ways.count(list(move)) / len(ways) for move in MOVES]
    assert sum(shares) == 1 and all(abs(share - 0.2) < 0.0142 for share in shares), shares
    pairs = torch.stack([env.state["evader_position"][:, 0], env.state["evader_position"][:, 1]], 1).flatten(1)
    assert len({tuple(pair) for pair in pairs.tolist()}) == 25, "evaders of an environment move apart"


def test_starts_are_drawn_from_the_floor_and_apart(device):
    env = gpu_vecenv.make("pursuit", 2000, device)
    env.reset(seed=5)
    wall = env.state["wall"].cpu().numpy()
    assert wall.sum() == 63 and not env.state["caught"].any()
    first = np.zeros((16, 16))
    for pursuers, evaders in zip(env.state["pursuer_position"].cpu(), env.state["evader_position"].cpu(), strict=True):
        for group in (pursuers.numpy(), evaders.numpy()):
            assert not wall[group[:, 1], group[:, 0]].any()
            away = np.abs(group[:, None] - group[None]).sum(-1) + 9 * np.eye(len(group))
            assert away.min() >= 2, "none beside another of its kind"
        first[pursuers[0, 1], pursuers[0, 0]] += 1
    assert (first > 0).sum() == 193  # 10.4 on average on each cell of the floor; one stays empty with 193 * 3e-5
    assert first.max() < 35


def test_all_start_in_one_window(device):
    few = {"x_size": 20, "y_size": 10, "num_pursuers": 2, "num_evaders": 3}
    env = gpu_vecenv.make("pursuit", 3000, device, constraint_window=0.5, **few)
    env.reset(seed=6)
    cells = torch.cat([env.state["pursuer_position"], env.state["evader_position"]], 1).cpu().numpy()
    assert not env.state["wall"].cpu().numpy()[cells[..., 1], cells[..., 0]].any()
    assert (cells.max(1) - cells.min(1) < (10, 5)).all()
    # Windows are rounded down: none has the last column or row.
    assert np.unique(cells[..., 0]).tolist() == [*range(19)] and np.unique(cells[..., 1]).tolist() == [*range(9)]


def test_more_evaders_than_have_space_apart_start_on_the_floor(device):
    env = gpu_vecenv.make("pursuit", 50, device, x_size=4, y_size=4, num_pursuers=20, num_evaders=100)
    env.reset(seed=7)
    wall, cells = env.state["wall"].cpu().numpy(), env.state["evader_position"].cpu().numpy()
    assert not wall[cells[..., 1], cells[..., 0]].any()
    assert env.state["evaders"].sum((1, 2)).tolist() == [100] * 50
    env = gpu_vecenv.make("pursuit", 50, device, constraint_window=0.0)  # a window without a cell
    env.reset(seed=7)
    assert np.unique(env.state["pursuer_position"].cpu().numpy()[:, 0, 0]).size > 10
