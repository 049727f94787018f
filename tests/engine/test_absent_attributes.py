"""Names that users of Gymnasium, PettingZoo and WarpDrive look for: errors say what to use."""

import copy
import re
from pathlib import Path

import gymnasium
import pytest

import gpu_vecenv
import gpu_vecenv.adapters
from gpu_vecenv.absent import (
    OF_DATA_MANAGER,
    OF_FUNCTION_MANAGER,
    OF_GYMNASIUM_VECTOR_ENV,
    OF_PACKAGE,
    OF_SAMPLER,
    OF_TRAINER,
    OF_VEC_ENV,
)

WARPDRIVE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from_warpdrive.md").read_text(encoding="utf-8")
# Arguments, arrays and files of WarpDrive in the first column of the page's table, and what has the same name here.
NO_ATTRIBUTES = set("_done_ _timestep_ policy_tag_to_agent_id_map num_gpus perform_distributed_training sample".split())


@pytest.fixture(scope="module")
def env():
    return gpu_vecenv.make("cartpole", 2, "cpu")


@pytest.fixture(scope="module")
def view():
    return gpu_vecenv.GymnasiumVectorEnv("cartpole", 2, "cpu")


def test_attributes_of_gymnasiums_vector_environments_exist_or_say_what_to_use(env, view):
    plain = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    public = {name for name in dir(plain) if not name.startswith("_")} - {"copy", "observation_mode", "close_extras"}
    for owner, known in ((env, OF_VEC_ENV), (view, OF_GYMNASIUM_VECTOR_ENV)):
        assert {name for name in public if not hasattr(owner, name)} <= set(known)


@pytest.mark.parametrize("name", OF_VEC_ENV)
def test_a_vec_env_says_what_to_use(env, name):
    with pytest.raises(
        AttributeError, match=rf"'VecEnv' object has no attribute '{name}': {re.escape(OF_VEC_ENV[name])}"
    ):
        getattr(env, name)


PARTS = {
    "DataManager": (lambda env: env.data, OF_DATA_MANAGER),
    "FunctionManager": (lambda env: env.functions, OF_FUNCTION_MANAGER),
    "Sampler": (gpu_vecenv.Sampler, OF_SAMPLER),
    "Trainer": (gpu_vecenv.Trainer, OF_TRAINER),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_an_environment_says_what_to_use_for_names_of_warpdrive(env, part):
    make, known = PARTS[part]
    owner = make(env)
    for name, text in known.items():
        with pytest.raises(AttributeError, match=f"^'{part}' object has no attribute '{name}': {re.escape(text)}$"):
            getattr(owner, name)
    assert not hasattr(owner, "nothing")


def test_each_name_in_the_table_for_users_of_warpdrive_has_an_answer():
    table = WARPDRIVE.partition("## Classes and methods")[2].partition("\n## ")[0]
    first = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in first for name in re.findall(r"`(\w+)", cell)}
    answered = {name for _, known in PARTS.values() for name in known} | {*OF_VEC_ENV, *OF_PACKAGE}
    assert {"pull_data_from_device", "EnvWrapper"} <= names
    assert names - answered - set(gpu_vecenv.__all__) == NO_ATTRIBUTES


def test_what_is_named_exists(env, view):
    namespace = {"env": env, "view": view, "gpu_vecenv": gpu_vecenv, "trainer": gpu_vecenv.Trainer}
    own = [text for _, known in PARTS.values() for text in known.values()]
    texts = [*OF_VEC_ENV.values(), *OF_GYMNASIUM_VECTOR_ENV.values(), *OF_PACKAGE.values(), *own]
    named = {name for text in texts for name in re.findall(r"\b(?:env|view|gpu_vecenv|trainer)(?:\.\w+)+", text)}
    assert {"env.data", "view.vec_env.state", "gpu_vecenv.make"} <= named
    for path in named:
        owner, *parts = path.split(".")
        found = namespace[owner]
        for part in parts:
            found = getattr(found, part)


def test_other_names_and_failing_properties_raise_as_usual(env, view):
    with pytest.raises(AttributeError, match=r"^'VecEnv' object has no attribute 'nothing'$"):
        env.nothing  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"'GymnasiumVectorEnv' object has no attribute 'call': .* view\.vec_env\.st"
    ):
        view.call("reset")
    assert not hasattr(env, "unwrapped") and copy.copy(env).num_envs == 2

    class Failing(gpu_vecenv.VecEnv):
        @property
        def broken(self):
            return self.game.missing

    with pytest.raises(AttributeError, match="'Cartpole' object has no attribute 'missing'"):
        Failing(env.game, 1, "cpu").broken  # noqa: B018


def test_the_package_says_what_to_use():
    with pytest.raises(
        AttributeError, match=r"module 'gpu_vecenv' has no attribute 'EnvWrapper': use gpu_vecenv\.make"
    ):
        gpu_vecenv.EnvWrapper  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'gpu_vecenv' has no attribute 'nothing'$"):
        gpu_vecenv.nothing  # noqa: B018


def test_an_option_of_the_game_is_said_to_be_one():
    env, view = gpu_vecenv.make("cartpole", 2, "cpu"), gpu_vecenv.GymnasiumVectorEnv("cartpole", 2, "cpu")
    with pytest.raises(AttributeError, match=r"'max_steps': it is of the game's configuration, env\.game\.max_steps$"):
        _ = env.max_steps
    with pytest.raises(AttributeError, match=r"'gravity': it is of the game's configuration, view\.game\.gravity$"):
        _ = view.gravity
    assert not hasattr(env, "xyzzy")


def test_a_hint_makes_the_view_of_an_environment():
    env = gpu_vecenv.make("cartpole", 3, "cpu")
    with pytest.raises(AttributeError) as caught:
        _ = env.action_space
    call = re.search(r"gpu_vecenv\.GymnasiumVectorEnv\(.*?\)", str(caught.value)).group()
    assert eval(call, {"gpu_vecenv": gpu_vecenv, "env": env}).action_space.shape == (3,)


@pytest.mark.parametrize("call", ["env.reset(7)", "env.reset(options={})"])
def test_gymnasiums_call_of_reset_is_refused_with_the_one_here(call):
    env = gpu_vecenv.make("cartpole", 3, "cpu")
    with pytest.raises(TypeError, match=r"VecEnv\.reset\(\) .*: seed, mask and out are given by name"):
        eval(call)
    with pytest.raises(TypeError, match=r"mask is list; expected bool, a tensor or NumPy array, \(3,\)$"):
        env.reset(mask=[True] * 3)


def test_an_environment_in_place_of_a_game_is_refused_with_its_game():
    env = gpu_vecenv.make("cartpole", 3, "cpu")
    for make in (gpu_vecenv.GymnasiumVectorEnv, gpu_vecenv.parallel_env, gpu_vecenv.make):
        with pytest.raises(TypeError, match=r"^a game is a VecEnv; expected .* an Env: give env\.game$"):
            make(env)
