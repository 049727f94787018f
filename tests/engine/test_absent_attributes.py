"""Names that users of Gymnasium, PettingZoo and WarpDrive look for: errors say what to use."""

import copy
import re

import gymnasium
import pytest

import gpu_vecenv
from gpu_vecenv.absent import OF_GYMNASIUM_VECTOR_ENV, OF_PACKAGE, OF_VEC_ENV


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


def test_what_is_named_exists(env, view):
    namespace = {"env": env, "view": view, "gpu_vecenv": gpu_vecenv}
    texts = [*OF_VEC_ENV.values(), *OF_GYMNASIUM_VECTOR_ENV.values(), *OF_PACKAGE.values()]
    named = {name for text in texts for name in re.findall(r"\b(?:env|view|gpu_vecenv)(?:\.\w+)+", text)}
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
