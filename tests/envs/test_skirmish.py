"""skirmish is bitwise equal to its NumPy oracle in every scenario; starts, ends, deaths and pictures are as told."""

import numpy as np
import pytest
import torch
from oracles.philox import philox
from oracles.skirmish import SkirmishOracle, assert_valid_start, sizes
from support.bitwise import bits

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.errors import ConfigError

SCENARIOS = (
    "3m",
    "8m",
    "25m",
    "2s3z",
    "3s5z",
    "5m_vs_6m",
    "10m_vs_11m",
    "27m_vs_30m",
    "3s5z_vs_3s6z",
    "3s_vs_5z",
    "6h_vs_8z",
)
SCENARIOS += ("smacv2_5_units", "smacv2_10_units", "smacv2_20_units", "1m", "2M3l1h_vs_4z")
FIELDS = ("position", "health", "cooldown", "unit_type", "action", "goal", "prey")
STEP_STREAM = 1


class PhiloxDraws:
    """The random numbers of one environment in one step, drawn again from its key: see rng.cuh."""

    def __init__(self, env: VecEnv, e: int, step: int):
        self.key = [word & 0xFFFFFFFF for word in env.data["engine_key"][e].tolist()]
        self.episode, self.step, self.units = int(env.data["engine_episode"][e]), step, env.game.num_units

    def block(self, item: int, draw: int) -> list[int]:
        return philox([STEP_STREAM << 29 | draw, item, self.step, self.episode], self.key)

    def deviation(self, move: int) -> np.ndarray:
        words = [self.block(unit, move >> 2)[move & 3] for unit in range(self.units)]
        return (np.array(words) >> 8).astype(np.float32) * np.float32(2**-24)

    def below(self, item: int, draw: int, n: int) -> int:
        words = self.block(item, 1 << 28 | draw)
        return (words[1] * n + (words[0] * n >> 32)) >> 32

    def follow(self, enemy: int, n: int) -> int:
        return self.below(enemy, 0, n)

    def pick(self, enemy: int, n: int) -> int:
        return self.below(enemy, 1, n)


def army(number: int, **config) -> tuple[VecEnv, list[SkirmishOracle]]:
    """Environments, and an oracle for each."""
    game = gpu_vecenv.configure("skirmish", **config)
    return VecEnv(game, number, "cpu", autoreset_mode="disabled"), [SkirmishOracle(**config) for _ in range(number)]


def inject(env: VecEnv, e: int, oracle: SkirmishOracle) -> None:
    """The environment's state, at the beginning of its episode, for the oracle."""
    oracle.elapsed_steps, oracle.over = 0, False
    for field in FIELDS:
        setattr(oracle, field, env.state[field][e].numpy().copy())
    oracle.won = bool(env.state["won"][e])


def hunting(env: VecEnv, random: np.random.Generator, mask: np.ndarray) -> torch.Tensor:
    """Mostly attacks where there are some, so that battles are fought; else any action that is allowed."""
    weights = random.random(mask.shape) * mask
    weights[..., 5:] *= np.where(random.random((*mask.shape[:-1], 1)) < 0.8, 10, 1)
    weights[..., 1] *= 3  # east, where enemies come from
    return torch.tensor(weights.argmax(-1))


def same(what: str, step: int, tensor: torch.Tensor, expected: list) -> None:
    expected = np.stack(expected)
    assert tensor.numpy().dtype == expected.dtype, what
    np.testing.assert_array_equal(bits(tensor), bits(expected), f"{what}, step {step}")


def play(env: VecEnv, oracles: list[SkirmishOracle], seed: int, steps: int) -> dict[str, int]:
    """Compare everything, step by step; how often what happened."""
    random = np.random.default_rng(seed)
    obs, info = env.reset(seed=2**40 + seed)
    for e, oracle in enumerate(oracles):
        inject(env, e, oracle)
        assert_valid_start(oracle)
    seen = dict.fromkeys(("ends", "won", "lost", "deaths", "attacks", "late"), 0)
    for step in range(steps + 1):
        same("obs", step, obs, [oracle.observe() for oracle in oracles])
        same("world", step, env.state["world"], [oracle.world() for oracle in oracles])
        for field in FIELDS:
            same(field, step, env.state[field], [getattr(oracle, field) for oracle in oracles])
        mask, acting = info["action_mask"].numpy(), info["acting"].numpy()
        told = np.stack([oracle.action_masks() for oracle in oracles])
        np.testing.assert_array_equal(mask, told | ~acting[..., None], f"masks, step {step}")
        alive = np.stack([oracle.alive[: oracle.allies] for oracle in oracles])
        running = np.array([not oracle.over for oracle in oracles])
        np.testing.assert_array_equal(acting[running], alive[running])
        if not running.all():
            env.reset(mask=torch.tensor(~running))
            for e in np.flatnonzero(~running):
                inject(env, e, oracles[e])
            obs, info = (
                env.observe(),
                {"action_mask": env.data["engine_action_mask"], "acting": env.data["engine_acting"]},
            )
            mask = info["action_mask"].numpy()
        actions = hunting(env, random, mask)
        draws = [PhiloxDraws(env, e, oracle.elapsed_steps + 1) for e, oracle in enumerate(oracles)]
        obs, *outputs, info = env.step(actions)
        results = [oracle.step(a, d) for oracle, a, d in zip(oracles, actions.numpy(), draws, strict=True)]
        for place, what in enumerate(("rewards", "terminations", "truncations")):
            same(what, step, outputs[place], [result[place] for result in results])
        same("won", step, env.state["won"], [np.bool_(oracle.won) for oracle in oracles])
        for oracle, (_, terminations, truncations) in zip(oracles, results, strict=True):
            seen["ends"] += oracle.over
            seen["won"] += oracle.won
            seen["lost"] += bool(terminations.any() and not oracle.alive[: oracle.allies].any())
            seen["late"] += bool(truncations.any())
            seen["deaths"] += int((~oracle.alive[: oracle.allies]).any() and not oracle.over)
            seen["attacks"] += int((oracle.action >= 5).any())
    assert not env.faults().any()
    return seen


@pytest.mark.parametrize(
    "scenario", [pytest.param(s, marks=pytest.mark.slow) if sum(sizes(s)) > 30 else s for s in SCENARIOS]
)
def test_every_scenario_is_bitwise_equal_to_the_oracle(scenario, random_seed):
    units = sum(sizes(scenario))
    seen = play(*army(1 if units > 12 else 2, scenario=scenario), random_seed, 60 if units > 30 else 105)
    assert seen["ends"] and seen["attacks"]
    assert seen["deaths"] or scenario == "1m"


VARIANTS = {
    "random attacks": {"scenario": "5m_vs_6m", "attack_mode": "random"},
    "peaceful enemies": {"scenario": "3m", "enemy_shoots": False},
    "soft walls": {"scenario": "3m", "walls_cause_death": False, "map_width": 11.0, "map_height": 9.5, "max_steps": 40},
    "hidden actions": {"scenario": "3s5z", "see_enemy_actions": False},
    "nearest two": {"scenario": "8m", "observed_units": 2},
    "nearest more than there are": {"scenario": "2s3z", "observed_units": 7},
    "nearest, drawn": {"scenario": "smacv2_5_units", "observed_units": 3},
    "time": {"scenario": "3m", "world_steps_per_env_step": 3, "time_per_step": 0.11, "max_steps": 30},
    "crowded": {"scenario": "8m", "start_spread": 0.4, "won_battle_bonus": 2.5},
    "in one place": {"scenario": "3m", "start_spread": 0.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_bitwise_equal_to_the_oracle(variant, random_seed):
    seen = play(*army(1, **VARIANTS[variant]), random_seed, 105)
    assert seen["ends"] and (seen["attacks"] or variant == "time")


# ---------------------------------------------------------------------- scenarios and starts


@pytest.mark.parametrize(
    ("scenario", "allies", "enemies"),
    [
        ("3s5z", [2, 2, 2, 3, 3, 3, 3, 3], None),
        ("3s5z_vs_3s6z", [2] * 3 + [3] * 5, [2] * 3 + [3] * 6),
        ("1m1M1s1z1l1h_vs_2h", [0, 1, 2, 3, 4, 5], [5, 5]),
        ("12m", [0] * 12, None),
    ],
)
def test_a_scenario_names_its_armies(scenario, allies, enemies):
    game = gpu_vecenv.configure("skirmish", scenario=scenario)
    assert game.armies == (allies, enemies or allies, False)
    env = gpu_vecenv.make(game, 2, "cpu")
    env.reset(seed=1)
    assert env.state["unit_type"].tolist() == [allies + (enemies or allies)] * 2


@pytest.mark.parametrize(
    "scenario", ["", "3x", "m3", "0m", "3m_vs_", "3m_vs_3m_vs_3m", "3m 3z", "smacv2_0_units", "3m\n", "٣m"]
)
def test_what_names_no_armies_is_refused(scenario):
    with pytest.raises(
        ConfigError, match=r"Skirmish.scenario is .*expected numbers of units of the types m, M, s, z, l, h"
    ):
        gpu_vecenv.configure("skirmish", scenario=scenario)


def test_drawn_armies_mirror_or_surround_each_other():
    """Places at the start: what pushes moved is told apart by the side of the map and the distance from the middle."""
    env = gpu_vecenv.make("skirmish", 2000, "cpu", scenario="smacv2_5_units", start_spread=0.5)
    env.reset(seed=5)
    kinds, place = env.state["unit_type"].numpy(), env.state["position"].numpy()
    assert (kinds[:, :5] == kinds[:, 5:]).all()
    counts = np.bincount(kinds[:, :5].ravel(), minlength=6)  # 10,000 draws of six types: +-5 standard deviations
    assert (abs(counts - 10_000 / 6) < 5 * (10_000 * 5 / 36) ** 0.5).all()
    mirrored = (abs(place[:, :5, 0] + place[:, 5:, 0] - 32) < 1e-3).all(1) & (
        abs(place[:, :5, 1] - place[:, 5:, 1]) < 1e-3
    ).all(1)
    near = (abs(place - 16) < 3).all(2)
    inside = [near[:, :5].all(1), near[:, 5:].all(1)]
    middle = [kind & ~mirrored for kind in inside]
    for kind, share in ((mirrored, 0.5), (middle[0], 0.25), (middle[1], 0.25)):
        # Both armies near the middle, or mirrored ones moved by pushes across it, are rare.
        assert abs(kind.mean() - share) < 5 * (share * (1 - share) / 2000) ** 0.5 + 0.03


# ---------------------------------------------------------------------- ends, deaths, and large battles


def lone_duel(ally: float, enemy: float, **config) -> VecEnv:
    """Two stalkers in range of each other, with so much health."""
    env = gpu_vecenv.make("skirmish", 1, "cpu", scenario="1s", autoreset_mode="disabled", **config)
    env.reset(seed=1)
    env.state["position"].copy_(torch.tensor([[[12.0, 16.0], [16.0, 16.0]]]))
    env.state["health"].copy_(torch.tensor([[ally, enemy]]))
    env.observe()
    return env


@pytest.mark.parametrize(
    ("ally", "enemy", "reward", "won"),
    [(160.0, 13.0, 13 / 160 + 1, True), (13.0, 160.0, 13 / 160, False), (13.0, 13.0, 13 / 160, False)],
)
def test_a_battle_is_won_by_those_who_live(ally, enemy, reward, won):
    env = lone_duel(ally, enemy)
    _, rewards, terminations, truncations, _ = env.step(torch.tensor([[5]]))
    assert rewards.item() == pytest.approx(reward) and bool(env.state["won"]) is won
    assert terminations.item() and not truncations.item()


def test_the_time_limit_truncates():
    env = lone_duel(160.0, 160.0, max_steps=1)
    _, rewards, terminations, truncations, _ = env.step(torch.tensor([[4]]))
    assert truncations.item() and not terminations.item() and rewards.item() == 0


def test_the_dead_are_paid_until_their_battle_ends():
    env = gpu_vecenv.make("skirmish", 1, "cpu", scenario="3m", autoreset_mode="disabled")
    env.reset(seed=1)
    env.state["position"][0, 0] = torch.tensor([0.1, 16.0])  # one step west is the wall
    env.observe()
    obs, _, terminations, _, info = env.step(torch.tensor([[3, 1, 1]]))
    assert not terminations.any() and info["active"].all() and info["acting"].tolist() == [[False, True, True]]
    assert not obs[0, 0].any() and obs[0, 1].any()
    rewards = []
    for _ in range(100):
        mask = info["action_mask"][0]
        actions = [int(m.nonzero()[-1]) if m[5:].any() else 1 for m in mask]
        _, reward, terminations, truncations, info = env.step(torch.tensor([actions]))
        rewards.append(reward[0])
        if not info["active"].any():
            break
    assert torch.stack(rewards)[:, 0].equal(torch.stack(rewards)[:, 1]) and torch.stack(rewards).sum() > 0
    assert (terminations | truncations).all()


@pytest.mark.slow
def test_five_hundred_against_five_hundred():
    battle = {"scenario": "500m", "map_width": 160, "map_height": 160, "start_spread": 20, "observed_units": 16}
    env = gpu_vecenv.make("skirmish", 1, "cpu", **battle)
    obs, _ = env.reset(seed=2)
    assert obs.shape == (1, 500, 32 * 13 + 10) and (env.state["health"] == 45).all()
    twin = SkirmishOracle(**battle)
    inject(env, 0, twin)
    for _ in range(2):
        actions, draws = env.sample_actions(), PhiloxDraws(env, 0, twin.elapsed_steps + 1)
        obs, rewards, *_ = env.step(actions)
        expected, *_ = twin.step(actions[0].numpy(), draws)
        same("rewards", 0, rewards, [expected])
        same("position", 0, env.state["position"], [twin.position])
    same("obs", 0, obs, [twin.observe()])
    assert not env.faults().any()
