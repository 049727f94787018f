"""Randomised parameters: values, ranges, random streams, derived constants; all else equals a game of constants."""

import copy
import dataclasses
import json
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from games.weights import Weights
from oracles.philox import ONES, philox
from support.bitwise import bits, equal_bits
from support.cases import mostly_exhaustive
from support.emulated_cuda import EmulatedCudaBackend

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.codegen import game_source, generate_header
from gpu_vecenv.compile.randomized_source import with_varying_constants
from gpu_vecenv.declare.env import Env, f32
from gpu_vecenv.declare.kernels import Array, KernelSignature
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import MODES
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, KernelCompileError
from gpu_vecenv.views.frames import env_drawing
from gpu_vecenv.watch.recording import record
from gpu_vecenv.watch.replay import play
from gpu_vecenv.watch.replay_file import Replay

RANGES = {"gravity": (8, 12), "half_length": (0.3, 0.9)}
SMALL = {
    "tag_continuous": {"num_taggers": 2, "num_runners": 5, "num_neighbors": 3, "max_steps": 12},
    "connect_four": {"slip": 0.5},
    "pursuit": {"constraint_window": 0.8, "max_steps": 12, "x_size": 6, "y_size": 7},
    "acrobot": {"torque_noise_max": 0.5, "max_steps": 30},
    "economy": {"tax_limit": 0.5, "max_steps": 12},
    **{name: {"max_steps": 12} for name in ("tag_gridworld", "simple_spread", "mountain_car", "pendulum")},
}
RANDOMIZABLE = [name for name, game in GAMES.items() if game().randomizable]


def cartpole(num_envs=64, device="cpu", randomize=RANGES, **settings) -> VecEnv:
    return gpu_vecenv.make("cartpole", num_envs, device, randomize=randomize, **settings)


def trajectory(env: VecEnv, seed=5, steps=25) -> list[torch.Tensor]:
    """All outputs and the declared state of a reset and some random steps."""
    outputs = [env.reset(seed=seed)[0].clone()]
    for _ in range(steps):
        *tensors, info = env.step(env.sample_actions())
        outputs += [tensor.clone() for tensor in (*tensors, info["active"])]
        outputs += [env.state[field.name].clone() for field in env.game.state if field.name in env.state]
    return outputs


# ---------------------------------------------------------------------- what is drawn


def test_values_are_those_of_the_stream_of_their_own(device):
    """Computed again in Python: Philox with the environment's key, counter (stream, parameter, 0, episode)."""
    seed, num_envs, first = 2**63 + 5, 50, 7
    env = cartpole(num_envs, device, first_env_index=first)
    positions = {field.name: position for position, field in enumerate(Cartpole.own_fields())}
    keys = [philox([first + k, 0, 0, 0], [seed & ONES, seed >> 32])[:2] for k in range(num_envs)]
    env.reset(seed=seed)
    for episode in range(3):
        for name, (low, high) in RANGES.items():
            words = [philox([4 << 29, positions[name], 0, episode], key)[0] for key in keys]
            unit = np.float32([word >> 8 for word in words]) * np.float32(2**-24)
            expected = np.float32(low) + unit * (np.float32(high) - np.float32(low))
            assert equal_bits(env.state[name], expected), (name, episode)
        env.reset()


def test_values_are_within_their_range_and_differ_by_environment_and_episode(device):
    env = cartpole(5000, device)
    env.reset(seed=1)
    first = {name: env.state[name].clone() for name in RANGES}
    for name, (low, high) in RANGES.items():
        values = env.state[name]
        assert values.shape == (5000,) and values.dtype == torch.float32
        assert (values >= np.float32(low)).all() and (values < np.float32(high)).all()
        assert values.min() < low + 0.01 * (high - low) and values.max() > high - 0.01 * (high - low)
        assert len(values.unique()) > 4900
    env.reset()
    assert all((env.state[name] != first[name]).float().mean() > 0.99 for name in RANGES)


def test_the_end_of_a_narrow_range_is_never_drawn():
    low, high = np.float32(1), np.nextafter(np.float32(1), np.float32(2))
    env = cartpole(1000, randomize={"gravity": (low, np.nextafter(high, np.float32(2)))})
    env.reset(seed=1)
    assert set(env.state["gravity"].tolist()) == {float(low), float(high)}


def test_each_episode_draws_anew_and_no_step_changes_a_value(device):
    env = cartpole(200, device, max_steps=9)
    env.reset(seed=2)
    before = env.state["gravity"].clone()
    for _ in range(30):
        *_, info = env.step(env.sample_actions())
        ended = info["_final_obs"][:, 0] if info["_final_obs"].ndim > 1 else info["_final_obs"]
        assert torch.equal(env.state["gravity"] != before, ended)
        before = env.state["gravity"].clone()


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_reset_draws_for_the_chosen_environments_alone(mode):
    env = cartpole(20, autoreset_mode=mode)
    env.reset(seed=3)
    before, mask = env.state["gravity"].clone(), torch.arange(20) % 3 == 0
    env.reset(mask=mask)
    assert torch.equal(env.state["gravity"] != before, mask)


def test_values_depend_on_seed_and_index_alone(device):
    whole, other_seed = cartpole(64, device), cartpole(64, device)
    shard, more = (
        cartpole(24, device, first_env_index=40),
        cartpole(64, device, randomize={**RANGES, "dt": (0.01, 0.03)}),
    )
    for env in (whole, shard, more):
        env.reset(seed=11)
        env.reset()  # of the second episode too
    other_seed.reset(seed=12)
    other_seed.reset()
    for name in RANGES:
        assert equal_bits(whole.state[name][40:], shard.state[name])
        assert equal_bits(whole.state[name], more.state[name])
        assert (whole.state[name] != other_seed.state[name]).all()


@pytest.mark.parametrize("mode", MODES)
def test_shards_step_like_the_whole(mode):
    whole, shard = (cartpole(n, first_env_index=first, autoreset_mode=mode) for n, first in ((40, 0), (16, 24)))
    for one, part in zip(trajectory(whole), trajectory(shard), strict=True):
        assert equal_bits(one[24:], part)


# ---------------------------------------------------------------------- games


def unequal_to_the_default(game: Env) -> dict[str, float]:
    """Another value for each parameter that can be randomised, exact in float32, the same order kept."""
    return {
        name: float(np.float32(getattr(game, name) * 1.03125 + 0.0078125 * index))
        for index, name in enumerate(game.randomizable)
    }


@pytest.mark.parametrize(
    "name", [name if name == "cartpole" else pytest.param(name, marks=pytest.mark.slow) for name in RANDOMIZABLE]
)
def test_a_range_of_one_value_equals_that_constant_bit_for_bit(name, device):
    game = gpu_vecenv.configure(name, **SMALL.get(name, {}))
    values = unequal_to_the_default(game)
    constant, default = VecEnv(dataclasses.replace(game, **values), 70, device), VecEnv(game, 70, device)
    varying = VecEnv(game, 70, device, randomize={key: (value, value) for key, value in values.items()})
    expected = trajectory(constant)
    assert all(equal_bits(one, other) for one, other in zip(trajectory(varying), expected, strict=True))
    assert not all(equal_bits(one, other) for one, other in zip(trajectory(default), expected, strict=True))
    assert {key: varying.state[key].unique().tolist() for key in values} == {key: [v] for key, v in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(RANDOMIZABLE, ["cartpole", "pendulum"]))  # a program for each
def test_each_parameter_is_the_constant_of_its_name(name):
    """One environment for each parameter, in which that one alone differs from the default."""
    game = gpu_vecenv.configure(name, **SMALL.get(name, {}))
    values = unequal_to_the_default(game)
    exact = {key: float(np.float32(getattr(game, key))) for key in values}
    env = VecEnv(game, len(values), "cpu", randomize={key: (value, value) for key, value in exact.items()})
    env.reset(seed=4)
    start = {key: value[:1].clone() for key, value in env.state_dict().items()}
    for index, (key, value) in enumerate(values.items()):
        env.load_state_dict({k: torch.cat([v] * len(values)) for k, v in start.items()})
        env.state[key][index] = value
        actions = torch.cat([env.sample_actions()[:1]] * len(values))
        constant = VecEnv(dataclasses.replace(game, **{**exact, key: value}), 1, "cpu")
        constant.reset(seed=4)
        fields = {f"state_{field.name}" for field in game.layout.fields} | {k for k in start if k.startswith("engine_")}
        constant.load_state_dict({k: v for k, v in start.items() if k in fields})
        for _ in range(3):
            outputs, expected = env.step(actions)[:4], constant.step(actions[:1])[:4]
            assert all(equal_bits(a[index : index + 1], b) for a, b in zip(outputs, expected, strict=True)), key


def test_games_that_are_not_randomised_have_constants_and_their_own_source():
    for name, kind in GAMES.items():
        game = kind()
        source, text = game_source(game.layout), game.layout.source_path.read_text()
        own = "\n".join("" if "#" in line else line for line in text.splitlines()).split("\n\n")
        assert all(part.strip("\n") in source for part in own), name
        header = generate_header(game.layout)
        for key in game.randomizable:
            assert f"constexpr float {key.upper()} = " in header
        assert "#define RANDOMIZED\n" not in source and "randomized::value_" not in source
        assert dataclasses.replace(game, randomize={}).layout == game.layout
        assert game_source(dataclasses.replace(game, randomize={}).layout) == source


def test_the_documentation_lists_what_can_be_randomised():
    text = (Path(__file__).resolve().parents[2] / "docs" / "randomization.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (`.*`) \|$", text, re.MULTILINE)
    assert {name: tuple(re.findall(r"`(\w+)`", names)) for name, names in rows} == {
        name: GAMES[name]().randomizable for name in RANDOMIZABLE
    }


def gymnasium_step(state: dict[str, np.ndarray], action: np.ndarray) -> dict[str, np.ndarray]:
    """Gymnasium's CartPole-v1 in float64, its constants one per environment."""
    gravity, length = state["gravity"], state["half_length"]
    masscart, masspole, force_mag, tau = 1.0, 0.1, 10.0, 0.02
    total_mass, polemass_length = masspole + masscart, masspole * length
    x, x_dot, theta, theta_dot = (state[key] for key in ("x", "x_dot", "theta", "theta_dot"))
    force = np.where(action == 1, force_mag, -force_mag)
    costheta, sintheta = np.cos(theta), np.sin(theta)
    temp = (force + polemass_length * np.square(theta_dot) * sintheta) / total_mass
    thetaacc = (gravity * sintheta - costheta * temp) / (
        length * (4.0 / 3.0 - masspole * np.square(costheta) / total_mass)
    )
    xacc = temp - polemass_length * thetaacc * costheta / total_mass
    return {
        "x": x + tau * x_dot,
        "x_dot": x_dot + tau * xacc,
        "theta": theta + tau * theta_dot,
        "theta_dot": theta_dot + tau * thetaacc,
    }


def test_cartpole_moves_as_gymnasium_s_formula_says_for_each_environment(device):
    env = cartpole(100, device)
    env.reset(seed=9)
    keys, compared = ("x", "x_dot", "theta", "theta_dot"), 0
    for _ in range(400):
        state = {key: env.state[key].cpu().numpy().astype(np.float64) for key in (*keys, *RANGES)}
        actions = env.sample_actions()
        obs, _, terminations, truncations, info = env.step(actions)
        expected = gymnasium_step(state, actions[:, 0].cpu().numpy())
        found = torch.where(info["_final_obs"].view(-1, 1), info["final_obs"][:, 0], obs[:, 0]).cpu().numpy()
        for column, key in enumerate(keys):
            # Float32 rounds intermediate results: about ten operations, each 6e-8 of numbers up to 20 in dt * 20.
            np.testing.assert_allclose(found[:, column], expected[key], rtol=2e-6, atol=2e-6)
        over = (np.abs(expected["x"]) > 2.4) | (np.abs(expected["theta"]) > math.radians(12))
        near = (
            np.minimum(np.abs(np.abs(expected["x"]) - 2.4), np.abs(np.abs(expected["theta"]) - math.radians(12))) < 1e-5
        )
        assert (terminations[:, 0].cpu().numpy() == over)[~near].all()
        compared += int((terminations | truncations).sum())
    assert compared > 500  # episodes ended, and new values were drawn


# ---------------------------------------------------------------------- live values


def test_a_value_that_is_set_counts_from_the_next_step_until_the_reset(device):
    env, other = cartpole(8, device), cartpole(8, device)
    for each in (env, other):
        each.reset(seed=6)
    actions = env.sample_actions()
    env.state["gravity"][3] = 100.0
    (obs, *_), (expected, *_) = env.step(actions), other.step(actions)
    differing = (obs != expected).any(-1)[:, 0]
    assert differing.nonzero().flatten().tolist() == [3]
    assert env.state["gravity"][3] == 100
    env.reset()
    other.reset()
    assert equal_bits(env.state["gravity"], other.state["gravity"])


def test_initial_states_name_parameters_too(device):
    pool = {"gravity": np.float32([1, 2, 3]), "theta": np.float32([0.01, 0.02, 0.03])}
    env = cartpole(50, device, initial_states=pool)
    env.reset(seed=1)
    gravity = env.state["gravity"]
    assert set(gravity.tolist()) == {1, 2, 3} and torch.equal(env.state["theta"], gravity * np.float32(0.01))
    assert len(env.state["half_length"].unique()) == 50
    state = {
        key: env.state[key].cpu().numpy().astype(np.float64) for key in ("x", "x_dot", "theta", "theta_dot", *RANGES)
    }
    expected = gymnasium_step(state, np.ones(50))
    obs = env.step(torch.ones((50, 1), dtype=torch.int32, device=env.device))[0]
    np.testing.assert_allclose(obs[:, 0, 3].cpu().numpy(), expected["theta_dot"], rtol=2e-6, atol=2e-6)


def test_an_autoreset_observes_with_the_initial_states_values(device):
    env = VecEnv(Weights(), 40, device, randomize={"mass": (1, 2)}, initial_states={"mass": np.float32([5, 6])})
    obs, _ = env.reset(seed=1)
    for _ in range(7):  # two episodes
        assert set(env.state["mass"].tolist()) == {5, 6}
        assert equal_bits(obs[:, 0, 1], env.state["mass"]) and equal_bits(obs[:, 0, 6], 4 * env.state["mass"])
        obs = env.step(env.sample_actions())[0]


def test_a_state_dict_continues_bit_for_bit(device):
    env, other = cartpole(32, device, max_steps=20), cartpole(32, device, max_steps=20)
    trajectory(env)
    other.load_state_dict(env.state_dict())
    assert {"state_gravity", "state_half_length"} <= env.state_dict().keys()
    for _ in range(30):
        actions = env.sample_actions()
        one, two = env.step(actions), other.step(actions)
        assert all(equal_bits(a, b) for a, b in zip(one[:4], two[:4], strict=True))


def test_copies_are_randomised_alike():
    env = cartpole(16)
    again = [env.like(), copy.copy(env), pickle.loads(pickle.dumps(env))]
    again.append(VecEnv(pickle.loads(pickle.dumps(env.game)), 16, "cpu"))
    for other in again:
        assert other.game == env.game and hash(other.game) == hash(env.game)
        assert trajectory_digest(other, 3, 5).hex() == trajectory_digest(env, 3, 5).hex()
    assert env.like(randomize={}).game == gpu_vecenv.configure("cartpole")
    assert trajectory_digest(env.like(randomize={"gravity": (1, 2)}), 3, 5).hex() != trajectory_digest(env, 3, 5).hex()


def test_the_configuration_passes_through_json():
    game = gpu_vecenv.configure("cartpole", randomize=RANGES)
    assert game.randomize == (("gravity", 8.0, 12.0), ("half_length", 0.3, 0.9))
    assert gpu_vecenv.configure("cartpole", **json.loads(json.dumps(dataclasses.asdict(game)))) == game
    assert game == gpu_vecenv.configure("cartpole", randomize=dict(reversed(RANGES.items())))


@pytest.mark.parametrize("mode", MODES)
def test_a_nonfinite_value_ends_the_episode_and_is_drawn_anew(mode, device):
    env, other = (cartpole(6, device, end_on_nonfinite=True, autoreset_mode=mode) for _ in range(2))
    for each in (env, other):
        each.reset(seed=1)
    env.state["gravity"][2] = math.nan
    _, _, terminations, _, _ = env.step(env.sample_actions())
    assert terminations[:, 0].nonzero().flatten().tolist() == [2]
    assert env.faults().nonzero().flatten().tolist() == [2]
    other.reset(mask=torch.arange(6, device=device) == 2)  # its next episode
    assert equal_bits(env.state["gravity"], other.state["gravity"])


# ---------------------------------------------------------------------- devices and launch shapes


@pytest.mark.parametrize("order", [1, 2])
def test_debug_builds_are_bitwise_equal(order, device):
    for builds in ({"thread_order": order}, {"guards": True}):
        one, other = cartpole(70, device, max_steps=9), cartpole(70, device, max_steps=9)
        other = VecEnv(other.game, 70, device, **builds)
        assert trajectory_digest(one, 3, 20).hex() == trajectory_digest(other, 3, 20).hex()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RANDOMIZABLE)
def test_a_gpu_is_bitwise_equal_whatever_the_launch_shape(name):
    game = gpu_vecenv.configure(name, **SMALL.get(name, {}))
    ranges = {key: (0.9 * value, 1.1 * value) for key in game.randomizable if (value := getattr(game, key)) > 0}
    game = dataclasses.replace(game, randomize=ranges)
    expected = trajectory_digest(VecEnv(game, 130, "cpu"), 3, 40).hex()
    for threads_per_env, threads_per_block in ((None, None), (1, 128), (4, 32), (32, 64), (64, None)):
        env = VecEnv(game, 130, "cuda", threads_per_env=threads_per_env, threads_per_block=threads_per_block)
        assert trajectory_digest(env, 3, 40).hex() == expected, (threads_per_env, threads_per_block)


@pytest.mark.slow
@pytest.mark.parametrize("threads_per_env", [None, 1, 4, 32, 64])
@pytest.mark.parametrize("name", ["cartpole", "tag_gridworld", "tag_continuous", "simple_spread"])
def test_thread_groups_are_bitwise_equal_to_one_thread(name, threads_per_env, monkeypatch):
    game = gpu_vecenv.configure(name, **SMALL.get(name, {"max_steps": 12}))
    ranges = {key: (0.9 * value, 1.1 * value) for key in game.randomizable if (value := getattr(game, key)) > 0}
    one = VecEnv(game, 37, "cpu", randomize=ranges)
    monkeypatch.setenv("EMULATED_THREADS", "backwards")
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    many = VecEnv(game, 37, "cpu", randomize=ranges, threads_per_env=threads_per_env)
    assert trajectory_digest(many, 3, 20).hex() == trajectory_digest(one, 3, 20).hex()


# ---------------------------------------------------------------------- a game of one's own


WEIGHTS = Weights.source_path().read_text()


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A function that writes the source, with text replaced, and gives the class."""

    def write(old: str = "", new: str = "") -> type[Weights]:
        path = tmp_path / "weights.cu"
        path.write_text(WEIGHTS.replace(old, new) if old else WEIGHTS)
        monkeypatch.setattr(Weights, "source", path)
        return Weights

    return write


def expected_weights(k: np.ndarray, mass: np.ndarray, lever: np.ndarray) -> np.ndarray:
    """The observations, (n, 12) float32: what Python declares in float64, the rest in float32."""
    wide, arm = mass.astype(np.float64), lever.astype(np.float64)
    heavy = mass * np.float32(2)
    columns = [k, mass, lever, wide * arm / 3 - 1, -np.sqrt(np.float64(2) * wide * arm + np.abs(arm - 5))]
    columns += [1 / (3 - wide), heavy * np.float32(2), heavy / np.float32(3) + np.float32(3.25), mass / np.float32(2)]
    columns += [lever, (lever + np.float32(1)) * np.float32(2), k]
    return np.stack([column.astype(np.float32) for column in columns], 1)


def test_derived_constants_follow_in_float64_and_in_the_source(weights, device):
    env = VecEnv(weights()(), 300, device, randomize={"k": (-1, 1), "mass": (0.5, 2.5), "lever": (0.3, 1)})
    obs, _ = env.reset(seed=3)
    expected = expected_weights(*(env.state[name].cpu().numpy() for name in ("k", "mass", "lever")))
    assert equal_bits(obs[:, 0], expected)
    assert equal_bits(env.state["place"], env.state["mass"])  # reset() has the episode's values, too
    for name, value in {"k": 0.1, "mass": 2.2, "lever": 0.9}.items():
        env.state[name].fill_(value)
    expected = expected_weights(*(np.full(300, value, np.float32) for value in (0.1, 2.2, 0.9)))
    assert equal_bits(env.observe()[:, 0], expected)
    assert equal_bits(env.step(env.sample_actions())[0][:, 0], expected)


@pytest.mark.parametrize("values", [(0.25, 1.5, 0.625), (-2.0, 0.1, 0.7), (1e-3, 2.75, 5.5)])
def test_derived_constants_equal_those_of_a_game_of_constants(values, weights):
    exact = {name: float(np.float32(value)) for name, value in zip(("k", "mass", "lever"), values, strict=True)}
    constant = VecEnv(weights()(**exact), 3, "cpu")
    varying = VecEnv(Weights(), 3, "cpu", randomize={name: (value, value) for name, value in exact.items()})
    assert equal_bits(varying.reset(seed=1)[0], constant.reset(seed=1)[0])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bound", "it decides the observation space"),
        ("slope", "it decides values that all environments share: levels"),
        ("size", "it decides the size num_cells of the state field cells"),
        ("branch", "it decides the derived constant sign (it is converted, compared"),
        ("power", "it decides the derived constant squared (it is converted, compared, rounded or raised to a power"),
        ("double", "its name is a word of C++"),
        ("place", "a field of the state has its name"),
        ("num_steps", "5 is not a float"),
        ("text", "'x' is not a float"),
        ("heavy", "there is no such parameter"),
    ],
)
def test_parameters_that_cannot_be_randomised_are_named_with_the_reason_and_the_choice(name, told, weights):
    with pytest.raises(ConfigError) as raised:
        VecEnv(weights()(), 3, "cpu", randomize={"mass": (1, 2), name: (1, 2)})
    assert f"Weights.randomize: {name!r} cannot be randomised: {told}" in str(raised.value)
    assert str(raised.value).endswith("expected one of: k, mass, lever, limit")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (7, "randomize is 7 (int); expected a mapping"),
        ("gravity", "expected a mapping, parameter -> (low, high)"),
        (["gravity"], "expected a mapping"),
        ({"gravity": 9}, "gravity is (9,); expected (low, high)"),
        ({"gravity": (8,)}, "expected (low, high)"),
        ({"gravity": (8, 9, 10)}, "expected (low, high)"),
        ({"gravity": (9, 8)}, "low <= high"),
        ({"gravity": ("8", 9)}, "expected (low, high)"),
        ({"gravity": (True, 9)}, "expected (low, high)"),
        ({"gravity": (0, math.nan)}, "expected (low, high)"),
        ({"gravity": (0, math.inf)}, "expected (low, high)"),
        ({"gravity": (0, 1e39)}, "expected (low, high)"),
        ({"reset_low": (-3e38, 3e38)}, "high - low to be a finite float32"),
        ({1: (8, 9)}, "the name 1"),
        ([("gravity", 8, 9), ("gravity", 8, 9)], "each parameter once"),
        ([()], "the name None"),
        ({"gravity": (-1, 9)}, "with gravity = -1.0, Cartpole.gravity is -1.0; expected a value in [0, "),
        ({"gravity": (8, 1e7)}, "with gravity = 10000000.0"),
        ({"reset_low": (0, 0.1)}, "with reset_low = 0.1, Cartpole.reset_low = 0.1 exceeds reset_high = 0.05"),
        ({"reset_low": (0, 0.1), "reset_high": (0.05, 0.2)}, "with reset_high = 0.05 and reset_low = 0.1"),
        ({"x_threshold": (1, 2)}, "decides the observation space"),
    ],
    ids=str,
)
def test_wrong_ranges_are_refused(given, told):
    for call in (
        lambda: gpu_vecenv.make("cartpole", 4, "cpu", randomize=given),
        lambda: VecEnv(Cartpole(), 4, "cpu", randomize=given),
        lambda: Cartpole(randomize=given),
    ):
        with pytest.raises(ConfigError, match="randomize") as raised:
            call()
        assert told in str(raised.value)


def test_numpy_numbers_and_tuples_are_ranges():
    game = Cartpole(randomize={"gravity": np.float32([8, 12]).tolist(), "dt": (np.float64(0.01), np.int64(1))})
    assert game.randomize == (("dt", 0.01, 1.0), ("gravity", 8.0, 12.0))


def test_a_game_with_kernels_of_its_own_cannot_be_randomised(weights, monkeypatch):
    monkeypatch.setattr(Weights, "kernels", (KernelSignature("lift", (Array("x", f32),)),))
    with pytest.raises(ConfigError, match="has kernels of its own, lift"):
        VecEnv(weights()(), 3, "cpu", randomize={"mass": (1, 2)})
    assert weights()().randomizable == ()


def test_randomize_is_no_name_for_a_parameter():
    with pytest.raises(EnvDefinitionError, match="randomize is the name of a field of every game"):

        @dataclass(frozen=True, kw_only=True)
        class Clash(Cartpole):
            randomize: int = 3

        Clash()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("TABLE float MASSES[2] = {MASS, 1};", 'weights.cu":5: MASS differs between environments'),
        ("const float MASSES[] = {1, 2 * HEAVIER};", "HEAVIER differs"),
        ("static Point START{MASS, 0};", "MASS differs"),
    ],
)
def test_a_table_of_a_randomised_parameter_is_refused(line, told, weights):
    text = f"struct Scratch {{}};\nconstexpr float HEAVIER = MASS + 1; {line}"
    with pytest.raises(ConfigError) as raised:
        VecEnv(weights("struct Scratch {};", text)(), 3, "cpu", randomize={"mass": (1, 2)})
    assert told in str(raised.value) and "compute it in a function" in str(raised.value)


def test_where_a_constant_is_required_the_compiler_s_message_says_why_there_is_none(weights):
    kind = weights(
        "float numbers[12]", "float more[(int)MASS]; if constexpr (LEVER > 0) more[0] = 1; float numbers[12]"
    )
    with pytest.raises(KernelCompileError, match=r"Randomised are mass, lever: neither they") as raised:
        VecEnv(kind(), 3, "cpu", randomize={"mass": (1, 2), "lever": (0.5, 1)})
    line = next(n for n, row in enumerate(WEIGHTS.splitlines(), 1) if "float numbers[12]" in row)
    assert f"weights.cu:{line}:" in str(raised.value)  # of the file, though lines before it are rewritten
    assert VecEnv(kind(), 3, "cpu").reset(seed=1)[0].shape == (3, 1, 12)


def test_line_numbers_and_all_other_text_are_kept(weights):
    layout = dataclasses.replace(weights()(), randomize={"mass": (1, 2)}).layout
    text = f'#line 1 "weights.cu"\n{WEIGHTS}'
    changed = with_varying_constants(layout, text)
    numbered, line = {}, 0
    for row in changed.splitlines():
        if row.startswith("#line "):
            line = int(row.split()[1])
        else:
            numbered.setdefault(line, []).append(row)
            line += 1
    for number, row in enumerate(WEIGHTS.splitlines(), 1):
        if "HEAVY" not in row.split("=")[0] and "LIGHT =" not in row and "PI =" not in row:
            assert row in numbered[number]
    assert "#define HEAVY value_of_HEAVY()" in changed and "#define PI" not in changed
    names = ["CACHED", "HEAVY", "LIGHT", "MASS", "ROOT", "THIRD", "TOTAL"]  # the parameter and what follows from it
    assert changed.endswith("".join(f"#undef {name}\n" for name in names))


# ---------------------------------------------------------------------- views, pictures, replays


def test_every_view_takes_ranges():
    views = [
        gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=4, device="cpu", randomize=RANGES),
        gymnasium.make("gpu_vecenv/CartPole-v1", device="cpu", randomize=RANGES).unwrapped,
        gpu_vecenv.parallel_env("cartpole", device="cpu", randomize=RANGES),
        gpu_vecenv.batched_parallel_env("cartpole", num_envs=4, device="cpu", randomize=RANGES),
    ]
    for view in views:
        view.reset(seed=1)
        gravity = view.vec_env.state["gravity"]
        assert gravity.ge(8).all() and gravity.lt(12).all()


def test_pictures_have_the_environment_s_own_values():
    env = cartpole(2, randomize={"half_length": (0.3, 0.9)})
    env.reset(seed=1)
    for length in (0.25, 1.0):
        env.state["half_length"].fill_(length)
        assert env_drawing(env, 1).bounds[3] == pytest.approx(1.1 * 2 * length)


def test_replays_play_back(tmp_path):
    env = cartpole(4, max_steps=15)
    replays = record(env, {"agent": None}, episodes=3, seed=4)
    drawn = []
    for replay in replays:
        path = replay.save(tmp_path / "one.replay")
        played = play(Replay.load(path), "cpu")
        gravity = played.state["gravity"]
        assert gravity.shape == (replay.num_steps + 1,) and len(np.unique(gravity)) == 1
        assert played.game == env.game
        drawn.append(float(gravity[0]))
    env.reset(seed=4)
    assert drawn == env.state["gravity"][:3].tolist()
    assert bits(env.state["gravity"]).shape == (4,)
