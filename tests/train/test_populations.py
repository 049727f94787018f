"""Populations: which environments a member has, whose samples it learns from, resumes, metrics, what is refused."""

import dataclasses
import math

import pytest
import torch
from games.race import Race
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend
from torch import nn

import gpu_vecenv
from gpu_vecenv import OpponentsConfig, PolicySpec, PPOConfig, PQNConfig, Trainer, VecEnv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.env_ranges import EnvRanges, all_envs

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = PPOConfig(
    total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=2, hidden_sizes=(8,), normalize_returns=True
)
KINDS = {
    "kernels": TINY,
    "gru": dataclasses.replace(TINY, network="gru", sequence_length=4, normalize_returns=False, value_norm_beta=0.9),
    "central": dataclasses.replace(TINY, critic="central", agent_ids=True, normalize_obs=True),
}
ENVS = 24
TAG = {"tagger": PolicySpec(population=3), "runner": PolicySpec(population=2)}
# Cells of 4 environments: of each member of "tagger" one range of two cells, of "runner" every second cell.
OF = {f"tagger_p{k}": [*range(8 * k, 8 * k + 8)] for k in range(3)} | {
    f"runner_p{k}": [env for cell in range(3) for env in range(8 * cell + 4 * k, 8 * cell + 4 * k + 4)]
    for k in range(2)
}


def trainer(device, config=TINY, policies=TAG, game="tag_gridworld", num_envs=ENVS, seed=3, first=0, **options):
    settings = {"max_steps": 5, "grid": 3} if game == "tag_gridworld" else {}
    game = gpu_vecenv.configure(game, **settings) if isinstance(game, str) else game
    env = VecEnv(game, num_envs, device, autoreset_mode="next_step", first_env_index=first)
    return Trainer(env, config, policies=policies, seed=seed, **options)


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def equal_weights(one, other):
    return equal_bits(list(weights(one).values()), list(weights(other).values()))


# Environments


def test_rows_of_ranges():
    two, numbers = EnvRanges((0, 4), 2), torch.arange(16).view(8, 2)
    assert two.of(numbers).tolist() == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert two.of(torch.arange(8)[None], 1).tolist() == [[0, 1, 4, 5]]
    assert two.positions(8).tolist() == [0, 1, 0, 0, 2, 3, 0, 0]
    for own, part in two.parts(two.of(numbers)):
        assert part.equal(numbers[own])
    assert all_envs(8).of(numbers).data_ptr() == numbers.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_learns_from_its_environments_alone_and_each_sample_has_one(kind, device):
    one = trainer(device, KINDS[kind])
    one.train_iteration()
    assert list(one.policies) == list(one.learners) == list(OF)
    assert one.populations == {"tagger": 3, "runner": 2}
    samples = torch.arange(one.rollout.rewards.numel()).view(one.rollout.rewards.shape)
    found = []
    for name, learner in one.learners.items():
        expected = samples[:, OF[name], learner.policy.view.agents].flatten()
        assert learner.indices.cpu().equal(expected)
        assert learner.order.cpu().sort().values.equal(expected.sort().values)  # of the last epoch
        found += expected.tolist()
    assert sorted(found) == samples.flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_members_act_in_their_environments(kind, device):
    one = trainer(device, KINDS[kind])
    for _ in range(2):
        one.train_iteration()
    data, t = one.rollout, -1
    before = {name: states.current.clone() for name, states in one.states.items()}
    one._parameters.fill_(torch.nan)
    data.values[t].fill_(torch.nan)
    for forward in one._forward_passes:
        forward.finish()
        forward(t)
    for name, policy in one.policies.items():
        view, envs = policy.view, OF[name]
        context = gpu_vecenv.train.central_critic.Context(
            None if policy.critic is None else data.critic_states()[t][envs]
        )
        state = (before[name],) if name in before else ()
        outputs, values, *_ = policy(view.obs(data.obs[t][envs]), *state, context=context)
        own = one._parameters[envs][:, view.agents][..., view.parameter_columns]
        # By other kernels, or in other products: not bitwise.
        torch.testing.assert_close(own, outputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(data.values[t][envs][:, view.agents], values, rtol=1e-4, atol=1e-5)


def test_kernels_of_tensor_cores_act_and_learn_in_the_environments_of_a_member(monkeypatch):
    """On emulated CUDA threads."""
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        one = trainer("cpu", dataclasses.replace(TINY, num_steps=2, num_epochs=1))
    assert one.by_kernels and set(one.unfused_reasons.values()) == {None} and one.rollout_reason is None
    before = {name: weights(policy) for name, policy in one.policies.items()}
    one.train_iteration()
    for name, policy in one.policies.items():
        assert not equal_bits(before[name], weights(policy))
    one._parameters.fill_(torch.nan)
    for forward in one._forward_passes:
        forward(-1)
    for name, policy in one.policies.items():
        view = policy.view
        outputs, _ = policy(view.obs(one.rollout.obs[-1][OF[name]]))
        # Mantissas of TF32 have 10 bits.
        torch.testing.assert_close(one._parameters[OF[name]][:, view.agents], outputs, rtol=2e-2, atol=2e-3)


def test_policies_beside_a_population_have_all_environments(device):
    policies = {"tagger": PolicySpec(), "runner": PolicySpec(population=3)}
    one = trainer(device, policies=policies)
    assert list(one.policies) == ["tagger", "runner_p0", "runner_p1", "runner_p2"]
    assert one.learners["tagger"].envs == all_envs(ENVS)
    assert [one.members[f"runner_p{k}"].envs for k in range(3)] == [EnvRanges((8 * k,), 8) for k in range(3)]
    metrics = one.train_iteration()
    assert "return_tagger" in metrics and "policy_loss_runner_p2" in metrics


def test_members_have_initial_weights_of_their_own(device):
    one = trainer(device)
    first = [next(policy.parameters()) for policy in one.policies.values()]
    assert not any(a.equal(b) for k, a in enumerate(first) for b in first[:k] if a.shape == b.shape)


# What a member learns


@pytest.mark.parametrize("kind", ["mlp", "gru", "normalizers"])
def test_a_population_without_others_trains_as_runs_of_its_members_would(kind, device):
    config = dataclasses.replace(TINY, normalize_obs=kind == "normalizers")
    config = dataclasses.replace(config, network="gru" if kind == "gru" else "mlp", staggered_starts=False)
    both = trainer(device, config, {"agent": PolicySpec(population=2)}, "cartpole", 16)
    starts = [weights(policy) for policy in both.policies.values()]
    half = dataclasses.replace(config, total_steps=config.total_steps // 2)  # as many iterations
    alone = [
        trainer(device, half, {"agent": PolicySpec(weights=start)}, "cartpole", 8, first=8 * k)
        for k, start in enumerate(starts)
    ]
    for _ in range(6):
        both.train_iteration()
        for one in alone:
            one.train_iteration()
    for k, one in enumerate(alone):
        assert not equal_bits(list(starts[k].values()), list(weights(one.policies["agent"]).values()))
        assert equal_weights(both.policies[f"agent_p{k}"], one.policies["agent"])
        assert equal_bits(both.rollout.obs[:, 8 * k : 8 * k + 8], one.rollout.obs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_member_learns_does_not_depend_on_those_that_it_does_not_meet(kind, device):
    policies = {"tagger": PolicySpec(population=3), "runner": PolicySpec(train=False)}
    one, other = (trainer(device, KINDS[kind], policies) for _ in range(2))
    with torch.no_grad():
        for parameter in other.policies["tagger_p1"].parameters():
            parameter.mul_(1.5)
    for _ in range(3):
        one.train_iteration()
        other.train_iteration()
    assert equal_weights(one.policies["tagger_p0"], other.policies["tagger_p0"])
    assert equal_weights(one.policies["tagger_p2"], other.policies["tagger_p2"])
    assert not equal_weights(one.policies["tagger_p1"], other.policies["tagger_p1"])
    of_others = [env for env in range(ENVS) if env not in OF["tagger_p1"]]
    assert equal_bits(one.rollout.obs[:, of_others], other.rollout.obs[:, of_others])


def test_statistics_of_returns_change_the_values_of_a_member_alone(device):
    one = trainer(device, KINDS["gru"])
    one.train_iteration()
    one.begin_iteration()
    before = one.rollout.values.clone()
    one.learners["runner_p1"].minibatch_gradient(0)
    changed = (one.rollout.values != before)[:-1].any(0).cpu()
    expected = torch.zeros_like(changed)
    expected[OF["runner_p1"], -1] = True
    assert changed.equal(expected) and one.rollout.values[-1].equal(before[-1])


# Checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bitwise_equal(kind, device, tmp_path):
    one, other = (trainer(device, KINDS[kind], seed=seed) for seed in (3, 3))
    for _ in range(2):
        one.train_iteration()
    one.save(tmp_path / "middle")
    one.train_iteration()
    other.load(tmp_path / "middle")
    other.train_iteration()
    (tensors, _), (found, _) = one.state(), other.state()
    assert list(tensors) == list(found)
    assert all(equal_bits(tensor, found[name]) for name, tensor in tensors.items())


def test_a_checkpoint_of_another_population_is_refused(device, tmp_path):
    trainer(device).save(tmp_path / "one")
    other = trainer(device, policies={"tagger": PolicySpec(population=2), "runner": PolicySpec(population=3)})
    before = {name: tensor.clone() for name, tensor in other.state()[0].items()}
    with pytest.raises(ConfigError, match="populations"):
        other.load(tmp_path / "one")
    assert all(equal_bits(tensor, before[name]) for name, tensor in other.state()[0].items())
    assert trainer(device, policies=None).state()[1]["populations"] is None


# Metrics and evaluations


def test_returns_of_members_are_means_over_their_environments(device):
    config = dataclasses.replace(TINY, staggered_starts=False)
    one = trainer(device, config)
    metrics = one.train_iteration()
    latest, names = one.episode_log.latest.cpu(), one.episode_log.names
    for name, envs in OF.items():
        role = name.partition("_")[0]
        returns = latest[envs, names.index(f"return_{role}")]
        assert metrics[f"return_{name}"] == pytest.approx(returns.sum().item() / latest[envs, -1].sum().item())
    assert len({metrics[f"return_tagger_p{k}"] for k in range(3)}) > 1


def test_returns_of_a_member_are_nan_until_all_its_environments_ended_an_episode(device):
    one = trainer(device, dataclasses.replace(TINY, num_steps=2, staggered_starts=False))
    known = set()
    for _ in range(3):
        metrics = one.train_iteration()
        for name, envs in OF.items():
            ended = bool((one.episode_log.latest[envs, -1] > 0).all())
            known.add(ended)
            assert math.isfinite(metrics[f"return_{name}"]) == ended
    assert known == {False, True}


def test_evaluations_take_the_members_of_a_number(device):
    policies = {"tagger": PolicySpec(population=2), "runner": PolicySpec()}
    one = trainer(device, policies=policies)
    assert one.role_policies() == {"tagger": one.policies["tagger_p0"], "runner": one.policies["runner"]}
    assert one.role_policies(["runner"], 1) == {"tagger": one.policies["tagger_p1"], "runner": None}
    with torch.no_grad():
        next(one.policies["tagger_p1"].network.actor.parameters()).mul_(100)
    assert one.evaluate(24, member=0) != one.evaluate(24, member=1)
    with pytest.raises(ConfigError, match="member is 2; expected 0 to 1: tagger has 2"):
        one.evaluate(24, member=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shared_trunk": False}, "a population whose actor and critic share no layers"),
        ({"critic": "central"}, "a population beside a central critic"),
    ],
)
def test_the_log_says_why_a_rollout_takes_several_launches(changes, reason, device_of_networks):
    assert trainer(device_of_networks, dataclasses.replace(TINY, **changes)).rollout_reason == reason


@pytest.mark.parametrize("policies", [TAG, {"tagger": PolicySpec(), "runner": PolicySpec(population=4)}])
def test_a_rollout_in_one_launch_is_that_of_several(policies, device_of_networks):
    config = dataclasses.replace(TINY, learning_rate=0.1, normalize_obs=True)
    fused, stepwise = (trainer(device_of_networks, config, policies, num_envs=36) for _ in range(2))
    assert fused.rollout_reason is None
    stepwise._fused_rollout = None
    for _ in range(3):
        for one in (fused, stepwise):
            one.train_iteration()
        for name in ("obs", "rewards", "draws", "log_probs", "terminations", "values", "advantages"):
            assert equal_bits(getattr(fused.rollout, name), getattr(stepwise.rollout, name)), name
        for name, policy in fused.policies.items():
            assert equal_weights(policy, stepwise.policies[name])


def test_populations_of_fewer_members_begin_anew(device):
    one = trainer(device)
    assert [one.acting_members(k) for k in range(3)] == [
        ["tagger_p0", "runner_p0"],
        ["tagger_p1", "runner_p1"],
        ["tagger_p2", "runner_p0"],
    ]


# What is refused


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_envs": 20}, "num_envs is 20; expected a multiple of 3 x 2 = 6"),
        ({"opponents": OpponentsConfig()}, "tagger has a population of 3.* opponents are given"),
        ({"config": PQNConfig(num_steps=8, hidden_sizes=(8,))}, "with a PQNConfig; expected a PPOConfig"),
    ],
)
def test_what_populations_do_not_support(options, expected, device):
    with pytest.raises(ConfigError, match=expected):
        trainer(device, **options)


def test_a_population_has_default_networks():
    with pytest.raises(ConfigError, match="population is 2 with a network, a Linear"):
        PolicySpec(network=nn.Linear(2, 2), population=2)
    with pytest.raises(ValueError, match="population is 0; expected an int >= 1"):
        PolicySpec(population=0)
    with pytest.raises(TypeError, match="population is '2'"):
        PolicySpec(population="2")


def test_a_curriculum_does_not_change_the_discounts_of_members(device):
    curriculum = gpu_vecenv.Curriculum(config={"gae_lambda": lambda progress: 0.9})
    with pytest.raises(ConfigError, match="config has 'gae_lambda'"):
        trainer(device, curriculum=curriculum)
    curriculum = gpu_vecenv.Curriculum(config={"clip_tagger_p1": lambda progress: 0.1})
    assert trainer(device, curriculum=curriculum).train_iteration()["curriculum_clip_tagger_p1"] == pytest.approx(0.1)
    curriculum = gpu_vecenv.Curriculum(config={"clip_tagger": lambda progress: 0.1})
    metrics = trainer(device, curriculum=curriculum).train_iteration()
    assert {name for name in metrics if name.startswith("curriculum_")} == {
        f"curriculum_clip_tagger_p{k}" for k in range(3)
    }
    alone = {"tagger": PolicySpec(population=3), "runner": PolicySpec()}
    with pytest.raises(ConfigError, match=r"'gae_lambda', which cannot change in tagger_p0, .*\['gae_lambda_runner'\]"):
        trainer(device, policies=alone, curriculum=gpu_vecenv.Curriculum(config={"gae_lambda": lambda progress: 0.9}))


def test_a_population_of_agents_that_share_a_policy(device):
    one = trainer(device, policies={"player": PolicySpec(population=2)}, game=Race(), num_envs=8)
    assert list(one.policies) == ["player_p0", "player_p1"]
    one.train_iteration()
    assert one.learners["player_p1"].indices.numel() == one.rollout.rewards.numel() // 2
