"""rollout: the arrays are those of the episode that the environment plays."""

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from games.script import Script
from torch import nn

import gpu_vecenv
from gpu_vecenv import GamePolicy
from gpu_vecenv.declare.env import Field, i32
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import ConfigError, InvalidSeedError, NonFiniteError
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.role_view import RoleView

ALWAYS = {"obs", "active", "actions", "rewards", "terminations", "truncations"}
# Runners leave one by one, so that some agents are inactive in a running episode; two action heads.
LEAVING = {"num_taggers": 3, "num_runners": 4, "side": 3.0, "tagging_distance": 0.2, "max_steps": 13}
LEAVING |= {"num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}
# Episodes shorter than, as long as and longer than the interval of host copies (16 steps); Boxes; masks; images.
CASES = {
    "leaving": ("tag_continuous", LEAVING, ["position", "in_game"]),
    "one agent": ("cartpole", {}, ["theta"]),
    "16 steps": ("pendulum", {"max_steps": 16}, ["theta", "theta_dot"]),
    "17 steps": ("pendulum", {"max_steps": 17}, ["theta_dot"]),
    "masks": (Crew, {}, []),
    "images": (Painter, {}, []),
}


def made(case, device, num_envs=5, **arguments):
    game, config, fields = CASES[case]
    return gpu_vecenv.make(game, num_envs, device, **arguments, **config), fields


def policies_of(env, **settings):
    """Role -> a policy whose choices are far from even."""
    policies = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for role, count in env.game.roles.items():
            if count:
                network = default_network(RoleView(env.game, (role,)), (8,))
                for p in network.parameters():
                    nn.init.normal_(p)
                policies[role] = Policy(env.game, (role,), network, device=env.device, **settings)
    return policies


def equal(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("case", CASES)
def test_an_episode_is_that_of_the_environment(case, device):
    env, fields = made(case, device, autoreset_mode="disabled")
    found = gpu_vecenv.rollout(env, None, 3, fields, seed=9)
    assert found.keys() == ALWAYS | set(fields)
    obs, info = env.reset(seed=9)
    steps = len(found["rewards"])
    for t in range(steps + 1):
        now = {"obs": obs, "active": info["active"], **{name: env.state[name] for name in fields}}
        for name, tensor in now.items():
            assert (found[name][t] == tensor[3].cpu().numpy()).all(), (name, t)
        assert bool(info["active"][3].any()) == (t < steps)
        if t == steps:
            break
        actions = env.sample_actions()
        obs, rewards, terminations, truncations, info = env.step(actions)
        done = {"actions": actions, "rewards": rewards, "terminations": terminations, "truncations": truncations}
        for name, tensor in done.items():
            assert (found[name][t] == tensor[3].cpu().numpy()).all(), (name, t)
    for name, array in found.items():
        assert len(array) == steps + (name not in done)
        assert array.dtype == (now | done)[name].cpu().numpy().dtype and array.shape[1:] == (now | done)[name].shape[1:]


def test_environments_and_seeds_give_different_episodes(device):
    env, _ = made("leaving", device)
    first = gpu_vecenv.rollout(env)
    assert equal(first, gpu_vecenv.rollout(env, None, 0, seed=1))
    for other in (gpu_vecenv.rollout(env, env_index=1), gpu_vecenv.rollout(env, env_index=10**12)):
        assert not (first["obs"][0] == other["obs"][0]).all()
    assert not (first["obs"][0] == gpu_vecenv.rollout(env, seed=2)["obs"][0]).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"autoreset_mode": "next_step"},
        {"first_env_index": 100},
        {"agents_as_envs": True},
        {"num_envs": 1},
        {"validate": "sync"},
    ],
)
def test_arguments_of_the_environment_do_not_matter_and_it_is_not_stepped(arguments, device):
    plain, fields = made("leaving", device)
    other, _ = made("leaving", device, **arguments)
    other.reset(seed=4)
    before = other.state_dict()
    same = 2 + arguments.get("first_env_index", 0)
    assert equal(gpu_vecenv.rollout(other, None, 2, fields), gpu_vecenv.rollout(plain, None, same, fields))
    assert all((other.state_dict()[name] == tensor).all() for name, tensor in before.items())


def test_a_shared_field_has_no_time_axis_and_its_current_value(device):
    env = gpu_vecenv.make("simple_spread", 3, device, curriculum=True)
    calm = gpu_vecenv.rollout(env, None, 0, ["curriculum_stage", "position"])
    env.state["curriculum_stage"].fill_(1)
    found = gpu_vecenv.rollout(env, None, 0, ["curriculum_stage", "position"])
    assert found["curriculum_stage"].shape == () and found["curriculum_stage"] == 1 and calm["curriculum_stage"] == 0
    assert (found["position"] == calm["position"]).all()
    found["curriculum_stage"][...] = 7
    assert int(env.state["curriculum_stage"]) == 1


# Policies


@pytest.mark.parametrize("case", ["leaving", "masks", "images"])
@pytest.mark.parametrize("greedy", [False, True])
def test_policies_act_as_in_evaluate(case, greedy, device):
    env, _ = made(case, device)
    role_policies = policies_of(env)
    found = gpu_vecenv.rollout(env, role_policies, greedy=greedy, seed=6)
    assert equal(found, gpu_vecenv.rollout(env, GamePolicy(env.game, role_policies), greedy=greedy, seed=6))
    metrics = evaluate(env, role_policies, 1, greedy=greedy, seed=6)
    assert metrics["episode_length"] == len(found["rewards"])
    for role, where in env.game.layout.role_slices.items():
        # evaluation sums in float32
        assert found["rewards"][:, where].sum(0).mean() == pytest.approx(metrics[f"return_{role}"], rel=1e-5, abs=1e-5)


def test_roles_may_have_scripts_and_random_policies(device):
    env = gpu_vecenv.make(Script, 3, device, num_leads=2, num_others=2)
    found = gpu_vecenv.rollout(env, {"lead": lambda obs: obs[..., 0].int() + 1, "other": None}, fields=["said"])
    assert (found["actions"][:, :2] == [2, 3]).all() and len(np.unique(found["actions"][:, 2:])) > 1
    assert (found["said"][1:] == found["actions"]).all()
    assert (found["actions"][:, 2:] == gpu_vecenv.rollout(env)["actions"][:, 2:]).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_function_acts_for_all_agents(dtype, device):
    """It returns the same tensor in every step, with new values."""
    env = gpu_vecenv.make(Script, 3, device, num_leads=2, num_others=3)
    given, seen = torch.zeros(1, 5, dtype=dtype, device=device), []

    def act(obs):
        assert not torch.is_grad_enabled()
        seen.append(obs.cpu().numpy())
        given[:] = (torch.arange(5, device=device) + len(seen)) % 4
        return given

    found = gpu_vecenv.rollout(env, act, fields=["said"])
    steps = len(found["actions"])
    assert (np.concatenate(seen)[:steps] == found["obs"][:-1]).all() and seen[0].shape == (1, 5, 6)
    expected = (np.arange(5) + 1 + np.arange(steps)[:, None]) % 4
    assert (found["actions"] == expected).all() and found["actions"].dtype == np.int32
    assert (found["said"][1:] == expected).all()


def test_a_function_may_call_a_game_policy(device):
    env, _ = made("leaving", device)
    policy = GamePolicy(env.game, policies_of(env))
    found = gpu_vecenv.rollout(env, lambda obs: policy(obs, greedy=True))
    assert equal(found, gpu_vecenv.rollout(env, policy, greedy=True))


# Refusals


class Named(TagGridworld):
    """A game with a field with the name of an output."""

    source = TagGridworld.source_path()
    state = (*TagGridworld.state, Field("rewards", i32))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"env": "tag_gridworld"}, TypeError, ["env is a str", "VecEnv", "vec_env"]),
        ({"policy": 3}, TypeError, ["policy is a int", "GamePolicy", "None"]),
        ({"policy": {"tagger": None}}, ConfigError, ["role_policies are for ['tagger']", "['tagger', 'runner']"]),
        ({"env_index": -1}, ValueError, ["env_index is -1"]),
        ({"env_index": 1.0}, TypeError, ["env_index is 1.0"]),
        ({"fields": "cell"}, TypeError, ["fields is 'cell'", '("cell",)']),
        ({"fields": ["cel"]}, ConfigError, ["no state field 'cel'", "cell"]),
        ({"env": Named, "fields": ["rewards"]}, ConfigError, ["'rewards' has the name of", "rename it"]),
        ({"seed": -1}, InvalidSeedError, ["seed is -1"]),
        ({"policy": lambda obs: obs}, TypeError, ["actions have dtype torch.float32"]),
        ({"policy": lambda obs: torch.zeros(1, 4, dtype=torch.int32)}, ValueError, ["(1, 4)", "expected (1, 5)"]),
        ({"policy": lambda obs: [0] * 5}, TypeError, ["actions are a list"]),
        ({"policy": lambda obs: torch.full((1, 5), 9)}, NonFiniteError, ["an action that its role does not have"]),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    kind = arguments.get("env", TagGridworld)
    env = kind if isinstance(kind, str) else gpu_vecenv.make(kind, 2, "cpu")
    with pytest.raises(error) as refusal:
        gpu_vecenv.rollout(**{**arguments, "env": env})
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_policy_that_gives_nan_is_refused(device):
    env, _ = made("leaving", device)
    role_policies = policies_of(env)
    next(role_policies["runner"].network.parameters()).data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="a network returned NaN"):
        gpu_vecenv.rollout(env, role_policies)
