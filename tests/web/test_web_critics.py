"""Values in JavaScript: those of each policy's critic at the steps of an episode, in Node.js."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from games.crew import Crew
from gymnasium.spaces import Box, Discrete
from support.node import SIMULATION, module_json, require_node, run_node

import gpu_vecenv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import Field, boolean, f32, i64, u8
from gpu_vecenv.train.algorithms import algorithm_of
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.policy import Policy, default_actor
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.recurrent import kept
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.web.inspection import critic_state_json
from gpu_vecenv.web.policies import policies_json

require_node()
# Sums in another order than torch's, and JavaScript's tanh: a few units of float32's last place through the layers, and
# through the steps of a memory.
CLOSE = {"rel": 1e-4, "abs": 5e-5}
STEPS, SEED = 14, 5
SOUGHT = [STEPS, 3, 4, 7, 0, 13, 1, 2]


def policies_of(game, config):
    """One policy for each role, with random weights and statistics."""
    torch.manual_seed(5)
    algorithm = algorithm_of(config)
    policies = [algorithm.make_policy(game, [role], config, None, None) for role in game.layout.present_roles]
    for policy in policies:
        for parameter in policy.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        for normalizer in (policy.obs_normalizer, policy.state_normalizer):
            if normalizer is not None:
                normalizer.mean.uniform_(-1, 1)
                normalizer.var.uniform_(0.1, 3)
        if policy.return_normalizer is not None:
            policy.return_normalizer.mean.fill_(2.5)
            policy.return_normalizer.var.fill_(9.0)
    return policies


def in_node(game, policies, trained=()):
    content = {**module_json(game), "policies": policies_json(policies), "noop": {}}
    job = {"content": {**content, "critic_state": critic_state_json(game)}, "seed": SEED, "steps": STEPS}
    return run_node("inspected.js", {**job, "trained": list(trained), "sought": SOUGHT}, *SIMULATION)


def context_of(env, policy, obs):
    """What a central critic sees, by the words of ``Env`` and not by the rollout's code."""
    state = [env.state[name].float().reshape(1, 1, -1) for name in env.game.critic_state]
    state = [one.expand(1, env.num_agents, -1) for one in state]
    state += [env.state[name].float().reshape(1, env.num_agents, -1) for name in env.game.agent_critic_state]
    state = torch.cat(state, -1) if state else obs.flatten(1)[:, None].expand(1, env.num_agents, -1)
    return Context(state[:, policy.view.agents])


@torch.no_grad()
def check_values(game, policies, found):
    """Compare with the values of the Python policies in an episode of the same actions; the last one acted greedily."""
    env = gpu_vecenv.VecEnv(game, 1, "cpu", autoreset_mode="disabled")
    obs, info = env.reset(seed=SEED)
    states = [torch.zeros(1, policy.view.num_agents, policy.recurrent_state_size) for policy in policies]
    expected = []
    for actions in [*found["actions"], None]:
        values = []
        for k, policy in enumerate(policies):
            own = obs[(slice(None), policy.view.agents, *policy.view.obs_slice)]
            memory = states[k] if policy.recurrent_state_size else None
            context = context_of(env, policy, obs)
            outputs, critic_values, *following = policy(own, memory, context=context)
            mask = policy.view.mask(info["action_mask"][:, policy.view.agents]) if "action_mask" in info else None
            values += policy.state_values(outputs, critic_values, mask)[0].tolist()
            if following:
                states[k] = kept(following[0], info["active"][:, policy.view.agents])
        expected.append(values)
        if actions is not None:
            like = env.sample_actions()
            taken = torch.tensor(actions, dtype=like.dtype).reshape(like.shape)
            acts = info.get("acting", info["active"])[0, policy.view.agents]
            chosen = policy._actions(outputs, mask, True, None).reshape(len(acts), -1)
            own_taken = taken.reshape(env.num_agents, -1)[policy.view.agents, : policy.view.num_heads]
            assert own_taken[acts].equal(chosen[acts].to(taken.dtype))
            obs, _, _, _, info = env.step(taken)
    assert found["agents"] == [agent for policy in policies for agent in policy.view.agent_numbers]
    assert len(expected) == len(found["values"]) > 2
    np.testing.assert_allclose(found["values"], expected, rtol=CLOSE["rel"], atol=CLOSE["abs"])
    assert np.ptp(expected, axis=0).max() > 1e-3, "values that change"


@dataclass(frozen=True, kw_only=True)
class Watched(Env):
    """Agents whose critics see fields of several dtypes; one of them leaves before the others do."""

    roles = {"first": 2, "others": 3}  # noqa: RUF012
    state = (
        Field("age", i64),
        Field("spot", u8, (3,)),
        Field("odd", boolean, ("num_agents",)),
        Field("pair", f32, ("num_agents", 2)),
    )
    critic_state = ("age", "spot")
    agent_critic_state = ("odd", "pair")
    observation_space = Box(0, 255, (3,), np.uint8)
    action_space = Discrete(3)

    @property
    def obs_dtype(self):
        return u8


@dataclass(frozen=True, kw_only=True)
class Seen(Watched):
    """The same without a state for critics: they see the observations of all agents, in bytes."""

    critic_state = ()
    agent_critic_state = ()


SOURCE = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) {
    ONCE { s.age[0] = 0; s.spot[0] = 200; s.spot[1] = 7; s.spot[2] = 90; }
    FOR_AGENTS(i) { s.odd[i] = i % 2; s.pair[i][0] = io.rng.uniform(i, 0); s.pair[i][1] = -0.5f * i; }
}
HD void step(State s, Io io) {
    ONCE { s.age[0] += 3; s.spot[1] += 30; }
    FOR_AGENTS(i) {
        s.odd[i] = io.action(i) == 1;
        s.pair[i][0] += 0.25f * io.action(i);
        io.rewards[i] = s.pair[i][0];
        io.terminations[i] = io.elapsed_steps >= 12 || (i == 3 && io.elapsed_steps >= 4);
    }
}
HD void observe(State s, Io io) {
    FOR_AGENTS(i) { io.obs[i][0] = (int)(40 * s.pair[i][0]); io.obs[i][1] = (int)s.age[0]; io.obs[i][2] = 255; }
}
"""


@pytest.fixture
def watched(tmp_path, monkeypatch):
    (tmp_path / "watched.cu").write_text(SOURCE)
    monkeypatch.setattr(Watched, "source", tmp_path / "watched.cu", raising=False)


PPO = {"hidden_sizes": (16, 12), "normalize_obs": True, "normalize_returns": True}
PPO = {
    name: PPOConfig(**{**PPO, **changes})
    for name, changes in {
        "own": {"shared_trunk": False},
        "entities": {"network": "entities"},
        "gru": {"network": "gru", "post_hidden_sizes": (8,)},
        "lstm": {"network": "lstm", "shared_trunk": False},
        "central": {"critic": "central", "agent_ids": True},
        "central unscaled": {"critic": "central", "normalize_obs": False, "normalize_returns": False},
        "central gru": {"critic": "central", "network": "gru", "agent_ids": True},
        "central lstm": {"critic": "central", "network": "lstm", "post_hidden_sizes": (8,)},
    }.items()
}
PQN = {"q": PQNConfig(hidden_sizes=(16, 12)), "q gru": PQNConfig(network="gru", hidden_sizes=(16, 12))}
CASES = [
    ("tag_gridworld", "own"),
    ("tag_gridworld", "central"),
    ("tag_gridworld", "lstm"),
    ("tag_continuous", "entities"),
    ("simple_adversary", "central"),  # padded observations
    ("pursuit", "central unscaled"),  # a state that it declares
    ("skirmish", "central gru"),  # masks too
    ("connect_four", "gru"),  # turns
    ("connect_four", "q"),
    (Crew, "q gru"),  # several heads
    (Crew, "central lstm"),
    (Watched, "central"),
    (Watched, "central gru"),
    (Seen, "central unscaled"),
    (Seen, "central lstm"),
]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("game, kind", CASES, ids=lambda one: getattr(one, "__name__", one))
def test_values_are_those_of_the_policies(game, kind):
    game = gpu_vecenv.configure(game) if isinstance(game, str) else game()
    policies = policies_of(game, {**PPO, **PQN}[kind])
    found = in_node(game, policies, game.layout.present_roles[-1:])
    check_values(game, policies, found)
    values, length = found["values"], len(found["actions"])
    assert found["sought"] == [values[min(step, length)] for step in SOUGHT], "a memory is that of the step"
    assert found["repeated"] == values, "an episode begins without memory"


def test_a_critic_of_ones_own_has_no_value_and_a_reason():
    game = gpu_vecenv.configure("tag_gridworld")
    view = RoleView(game, ["tagger"])
    policy = Policy(game, ["tagger"], default_actor(view, (8,)), critic=torch.nn.Linear(30, 1))
    (found,) = policies_json([policy])
    assert found["critic"] == {
        "kind": "none",
        "reason": "none: the critic of tagger is a Linear, which the page does not compute",
    }
    assert in_node(game, [policy])["values"][0] == [None] * 4
