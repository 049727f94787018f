"""Declarations with wrong objects: refused when the game is configured, with what is expected instead."""

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import gpu_vecenv
from gpu_vecenv import Env, Field
from gpu_vecenv.declare.attributes import ARGUMENTS_OF_MAKE, ATTRIBUTES, PROPERTIES
from gpu_vecenv.declare.drawing import RED, Circle, Drawing
from gpu_vecenv.declare.env import f32, i32
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.errors import ConfigError, EnvDefinitionError

WRONG = {
    "None": None,
    "an object": object(),
    "a set": {"a"},
    "a str": "no such name",
    "bytes": b"x",
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "2**70": 2**70,
    "True": True,
    "()": (),
    "[None]": [None],
    "(1,)": (1,),
    "{}": {},
    "{1: 2}": {1: 2},
    "role -> None": {"agent": None},
    "other role -> 1": {"dog": 1},
    "a function": lambda *arguments: 3,
    "a class": int,
    "an array": np.zeros(3),
}
FLAG, TUPLE, TEXT, NAMES = {"True"}, {"()"}, {"a str"}, {"{}", "role -> None", "other role -> 1"}
# What of these is right.
RIGHT = {
    "state": TUPLE,
    "derived": TUPLE,
    "host": FLAG,
    "kernels": TUPLE,
    "allows": TUPLE,
    "source": {"None", *TEXT},
    "termination_label": TEXT,
    "preset": NAMES,
    "critic_state": TUPLE,
    "agent_critic_state": TUPLE,
    "state_metrics": TUPLE,
    "masks_actions": FLAG,
    "clip_actions": FLAG,
    "takes_turns": FLAG,
    "team_reward": FLAG | TUPLE,
    "noop": {"None", "-1", "1.5", "2**70", "(1,)", "{}", "other role -> 1"},
    "title": TEXT,
    "reset_options": TUPLE,
    "gymnasium_time_limit": FLAG,
    "reward_threshold": {"None", "-1", "1.5", "2**70"},
    "reference_arguments": {"{}"},
    "reference_methods": {"{}"},
    "sample_efficient_preset": NAMES,
    "preset_opponents": NAMES,
    "preset_schedules": {"{}"},
    "algorithm_presets": {"{}"},
    "other_versions": {"{}"},
    "roles": {"other role -> 1"},
    "obs_shape": {"(1,)"},
    "obs_parts": TUPLE,
}


def declared(**members):
    own = {"state": (), "obs_dim": 2, "action_space": Discrete(3), "source": Path("game.cu")}
    return type("Game", (Env,), own | members)


def refused(attempt, kinds=(EnvDefinitionError, ConfigError)):
    with pytest.raises(kinds, match="expected") as caught:
        attempt()
    return str(caught.value)


@pytest.mark.parametrize("attribute", [*ATTRIBUTES, *PROPERTIES])
def test_an_attribute_of_another_kind_is_refused(attribute):
    for what, value in WRONG.items():
        game = declared(**{attribute: value})
        if what in RIGHT.get(attribute, ()):
            game()
        else:
            assert "Game" in refused(game), what


@pytest.mark.parametrize("when", ["unknown", "max_agents", "obs_dim"])
def test_a_field_that_exists_when_something_is_no_bool_is_refused(when):
    game = declared(state=(Field("load", f32, when=when),), max_agents=3)
    assert f"field 'load' has when = '{when}'" in refused(lambda: game().layout)
    assert "'load' has when 1" in refused(lambda: Field("load", f32, when=1))


RESERVED = [
    *sorted(ARGUMENTS_OF_MAKE - {"randomize"}),
    "name",
    "source_path",
    "layout",
    "draw",
    "arrays",
    "played_version",
]


@pytest.mark.parametrize("name", RESERVED)
def test_a_key_with_the_name_of_an_argument_of_make_or_an_attribute_is_refused(name):
    members = {name: 3, "__annotations__": {name: int}}
    with pytest.raises(EnvDefinitionError, match=rf"Game: {name} is a key of the configuration, .*; rename it"):
        dataclass(frozen=True, kw_only=True)(type("Game", (Env,), members))()


def test_names_of_arguments_of_make_are_all_reserved():
    assert {*inspect.signature(gpu_vecenv.make).parameters} - {"config"} == ARGUMENTS_OF_MAKE


@pytest.mark.parametrize("shape", [{"obs_dim": 1}, {"obs_shape": (3, 1)}, {"obs_dim": {"agent": 4}}])
def test_an_observation_space_of_another_shape_than_the_declared_one_is_refused(shape):
    with pytest.raises(EnvDefinitionError, match=r"space of 'agent' has shape \(3,\), and obs_dim or obs_shape say \("):
        declared(**shape, observation_space=Box(0, 1, (3,)))()


def test_a_critic_sees_no_field_that_some_configurations_lack():
    state = Field("load", f32, when="masks_actions"), Field("place", f32)
    assert "critic_state has ['load']" in refused(declared(state=state, critic_state=("place", "load")))
    assert [field.name for field in declared(state=state, critic_state=("place",))().layout.fields] == ["place"]


@pytest.mark.parametrize("attribute", PROPERTIES)
def test_a_method_where_a_property_belongs_is_named(attribute):
    message = refused(declared(**{attribute: lambda self: 3}))
    assert message == f"Game: {attribute} is a method; expected a property: write @property above it"


@pytest.mark.parametrize("value", [None, {"map"}, "map", [1.0, 2.0, 3.0], np.zeros(3)])
def test_arrays_of_another_kind_are_refused(value):
    game = declared(state=(Field("map", f32, (3,), shared=True),), arrays=lambda self: value)
    assert "arrays() returns" in refused(lambda: gpu_vecenv.make(game, 1, "cpu"))


@pytest.mark.parametrize(
    "value", [None, 1, "x", {"x"}, {"x": 1}, {"x": (1,)}, {"x": (0, None)}, {"x": (0, np.nan)}, {"speed": (0, 1)}]
)
def test_initial_ranges_of_another_kind_are_refused(value, monkeypatch):
    env = gpu_vecenv.GymnasiumVectorEnv("cartpole", 1, "cpu")
    monkeypatch.setattr(type(env.vec_env.game), "initial_ranges", lambda self, options: value)
    message = refused(lambda: env.reset(options={"low": -0.1}))
    assert message.startswith("Cartpole: initial_ranges({}) returns")


def test_a_field_too_large_for_an_index_is_refused():
    assert "4,294,967,296 items" in refused(declared(state=(Field("x", f32, (2**16, 2**16)),)))


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda value: Field(value, f32), set()),
        (lambda value: Field("x", value), {"a class"}),
        (lambda value: Field("x", f32, (3,), value), {"True"}),
        (lambda value: Drawing(value, []), set()),
        (lambda value: Drawing((0, 1, 0, 1), value), {"()"}),
        (lambda value: Drawing((0, 1, 0, 1), [], value), set()),
        (lambda value: Drawing((0, 1, 0, 1), [], 9, 9, value), set()),
        (lambda value: Circle(0, 0, 1, value), set()),
        (lambda value: Circle(0, 0, 1, RED, value), {"None", "2**70"}),
        (lambda value: KernelSignature(value, (Scalar("x", i32),)), set()),
        (lambda value: KernelSignature("count", value), set()),
        (lambda value: KernelSignature("count", (Array(value, f32),)), set()),
        (lambda value: KernelSignature("count", (Array("x", f32, shape=value),)), {"None", "()", "(1,)"}),
        (lambda value: Scalar("x", value), {"a class"}),
        (lambda value: gpu_vecenv.register(value), set()),
    ],
)
def test_a_part_of_a_declaration_of_another_kind_is_refused(make, right):
    for what, value in WRONG.items():
        if what in right:
            make(value)
        else:
            refused(partial(make, value), (TypeError, ValueError))
