"""harvest and cleanup are bitwise equal to their NumPy oracles; single rules; maps of one's own."""

import numpy as np
import pytest
import torch
from oracles.commons import (
    CLEAN,
    CLEANUP,
    FORWARD,
    HARVEST,
    MEANING,
    NOOP,
    TURN_LEFT,
    ZAP,
    CleanupOracle,
    HarvestOracle,
    assert_valid_start,
)
from oracles.philox import philox
from support.bitwise import bits

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.envs import cleanup, harvest
from gpu_vecenv.envs.commons import social_metrics
from gpu_vecenv.errors import ConfigError

ORACLES = {"harvest": HarvestOracle, "cleanup": CleanupOracle}
GARDEN = """
WWWWWWWWW
WA AA  QW
WAAAAA  W
WP  P  PW
WWWWWWWWW
"""
BROOK = """
WWWWWWWWW
WHFRHHHFW
WAA AA  W
WPAAPPP W
WWWWWWWWW
"""
SLOW = {"dirt_spawn_delay": 5, "dirt_spawn_probability": 0.2, "max_apple_growth_rate": 0.3}
VARIANTS = {
    "harvest": ("harvest", {}, 60),
    "harvest, few": (
        "harvest",
        {"grid": GARDEN, "num_agents": 3, "max_steps": 50, "common_reward": "mean", "zap_reward": 0.1},
        110,
    ),
    "harvest, wide beams": (
        "harvest",
        {"grid": GARDEN, "num_agents": 3, "beam_length": 2, "beam_radius": 3, "zap_cooldown": 1, "zapped_steps": 0},
        80,
    ),
    "harvest, small views": (
        "harvest",
        {"num_agents": 40, "view_ahead": 2, "view_behind": 0, "view_side": 1, "zapped_penalty": 1 / 3},
        30,
    ),
    "cleanup": ("cleanup", {}, 60),
    "cleanup, few": (
        "cleanup",
        {"grid": BROOK, "num_agents": 4, "max_steps": 60, "zapped_steps": 3, "zap_cooldown": 3, **SLOW},
        130,
    ),
    "cleanup, thresholds": (
        "cleanup",
        {
            **{"grid": BROOK, "num_agents": 2, "common_reward": "sum", "clean_cooldown": 0, "threshold_depletion": 0.9},
            **{"threshold_restoration": 0.3, "dirt_spawn_probability": 0.9, "dirt_spawn_delay": 0},
            **{"max_apple_growth_rate": 0.4},
        },
        80,
    ),
}


class PhiloxDraws:
    """The random numbers of one environment in one step, drawn again from its key: see rng.cuh and commons.cuh."""

    def __init__(self, env: VecEnv, e: int, step: int):
        self.key = [word & 0xFFFFFFFF for word in env.data["engine_key"][e].tolist()]
        self.episode, self.step, self.width = int(env.data["engine_episode"][e]), step, env.game.width

    def block(self, item, draw):
        return philox([1 << 29 | draw, item, self.step, self.episode], self.key)

    def uniform(self, item, draw):
        return (self.block(item, draw >> 2)[draw & 3] >> 8) * 2.0**-24

    def below(self, item, draw, n):
        words = self.block(item, 1 << 28 | draw)
        return (words[1] * n + (words[0] * n >> 32)) >> 32

    def order(self, n):
        order = []
        for i in range(n):
            k = self.below(i, 1, i + 1)
            order.append(i)
            order[i], order[k] = order[k], i
        return order

    def grows(self, cell, probability):
        return self.uniform(cell[0] + self.width * cell[1], 0) < probability

    def dirt(self, cells, probability):
        return cells[self.below(0, 5, len(cells))] if self.uniform(0, 4) < probability else None

    def spawn(self, i, cells):
        return cells[self.below(int(i), 2, len(cells))], self.below(int(i), 3, 4)


def made(name, device, num_envs=1, **config):
    env = gpu_vecenv.make(name, num_envs, device, autoreset_mode="disabled", **config)
    env.reset(seed=3)
    return env


def inject(env, oracles, environments):
    """State at the beginning of an episode, for the oracles."""
    for e in environments:
        oracles[e].elapsed_steps, oracles[e].active = 0, np.ones(env.num_agents, bool)
        for field in oracles[e].fields:
            setattr(oracles[e], field, env.state[field][e].cpu().numpy().copy())
        assert_valid_start(oracles[e])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_bitwise_equal_to_the_oracle(variant, random_seed, device):
    name, config, steps = VARIANTS[variant]
    env, random = made(name, device, 2, **config), np.random.default_rng(random_seed)
    oracles = [ORACLES[name](**config) for _ in range(2)]
    env.reset(seed=2**40 + random_seed)
    inject(env, oracles, range(2))
    likely = np.array([1, 6, 1, 1, 1, 1, 1, 2, 4][: env.game.num_actions]) / 1.0
    happened = np.zeros(4, int)
    for step in range(steps):
        actions = random.choice(env.game.num_actions, (2, env.num_agents), p=likely / likely.sum())
        draws = [PhiloxDraws(env, e, oracle.elapsed_steps + 1) for e, oracle in enumerate(oracles)]
        obs, *outputs, info = env.step(torch.tensor(actions, dtype=torch.int32, device=device))
        results = [oracle.step(*given) for oracle, *given in zip(oracles, actions, draws, strict=True)]
        for e, oracle in enumerate(oracles):
            for place, what in enumerate(("rewards", "terminations", "truncations")):
                np.testing.assert_array_equal(bits(outputs[place][e]), bits(results[e][place]), f"{what}, step {step}")
            for field in oracle.fields:
                ours = env.state[field][e].cpu().numpy()
                np.testing.assert_array_equal(ours, getattr(oracle, field), f"{field}, step {step}")
            np.testing.assert_array_equal(obs[e].cpu().numpy(), oracle.observe(), f"obs, step {step}")
            assert info["acting"][e].tolist() == (oracle.respawn_in == 0).tolist()
            happened += [len(oracle.hit), oracle.eaten.sum(), oracle.steps_out.sum(), not oracle.active.any()]
        ended = ~env.active.any(1)
        if ended.any():
            env.reset(mask=ended)
            inject(env, oracles, np.flatnonzero(ended.cpu()))
    assert env.faults().sum() == 0
    ends = "max_steps" in config  # the others are too short for all to happen for every seed
    assert (happened[3] > 0) == ends and (happened[:3].all() or not ends)


def test_the_maps_are_those_of_the_oracle():
    def rows(text):
        return [row.strip() for row in text.strip().split("\n")]

    theirs = [[MEANING.get(tile, tile) for tile in row] for row in rows(CLEANUP)]
    assert rows(harvest.LAYOUTS["open"]) == rows(HARVEST)
    assert [list(row) for row in rows(cleanup.LAYOUTS["clean_up"])] == theirs
    for name, module in (("harvest", harvest), ("cleanup", cleanup)):
        for layout in module.LAYOUTS:
            assert gpu_vecenv.configure(name, layout_name=layout).num_agents == 7


LANE = """
WWWWWWWWWWWW
WA        AW
W          W
WPPPPPPPPPPW
WWWWWWWWWWWW
"""


def on_lane(device, num_envs=1, **config):
    """Two players in the upper row of a lane, far from the apples, facing each other with two cells between them."""
    env = made("harvest", device, num_envs, grid=LANE, num_agents=2, **config)
    env.state["position"].copy_(torch.tensor([[4, 1], [7, 1]]).expand(num_envs, 2, 2))
    env.state["orientation"].copy_(torch.tensor([1, 3]).expand(num_envs, 2))
    return env


def play(env, *actions):
    """The outputs of the last step."""
    for pair in actions:
        given = torch.tensor([pair] * env.num_envs, dtype=torch.int32, device=env.device)
        outputs = env.step(given)
    return outputs


def test_players_that_want_the_same_cell_win_it_equally_often(device):
    env = on_lane(device, 4000)
    env.state["position"][:, 1, 0] = 6
    play(env, (FORWARD, FORWARD))
    first, second = (env.state["position"][:, i, 0] == 5 for i in range(2))
    assert (first ^ second).all()
    # Five standard errors of a share of 4000 draws are 0.04.
    assert first.float().mean().item() == pytest.approx(0.5, abs=0.04)


def test_players_follow_each_other_or_not_by_the_order_of_the_step(device):
    env = on_lane(device, 400)
    env.state["orientation"][:, 1] = 1
    env.state["position"][:, 1, 0] = 5
    play(env, (FORWARD, FORWARD))
    assert (env.state["position"][:, 1, 0] == 6).all()
    assert sorted(env.state["position"][:, 0, 0].unique().tolist()) == [4, 5]
    env.state["orientation"].copy_(torch.tensor([1, 3]).expand(400, 2))  # exchanging cells is never possible
    env.state["position"].copy_(torch.tensor([[5, 1], [6, 1]]).expand(400, 2, 2))
    play(env, (FORWARD, FORWARD))
    assert (env.state["position"] == torch.tensor([[5, 1], [6, 1]], device=env.device)).all()


def test_both_players_that_zap_each_other_are_out_for_the_time_told(device):
    env = on_lane(device, zapped_steps=4, zap_reward=2.0, zapped_penalty=0.5)
    obs, rewards, *_, info = play(env, (ZAP, ZAP))
    assert rewards[0].tolist() == [1.5, 1.5]
    assert env.state["beam"][0, 1].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    for _ in range(5):
        assert not info["acting"].any() and not obs.any()
        assert info["active"].all()
        obs, *_, info = play(env, (FORWARD, ZAP))
    assert info["acting"].all() and env.state["steps_out"][0].tolist() == [5, 5]
    assert (env.state["position"][0, :, 1] == 3).all(), "they are back at places for it"
    assert env.state["zap_wait"][0].tolist() == [2, 2], "time does not pass while one is out"
    assert obs.flatten(2).any(2).all()


def test_a_zap_needs_time_before_the_next(device):
    env = on_lane(device, zap_cooldown=2)
    env.state["orientation"].copy_(torch.tensor([[3, 1]]))  # away from each other
    lit = []
    for _ in range(7):
        play(env, (ZAP, NOOP))
        lit.append(bool(env.state["beam"].any()))
    assert lit == [True, False, False, True, False, False, True]


@pytest.mark.parametrize(("common_reward", "expected"), [("none", [1, 0]), ("mean", [0.5, 0.5]), ("sum", [1, 1])])
def test_a_common_reward_is_that_of_all(common_reward, expected, device):
    env = on_lane(device, common_reward=common_reward)
    env.state["position"][0, 0, 0], env.state["orientation"][0, 0] = 2, 3
    assert play(env, (FORWARD, NOOP))[1][0].tolist() == expected
    assert env.state["eaten"][0].tolist() == [1, 0] and env.state["eaten_at"][0].tolist() == [1, 0]
    assert play(env, (TURN_LEFT, NOOP))[1][0].tolist() == [0, 0]


def test_an_apple_that_grows_under_a_player_is_eaten_at_once(device):
    env = on_lane(device, 64, regrowth_near_0=1.0)
    env.state["apple"].zero_()
    env.state["position"][:, 0, 0] = 1
    rewards = [play(env, (NOOP, NOOP))[1][:, 0].sum().item() for _ in range(5)]
    # The field `near` knows of no neighbours in the first step, and an apple that was eaten leaves one step out.
    assert rewards == [0, 64, 0, 64, 0]
    assert env.state["apple"][:, 1, 10].all()


def test_a_beam_cleans_the_first_dirty_cell_of_each_ray(device):
    env = made("cleanup", device, grid=BROOK, num_agents=2, clean_cooldown=2)
    env.state["dirt"][0, 1, 1:8] = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    env.state["position"].copy_(torch.tensor([[[5, 2], [6, 2]]]))
    env.state["orientation"].zero_()
    play(env, (CLEAN, CLEAN))
    assert env.state["dirt"][0, 1, 1:8].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert env.state["cleaned"][0].tolist() == [3, 3], "a cell stops all beams of the step that cleans it"
    assert env.state["beam"][0].nonzero().tolist() == [[2, 4], [2, 5], [2, 6], [2, 7]], "players stop no such beam"
    assert env.state["clean_wait"][0].tolist() == [2, 2] and not env.state["zap_wait"].any()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("harvest", {"grid": "WWWW\nWAPW\nWWW "}, "row 2, column 3, on its border, is no W"),
        ("harvest", {"grid": "WWWW\nW PW\nWWWW"}, "has no A"),
        ("harvest", {"grid": "WWWW\nWAPW\nWWWW"}, "has 1 P, .*; expected at least num_agents = 7"),
        ("harvest", {"grid": "WWWWW\nWAQPW\nWWWWW", "num_agents": 2}, "has 1 P"),
        ("harvest", {"grid": "WWWW\nWHPW\nWWWW"}, "row 1, 'WHPW', has 'H'"),
        ("cleanup", {"grid": "WWWWW\nWARPW\nWWWWW", "num_agents": 1}, "no H and no F"),
        ("cleanup", {"threshold_restoration": 0.4}, "threshold_restoration is 0.4; expected less than"),
    ],
)
def test_what_cannot_be_played_is_refused(name, config, message):
    with pytest.raises(ConfigError, match=message):
        gpu_vecenv.configure(name, **config)


def test_social_metrics_are_those_of_their_definitions():
    state = {"eaten": [[4, 0, 2], [0, 0, 0]], "eaten_at": [[40, 0, 10], [0, 0, 0]], "steps_out": [[5, 0, 0], [0, 0, 0]]}
    found = social_metrics({name: np.array(value) for name, value in state.items()}, 10)
    np.testing.assert_allclose(found["utility"], [0.6, 0])
    np.testing.assert_allclose(found["equality"], [1 - 16 / (2 * 3 * 6), np.nan])
    np.testing.assert_allclose(found["sustainability"], [(10 + 5) / 2, np.nan])
    np.testing.assert_allclose(found["peace"], [2.5, 3])
