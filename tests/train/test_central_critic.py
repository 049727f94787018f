"""A central critic sees what all agents see, and agents act without it; numbers of agents among the inputs."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from support.cases import mostly_exhaustive
from support.learning import batch_of
from support.training import LEAVING, SMALL, leaving
from torch import nn

import gpu_vecenv
from gpu_vecenv import Env, Field, PolicySpec, PPOConfig, Trainer
from gpu_vecenv.declare.field import f32, i32
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.evaluation import RolePolicies
from gpu_vecenv.train.ppo import loss, masked_normalize
from gpu_vecenv.train.rollout_context import RolloutContext

SECRETS = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { FOR_AGENTS(i) s.secret[i] = io.rng.uniform(i, 0) < 0.5f ? -1.0f : 1.0f; }
HD void step(State s, Io io) {
    FOR_AGENTS(i) {
        io.rewards[i] = (float)(i + 1) * s.secret[0] * s.secret[1];
        io.terminations[i] = io.elapsed_steps >= MAX_STEPS;
    }
}
HD void observe(State s, Io io) { FOR_AGENTS(i) io.obs[i][0] = s.secret[i]; }
"""
CENTRAL = dataclasses.replace(SMALL, critic="central", normalize_obs=True, normalize_returns=True)


@dataclass(frozen=True, kw_only=True)
class Secrets(Env):
    """Each agent sees a sign of its own, and is paid its number times the product of the first two agents' signs."""

    max_steps: int = 2
    roles = {"first": 1, "others": 2}  # noqa: RUF012
    state = (Field("secret", f32, ("num_agents",)),)
    obs_dim = 1
    action_space = Discrete(2)


@dataclass(frozen=True, kw_only=True)
class Declared(Secrets):
    """Its critics see the signs and the step's number."""

    state = (Field("secret", f32, ("num_agents",)), Field("age", i32))
    critic_state = ("age", "secret")


@dataclass(frozen=True, kw_only=True)
class Apart(Secrets):
    """Each agent's critic sees the step's number, then the agent's own sign and its sum with the next agent's."""

    max_steps: int = 3
    roles = {"first": 2, "others": 3}  # noqa: RUF012
    state = (Field("secret", f32, ("num_agents",)), Field("age", i32), Field("pair", f32, ("num_agents", 2)))
    critic_state = ("age",)
    agent_critic_state = ("secret", "pair")


APART = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) {
    ONCE { s.age[0] = 0; }
    FOR_AGENTS(i) s.secret[i] = io.rng.uniform(i, 0) < 0.5f ? -1.0f : 1.0f;
    group_sync();
    FOR_AGENTS(i) { s.pair[i][0] = s.secret[i] + 2 * s.secret[(i + 1) % NUM_AGENTS]; s.pair[i][1] = (float)i; }
}
HD void step(State s, Io io) {
    ONCE { s.age[0] += 3; }
    FOR_AGENTS(i) {
        io.rewards[i] = s.pair[i][0];
        io.terminations[i] = io.elapsed_steps >= MAX_STEPS || (i == 3 && s.secret[i] > 0);
    }
}
HD void observe(State s, Io io) { FOR_AGENTS(i) io.obs[i][0] = s.secret[i]; }
"""


@pytest.fixture
def secrets(tmp_path, monkeypatch):
    (tmp_path / "apart.cu").write_text(APART)
    monkeypatch.setattr(Apart, "source", tmp_path / "apart.cu", raising=False)
    (tmp_path / "secrets.cu").write_text(SECRETS)
    aged = SECRETS.replace("FOR_AGENTS(i) s.secret", "ONCE { s.age[0] = 0; } FOR_AGENTS(i) s.secret")
    aged = aged.replace("HD void step(State s, Io io) {", "HD void step(State s, Io io) { ONCE { s.age[0] += 3; }")
    (tmp_path / "aged.cu").write_text(aged)
    monkeypatch.setattr(Declared, "source", tmp_path / "aged.cu", raising=False)
    monkeypatch.setattr(Secrets, "source", tmp_path / "secrets.cu", raising=False)


EXPLAINED = {  # variance of returns, of the first agent and of the others, at most and at least
    ("own", True): ((-1.0, 0.3), (-1.0, 0.3)),
    ("central", False): ((0.99, 1.0), (0.9, 0.98)),  # both are given 2.5 of 2 and 3: 1 - 0.25 / 6.5 = 0.96
    ("central", True): ((0.99, 1.0), (0.99, 1.0)),
}


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize(("critic", "agent_ids"), EXPLAINED)
@pytest.mark.parametrize("seed", mostly_exhaustive(range(5), [0]))
def test_a_central_critic_explains_what_no_agent_sees(seed, critic, agent_ids, device):
    config = PPOConfig(
        total_steps=32 * 6 * 32,
        num_steps=6,
        num_epochs=6,
        num_minibatches=1,
        learning_rate=0.03,
        gamma=0.0,
        hidden_sizes=(32,),
        critic=critic,
        agent_ids=agent_ids,
    )
    trainer = Trainer(gpu_vecenv.make(Secrets, 32, device), config, seed=seed)
    metrics = trainer.train(log_interval=31)  # the last metrics are of one iteration
    for role, (least, most) in zip(("first", "others"), EXPLAINED[critic, agent_ids], strict=True):
        assert least < metrics[f"explained_variance_{role}"] <= most


@pytest.mark.parametrize("agent_ids", [False, True])
def test_the_state_is_all_observations_and_actors_keep_to_their_own(agent_ids, device):
    config = dataclasses.replace(CENTRAL, agent_ids=agent_ids)
    trainer = Trainer(leaving(device), config, seed=3)
    trainer.train_iteration()
    policy, data = trainer.policies["runner"], trainer.rollout
    context, t = RolloutContext(policy, data, 50), 5
    state = context.of_step(t).state
    assert state.shape == (6, 1, 7 * data.obs.shape[-1])
    assert state[2, 0].equal(data.obs[t, 2].flatten())
    obs = policy.view.obs(data.obs[t])
    parameters, values = policy(obs, context=context.of_step(t))
    assert parameters.equal(policy.parameters_of(obs)) and values.shape == (6, 4)
    others = Context(state.flip(0))
    assert policy(obs, context=others)[0].equal(parameters) and not policy(obs, context=others)[1].equal(values)
    assert (values[:, 1:] == values[:, :1]).all() != agent_ids
    # The same agents' samples, in any order.
    at = torch.arange(data.rewards.numel(), device=device).view_as(data.rewards)[t, :, policy.view.agents].flatten()
    order = torch.randperm(len(at)).to(device)
    samples = policy(obs.flatten(0, 1)[order], context=context.of_samples(at[order]))
    torch.testing.assert_close(samples, (parameters.flatten(0, 1)[order], values.flatten()[order]))


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("agent_ids", [False, True])
@pytest.mark.parametrize(("game", "chunk_rows"), [(Apart, 2**20), (Apart, 70), (Declared, 60)])
def test_values_of_all_steps_are_those_of_each(game, chunk_rows, agent_ids, device):
    """They are computed some steps at once: 4 of 9 by the minibatches, or 2 or 3 by the chunks."""
    config = dataclasses.replace(CENTRAL, num_minibatches=2, chunk_rows=chunk_rows, agent_ids=agent_ids)
    trainer = Trainer(gpu_vecenv.make(game, 6, device), config, seed=3)
    trainer.train_iteration()
    data = trainer.rollout
    data.values.fill_(torch.nan)
    for forward in trainer._forward_passes:
        forward.finish()
    for policy in trainer.policies.values():
        context, agents = RolloutContext(policy, data, 50), policy.view.agents
        values = [policy(policy.view.obs(obs), context=context.of_step(t))[1] for t, obs in enumerate(data.obs)]
        # By products of other sizes.
        torch.testing.assert_close(data.values[:, :, agents], torch.stack(values), rtol=1e-4, atol=1e-5)
    assert data.values.isfinite().all() and data.values.flatten().unique().numel() > 20


GAMES = {  # of the environments, of the policies, and of the options
    "agents leave": (leaving, None, {}),
    "one policy": (leaving, ("tagger+runner",), {"agent_ids": True}),
    "agents apart": (leaving, ("tagger_1+runner", "tagger_2+tagger_0"), {"agent_ids": True}),
    "rows of agents": (lambda device: gpu_vecenv.make(Apart, 6, device), None, {"agent_ids": True}),
    "small chunks": (leaving, None, {"agent_ids": True, "chunk_rows": 50}),
    "masks, other spaces": (partial(gpu_vecenv.make, Crew, 6), None, {"agent_ids": True}),
    "images, a box": (partial(gpu_vecenv.make, Painter, 6), None, {"normalize_obs": False, "squash": "tanh"}),
    "bfloat16": (leaving, None, {"agent_ids": True, "precision": "bfloat16"}),
}


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("name", GAMES)
def test_gradients_are_those_of_the_loss_in_torch(name, device):
    make, names, options = GAMES[name]
    env = make(device)
    config = dataclasses.replace(CENTRAL, num_minibatches=1, **options)
    trainer = Trainer(env, config, seed=3, policies=None if names is None else {name: PolicySpec() for name in names})
    trainer.begin_iteration()
    learner = next(reversed(trainer.learners.values()))
    learner.prepare_update(0)
    learner.minibatch_gradient(0)
    policy, data, indices = learner.policy, trainer.rollout, learner.order
    active, raw = data.active[:-1].flatten()[indices], data.advantages.flatten()[indices]
    batch = batch_of(data, policy.view, indices, masked_normalize(raw, active))
    context = RolloutContext(policy, data, len(indices)).of_samples(indices)
    total, metrics = loss(policy, batch._replace(context=context), config)
    expected = torch.autograd.grad(total, learner.parameters)
    # Sums in another order; in bfloat16 a sum may cross a boundary of rounding.
    within = {"rtol": 0.02, "atol": 2e-3} if name == "bfloat16" else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(learner.metrics, metrics, **within)
    for gradient, reference in zip(learner.grads, expected, strict=True):
        torch.testing.assert_close(gradient, reference, **within)
    assert learner.grads[-1].abs().max() > 0  # of the critic's head


def test_statistics_of_states_are_of_all_steps_with_active_agents(device):
    trainer = Trainer(leaving(device), CENTRAL, seed=3)
    seen = []
    for _ in range(3):
        trainer.train_iteration()
        data = trainer.rollout
        seen.append(data.obs[:-1].flatten(2)[data.active[:-1, :, 3:].any(-1)].double().clone())
    normalizer, rows = trainer.policies["runner"].state_normalizer, torch.cat(seen)
    assert len(rows) < 3 * 8 * 6 and normalizer.count.item() == pytest.approx(len(rows))
    torch.testing.assert_close(normalizer.mean, rows.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalizer.var, rows.var(0, correction=0), rtol=1e-4, atol=1e-4)


def test_a_run_resumes_bit_identically_and_loads(device, tmp_path):
    config = dataclasses.replace(CENTRAL, agent_ids=True)
    whole, first, second = (Trainer(leaving(device), config, seed=seed) for seed in (5, 5, 5))
    for _ in range(2):
        first.train_iteration()
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    for _ in range(2):
        second.train_iteration()
    for _ in range(4):
        whole.train_iteration()
    assert equal_bits(whole.state()[0], second.state()[0])
    policy = gpu_vecenv.load_policy(tmp_path / "run.safetensors", device=device)
    own = first.policies["runner"]
    obs = own.view.obs(whole.rollout.obs[0])
    assert policy["runner"].parameters_of(obs).equal(own.parameters_of(obs))
    assert policy(whole.rollout.obs[0], whole.rollout.action_mask, greedy=True).shape[:2] == (6, 7)
    assert whole.evaluate(4)["episodes"] >= 4


@pytest.mark.usefixtures("secrets")
def test_a_state_that_the_game_declares(device):
    """Row t of the rollout has the state before step t, that of an episode's end included."""
    trainer = Trainer(gpu_vecenv.make(Declared, 6, device, max_steps=3), CENTRAL, seed=1)
    for _ in range(3):
        trainer.train_iteration()
        data = trainer.rollout
        states = data.critic_states()
        assert states.shape == (9, 6, 1, 4) and states[:, :, 0, 1:].equal(data.obs[..., 0])
        ages, ended = states[:, :, 0, 0], data.terminations[:, :, 0]
        assert ages[1:].where(~ended, 9).eq(9).eq(ended).all()
        resets = ~data.active[:-1, :, 0]
        assert (ages[1:] == torch.where(resets, 0, ages[:-1] + 3)).all() and resets.any()
    assert trainer.policies["first"].critic.trunk[0].in_features == 4
    assert Trainer(gpu_vecenv.make(Declared, 6, device), SMALL).rollout.critic_states().shape == (9, 6, 1, 3)


def signs_of(data):
    """What each agent's critic sees at each step but for the step's number, from the observations."""
    signs = data.obs[..., 0]
    numbers = torch.arange(signs.shape[-1], device=signs.device).float()
    return torch.stack([signs, signs + 2 * signs.roll(-1, -1), numbers.expand_as(signs)], -1)


POLICIES = [None, {"first_0+others_2": PolicySpec(), "first_1+others_0+others_1": PolicySpec()}]


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("agent_ids", [False, True])
def test_a_critic_sees_the_rows_of_its_agent(policies, agent_ids, device):
    config = dataclasses.replace(CENTRAL, agent_ids=agent_ids)
    trainer, seen = Trainer(gpu_vecenv.make(Apart, 6, device), config, policies=policies, seed=1), {}
    for _ in range(3):
        trainer.train_iteration()
        data = trainer.rollout
        states = data.critic_states()
        assert states.shape == (9, 6, 5, 4) and states[..., 1:].equal(signs_of(data))
        resets = ~data.active[:-1].any(-1)
        ages = states[..., 0]
        assert ages.eq(ages[..., :1]).all() and resets.any()
        assert (ages[1:, :, 0] == torch.where(resets, 0, ages[:-1, :, 0] + 3)).all()
        for name, policy in trainer.policies.items():
            agents = list(policy.view.agent_numbers)
            own = states[:-1, :, agents][data.active[:-1, :, agents]].double().clone()
            seen.setdefault(name, []).append(own)
    for name, policy in trainer.policies.items():
        agents, context = list(policy.view.agent_numbers), RolloutContext(policy, data, 50)
        assert policy.critic.trunk[0].in_features == 4 + len(agents) * agent_ids
        t = 5
        assert context.of_step(t).state.equal(states[t, :, agents])
        at = torch.arange(data.rewards.numel(), device=device).view_as(data.rewards)[t, :, agents].flatten()
        order = torch.randperm(len(at)).to(device)
        assert context.of_samples(at[order]).state.equal(states[t, :, agents].flatten(0, 1)[order])
        normalizer, rows = policy.state_normalizer, torch.cat(seen[name])
        assert normalizer.count.item() == pytest.approx(len(rows)) and len(rows) < 3 * 8 * 6 * len(agents)
        torch.testing.assert_close(normalizer.mean, rows.mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(normalizer.var, rows.var(0, correction=0), rtol=1e-4, atol=1e-4)
    assert trainer.evaluate(2)["episodes"] >= 2


@pytest.mark.usefixtures("secrets")
def test_a_critic_explains_what_depends_on_its_agent(device):
    """A value of another agent's row explains half of the variance, 5, at most: one of two signs is common to both."""
    config = PPOConfig(
        total_steps=64 * 6 * 40, num_steps=6, num_epochs=6, num_minibatches=1, learning_rate=0.03, gamma=0.0
    )
    config = dataclasses.replace(config, hidden_sizes=(32,), critic="central")
    trainer = Trainer(gpu_vecenv.make(Apart, 64, device), config, seed=1, sharing="all")
    metrics = trainer.train(log_interval=39)
    assert metrics["explained_variance_first+others"] > 0.98


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("age",), r"agent_critic_state has 'age' with shape \(\); expected a row for each agent, \(5, …\)"),
        (("sign",), r"agent_critic_state has \['sign'\]; expected fields of its state"),
    ],
)
def test_a_row_for_each_agent(fields, message):
    with pytest.raises(EnvDefinitionError, match=message):
        type("Wrong", (Apart,), {"agent_critic_state": fields})().layout  # noqa: B018


def test_a_state_of_fields_that_do_not_exist():
    with pytest.raises(EnvDefinitionError, match=r"critic_state has \['secrets'\]; expected fields of its state"):
        type("Wrong", (Secrets,), {"critic_state": ("secrets",)})()


class Both(nn.Module):
    """Parameters and values."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, obs):
        return self.layer(obs), obs.sum(-1)


class Alone(Both):
    """Parameters alone."""

    def forward(self, obs):
        return self.layer(obs)


@pytest.mark.usefixtures("secrets")
def test_a_network_of_ones_own_is_an_actor(device):
    env, config = gpu_vecenv.make(Secrets, 8, device), dataclasses.replace(CENTRAL, agent_ids=True)
    networks = {"first": Alone(1 + 1, 2), "others": Alone(1 + 2, 2)}  # an observation and the agent
    trainer = Trainer(env, config, policies=networks)
    before = trainer.policies["others"].network.layer.weight.clone()
    trainer.train_iteration()
    assert not before.equal(trainer.policies["others"].network.layer.weight)
    with pytest.raises(ConfigError, match="expected the parameters of the distribution alone, a tensor"):
        Trainer(env, config, policies={"first": Both(2, 2), "others": Alone(3, 2)})


@pytest.mark.parametrize("central", [False, True])
def test_roles_with_one_policy_are_evaluated_as_the_agents_that_they_are(central, device):
    config = dataclasses.replace(CENTRAL, agent_ids=True, critic="central" if central else "own")
    trainer = Trainer(leaving(device), config, policies={"tagger+runner": PolicySpec()}, seed=3)
    (policy,), env, obs = trainer.policies.values(), trainer.env, trainer.rollout.obs[-1]
    acting = RolePolicies(env, dict.fromkeys(env.game.layout.roles, policy), greedy=True)
    found = acting(obs)
    assert found.equal(policy.act(policy.view.obs(obs), greedy=True))
    fewer = gpu_vecenv.make("tag_continuous", 2, device, **{**LEAVING, "num_taggers": 1, "num_runners": 2})
    with pytest.raises(ConfigError, match="with agent_ids, is of 7 agents; the game has 3"):
        RolePolicies(fewer, dict.fromkeys(fewer.game.layout.roles, policy))


@pytest.mark.parametrize("limits", [(0.5, None), (0.5, 0.25), (0.01, 1e6), (1e6, 0.01)], ids=str)
def test_gradients_of_actor_and_critic_are_clipped_together_or_apart(limits, device):
    config = dataclasses.replace(CENTRAL, max_grad_norm=limits[0], critic_max_grad_norm=limits[1])
    trainer = Trainer(leaving(device), config, seed=3)
    learner = trainer.learners["runner"]
    policy = learner.policy
    learner.skip_update.zero_()
    learner.metrics.zero_()
    learner.metric_sums.zero_()
    learner.flat_grad.copy_(torch.linspace(-1, 2, len(learner.flat_grad)))
    copied = {name: nn.Parameter(p.detach().clone()) for name, p in policy.named_parameters()}
    for name, p in policy.named_parameters():
        copied[name].grad = p.grad.clone()
    learner.clip_grad_norm()
    of_critic = [p for name, p in copied.items() if name.startswith("critic")]
    of_actor = [p for name, p in copied.items() if name.startswith("network")]
    parts = [of_actor + of_critic] if limits[1] is None else [of_actor, of_critic]
    norms = [nn.utils.clip_grad_norm_(p, most) for p, most in zip(parts, limits, strict=False)]
    for name, p in policy.named_parameters():
        torch.testing.assert_close(p.grad, copied[name].grad)
    torch.testing.assert_close(learner.metric_sums[-2], torch.stack(norms).norm())


def test_gradients_of_a_critic_that_shares_layers_are_not_clipped_apart():
    with pytest.raises(ConfigError, match="critic_max_grad_norm is 1"):
        PPOConfig(critic_max_grad_norm=1.0)


@pytest.mark.parametrize("kind", ["cnn", "entities"])
def test_networks_with_encoders_have_a_critic_of_their_own_and_no_agent_ids(kind):
    with pytest.raises(ConfigError, match="expected network 'mlp', 'gru' or 'lstm', or critic 'own'"):
        PPOConfig(network=kind, critic="central")
    with pytest.raises(ConfigError, match="expected network 'mlp', 'gru' or 'lstm', or agent_ids False"):
        PPOConfig(network=kind, agent_ids=True)
