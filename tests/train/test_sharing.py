"""Who shares a policy: agents with policies of their own, and policies of any agents with equal spaces."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.parity import Parity
from games.scouts import Scouts
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend
from support.training import LEAVING, SMALL, leaving

import gpu_vecenv
from gpu_vecenv import Env, PolicySpec, PPOConfig, Trainer, load_policy
from gpu_vecenv.compile import function_manager
from gpu_vecenv.errors import AgentKeyError, ConfigError
from gpu_vecenv.train.evaluation import RolePolicies, evaluate
from gpu_vecenv.train.policy_specs import names_of_policies
from gpu_vecenv.train.run import names_by_computation
from gpu_vecenv.watch.recording import record

AGENTS = [*(f"tagger_{k}" for k in range(3)), *(f"runner_{k}" for k in range(4))]
APART = ("tagger_0+runner_1+runner_3", "tagger_1", "tagger_2+runner_0+runner_2")  # of neighbours none


def apart(names=APART, **spec):
    return {name: PolicySpec(**spec) for name in names}


LEARNED = {("role", False): (0.45, 0.55), ("agent", False): (0.95, 1.0), ("role", True): (0.95, 1.0)}


@pytest.mark.parametrize(("sharing", "agent_ids"), LEARNED)
@pytest.mark.parametrize("seed", range(2))
def test_agents_that_see_the_same_do_different_things(seed, sharing, agent_ids, device):
    config = PPOConfig(
        total_steps=32 * 8 * 30, num_steps=8, num_minibatches=2, learning_rate=0.03, hidden_sizes=(8,), gamma=0.0
    )
    config = dataclasses.replace(config, agent_ids=agent_ids, entropy_coefficient=0.0)
    trainer = Trainer(gpu_vecenv.make(Parity, 32, device), config, seed=seed, sharing=sharing)
    trainer.train(log_interval=30)
    found, (least, most) = trainer.evaluate(1000), LEARNED[sharing, agent_ids]
    assert least < found["return_agent"] <= most
    if sharing == "agent":
        assert list(trainer.policies) == list(trainer.learners) == ["agent_0", "agent_1"]
        assert min(found["return_agent_0"], found["return_agent_1"]) > least
        first, second = trainer.policies.values()
        obs = trainer.rollout.obs[0, :1, :1]
        assert first.act(obs, greedy=True).item() == 0 and second.act(obs, greedy=True).item() == 1


def test_each_agent_has_a_policy_and_metrics_of_its_own(device):
    trainer = Trainer(leaving(device), SMALL, seed=3, sharing="agent")
    assert list(trainer.policies) == AGENTS == list(trainer.env.game.layout.agent_names)
    tensors = [p for policy in trainer.policies.values() for p in policy.parameters()]
    assert len({p.data_ptr() for p in tensors}) == len(tensors)
    first, second = (trainer.policies[name].network.trunk[0].weight for name in AGENTS[:2])
    assert not first.equal(second)
    metrics = trainer.train_iteration()
    assert all(f"entropy_{name}" in metrics for name in AGENTS) and "entropy_tagger" not in metrics
    found = trainer.evaluate(8)
    for role, own in (("tagger", AGENTS[:3]), ("runner", AGENTS[3:])):
        assert f"return_{role}" in found
        assert sum(found[f"return_{name}"] for name in own) / len(own) == pytest.approx(found[f"return_{role}"])
    acting = trainer.role_policies(["tagger", "runner_2"])
    assert [name for name, policy in acting.items() if policy is None] == [*AGENTS[:3], "runner_2"]
    with pytest.raises(ConfigError, match="expected some of"):
        trainer.role_policies(["tagger_7"])


class Case(NamedTuple):
    """An environment, its policies, and how they are trained."""

    make: object
    policies: tuple
    config: dict = {}  # noqa: RUF012


def game(kind, **arguments):
    return lambda device: gpu_vecenv.make(kind, 6, device, autoreset_mode="next_step", **arguments)


IDS = {"agent_ids": True}
CASES = {
    "kernels": Case(leaving, APART, {"normalize_obs": True, "normalize_returns": True}),
    "two trunks": Case(leaving, APART, {"shared_trunk": False}),
    "agents": Case(leaving, tuple(AGENTS), {"normalize_obs": True}),
    "agent_ids": Case(leaving, APART, IDS),
    "central": Case(leaving, APART, {**IDS, "critic": "central", "normalize_obs": True, "value_norm_beta": 0.99}),
    "recurrent": Case(leaving, APART, {"network": "gru", "sequence_length": 4}),
    "masks": Case(game(Crew, num_helpers=4), ("driver", "helper_0+helper_2", "helper_1+helper_3"), IDS),
    "heads of some": Case(
        game(Economy), ("worker_0+worker_2", "worker_1", *(r for r in Economy().layout.present_roles if r != "worker"))
    ),
    "images": Case(game(Scouts), ("scout_1", "scout_0", "pilot"), {"normalize_obs": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_learners_train_on_what_the_policies_did(name, device):
    """As long as no weight has changed, all ratios are 1 and all values those of the rollout."""
    case = CASES[name]
    config = dataclasses.replace(SMALL, num_minibatches=1, num_epochs=1, **case.config)
    trainer = Trainer(case.make(device), config, policies=apart(case.policies), seed=3)
    assert sorted(trainer.policies) == sorted(case.policies)
    for _ in range(3):
        trainer.begin_iteration()
        data, before = trainer.rollout, {}
        for own, learner in trainer.learners.items():
            agents = list(learner.policy.view.agent_numbers)
            learner.prepare_update(trainer.iteration)
            learner.minibatch_gradient(0)
            _, value_loss, _, approx_kl, clip_fraction = learner.metrics.tolist()
            assert abs(approx_kl) < 1e-6 and clip_fraction == 0
            errors = (data.values[:-1] - data.returns)[:, :, agents][data.active[:-1][:, :, agents]]
            scale = learner.policy.value_scale
            assert value_loss == pytest.approx(0.5 * (errors / scale).square().mean().item(), rel=2e-3, abs=1e-6)
            before[own] = [p.detach().clone() for p in learner.parameters]
            learner.optimizer_step()
            moved = zip(before[own], learner.parameters, strict=True)
            assert any(not a.equal(b) for a, b in moved)
        trainer.end_iteration()


@pytest.mark.parametrize("name", ["kernels", "central", "recurrent", "agents"])
def test_training_resumes_bit_identically_and_its_policies_load(name, device, tmp_path):
    case = CASES[name]
    config = dataclasses.replace(SMALL, **case.config)
    whole, first, second = (Trainer(case.make(device), config, policies=apart(case.policies), seed=5) for _ in "abc")
    first.train_iteration()
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    second.train_iteration()
    for _ in range(2):
        whole.train_iteration()
    assert equal_bits(whole.state()[0], second.state()[0])
    assert not equal_bits(whole.state()[0], first.state()[0])
    policy = load_policy(tmp_path / "run.safetensors", device=device)
    assert set(policy.policies) == set(policy.configs) == set(AGENTS)
    obs, state = whole.rollout.obs[3], None
    if policy.recurrent_state_size:
        state = torch.rand(6, 7, policy.recurrent_state_size, device=device)
    found, expected = policy(obs, state=state, greedy=True), first.policies
    for own in expected.values():
        agents = list(own.view.agent_numbers)
        if state is None:
            assert found[:, agents].equal(own.act(obs[:, agents], greedy=True))
        else:
            actions, following = own.act(obs[:, agents], state=state[:, agents], greedy=True)
            assert found[0][:, agents].equal(actions) and found[1][:, agents].equal(following)
    results = evaluate(whole.env, policy.policies, 6, seed=4)
    assert results == first.evaluate(6, seed=4)
    assert all(f"return_{name}" in results for name in [*AGENTS, "tagger", "runner"])
    first, second = (record(whole.env, actors, episodes=2, seed=1) for actors in (policy, first.role_policies()))
    assert [one.to_bytes() for one in first] == [other.to_bytes() for other in second]


def test_policies_are_found_by_role_and_by_agent(device, tmp_path):
    own = Trainer(leaving(device), SMALL, policies=apart(("tagger_0+tagger_2", "tagger_1", "runner")), seed=1)
    policy = load_policy(own.save(tmp_path / "own.safetensors"), device=device)
    assert set(policy.policies) == {"tagger_0", "tagger_1", "tagger_2", "runner"}
    assert policy["tagger_0"] is policy["tagger_2"] and policy["tagger_0"] is not policy["tagger_1"]
    assert policy["runner"] is policy["runner_3"] and list(policy.policies_of("runner_3")) == ["runner_3"]
    assert set(policy.policies_of("tagger")) == {"tagger_0", "tagger_1", "tagger_2"}
    with pytest.raises(AgentKeyError, match=r"agents of 'tagger' have several policies; expected one of \['tagger_"):
        policy["tagger"]
    with pytest.raises(AgentKeyError, match="no role 'runner_4' with agents; nearest: runner"):
        policy["runner_4"]


def test_actors_of_any_agents_get_their_own_observations(device):
    """Functions, random and trained policies side by side."""
    env = leaving(device)
    trainer, seen = Trainer(env, SMALL, policies=apart(("tagger+runner_0", "runner_1+runner_2+runner_3"))), []

    def act(obs):
        seen.append(obs)
        return torch.full((6, 3, 2), 2, dtype=torch.int64, device=device)

    policy = trainer.policies["tagger+runner_0"]
    actors = RolePolicies(
        env, {"runner_3+tagger_1+runner_0": act, "tagger_0+tagger_2": policy, "runner_1": None, "runner_2": policy}
    )
    obs, _ = env.reset(seed=1)
    actions = actors(obs)
    assert equal_bits(seen[0], obs[:, [1, 3, 6]]) and actions[:, [1, 3, 6]].eq(2).all()
    greedy = RolePolicies(env, {"tagger": policy, "runner_0+runner_2": policy, "runner_1+runner_3": act}, greedy=True)
    with pytest.raises(ValueError, match="the function of 'runner_1\\+runner_3': actions"):
        greedy(obs)
    greedy = RolePolicies(
        env, {"tagger": policy, "runner_0+runner_2": policy, "runner_1": None, "runner_3": None}, greedy=True
    )
    agents = [0, 1, 2, 3, 5]
    assert greedy(obs)[:, agents].equal(policy.act(obs[:, agents], greedy=True))
    for wrong in ({"tagger": None}, {"tagger": None, "runner": None, "runner_1": None}):
        with pytest.raises(ConfigError, match=r"role_policies are for .*; expected each of the roles"):
            RolePolicies(env, wrong)


def test_policies_with_agent_ids_are_evaluated_as_the_agents_that_they_are(device):
    config = dataclasses.replace(SMALL, agent_ids=True)
    trainer = Trainer(leaving(device), config, policies=apart(), seed=3)
    trainer.train_iteration()
    obs = trainer.rollout.obs[-1]
    found = RolePolicies(trainer.env, trainer.role_policies(), greedy=True)(obs)
    for policy in trainer.policies.values():
        agents = list(policy.view.agent_numbers)
        assert found[:, agents].equal(policy.act(obs[:, agents], greedy=True))
    fewer = gpu_vecenv.make("tag_continuous", 2, device, **{**LEAVING, "num_runners": 2})
    with pytest.raises(ConfigError, match="with agent_ids, is of 3 agents; the game has 1 of tagger_0"):
        RolePolicies(
            fewer, {"tagger_0": trainer.policies[APART[0]], "tagger_1": None, "tagger_2": None, "runner": None}
        )


class Clash(Env):
    """An agent of one role has the name of another role; never stepped."""

    roles = {"a": 1, "a_0": 1}  # noqa: RUF012
    obs_dim = 1
    action_space = Parity.action_space


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharing": "agents"}, 'sharing is \'agents\'; expected "role" or "agent" or "all"'),
        ({"sharing": ["agent"]}, 'expected "role" or "agent"'),
        ({"sharing": "agent", "policies": apart(("tagger", "runner"))}, "sharing is 'agent', but policies are given"),
        (
            {"policies": apart(("tagger", "runner_0"))},
            r"expected each of the roles \['tagger', 'runner'\] once, or each",
        ),
        ({"policies": apart(("tagger", "runner", "tagger_0"))}, "expected each of the roles"),
        ({"policies": apart(("tagger+tagger_0", "runner"))}, "has tagger_0 of TagContinuous twice"),
        ({"policies": apart(("tagger", "runner", "tagger_3"))}, "unknown role 'tagger_3' of .*; nearest: tagger_"),
    ],
)
def test_what_is_refused(arguments, message, device):
    with pytest.raises(ConfigError, match=message):
        Trainer(leaving(device), SMALL, **arguments)


def test_a_role_has_the_name_of_an_agent():
    assert names_of_policies(Clash(), "role") == ["a", "a_0"] and names_of_policies(Clash(), "all") == ["a+a_0"]
    with pytest.raises(ConfigError, match="'a_0' is a role and an agent of Clash"):
        names_of_policies(Clash(), "agent")


@pytest.mark.parametrize("sharing", [pytest.param("agent", marks=pytest.mark.slow), "all"])
def test_more_policies_than_fit_in_shared_memory_take_several_launches(sharing, monkeypatch):
    """On emulated CUDA threads; all else stays with kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        env = gpu_vecenv.make("tag_gridworld", 2, "cpu", num_taggers=20, autoreset_mode="next_step")
        trainer = Trainer(env, dataclasses.replace(SMALL, hidden_sizes=(64, 64)), sharing=sharing)
    assert trainer.by_kernels and set(trainer.unfused_reasons.values()) == {None}
    assert trainer.rollout_reason == (None if sharing == "all" else "networks too large for shared memory")


def test_a_run_lists_many_policies_in_one_line(device):
    few = Trainer(leaving(device), SMALL, policies=apart())
    assert list(names_by_computation(few).values()) == [list(APART)]
    mixed = apart(("tagger", "runner")) | {"tagger": PolicySpec(config=dataclasses.replace(SMALL, critic="central"))}
    found = names_by_computation(Trainer(leaving(device), SMALL, policies=mixed))
    assert found.pop("torch (a central critic)") == ["tagger"] and list(found.values()) == [["runner"]]


TINY = (
    "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu --episodes 2".split()
)
TAG = ["train", "tag_gridworld", "--num-taggers", 2, "--max-steps", 11, "--grid", 4, *TINY]


def test_on_the_command_line(command):
    changes = {"tagger": {"gamma": 0.5, "clip": 0.3}, "tagger_1": {"clip": 0.1}}
    options = ("--sharing", "agent", "--policies", json.dumps(changes), "--total-steps", 16, "--out", "run")
    code, _, errors = command(*TAG, *options)
    assert code == 0, errors
    found = {name: (config.gamma, config.clip) for name, config in load_policy("run").configs.items()}
    assert found == {"tagger_0": (0.5, 0.3), "tagger_1": (0.5, 0.1), "runner_0": (PPOConfig().gamma, 0.2)}
    results = json.loads(Path("run/evaluation.json").read_text())
    assert {"return_tagger", "return_tagger_1"} <= set(results["all trained"])
    assert command("train", "--resume", "run", "--total-steps", 32)[0] == 0
    evaluation = "evaluate", "run", "--episodes", 4, "--device", "cpu", "--json"
    alone = json.loads(command(*evaluation)[1])
    random = json.loads(command(*evaluation, "--opponents", "tagger_0=random")[1])
    assert {name for name in alone if name.startswith("return")} == {
        name for name in random if name.startswith("return")
    }
    assert alone["return_tagger"] != random["return_tagger"]
    again = json.loads(command(*evaluation, "--opponents", "tagger=run")[1])
    assert again == alone | {"opponents": ["tagger=run"]}
    code, _, errors = command(*evaluation, "--opponents", "tagger_2=random")
    assert code and "unknown role or agent 'tagger_2' in opponents" in "".join(errors)
    code, _, errors = command(*TAG, "--frozen", "tagger=run", "--total-steps", 16, "--out", "frozen")
    assert code == 0, errors
    policy, frozen = load_policy("run"), load_policy("frozen")
    assert set(frozen.policies) == {"tagger_0", "tagger_1", "runner"}
    for name in ("tagger_0", "tagger_1"):
        assert equal_bits(policy[name].state_dict(), frozen[name].state_dict())
    assert command("replay", "record", "frozen", "--device", "cpu")[0] == 0
    code, _, errors = command("export", "run", "--format", "torchscript", "--out", "exported")
    assert code == 0, errors
    described = json.loads(Path("exported/policy.json").read_text())["policies"]
    assert described["tagger_1"]["agents"] == ["tagger_1"] and described["tagger_1"]["roles"] == ["tagger"]


def test_opponents_of_some_agents_of_a_policy(command):
    assert command(*TAG, "--sharing", "all", "--total-steps", 16, "--out", "run")[0] == 0
    assert set(load_policy("run").policies) == {"tagger", "runner"}
    evaluation = "evaluate", "run", "--episodes", 4, "--device", "cpu", "--json"
    alone = json.loads(command(*evaluation)[1])
    mixed = json.loads(command(*evaluation, "--opponents", "tagger_1=run")[1])
    assert {name: mixed[name] for name in alone} == alone | {"opponents": ["tagger_1=run"]}
    assert set(mixed) - set(alone) == {
        f"{name}_tagger_{agent}" for name in ("return", "worst_return") for agent in (0, 1)
    }
