"""Trained policies in JavaScript: the numbers of torch, in Node.js."""

import numpy as np
import pytest
import torch
from support.node import NETWORKS, require_node, run_node

import gpu_vecenv
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.algorithms import algorithm_of
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.policy import Policy, default_actor, default_network
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.web.policies import policies_json, policy_json

require_node()
# Sums in another order than torch's, and JavaScript's tanh: a few units of float32's last place through the layers.
CLOSE = {"rel": 1e-4, "abs": 2e-5}
STEPS = 5


def policy_of(
    game,
    kind="mlp",
    *,
    actor=False,
    agent_ids=False,
    squash="clip",
    normalize_obs=False,
    post=(),
    activation="tanh",
):
    torch.manual_seed(5)
    role = game.layout.present_roles[0]
    view = RoleView(game, [role])
    make = default_actor if actor else default_network
    settings = {"agent_ids": agent_ids, "squash": squash, "post_hidden_sizes": post, "actor_gain": 1.0}
    network = make(view, (16, 12), activation, kind=kind, **settings)
    critic = torch.nn.Linear(1, 1) if actor else None
    options = {"agent_ids": agent_ids, "squash": squash, "normalize_obs": normalize_obs}
    return with_random_numbers(Policy(game, [role], network, critic=critic, **options))


def q_policy_of(game, kind="mlp", **settings):
    torch.manual_seed(5)
    config = PQNConfig(network=kind, hidden_sizes=(16, 12), **settings)
    return with_random_numbers(
        algorithm_of(config).make_policy(game, [game.layout.present_roles[0]], config, None, None)
    )


def with_random_numbers(policy):
    if policy.obs_normalizer is not None:
        policy.obs_normalizer.mean.uniform_(-1, 1)
        policy.obs_normalizer.var.uniform_(0.1, 3)
    for parameter in policy.network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return policy


def observations(policy, game, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (STEPS, *policy.view.obs_shape), TORCH_TYPES[game.layout.observation.dtype]
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator)


def in_node(policy, rows, agent=0, mask=None, draws=0, begins=None):
    flat = rows.flatten(1).tolist()
    job = {"policy": policy_json(policy), "agent": agent, "observations": flat, "bytes": rows.dtype == torch.uint8}
    return run_node("policy_outputs.js", {**job, "mask": mask, "draws": draws, "begins": begins}, *NETWORKS)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("tag_gridworld", {}),
        ("tag_gridworld", {"agent_ids": True, "normalize_obs": True}),
        ("tag_gridworld", {"kind": "gru", "post": (8,)}),
        ("tag_gridworld", {"kind": "lstm", "normalize_obs": True}),
        ("tag_gridworld", {"actor": True, "agent_ids": True}),
        ("tag_gridworld", {"actor": True, "kind": "gru"}),
        ("overcooked", {"kind": "cnn"}),
        ("overcooked", {"kind": "cnn", "normalize_obs": True}),
        ("pendulum", {}),
        ("pendulum", {"squash": "tanh"}),
        ("pendulum", {"squash": "beta"}),
        ("tag_continuous", {"normalize_obs": True}),
        ("tag_continuous", {"kind": "entities", "normalize_obs": True}),
        ("skirmish", {"kind": "entities", "activation": "relu"}),
        ("cartpole", {"q": True}),
        ("overcooked", {"q": True, "kind": "cnn"}),
        ("tag_gridworld", {"q": True, "kind": "gru", "agent_ids": True}),
        ("tag_continuous", {"q": True, "kind": "entities"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_outputs_are_those_of_torch(name, settings):
    game = gpu_vecenv.configure(name)
    make = q_policy_of if settings.get("q") else policy_of
    policy = make(game, **{key: value for key, value in settings.items() if key != "q"})
    rows, agent = observations(policy, game), policy.view.agent_numbers[-1]
    found = in_node(policy, rows, agent)
    state = torch.zeros(1, policy.acting_state_size) if policy.acting_state_size else None
    for row, parameters, greedy in zip(rows, found["parameters"], found["greedy"], strict=True):
        own = torch.tensor([agent - policy.view.agent_numbers[0]])
        expected, next_state = policy.acting(row[None], state, own)
        assert parameters == pytest.approx(expected[0].tolist(), **CLOSE)
        action = policy._actions(expected, None, True, None)
        assert np.ravel(greedy) == pytest.approx(action[0].numpy().ravel(), **CLOSE)
        state = next_state


@torch.no_grad()
def test_draws_have_the_probabilities_of_the_logits_and_heed_masks():
    game = gpu_vecenv.configure("tag_gridworld")
    policy = policy_of(game)
    rows, draws = observations(policy, game), 4000
    mask = [1, 0, 1, 1, 1]
    found = in_node(policy, rows, mask=mask, draws=draws)
    logits = torch.tensor(found["parameters"][-1]).masked_fill(~torch.tensor(mask, dtype=torch.bool), -torch.inf)
    counts = np.bincount([choice for (choice,) in found["sampled"]], minlength=5)
    expected = logits.softmax(-1).numpy()
    # The seed of the draws is fixed; five standard deviations of a count.
    assert counts[1] == 0
    assert (np.abs(counts - draws * expected) <= 5 * np.sqrt(draws * expected)).all()


@torch.no_grad()
def test_draws_by_q_values_are_epsilon_greedy():
    game = gpu_vecenv.configure("tag_gridworld")
    policy = q_policy_of(game)
    policy.epsilon.fill_(0.3)
    rows, draws, mask = observations(policy, game), 4000, [1, 0, 1, 1, 1]
    found = in_node(policy, rows, mask=mask, draws=draws)
    values, allowed = torch.tensor(found["parameters"][-1]), torch.tensor(mask, dtype=torch.bool)
    counts = np.bincount([choice for (choice,) in found["sampled"]], minlength=5)
    expected = policy.distribution(values, allowed).softmax(-1).numpy()
    # As above.
    assert counts[1] == 0 and expected.max() > 0.7
    assert (np.abs(counts - draws * expected) <= 5 * np.sqrt(draws * expected)).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mlp", "gru", "entities"])
def test_rows_of_many_environments_are_computed_together(kind):
    game = gpu_vecenv.configure("tag_continuous")
    policy = policy_of(game, kind, normalize_obs=True)
    rows = observations(policy, game)
    found = in_node(policy, rows, begins=[0, 1, 0, 0, 1])
    # Each row twice in a state of its own; where the second call begins an episode the state is 0 again.
    for row, once, twice, begins in zip(rows, found["once"], found["twice"], [0, 1, 0, 0, 1], strict=True):
        state = torch.zeros(1, policy.acting_state_size) if policy.acting_state_size else None
        own = torch.tensor([policy.view.agent_numbers[0]])
        expected, after = policy.acting(row[None], state, own)
        assert once == pytest.approx(expected[0].tolist(), **CLOSE)
        expected, _ = policy.acting(row[None], state if begins else after, own)
        assert twice == pytest.approx(expected[0].tolist(), **CLOSE)


@pytest.mark.parametrize("squash", ["clip", "tanh", "beta"])
@torch.no_grad()
def test_draws_of_a_box_have_its_distribution(squash):
    game = gpu_vecenv.configure("pendulum")
    policy = policy_of(game, squash=squash)
    rows, draws = observations(policy, game), 4000
    found = np.array(in_node(policy, rows, draws=draws)["sampled"])[:, 0]
    parameters = torch.tensor(in_node(policy, rows)["parameters"][-1]).expand(draws, -1)
    expected = policy._actions(parameters, None, False, torch.Generator().manual_seed(1)).numpy()[:, 0]
    assert (np.abs(found) <= 2).all() and len(np.unique(found)) > 100
    # Both are samples of fixed seeds; five standard errors of a mean.
    assert abs(found.mean() - expected.mean()) <= 5 * expected.std() * np.sqrt(2 / draws)
    assert found.std() == pytest.approx(expected.std(), rel=0.1)


def test_each_policy_of_a_run_has_the_agents_that_it_plays():
    game = gpu_vecenv.configure("tag_gridworld")
    shared = Policy(game, ["tagger", "runner"], default_network(RoleView(game, ["tagger", "runner"]), (8,)))
    (found,) = policies_json(GamePolicy(game, {"tagger+runner": shared}).policies.values())
    assert found["agents"] == [0, 1, 2, 3, 4] and found["name"] == "tagger+runner"


def test_a_network_that_the_page_does_not_compute_is_refused():
    game = gpu_vecenv.configure("tag_gridworld")
    policy = policy_of(game)
    policy.network = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"tagger is a Linear, which the page does not compute; expected"):
        policy_json(policy)
