"""PQN and PQN-VDN: targets, exploration, losses and their gradients, what training finds, runs and refusals."""

import csv
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.gift import Gift
from games.probes import Choice, Constant, Delayed, Forbidden, Match, OneStep, Rivals, Survivors, TwoStep
from games.recall import Recall
from games.sacrifice import Sacrifice
from support.bitwise import equal_bits
from support.cases import mostly_exhaustive
from support.synchronisation import no_synchronisation
from support.training import LEAVING, leaving

import gpu_vecenv
from gpu_vecenv import PolicySpec, PPOConfig, PQNConfig, Trainer, load_policy
from gpu_vecenv.cli.main import parse
from gpu_vecenv.envs.registry import GAMES as GAMES_BY_NAME
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.export import export
from gpu_vecenv.train.model_card import model_card
from gpu_vecenv.train.pqn import team_of, team_returns
from gpu_vecenv.train.q_policy import chosen_values, epsilon_greedy, greedy_values

SMALL = PQNConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=4, hidden_sizes=(16,), gamma=0.9)
VDN = {"mixing": "vdn"}
LEAST = torch.finfo(torch.float32).min

pytestmark = pytest.mark.usefixtures("one_thread")


def crew(device, num_envs=6):
    return gpu_vecenv.make(Crew, num_envs, device, autoreset_mode="next_step", max_steps=5)


def sacrifice(device, num_envs=6, limit=False):
    return gpu_vecenv.make(Sacrifice, num_envs, device, autoreset_mode="next_step", num_units=3, limit=limit)


def collected(env, config, policies=None, iterations=2, seed=3):
    """A trainer after a rollout, before its updates, whose episodes did not all begin with it."""
    trainer = Trainer(env, config, seed=seed, policies=policies)
    for _ in range(iterations - 1):
        trainer.train_iteration()
    trainer.begin_iteration()
    return trainer


def host(tensor):
    return tensor.cpu().numpy().astype(np.float64 if tensor.dtype.is_floating_point else None)


# Acting


def distribution_by_hand(q, sizes, mask, epsilon):
    """Probabilities of one row's choices."""
    probabilities, first = np.zeros(len(q)), 0
    for size in sizes:
        allowed = [k for k in range(first, first + size) if mask[k]]
        for k in allowed:
            probabilities[k] = epsilon / len(allowed)
        if allowed:
            probabilities[max(allowed, key=lambda k: q[k])] += 1 - epsilon
        first += size
    return probabilities


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_logits_are_those_of_an_epsilon_greedy_policy(epsilon, device):
    sizes, generator = (3, 4), torch.Generator().manual_seed(0)
    q = torch.randn(200, 7, generator=generator)
    mask = torch.rand(200, 7, generator=generator) < 0.6  # some heads have one choice, some have none
    assert set(mask[:, :3].sum(1).tolist()) == {0, 1, 2, 3}
    logits = epsilon_greedy(q.to(device), sizes, mask.to(device), torch.tensor(epsilon, device=device)).cpu()
    found = torch.cat([part.double().softmax(-1) for part in logits.split(sizes, -1)], -1)
    for row in range(200):
        expected = distribution_by_hand(q[row].tolist(), sizes, mask[row].tolist(), epsilon)
        for head in (slice(0, 3), slice(3, 7)):
            assert not mask[row, head].any() or np.allclose(found[row, head], expected[head], atol=1e-6)
        assert (logits[row][~mask[row]] == LEAST).all()
    everything = epsilon_greedy(q.to(device), sizes, None, torch.tensor(epsilon, device=device))
    assert equal_bits(
        everything, epsilon_greedy(q.to(device), sizes, torch.ones_like(mask).to(device), torch.tensor(epsilon))
    )


def test_a_q_value_that_is_not_a_number_makes_an_invalid_action(device):
    q = torch.tensor([[[1.0, torch.nan]]], device=device)
    assert epsilon_greedy(q, (2,), None, torch.tensor(0.5, device=device))[..., 1].isnan().all()


def test_values_are_sums_over_heads(device):
    q = torch.tensor([[1.0, 5, 2, 7, 9], [1, 5, 2, 7, 9], [1, 5, 2, 7, 9]], device=device)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool, device=device)
    assert greedy_values(q, (3, 2), mask).tolist() == [14, 9, 9] and greedy_values(q, (3, 2)).tolist() == [14] * 3
    actions = torch.tensor([[0, 1], [2, 0], [0, 1]], device=device)
    assert chosen_values(q, actions, (3, 2), mask).tolist() == [10, 9, 9]


@pytest.mark.parametrize("epsilon", [1.0, 0.0])
def test_a_rollout_takes_allowed_choices_only(epsilon, device):
    config = dataclasses.replace(SMALL, num_steps=64, epsilon=epsilon, final_epsilon=epsilon)
    trainer = collected(gpu_vecenv.make(Forbidden, 32, device, autoreset_mode="next_step"), config, iterations=1)
    data = trainer.rollout
    allowed = data.action_mask[:-1].gather(-1, data.draws[..., None].long())[..., 0]
    assert allowed[data.active[:-1]].all() and trainer.env.faults().eq(0).all()
    last = data.action_mask[:-1, :, :, 2] & data.active[:-1]  # the choice that is forbidden now and then
    counts = torch.bincount(data.draws[last], minlength=3)
    assert (counts > 0).sum() == (3 if epsilon else 1)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_epsilon_follows_the_schedule(decay, device):
    env = gpu_vecenv.make(Choice, 8, device, autoreset_mode="next_step")
    config = dataclasses.replace(SMALL, total_steps=8 * 8 * 8, epsilon=0.9, final_epsilon=0.1, epsilon_decay=decay)
    trainer, found = Trainer(env, config), []
    for _ in range(8):
        metrics = trainer.train_iteration()
        assert metrics["epsilon_agent"] == pytest.approx(float(trainer.policies["agent"].epsilon), abs=1e-7)
        assert metrics["learning_rate_agent"] == pytest.approx(float(trainer.learners["agent"].learning_rate))
        found.append(metrics["epsilon_agent"])
    shares = [min(k / 8 / decay, 1) if decay else 1 for k in range(8)]
    assert found == pytest.approx([0.9 - 0.8 * share for share in shares])


@pytest.mark.parametrize(
    "changes", [{}, {"network": "gru", "agent_ids": True, "num_minibatches": 2}], ids=["mlp", "gru"]
)
def test_greedy_actions_are_those_with_the_largest_q_values(changes, device):
    env = crew(device)
    trainer = Trainer(env, dataclasses.replace(SMALL, **changes), seed=1)
    obs, info = env.reset(seed=5)
    for role, policy in trainer.policies.items():
        assert policy.epsilon == 1
        view = policy.view
        own, mask = view.obs(obs), view.mask(info["action_mask"][:, view.agents])
        size, state = policy.recurrent_state_size, None
        if size:
            state = torch.zeros((*own.shape[:2], size), device=device)
        q = policy(own, state)[0].masked_fill(~mask, -torch.inf)
        best = torch.stack([head.argmax(-1) for head in q.split(list(view.head_sizes), -1)], -1)
        acted = policy.act(own, mask, state=state, greedy=True)
        assert (acted[0] if size else acted).equal(best.int()), role
    chosen = gpu_vecenv.train.evaluation.RolePolicies(env, trainer.role_policies(), greedy=True)
    actions = chosen(obs, info["action_mask"])
    assert actions[:, 1:].equal(best.int())


# Targets


GAMES = {
    "agents leave": leaving,
    "masks": crew,
    "one agent": lambda device: gpu_vecenv.make("cartpole", 6, device, autoreset_mode="next_step", max_steps=9),
}


def greedy_by_hand(policy, obs, mask):
    """The largest allowed Q values of rows, summed over the heads, by NumPy."""
    q = host(policy(obs)[0].detach())
    q = q if mask is None else np.where(host(mask), q, -np.inf)
    ends = np.cumsum(policy.view.head_sizes)
    return sum(q[..., end - size : end].max(-1) for size, end in zip(policy.view.head_sizes, ends, strict=True))


@pytest.mark.parametrize("network", ["mlp", "entities"])
@pytest.mark.parametrize("game", GAMES)
def test_targets_are_lambda_returns_of_the_greedy_values(game, network, device):
    if network == "entities" and game != "agents leave":
        pytest.skip("it has no lists of entities")
    config = dataclasses.replace(SMALL, num_steps=16, q_lambda=0.7, network=network)
    trainer = collected(GAMES[game](device), config)
    data, seen = trainer.rollout, set()
    active, terminations, truncations, rewards, found = map(
        host, (data.active, data.terminations, data.truncations, data.rewards, data.returns)
    )
    for policy in trainer.policies.values():
        view = policy.view
        mask = None if data.action_mask is None else view.mask(data.action_mask[:, :, view.agents])
        values = greedy_by_hand(policy, data.obs[(slice(None), slice(None), view.agents, *view.obs_slice)], mask)
        assert np.allclose(host(data.values[:, :, view.agents]), values, atol=1e-5)
        for env, agent in np.ndindex(*rewards[0, :, view.agents].shape):
            column, later = (env, view.agents.start + agent), None
            for t in reversed(range(16)):
                if not active[t][column]:
                    seen.add("not active")
                    continue
                after, reward = values[t + 1, env, agent], rewards[t][column]
                if terminations[t][column]:
                    kind, expected = "terminates", reward
                elif truncations[t][column]:
                    kind, expected = "is truncated", reward + 0.9 * after
                elif t == 15:
                    kind, expected = "rollout ends", reward + 0.9 * after
                else:
                    kind, expected = "goes on", reward + 0.9 * (0.3 * after + 0.7 * later)
                later = expected
                seen.add(kind)
                assert found[t][column] == pytest.approx(expected, abs=1e-4), (t, column, kind)
    kinds = {"not active", "terminates", "is truncated", "rollout ends", "goes on"}
    assert seen == (kinds - {"terminates"} if game == "one agent" else kinds)


TEAMS = {
    "agents leave": (leaving, "tagger+runner"),
    "masks": (crew, "helper"),
    "units die": (sacrifice, "unit"),
    "units die, and a limit": (partial(sacrifice, limit=True), "unit"),
}


@pytest.mark.parametrize("game", TEAMS)
def test_targets_of_a_team_are_lambda_returns_of_its_mean_reward(game, device):
    make, name = TEAMS[game]
    config = PQNConfig.vdn(**dataclasses.asdict(dataclasses.replace(SMALL, num_steps=16, q_lambda=0.7)) | VDN)
    env = make(device)
    names = [name] if "+" in name else list(env.game.layout.present_roles)
    trainer = collected(env, config, {role: PolicySpec() for role in names})
    data, where = trainer.rollout, trainer.policies[name].view.agents
    own = [x[:, :, where] for x in (data.active, data.terminations, data.rewards, data.values, data.returns)]
    acting = torch.ones_like(own[0]) if data.acting is None else data.acting[:, :, where]
    active, terminations, rewards, values, found, acting = map(host, [*own, acting])
    count, seen = rewards.shape[2], set()
    for env_index in range(rewards.shape[1]):
        later = None
        for t in reversed(range(16)):
            agents = [a for a in range(count) if active[t, env_index, a]]
            if not agents:
                seen.add("nobody active")
                continue
            reward = sum(rewards[t, env_index, a] for a in agents) / count
            goes_on = [a for a in range(count) if active[t + 1, env_index, a]]
            decide = [a for a in range(count) if acting[t + 1, env_index, a]]
            acts = decide or range(count)  # a team that waits has the value of all
            after = sum(values[t + 1, env_index, a] for a in agents if not terminations[t, env_index, a] and a in acts)
            expected = reward + 0.9 * after
            if goes_on and t < 15:
                share = 0.7 if decide else 1.0
                expected += 0.9 * share * (later - sum(values[t + 1, env_index, a] for a in goes_on if a in acts))
            later = expected
            seen |= {"goes on"} if goes_on else {"ends"}
            seen |= {"fewer act"} if 0 < len([a for a in goes_on if a in acts]) < count else set()
            seen |= {"truncated"} if set(agents) - set(goes_on) and after and not goes_on else set()
            assert np.allclose(found[t, env_index], expected, atol=1e-4), (t, env_index)
    wanted = {"goes on", "ends", "nobody active", "fewer act", "truncated"}
    assert seen == wanted - ({"truncated"} if game in ("masks", "units die") else set())


@pytest.mark.parametrize("waits_last", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_team_that_waits_for_its_turn_is_worth_what_it_expects(waits_last, truncated, device):
    """Without rewards every target is the value that all states have, also where a rollout or an episode ends so."""
    steps, values = 4, torch.full((5, 1, 2), 2.5, device=device)
    turns = torch.tensor([(t + waits_last) % 2 == 0 for t in range(steps + 1)], device=device)
    acting = turns[:, None, None].expand(-1, 1, 2)
    active, nothing = torch.ones_like(acting), torch.zeros((steps, 1, 2), device=device)
    if truncated:  # after the third step; the fourth resets
        active = active.clone()
        active[3] = False
    team = team_of(nothing, values, nothing.bool(), active, acting)
    returns, _ = team_returns(team, 1.0, 0.65)
    assert returns[:3].eq(5).all() and (truncated or returns[3].eq(5).all())


# Losses


LOSSES = {
    "each agent": (leaving, None, {}),
    "masks": (crew, None, {}),
    "units die": (sacrifice, None, {}),
    "a team": (leaving, "tagger+runner", VDN),
    "a team with masks": (crew, None, VDN),
    "a team whose units die": (sacrifice, None, VDN),
    "ids": (leaving, "tagger+runner", {"agent_ids": True}),
    "normalised": (leaving, None, {"normalize_obs": True}),
    "gru": (leaving, None, {"network": "gru", "hidden_sizes": (16, 8)}),
    "lstm with ids": (leaving, "tagger+runner", {"network": "lstm", "agent_ids": True}),
    "gru of a team": (sacrifice, None, {"network": "gru", **VDN}),
}


@pytest.mark.parametrize("chunk_rows", [2**20, 50])
@pytest.mark.parametrize("case", LOSSES)
def test_the_gradient_is_that_of_the_mean_squared_error(case, chunk_rows, device):
    make, name, changes = LOSSES[case]
    config = dataclasses.replace(SMALL, num_minibatches=1, chunk_rows=chunk_rows, **changes)
    trainer = collected(make(device), config, name and {name: PolicySpec()})
    data = trainer.rollout
    for policy, learner in zip(trainer.policies.values(), trainer.learners.values(), strict=True):
        where, view, state = policy.view.agents, policy.view, None
        if policy.recurrent_state_size:
            state = trainer.states["+".join(view.roles)].starts[0]
        steps = []
        for t in range(8):
            q, values, *rest = policy(view.obs(data.obs[t]), state)
            if rest:
                state = torch.where(data.active[t][:, where, None], rest[0], 0)
            mask = None if data.action_mask is None else view.mask(data.action_mask[t][:, where])
            assert torch.allclose(policy.state_values(q, values, mask), data.values[t][:, where], atol=1e-5)
            actions = data.draws[t][:, where].reshape(q.shape[0] * q.shape[1], -1)[:, : view.num_heads]
            flat_mask = None if mask is None else mask.flatten(0, 1)
            steps.append(chosen_values(q.flatten(0, 1), actions, view.head_sizes, flat_mask).view(q.shape[:2]))
        chosen, counted = torch.stack(steps), data.active[:-1][:, :, where]
        errors = chosen - data.returns[:, :, where]
        if config.mixing == "vdn":
            acting = counted
            if data.acting is not None:
                acts = data.acting[:-1][:, :, where]
                acting = counted & (acts | ~acts.any(-1, keepdim=True))
            errors = (chosen * acting).sum(-1) - data.returns[:, :, where.start]
            counted = acting.any(-1)
        loss = 0.5 * errors[counted].square().sum() / counted.sum()
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, learner.parameters)])
        learner.shuffle()
        learner.backward()
        assert float(learner.metrics[0]) == pytest.approx(loss.item(), rel=1e-4) and expected.abs().max() > 0
        assert torch.allclose(learner.flat_grad, expected, atol=1e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_a_team_stays_together_in_minibatches(network, device):
    config = dataclasses.replace(SMALL, network=network, sequence_length=4, **VDN)
    trainer = collected(leaving(device), config, {"tagger+runner": PolicySpec()})
    (learner,) = trainer.learners.values()
    orders = []
    for _ in range(2):
        learner.shuffle()
        rows = learner.order.view(-1, 7)
        assert (rows % 7).eq(torch.arange(7, device=device)).all() and (rows // 7 == rows[:, :1] // 7).all()
        assert rows.flatten().sort().values.equal(learner.indices)
        active = trainer.rollout.active[:-1].flatten()[learner.order].view(4, -1, 7)
        assert learner.moments[:, 3].tolist() == active.any(2).sum(1).tolist()
        orders.append(rows.clone())
    assert not orders[0].equal(orders[1])


@pytest.mark.parametrize("shift", [-1, 1])
def test_flags_that_are_a_step_off_are_seen_in_the_values(shift, device):
    config = dataclasses.replace(SMALL, network="gru", num_minibatches=1)
    trainer = collected(leaving(device), config, {"tagger+runner": PolicySpec()})
    (learner,), data, found = trainer.learners.values(), trainer.rollout, []
    sequence = learner.policy.sequence
    learner.shuffle()
    for roll in (0, shift):
        learner.policy.sequence = lambda obs, state, active, *, by=roll, **given: sequence(
            obs, state, active.roll(by, 0), **given
        )
        ((indices, (q, _)),) = learner._outputs_of_chunks(learner.order)
        values = greedy_values(q, learner.policy.view.head_sizes)
        errors = (values - data.values[:-1].flatten()[indices])[data.active[:-1].flatten()[indices]]
        found.append(errors.abs().max().item())
    assert found[0] < 1e-5 and found[1] > 1e-3


# What training finds


QUICK = {"total_steps": 40 * 8 * 32, "num_steps": 8, "num_minibatches": 2, "num_epochs": 4, "learning_rate": 0.01}
QUICK |= {"gamma": 0.75, "hidden_sizes": (16,), "final_epsilon": 0.1, "epsilon_decay": 0.5}
# Measured with 4 seeds: at most 0.05, but 0.11 where a choice cannot be seen, whose value is a mean over them.
WITHIN = 0.12


def trained(game, device, seed=1, policies=None, num_envs=32, **changes):
    env = gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step")
    trainer = Trainer(env, PQNConfig(**{**QUICK, **changes}), seed=seed, policies=policies)
    trainer.train(log_interval=1000)
    return trainer


PROBES = (Constant, OneStep, TwoStep, Choice, Match, Delayed, Rivals, Survivors)


@pytest.mark.parametrize("probe", PROBES)
def test_training_finds_the_values_and_the_best_actions(probe, device):
    trainer = trained(probe(), device)
    game = trainer.env.game
    env = gpu_vecenv.make(game, 100, device, autoreset_mode="disabled")
    (obs, info), step = env.reset(seed=2), 0
    while bool(info["active"].any()):
        active, best = info["active"], game.best(obs)
        values, greedy = torch.zeros(active.shape, device=device), torch.zeros_like(best)
        for policy in trainer.policies.values():
            own = policy.view.obs(obs)
            with torch.no_grad():
                values[:, policy.view.agents] = policy.state_values(*policy(own), None)
            greedy[:, policy.view.agents] = policy.act(own, greedy=True)
        assert (values - game.value(obs, 0.75))[active].abs().max() < WITHIN
        if probe in (Choice, Match, Rivals) or (probe is Delayed and step == 0):
            assert greedy[active].equal(best[active])  # in the others nothing depends on the choice
        obs, _, _, _, info = env.step(best)
        step += 1


def test_forbidden_choices_are_worth_nothing(device):
    """Of the choices that are paid 0, 0.5 and 1, the best one that is allowed is taken, and its value is right."""
    (policy,) = trained(Forbidden(), device).policies.values()
    obs = torch.ones(2, 1, 1, device=device)
    mask = torch.tensor([[[1, 1, 1]], [[1, 1, 0]]], dtype=torch.bool, device=device)
    with torch.no_grad():
        q, values = policy(obs)
    assert torch.allclose(q[0, 0], torch.tensor([0, 0.5, 1], device=device), atol=WITHIN)
    assert policy.act(obs, mask, greedy=True).flatten().tolist() == [2, 1]
    assert policy.state_values(q, values, mask).flatten().tolist() == pytest.approx([1, 0.5], abs=WITHIN)


@pytest.mark.parametrize("seed", range(2))
def test_a_team_gives_where_its_members_alone_do_not(seed, device):
    team, alone = (trained(Gift(), device, seed, **mixing) for mixing in (VDN, {}))
    obs, means = torch.ones(1, 3, 1, device=device), []
    for trainer, best in ((team, 1), (alone, 0)):
        assert trainer.policies["player"].act(obs, greedy=True).tolist() == [[best] * 3]
        means.append(trainer.evaluate(64, greedy=True)["return_player"])
    assert means == [3, 0]  # the best mean, and that of the dilemma
    with torch.no_grad():
        q = team.policies["player"](obs)[0]
    assert torch.allclose(q.sum(1), torch.tensor([[0.0, 3.0]], device=device), atol=WITHIN)


def test_one_unit_of_a_team_dies_for_the_others(device):
    changes = {"num_steps": 16, "gamma": 0.99, "hidden_sizes": (32,), "total_steps": 60 * 16 * 64, "mixing": "vdn"}
    trainer = trained(Sacrifice(), device, num_envs=64, **changes)
    assert trainer.evaluate(64, greedy=True)["return_unit"] == 1


def test_a_recurrent_policy_remembers(device):
    changes = {"network": "gru", "num_steps": 16, "total_steps": 60 * 16 * 64, "gamma": 0.9, "q_lambda": 0.9}
    trainer = trained(Recall(), device, num_envs=64, **changes)
    assert trainer.evaluate(100, greedy=True)["return_player"] > 0.95


# Runs


CASES = {
    "each agent": (LEAVING, {"normalize_obs": True}, None),
    "a team": (LEAVING, {"mixing": "vdn", "agent_ids": True}, "tagger+runner"),
    "lstm": (LEAVING, {"network": "lstm", "sequence_length": 4}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bitwise_equal(case, device, tmp_path):
    arguments, changes, name = CASES[case]
    config = dataclasses.replace(SMALL, total_steps=6 * 8 * 6, epsilon_decay=1.0, **changes)

    def made():
        env = gpu_vecenv.make("tag_continuous", 6, device, autoreset_mode="next_step", **arguments)
        return Trainer(env, config, policies=name and {name: PolicySpec()})

    whole, begun, resumed = made(), made(), made()
    whole.train()
    for _ in range(3):
        begun.train_iteration()
    path = begun.save(tmp_path / "checkpoint")
    manifest = resumed.load(path)
    assert set(manifest["algorithms"].values()) == {manifest["algorithm"]} == {"pqn"}
    resumed.train()
    assert equal_bits(whole.state()[0], resumed.state()[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*cannot be captured")
@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit_and_wait_for_nothing(case):
    arguments, changes, name = CASES[case]
    config, found = dataclasses.replace(SMALL, **changes), []
    for graphs in (True, False):
        env = gpu_vecenv.make("tag_continuous", 6, "cuda", autoreset_mode="next_step", **arguments)
        trainer = Trainer(env, config, policies=name and {name: PolicySpec()}, graphs=graphs)
        for _ in range(3):  # checks and captures
            trainer.train_iteration()
        with no_synchronisation():
            for _ in range(3):
                trainer.launch_iteration()
        trainer.read_iteration()
        found.append(trainer.state()[0])
    assert equal_bits(*found)


def test_a_loaded_policy_acts_as_the_trained_one(device, tmp_path):
    trainer = Trainer(leaving(device), dataclasses.replace(SMALL, agent_ids=False), seed=2)
    trainer.train_iteration()
    policy = load_policy(trainer.save(tmp_path / "checkpoint"), device=device)
    assert {type(config) for config in policy.configs.values()} == {PQNConfig}
    for role, own in trainer.policies.items():
        assert equal_bits(dict(policy[role].state_dict()), dict(own.state_dict())) and float(own.epsilon) == 1
    greedy, sampled = (trainer.evaluate(20, greedy=how) for how in (True, False))
    env = trainer.env
    assert greedy == gpu_vecenv.evaluate(env, policy.policies, 20, greedy=True) != sampled
    for file in export(policy, tmp_path / "files", "torchscript"):
        assert file.difference < 1e-5
    assert "Q values" in (tmp_path / "files" / "policy.json").read_text()


@pytest.mark.parametrize("network", ["gru", "lstm", "entities"])
def test_default_networks_are_loaded(network, device, tmp_path):
    config = dataclasses.replace(SMALL, network=network, hidden_sizes=(8, 4), agent_ids=network == "gru")
    config = dataclasses.replace(config, num_minibatches=2)
    trainer = Trainer(leaving(device), config, seed=2)
    path = trainer.save(tmp_path / "checkpoint")
    for role, own in load_policy(path, device=device).policies.items():
        assert equal_bits(dict(own.state_dict()), dict(trainer.policies[role].state_dict()))


def test_a_network_of_ones_own_gives_q_values(device):
    network = gpu_vecenv.train.networks.ActorCritic((4,), 2, (8,))
    trainer = Trainer(gpu_vecenv.make("cartpole", 8, device), SMALL, policies={"agent": network})
    before = {name: p.clone() for name, p in network.named_parameters()}
    trainer.train_iteration()
    assert trainer.torch_reasons == {"agent": "Q-learning"}
    changed = {name for name, p in network.named_parameters() if not p.equal(before[name])}
    assert changed == {name for name in before if not name.startswith("critic")}


def test_roles_may_learn_by_different_algorithms(device):
    env = gpu_vecenv.make("tag_gridworld", 8, device)
    ppo = PPOConfig(total_steps=2 * 8 * 8, num_steps=8, hidden_sizes=(8,))
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(config=dataclasses.replace(SMALL, total_steps=2 * 8 * 8))}
    trainer = Trainer(env, ppo, policies=specs)
    metrics = trainer.train()
    assert {"policy_loss_tagger", "q_loss_runner", "epsilon_runner"} <= set(metrics) and trainer.iteration == 2
    assert "epsilon_tagger" not in metrics and "entropy_runner" not in metrics
    frozen = PolicySpec(config=SMALL, weights=trainer.policies["runner"].state_dict(), train=False)
    config = dataclasses.replace(ppo, total_steps=SMALL.total_steps)
    second = Trainer(env, config, policies={"tagger": PolicySpec(), "runner": frozen})
    second.train_iteration()
    assert equal_bits(dict(second.policies["runner"].state_dict()), dict(trainer.policies["runner"].state_dict()))
    assert float(second.policies["runner"].epsilon) == pytest.approx(SMALL.final_epsilon)


TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --hidden-sizes 8 --episodes 4 --best-episodes 4".split()


@pytest.mark.parametrize("algorithm", ["pqn", "pqn-vdn"])
def test_the_command_line_trains_and_resumes(algorithm, command, tmp_path):
    options = [*TINY, "--total-steps", 48, "--device", "cpu", "--checkpoint-seconds", 0, "--keep", 9]
    options += ["--algorithm", algorithm, "--epsilon-decay", 0.5, "--no-layer-norm", "--out", "run"]
    assert command("train", "tag_gridworld", *options)[0] == 0
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and [float(row["epsilon_runner"]) for row in rows] == pytest.approx([1, 11 / 30, 0.05])
    newest = tmp_path / "run" / "checkpoints" / "iteration-00000003.safetensors"
    tensors, manifest = load_checkpoint(newest)
    assert manifest["config"]["mixing"] == ("none" if algorithm == "pqn" else "vdn")
    assert not manifest["config"]["layer_norm"] and manifest["algorithms"] == {"tagger": "pqn", "runner": "pqn"}
    newest.unlink()
    assert command("train", "--resume", "run")[0] == 0
    assert equal_bits(load_checkpoint(newest)[0], tensors)
    assert command("evaluate", "run", "--greedy", "--episodes", 4, "--device", "cpu")[0] == 0


@pytest.mark.parametrize("algorithm", ["pqn", "pqn-vdn"])
def test_a_game_has_presets_by_algorithm(algorithm):
    """Of an algorithm that it has none for, the sizes of PPO's."""
    game = GAMES_BY_NAME["simple_spread"]
    command = parse(["train", "simple_spread", "--algorithm", algorithm, "--num-epochs", "3"])
    sizes = {name: game.preset[name] for name in ("num_envs", "total_steps", "num_steps")}
    preset = {**game.algorithm_presets.get(algorithm, sizes), "num_epochs": 3}
    assert command.num_envs == preset.pop("num_envs")
    assert command.learner == (PQNConfig.vdn(**preset) if algorithm == "pqn-vdn" else PQNConfig(**preset))


def test_several_seeds_are_those_of_runs_alone(command, tmp_path):
    options = [*TINY, "--total-steps", 32, "--device", "cpu", "--algorithm", "pqn"]
    assert command("train", "cartpole", *options, "--seeds", 2, "--seed", 5, "--out", "both")[0] == 0
    assert command("train", "cartpole", *options, "--seed", 6, "--out", "alone")[0] == 0
    name = "checkpoints/iteration-00000002.safetensors"
    both, alone = (load_checkpoint(tmp_path / run / name)[0] for run in ("both/seed-6", "alone"))
    assert equal_bits(both, alone)


# What is refused


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 1.5},
        {"final_epsilon": -0.1},
        {"epsilon_decay": 2.0},
        {"q_lambda": 1.1},
        {"mixing": "qmix"},
        {"layer_norm": 1},
        {"network": "cnn", "agent_ids": True},
    ],
)
def test_options_out_of_range(changes):
    with pytest.raises(ConfigError, match=f"PQNConfig.{next(iter(changes))}|agent_ids"):
        PQNConfig(**changes)


def test_a_box_has_no_choices(device):
    env = gpu_vecenv.make("pendulum", 4, device)
    with pytest.raises(ConfigError, match=r"Q-learning needs choices, but agent of Pendulum have Box.*or a PPOConfig"):
        Trainer(env, SMALL)


@pytest.mark.parametrize(("network", "what"), [("mlp", "num_envs x teams"), ("gru", "sequence_length x num_envs x te")])
def test_minibatches_of_teams_have_equal_sizes(network, what, device):
    config = dataclasses.replace(SMALL, num_minibatches=7 if network == "mlp" else 8, network=network, **VDN)
    with pytest.raises(ConfigError, match=f"expected a divisor of .*{what}"):
        Trainer(leaving(device, 9), config, policies={"tagger+runner": PolicySpec()})


def test_a_checkpoint_of_another_algorithm(device, tmp_path):
    env = gpu_vecenv.make("cartpole", 4, device)
    path = Trainer(env, PPOConfig(num_steps=8)).save(tmp_path / "ppo")
    with pytest.raises(ConfigError, match="its algorithm is 'ppo', this trainer's 'pqn'"):
        Trainer(env, dataclasses.replace(SMALL)).load(path)


# Measured with 4 seeds: 500, the most there is. A policy that does not learn stays below 30.
SLOW = {"total_steps": 300_000, "num_steps": 64, "num_epochs": 4, "num_minibatches": 8, "learning_rate": 1e-3}
SLOW |= {"hidden_sizes": (64, 64), "q_lambda": 0.95, "final_epsilon": 0.2, "epsilon_decay": 0.2}


def tenths(transition):
    return transition.rewards / 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_exhaustive(range(2), [0]))
def test_cartpole_is_balanced(seed, device):
    trainer = Trainer(gpu_vecenv.make("cartpole", 64, device), PQNConfig(**SLOW), seed=seed, reward=tenths)
    trainer.train(log_interval=1000)
    assert trainer.evaluate(100, greedy=True)["return_agent"] > 200


def test_a_team_of_one_of_several_agents_is_refused(device):
    env = gpu_vecenv.make("simple_spread", 4, device)
    with pytest.raises(ConfigError, match="mixing is 'vdn', but agent_0 is a single agent of agent; expected a policy"):
        Trainer(env, PQNConfig.vdn(), sharing="agent")


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_the_card_of_a_default_network_loads_it_without_a_module(network, device, tmp_path):
    env = gpu_vecenv.make("cartpole", 4, device, autoreset_mode="next_step")
    trainer = Trainer(env, dataclasses.replace(SMALL, network=network))
    trainer.save(tmp_path / "run.safetensors")
    card = model_card(load_policy(tmp_path / "run.safetensors", device=device), {}, curve=False)
    assert "# PQN on cartpole" in card and "networks=" not in card
