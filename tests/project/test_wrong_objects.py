"""Objects of another kind at public entrances: a typed error says what, what it is, and what is expected."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiDiscrete

import gpu_vecenv
from gpu_vecenv.declare.env import param
from gpu_vecenv.declare.spaces import ActionLayout
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.train.episode_log import EpisodeLog
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.views.frames import Frames


def made(**arguments):
    return gpu_vecenv.make("tag_gridworld", 2, "cpu", **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Frames(None), "vec_env is a NoneType; expected a VecEnv"),
        (lambda: Frames(TagGridworld()), "vec_env is a TagGridworld; expected a VecEnv"),
        (lambda: EpisodeLog("tag_gridworld"), "vec_env is a str; expected a VecEnv"),
        (lambda: PolicySpec(network=3), "PolicySpec.network is a int; expected a Module or None"),
        (lambda: PolicySpec(config={}), "PolicySpec.config is a dict; expected a PPOConfig or a PQNConfig or None"),
        (lambda: PolicySpec(weights=torch.zeros(1)), "PolicySpec.weights is a Tensor; expected a Mapping or None"),
        (lambda: PolicySpec(train=None), "PolicySpec.train is a NoneType; expected a bool"),
        (lambda: GamePolicy("tag_gridworld", {}), "game is a str; expected a Env"),
        (lambda: GamePolicy(TagGridworld(), []), "policies is a list; expected a Mapping"),
        (lambda: GamePolicy(TagGridworld(), None), "policies is a NoneType; expected a Mapping"),
        (lambda: GamePolicy(TagGridworld(), {}, configs=[]), "configs is a list; expected a Mapping"),
        (lambda: param(1, low="0"), r"param: low is '0' \(str\); expected a number or None"),
        (lambda: param(1, high=True), r"param: high is True \(bool\); expected a number or None"),
        (lambda: made(initial_states=set()), "initial_states is a set; expected a mapping"),
        (lambda: made(initial_states=[]), "initial_states is a list; expected a mapping"),
        (lambda: made(arrays=()), "arrays is a tuple; expected a mapping"),
    ],
)
def test_an_object_of_another_kind_is_a_type_error(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("low", "high"), [(3, 2), (float("nan"), None), (None, float("nan"))])
def test_an_empty_range_of_a_parameter_is_refused(low, high):
    with pytest.raises(EnvDefinitionError, match="is empty; expected low <= high"):
        param(1, low=low, high=high)


def test_an_action_space_of_two_axes_is_refused():
    """Before, its heads were taken row by row."""
    with pytest.raises(EnvDefinitionError, match=r"of 'a' is a MultiDiscrete of shape \(2, 2\); expected \(heads,\)"):
        ActionLayout.of("Game", ["a"], MultiDiscrete(np.array([[2, 3], [4, 5]])))
