"""Evaluation: whole episodes, exactly as many as asked for, played by policies, scripts or chance."""

import copy
import itertools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from support.training import SMALL, leaving, policy_of
from torch import nn

import gpu_vecenv
from gpu_vecenv import Env, Field, GamePolicy
from gpu_vecenv.declare.env import i32
from gpu_vecenv.errors import ConfigError, EnvContractError, NonFiniteError
from gpu_vecenv.train.evaluation import Evaluator, RolePolicies, evaluate
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.watch.recording import record

# Taggers in the middle of 21 x 21 cells, the runner in the corner: in 11 steps nobody can be caught by walking.
TOO_FAR = {"max_steps": 11}
ROW_UP = 3  # action "row + 1" of tag_gridworld
ROLES = ("tagger", "runner")


def too_far(device, num_envs=8):
    return gpu_vecenv.make("tag_gridworld", num_envs, device, autoreset_mode="next_step", **TOO_FAR)


# How many episodes, and which


@pytest.mark.parametrize("episodes", [1, 7, 8, 9, 37])
def test_evaluation_counts_exactly_the_requested_episodes(episodes, device):
    """All episodes last 11 steps: any other mean would come of one counted twice or left out."""
    found = Trainer(too_far(device), SMALL).evaluate(episodes)
    assert (found["episodes"], found["episode_length"], found["terminated_fraction"]) == (episodes, 11.0, 0.0)


@pytest.mark.parametrize("episodes", [1, 4, 5, 11, 30])
def test_metrics_are_those_of_the_completed_episodes(episodes, device):
    """Its first observation says how long an episode is, and how it ends; rewards follow from that."""
    env = gpu_vecenv.make(Script, 4, device, num_leads=2, num_others=3, leave=3, max_steps=40)
    found = evaluate(env, {"lead": None, "other": None}, episodes, seed=13)
    rounds = -(-episodes // 4)
    twin = env.like(num_envs=-(-episodes // rounds), autoreset_mode="disabled")
    obs, _ = twin.reset(seed=13)
    announced = []
    for _ in range(rounds):
        announced += obs[:, 0, 2:4].tolist()
        while twin.active.any():
            twin.step(twin.sample_actions())
        obs, _ = twin.reset()
    assert episodes < 11 or len({tuple(x) for x in announced}) > 5
    lengths, truncates = (np.array(x) for x in zip(*announced[:episodes], strict=True))

    def paid(agent, steps):
        return 10 * (agent + 1) * steps + steps * (steps + 1) / 2

    stays = np.minimum(lengths, 3)  # of others
    expected = {
        "episodes": episodes,
        "episode_length": lengths.mean(),
        "terminated_fraction": 1 - truncates.mean(),
        "return_lead": np.mean([paid(agent, lengths) for agent in (0, 1)]),
        "return_other": np.mean([paid(agent, stays) for agent in (2, 3, 4)]),
        "worst_return_lead": np.mean([paid(agent, lengths.min()) for agent in (0, 1)]),
        "worst_return_other": np.mean([paid(agent, stays.min()) for agent in (2, 3, 4)]),
    }
    assert found == pytest.approx(expected, rel=1e-6)  # sums are whole numbers; only means are rounded


def test_evaluation_plays_the_episodes_that_a_loop_by_hand_plays(device):
    trainer = Trainer(leaving(device, 6), SMALL, seed=3)
    found = trainer.evaluate(6, seed=21)
    env = leaving(device, 6, autoreset_mode="disabled")
    sampler, returns = gpu_vecenv.Sampler(env), torch.zeros(6, 7, dtype=torch.float64, device=device)
    lengths, terminated = torch.zeros(6, device=device), torch.zeros(6, dtype=torch.bool, device=device)
    obs, _ = env.reset(seed=21)
    while env.active.any():
        lengths += env.active.any(1)
        with torch.no_grad():
            parts = [trainer.policies[role](obs[:, env.game.layout.role_slices[role]])[0] for role in ROLES]
        actions = sampler.sample(torch.cat(parts, 1)).actions
        running = env.active.any(1)
        obs, rewards, _, truncations, info = env.step(actions)
        returns += rewards
        terminated |= running & ~info["active"].any(1) & ~truncations.any(1)
    # Rewards are whole numbers; only the means over agents and episodes are rounded.
    assert found == pytest.approx(
        {
            "episodes": 6,
            "episode_length": lengths.mean().item(),
            "terminated_fraction": terminated.double().mean().item(),
            "return_tagger": returns[:, :3].mean().item(),
            "return_runner": returns[:, 3:].mean().item(),
            "worst_return_tagger": returns[:, :3].mean(1).min().item(),
            "worst_return_runner": returns[:, 3:].mean(1).min().item(),
        },
        rel=1e-6,
    )


def test_an_evaluation_touches_neither_the_environment_nor_training(device):
    evaluated, twin = (Trainer(leaving(device), SMALL, seed=9) for _ in range(2))
    for _ in range(2):
        evaluated.evaluate(7)
        evaluated.evaluate(3, random_roles=["runner"], greedy=True)
        evaluated.train_iteration(), twin.train_iteration()
    for role in ROLES:
        assert equal_bits(evaluated.policies[role].state_dict(), twin.policies[role].state_dict())
    assert equal_bits(evaluated.env.state_dict(), twin.env.state_dict())
    before = torch.get_rng_state()
    evaluated.evaluate(3)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    "arguments",
    [
        {"autoreset_mode": "same_step"},
        {"autoreset_mode": "disabled"},
        {"first_env_index": 100},
        {"autoreset_mode": "same_step", "agents_as_envs": True},
    ],
)
def test_any_environment_serves_as_a_pattern(arguments, device):
    """Reset or not; what is played depends on the seed alone."""
    plain, other = leaving(device), leaving(device, **arguments)
    role_policies = {role: policy_of(plain, role) for role in ROLES}
    assert evaluate(other, role_policies, 9, seed=4) == evaluate(plain, role_policies, 9, seed=4)
    assert other.seed is None and plain.seed is None


# RolePolicies


def test_scripts_see_their_role_and_act_for_it(device):
    """Each sees its own observations, and in them what it did last."""
    env = gpu_vecenv.make(Script, 5, device, num_leads=2, num_others=3, choices_of_others=3)
    seen, times = {"lead": [], "other": []}, {}

    def player(role, agents, choices):
        def act(obs):
            assert obs.shape == (5, len(agents), 6) and not torch.is_grad_enabled()
            assert obs[0, :, 0].tolist() == agents
            if seen[role]:
                running = obs[..., 1] > times[role]  # else its episode is over, or the next one begins
                assert obs[..., 5][running].equal(seen[role][-1][running].float())
            times[role] = obs[..., 1].clone()
            numbers = torch.arange(5 * len(agents), device=obs.device).view(5, -1) + len(seen[role])
            seen[role].append(numbers % choices)
            return seen[role][-1]  # int64: it is written where int32 stands

        return act

    role_policies = {"lead": player("lead", [1, 2], 4), "other": player("other", [3, 4, 5], 3)}
    assert evaluate(env, role_policies, 10)["episodes"] == 10
    assert len(seen["lead"]) == len(seen["other"]) > 2


def test_scripts_of_roles_with_fewer_numbers_give_only_those(device):
    """The driver has one number, helpers two; and what is masked is not chosen."""
    env = gpu_vecenv.make(Crew, 6, device)
    shapes = set()

    def driver(obs):
        shapes.add(("driver", *obs.shape[1:]))
        return torch.full((6, 1, 1), 2, device=obs.device)  # stay where you are

    def helper(obs):
        shapes.add(("helper", *obs.shape[1:]))
        return torch.zeros(6, 2, 2, dtype=torch.int32, device=obs.device)

    found = evaluate(env, {"driver": driver, "helper": helper}, 12, seed=3)
    assert shapes == {("driver", 1, 2), ("helper", 2, 4)}
    assert found["return_helper"] == 0 and found["episode_length"] == 9
    twin = env.like(autoreset_mode="disabled")
    places = twin.reset(seed=3)[0][:, 0, 0] - 1
    assert evaluate(env, {"driver": driver, "helper": None}, 6, seed=3)["return_driver"] == pytest.approx(
        9 * places.mean().item(), rel=1e-6
    )


@pytest.mark.parametrize("chance", [(), ("tagger",), ("runner",), ROLES])
def test_random_actions_for_some_roles_and_scripts_for_others(chance, device):
    """Row + 1 eleven times: a tagger walks into the wall once, at the last step; the runner never does."""

    def walk(obs):
        return torch.full(obs.shape[:2], ROW_UP, dtype=torch.int32, device=obs.device)

    found = evaluate(too_far(device), {role: None if role in chance else walk for role in ROLES}, 40)
    # float32 sums of 11 rewards
    assert (found["return_tagger"] == pytest.approx(-0.11 - 0.1, abs=1e-6)) == ("tagger" not in chance)
    assert (found["return_runner"] == pytest.approx(0.11, abs=1e-6)) == ("runner" not in chance)
    assert found["terminated_fraction"] == 0


class Walker(nn.Module):
    """Always the same action."""

    def __init__(self, action):
        super().__init__()
        self.logits = nn.Parameter(100.0 * nn.functional.one_hot(torch.tensor(action), 5))

    def forward(self, obs):
        return self.logits.expand(*obs.shape[:-1], 5), obs[..., 0] * 0


class Counting(nn.Module):
    """A network of a user's: that of the library, with a number on the host that tells how often it was called."""

    def __init__(self, network):
        super().__init__()
        self.network, self.calls = network, 0
        self.recurrent_state_size = getattr(network, "recurrent_state_size", 0)

    def forward(self, *args):
        self.calls += 1
        return self.network(*args)


@pytest.mark.parametrize("network", ["mlp", "gru"])
@pytest.mark.parametrize("greedy", [False, True])
def test_on_a_gpu_the_graph_of_a_step_is_bit_identical_and_what_a_user_wrote_is_called_at_each(network, greedy, device):
    trainer = Trainer(leaving(device), replace(SMALL, network=network, num_minibatches=2), seed=4)
    own = {role: trainer.policies[role] for role in ROLES}
    counting = {role: Counting(policy.network) for role, policy in own.items()}
    users = {role: Policy(trainer.env.game, [role], each, device=trainer.env.device) for role, each in counting.items()}
    hooked, called = {role: copy.deepcopy(policy) for role, policy in own.items()}, []
    hooked["runner"].network.register_forward_hook(lambda *_: called.append(1))
    assert [RolePolicies(trainer.env, actors).capturable for actors in (own, users, hooked)] == [True, False, False]
    found = [evaluate(trainer.env, actors, 11, greedy=greedy, seed=5) for actors in (own, users, hooked)]
    assert found[0] == found[1] == found[2] and found[0]["episode_length"] > 5
    assert all(
        number >= 2 * found[0]["episode_length"] for number in [len(called), *(x.calls for x in counting.values())]
    )


@pytest.mark.parametrize("policies", ["tagger runner", "tagger+runner"])
def test_random_roles_act_at_random_and_the_others_by_the_policy(policies, device):
    trainer = Trainer(too_far(device), SMALL, policies={name: Walker(ROW_UP) for name in policies.split()})
    for random_roles in [(), ("tagger",), ("runner",), ROLES]:
        found = trainer.evaluate(40, random_roles=random_roles)
        assert (found["return_tagger"] == pytest.approx(-0.11 - 0.1, abs=1e-6)) == ("tagger" not in random_roles)
        assert (found["return_runner"] == pytest.approx(0.11, abs=1e-6)) == ("runner" not in random_roles)


def test_random_play_uses_the_random_actions_of_the_environment(device):
    env = leaving(device, 20)
    found = evaluate(env, dict.fromkeys(ROLES), 20, seed=8)
    twin = env.like(autoreset_mode="disabled")
    twin.reset(seed=8)
    returns = torch.zeros(20, 7, dtype=torch.float64, device=device)
    while twin.active.any():
        returns += twin.step(twin.sample_actions())[1]
    assert found["return_tagger"] == pytest.approx(returns[:, :3].mean().item(), rel=1e-6)
    assert found["return_runner"] == pytest.approx(returns[:, 3:].mean().item(), rel=1e-6)
    assert found != evaluate(env, dict.fromkeys(ROLES), 20, seed=9)


def test_an_evaluation_with_all_roles_at_random_does_not_depend_on_the_policy(device):
    one, other = (Trainer(leaving(device), SMALL, seed=seed) for seed in (0, 1))
    for policy in other.policies.values():
        policy.network.actor.weight.data *= 1000  # two policies that act differently nearly always
    assert one.evaluate(20, random_roles=ROLES) == other.evaluate(20, random_roles=ROLES)
    assert one.evaluate(20) != other.evaluate(20)


def test_a_policy_for_two_roles_plays_as_two_with_its_weights(device):
    env = gpu_vecenv.make(Script, 8, device, num_leads=2, num_others=3)
    both = policy_of(env, "lead", "other")
    apart = {role: policy_of(env, role) for role in ("lead", "other")}
    said = []

    def listen(_, obs):
        assert obs[0][0, :, 0].tolist() in ([1, 2], [3, 4, 5])  # the role's own agents
        said.append(obs[0][..., 5].clone())

    both.network.register_forward_pre_hook(listen)
    found = evaluate(env, {"lead": both, "other": both}, 8)
    together = said.copy()
    said.clear()
    for policy in apart.values():
        policy.network.register_forward_pre_hook(listen)
    assert evaluate(env, apart, 8) == found
    assert len(said) == len(together) > 4 and all(x.equal(y) for x, y in zip(said, together, strict=True))
    assert {x.shape[1] for x in said} == {2, 3} and torch.cat([x.flatten() for x in said]).unique().numel() > 2


def test_roles_of_other_sizes_play_under_their_masks(device):
    for game in (Crew, Scouts):
        env = gpu_vecenv.make(game, 16, device)
        role_policies = {role: policy_of(env, role) for role in env.game.roles}
        for greedy in (False, True):
            assert evaluate(env, role_policies, 40, greedy=greedy)["episodes"] == 40  # a forbidden action would raise


def test_a_policy_plays_by_its_own_logits(device):
    """Helpers hand over whenever they may, or never, and have as much or as little of their rest left out."""
    env, returns, rests = gpu_vecenv.make(Crew, 16, device), [], []
    for odds, leave_out in ((-50.0, 50.0), (50.0, 0.0), (-50.0, -50.0)):
        helper, seen = policy_of(env, "helper"), []
        helper.network.actor.weight.data.zero_()
        helper.network.actor.bias.data.copy_(torch.tensor([0.0, odds, 0.0, leave_out, 2 * leave_out]))
        helper.network.register_forward_pre_hook(lambda _, obs, seen=seen: seen.append(obs[0].clone()))
        returns.append(evaluate(env, {"driver": None, "helper": helper}, 64)["return_helper"])
        seen = torch.cat(seen)
        rests.append((seen[..., 2] - 1)[seen[..., 1] > 1])  # after the first step
    assert returns[0] == returns[2] == 0 and returns[1] > 0.5
    assert rests[0].eq(0).all() and rests[2].eq(1).any()


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_policies_of_a_box_play_by_their_squash(squash, device):
    """Greedy means of 0.5: the game says what it was given."""
    env = gpu_vecenv.make(Script, 4, device, num_leads=1, num_others=1, continuous=True)
    lead = policy_of(env, "lead", squash=squash)
    lead.network.actor.weight.data.zero_()
    lead.network.actor.bias.data.fill_(0.5)
    heard = []

    class Hearing(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, obs):
            heard.append(obs[..., 5][obs[..., 1] > 0])
            return self.network(obs)

    lead.network = Hearing(lead.network)
    evaluate(env, {"lead": lead, "other": None}, 4, greedy=True)
    expected = np.tanh(0.5) if squash == "tanh" else 0.5
    assert torch.cat(heard).tolist() == pytest.approx([expected] * len(torch.cat(heard)), rel=1e-6)
    assert len(torch.cat(heard)) > 4


def test_images_are_played(device):
    env = gpu_vecenv.make(Painter, 4, device)
    role = next(iter(env.game.roles))
    found = evaluate(env, {role: policy_of(env, role, normalize_obs=True)}, 9)
    assert found["episodes"] == 9 and 1 <= found["episode_length"] <= 12


def test_greedy_evaluation_is_deterministic_and_sampling_follows_its_seed(device):
    trainer = Trainer(too_far(device), SMALL)
    greedy = trainer.evaluate(20, greedy=True)
    assert greedy == trainer.evaluate(20, greedy=True)
    # All start from the same cells, so that without chance all episodes are one and the same (sums in one order).
    assert trainer.evaluate(1, greedy=True, seed=99) == pytest.approx({**greedy, "episodes": 1})
    assert greedy["distinct_episodes"] == 1
    sampled = trainer.evaluate(20)
    assert sampled == trainer.evaluate(20) != trainer.evaluate(20, seed=2)
    assert sampled != greedy and "distinct_episodes" not in sampled


@pytest.mark.parametrize(("num_envs", "episodes"), [(4, 4), (4, 11), (16, 10)])
def test_greedy_episodes_that_differ_in_their_start_alone_are_told_apart(num_envs, episodes, device):
    """Lengths are equal, and returns but for a few bits: observations differ."""
    env = gpu_vecenv.make("pendulum", num_envs, device, max_steps=3)
    found = evaluate(env, {"agent": policy_of(env, "agent")}, episodes, greedy=True)
    assert (found["distinct_episodes"], found["episode_length"]) == (episodes, 3)


def test_greedy_episodes_differ_by_random_opponents_alone(device):
    env = gpu_vecenv.make("tag_gridworld", 8, device, grid=4, max_steps=9)
    stay = lambda obs: torch.zeros(obs.shape[:2], dtype=torch.int32, device=device)  # noqa: E731
    walks = evaluate(env, {"tagger": stay, "runner": None}, 8, greedy=True)["distinct_episodes"]
    assert 1 < walks <= 8
    assert evaluate(env, {"tagger": stay, "runner": stay}, 20, greedy=True)["distinct_episodes"] == 1


@pytest.mark.parametrize(("game", "role"), [(Script, "other"), (Scouts, "scout")])
def test_a_role_without_agents_needs_no_policy(game, role, device):
    env = gpu_vecenv.make(game, 4, device, **{f"num_{role}s": 0})
    trainer = Trainer(env, SMALL)
    assert role not in trainer.policies
    found = trainer.evaluate(5)
    assert found["episodes"] == 5 and found.get(f"return_{role}", 0) == 0


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"random_roles": ["tagger", "hunter"]}, r"\['hunter'\]; expected some of \['tagger', 'runner'\]"),
        ({"episodes": 0}, "episodes is 0; expected an int >= 1"),
        ({"episodes": -3}, "episodes is -3; expected an int >= 1"),
        ({"episodes": 2.0}, r"episodes is 2\.0; expected an int >= 1"),
        ({"episodes": True}, "episodes is True; expected an int >= 1"),
    ],
)
def test_a_bad_evaluation_is_refused(arguments, message, device):
    with pytest.raises(ConfigError, match=message):
        Trainer(leaving(device), SMALL).evaluate(**arguments)


@pytest.mark.parametrize("names", [[], ["tagger"], ["tagger", "runner", "hunter"], ["tagger", "hunter"]])
def test_every_role_needs_a_player(names, device):
    message = r"role_policies are for .*; expected each of the roles \['tagger', 'runner'\] once|unknown role 'hunter'"
    with pytest.raises(ConfigError, match=message):
        evaluate(leaving(device), dict.fromkeys(names), 3)


def test_policies_of_two_ways_to_squash_are_refused(device):
    env = gpu_vecenv.make(Script, 4, device, num_leads=1, num_others=1, continuous=True)
    role_policies = {"lead": policy_of(env, "lead", squash="tanh"), "other": policy_of(env, "other", squash="clip")}
    with pytest.raises(ConfigError, match=r"policies have squash \['clip', 'tanh'\]"):
        evaluate(env, role_policies, 3)


class Spoiled(nn.Module):
    """What a network gives, but for observations that ``when`` picks."""

    def __init__(self, network, when, value):
        super().__init__()
        self.network, self.when, self.value = network, when, value

    def forward(self, obs):
        parameters, values = self.network(obs)
        return torch.where(self.when(obs)[..., None], self.value, parameters), values


WHEN = {
    "always": lambda obs: obs[..., 0] == obs[..., 0],
    "late": lambda obs: obs[..., 1] >= 20,
    "last step": lambda obs: obs[..., 1] == obs[..., 2] - 1,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("value", "continuous"),
    [(float("nan"), False), (-float("inf"), False), (float("nan"), True), (float("inf"), True)],
)
def test_an_evaluation_ends_when_a_policy_gives_nan_or_excludes_every_choice(value, continuous, when, device):
    """Also where it does so only now and then, and where all would be over before the device is asked."""
    env = gpu_vecenv.make(Script, 4, device, continuous=continuous, max_steps=40 if when == "late" else 6, num_others=1)
    lead = policy_of(env, "lead")
    role_policies = {"lead": lead, "other": None}
    assert evaluate(env, role_policies, 8)["episodes"] == 8
    lead.network = Spoiled(lead.network, WHEN[when], value)
    with pytest.raises(NonFiniteError, match="returned NaN, a mask forbids every choice"):
        evaluate(env, role_policies, 8)
    assert env.seed is None


ENDLESS = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { ONCE s.clock[0] = 0; }
HD void step(State s, Io io) {
    ONCE {
        s.clock[0] += 1;
        io.terminations[0] = s.clock[0] % 20 == 5 && io.action(0) == 1;
    }
}
HD void observe(State s, Io io) { ONCE io.obs[0][0] = (float)s.clock[0]; }
"""


@dataclass(frozen=True, kw_only=True)
class Endless(Env):
    """Its author has forgotten to truncate."""

    max_steps: int | None = 20
    state = (Field("clock", i32),)
    obs_dim = 1
    action_space = Discrete(2)


def test_an_episode_that_does_not_end_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "endless.cu").write_text(ENDLESS)
    monkeypatch.setattr(Endless, "source", tmp_path / "endless.cu", raising=False)
    env = gpu_vecenv.make(Endless, 4, "cpu")
    ends = {"agent": lambda obs: torch.ones(obs.shape[:2], dtype=torch.int64)}
    assert evaluate(env, ends, 4)["episode_length"] == 5
    third_goes_on = {"agent": lambda obs: torch.tensor([[1], [1], [0], [1]])}
    for play in (evaluate, partial(record, episodes=4)):
        with pytest.raises(EnvContractError, match=r"1 of 4 episodes go on after 20 steps, .* environment 2; expected"):
            play(env, third_goes_on)


@pytest.mark.parametrize("max_steps", [200, None])
def test_progress_is_that_of_the_longest_possible_episode_or_else_of_those_that_ended(max_steps, tmp_path, monkeypatch):
    (tmp_path / "endless.cu").write_text(ENDLESS)
    monkeypatch.setattr(Endless, "source", tmp_path / "endless.cu", raising=False)
    env, steps, reports = gpu_vecenv.make(Endless, 4, "cpu", max_steps=max_steps), itertools.count(), []

    def third_ends_later(obs):
        return torch.tensor([[1], [1], [next(steps) > 16], [1]]).int()

    evaluate(env, {"agent": third_ends_later}, 8, on_progress=lambda *report: reports.append(report))
    first = [(0, "step 0, 0 of 4 episodes ended"), (0.04 if max_steps else 0.375, "step 16, 3 of 4 episodes ended")]
    second = [(0.5, "step 32, 4 of 4 episodes ended"), (0.5, first[0][1]), (1, "step 16, 4 of 4 episodes ended")]
    assert reports == [
        (fraction, f"episodes {'1 to 4' if index < 3 else '5 to 8'} of 8: {text}")
        for index, (fraction, text) in enumerate(first + second)
    ]


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda obs: 0.9, TypeError, ["the function of 'lead': actions are a float", "expected a torch tensor"]),
        (lambda obs: obs[..., 0] + 0.9, TypeError, ["'lead'", "dtype torch.float32", "torch.int32 or torch.int64"]),
        (lambda obs: obs[..., 0] > 0, TypeError, ["'lead'", "dtype torch.bool", "torch.int32 or torch.int64"]),
        (lambda obs: obs[:1, :, 0].long(), ValueError, ["'lead'", "shape (1, 1)", "expected (4, 1)"]),
        (lambda obs: obs[..., :1].long(), ValueError, ["'lead'", "shape (4, 1, 1)", "expected (4, 1)"]),
        (lambda obs: obs[..., 0].long().to("meta"), ValueError, ["'lead'", "are on meta"]),
    ],
)
@pytest.mark.parametrize("play", [evaluate, record])
def test_what_a_function_returns_is_checked_like_any_action(play, returned, error, words, device):
    """Before, a number was broadcast and a fraction cut off, so that a wrong function had a plausible return."""
    env = gpu_vecenv.make(Script, 4, device, num_leads=1, num_others=1)
    with pytest.raises(error) as raised:
        play(env, {"lead": returned, "other": None}, episodes=4)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_what_a_function_of_several_heads_returns_has_the_heads_of_its_role(device):
    """A role with fewer heads than the widest returns its own alone."""
    env = gpu_vecenv.make(Crew, 4, device)
    sizes = env.game.layout.action.sizes
    assert len({len(own) for own in sizes.values()}) > 1

    def zeros(heads):
        return lambda obs: torch.zeros((*obs.shape[:2], heads), dtype=torch.int64, device=obs.device)

    role_policies = {role: zeros(len(own)) for role, own in sizes.items()}
    act = RolePolicies(env, role_policies)
    obs, _ = env.reset(seed=1)
    assert act(obs).shape == env.sample_actions().shape
    for role, own in sizes.items():
        wider = role_policies | {role: zeros(5)}
        count = env.game.layout.roles[role]
        with pytest.raises(ValueError, match=rf"'{role}'.*\(4, {count}, 5\); expected \(4, {count}, {len(own)}\)"):
            RolePolicies(env, wider)(obs)


@pytest.mark.parametrize("value", [2**32, -(2**32), 2**31, 2**63 - 1])
def test_an_int64_that_no_int32_holds_is_no_choice(value, device):
    """2^32 is 0 in 32 bits, which would be valid."""
    env = gpu_vecenv.make(Script, 4, device)
    with pytest.raises(NonFiniteError):
        evaluate(env, {"lead": lambda obs: torch.full(obs.shape[:2], value, device=obs.device), "other": None}, 4)


def test_a_game_policy_stands_for_its_policies(device):
    env = gpu_vecenv.make(Script, 4, device)
    policy = GamePolicy(env.game, Trainer(env, SMALL).policies)
    expected = evaluate(env, policy.policies, 8)
    assert evaluate(env, policy, 8) == expected
    evaluator = Evaluator(env, 4)
    assert evaluator(policy, 8) == expected
    assert evaluator.of_each_episode(policy, 8)["return_lead"].mean().item() == pytest.approx(expected["return_lead"])
    evaluator.close()


@pytest.mark.parametrize(
    ("role_policies", "words"),
    [
        ({"lead": 3, "other": None}, ["the actor of 'lead' is a int", "a Policy, a function"]),
        ([None, None], ["role_policies is a list", "['lead']"]),
        (None, ["role_policies is a NoneType"]),
    ],
)
def test_actors_of_another_kind_are_refused(role_policies, words, device):
    with pytest.raises(TypeError) as raised:
        evaluate(gpu_vecenv.make(Script, 4, device), role_policies, 4)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_an_evaluation_ends_when_a_script_gives_what_no_action_is(device):
    env = gpu_vecenv.make(Script, 4, device)
    with pytest.raises(NonFiniteError):
        evaluate(env, {"lead": lambda obs: torch.full(obs.shape[:2], 4, device=obs.device), "other": None}, 4)
