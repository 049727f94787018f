"""Versions of a game that other configurations of its declaration play."""

import dataclasses
from pathlib import Path
from types import MappingProxyType

import gymnasium
import pytest
from gymnasium.spaces import Discrete

import gpu_vecenv
from gpu_vecenv.declare.env import Env, OtherVersion
from gpu_vecenv.envs.registry import GAMES, versions
from gpu_vecenv.errors import EnvDefinitionError

OLD = {0: OtherVersion(config={"old": True, "size": 2}, preset={"num_envs": 5}), 1: OtherVersion(config={"old": True})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Env):
    old: bool = False
    size: int = 3
    state = ()
    obs_dim = 2
    action_space = Discrete(3)
    source = Path("changed.cu")
    version = 4
    preset = MappingProxyType({"num_envs": 7})
    other_versions = MappingProxyType(OLD)


def test_a_configuration_plays_one_version():
    played = [(Changed(**config).played_version, config) for config in ({}, {"size": 2}, {"old": True})]
    assert played == [(4, {}), (4, {"size": 2}), (1, {"old": True})]
    assert Changed(old=True, size=2).played_version == 0  # the first that fits
    assert versions(Changed) == {0: {"old": True, "size": 2}, 1: {"old": True}, 4: {}}
    assert list(versions(Changed)) == [0, 1, 4]


def test_a_version_has_its_own_preset():
    assert Changed().own_preset == {"num_envs": 7}
    assert Changed(old=True, size=2).own_preset == {"num_envs": 5}
    assert Changed(old=True).own_preset == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({4: OtherVersion(config={"old": True})}, r"other_versions\[4\] .* a number other than version = 4"),
        ({1: OtherVersion(config={"new": True})}, r"other_versions\[1\] has .*'new'.* expected fields, some of"),
        ({1: OtherVersion(config={})}, r"other_versions is .* expected a mapping, number -> OtherVersion"),
        ({"1": OtherVersion(config={"old": True})}, "expected a mapping, number"),
        ({1: {"old": True}}, "expected a mapping, number"),
    ],
)
def test_wrong_versions_are_refused(given, text):
    with pytest.raises(EnvDefinitionError, match=text):
        type("Wrong", (Changed,), {"other_versions": given})()


def test_an_id_of_any_version_that_is_taken_is_refused():
    taken = {0: OtherVersion(config={"old": True})}
    game = type("Another", (Changed,), {"title": "TagGridworld", "other_versions": taken})
    before = dict(GAMES)
    with pytest.raises(EnvDefinitionError, match=r"id 'gpu_vecenv/TagGridworld-v0' of 'another' is already that of"):
        gpu_vecenv.register(game)
    assert before == GAMES and "gpu_vecenv/TagGridworld-v4" not in gymnasium.registry
