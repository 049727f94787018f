"""Names of arguments of the environments that a game stands in for, beside those of its own fields."""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
from games.painter import Painter

import gpu_vecenv
from gpu_vecenv import batched_parallel_env, configure, parallel_env
from gpu_vecenv.declare.env import Env, FixedArgument
from gpu_vecenv.envs.registry import GAMES, configuration_names
from gpu_vecenv.errors import ConfigError, EnvDefinitionError

FIXED = {"dynamic_rescaling": True, "benchmark_data": False}


def test_names_of_the_reference_configure_the_fields():
    spread = configure("simple_spread", N=4, max_cycles=7, local_ratio=0.25, continuous_actions=True, **FIXED)
    assert spread == configure("simple_spread", num_agents=4, max_steps=7, local_ratio=0.25, continuous_actions=True)
    assert configure("simple_adversary", N=4, **FIXED) == configure("simple_adversary", num_good=4)
    assert configure("simple_tag", num_good=2, max_cycles=7, **FIXED) == configure(
        "simple_tag", num_good=2, max_steps=7
    )
    assert configure(spread, N=2).num_agents == 2, "of a configured game too"
    assert configure("simple_spread", N=np.int64(4)).num_agents == 4
    assert gpu_vecenv.make("simple_spread", 2, "cpu", N=5).num_agents == 5
    assert batched_parallel_env("simple_spread", 2, "cpu", N=5).num_agents == 5
    assert parallel_env("simple_spread", "cpu", N=5).max_num_agents == 5


def test_names_of_pettingzoo_and_gymnasium_belong_to_every_game():
    for name in GAMES:
        assert configure(name, max_cycles=7) == configure(name, max_episode_steps=7) == configure(name, max_steps=7)


def test_every_name_has_its_value():
    game = configure("simple_spread", N=4, local_ratio=0.25)
    names = configuration_names(game)
    assert {key: names[key] for key in ("N", "num_agents", "max_cycles", "max_steps", "local_ratio", *FIXED)} == {
        "N": 4, "num_agents": 4, "max_cycles": 25, "max_steps": 25, "local_ratio": 0.25, **FIXED
    }  # fmt: skip
    for name, kind in GAMES.items():
        assert configure(name, **configuration_names(kind())) == kind()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"N": 3, "num_agents": 4}, "simple_spread: N is 3 and num_agents is 4, two names of one value"),
        ({"num_agents": 4, "N": 3}, "num_agents is 4 and N is 3"),
        ({"max_cycles": 3, "max_episode_steps": 4}, "max_cycles is 3 and max_episode_steps is 4"),
        ({"n_agents": 3}, r"key 'n_agents' \(= 3\); nearest: num_agents$"),
        ({"xyzzy": 3}, "no configuration key 'xyzzy'.*known: N, "),
        ({"dynamic_rescaling": False}, "rescaling is False; expected True, the only value supported: agents and"),
        ({"benchmark_data": True}, "benchmark_data is True; expected False, the only value supported: infos hold no"),
        ({"N": 0}, "num_agents is 0"),
        ({"N": 2.5}, r"num_agents is 2.5 \(float\)"),
    ],
)  # fmt: skip
def test_unknown_contradictory_and_unsupported_arguments_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        configure("simple_spread", **config)


def test_equal_values_of_one_field_do_not_contradict():
    assert configure("simple_spread", N=4, num_agents=4, max_cycles=9, max_steps=9).num_agents == 4


def test_a_field_has_precedence_over_a_name_of_the_reference():
    @dataclass(frozen=True, kw_only=True)
    class Own(Painter):
        max_cycles: int = 5
        reference_arguments = MappingProxyType({"max_cycles": "max_steps", "still": FixedArgument(None, "it moves")})

    game = configure(Own, max_cycles=8, still=None)
    assert game.max_cycles == 8 and configuration_names(game)["max_cycles"] == 8
    with pytest.raises(ConfigError, match="still is 1; expected None, the only value supported: it moves"):
        configure(Own, still=1)


def test_a_game_without_a_limit_has_no_names_for_it():
    @dataclass(frozen=True, kw_only=True)
    class Endless(Env):
        pass

    with pytest.raises(ConfigError, match="no configuration key 'max_cycles'"):
        configure(Endless, max_cycles=3)


def test_a_name_of_no_field_is_a_wrong_definition():
    with pytest.raises(EnvDefinitionError, match="reference_arguments\\['N'\\] is 'agents'; expected a field, one of"):

        @dataclass(frozen=True, kw_only=True)
        class Wrong(Painter):
            reference_arguments = MappingProxyType({"N": "agents"})

        Wrong()
