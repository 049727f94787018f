"""Parts of observations: what their declaration determines, what bundled games declare, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import gpu_vecenv
from gpu_vecenv.declare.env import Entities, Env, Own
from gpu_vecenv.declare.obs_parts import ObservationParts
from gpu_vecenv.errors import EnvDefinitionError

VELOCITY, OTHERS = Own("velocity", 2), Entities("agent", 3, 2)


def declared(**members):
    return type("Game", (Env,), {"state": (), "action_space": Discrete(3), "source": Path("game.cu")} | members)


def columns(*parts):
    found = ObservationParts.of("Game", "agent", parts)
    return {one.name: one.columns for one in found.entities}


def test_parts_determine_the_length_and_where_each_number_is():
    layout = declared(obs_parts=(VELOCITY, OTHERS, Own("time", 1)))().layout.observation
    parts = layout.parts["agent"]
    assert layout.shapes == {"agent": (9,)}
    assert parts.own == {"velocity": (0, 1), "time": (8,)} and parts.own_columns == (0, 1, 8)
    assert columns(VELOCITY, OTHERS) == {"agent": ((2, 3), (4, 5), (6, 7))}
    assert parts.describe() == "velocity 2; time 1; agent 3 x 2"


def test_the_orders_of_features():
    by_feature = Entities("agent", 3, 2, presence=1, by_feature=True)
    assert columns(by_feature) == {"agent": ((0, 3), (1, 4), (2, 5))}
    parts = ObservationParts.of("Game", "agent", (OTHERS, VELOCITY, by_feature))
    assert parts.entities[0].columns == ((0, 1, 8, 11), (2, 3, 9, 12), (4, 5, 10, 13))
    assert parts.entities[0].presence == 3
    assert parts.describe() == "velocity 2; agent 3 x 4, absent where feature 3 is 0"


def test_what_is_empty_is_left_out():
    parts = ObservationParts.of("Game", "agent", (Own("goal", 0), Entities("wall", 0, 2), OTHERS))
    assert not parts.own and [one.name for one in parts.entities] == ["agent"]


def test_parts_may_differ_between_roles():
    parts = {"a": (VELOCITY,), "b": (VELOCITY, OTHERS)}
    layout = declared(roles={"a": 1, "b": 2}, obs_parts=parts)().layout.observation
    assert layout.shapes == {"a": (2,), "b": (8,)} and layout.parts["b"].entities


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"obs_parts": (VELOCITY,), "obs_dim": 3}, r"have shape \(3,\), their obs_parts 2 numbers"),
        ({"obs_parts": (VELOCITY,), "observation_space": Box(0, 1, (2, 1), np.float32)}, r"shape \(2, 1\)"),
        ({"obs_parts": {"other": (VELOCITY,)}}, r"obs_parts are for \['other'\], but the roles are \['agent'\]"),
        ({"obs_parts": VELOCITY}, "obs_parts is Own"),
        ({"obs_parts": (VELOCITY, VELOCITY)}, "the name 'velocity' twice"),
        ({"obs_parts": (OTHERS, Own("agent", 1))}, "the name 'agent' twice"),
        ({"obs_parts": (OTHERS, Entities("agent", 4, 2))}, "have 3 and 4 entities 'agent'"),
        ({"obs_parts": (Entities("agent", 3, 2, presence=0),) * 2}, "two features"),
    ],
)
def test_parts_that_do_not_fit_are_refused(members, text):
    with pytest.raises(EnvDefinitionError, match=text):
        declared(**members)()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Own("Velocity", 2), "an identifier"),
        (lambda: Own("velocity", -1), "size -1"),
        (lambda: Own("velocity", 2.0), "size 2.0"),
        (lambda: Entities("agent", True, 2), "count True"),
        (lambda: Entities("agent", 3, 0), "features 0"),
        (lambda: Entities("agent", 3, 2, presence=2), r"presence 2; expected an int in \[0, 1\]"),
        (lambda: Entities("agent", 3, 2, by_feature=1), "by_feature 1"),
    ],
)
def test_wrong_parts_are_refused(make, text):
    with pytest.raises(EnvDefinitionError, match=text):
        make()


def entities(env, role):
    """Name -> (num_envs, agents, count, features) of the observations of a role; and its own numbers."""
    parts = env.game.layout.observation.parts[role]
    obs = env.observe()[:, env.game.layout.role_slices[role]]
    lists = {one.name: obs[..., torch.tensor(one.columns, device=obs.device)] for one in parts.entities}
    return lists, {name: obs[..., list(where)] for name, where in parts.own.items()}


def at_rest_no_longer(env):
    """A reset, and random velocities."""
    env.reset(seed=3)
    env.state["velocity"].copy_(torch.rand(env.state["velocity"].shape).to(env.device))
    return env.state["position"], env.state["velocity"]


def test_entities_of_simple_tag_are_where_it_observes_them(device):
    env = gpu_vecenv.make("simple_tag", 5, device, num_good=2, num_adversaries=3)
    position, velocity = at_rest_no_longer(env)
    for role, first in (("adversary", 0), ("agent", 3)):
        lists, own = entities(env, role)
        assert own["velocity"][:, 0].equal(velocity[:, first]) and own["position"][:, 0].equal(position[:, first])
        good = [i for i in (3, 4) if i != first]
        adversaries = [i for i in range(3) if i != first]
        assert lists["agent"][:, 0, :, :2].equal(position[:, good] - position[:, first, None])
        assert lists["agent"][:, 0, :, 2:].equal(velocity[:, good])
        assert lists["adversary"][:, 0].equal(position[:, adversaries] - position[:, first, None])
        assert lists["landmark"][:, 0].equal(env.state["landmark"] - position[:, first, None])


@pytest.mark.parametrize("neighbors", [None, 2])
def test_entities_of_the_other_particle_games(neighbors, device):
    env = gpu_vecenv.make("simple_spread", 5, device, num_agents=4, num_agent_neighbors=neighbors)
    position, _ = at_rest_no_longer(env)
    lists, _ = entities(env, "agent")
    assert lists["agent"].shape == (5, 4, neighbors or 3, 4)
    assert lists["landmark"][:, 1].equal(env.state["landmark"] - position[:, 1, None])
    assert not lists["agent"][..., 2:].any() and lists["agent"][..., :2].any(-1).all()
    env = gpu_vecenv.make("simple_adversary", 5, device, num_good=3, num_agent_neighbors=neighbors)
    position, _ = at_rest_no_longer(env)
    lists, own = entities(env, "agent")
    goal = env.state["landmark"][torch.arange(5), env.state["goal"].long()]
    assert own["goal"][:, 0].equal(goal - position[:, 1])
    if neighbors is None:
        assert lists["adversary"][:, 0].equal(position[:, :1] - position[:, 1, None])
        assert lists["agent"][:, 0].equal(position[:, 2:] - position[:, 1, None])
    else:
        assert lists["other"].shape == (5, 3, 2, 2)


def test_entities_of_tag(device):
    few = {"num_taggers": 2, "num_runners": 3, "num_neighbors": "all", "side": 4.0}
    env = gpu_vecenv.make("tag_continuous", 5, device, **few, egocentric=False)
    env.reset(seed=3)
    env.state["in_game"][:, 4] = False
    lists, own = entities(env, "tagger")
    difference = env.state["position"][:, 1:, 0] - env.state["position"][:, :1, 0]
    torch.testing.assert_close(lists["other"][:, 0, :, 0], difference / (4 * 2**0.5), rtol=1e-6, atol=0)  # a division
    assert lists["other"][0, 0, :, 5:].tolist() == [[1, 1], [0, 1], [0, 1], [0, 0]]  # is a tagger, is in game
    assert not own["time"].any()
    env = gpu_vecenv.make("tag_gridworld", 5, device)
    env.reset(seed=3)
    lists, _ = entities(env, "tagger")
    assert lists["agent"][0, 1, :, 2:].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0], [1, 0]]  # is the runner, is oneself
    assert lists["agent"][..., 0].equal(env.state["cell"][:, None, :, 0].expand(5, 4, 5).float() / 20)


def test_parts_of_a_configured_game_follow_it():
    game = gpu_vecenv.configure("simple_spread", num_agents=6)
    assert dataclasses.replace(game, num_agent_neighbors=2).layout.observation.parts["agent"].entities[1].count == 2
    assert game.layout.observation.parts["agent"].entities[1].count == 5
