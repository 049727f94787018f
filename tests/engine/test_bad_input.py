"""Wrong input: a typed error that says what, what was got and what is expected, and nothing has changed.

Wrong declarations of games are in test_env.py, wrong values of actions in test_vec_env.py.
"""

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable

import gymnasium.error
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

import gpu_vecenv
from gpu_vecenv import Env, Sampler, Trainer, VecEnv, load_policy
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import (
    COUNTERPARTS,
    CapacityError,
    CheckpointCorruptError,
    ClosedEnvError,
    ConfigError,
    DeviceUnavailableError,
    EnvDefinitionError,
    InvalidSeedError,
    ResetNeededError,
    UnknownGameError,
    UnknownNameError,
)
from gpu_vecenv.train.checkpoint import save_checkpoint

GRIDWORLD = gpu_vecenv.configure("tag_gridworld", max_steps=7)
CONTINUOUS = gpu_vecenv.configure("tag_continuous", num_taggers=2, num_runners=3, num_neighbors=3)


@pytest.fixture(params=[GRIDWORLD, CONTINUOUS], ids=lambda game: game.name())
def env(request, device) -> VecEnv:
    """Six environments, three steps into an episode."""
    env = VecEnv(request.param, 6, device)
    env.reset(seed=5)
    for _ in range(3):
        env.step(env.sample_actions())
    return env


def refuse(env: VecEnv, error: type[Exception] | tuple[type[Exception], ...], words: list[str], call: Callable) -> None:
    """The call raises this error, says these words and leaves every bit as it was."""

    def fingerprint() -> tuple[str, int | None, list[int]]:
        digest = Digest(env.functions, env.num_envs)
        digest.add_state(env)
        return digest.hex(), env.seed, [tensor.data_ptr() for tensor in env.data.values()]

    before = fingerprint()
    with pytest.raises(error) as raised:
        call()
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert fingerprint() == before


def actions_of(env: VecEnv, kind: torch.dtype = torch.int32) -> torch.Tensor:
    shape = (env.num_envs, env.num_agents, *env.game.layout.action.shape)
    return torch.ones(shape, dtype=kind, device=env.device)


def make(*arguments, **keywords) -> VecEnv:
    return gpu_vecenv.make("tag_gridworld", *arguments, **keywords)


# make


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tag_gridwrld", ["'tag_gridwrld'", "nearest: tag_gridworld"]),
        ("TagContinuous", ["'TagContinuous'", "tag_continuous"]),
        ("tag_gridworld-v0", ["'tag_gridworld-v0'", "nearest: tag_gridworld"]),
        ("qqqq", ["'qqqq'", "known: ", "tag_continuous", "tag_gridworld"]),
        ("", ["''", "tag_gridworld"]),
        ("os:system", ["'os:system'"]),
        ("../../etc/passwd", ["'../../etc/passwd'"]),
        ("tag\0", [r"'tag\x00'"]),
    ],
)
def test_an_unknown_game_is_refused_with_the_nearest_names(name, words):
    with pytest.raises(UnknownGameError) as raised:
        gpu_vecenv.make(name, 4)
    assert isinstance(raised.value, gymnasium.error.NameNotFound) and isinstance(raised.value, ValueError)
    assert [word for word in [*words, "gpu_vecenv.register"] if word not in str(raised.value)] == []


def test_an_id_of_gymnasium_is_refused_with_the_name_of_its_game():
    with pytest.raises(UnknownGameError, match=r"CartPole-v1'; 'cartpole' is its name; the id is for gymnasium\.make_"):
        gpu_vecenv.make("gpu_vecenv/CartPole-v1", 4)


def test_a_very_long_name_does_not_flood_the_message():
    with pytest.raises(UnknownGameError) as raised:
        gpu_vecenv.make("x" * 100_000, 4)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", [None, 7, b"tag_gridworld", ["tag_gridworld"]])
def test_a_name_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match=r"game is .* expected a registered name, an Env class or an Env"):
        gpu_vecenv.make(name, 4)


@pytest.mark.parametrize(
    ("num_envs", "error"),
    [
        *((n, ValueError) for n in (0, -1, -(2**63))),
        *((n, TypeError) for n in (1.5, 2.0, True, "3", None, [4], 4 + 0j)),
    ],
)
def test_an_invalid_number_of_environments_is_refused(num_envs, error, device):
    with pytest.raises(error) as raised:
        make(num_envs, device)
    assert type(raised.value) is error
    assert "num_envs is " + repr(num_envs) in str(raised.value) and "expected an int >= 1" in str(raised.value)


@pytest.mark.parametrize("num_envs", [2**40, 2**64, 10**30])
def test_too_many_environments_are_refused_with_the_number_that_fits(num_envs, device):
    with pytest.raises(CapacityError) as raised:
        make(num_envs, device)
    message = str(raised.value)
    each = VecEnv(gpu_vecenv.configure("tag_gridworld"), 1024, device).bytes_per_env()
    assert f"num_envs = {num_envs:,}" in message and "bytes are free on" in message
    assert f"{each * num_envs:,} bytes ({each:,} each)" in message
    fits = int(message.rsplit("num_envs = ", 1)[1].split()[0].replace(",", ""))
    assert 1000 < fits < 2**40


def test_a_numpy_integer_is_an_int(device):
    env = make(np.int64(3), device, first_env_index=np.uint8(2))
    env.reset(seed=np.uint64(2**64 - 1), mask=None)
    assert (env.num_envs, env.first_env_index, env.seed) == (3, 2, 2**64 - 1)
    assert type(env.num_envs) is type(env.first_env_index) is type(env.seed) is int


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "gpu", "meta", "", "cuda:x", 99, torch.device("meta")])
def test_a_device_that_cannot_be_used_is_refused(device):
    with pytest.raises(DeviceUnavailableError, match=r"device is .*") as raised:
        make(4, device)
    assert repr(device) in str(raised.value)
    assert any(word in str(raised.value) for word in ('"cpu"', "GPUs: "))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a usable GPU")
def test_without_a_gpu_cuda_is_refused_and_the_cpu_offered():
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(DeviceUnavailableError) as raised:
            make(4, device)
        words = (torch.__version__, "finds no usable GPU", 'device="cpu"', "--device cpu")
        assert all(word in str(raised.value) for word in words)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("tag_gridworld", "gird", 5, ["'gird'", "5", "nearest: grid"]),
        ("tag_continuous", "num_tagers", 5, ["'num_tagers'", "nearest: num_taggers"]),
        ("tag_gridworld", "render_mode", "human", ["render_mode", "'human'", "gymnasium.make_vec"]),
        ("tag_gridworld", "grid", 5.0, ["TagGridworld.grid", "5.0 (float)", "expected int"]),
        ("tag_gridworld", "grid", True, ["TagGridworld.grid", "True (bool)", "expected int"]),
        ("tag_gridworld", "grid", "5", ["TagGridworld.grid", "'5' (str)", "expected int"]),
        ("tag_gridworld", "grid", None, ["TagGridworld.grid", "None", "expected int"]),
        ("tag_gridworld", "random_start", 1, ["TagGridworld.random_start", "1 (int)", "expected bool"]),
        ("tag_gridworld", "num_taggers", 0, ["TagGridworld.num_taggers is 0", "[1, inf]"]),
        ("tag_gridworld", "grid", 32768, ["TagGridworld.grid is 32768", "[1, 32767]"]),
        ("tag_gridworld", "max_steps", 2**31, ["TagGridworld.max_steps is 2147483648", "32-bit"]),
        ("tag_gridworld", "step_cost", float("nan"), ["TagGridworld.step_cost is nan", "finite"]),
        ("tag_gridworld", "step_cost", float("inf"), ["TagGridworld.step_cost is inf", "finite"]),
        ("tag_gridworld", "step_cost", 1e39, ["TagGridworld.step_cost is 1e+39", "float32"]),
        ("tag_continuous", "num_neighbors", "some", ["TagContinuous.num_neighbors is 'some'", "int or 'all'"]),
        ("tag_continuous", "num_neighbors", 0, ["TagContinuous.num_neighbors is 0", "[1, inf]"]),
        ("tag_continuous", "max_turn", 7.0, ["TagContinuous.max_turn is 7.0", "6.283"]),
        ("tag_continuous", "min_acceleration", 0.2, ["min_acceleration = 0.2", "max_acceleration = 0.1"]),
        ("tag_continuous", "num_runners", 2**31 - 1, ["2,147,483,657 agents", "at most 1,048,576"]),
        ("tag_gridworld", "num_taggers", 10**8, ["100,000,001 agents", "at most 1,048,576"]),
        ("tag_gridworld", "num_taggers", 10**6, ["num_agents", "2^31"]),
        ("simple_spread", "num_agent_neighbors", 10**8, ["400,000,010 items", "at most 16,777,216"]),
        ("tag_continuous", "turn_levels", 2**31 - 1, ["choices", "fewer than 2^31"]),
    ],
)
def test_a_wrong_configuration_is_refused_with_key_value_and_what_is_expected(name, key, value, words):
    with pytest.raises(ConfigError) as raised:
        gpu_vecenv.make(name, 4, "cpu", **{key: value})
    assert isinstance(raised.value, ValueError)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("autoreset_mode", "sometimes", ValueError, ["'sometimes'", "same_step", "next_step", "disabled"]),
        ("autoreset_mode", None, ValueError, ["None", "same_step", "next_step", "disabled"]),
        ("validate", "maybe", ValueError, ["validate is 'maybe'", "async", "sync"]),
        ("validate", True, ValueError, ["validate is True", "async", "sync"]),
        ("first_env_index", -1, ValueError, ["first_env_index is -1", ">= 0"]),
        ("first_env_index", 1.0, TypeError, ["first_env_index is 1.0 (float)", ">= 0"]),
        ("first_env_index", True, TypeError, ["first_env_index is True (bool)", ">= 0"]),
        ("first_env_index", 2**64, ValueError, ["first_env_index is 18446744073709551616"]),
        ("driver", "opengl", ValueError, ["opengl"]),
        ("arrays", {"wind": np.zeros(3)}, ConfigError, ["TagGridworld", "arrays", "unknown ['wind']"]),
        (
            "initial_states",
            {"room": np.zeros((3, 5, 2), np.int32)},
            ConfigError,
            ["initial_states", "['room']", "expected some of ['cell']"],
        ),
        (
            "initial_states",
            {"cell": np.zeros((0, 5, 2), np.int32)},
            ConfigError,
            ["initial_states", "same number of initial states"],
        ),
        (
            "initial_states",
            {"cell": np.zeros((3, 5), np.int32)},
            ConfigError,
            ["initial_states", "(3, 5)", "(number of states, 5, 2) int32"],
        ),
        (
            "initial_states",
            {"cell": np.zeros((3, 5, 2))},
            ConfigError,
            ["initial_states", "float64", "(number of states, 5, 2) int32"],
        ),
        (
            "initial_states",
            {"cell": [[[0, 0]] * 5]},
            TypeError,
            ["initial_states", "'cell' is a list", "expected an array"],
        ),
        (
            "initial_states",
            {"cell": np.array(3, np.int32)},
            (TypeError, ValueError),
            ["initial_states", "'cell'", "expected the same number of initial states"],
        ),
        (
            "initial_states",
            {3: np.zeros((3, 5, 2), np.int32), "x": 1},
            ConfigError,
            ["initial_states", "[3, 'x']", "expected some of ['cell']"],
        ),
        ("initial_states", [1], TypeError, ["initial_states is a list", "expected a mapping"]),
        ("initial_states", 7, TypeError, ["initial_states is a int", "expected a mapping"]),
        ("arrays", "wind", TypeError, ["arrays is a str", "expected a mapping"]),
        ("arrays", {3: 1, "x": 2}, ConfigError, ["arrays", "unknown [3, 'x']"]),
    ],
)
def test_a_wrong_argument_of_make_is_refused(key, value, error, words, device):
    with pytest.raises(error) as raised:
        make(4, device, **{key: value})
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"turn_level": np.zeros(20, np.float32)}, ConfigError, ["arrays", "'turn_level'", "(20,)", "(21,) float32"]),
        ({"turn_level": np.zeros(21)}, ConfigError, ["arrays", "'turn_level'", "float64", "(21,) float32"]),
        ({"turn_level": [0.0] * 21}, TypeError, ["arrays", "'turn_level' is a list", "expected an array"]),
        ({"position": np.zeros((5, 2), np.float32)}, ConfigError, ["arrays", "unknown ['position']", "turn_level"]),
    ],
)
def test_wrong_shared_arrays_are_refused(arrays, error, words, device):
    with pytest.raises(error) as raised:
        VecEnv(CONTINUOUS, 4, device, arrays=arrays)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_initial_states_of_different_lengths_are_refused(device):
    starts = {"heading": np.zeros((3, 5), np.float32), "speed": np.zeros((4, 5), np.float32)}
    with pytest.raises(
        ConfigError, match=r"initial_states: .*same number of initial states.*'heading', 'speed' have \[3, 4\]"
    ):
        VecEnv(CONTINUOUS, 4, device, initial_states=starts)


def test_a_cuda_driver_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match=r"driver is 'pycuda', but the device is cpu"):
        make(4, "cpu", driver="pycuda")


def test_a_game_for_cuda_only_is_refused_on_the_cpu(monkeypatch):
    class CudaOnly(Env):
        host = False
        obs_dim = 1
        action_space = Discrete(2)

    monkeypatch.setitem(GAMES, "cuda_only", CudaOnly)
    with pytest.raises(DeviceUnavailableError, match=r'CudaOnly declares host = False.*device="cuda"'):
        gpu_vecenv.make("cuda_only", 4, "cpu")


@pytest.mark.parametrize(
    ("game", "name", "words"),
    [
        (int, None, ["<class 'int'>", "gpu_vecenv.Env"]),
        (GRIDWORLD, None, ["TagGridworld(", "gpu_vecenv.Env"]),
        (type(GRIDWORLD), "tag-gridworld", ["'tag-gridworld'", "identifier"]),
        (type(GRIDWORLD), "Tag", ["'Tag'", "identifier"]),
        (type(GRIDWORLD), 7, ["name is 7", "identifier"]),
        (type(GRIDWORLD), b"tag", ["name is b'tag'", "identifier"]),
        (type(GRIDWORLD), "tag_continuous", ["'tag_continuous'", "already TagContinuous"]),
    ],
)
def test_a_wrong_registration_is_refused(game, name, words):
    before = dict(GAMES)
    with pytest.raises(EnvDefinitionError) as raised:
        gpu_vecenv.register(game, name)
    assert [word for word in words if word not in str(raised.value)] == [] and before == GAMES


# reset


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True, np.float64(3), np.bool_(True), b"7"])
def test_a_wrong_seed_is_refused(env, seed):
    words = ["reset: seed is", repr(seed), "expected an int in [0, 2**64 - 1]"]
    for error in (InvalidSeedError, gymnasium.error.Error, ValueError):
        refuse(env, error, words, lambda: env.reset(seed=seed))


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        ([1, 2], ["seed has shape (2,)", "each of the 6 environments"]),
        (np.ones((6, 1), np.int64), ["seed has shape (6, 1)"]),
        ([1, 2, 3, 4, 5, -6], ["seed is -6"]),
        ([1, 2, 3, 4, 5, None], ["seed is None"]),
        (np.arange(6.0), ["seed is", "float64"]),
        (np.array(3), ["seed is array(3)", "expected an int"]),
        ([[1], 2, 3, 4, 5, 6], ["seed is [1]", "expected an int"]),
    ],
)
def test_wrong_seeds_are_refused(env, seed, words):
    refuse(env, InvalidSeedError, words, lambda: env.reset(seed=seed))


MASKS = {
    "float": (lambda: torch.ones(6), TypeError, ["torch.float32", "expected bool"]),
    "uint8": (lambda: torch.ones(6, dtype=torch.uint8), TypeError, ["torch.uint8", "expected bool"]),
    "integer array": (lambda: np.arange(6), TypeError, ["int64", "expected bool"]),
    "object array": (lambda: np.array([None] * 6), TypeError, ["expected bool"]),
    "list": (lambda: [True] * 6, TypeError, ["list", "expected bool"]),
    "bool": (lambda: True, TypeError, ["bool", "expected bool"]),
    "short": (lambda: torch.ones(5, dtype=torch.bool), ValueError, ["(5,)", "expected (6,)"]),
    "column": (lambda: torch.ones((6, 1), dtype=torch.bool), ValueError, ["(6, 1)", "expected (6,)"]),
    "scalar": (lambda: np.array(True), ValueError, ["()", "expected (6,)"]),
    "elsewhere": (lambda: torch.ones(6, dtype=torch.bool, device="meta"), ValueError, ["meta", "expected c"]),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_wrong_mask_is_refused(env, kind):
    mask, error, words = MASKS[kind]
    refuse(env, error, ["reset: mask", *words], lambda: env.reset(mask=mask()))
    refuse(env, error, ["reset: mask", *words], lambda: env.reset(mask=mask(), seed=1))


def test_a_sparse_mask_is_refused(env):
    mask = torch.ones(6, dtype=torch.bool, device=env.device).to_sparse()
    refuse(env, TypeError, ["reset: mask", "sparse", "expected a dense one"], lambda: env.reset(mask=mask))


def test_a_masked_first_reset_is_refused(device):
    env = VecEnv(GRIDWORLD, 6, device)
    mask = torch.ones(6, dtype=torch.bool, device=device)
    refuse(env, ResetNeededError, ["reset(mask", "call reset()"], lambda: env.reset(mask=mask))
    refuse(env, ResetNeededError, ["reset(mask", "call reset()"], lambda: env.reset(mask=mask, seed=1))


def test_an_unknown_option_of_reset_is_refused(env):
    refuse(env, TypeError, ["options"], lambda: env.reset(options={"mask": None}))
    refuse(env, TypeError, [], lambda: env.reset(7))


# step


def test_a_step_before_the_first_reset_is_refused(device):
    env = VecEnv(GRIDWORLD, 6, device)
    refuse(env, ResetNeededError, ["step before reset", "call reset()"], lambda: env.step(actions_of(env)))
    refuse(env, gymnasium.error.ResetNeeded, ["call reset()"], lambda: env.step(actions_of(env)))


@pytest.mark.parametrize(
    "convert",
    [
        *(lambda a, kind=kind: a.to(kind) for kind in (torch.float32, torch.float64, torch.float16, torch.bool)),
        *(lambda a, kind=kind: a.to(kind) for kind in (torch.int8, torch.uint8, torch.int16, torch.complex64)),
        lambda a: a.float().requires_grad_(),
    ],
)
def test_actions_of_another_dtype_are_refused(env, convert):
    actions = convert(actions_of(env))
    words = ["step: actions", f"dtype {actions.dtype}", "expected torch.int32 or torch.int64", ".long()"]
    refuse(env, TypeError, words, lambda: env.step(actions))


def test_numbers_for_a_box_of_another_dtype_are_refused_with_the_cast(device):
    env = gpu_vecenv.make("pendulum", 6, device)
    env.reset(seed=1)
    words = ["dtype torch.float64; expected torch.float32 (use actions.float())"]
    refuse(env, TypeError, words, lambda: env.step(torch.zeros(6, 1, 1, dtype=torch.float64, device=device)))


@pytest.mark.parametrize("convert", [lambda a: a.cpu().numpy(), lambda a: a.tolist(), lambda a: None, lambda a: 0])
def test_actions_that_are_not_a_tensor_are_refused(env, convert):
    actions = convert(actions_of(env))
    words = ["step: actions", type(actions).__name__, "use torch.as_tensor(…, device=", "a Gymnasium view"]
    refuse(env, TypeError, words, lambda: env.step(actions))


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a[:1],
        lambda a: a[:, :1],
        lambda a: a[0],
        lambda a: a[None],
        lambda a: a[..., None],
        lambda a: a[..., 0],
        lambda a: a.transpose(0, 1),
        lambda a: a.flatten(0, 1),
        lambda a: a.sum(),
        lambda a: a[:0],
        lambda a: torch.cat([a, a]),
    ],
)
def test_actions_of_another_shape_are_refused_and_never_broadcast(env, convert):
    actions, expected = convert(actions_of(env)), tuple(actions_of(env).shape)
    words = ["step: actions", f"shape {tuple(actions.shape)}", f"expected {expected}"]
    refuse(env, ValueError, words, lambda: env.step(actions))


def test_actions_on_another_device_or_sparse_are_refused(env):
    elsewhere = "meta" if env.device.type == "cpu" else "cpu"
    words = ["step: actions", elsewhere, f"expected {env.device}"]
    refuse(env, ValueError, words, lambda: env.step(actions_of(env).to(elsewhere)))
    words = ["step: actions", "torch.sparse_coo", "dense"]
    refuse(env, ValueError, words, lambda: env.step(actions_of(env).to_sparse()))


# outputs, state, end


def test_outputs_that_do_not_fit_are_refused(env):
    for other in (VecEnv(env.game, 5, env.device), VecEnv(env.game, 6, env.device, autoreset_mode="disabled")):
        buffers = other.step_buffers()
        refuse(env, ValueError, ["out is", "step_buffers()"], lambda out=buffers: env.step(actions_of(env), out=out))
        refuse(env, ValueError, ["out is", "step_buffers()"], lambda out=buffers: env.reset(out=out))
    obs = env.observe()
    refuse(env, (TypeError, ValueError), ["Tensor", "step_buffers()"], lambda: env.step(actions_of(env), out=obs))
    refuse(env, (TypeError, ValueError), ["dict", "step_buffers()"], lambda: env.reset(seed=3, out={"obs": obs}))


def test_tensors_that_do_not_fit_step_buffers_are_refused(env):
    obs, flags = env.observe(), torch.zeros((6, env.num_agents), dtype=torch.bool, device=env.device)
    strided = torch.stack([obs, obs], dim=-1)[..., 0]
    elsewhere = torch.empty_like(obs, device="meta")
    wrong = [
        ({"observation": obs}, TypeError, ["'observation'", "obs, rewards"]),
        (
            {"obs": obs[:3]},
            ValueError,
            ["step_buffers: obs is", str(tuple(obs[:3].shape)), f"expected {tuple(obs.shape)}"],
        ),
        ({"obs": obs.double()}, ValueError, ["step_buffers: obs is", "torch.float64", "torch.float32"]),
        ({"obs": elsewhere}, ValueError, ["step_buffers: obs is", "meta", f"on {env.device}"]),
        ({"obs": strided}, ValueError, ["step_buffers: obs has strides", "contiguous"]),
        ({"rewards": flags}, ValueError, ["step_buffers: rewards is", "torch.bool", "torch.float32"]),
        ({"terminations": flags.byte()}, ValueError, ["step_buffers: terminations is", "torch.uint8", "torch.bool"]),
    ]
    for tensors, error, words in wrong:
        refuse(env, error, words, lambda tensors=tensors: env.step_buffers(**tensors))
    refuse(env, ValueError, ["obs is", "torch.float64"], lambda: env.observe(out=obs.double()))
    disabled = VecEnv(env.game, 6, env.device, autoreset_mode="disabled")
    refuse(env, TypeError, ["'final_obs'"], lambda: disabled.step_buffers(final_obs=obs))


@pytest.mark.parametrize("convert", [lambda obs: obs.cpu().numpy(), lambda obs: obs.tolist(), lambda obs: 7])
def test_step_buffers_accept_tensors_only(env, convert):
    given = convert(env.observe())
    refuse(
        env, TypeError, ["step_buffers: obs is", type(given).__name__, "tensor"], lambda: env.step_buffers(obs=given)
    )
    refuse(env, TypeError, ["step_buffers: obs is", type(given).__name__, "tensor"], lambda: env.observe(out=given))


def test_a_saved_state_that_does_not_fit_is_refused(env):
    saved = env.state_dict()
    env.step(env.sample_actions())
    less = {name: tensor for name, tensor in saved.items() if name != "engine_elapsed_steps"}
    shorter = {**saved, "engine_elapsed_steps": saved["engine_elapsed_steps"][:5]}
    wider = {**saved, "engine_elapsed_steps": saved["engine_elapsed_steps"].long()}
    refuse(env, ValueError, ["engine_elapsed_steps", "expected"], lambda: env.load_state_dict(less))
    refuse(env, ValueError, ["weight", "expected"], lambda: env.load_state_dict({**saved, "weight": torch.ones(3)}))
    refuse(
        env, ValueError, ["'engine_elapsed_steps'", "(5, 1)", "expected (6, 1)"], lambda: env.load_state_dict(shorter)
    )
    refuse(
        env, ValueError, ["'engine_elapsed_steps'", "torch.int64", "torch.int32"], lambda: env.load_state_dict(wider)
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.step(actions_of(env)),
        lambda env: env.reset(),
        lambda env: env.reset(seed=1),
        lambda env: env.observe(),
        lambda env: env.sample_actions(),
        lambda env: env.state_dict(),
        lambda env: env.load_state_dict({}),
        lambda env: env.faults(),
        lambda env: env.episode_statistics(),
        lambda env: env.clear_episode_statistics(),
        lambda env: env.state,
        lambda env: env.elapsed_steps,
        lambda env: env.active,
    ],
)
def test_a_closed_environment_cannot_be_used(env, use):
    env.close()
    with pytest.raises(ClosedEnvError, match="after close") as raised:
        use(env)
    assert isinstance(raised.value, gymnasium.error.ClosedEnvironmentError)
    env.close()


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_environment_is_pickled_and_copied_as_its_arguments(env, duplicate):
    twin = duplicate(env)
    if isinstance(twin, bytes):
        assert len(twin) < 2000  # arguments, not tensors
        twin = pickle.loads(twin)
    assert repr(twin) == repr(env) and twin.data is not env.data
    with pytest.raises(ResetNeededError):
        twin.step(twin.sample_actions())


# something else in the place of an environment, a configuration, an output


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda env, view: VecEnv("tag_gridworld", 2), ["game is 'tag_gridworld'", "expected a configured Env"]),
        (lambda env, view: VecEnv(type(env.game), 2), ["game is <class", "expected a configured Env"]),
        (lambda env, view: Sampler(view), ["env is a GymnasiumVectorEnv", "vec_env"]),
        (lambda env, view: Sampler(env).sample(torch.zeros(6, 5, 5), out=5), ["out is a int", "expected a Sample"]),
        (lambda env, view: Trainer(view), ["env is a GymnasiumVectorEnv", "vec_env"]),
        (lambda env, view: Trainer(env, {}), ["config is a dict", "expected a PPOConfig"]),
        (lambda env, view: Trainer(env, policies=["tagger"]), ["policies is a list"]),
        (
            lambda env, view: Trainer(env, policies={"tagger": [0, 1, 2, 3], "runner": [4]}),
            ["policies['tagger'] is a list", "roles or agents that share it", "{'tagger': 4, 'runner': 1}"],
        ),
        (lambda env, view: env.load_state_dict(None), ["state is a NoneType", "expected a mapping"]),
        (lambda env, view: gpu_vecenv.GymnasiumEnv("cartpole").reset(options=5), ["options is a int", "a dict"]),
    ],
)
def test_an_argument_of_another_kind_is_refused(call, words):
    env, view = VecEnv(GRIDWORLD, 6, "cpu"), gpu_vecenv.GymnasiumVectorEnv(GRIDWORLD, 2, "cpu")
    env.reset(seed=5)
    refuse(env, TypeError, words, lambda: call(env, view))


OPTIONS = {  # class, options -> what the error says
    (gpu_vecenv.PPOConfig, "learningrate"): r"PPOConfig has no option 'learningrate' \(= 1\); nearest: learning_rate",
    (gpu_vecenv.PPOConfig, "xyzzy"): r"PPOConfig has no option 'xyzzy' \(= 1\); known: activation, .*, weight_decay$",
    (gpu_vecenv.PPOConfig, "lr"): r"PPOConfig has no option 'lr' \(= 1\); nearest: learning_rate$",
    (gpu_vecenv.PPOConfig, "ent_coef"): "nearest: entropy_coefficient$",
    (gpu_vecenv.PPOConfig, "num_envs"): r"'num_envs' \(= 1\); it is an argument of gpu_vecenv\.make; remove it",
    (gpu_vecenv.PQNConfig, "n_envs"): "it is an argument of gpu_vecenv.make; remove it",
    (gpu_vecenv.PQNConfig, "epsilom"): "PQNConfig has no option 'epsilom' .*; nearest: epsilon",
    (gpu_vecenv.PolicySpec, "netwrk"): "PolicySpec has no option 'netwrk' .*; nearest: network",
    (gpu_vecenv.Curriculum, "random"): "Curriculum has no option 'random' .*; nearest: randomize",
    (gpu_vecenv.LevelReplay, "temp"): "LevelReplay has no option 'temp' .*; nearest: temperature",
    (gpu_vecenv.Opponent, "actor"): "Opponent has no option 'actor' .*; nearest: actors",
    (gpu_vecenv.OpponentsConfig, "member"): "OpponentsConfig has no option 'member' .*; nearest: members",
}


@pytest.mark.parametrize(("options", "name"), OPTIONS, ids=str)
def test_an_unknown_option_is_refused_with_the_nearest_ones(options, name):
    with pytest.raises(ConfigError, match=OPTIONS[options, name]):
        options(**{name: 1})
    with pytest.raises(TypeError):  # as Python says it
        options(**{name: 1})


def test_a_whole_float_is_refused_with_the_spelling_of_an_integer():
    with pytest.raises(ConfigError, match=r"total_steps is 10000\.0 \(float\); expected int, as 10_000$"):
        gpu_vecenv.PPOConfig(total_steps=1e4)
    with pytest.raises(ConfigError, match=r"total_steps is 0\.5 \(float\); expected int$"):
        gpu_vecenv.PPOConfig(total_steps=0.5)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_counterpart_of_another_librarys_name_is_an_option(name):
    parts = (gpu_vecenv.PPOConfig, gpu_vecenv.make, type(GRIDWORLD), gpu_vecenv.parallel_env)
    names = {option for part in parts for option in inspect.signature(part).parameters}
    assert COUNTERPARTS[name] in names | {"num_agents"} and name not in names - {"max_episode_steps"}


def test_options_are_copied_and_pickled(tmp_path):
    config = gpu_vecenv.PPOConfig(gamma=0.5)
    for other in (dataclasses.replace(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
    assert "gamma" in inspect.signature(gpu_vecenv.PPOConfig).parameters


def test_arguments_of_warpdrive_are_refused_with_those_of_make():
    for name, words in {"env_backend": "driver=", "episode_length": "is max_steps"}.items():
        with pytest.raises(ConfigError, match=words):
            gpu_vecenv.make("tag_gridworld", num_envs=2, device="cpu", **{name: "pycuda"})


@pytest.mark.parametrize("convert", [lambda x: x.tolist(), lambda x: x.cpu().numpy(), lambda x: x.to_sparse()])
def test_a_state_dict_is_checked_as_a_whole_before_it_is_loaded(env, convert):
    saved = {name: tensor.new_zeros(tensor.shape) for name, tensor in env.state_dict().items()}
    for name, tensor in saved.items():
        wrong = {**saved, name: convert(tensor)}
        refuse(env, (TypeError, ValueError), [name, "expected"], lambda wrong=wrong: env.load_state_dict(wrong))
    wrong = {**saved, "state_" + env.game.state[-1].name: saved["engine_elapsed_steps"].to("meta")}
    refuse(env, ValueError, ["expected"], lambda: env.load_state_dict(wrong))


@pytest.mark.parametrize(
    ("key", "value"), [("autoreset_mode", []), ("validate", np.zeros(2)), ("threads_per_env", True)]
)
def test_an_argument_that_cannot_be_compared_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is .*expected"):
        VecEnv(GRIDWORLD, 2, "cpu", **{key: value})


@pytest.mark.parametrize("order", [3, -1, True, 1.0, "1"])
def test_thread_order_must_be_an_int(order):
    """It is written into device code."""
    with pytest.raises((TypeError, ValueError), match=r"thread_order is .*expected an int"):
        VecEnv(GRIDWORLD, 2, "cpu", thread_order=order)


def test_a_hyperparameter_must_be_a_float32():
    for key in ("learning_rate", "final_learning_rate", "clip", "max_grad_norm"):
        with pytest.raises(ConfigError, match=rf"PPOConfig\.{key} is 1e\+39; expected a finite float32"):
            gpu_vecenv.PPOConfig(**{key: 1e39})


def test_minibatches_of_one_row_cannot_be_normalised():
    env = VecEnv(gpu_vecenv.configure("cartpole"), 4, "cpu")
    config = {"num_steps": 2, "num_minibatches": 8, "hidden_sizes": (4,)}
    with pytest.raises(ConfigError, match=r"num_minibatches is 8, so each has 8 / 8 = 1 sample.*normalize_advantages"):
        Trainer(env, gpu_vecenv.PPOConfig(**config))
    Trainer(env, gpu_vecenv.PPOConfig(**config, normalize_advantages=False))


@pytest.mark.parametrize("sizes", [(2**20, 2**20), (10**30,), (8,) * 10_000, (7,)])
def test_a_checkpoint_of_a_huge_network_allocates_nothing(sizes, tmp_path):
    env = VecEnv(gpu_vecenv.configure("cartpole"), 4, "cpu")
    trainer = Trainer(env, gpu_vecenv.PPOConfig(num_steps=4, num_minibatches=2, hidden_sizes=(8, 8)))
    tensors, manifest = trainer.state()
    policies = {name: {**config, "hidden_sizes": sizes} for name, config in manifest["policies"].items()}
    save_checkpoint(tmp_path / "x.safetensors", tensors, {**manifest, "policies": policies})
    with pytest.raises(
        ConfigError, match=r"x\.safetensors: .*networks=.* hidden_sizes are .*no weights have the shapes"
    ):
        load_policy(tmp_path / "x.safetensors", device="cpu")


@pytest.mark.parametrize("iteration", [-1, "3", None, 1.5, True])
def test_a_checkpoint_without_an_iteration_is_refused(iteration, tmp_path):
    env = VecEnv(gpu_vecenv.configure("cartpole"), 4, "cpu")
    trainer = Trainer(env, gpu_vecenv.PPOConfig(num_steps=4, num_minibatches=2, hidden_sizes=(8,)))
    tensors, manifest = trainer.state()
    save_checkpoint(tmp_path / "x.safetensors", tensors, {**manifest, "iteration": iteration})
    refuse(trainer.env, CheckpointCorruptError, ["iteration is"], lambda: trainer.load(tmp_path / "x.safetensors"))


def test_device_code_that_is_not_utf_8_is_reported(tmp_path):
    path = tmp_path / "own.cu"
    path.write_bytes(b"// \xff\n")
    game = type("Own", (type(GRIDWORLD),), {"source": path, "__module__": __name__})
    with pytest.raises(EnvDefinitionError, match=r"device code .*own\.cu cannot be read: 'utf-8' codec"):
        VecEnv(game(), 2, "cpu")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cell", "nearest: state_cell"),
        ("cel", "nearest: state_cell"),
        ("state_cel", "nearest: state_cell"),
        ("loc_x", "known: engine_"),
    ],
)
def test_an_unknown_tensor_has_the_nearest_names_in_its_error(name, hint):
    env = gpu_vecenv.make("tag_gridworld", 2, "cpu")
    for read in (env.data.pull, env.data.__getitem__):
        with pytest.raises(UnknownNameError, match=rf"^no tensor '{name}'; {hint}"):
            read(name)
    with pytest.raises(KeyError, match=r"no field 'cel'; nearest: cell"):
        env.state["cel"]
    assert "cell" not in env.data and env.data.get("cell") is None


def test_a_field_cannot_be_set_to_another_tensor():
    env = gpu_vecenv.make("tag_gridworld", 2, "cpu")
    cells = env.state["cell"]
    with pytest.raises(TypeError, match=r"state\['cell'\] is set to a Tensor; expected .* state\['cell'\]\.copy_\("):
        env.state["cell"] = torch.ones_like(cells)
    assert env.state["cell"].data_ptr() == cells.data_ptr()


def test_an_argument_of_make_that_is_misspelt_is_named():
    with pytest.raises(
        ConfigError, match=r"tag_gridworld has no configuration key 'num_env' \(= 3\); nearest: num_envs$"
    ):
        gpu_vecenv.make("tag_gridworld", num_env=3)
    with pytest.raises(ConfigError, match=r"'devise' .*; nearest: device"):
        gpu_vecenv.make("tag_gridworld", num_envs=3, devise="cpu")
    with pytest.raises(
        TypeError, match=r'num_envs is None, or missing; expected an int .*make\("tag_gridworld", num_envs='
    ):
        gpu_vecenv.make("tag_gridworld")


@pytest.mark.parametrize(
    ("view", "own", "absent"),
    [
        (gpu_vecenv.make, set(), {"output", "render_mode"}),
        (gpu_vecenv.GymnasiumVectorEnv, {"output", "render_mode", "fill_final_obs"}, {"agents_as_envs"}),
        (gpu_vecenv.parallel_env, {"output", "render_mode"}, {"num_envs", "autoreset_mode"}),
        (gpu_vecenv.batched_parallel_env, {"group_by", "render_mode", "autoreset_mode"}, {"output"}),
    ],
)
def test_an_unknown_argument_lists_the_games_keys_and_then_those_of_the_view(view, own, absent):
    with pytest.raises(ConfigError, match="no configuration key 'xyzzy'") as caught:
        view("cartpole", xyzzy=3)
    lists = re.findall(r"(?:known|also valid): ([^;]*)", str(caught.value))
    known, others = (set(names.split(", ")) for names in lists)
    assert {"gravity", "max_steps"} <= known and not known & others
    assert {"device", "validate"} | own <= others and not absent & others


def test_a_misspelt_argument_of_a_view_is_named():
    for wrong, right in (("outptu", "output"), ("render_mod", "render_mode")):
        with pytest.raises(ConfigError, match=rf"'{wrong}' .*nearest: {right}"):
            gpu_vecenv.GymnasiumVectorEnv("cartpole", 2, "cpu", **{wrong: "numpy"})


def test_an_argument_of_views_alone_is_said_to_be_one():
    with pytest.raises(ConfigError, match=r"output is 'numpy', .* gymnasium\.make_vec.* or parallel_env; make"):
        gpu_vecenv.make("cartpole", 2, "cpu", output="numpy")
