"""Recurrent policies: the state that each observation meets, sequences in place of samples, other users of states."""

import dataclasses
import itertools

import pytest
import torch
from games.recall import Recall
from games.script import Script
from support.bitwise import equal_bits
from support.cases import mostly_exhaustive
from support.learning import batch_of
from support.training import LEAVING
from torch import nn

import gpu_vecenv
from gpu_vecenv import GamePolicy, PolicySpec, PPOConfig, Trainer, evaluate, load_policy
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import STEPS_PER_SYNC
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import loss, masked_normalize
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentCells
from gpu_vecenv.train.rollout_context import RolloutContext
from gpu_vecenv.watch.recording import record

SMALL = PPOConfig(num_steps=12, num_epochs=2, num_minibatches=3, hidden_sizes=(8, 8), network="gru", sequence_length=4)
RATIO_WITHIN = 1e-5  # of a ratio with unchanged weights: products of other numbers of rows are rounded otherwise
SCRIPT = {"num_leads": 2, "num_others": 2, "leave": 2, "max_steps": 7}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def registered():
    GAMES[Recall.name()] = Recall
    yield
    del GAMES[Recall.name()]


class OwnGRU(nn.Module):
    """A recurrent network as a user writes it: a cell of torch's, rows first."""

    recurrent_state_size = 6

    def __init__(self, inputs, outputs):
        super().__init__()
        self.cell, self.actor, self.critic = nn.GRUCell(inputs, 6), nn.Linear(6, outputs), nn.Linear(6, 1)

    def forward(self, obs, state):
        state = self.cell(obs, state)
        return self.actor(state), self.critic(state).squeeze(-1), state


class Adds(nn.Module):
    """Plays Recall without fault, if its state is 0 with each cue and never else: the state is the sum of all cues."""

    recurrent_state_size = 1

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-100.0, 100.0]))

    def forward(self, obs, state):
        state = state + obs[:, :1]
        return state * self.weight, state[:, 0] * 0, state


def changed(**values):
    return dataclasses.replace(SMALL, **values)


def trainer_of(game, device, config=SMALL, num_envs=6, policies=None, seed=3, arguments=None, **options):
    env = gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step", **(arguments or {}))
    return Trainer(env, config, seed=seed, policies=policies, **options)


def far_from_even(trainer):
    """Weights with which states and choices differ a lot."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for policy in trainer.policies.values():
            for p in policy.parameters():
                p.data.copy_(torch.randn(p.shape) * 0.7)
    return trainer


GAMES_OF_ALL_KINDS = {
    "script": (Script, SCRIPT, {}),
    "leaving, two heads": ("tag_continuous", LEAVING, {"normalize_obs": True, "normalize_returns": True}),
    "Box": ("pendulum", {"max_steps": 5}, {"squash": "tanh", "shared_trunk": False, "activation": "relu"}),
    "recall": (Recall, {}, {"sequence_length": None}),
    "whole rollouts of one agent among several": (Script, {**SCRIPT, "num_leads": 1}, {"sequence_length": None}),
    "one step": (Script, SCRIPT, {"sequence_length": 1}),
    "agent_ids": (Script, SCRIPT, {"agent_ids": True}),
    "central critic": (Script, SCRIPT, {"critic": "central", "normalize_obs": True}),
    "layers behind": (Script, SCRIPT, {"post_hidden_sizes": (6, 5)}),
    "central critic, layers behind": (Script, SCRIPT, {"critic": "central", "post_hidden_sizes": (6,)}),
    "central critic, agent_ids": (Script, SCRIPT, {"critic": "central", "agent_ids": True}),
}


# The state of an LSTM has two parts: where those of agents, of whole rollouts and of a critic are cut.
OF_ALL_KINDS = [*itertools.product(GAMES_OF_ALL_KINDS, ("gru", "lstm")), ("script", "own")]
USUAL = [(kind, "gru") for kind in GAMES_OF_ALL_KINDS] + [("script", "own")]
USUAL += [(kind, "lstm") for kind in ("script", "leaving, two heads", "recall", "central critic, layers behind")]
COLLECTED = [pytest.param(c, marks=() if c in USUAL else pytest.mark.exhaustive, id=", ".join(c)) for c in OF_ALL_KINDS]


@pytest.fixture(params=COLLECTED)
def collected(request, device):
    """A trainer that has collected the third rollout with weights that do not change."""
    kind, network = request.param
    game, arguments, changes = GAMES_OF_ALL_KINDS[kind]
    config, policies = changed(learning_rate=0.0, **changes), None
    if network == "own":
        policies = {"lead": OwnGRU(6, 4), "other": OwnGRU(6, 4)}
    else:
        config = dataclasses.replace(config, network=network)
    trainer = far_from_even(trainer_of(game, device, config, arguments=arguments, policies=policies))
    for _ in range(2):
        trainer.train_iteration()
    trainer.begin_iteration()
    return trainer


# The network


@pytest.mark.parametrize(("kind", "cell"), [("gru", nn.GRUCell), ("lstm", nn.LSTMCell)])
def test_cells_are_those_of_torch(kind, cell):
    torch.manual_seed(0)
    both, rows = RecurrentCells(kind, 5, 7), torch.randn(2, 9, 5)
    for p in both.parameters():
        nn.init.normal_(p)
    state = torch.randn(9, both.state_size)
    inputs = [both.of_inputs(list(rows)), both.of_inputs([rows[0]])]
    for features, given in ((rows, inputs[0]), (rows[:1].expand(2, 9, 5), inputs[1])):
        parts = both.parts(state)
        found = both(given, parts)
        assert both.flat(parts).equal(state)
        for k in range(2):
            own = cell(5, 7)
            for name, p in own.named_parameters():
                p.data.copy_(getattr(both, name)[k])
            expected = own(features[k], parts[0, k] if kind == "gru" else tuple(parts[:, k]))
            expected = expected[None] if kind == "gru" else torch.stack(expected)
            torch.testing.assert_close(found[:, k], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_actor_and_critic_have_states_of_their_own(kind):
    torch.manual_seed(0)
    network = RecurrentActorCritic((3,), 2, (4,), cell=kind)
    obs, state = torch.randn(5, 3), torch.randn(5, network.recurrent_state_size, requires_grad=True)
    parameters, values, after = network(obs, state)
    by_actor, by_critic = (
        torch.autograd.grad(x.sum(), state, retain_graph=True)[0].abs().sum(0) > 0 for x in (parameters, values)
    )
    assert not (by_actor & by_critic).any() and (by_actor | by_critic).all()
    assert after.shape == state.shape
    with pytest.raises(ConfigError, match="needs at least one size"):
        RecurrentActorCritic((3,), 2, ())


# The rollout


def test_each_observation_meets_the_state_of_its_own_episode(device):
    """Every episode is played again alone, one agent at a time, from a state of 0, with what the environment says."""
    trainer = far_from_even(
        trainer_of(Script, device, changed(learning_rate=0.0, staggered_starts=False), arguments=SCRIPT)
    )
    data, rows = trainer.rollout, []
    for _ in range(4):
        trainer.train_iteration()
        rows += zip(*(x[:-1].clone() for x in (data.obs, data.values, data.active)), strict=True)
    obs, values, active = map(torch.stack, zip(*rows, strict=True))
    compared, last, ends_in_sequence = 0, 0, 0
    for policy in trainer.policies.values():
        for env, agent in itertools.product(range(6), range(policy.view.agents.start, policy.view.agents.stop)):
            for t in range(len(obs)):
                if obs[t, env, 0, 1] == 0:  # the clock of an agent that stays
                    state = torch.zeros(policy.recurrent_state_size, device=device)
                is_last = t > 0 and bool(active[t - 1, env, agent]) and not active[t, env, agent]
                if not (active[t, env, agent] or is_last):
                    continue
                with torch.no_grad():
                    _, value, state = policy(obs[t, env, agent], state)
                assert (value - values[t, env, agent]).abs() < 1e-5
                compared, last = compared + 1, last + is_last
                ends_in_sequence += is_last and t % 4 not in (0, 3)
    assert compared > 400 and last > 60 and ends_in_sequence > 20


def test_agents_that_left_and_episodes_that_ended_leave_no_state(collected):
    for name, states in collected.states.items():
        active = collected.rollout.active[:-1, :, collected.policies[name].view.agents]
        assert states.current[~active[-1]].eq(0).all()
        starts = states.starts[1:]
        before = active[states.sequence_length - 1 :: states.sequence_length][: len(starts)]
        assert starts[~before].eq(0).all() and (starts[before] != 0).any(-1).all()
        assert len(states.starts) * states.sequence_length == 12


def test_a_policy_that_adds_up_cues_plays_recall_without_fault(device):
    config = changed(learning_rate=0.0, staggered_starts=False)  # an episode without its beginning has no cues
    trainer = trainer_of(Recall, device, config, policies={"player": Adds()})
    for _ in range(3):
        trainer.train_iteration()
        ends = trainer.rollout.terminations
        assert ends.any() and trainer.rollout.rewards[ends].eq(1).all()


# Sequences


def minibatches(learner):
    """Of an epoch: indices and moments of each minibatch."""
    learner.shuffle()
    return list(zip(learner.order.view(learner.config.num_minibatches, -1), learner.moments, strict=True))


def test_minibatches_are_permuted_sequences(collected):
    data = collected.rollout
    per_step = data.rewards[0].numel()
    for learner in collected.learners.values():
        length, orders = learner.sequences.length, []
        for _ in range(3):
            epoch = minibatches(learner)
            assert learner.order.sort().values.equal(learner.indices)
            for indices, moments in epoch:
                steps = indices.view(length, -1)
                assert (steps[0] // per_step % length == 0).all()
                assert steps.equal(steps[0] + per_step * torch.arange(length, device=steps.device)[:, None])
                active = data.active.flatten()[indices].double()
                own = data.advantages.flatten()[indices].double() * active
                expected = torch.stack([active.sum(), own.sum(), own.square().sum(), active.sum()])
                torch.testing.assert_close(moments, expected, rtol=1e-12, atol=1e-12)
            orders.append(learner.order.clone())
        assert not any(a.equal(b) for a, b in itertools.combinations(orders, 2))
        assert learner.epoch.item() % learner.config.num_epochs == 3 % learner.config.num_epochs


def ratios(learner, indices, chunk=1000):
    """Of a minibatch's active samples, and how many of its sequences have an end in their middle."""
    data, view = learner.rollout, learner.policy.view
    found = []
    with torch.no_grad():
        for part, (parameters, _) in learner.sequences.outputs(indices, chunk, learner._rows, learner._context):
            batch = batch_of(data, view, part, data.advantages.flatten()[part])
            log_probs, _ = learner.policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask)
            found.append((log_probs - batch.log_probs).exp()[batch.active])
    active = data.active.flatten()[indices].view(learner.sequences.length, -1)
    ends = (active[:-1] & ~active[1:]).any(0) if len(active) > 1 else torch.zeros(1)
    return torch.cat(found), int(ends.sum())


def test_with_unchanged_weights_every_ratio_is_one(collected):
    inner_ends = 0
    for learner in collected.learners.values():
        for indices, _ in minibatches(learner):
            found, ends = ratios(learner, indices)
            assert len(found) and (found - 1).abs().max() <= RATIO_WITHIN
            inner_ends += ends
    assert inner_ends > 0 or collected.config.sequence_length == 1


def test_values_and_normalised_rows_of_sequences_are_those_of_the_rollout(collected):
    data = collected.rollout
    for learner in collected.learners.values():
        for indices, _ in minibatches(learner):
            with torch.no_grad():
                for part, (_, values) in learner.sequences.outputs(indices, 2, learner._rows, learner._context):
                    active = data.active.flatten()[part]
                    before = data.values.flatten()[part]
                    assert ((values - before)[active].abs() <= 1e-5 * before.abs().max().clamp(min=1)).all()


@pytest.mark.parametrize("shift", [-1, 1])
def test_flags_that_are_a_step_off_are_seen_in_the_ratios(shift, device):
    trainer = far_from_even(trainer_of(Script, device, arguments=SCRIPT))
    trainer.begin_iteration()
    (learner, *_) = trainer.learners.values()
    indices, _ = minibatches(learner)[0]
    right, _ = ratios(learner, indices)
    sequence = learner.policy.sequence
    learner.policy.sequence = lambda obs, state, active, **given: sequence(obs, state, active.roll(shift, 0), **given)
    wrong, _ = ratios(learner, indices)
    assert (right - 1).abs().max() <= RATIO_WITHIN and (wrong - 1).abs().max() > 1000 * RATIO_WITHIN


class Given:
    """A policy whose outputs are already known."""

    def __init__(self, policy, outputs):
        self.policy, self.outputs = policy, outputs

    def __call__(self, obs):
        return self.outputs

    def __getattr__(self, name):
        return getattr(self.policy, name)


def step_by_step(policy, data, indices, starts, length):
    """Parameters and values of a minibatch by one call of the network for each step."""
    view, outputs, state, context = policy.view, [], starts, RolloutContext(policy, data, len(indices) // length)
    for own in indices.view(length, -1):
        parameters, values, state = policy(data.flat_obs(view)[own], state, context=context.of_samples(own))
        state = state * data.active.flatten()[own][:, None]
        outputs.append((parameters, values))
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


@pytest.mark.parametrize("chunk_rows", mostly_exhaustive([2**20, 9], [9]))
def test_gradients_are_those_of_the_loss_in_torch(collected, chunk_rows):
    data, config = collected.rollout, dataclasses.replace(collected.config, chunk_rows=chunk_rows)
    for name, learner in collected.learners.items():
        alone = type(learner)(
            learner.policy, config, data, seed=1, world=learner.world, graph_pool=None, states=collected.states[name]
        )
        alone.prepare_update(0)
        alone.begin_update()
        alone.shuffle()
        alone.backward()
        indices, length = alone.order.view(config.num_minibatches, -1)[0], alone.sequences.length
        firsts, view = indices.view(length, -1)[0], learner.policy.view
        number = torch.arange(data.rewards.numel(), device=firsts.device).view_as(data.rewards)[
            ::length, :, view.agents
        ]
        rows = torch.searchsorted(number.flatten(), firsts)
        starts = collected.states[name].starts.flatten(0, 2)[rows]
        outputs = step_by_step(learner.policy, data, indices, starts, length)
        given = data.advantages.flatten()[indices]
        batch = batch_of(data, view, indices, masked_normalize(given, data.active.flatten()[indices]))
        total, metrics = loss(Given(learner.policy, outputs), batch, config)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, alone.parameters)])
        torch.testing.assert_close(alone.flat_grad, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        torch.testing.assert_close(alone.metrics, metrics, rtol=1e-4, atol=1e-5)


# Learning


def memory(network, seed, device):
    """The mean return of a policy that has been trained on Recall."""
    config = PPOConfig(
        total_steps=40 * 16 * 32,
        num_steps=16,
        num_minibatches=2,
        num_epochs=2,
        hidden_sizes=(8, 8),
        learning_rate=0.02,
        entropy_coefficient=0.0,
        gamma=0.95,
        network=network,
        sequence_length=8,
    )
    trainer = trainer_of(Recall, device, config, num_envs=32, seed=seed)
    trainer.train(log_interval=20)
    return trainer.evaluate(500)["return_player"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_exhaustive(range(8), [0]))
def test_a_gru_remembers_and_a_perceptron_does_not(seed, device):
    assert memory("gru", seed, device) > 0.9
    # 1000 players' mean of 1 and -1: a standard deviation of 0.03.
    assert abs(memory("mlp", seed, device)) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_exhaustive(range(2), [0]))
def test_an_lstm_remembers(seed, device):
    assert memory("lstm", seed, device) > 0.9


# Elsewhere


@pytest.mark.parametrize("delay", [3, STEPS_PER_SYNC - 1])
def test_evaluations_and_recordings_begin_each_episode_without_a_state(delay, device, registered):
    """Where an episode has as many steps as are taken between two reads, the next one follows it at once."""
    game = Recall(delay=delay)
    policy = Policy(game, ["player"], Adds(), device=torch.device(device))
    env = gpu_vecenv.make(game, 4, device)
    # 12 episodes in 4 environments: one after the other.
    assert evaluate(env, {"player": policy}, 12)["return_player"] == 1
    for replay in record(env, GamePolicy(game, {"player": policy}), episodes=3):
        assert replay.returns == {"player": 1}
    assert gpu_vecenv.rollout(env, GamePolicy(game, {"player": policy}))["rewards"].sum() == 2  # of both players
    with pytest.raises(ConfigError, match="recurrent and got no state"):
        evaluate(env, {"player": policy.act}, 4)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_game_policy_gives_actions_and_states(mode, device):
    policy = GamePolicy(Recall(), {"player": Policy(Recall(), ["player"], Adds(), device=torch.device(device))})
    env = gpu_vecenv.make(Recall, 4, device, autoreset_mode=mode)
    obs, info = env.reset(seed=1)
    state, paid, active = policy.initial_state(4), 0, info["active"]
    for _ in range(23):
        actions, state = policy(obs, state=state)
        obs, rewards, terminations, _, info = env.step(actions)
        state[info["_final_obs"] if mode == "same_step" else ~active] = 0
        active = info["active"]
        assert rewards[terminations].eq(1).all()
        paid += int(terminations.sum())
    assert paid >= 4 * 2 * 4 and state.shape == (4, 2, 1)


def test_states_that_do_not_fit_are_refused(device):
    recurrent = Policy(Recall(), ["player"], Adds(), device=torch.device(device))
    plain = Policy(Recall(), ["player"], gpu_vecenv.train.policy.ActorCritic((2,), 2), device=torch.device(device))
    obs = torch.zeros(3, 2, 2, device=device)
    for call, words in (
        (lambda: recurrent(obs), "got no state"),
        (lambda: recurrent(obs, torch.zeros(3, 1, 1, device=device)), r"is \(3, 1, 1\) torch.float32; expected \(3, 2"),
        (lambda: recurrent(obs, torch.zeros(3, 2, 1, device=device).double()), "float64; expected"),
        (lambda: plain(obs, torch.zeros(3, 2, 1, device=device)), "expected None, since it is not recurrent"),
        (lambda: GamePolicy(Recall(), {"player": recurrent})(obs), "expected state="),
        (lambda: GamePolicy(Recall(), {"player": plain})(obs, state=torch.zeros(3, 2, 0)), "no policy is recurrent"),
        (lambda: GamePolicy(Recall(), {"player": plain}).initial_state(3), "no policy is recurrent"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    with pytest.raises(ValueError, match="state has shape"):
        GamePolicy(Recall(), {"player": recurrent})(obs, state=torch.zeros(2, 2, 1, device=device))


@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_a_loaded_policy_acts_as_the_trained_one(network, critic, device, registered, tmp_path):
    trainer = trainer_of(Recall, device, changed(network=network, critic=critic, normalize_obs=True))
    trainer.train_iteration()
    loaded, own = load_policy(trainer.save(tmp_path / "run"), device=device), trainer.policies["player"]
    assert loaded["player"].recurrent_state_size == own.recurrent_state_size
    # Of a critic of its own, whose numbers the network returns with those of the actor, the state is the same one.
    assert loaded.recurrent_state_size == own.recurrent_state_size / (1 if critic == "own" else 2)
    assert evaluate(trainer.env, loaded.policies, 8) == evaluate(trainer.env, trainer.role_policies(), 8)


@pytest.mark.parametrize("critic", ["own", "central"])
def test_layers_behind_the_recurrent_one_are_loaded(critic, device, registered, tmp_path):
    trainer = trainer_of(Recall, device, changed(critic=critic, post_hidden_sizes=(5, 3)))
    trainer.train_iteration()
    loaded, own = load_policy(trainer.save(tmp_path / "run"), device=device), trainer.policies["player"]
    assert {p.shape for p in own.network.parameters()} > {(5, 8), (3, 5)}
    assert equal_bits(loaded["player"].state_dict(), own.state_dict())
    with pytest.raises(ConfigError, match=r"post_hidden_sizes is \(5,\) with network 'mlp'; expected \(\), or network"):
        changed(network="mlp", post_hidden_sizes=(5,))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_a_policy_with_a_state_can_be_exported(network, device):
    trainer = trainer_of(Recall, device, changed(network=network, normalize_obs=True))
    loaded = GamePolicy(Recall(), trainer.policies)
    obs, state = torch.randn(5, 2, 2, device=device), torch.randn(5, *loaded.initial_state().shape, device=device)
    sizes = {"obs": {0: torch.export.Dim("num_envs")}, "state": {0: torch.export.Dim("num_envs")}, "greedy": None}
    with torch.no_grad():
        program = torch.export.export(loaded, (obs,), {"state": state, "greedy": True}, dynamic_shapes=sizes)
    for rows in (5, 3):
        found = program.module()(obs[:rows], state=state[:rows], greedy=True)
        assert equal_bits(list(found), list(loaded(obs[:rows], state=state[:rows], greedy=True)))


@pytest.mark.parametrize(("network", "critic"), [("gru", "own"), ("lstm", "own"), ("own", "own"), ("gru", "central")])
def test_a_resumed_trainer_equals_an_uninterrupted_one(network, critic, device, tmp_path):
    sizes = {"num_steps": 6, "sequence_length": 3, "num_minibatches": 4, "normalize_returns": True}
    config = changed(network="mlp" if network == "own" else network, critic=critic, **sizes)

    def made():
        own = {"lead": OwnGRU(6, 4), "other": OwnGRU(6, 4)} if network == "own" else None
        return trainer_of(Script, device, config, arguments=SCRIPT, policies=own)

    alone, again = made(), made()
    for _ in range(2):
        alone.train_iteration()
    path = alone.save(tmp_path / "checkpoint")
    assert all(states.current.ne(0).any() for states in alone.states.values())  # of episodes that go on
    again.load(path)
    for trainer in (alone, again):
        for _ in range(2):
            trainer.train_iteration()
    assert equal_bits(alone.state()[0], again.state()[0])


@pytest.mark.slow
def test_a_recurrent_policy_and_a_perceptron_by_kernels_learn_together(device_of_networks):
    specs = {"lead": PolicySpec(), "other": PolicySpec(config=changed(network="mlp", num_minibatches=4))}
    trainer = trainer_of(Script, device_of_networks, arguments=SCRIPT, policies=specs, num_envs=8)
    assert trainer.torch_reasons == {"lead": "a recurrent network", "other": None}
    assert (
        trainer.rollout_reason == "a policy without a kernel of its own: a recurrent network" and not trainer.by_kernels
    )
    before = {name: [p.clone() for p in policy.parameters()] for name, policy in trainer.policies.items()}
    for _ in range(3):
        trainer.train_iteration()
    for name, policy in trainer.policies.items():
        assert not equal_bits(before[name], [p.detach() for p in policy.parameters()])
    trainer.begin_iteration()
    for indices, _ in minibatches(trainer.learners["lead"]):
        found, _ = ratios(trainer.learners["lead"], indices)
        assert (found - 1).abs().max() <= RATIO_WITHIN


def test_a_frozen_recurrent_policy_acts_beside_one_that_learns(device):
    specs = {"lead": PolicySpec(train=False), "other": PolicySpec(config=changed(network="mlp"))}
    trainer = trainer_of(Script, device, changed(sequence_length=5), arguments=SCRIPT, policies=specs)
    before = [p.clone() for p in trainer.policies["lead"].parameters()]
    for _ in range(2):
        trainer.train_iteration()
    assert equal_bits(before, list(trainer.policies["lead"].parameters()))
    assert trainer.states["lead"].current.ne(0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["gru", "lstm", "own"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_and_eager_launches_are_bitwise_equal(network, precision):
    config = changed(network="mlp" if network == "own" else network, precision=precision, normalize_obs=True)
    runs = []
    for graphs in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            own = {"lead": OwnGRU(6, 4), "other": OwnGRU(6, 4)} if network == "own" else None
        trainer = trainer_of(Script, "cuda", config, arguments=SCRIPT, policies=own, graphs=graphs)
        for _ in range(5):
            trainer.train_iteration()
        stages = [trainer._graphed_rollout, *(x.stages["backward"] for x in trainer.learners.values())]
        assert all((stage.graph is not None) == graphs for stage in stages)
        runs.append(trainer.state()[0])
    assert equal_bits(*runs)


# What is refused


def test_lengths_that_do_not_divide_are_refused(device):
    with pytest.raises(ConfigError, match="sequence_length of player is 5; expected a divisor of num_steps, 12"):
        trainer_of(Recall, device, changed(sequence_length=5))
    with pytest.raises(ConfigError, match=r"number of sequences, .* 3 x 6 x 2 = 36"):
        trainer_of(Recall, device, changed(num_minibatches=24))
    trainer_of(Recall, device, changed(network="mlp", sequence_length=5))  # of no perceptron's concern


class Own(nn.Module):
    """A recurrent network of two actions, with what a test puts between state and heads."""

    recurrent_state_size = 4

    def __init__(self, between=None):
        super().__init__()
        self.cell, self.heads, self.between = nn.GRUCell(2, 4), nn.Linear(4, 3), between or nn.Identity()

    def next(self, obs, state):
        return self.cell(obs, state)

    def forward(self, obs, state):
        state = self.next(obs, state)
        out = self.heads(self.between(state))
        return out[:, :2], out[:, 2], state


class RowsAsTime(Own):
    """The default of nn.GRU: the first axis is time."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 4)

    def next(self, obs, state):
        return self.gru(obs, state[:1])[0]


class TimeAxisFirst(RowsAsTime):
    def next(self, obs, state):
        return self.gru(obs, state)[0]


class KeepsItsState(Own):
    def __init__(self):
        super().__init__()
        self.own = None

    def next(self, obs, state):
        if self.own is None or len(self.own) != len(obs):
            self.own = torch.zeros_like(state)
        self.own = self.cell(obs, self.own).detach()
        return self.own + 0 * state


class TwoOutputs(Own):
    def forward(self, obs, state):
        return super().forward(obs, state)[:2]


class StatesOfOtherRows(Own):
    def next(self, obs, state):
        return self.cell(obs, state + state.mean(0))


class SequenceOfItsOwn(Own):
    """Its sequences forget no episode."""

    def sequence(self, obs, state, active):
        outputs = []
        for rows in obs:
            *out, state = self(rows, state)
            outputs.append(out)
        return [torch.stack(x) for x in zip(*outputs, strict=True)]


REFUSED = {
    "rows as time": (RowsAsTime, "gets the rows in another order.*nn.LSTM and nn.GRU need an axis of one time step"),
    "time axis first": (TimeAxisFirst, "raises RuntimeError: .*The first axis is that of independent rows, not time"),
    "dropout": (lambda: Own(nn.Dropout(0.5)), "is called again.*leave out dropout"),
    "batch normalisation": (lambda: Own(nn.BatchNorm1d(4)), "gets half of the rows.*use nn.LayerNorm"),
    "a state of its own": (KeepsItsState, "is called again.*Memory goes in and out: recurrent_state_size"),
    "two outputs": (TwoOutputs, "returns a Tensor and a Tensor; expected parameters, values and the next state"),
    "states of other rows": (StatesOfOtherRows, "gets half of the rows"),
    "a sequence that forgets no episode": (SequenceOfItsOwn, "other outputs for a sequence"),
    "no size": (
        lambda: type("Sized", (Own,), {"recurrent_state_size": 0})(),
        r"recurrent_state_size 0, and its forward missing a required argument: 'state'; expected forward\(obs\), or",
    ),
    "a size and no state": (
        lambda: type("Sized", (gpu_vecenv.train.networks.ActorCritic,), {"recurrent_state_size": 4})((2,), 2),
        "recurrent_state_size 4, and its forward too many positional arguments",
    ),
    "a fraction": (lambda: type("Sized", (Own,), {"recurrent_state_size": 4.0})(), "recurrent_state_size .* is 4.0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_networks_that_break_the_contract_are_refused(kind, device):
    make, words = REFUSED[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make()
    with pytest.raises(ConfigError, match=words):
        trainer_of(Recall, device, policies={"player": network})


@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_a_central_critic_has_a_state_of_its_own(network, device):
    trainer = far_from_even(trainer_of(Script, device, changed(network=network, critic="central"), arguments=SCRIPT))
    trainer.train_iteration()
    policy, obs = trainer.policies["lead"], trainer.rollout.obs[-1]
    view, context = policy.view, RolloutContext(policy, trainer.rollout).of_step(-1)
    state = trainer.states["lead"].current
    of_actor = slice(policy.acting_state_size)
    others = torch.rand_like(state)
    own, mixed = state.clone(), others.clone()
    mixed[..., of_actor] = own[..., of_actor]  # another state of the critic
    with torch.no_grad():
        found, other = (policy(view.obs(obs), given, context=context) for given in (own, mixed))
        parameters, next_state = policy.acting(view.obs(obs), own[..., of_actor])
    assert found[0].equal(other[0]) and found[0].equal(parameters)
    assert found[2][..., of_actor].equal(other[2][..., of_actor]) and found[2][..., of_actor].equal(next_state)
    assert not found[1].equal(other[1]) and not found[2].equal(other[2])


class Actor(Own):
    """Parameters and the next state alone, for a central critic."""

    def forward(self, obs, state):
        parameters, _, state = super().forward(obs, state)
        return parameters, state


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_a_recurrent_actor_of_ones_own_beside_a_central_critic(network, device):
    config = changed(network=network, critic="central")
    trainer = trainer_of(Recall, device, config, policies={"player": Actor()})
    policy = trainer.policies["player"]
    assert (policy.acting_state_size, policy.recurrent_state_size) == (4, 12 if network == "gru" else 4)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    trainer.train_iteration()
    assert all(not p.equal(before[name]) for name, p in policy.named_parameters())
    with pytest.raises(ConfigError, match="expected parameters and the next state"):
        trainer_of(Recall, device, config, policies={"player": Own()})


class Plain(nn.Module):
    """No memory, whatever the name of a part."""

    def __init__(self):
        super().__init__()
        self.sequence = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, obs):
        return self.sequence(obs)[..., :2], self.sequence(obs)[..., 2]


def test_a_network_without_memory_may_call_a_part_sequence(device):
    trainer_of(Recall, device, changed(network="mlp"), policies={"player": Plain()}).train_iteration()


@pytest.mark.parametrize("critic", ["own", "central"])
def test_no_rows_have_no_actions(critic, device):
    policy = trainer_of(Recall, device, changed(critic=critic)).policies["player"]
    state = torch.zeros(0, policy.acting_state_size, device=device)
    actions, next_state = policy.act(torch.zeros(0, 2, device=device), state=state)
    assert actions.shape == (0,) and next_state.shape == state.shape


@pytest.mark.parametrize("size", ["64", None, 8.0, -8])
def test_a_state_of_no_size_is_refused(size, device):
    own = Own()
    own.recurrent_state_size = size
    with pytest.raises(ConfigError, match=r"recurrent_state_size of .* expected an int, the numbers in the state"):
        trainer_of(Recall, device, policies={"player": own})


@pytest.mark.parametrize("kind", ["cell", "one time step", "layer normalisation"])
def test_networks_of_ones_own_are_trained(kind, device):
    class OneTimeStep(RowsAsTime):
        def next(self, obs, state):
            return self.gru(obs[None], state[None])[0][0]

    network = {"cell": Own, "one time step": OneTimeStep, "layer normalisation": lambda: Own(nn.LayerNorm(4))}[kind]()
    trainer = trainer_of(Recall, device, changed(precision="bfloat16"), policies={"player": network})
    before = [p.detach().clone() for p in network.parameters()]
    trainer.train_iteration()
    assert trainer._networks_checked and not equal_bits(before, [p.detach() for p in network.parameters()])
    assert trainer.evaluate(4)["episodes"] == 4
