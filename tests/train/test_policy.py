"""Policies: networks, views of roles, running normalisation, distributions, and the actions drawn from them."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter, Stencil
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from torch import nn

import gpu_vecenv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.distributions import gaussian_log_probs_and_entropies, log_probs_and_entropies, masked, squashed
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.normalizers import Normalizer
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.ppo import PPOConfig, make_policy
from gpu_vecenv.train.role_view import RoleView

HALF_ULP = 2.0**-24  # the most by which a float32 operation is off, relative to its result
P_VALUE = 1e-6  # of a chance test, for a function that is right


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def game_of(kind, **arguments):
    return gpu_vecenv.make(kind, 1, "cpu", **arguments).game


def policy_of(game, *roles, device="cpu", **settings):
    view = RoleView(game, roles)
    return Policy(game, roles, default_network(view, (8,)), device=torch.device(device), **settings)


def seeded_on(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


def linear(x, layer, activation=lambda x: x):
    return activation(x @ layer.weight.detach().double().T + layer.bias.detach().double())


# Networks


@pytest.mark.parametrize("shared_trunk", [True, False])
@pytest.mark.parametrize(("activation", "function"), [("tanh", torch.tanh), ("relu", torch.relu)])
@pytest.mark.parametrize("hidden_sizes", [(), (7,), (16, 8)])
def test_the_network_is_what_its_layers_say(hidden_sizes, activation, function, shared_trunk, device):
    """In float64, head by head: the product that serves both heads gives the same up to rounding."""
    network = ActorCritic((5,), 6, hidden_sizes, activation=activation, shared_trunk=shared_trunk).to(device)
    for p in network.parameters():
        nn.init.normal_(p, std=0.5)
    obs = torch.randn(20, 3, 5).to(device)
    outputs, values = network(obs)
    assert outputs.shape == (20, 3, 6) and values.shape == (20, 3)
    trunks = [network.trunk, network.trunk if shared_trunk else network.critic_trunk]
    expected = []
    for trunk, head in zip(trunks, (network.actor, network.critic), strict=True):
        rows = obs.double()
        for layer in trunk:
            rows = linear(rows, layer, function) if isinstance(layer, nn.Linear) else rows
        expected.append(linear(rows, head))
    # At most 17 products of magnitude 1 or so a number, in two or three layers.
    torch.testing.assert_close(outputs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), expected[1][..., 0], rtol=1e-5, atol=1e-5)
    layers = len(hidden_sizes) * (1 if shared_trunk else 2) + 2
    assert len(list(network.parameters())) == 2 * layers


def test_gradients_reach_both_heads_of_the_one_product(device):
    """As those of the separate heads, up to rounding."""
    network = ActorCritic((5,), 6, (16,)).to(device)
    obs, weights = torch.randn(30, 5).to(device), torch.randn(30, 7).to(device)
    outputs, values = network(obs)
    ((outputs * weights[:, :6]).sum() + (values * weights[:, 6]).sum()).backward()
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    features = network.trunk(obs)
    apart = network.actor(features), network.critic(features)[:, 0]
    ((apart[0] * weights[:, :6]).sum() + (apart[1] * weights[:, 6]).sum()).backward()
    for gradient, p in zip(found, network.parameters(), strict=True):
        # Sums of 30 rows in another order.
        torch.testing.assert_close(gradient, p.grad, rtol=1e-5, atol=1e-5)


def test_weights_are_orthogonal_with_their_gains():
    network = ActorCritic((8,), 6, (16, 8), gaussian=True)
    for layer, gain in ((network.trunk[0], 2), (network.trunk[2], 2), (network.actor, 1e-4), (network.critic, 1)):
        weight = layer.weight.detach()
        small = weight if weight.shape[0] <= weight.shape[1] else weight.T
        # float32 rounding of a decomposition of at most 16 rows
        torch.testing.assert_close(small @ small.T, gain * torch.eye(len(small)), rtol=0, atol=1e-5 * gain)
        assert layer.bias.eq(0).all()
    assert network.log_std.eq(0).all()


def test_a_gaussian_has_log_standard_deviations_of_its_own(device):
    network = ActorCritic((4,), 3, gaussian=True).to(device)
    network.log_std.data.copy_(torch.tensor([0.5, -1.0, 2.0]))
    parameters, values = network(torch.randn(5, 2, 4).to(device))
    assert parameters.shape == (5, 2, 6) and values.shape == (5, 2)
    assert parameters[..., 3:].equal(network.log_std.expand(5, 2, 3))
    parameters[..., 3:].sum().backward()
    assert network.log_std.grad.tolist() == [10, 10, 10]


def test_images_are_flattened(device):
    network = ActorCritic((4, 5, 3), 2).to(device)
    images = torch.rand((7, 2, 4, 5, 3)).to(device)
    outputs, values = network(images)
    assert outputs.shape == (7, 2, 2) and values.shape == (7, 2)
    flat = ActorCritic((60,), 2).to(device)
    flat.load_state_dict(network.state_dict())
    assert flat(images.flatten(2))[0].equal(outputs)


@pytest.mark.parametrize("network", ["mlp", "cnn", "gru", "central"])
@pytest.mark.parametrize(("kind", "scale"), [(Painter, 255), (Stencil, 1)])
def test_bytes_are_divided_by_the_largest_upper_bound(network, kind, scale):
    game, critic = game_of(kind), "central" if network == "central" else "own"
    config = PPOConfig(network="mlp" if critic == "central" else network, critic=critic, hidden_sizes=(8,))
    policy = make_policy(game, list(game.roles), config, None, torch.device("cpu"))
    shape = policy.view.obs_shape
    obs = torch.randint(scale + 1, (6, policy.view.num_agents, *shape), dtype=torch.uint8)
    obs[:, :, 0, 0, 0] = scale
    state = torch.zeros(6, policy.view.num_agents, policy.recurrent_state_size) if network == "gru" else None
    context = Context(obs.flatten(1)[:, None])
    found = policy(obs, state, context=context)
    of_floats = policy(obs.float() / scale, state, context=Context(context.state.float() / scale))
    assert all(a.equal(b) for a, b in zip(found, of_floats, strict=True))
    assert policy(obs.clamp(max=0), state, context=context)[0].ne(found[0]).any()


def test_equal_seeds_give_equal_weights():
    networks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        networks.append(ActorCritic((4,), 2).actor.weight)
    assert networks[0].equal(networks[1]) and not networks[0].equal(networks[2])


def test_the_default_network_fits_its_role():
    for game, role, shape, outputs in (
        (game_of(Crew), "helper", (4,), 5),
        (game_of(Scouts), "pilot", (2, 3, 3), 4),
        (game_of(Painter), "agent", (4, 5, 3), 4),
    ):
        role = role if role in game.roles else next(iter(game.roles))
        view = RoleView(game, [role])
        network = default_network(view, (8, 4), "relu", False)
        assert network.obs_shape == shape and view.num_parameters == outputs
        assert network(torch.zeros(3, *shape))[0].shape == (3, outputs)
        assert (network.log_std is not None) == view.continuous
        assert network.critic_trunk is not None and isinstance(network.trunk[1], nn.ReLU)
        assert [layer.out_features for layer in network.trunk[::2]] == [8, 4]


# Views of roles

VIEWS = [
    # game, arguments, roles, agents, observation, heads, columns
    (Crew, {}, ["driver"], (0, 1), (2,), (5,), [0, 1, 2, 3, 4]),
    (Crew, {"num_helpers": 3}, ["helper"], (1, 4), (4,), (2, 3), [0, 1, 5, 6, 7]),
    (Scouts, {}, ["scout"], (0, 2), (1, 2, 3), (2,), [0, 1]),
    (Scouts, {}, ["pilot"], (2, 3), (2, 3, 3), (4,), [0, 1, 2, 3]),
    (Script, {"num_others": 3, "choices_of_others": 2}, ["other"], (1, 4), (6,), (2,), [0, 1]),
    (Script, {"num_others": 3}, ["lead", "other"], (0, 4), (6,), (4,), [0, 1, 2, 3]),
    (Script, {"num_others": 2, "continuous": True}, ["other"], (1, 3), (6,), (), [0, 1, 2, 3]),
    ("simple_adversary", {}, ["adversary"], (0, 1), (8,), (5,), [0, 1, 2, 3, 4]),
    ("simple_adversary", {}, ["agent"], (1, 3), (10,), (5,), [0, 1, 2, 3, 4]),
    (Painter, {}, None, (0, 1), (4, 5, 3), (), [0, 1, 2, 3]),
    (Economy, {}, ["worker"], (0, 3), (3,), (3, 2), [0, 1, 2, 4, 5]),
    (Economy, {"num_rates": 4}, ["planner"], (3, 4), (2,), (), [0, 1, 2, 3, 4, 5, 6, 7]),
    (Economy, {"num_clerks": 2}, ["clerk"], (4, 6), (2,), (4,), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("kind", "arguments", "roles", "agents", "shape", "heads", "columns"), VIEWS)
def test_a_view_is_a_roles_part_of_each_tensor(kind, arguments, roles, agents, shape, heads, columns, device):
    game = game_of(kind, **arguments)
    view = RoleView(game, roles or list(game.roles), torch.device(device))
    assert (view.agents.start, view.agents.stop) == agents and view.num_agents == agents[1] - agents[0]
    assert view.obs_shape == shape and view.head_sizes == heads
    assert view.continuous == (heads == ()) and view.num_parameters == len(columns)
    width = max(columns[-1] + 1, game.layout.action.num_logits)
    numbers = torch.arange(width, device=device).expand(3, game.num_agents, width)
    mask = view.mask(numbers)
    assert mask is None if view.continuous else mask[0, 0].tolist() == columns
    assert numbers[..., view.parameter_columns][0, 0].tolist() == columns and view.mask(None) is None
    obs = torch.arange(2 * game.num_agents * game.layout.obs_size, device=device)
    obs = obs.view(2, game.num_agents, *game.layout.observation.shape)
    own = view.obs(obs)
    assert own.shape == (2, view.num_agents, *shape)
    corner = tuple(n - 1 for n in shape)
    for environment in range(2):
        for k, agent in enumerate(range(*agents)):
            assert own[(environment, k, *corner)] == obs[(environment, agent, *corner)]
            assert own[environment, k].flatten()[0] == obs[environment, agent].flatten()[0]


@dataclass(frozen=True, kw_only=True)
class Trio(Env):
    """Three roles, of which the outer two are alike; never stepped."""

    observation_of_others: int = 3
    choices_of_others: int = 2

    roles = {"left": 1, "middle": 2, "right": 1}  # noqa: RUF012

    @property
    def obs_dim(self):
        return {"left": 3, "middle": self.observation_of_others, "right": 3}

    @property
    def action_space(self):
        return {"left": Discrete(2), "middle": Discrete(self.choices_of_others), "right": Discrete(2)}


@pytest.mark.parametrize(
    ("arguments", "roles", "message"),
    [
        ({}, ["left", "pilot"], r"unknown role 'pilot' of Trio; the roles are \['left', 'middle', 'right'\]"),
        (
            {"choices_of_others": 3},
            ["left", "middle"],
            r"'middle' of Trio has .*Discrete\(3\), 'left' has .*Discrete\(2\)",
        ),
        ({"observation_of_others": 4}, ["left", "middle"], r"'middle' of Trio has observations \(4,\) and"),
        ({}, ["left", "left"], r"left\+left has left_0 of Trio twice; expected each once"),
        ({}, ["middle_1", "middle"], r"middle_1\+middle has middle_1 of Trio twice"),
        ({}, ["left_0", "middle_2"], r"unknown role 'middle_2' of Trio; .*nearest: middle_1, middle_0"),
        ({"choices_of_others": 3}, ["left_0", "middle_1"], r"'middle' of Trio has .*Discrete\(3\), 'left' has"),
    ],
)
def test_roles_that_cannot_share_are_refused(arguments, roles, message):
    with pytest.raises(ConfigError, match=message):
        RoleView(Trio(**arguments), roles)


def test_a_box_and_choices_share_no_policy():
    message = r"'clerk' of Economy has .*Discrete\(4\), 'planner' has .*Box\(.*: configure one policy for each"
    with pytest.raises(ConfigError, match=message):
        RoleView(Economy(num_rates=1), ["planner", "clerk"])


def test_alike_roles_share():
    view = RoleView(Trio(), ["left", "middle", "right"])
    assert view.agents == slice(0, 4) and RoleView(Trio(), ["middle", "right"]).agents == slice(1, 4)


@pytest.mark.parametrize(
    ("names", "numbers", "roles"),
    [
        (["middle_1"], [2], ("middle",)),
        (["middle_0", "middle_1"], [1, 2], ("middle",)),
        (["right", "left"], [0, 3], ("left", "right")),  # in the order of the game, however they are named
        (["middle_1", "left", "right_0"], [0, 2, 3], ("left", "middle", "right")),
    ],
)
def test_any_agents_with_equal_spaces_have_a_view(names, numbers, roles, device):
    game = Trio()
    view = RoleView(game, names, torch.device(device))
    assert view.name == "+".join(names) and view.roles == roles and view.num_agents == len(numbers)
    assert torch.arange(4, device=device)[view.agents].tolist() == list(view.agent_numbers) == numbers
    assert view.positions()[torch.tensor(numbers)].tolist() == list(range(len(numbers)))
    obs = torch.rand(5, 4, 3, device=device)
    assert equal_bits(view.obs(obs), obs[:, numbers])
    parameters, out = torch.rand(5, len(numbers), 2, device=device), torch.full((5, 4, 2), -1.0, device=device)
    view.write_parameters(parameters, out)
    others = [agent for agent in range(4) if agent not in numbers]
    assert equal_bits(out[:, numbers], parameters) and bool((out[:, others] == -1).all())


def test_agents_have_their_own_rows_and_columns_of_parameters(device):
    game = Economy(num_clerks=2)  # workers use some of the columns of the widest heads
    view = RoleView(game, ["worker_2", "worker_0"], torch.device(device))
    width, columns = game.layout.action.num_logits, [0, 1, 2, 4, 5]
    out, parameters = torch.zeros(3, game.num_agents, width, device=device), torch.rand(3, 2, 5, device=device)
    view.write_parameters(parameters, out)
    assert equal_bits(out[:, [0, 2]][..., columns], parameters)
    assert int((out != 0).sum()) == int((parameters != 0).sum())


# Running normalisation


def batches(shape, device, seed=0):
    """Rows with means of their own, far from 0 and of other scales, and whether they count; the others hold NaN, or
    numbers that would show.
    """
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.uniform(-2, 2, shape)
    for size in (1, 40, 7, 300):
        rows = (random.normal(size=(size, *shape)) * scales + 5 * scales).astype(np.float32)
        counted = random.random(size) < 0.6
        rows[~counted] = np.where(np.arange((~counted).sum()) % 2, np.nan, 1e6).reshape(-1, *[1] * len(shape))
        yield torch.tensor(rows, device=device), torch.tensor(counted, device=device)


def moments_by_numpy(seen, prior=1e-4):
    """Mean and variance of all rows, and of a prior of little weight with mean 0 and variance 1."""
    rows = np.concatenate([x[counted].cpu().double().numpy() for x, counted in seen])
    total = prior + len(rows)
    mean = rows.sum(0) / total
    var = (prior * (1 + mean**2) + ((rows - mean) ** 2).sum(0)) / total
    return mean, var, total


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_statistics_are_those_of_all_rows_that_counted(shape, device):
    normalizer, seen = Normalizer(shape).to(device), []
    for rows, counted in batches(shape, device):
        normalizer.update_from_moments(normalizer.moments(rows, counted))
        seen.append((rows, counted))
        if not any(c.any() for _, c in seen):
            continue
        mean, var, total = moments_by_numpy(seen)
        # A few hundred float64 roundings, of numbers up to 40 times the deviation.
        assert normalizer.mean.cpu().numpy() == pytest.approx(mean, rel=1e-11)
        assert normalizer.var.cpu().numpy() == pytest.approx(var, rel=1e-9)
        assert normalizer.count.item() == pytest.approx(total, rel=1e-14)
    assert {x.dtype for x in normalizer.buffers()} == {torch.float64} and total > 100


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_moments_of_parts_add_up_to_those_of_the_whole(shape, device):
    normalizer = Normalizer(shape).to(device)
    first, *others = [x for x in batches(shape, device) if x[1].any()]
    normalizer.update_from_moments(normalizer.moments(*first))
    rows, counted = others[-1]
    whole = normalizer.moments(rows, counted)
    assert whole.shape == (1 + 2 * math.prod(shape),) and whole.dtype == torch.float64
    assert whole[0] == counted.sum()
    parts = normalizer.moments(rows[:100], counted[:100]) + normalizer.moments(rows[100:], counted[100:])
    # 300 float64 roundings, of sums whose terms may cancel
    size = normalizer.moments(rows.abs(), counted)[1:].abs().max().item()
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12 * size)


def test_a_batch_without_rows_changes_no_bit(device):
    normalizer = Normalizer((3,)).to(device)
    for rows, counted in batches((3,), device):
        normalizer.update_from_moments(normalizer.moments(rows, counted))
        before = copy.deepcopy(normalizer.state_dict())
        nothing = normalizer.moments(torch.full_like(rows, float("nan")), torch.zeros_like(counted))
        assert nothing.eq(0).all()
        normalizer.update_from_moments(nothing)
        normalizer.update_from_moments(normalizer.moments(rows[:0], counted[:0]))
        assert all(x.equal(before[name]) for name, x in normalizer.state_dict().items())


def test_statistics_are_written_in_place(device):
    """A graph that reads them must see them move."""
    normalizer = Normalizer((2,)).to(device)
    places = [x.data_ptr() for x in normalizer.buffers()]
    normalizer.update_from_moments(
        normalizer.moments(torch.randn(9, 2).to(device), torch.ones(9, dtype=torch.bool, device=device))
    )
    assert [x.data_ptr() for x in normalizer.buffers()] == places and normalizer.mean.ne(0).all()


def test_normalised_rows_have_mean_0_and_variance_1_and_are_clamped(device):
    rows = 7 + 3 * torch.randn(4000, 2).to(device)
    normalizer = Normalizer((2,)).to(device)
    assert normalizer(rows).equal(rows.clamp(-10, 10))  # before any row: mean 0, variance 1
    normalizer.update_from_moments(normalizer.moments(rows, torch.ones(4000, dtype=torch.bool, device=device)))
    found = normalizer(rows.view(40, 100, 2))
    assert found.shape == (40, 100, 2) and found.dtype == torch.float32
    # float32 sums of 4000 rows; the first mean and variance weigh as much as 1e-4 of a row
    torch.testing.assert_close(found.mean((0, 1)), torch.zeros(2, device=device), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.var((0, 1), correction=0), torch.ones(2, device=device), rtol=0, atol=1e-4)
    ends = normalizer(torch.tensor([[1e9, -1e9], [float("inf"), -float("inf")]], device=device))
    assert ends.tolist() == [[10, -10], [10, -10]]
    assert normalizer.std.dtype == torch.float32 and normalizer.std.tolist() == pytest.approx([3, 3], rel=0.05)


def test_a_number_that_never_changes_is_0(device):
    normalizer, rows = Normalizer((1,)).to(device), torch.full((10**4, 1), 2.5, device=device)
    normalizer.update_from_moments(normalizer.moments(rows, torch.ones(len(rows), dtype=torch.bool, device=device)))
    # The first mean, 0 with a weight of 1e-4 in 1e4 rows, leaves a mean 2.5e-8 off and a deviation of 2.5e-4 at least.
    assert normalizer(rows).abs().max() < 1e-3


# Policies


@pytest.mark.parametrize("kind", [Script, Painter])
def test_a_policy_normalises_what_goes_in_and_what_comes_out(kind, device):
    game = game_of(kind)
    policy = policy_of(game, *list(game.roles)[:1], device=device, normalize_obs=True, normalize_returns=True)
    plain = Policy(game, policy.view.roles, policy.network, device=torch.device(device))
    shape = policy.view.obs_shape
    rows = torch.randint(256, (50, *shape)).to(torch.uint8 if kind is Painter else torch.float32).to(device)
    returns, all_rows = 100 + 20 * torch.randn(50).to(device), torch.ones(50, dtype=torch.bool, device=device)
    assert policy.value_scale == 1 and plain.value_scale == 1.0
    for normalizer, seen in ((policy.obs_normalizer, rows), (policy.return_normalizer, returns)):
        normalizer.update_from_moments(normalizer.moments(seen, all_rows))
    parameters, values = policy(rows.view(5, 10, *shape))
    seen, unit = rows.double(), returns.double().std(correction=0)
    deviation = (seen.var(0, correction=0) + 1e-8).sqrt()
    inside = ((seen - seen.mean(0)) / deviation).float()
    expected, raw = plain(inside)
    # 50 rows beside a prior that weighs 1e-4 of a row: 2e-6 of a mean of 128, in units of a deviation of 70.
    torch.testing.assert_close(parameters.flatten(0, 1), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(values.flatten(), raw * unit.float() + returns.mean(), rtol=1e-3, atol=1e-2)
    assert float(policy.value_scale) == pytest.approx(float(unit), rel=1e-3)
    assert parameters.dtype == values.dtype == torch.float32
    before, unnormalised = plain(rows)
    assert not before.equal(expected) and unnormalised.dtype == torch.float32
    names = {name.split(".")[0] for name in policy.state_dict()}
    assert names == {"network", "obs_normalizer", "return_normalizer"}
    assert {name.split(".")[0] for name in plain.state_dict()} == {"network"}


def test_bfloat16_rounds_products_and_gives_float32(device):
    game = game_of(Script)
    exact = policy_of(game, "lead", device=device)
    mixed = Policy(game, ["lead"], exact.network, bfloat16=True, device=torch.device(device))
    for p in exact.parameters():
        nn.init.normal_(p, std=0.5)
    obs = torch.randn(100, 6).to(device)
    (parameters, values), (rounded, rounded_values) = exact(obs), mixed(obs)
    assert rounded.dtype == rounded_values.dtype == torch.float32 and not rounded.equal(parameters)
    # Two layers of factors with 8 bits, sums of magnitude up to 4.
    torch.testing.assert_close(rounded, parameters, rtol=0, atol=0.1)
    torch.testing.assert_close(rounded_values, values, rtol=0, atol=0.1)
    (rounded.sum() + rounded_values.sum()).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixed.parameters())


def test_weights_are_loaded_in_place(device):
    game = game_of(Script)
    one, other = (policy_of(game, "lead", device=device, normalize_obs=True) for _ in range(2))
    places = [x.data_ptr() for x in one.state_dict().values()]
    one.load_weights({name: x.cpu() for name, x in other.state_dict().items()})
    assert all(x.equal(other.state_dict()[name]) for name, x in one.state_dict().items())
    assert [x.data_ptr() for x in one.state_dict().values()] == places


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "normaliser"])
def test_weights_of_another_policy_are_refused(fault, device):
    game = game_of(Script)
    policy = policy_of(game, "lead", device=device)
    weights = {name: x + 1 for name, x in policy.state_dict().items()}
    if fault == "missing":
        del weights["network.critic.bias"]
    elif fault == "unknown":
        weights["network.extra"] = torch.zeros(1)
    elif fault == "shape":
        weights["network.critic.bias"] = torch.zeros(2)
    else:
        weights |= policy_of(game, "lead", normalize_obs=True).state_dict()
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(ConfigError, match=r"weights for lead are .*critic.*; expected those of this policy: .*critic"):
        policy.load_weights(weights)
    assert all(x.equal(before[name]) for name, x in policy.state_dict().items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value, device):
    policy = policy_of(game_of(Script), "lead", device=device, normalize_obs=True)
    before = copy.deepcopy(policy.state_dict())
    for name in ("network.critic.bias", "obs_normalizer.mean"):
        weights = {key: x + 1 for key, x in before.items()}
        weights[name][0] = value
        with pytest.raises(ConfigError, match=f"weights for lead have NaN or infinite values in {name}$"):
            policy.load_weights(weights)
        assert all(x.equal(before[key]) for key, x in policy.state_dict().items())


# Actions


class Fixed(nn.Module):
    """The same parameters everywhere."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters_of_all = nn.Parameter(torch.tensor(parameters))

    def forward(self, obs):
        return self.parameters_of_all.expand(*obs.shape[:2], -1), obs[..., 0] * 0


def fixed(game, role, parameters, device, **settings):
    return Policy(game, [role], Fixed(parameters), device=torch.device(device), **settings)


def check_frequencies(actions, probabilities):
    """A chi-square test of the choices that are possible; the others never come."""
    counts = np.bincount(actions.flatten().cpu().numpy(), minlength=len(probabilities))
    p = np.asarray(probabilities, np.float64)
    assert len(counts) == len(p) and (counts[p == 0] == 0).all()
    if (p > 0).sum() > 1:
        expected = p[p > 0] / p.sum() * counts.sum()
        assert scipy.stats.chisquare(counts[p > 0], expected).pvalue > P_VALUE
        flat = np.full((p > 0).sum(), counts.sum() / (p > 0).sum())  # so many draws tell it from another
        assert scipy.stats.chisquare(counts[p > 0], flat).pvalue < P_VALUE


def test_drawn_choices_follow_softmax(device):
    logits = [1.0, 0.0, -2.0, 2.0]
    policy = fixed(game_of(Script), "lead", logits, device)
    obs = torch.zeros(500, 40, 6, device=device)
    actions = policy.act(obs, generator=seeded_on(device))
    assert actions.shape == (500, 40) and actions.dtype == torch.int32
    check_frequencies(actions, scipy.special.softmax(logits))
    assert policy.act(obs, generator=seeded_on(device)).equal(actions)
    assert not policy.act(obs, generator=seeded_on(device, 1)).equal(actions)
    assert policy.act(obs, greedy=True).eq(3).all()
    assert not actions.requires_grad


def test_torchs_own_generator_serves_where_none_is_given(device):
    policy = fixed(game_of(Script), "lead", [0.0] * 4, device)
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(policy.act(torch.zeros(10, 4, 6, device=device)))
    assert draws[0].equal(draws[1]) and not draws[0].equal(draws[2])


def test_masked_choices_never_come_and_the_others_keep_their_odds(device):
    """Helpers have two heads, of 2 and 3 choices."""
    logits = [1.0, 0.0, 0.0, -1.0, 3.0]
    policy = fixed(game_of(Crew), "helper", logits, device)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 1, 0]], dtype=torch.bool, device=device)
    mask = mask.repeat(5000, 1)[:, None]
    obs = torch.zeros(15000, 1, 4, device=device)
    actions = policy.act(obs, mask, generator=seeded_on(device))
    assert actions.shape == (15000, 1, 2) and actions.dtype == torch.int32
    for row in range(3):
        weights = np.exp(logits) * mask[row, 0].cpu().numpy()
        check_frequencies(actions[row::3, :, 0], weights[:2])
        check_frequencies(actions[row::3, :, 1], weights[2:])
    both = actions[1::3, 0].double()  # heads are drawn apart: no correlation where one is certain, or by chance
    assert both[:, 0].eq(1).all()
    free = policy.act(obs, generator=seeded_on(device))[:, 0].double().T
    # Of 15000 independent pairs the correlation has a deviation of 1 / sqrt(15000).
    assert abs(torch.corrcoef(free)[0, 1].item()) < 5 / math.sqrt(15000)
    greedy = policy.act(obs, mask, greedy=True)
    assert greedy[:3, 0].tolist() == [[0, 0], [1, 2], [0, 1]]


def test_without_any_choice_some_action_is_given(device):
    """As for agents that have left the game."""
    policy = fixed(game_of(Crew), "helper", [1.0, 0.0, 0.0, -1.0, 3.0], device)
    obs, mask = torch.zeros(100, 2, 4, device=device), torch.zeros(100, 2, 5, dtype=torch.bool, device=device)
    for greedy in (False, True):
        actions = policy.act(obs, mask, greedy=greedy)
        assert (actions >= 0).all() and (actions < torch.tensor([2, 3], device=device)).all()


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_continuous_actions_are_squashed_gaussians_in_their_box(squash, device):
    """The painter's Box: [-1, 1] x [0, 3]."""
    game = game_of(Painter)
    role = next(iter(game.roles))
    means, log_stds = [0.3, -0.8], [-0.5, 0.4]
    policy = fixed(game, role, [*means, *log_stds], device, squash=squash)
    obs = torch.zeros(20000, 1, 4, 5, 3, dtype=torch.uint8, device=device)
    actions = policy.act(obs, generator=seeded_on(device))
    assert actions.shape == (20000, 1, 2) and actions.dtype == torch.float32
    assert policy.act(obs, generator=seeded_on(device)).equal(actions)
    assert not policy.act(obs, generator=seeded_on(device, 1)).equal(actions)
    low, high = np.array([-1, 0]), np.array([1, 3])
    numbers = actions[:, 0].cpu().double().numpy()
    assert (numbers >= low).all() and (numbers <= high).all()
    inside = (numbers - (low + high) / 2) / ((high - low) / 2)
    for k in range(2):
        normal = scipy.stats.norm(means[k], math.exp(log_stds[k]))
        if squash == "tanh":
            # tanh is monotonous; the ends, where float32 cannot tell actions apart, have next to no weight.
            draws = np.arctanh(inside[:, k].clip(-1 + 1e-7, 1 - 1e-7))
            assert scipy.stats.kstest(draws, normal.cdf).pvalue > P_VALUE
            continue
        for end, share in ((-1, normal.cdf(-1)), (1, normal.sf(1))):
            count = int(np.isclose(inside[:, k], end, atol=1e-6).sum())
            assert scipy.stats.binomtest(count, 20000, share).pvalue > P_VALUE
        middle = inside[:, k][abs(inside[:, k]) < 1 - 1e-6]
        part = scipy.stats.truncnorm((-1 - means[k]) / normal.std(), (1 - means[k]) / normal.std(), *normal.args)
        assert scipy.stats.kstest(middle, part.cdf).pvalue > P_VALUE
    greedy = policy.act(obs[:1], greedy=True)[0, 0].tolist()
    exact = np.tanh(means) if squash == "tanh" else np.clip(means, -1, 1)
    assert greedy == pytest.approx((low + high) / 2 + (high - low) / 2 * exact, abs=1e-6)


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.1, 0.3), (-3e38, 3e38), (1e8, 1e8 + 64), (-7.7, -7.3)])
def test_squashed_draws_never_leave_the_box(bounds, squash, device):
    action_bounds = torch.tensor(bounds, device=device)[:, None]
    draws = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([3e38, -3e38, torch.inf, -torch.inf, 0.0])])
    found = squashed(draws[:, None].to(device), action_bounds, squash)[:, 0].cpu().double()
    low, high = torch.tensor(bounds).double()
    assert (found >= low).all() and (found <= high).all()
    exact = draws.double().tanh() if squash == "tanh" else draws.double().clamp(-1, 1)
    # Roundings of tanh, of the middle, the half width, the product and the sum; the first in units of the half width.
    size = max(abs(low), abs(high))
    assert (found - (low / 2 + high / 2 + (high / 2 - low / 2) * exact)).abs().max() <= 8 * HALF_ULP * size
    assert squashed(torch.full((1, 1), float("nan"), device=device), action_bounds, squash).isnan().all()


# Log-probabilities and entropies


def categorical(logits, actions, sizes, mask=None):
    """By torch's distributions in float64; heads without a choice add nothing."""
    log_probs, entropies = torch.zeros(2, len(logits), dtype=torch.float64, device=logits.device)
    masks = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    parts = zip(logits.split(sizes, -1), masks.split(sizes, -1), strict=True)
    for head, (part, allowed) in enumerate(parts):
        exists = allowed.any(-1)
        odds = part.masked_fill(~allowed, -torch.inf).masked_fill(~exists[:, None], 0)
        distribution = torch.distributions.Categorical(logits=odds)
        log_probs = log_probs + torch.where(exists, distribution.log_prob(actions[:, head].clamp(min=0)), 0)
        entropies = entropies + torch.where(exists, distribution.entropy(), 0)
    return log_probs, entropies


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("sizes", [[4], [2, 3], [5, 1, 4]])
def test_choices_have_the_log_probabilities_of_their_softmax(sizes, with_mask, scale, device):
    logits = (scale * torch.randn(400, sum(sizes))).to(device)
    mask = (torch.rand(400, sum(sizes)) < 0.6).to(device) if with_mask else None
    actions = torch.stack([torch.randint(n, (400,)) for n in sizes], -1).int().to(device)
    if mask is not None:  # a choice that was made was allowed, or there was none
        for head, part in enumerate(mask.split(sizes, -1)):
            actions[:, head] = part.int().argmax(-1)
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, expected = log_probs_and_entropies(given, actions, sizes, mask), categorical(exact, actions, sizes, mask)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        # Sums of at most 5 exponentials, differences of logits up to 4 scales: a few half ulps of those.
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=(1 + scale) * 1e-6)
    # Below 1, or torch's entropy of an excluded choice, the lowest number, overflows on its way back.
    weights = torch.rand(2, 400, dtype=torch.float64).to(device)
    sum((weights[k] * expected[k]).sum() for k in range(2)).backward()
    sum((weights[k].float() * found[k]).sum() for k in range(2)).backward()
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=(1 + scale) * 1e-5)
    if mask is not None:
        assert given.grad[~mask].eq(0).all()


def test_excluded_choices_and_lost_draws(device):
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 0.0, 0.0]], device=device).requires_grad_()
    actions = torch.tensor([[2], [-1]], dtype=torch.int32, device=device)
    log_probs, entropies = log_probs_and_entropies(logits, actions, [3])
    assert [log_probs[0].item(), entropies[0].item()] == pytest.approx([-math.log(2), math.log(2)])
    assert log_probs[1].isnan() and entropies[1].isnan()
    (log_probs[0] + entropies[0]).backward()
    assert logits.grad[0].isfinite().all()


def test_masked_logits(device):
    logits, mask = torch.randn(5, 3).to(device), torch.tensor([True, False, True], device=device).expand(5, 3)
    found = masked(logits, mask)
    assert found[:, [0, 2]].equal(logits[:, [0, 2]]) and masked(logits, None) is logits
    assert found.softmax(-1)[:, 1].eq(0).all() and found.isfinite().all()


def gaussian(parameters, draws, squash):
    """By torch's distributions; of tanh, the density of the squashed action, of which torch keeps the draw."""
    means, log_stds = parameters.chunk(2, -1)
    normal = torch.distributions.Normal(means, log_stds.exp())
    if squash == "clip":
        return normal.log_prob(draws).sum(-1), normal.entropy().sum(-1)
    transform = torch.distributions.transforms.TanhTransform(cache_size=1)
    actions = transform(draws)
    return torch.distributions.TransformedDistribution(normal, transform).log_prob(actions).sum(
        -1
    ), normal.entropy().sum(-1)


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("k", [1, 3])
def test_gaussian_densities_are_those_of_torchs_distributions(k, squash, device):
    means, log_stds = 2 * torch.randn(500, k), torch.randn(500, k)
    draws = (means + log_stds.exp() * torch.randn(500, k)).to(device)
    parameters = torch.cat([means, log_stds], -1).to(device)
    given, exact = parameters.clone().requires_grad_(), parameters.double().requires_grad_()
    found = gaussian_log_probs_and_entropies(given, draws, squash)
    expected = gaussian(exact, draws.double(), squash)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (500,) and one.dtype == torch.float32
        # Differences of numbers near 10 in units of deviations down to 0.03: a rounding of 1e-6 counts 30 times.
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    weights = torch.randn(2, 500, dtype=torch.float64).to(device)
    sum((weights[i] * expected[i]).sum() for i in range(2)).backward()
    sum((weights[i].float() * found[i]).sum() for i in range(2)).backward()
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_gaussian_densities_by_scipy(device):
    """Even where tanh is 1 in float64: 1 - tanh(u)^2 is 1 / cosh(u)^2, whose logarithm loses nothing."""
    draws = torch.tensor([[-40.0], [-15.0], [0.0], [0.5], [15.0], [40.0]], device=device)
    parameters = torch.tensor([[0.5, math.log(20.0)]], device=device).expand(6, 2)
    u = draws[:, 0].cpu().double().numpy()
    normal = scipy.stats.norm(0.5, 20.0)
    clip, entropy = gaussian_log_probs_and_entropies(parameters, draws, "clip")
    assert clip.tolist() == pytest.approx(normal.logpdf(u), rel=1e-5)
    assert entropy.tolist() == pytest.approx([normal.entropy()] * 6, rel=1e-6)
    tanh, same = gaussian_log_probs_and_entropies(parameters, draws, "tanh")
    slopes = 2 * (math.log(2) - np.logaddexp(u, -u))
    assert tanh.tolist() == pytest.approx(normal.logpdf(u) - slopes, rel=1e-5)
    assert same.equal(entropy)


def test_a_density_of_tanh_integrates_to_one(device):
    a = torch.linspace(-1, 1, 200001, dtype=torch.float64)[1:-1]
    u = torch.atanh(a)
    log_probs, _ = gaussian_log_probs_and_entropies(
        torch.tensor([[0.4, -0.7]]).double().expand(len(u), 2), u[:, None], "tanh"
    )
    # By rectangles of 1e-5; the density is smooth and falls to 0 at both ends.
    assert log_probs.exp().mean().item() * 2 * len(a) / (len(a) + 1) == pytest.approx(1, abs=1e-6)


# Agreement with the sampler


@pytest.mark.parametrize(
    ("kind", "arguments", "role", "squash"),
    [
        (Crew, {}, "driver", "clip"),
        (Crew, {"num_helpers": 3}, "helper", "clip"),
        (Scouts, {}, "scout", "clip"),
        (Scouts, {}, "pilot", "clip"),
        (Script, {"num_others": 2, "choices_of_others": 3}, "other", "clip"),
        (Painter, {}, None, "clip"),
        (Painter, {}, None, "tanh"),
        (Painter, {}, None, "beta"),
        (Script, {"num_leads": 2, "continuous": True}, "lead", "tanh"),
        (Economy, {}, "worker", "tanh"),
        (Economy, {}, "planner", "clip"),
        (Economy, {"num_rates": 4}, "planner", "tanh"),
        (Economy, {"num_rates": 4}, "planner", "beta"),
        (Economy, {"num_rates": 1}, "clerk", "clip"),
    ],
)
def test_a_policy_and_the_sampler_agree_on_the_same_parameters(kind, arguments, role, squash, device):
    env = gpu_vecenv.make(kind, 200, device, **arguments)
    _, info = env.reset(seed=3)
    game = env.game
    role = role or next(iter(game.roles))
    policy = policy_of(game, role, device=device, squash=squash)
    view, sampler = policy.view, Sampler(env, squash)
    own = torch.randn(200, view.num_agents, view.num_parameters).to(device)
    all_parameters = torch.zeros(200, game.num_agents, sampler.num_parameters, device=device)
    mask = info.get("action_mask")
    own_mask = None if mask is None else view.mask(mask[:, view.agents])
    all_parameters[:, view.agents][..., view.parameter_columns] = masked(own, own_mask)
    sample = sampler.sample(all_parameters)
    drawn = sample.actions if sample.draws is None else sample.draws
    draws = drawn[:, view.agents].reshape(200 * view.num_agents, -1)[:, : view.num_heads]
    own_mask = None if own_mask is None else own_mask.flatten(0, 1)
    log_probs, entropies = policy.log_probs_and_entropies(own.flatten(0, 1), draws, own_mask)
    for found, stored in ((log_probs, sample.log_probs), (entropies, sample.entropies)):
        # Two implementations; each number is a sum over at most two heads of terms of magnitude up to 10, and a draw
        # is divided by deviations down to 0.03.
        torch.testing.assert_close(found, stored[:, view.agents].flatten(), rtol=1e-5, atol=2e-5)
    # Of a scout's two choices one is allowed: what it does is certain.
    assert log_probs.unique().numel() > 10 or kind is Scouts
    if view.continuous:
        again = squashed(draws, policy.action_bounds, squash)
        torch.testing.assert_close(again, sample.actions[:, view.agents].flatten(0, 1), rtol=0, atol=1e-6)


def test_indices_of_agents_that_are_apart_follow_their_policy_to_another_device():
    view = RoleView(Trio(), ["right_0", "left"])
    assert view.agents.device.type == "cpu"
    moved = view.to("meta")
    assert moved.agents.device.type == moved.positions().device.type == "meta" and not view.state_dict()


@pytest.mark.parametrize(
    ("agent_ids", "obs", "error", "message"),
    [
        (True, torch.zeros(5, 18), ValueError, r"obs has shape \(5, 18\); expected \(…, 3, 18\)"),
        (True, torch.zeros(2, 1, 18), ValueError, r"obs has shape \(2, 1, 18\); expected \(…, 3, 18\)"),
        (False, torch.zeros(5, 17), ValueError, r"obs has shape \(5, 17\); expected \(…, 18\)"),
        (False, torch.zeros(5, 18).double(), TypeError, "obs has dtype torch.float64; expected torch.float32 or"),
        (
            False,
            np.zeros((5, 18), np.float32),
            TypeError,
            r"obs is a ndarray; expected .*: torch.as_tensor\(obs, device=",
        ),
        (False, torch.zeros(5, 18, device="meta"), ValueError, "obs is on meta; expected a torch tensor on cpu"),
    ],
)
def test_observations_that_do_not_fit_are_refused_with_what_does(agent_ids, obs, error, message):
    game, size = gpu_vecenv.configure("simple_spread"), 18 + 3 * agent_ids
    network = ActorCritic((size,), 5, (8,))
    policy = Policy(game, ["agent"], network, agent_ids=agent_ids)
    with pytest.raises(error, match=message):
        policy.act(obs)
    assert policy.act(torch.zeros(2, 3, 18)).shape == (2, 3)
