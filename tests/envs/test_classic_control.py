"""The classic control games against Gymnasium's own, which step the same float32 state in float64, step by step."""

import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from support.actions import beyond_bounds

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.errors import ConfigError

IDS = {
    "cartpole": "CartPole-v1",
    "mountain_car": "MountainCar-v0",
    "continuous_mountain_car": "MountainCarContinuous-v0",
    "acrobot": "Acrobot-v1",
    "pendulum": "Pendulum-v1",
}
TERMINATING = [name for name in IDS if name != "pendulum"]

# How far a number may be from Gymnasium's: ROUNDINGS x UNIT x the sum of the absolute values of the terms that it is
# summed up from. UNIT is the largest relative error of one float32 operation (or of a constant made float32); no path
# from the state to a number has more than ROUNDINGS of them, a sine or cosine counted as 2. Errors mostly cancel: the
# largest seen is 4.1 x UNIT.
UNIT, ROUNDINGS = 2.0**-24, 16
# Rounding may put a number on the other side of a threshold; what it then decides is not compared. Of 400,000 numbers
# spread evenly over a range of the threshold's own size 400,000 x 2 x ROUNDINGS x UNIT = 0.8 are that near; fewer
# come near the end of an episode. None was seen.
FEW = 1

# Configurations: game, ours, keywords of gymnasium.make, attributes that Gymnasium's environment is given.
DEFAULTS = [(name, {}, {}, {}) for name in IDS]
VARIANTS = [
    ("cartpole", {"sutton_barto_reward": True}, {"sutton_barto_reward": True}, {}),
    (
        "cartpole",
        {"gravity": 5.0, "cart_mass": 2.0, "pole_mass": 0.3, "half_length": 0.8, "force_mag": 7.0, "dt": 0.03}
        | {"x_threshold": 0.4, "theta_threshold": 0.15, "semi_implicit": True, "max_steps": 60},
        {"max_episode_steps": 60},
        {"gravity": 5.0, "masscart": 2.0, "masspole": 0.3, "total_mass": 2.3, "length": 0.8, "polemass_length": 0.24}
        | {"force_mag": 7.0, "tau": 0.03, "x_threshold": 0.4, "theta_threshold_radians": 0.15}
        | {"kinematics_integrator": "semi-implicit euler"},
    ),
    ("mountain_car", {"goal_velocity": 0.03}, {"goal_velocity": 0.03}, {}),
    (
        "mountain_car",
        {"min_position": -1.0, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "force": 0.002}
        | {"gravity": 0.003, "max_steps": 70},
        {"max_episode_steps": 70},
        {"min_position": -1.0, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "force": 0.002}
        | {"gravity": 0.003},
    ),
    ("continuous_mountain_car", {"goal_velocity": 0.03}, {"goal_velocity": 0.03}, {}),
    (
        "continuous_mountain_car",
        {"min_position": -1.0, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "power": 0.002},
        {},
        {"min_position": -1.0, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "power": 0.002},
    ),
    ("acrobot", {"book_or_nips": "nips"}, {}, {"book_or_nips": "nips"}),
    (
        "acrobot",
        {"link_length_1": 1.25, "link_mass_1": 0.8, "link_mass_2": 1.1, "link_com_pos_1": 0.6, "link_com_pos_2": 0.4}
        | {"link_moi": 0.9, "max_velocity_1": 9.0, "max_velocity_2": 20.0, "torque": 1.5, "dt": 0.1},
        {},
        {"LINK_LENGTH_1": 1.25, "LINK_MASS_1": 0.8, "LINK_MASS_2": 1.1, "LINK_COM_POS_1": 0.6, "LINK_COM_POS_2": 0.4}
        | {"LINK_MOI": 0.9, "MAX_VEL_1": 9.0, "MAX_VEL_2": 20.0, "AVAIL_TORQUE": [-1.5, 0.0, 1.5], "dt": 0.1},
    ),
    (
        "pendulum",
        {"gravity": 9.81, "mass": 0.7, "length": 1.2, "max_torque": 1.5, "max_speed": 6.0, "dt": 0.04},
        {"g": 9.81},
        {"m": 0.7, "l": 1.2, "max_torque": 1.5, "max_speed": 6.0, "dt": 0.04},
    ),
]


class Steps(NamedTuple):
    """Arrays over steps. The first three fields are the inputs of a step."""

    time: np.ndarray  # steps since reset, before this one
    before: np.ndarray  # state
    actions: np.ndarray
    after: np.ndarray  # state
    obs: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def oracle_of(name: str, keywords: dict[str, Any], attributes: dict[str, Any]) -> gymnasium.Env:
    oracle = gymnasium.make(IDS[name], disable_env_checker=True, **keywords)
    for key, value in attributes.items():
        assert hasattr(oracle.unwrapped, key)
        setattr(oracle.unwrapped, key, value)
    oracle.reset(seed=1)
    return oracle


def state_of(env: VecEnv) -> torch.Tensor:
    """(num_envs, numbers) float32, in the order of Gymnasium's state."""
    return torch.cat([env.state[field.name].view(env.num_envs, -1) for field in env.game.state], 1)


def write_state(env: VecEnv, state: np.ndarray) -> None:
    first = 0
    for tensor in env.state.values():
        width = tensor[0].numel()
        tensor.view(env.num_envs, width).copy_(torch.from_numpy(state[:, first : first + width]))
        first += width


def stepped(env: VecEnv, actions: torch.Tensor) -> list[torch.Tensor]:
    """One step, as the fields of Steps."""
    start = [env.elapsed_steps.clone(), state_of(env), actions[:, 0]]
    outputs = env.step(actions)
    return [*start, state_of(env), *(output[:, 0] for output in outputs[:4])]


def gymnasium_steps(oracle: gymnasium.Env, ours: Steps) -> Steps:
    """Gymnasium's results for the same states, elapsed steps and actions."""
    bare, results, after = oracle.unwrapped, [], []
    # Box actions as float64, else Gymnasium would round products with them to float32.
    actions = ours.actions.tolist() if ours.actions.ndim == 1 else list(ours.actions.astype(np.float64))
    for time, state, action in zip(ours.time.tolist(), ours.before.tolist(), actions, strict=True):
        bare.state = state
        bare.steps_beyond_terminated = None
        oracle._elapsed_steps = time
        results.append(oracle.step(action)[:4])
        after.append(bare.state)
    return Steps(*ours[:3], np.array(after, np.float64), *map(np.array, zip(*results, strict=True)))


def wrapped(angle: np.ndarray) -> np.ndarray:
    return (angle + np.pi) % (2 * np.pi) - np.pi


# Policies on obs, (num_envs, 1, elements), that reach the ends of episodes that random actions do not.
POLICIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cartpole": lambda obs: (obs[..., 2] + 0.3 * obs[..., 3] > 0).int(),
    "mountain_car": lambda obs: (obs[..., 1] >= 0).int() * 2,
    "continuous_mountain_car": lambda obs: (obs[..., 1:] >= 0).float() * 2 - 1,
    "acrobot": lambda obs: (obs[..., 5] > 0).int() * 2,
    "pendulum": lambda obs: (obs[..., 2:] > 0).float() * 4 - 2,
}


# For each game: the sums of absolute terms of every number of the next state. See ROUNDINGS.
def cartpole_terms(game, ours: Steps, oracle) -> list[np.ndarray]:
    x, x_dot, theta, theta_dot = np.abs(ours.before.T.astype(np.float64))
    total_mass, pole_mass_length = game.cart_mass + game.pole_mass, game.pole_mass * game.half_length
    temp = (game.force_mag + pole_mass_length * theta_dot * theta_dot) / total_mass
    theta_acc = (game.gravity + temp) / (game.half_length * (4 / 3 - game.pole_mass / total_mass))
    x_dot = x_dot + game.dt * (temp + pole_mass_length * theta_acc / total_mass)
    theta_dot = theta_dot + game.dt * theta_acc
    return [x + game.dt * x_dot, x_dot, theta + game.dt * theta_dot, theta_dot]


def mountain_car_terms(game, ours: Steps, oracle) -> list[np.ndarray]:
    x, v = np.abs(ours.before.T.astype(np.float64))
    motor = game.force if hasattr(game, "force") else game.power
    next_v = v + motor + game.gravity * (1 + 3 * x)  # 3 x: what rounding the angle does to its cosine
    return [x + next_v, next_v]


def pendulum_terms(game, ours: Steps, oracle) -> list[np.ndarray]:
    angle, v = np.abs(ours.before.T.astype(np.float64))
    angle = angle + 2 * np.pi * (angle > np.pi)  # the turns taken off
    weight, lever = 3 * game.gravity / (2 * game.length), 3 / (game.mass * game.length**2)
    next_v = v + game.dt * (weight * (1 + angle) + lever * np.abs(ours.actions[:, 0]).clip(max=game.max_torque))
    return [angle + game.dt * next_v, next_v]


def acrobot_terms(game, ours: Steps, oracle) -> list[np.ndarray]:
    # A step of Runge and Kutta's method passes rounding errors on, at great speeds a thousandfold. By how much is taken
    # from Gymnasium's derivative: the effect of moving each number of the state, times its largest value in the step.
    torque = np.array(oracle.unwrapped.AVAIL_TORQUE)[ours.actions]

    def rate(y):
        return np.stack(oracle.unwrapped._dsdt([*y, torque])[:4])

    def step_from(y):
        stages = [y]
        rates = [rate(y)]
        for part in (0.5, 0.5, 1.0):
            stages.append(y + part * game.dt * rates[-1])
            rates.append(rate(stages[-1]))
        end = y + game.dt / 6 * (rates[0] + 2 * rates[1] + 2 * rates[2] + rates[3])
        return end, np.abs([*stages, end]).max(0)

    start = ours.before.T.astype(np.float64)
    end, largest = step_from(start)
    terms = largest.copy()
    for k in range(4):
        moved = start.copy()
        moved[k] += 1e-6  # far above float64's rounding, far below what bends
        terms += np.abs(step_from(moved)[0] - end) / 1e-6 * largest[k]
    return list(terms)


TERMS = {
    "cartpole": cartpole_terms,
    "mountain_car": mountain_car_terms,
    "continuous_mountain_car": mountain_car_terms,
    "acrobot": acrobot_terms,
    "pendulum": pendulum_terms,
}


def doubtful_ends(game: Env, theirs: Steps, allowed: np.ndarray) -> np.ndarray:
    """Where Gymnasium's state is so near a threshold that rounding decides whether the episode ends."""
    after = theirs.after.T
    if game.name() == "cartpole":
        near = np.abs(np.abs(after[[0, 2]]) - [[game.x_threshold], [game.theta_threshold]]) <= allowed.T[[0, 2]]
        return near.any(0)
    if game.name() == "acrobot":
        height = -np.cos(after[0]) - np.cos(after[1] + after[0])
        return np.abs(height - game.goal_height) <= 2 * allowed[:, 0] + allowed[:, 1] + ROUNDINGS * UNIT
    if game.name() == "pendulum":
        return np.zeros(after.shape[1], bool)
    beyond = after - [[game.goal_position], [game.goal_velocity]]  # both must not be negative
    return (beyond >= -allowed.T).all(0) & (beyond <= allowed.T).any(0)


def doubtful_walls(game: Env, ours: Steps, theirs: Steps, allowed: np.ndarray) -> np.ndarray:
    """Where a car comes so near the wall that rounding decides whether it is stopped."""
    if "mountain_car" not in game.name():
        return np.zeros(len(ours.time), bool)
    near = np.abs(theirs.after[:, 0] - game.min_position) <= allowed[:, 0]
    return near & ((ours.after[:, 1] == 0) != (theirs.after[:, 1] == 0))


def obs_and_reward_terms(game: Env, ours: Steps, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one = np.ones(len(ours.time))
    if game.name() == "acrobot":
        angles = 1 + terms.T[[0, 0, 1, 1]]
        return np.stack([*angles, *terms.T[2:]], 1), 0 * one
    if game.name() == "pendulum":
        angle, v = np.abs(ours.before.T.astype(np.float64))
        torque = ours.actions[:, 0].astype(np.float64).clip(-game.max_torque, game.max_torque)
        costs = np.pi * angle + 0.1 * v**2 + 0.001 * torque**2
        return np.stack([1 + terms[:, 0], 1 + terms[:, 0], terms[:, 1]], 1), costs
    if game.name() == "continuous_mountain_car":
        costs = game.action_cost * ours.actions[:, 0].astype(np.float64) ** 2
        return terms, costs + game.goal_reward * ours.terminations
    return terms, 0 * one


def assert_near(what: str, ours: np.ndarray, theirs: np.ndarray, terms: np.ndarray, where: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    error = np.abs(ours.astype(np.float64) - theirs) * where
    assert (error <= ROUNDINGS * UNIT * terms).all(), f"{what}: {(error / (UNIT * np.maximum(terms, 1e-30))).max()}"


def assert_same(game: Env, oracle: gymnasium.Env, ours: Steps) -> Steps:
    """Hold our steps against Gymnasium's, which are returned."""
    theirs = gymnasium_steps(oracle, ours)
    terms = np.stack(TERMS[game.name()](game, ours, oracle), 1)
    allowed = ROUNDINGS * UNIT * terms
    end, wall = doubtful_ends(game, theirs, allowed), doubtful_walls(game, ours, theirs, allowed)
    assert end.sum() <= FEW and wall.sum() <= FEW
    sure = ~end

    after = theirs.after.copy()
    angles = {"acrobot": [0, 1], "pendulum": [0]}.get(game.name(), [])
    # Which of two angles a turn apart is written does not matter: both games wrap them.
    after[:, angles] = ours.after[:, angles] - wrapped(ours.after[:, angles] - after[:, angles])
    obs_terms, reward_terms = obs_and_reward_terms(game, ours, terms)
    assert_near("state", ours.after, after, terms, ~wall[:, None])
    assert_near("obs", ours.obs, theirs.obs, obs_terms, ~wall[:, None])
    assert_near("rewards", ours.rewards, theirs.rewards, reward_terms, sure)
    np.testing.assert_array_equal(ours.terminations[sure], theirs.terminations[sure])
    # Gymnasium's time limit sets its flag beside a termination; here the termination goes alone.
    np.testing.assert_array_equal(ours.truncations[sure], (theirs.truncations & ~theirs.terminations)[sure])
    assert theirs.obs.dtype == ours.obs.dtype == np.float32
    return theirs


# ---------------------------------------------------------------------- declarations


@pytest.mark.parametrize(("name", "config", "keywords", "attributes"), [*DEFAULTS, *VARIANTS])
def test_spaces_and_time_limits_are_gymnasiums(name, config, keywords, attributes):
    game = gpu_vecenv.configure(name, **config)
    oracle = gymnasium.make(IDS[name], **keywords)
    assert game.max_steps == oracle.spec.max_episode_steps
    assert game.layout.action.widest.dtype == oracle.action_space.dtype
    if not attributes:  # which come too late for Gymnasium's spaces
        assert game.observation_space == oracle.observation_space
        assert game.action_space == oracle.action_space


@pytest.mark.parametrize("name", IDS)
def test_the_spec_is_gymnasiums(name):
    ours, theirs = gymnasium.spec(f"gpu_vecenv/{IDS[name]}"), gymnasium.spec(IDS[name])
    assert (ours.max_episode_steps, ours.reward_threshold) == (theirs.max_episode_steps, theirs.reward_threshold)


@pytest.mark.parametrize("limit", [None, 3, 1000])
def test_the_time_limit_of_gymnasium_make_is_the_only_one(limit):
    """A pendulum never terminates: its episode has exactly as many steps as the wrapper allows."""
    env = gymnasium.make("gpu_vecenv/Pendulum-v1", **({} if limit is None else {"max_episode_steps": limit}))
    env.reset(seed=1)
    for _ in range(2):
        flags = [env.step(np.zeros(1, np.float32))[2:4] for _ in range(limit or 200)]
        assert flags == [(False, False)] * ((limit or 200) - 1) + [(False, True)]
        env.reset()
    copy = pickle.loads(pickle.dumps(env.unwrapped))
    assert copy.game.max_steps == env.unwrapped.game.max_steps


@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
def test_max_steps_beside_gymnasiums_time_limit_is_refused(make):
    with pytest.raises(ConfigError, match="max_episode_steps"):
        make("gpu_vecenv/CartPole-v1", max_steps=7)


@pytest.mark.parametrize("name", IDS)
def test_a_title_and_a_version_make_gymnasiums_id(name):
    game = gpu_vecenv.configure(name)
    assert f"{game.title}-v{game.version}" == IDS[name]
    assert dict(game.roles) == {"agent": 1}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cartpole", {"reset_low": 0.1}),
        ("acrobot", {"reset_low": 0.2}),
        ("mountain_car", {"reset_high": -0.7}),
        ("mountain_car", {"min_position": 0.7}),
        ("continuous_mountain_car", {"reset_high": -0.7}),
        ("continuous_mountain_car", {"min_position": 0.7}),
    ],
)
def test_a_range_that_ends_before_it_begins_is_refused(name, config):
    with pytest.raises(ConfigError, match="exceeds"):
        gpu_vecenv.configure(name, **config)


# ---------------------------------------------------------------------- steps


EPISODES = 240


@pytest.mark.slow
@pytest.mark.parametrize("name", IDS)
def test_whole_episodes_step_like_gymnasiums(name, device):
    """Seven of eight environments follow a good policy, the eighth acts at random; first episodes only."""
    env = gpu_vecenv.make(name, EPISODES, device, autoreset_mode="disabled")
    obs, _ = env.reset(seed=3)
    first = torch.ones(EPISODES, dtype=torch.bool, device=device)  # environments still in their first episode
    random = torch.arange(EPISODES, device=device) % 8 == 0
    parts = []
    while first.any():
        drawn = beyond_bounds(env.sample_actions())
        actions = torch.where(random.view(-1, *[1] * (drawn.ndim - 1)), drawn, POLICIES[name](obs))
        step = stepped(env, actions)
        parts.append([column[first].cpu().numpy() for column in step])
        ended = ~env.active[:, 0]
        first &= ~ended
        obs, _ = env.reset(mask=ended)
    ours = Steps(*map(np.concatenate, zip(*parts, strict=True)))
    theirs = assert_same(env.game, oracle_of(name, {}, {}), ours)

    space = env.game.observation_space
    assert ((ours.obs >= space.low) & (ours.obs <= space.high)).all()
    assert env.faults().sum() == 0
    assert ours.terminations.sum() + ours.truncations.sum() == EPISODES
    # What the policies are there for: both ends, the wall and the fastest car have all been compared.
    assert ours.terminations.sum() >= EPISODES // 10 * (name in TERMINATING)
    assert ours.truncations.sum() >= EPISODES // 10
    if "mountain_car" in name:
        assert (ours.after[:, 0] == np.float32(env.game.min_position)).sum() >= EPISODES // 10
    if name == "pendulum":
        assert (np.abs(theirs.after[:, 1]) == env.game.max_speed).sum() >= EPISODES // 10


def anywhere(game: Env, random: np.random.Generator, count: int) -> np.ndarray:
    """States all over what a game can be in, and beyond its ends: (count, numbers) float32."""
    low, high = {
        "cartpole": lambda: ([-1.1 * game.x_threshold, -3, -1.1 * game.theta_threshold, -3], None),
        "mountain_car": lambda: ([game.min_position, -game.max_speed], [game.max_position, game.max_speed]),
        "continuous_mountain_car": lambda: ([game.min_position, -game.max_speed], [game.max_position, game.max_speed]),
        "acrobot": lambda: ([-np.pi, -np.pi, -game.max_velocity_1, -game.max_velocity_2], None),
        "pendulum": lambda: ([-20, -game.max_speed], None),
    }[game.name()]()
    high = [-x for x in low] if high is None else high
    return random.uniform(low, high, (count, len(low))).astype(np.float32)


@pytest.mark.parametrize(("name", "config", "keywords", "attributes"), [*DEFAULTS, *VARIANTS])
def test_a_step_from_any_state_agrees_with_gymnasium(name, config, keywords, attributes, device):
    env = gpu_vecenv.make(name, 4000, device, autoreset_mode="disabled", **config)
    random = np.random.default_rng(5)
    env.reset(seed=5)
    write_state(env, anywhere(env.game, random, 4000))
    env.elapsed_steps.copy_(torch.from_numpy(random.integers(env.game.max_steps - 3, env.game.max_steps, 4000)))
    ours = Steps(*(column.cpu().numpy() for column in stepped(env, beyond_bounds(env.sample_actions()))))
    theirs = assert_same(env.game, oracle_of(name, keywords, attributes), ours)
    assert {True, False} == set(theirs.truncations.tolist())
    if name in TERMINATING:
        assert (theirs.truncations & theirs.terminations).any() and not theirs.terminations.all()
    if name == "acrobot":
        assert np.abs(ours.after[:, :2]).max() <= np.float32(np.pi)
    assert env.faults().sum() == 0


@pytest.mark.parametrize("name", TERMINATING)
def test_termination_takes_precedence_over_truncation(name, device):
    """At the last step: a state that ends and one that does not."""
    ending, lasting = {
        "cartpole": ([3, 0, 0, 0], [0, 0, 0, 0]),
        "mountain_car": ([0.6, 0.05], [-0.5, 0]),
        "continuous_mountain_car": ([0.6, 0.05], [-0.5, 0]),
        "acrobot": ([np.pi, 0, 0, 0], [0, 0, 0, 0]),
    }[name]
    env = gpu_vecenv.make(name, 2, device, autoreset_mode="disabled")
    env.reset(seed=1)
    for before, at_last in ((2, False), (1, True)):
        write_state(env, np.array([ending, lasting], np.float32))
        env.elapsed_steps.fill_(env.game.max_steps - before)
        _, _, terminations, truncations, info = env.step(env.sample_actions())
        assert terminations[:, 0].tolist() == [True, False]
        assert truncations[:, 0].tolist() == [False, at_last]
        assert info["active"][:, 0].tolist() == [False, not at_last]
        env.reset(mask=~info["active"][:, 0])


def test_a_pendulum_turns_for_ever_without_losing_digits(device):
    """Its angle is wrapped at every step: after 63 turns it is small and steps as exactly."""
    env = gpu_vecenv.make("pendulum", 8, device, autoreset_mode="disabled", max_steps=2**31 - 1, gravity=0.0)
    env.reset(seed=1)
    write_state(env, np.tile(np.float32([0.0, 8.0]), (8, 1)))
    full = torch.full((8, 1, 1), 2.0, device=device)
    buffers = env.step_buffers()
    for _ in range(1000):
        env.step(full, out=buffers)
    assert env.state["theta"].abs().max() <= np.pi + 8 * 0.05
    oracle = oracle_of("pendulum", {"max_episode_steps": 2**31}, {"g": 0.0})
    assert_same(env.game, oracle, Steps(*(column.cpu().numpy() for column in stepped(env, full))))


# ---------------------------------------------------------------------- distributions


def assert_alike(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Two samples of 4,000 from one distribution, next to uniform. Their seeds are fixed: this passes always or never.

    One pair in ten thousand would be less alike. The test of Kolmogorov and Smirnov misses a range that is a few
    percent off, so the ends are compared too: they are nearer than 1/200 of the range, but for 1 pair in exp(20).
    """
    assert len(ours) == len(theirs) == 4000
    assert ks_2samp(ours, theirs).pvalue > 1e-4
    near = np.ptp(theirs) / 200
    assert abs(ours.min() - theirs.min()) <= near and abs(ours.max() - theirs.max()) <= near


WIDE = {"low": -0.3, "high": 0.1}
STARTS = [
    *((name, {}, None) for name in IDS),
    ("cartpole", {"reset_low": -0.3, "reset_high": 0.1}, WIDE),
    ("mountain_car", {"reset_low": -0.3, "reset_high": 0.1}, WIDE),
    ("continuous_mountain_car", {"reset_low": -0.3, "reset_high": 0.1}, WIDE),
    ("acrobot", {"reset_low": -0.3, "reset_high": 0.1}, WIDE),
    ("pendulum", {"reset_theta": 0.5, "reset_theta_dot": 2.0}, {"x_init": 0.5, "y_init": 2.0}),
    *((name, {}, WIDE) for name in TERMINATING),  # these options are also ours
    ("cartpole", {}, {"low": -0.3}),
    ("pendulum", {}, {"x_init": 0.5, "y_init": 2.0}),
]


@pytest.mark.parametrize(("name", "config", "options"), STARTS)
def test_starts_are_distributed_like_gymnasiums(name, config, options, device):
    view = gpu_vecenv.GymnasiumVectorEnv(name, 4000, device, **config)
    obs, _ = view.reset(seed=21, options=None if config else options)
    ours = state_of(view.vec_env).cpu().numpy()
    assert torch.equal(obs, view.vec_env.observe())
    oracle = oracle_of(name, {}, {})
    theirs = []
    for _ in range(4000):
        oracle.reset(options=options)
        theirs.append(oracle.unwrapped.state)
    theirs = np.array(theirs)
    moving = np.ptp(theirs, 0) > 0
    for k in range(ours.shape[1]):
        assert_alike(ours[:, k], theirs[:, k])
    np.testing.assert_array_equal(ours[:, ~moving], theirs[: len(ours), ~moving])
    # Numbers of one state, and states of neighbouring environments, are drawn apart: 5 standard deviations.
    correlation = np.corrcoef(np.concatenate([ours[1:, moving], ours[:-1, moving]], 1).T)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 5 / math.sqrt(4000)


def test_torque_noise_of_acrobot_is_distributed_like_gymnasiums(device):
    env = gpu_vecenv.make("acrobot", 4000, device, torque_noise_max=0.5)
    env.reset(seed=1)
    write_state(env, np.zeros((4000, 4), np.float32))
    env.step(torch.full((4000, 1), 2, dtype=torch.int32, device=device))
    oracle = oracle_of("acrobot", {}, {"torque_noise_max": 0.5})
    theirs = []
    for _ in range(4000):
        oracle.unwrapped.state = [0.0] * 4
        oracle._elapsed_steps = 0
        theirs.append(oracle.step(2)[0][5])
    ours = env.state["theta_dot"][:, 1].cpu().numpy()
    assert_alike(ours, np.array(theirs))


# ---------------------------------------------------------------------- configuration that Gymnasium's games lack


def test_both_mountain_cars_are_one_car(device):
    """With the same constants and whole actions they have the same bits; so gravity is the same constant in both."""
    same = {"goal_position": 0.45, "gravity": 0.003, "max_steps": 300}
    few = gpu_vecenv.make("mountain_car", 500, device, autoreset_mode="disabled", force=0.0015, **same)
    many = gpu_vecenv.make(
        "continuous_mountain_car", 500, device, autoreset_mode="disabled", goal_reward=8.0, action_cost=0.5, **same
    )
    few.reset(seed=1)
    many.reset(seed=1)
    assert torch.equal(state_of(few), state_of(many))
    ends = 0
    for _ in range(300):
        actions = few.sample_actions()
        actions[::2] = POLICIES["mountain_car"](few.observe())[::2]
        *_, terminations, truncations, _ = few.step(actions)
        _, rewards, *flags, info = many.step((actions - 1).float()[..., None])
        assert torch.equal(state_of(few), state_of(many))
        assert torch.equal(torch.stack([terminations, truncations]), torch.stack(flags))
        assert torch.equal(rewards, 8 * terminations - 0.5 * (actions != 1))
        ends += int(terminations.sum())
        for env in (few, many):
            env.reset(mask=~info["active"][:, 0])
    assert ends >= 250


def test_an_acrobot_under_fourfold_gravity_moves_twice_as_fast(device):
    """Half the step, twice the speeds, four times the torque: powers of two, so the bits are the same."""
    scaled = {
        "gravity": 4 * 9.8,
        "dt": 0.1,
        "torque": 4.0,
        "max_velocity_1": 8 * math.pi,
        "max_velocity_2": 18 * math.pi,
    }
    slow = gpu_vecenv.make("acrobot", 1000, device, autoreset_mode="disabled")
    fast = gpu_vecenv.make("acrobot", 1000, device, autoreset_mode="disabled", **scaled)
    slow.reset(seed=1)
    fast.reset(seed=1)
    state = anywhere(slow.game, np.random.default_rng(1), 1000)
    write_state(slow, state)
    write_state(fast, state * np.float32([1, 1, 2, 2]))
    actions = slow.sample_actions()
    slow_obs, _, slow_ends, *_ = slow.step(actions)
    fast_obs, _, fast_ends, *_ = fast.step(actions)
    assert torch.equal(slow_obs * torch.tensor([1, 1, 1, 1, 2, 2], device=device), fast_obs)
    assert torch.equal(slow_ends, fast_ends)


@pytest.mark.parametrize("height", [-1.5, 0.25])
def test_the_goal_of_an_acrobot_may_be_elsewhere(height, device):
    env = gpu_vecenv.make("acrobot", 4000, device, autoreset_mode="disabled", goal_height=height)
    env.reset(seed=1)
    write_state(env, anywhere(env.game, np.random.default_rng(2), 4000))
    _, rewards, terminations, _, _ = env.step(env.sample_actions())
    angle = env.state["theta"].double()
    reached = -torch.cos(angle[:, 0]) - torch.cos(angle.sum(1))
    sure = (reached - height).abs() > 1e-6  # two cosines and a sum, each exact to float32
    assert sure.sum() >= 4000 - FEW
    assert torch.equal(terminations[sure, 0], (reached > height)[sure])
    assert torch.equal(rewards, terminations.float() - 1)
    assert 100 < terminations.sum() < 3900


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("name", IDS)
def test_thread_order_and_num_envs_change_no_result(name):
    game = gpu_vecenv.configure(name, max_steps=60)

    def words(num_envs: int, **arguments: int) -> torch.Tensor:
        return trajectory_digest(VecEnv(game, num_envs, "cpu", **arguments), 17, 150).words

    expected = words(40)
    assert len(set(expected.tolist())) == 40
    for thread_order in (1, 2):
        assert torch.equal(words(40, thread_order=thread_order), expected)
    assert torch.equal(torch.cat([words(13), words(27, first_env_index=13)]), expected)
