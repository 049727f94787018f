"""Networks of images and of entities: what they compute, what they do not depend on, and training with them."""

import copy
import dataclasses
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from games.bids import Bids
from games.painter import Painter
from games.quadrant import Quadrant
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from support.cases import mostly_exhaustive
from support.emulated_cuda import EmulatedCudaBackend
from support.kernel_trainers import products_in
from torch import nn

import gpu_vecenv
from gpu_vecenv import PolicySpec, PPOConfig, Trainer, load_policy
from gpu_vecenv.compile import function_manager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.obs_parts import Entities, ObservationParts, Own
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.convolutions import PRODUCT_IMAGES, ImageConvolution
from gpu_vecenv.train.encoders import ENTITY_UNITS, EncodedActorCritic, ImageEncoder, PartsEncoder
from gpu_vecenv.train.normalizers import Normalizer
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.ppo import make_policy
from gpu_vecenv.train.role_view import RoleView

CONFIG = PPOConfig(total_steps=10**6, num_steps=4, num_epochs=2, num_minibatches=2, hidden_sizes=(16,))
# A sum of n numbers in another order differs by at most n half ulp of the sum of their magnitudes: here n is at most 7,
# magnitudes are below 1 or so, and two layers follow.
TOLERANCE = {"rtol": 2.0**-18, "atol": 2.0**-18}
# Features of one list from two places, presence among them; what is the agent's own is before, between and after.
PARTS = ObservationParts.of(
    "Game",
    "agent",
    (
        Own("velocity", 2),
        Entities("other", 7, 3, presence=1, by_feature=True),
        Own("time", 1),
        Entities("wall", 4, 2),
        Entities("other", 7, 1),
        Own("goal", 2),
    ),
)
SIZE = 41


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def randomized(network):
    """With weights and biases that make every input count."""
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)
    return network


def observations(rows):
    """(rows, SIZE), with about half of the entities present."""
    obs = torch.randn(rows, SIZE)
    presence = [columns[1] for columns in PARTS.entities[0].columns]
    obs[:, presence] = (torch.rand(rows, len(presence)) < 0.5).float()
    return obs


def permuted(obs, entities, order):
    """Observations whose entities are in another order."""
    moved = obs.clone()
    columns = torch.tensor(entities.columns)
    moved[..., columns] = obs[..., columns[order]]
    return moved


# Entities


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_order_of_entities_does_not_matter(index, activation, device):
    encoder = randomized(PartsEncoder(PARTS, activation)).to(device)
    entities, obs = PARTS.entities[index], observations(50)
    expected = encoder(obs.to(device))
    for _ in range(5):
        moved = permuted(obs, entities, torch.randperm(entities.count))
        torch.testing.assert_close(encoder(moved.to(device)), expected, **TOLERANCE)


def test_every_number_of_an_entity_that_is_there_matters_and_none_of_others(device):
    encoder, obs = randomized(PartsEncoder(PARTS, "tanh")).to(device), observations(1)
    entities = PARTS.entities[0]
    obs[0, entities.columns[2][1]], obs[0, entities.columns[3][1]] = 1, 0
    before = encoder(obs.to(device))
    for entity, feature in ((entity, feature) for entity in (2, 3) for feature in (0, 2, 3)):
        changed = obs.clone()
        changed[0, entities.columns[entity][feature]] += 1
        assert encoder(changed.to(device)).equal(before) == (entity == 3), (entity, feature)
    for column in PARTS.own_columns:
        changed = obs.clone()
        changed[0, column] += 1
        assert not encoder(changed.to(device)).equal(before)


def test_the_encoding_is_mean_and_maximum_of_two_layers(device):
    """In float64, entity by entity."""
    encoder, obs = randomized(PartsEncoder(PARTS, "tanh")).to(device), observations(30)
    found = encoder(obs.to(device)).cpu().double()
    own = obs[:, list(PARTS.own_columns)].double()
    assert found[:, : own.shape[1]].equal(own)
    start = own.shape[1]
    exact = copy.deepcopy(encoder).cpu().double()
    for entities, layers in zip(PARTS.entities, exact.lists, strict=True):
        for row in range(len(obs)):
            there = []
            for columns in entities.columns:
                numbers = obs[row, list(columns)].double()
                if entities.presence is None or numbers[entities.presence] != 0:
                    hidden = (layers.of_entity(numbers) + layers.of_own(own[row])).tanh()
                    there.append(layers.layers[0](hidden).tanh())
            there = torch.stack(there) if there else torch.zeros(1, ENTITY_UNITS, dtype=torch.float64)
            expected = torch.cat([there.mean(0), there.amax(0)])
            # tanh of sums of 64 products of magnitude 1 or so, each off by half an ulp.
            torch.testing.assert_close(found[row, start : start + 2 * ENTITY_UNITS], expected, rtol=0, atol=1e-5)
        start += 2 * ENTITY_UNITS
    assert start == found.shape[1] == encoder.size


def test_without_entities_the_encoding_is_zero_and_gradients_are_finite(device):
    encoder, obs = randomized(PartsEncoder(PARTS, "relu")).to(device), observations(3)
    obs[:, [columns[1] for columns in PARTS.entities[0].columns]] = 0
    found = encoder(obs.to(device))
    others = found[:, len(PARTS.own_columns) :][:, : 2 * ENTITY_UNITS]
    assert not others.any()
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    assert not any(p.grad.any() for p in encoder.lists[0].parameters())


def test_entities_are_normalised_alike(device):
    """With the statistics of all entities of the list; presence is left as it is."""
    normalizer, rows = Normalizer((SIZE,), PARTS.entities).to(device), observations(500) * 3
    presence = [columns[1] for columns in PARTS.entities[0].columns]
    rows[:, presence] = (rows[:, presence] != 0).float()
    wall = torch.tensor(PARTS.entities[1].columns)
    rows[..., wall] += torch.arange(8.0).view(4, 2)  # places and features differ
    normalizer.update_from_moments(normalizer.moments(rows.to(device), torch.ones(500, dtype=torch.bool).to(device)))
    found = normalizer(rows.to(device)).cpu()
    assert found[:, presence].equal(rows[:, presence])
    walls = rows[..., wall].double()
    mean, std = walls.mean((0, 1)), walls.std((0, 1), correction=0)
    # Beside rounding: the weight 1e-4 of the initial statistics, among 500 rows.
    torch.testing.assert_close(found[..., wall].double(), (walls - mean) / std, rtol=1e-5, atol=1e-5)
    own = list(PARTS.own_columns)
    plain = Normalizer((SIZE,)).to(device)
    plain.load_state_dict(normalizer.state_dict())
    assert equal_bits(found[:, own], plain(rows.to(device)).cpu()[:, own])


# Images


@pytest.mark.parametrize(
    ("shape", "maps"),
    [
        ((84, 84, 4), [(32, 20, 20), (64, 9, 9), (64, 7, 7)]),
        ((36, 50, 3), [(32, 8, 11), (64, 3, 4), (64, 1, 2)]),
        ((35, 50, 3), [(16, 18, 25), (32, 9, 13), (32, 5, 7)]),
        ((8, 8, 3), [(16, 8, 8), (32, 8, 8), (32, 8, 8)]),
        ((1, 9, 1), [(16, 1, 5), (32, 1, 5), (32, 1, 5)]),
    ],
)
def test_the_layers_follow_the_size_of_the_image(shape, maps, device):
    encoder, found = ImageEncoder(shape).to(device), []
    for layer in encoder.convolutions[::2]:
        layer.register_forward_hook(lambda layer, inputs, output: found.append(tuple(output.shape[1:])))
    assert encoder(torch.zeros(2, 3, *shape, device=device)).shape == (2, 3, encoder.size)
    assert encoder(torch.zeros(*shape, device=device)).shape == (encoder.size,)
    assert found == maps * 2


def test_images_keep_rows_and_columns(device):
    encoder = randomized(ImageEncoder((4, 5, 3))).to(device)
    images = torch.rand((6, 2, 4, 5, 3)).to(device)
    with products_in("float32"):
        found = encoder(images)
        rows = images.flatten(0, 1).permute(0, 3, 1, 2).contiguous()
        expected = encoder.convolutions(rows).flatten(1)
    # Products of other memory layouts are summed in another order: at most 9 x 32 of magnitude below 10.
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


# Policies


def game_of(kind, **arguments):
    return gpu_vecenv.make(kind, 1, "cpu", **arguments).game


@pytest.mark.parametrize("shared_trunk", [True, False])
@pytest.mark.parametrize(("kind", "network"), [(Painter, "cnn"), ("simple_spread", "entities")])
def test_heads_and_trunks(kind, network, shared_trunk, device):
    game = game_of(kind)
    (role,) = game.roles
    config = PPOConfig(network=network, hidden_sizes=(8,), shared_trunk=shared_trunk)
    policy = make_policy(game, [role], config, None, torch.device(device))
    assert isinstance(policy.network, EncodedActorCritic) and (policy.network.log_std is not None) == (kind is Painter)
    space = game.layout.observation.spaces[role]
    rows = torch.stack([torch.as_tensor(space.sample()) for _ in range(20)]).to(device)
    parameters, values = policy(rows)
    assert parameters.shape == (20, policy.view.num_parameters) and values.shape == (20,)
    of_actor = torch.autograd.grad(parameters.sum(), list(policy.network.trunk.parameters()), retain_graph=True)
    of_critic = torch.autograd.grad(values.sum(), list(policy.network.trunk.parameters()), allow_unused=True)
    assert any(g.any() for g in of_actor)
    assert (of_critic[0] is not None) == shared_trunk


@pytest.mark.parametrize(
    ("kind", "network", "text"),
    [
        ("cartpole", "cnn", r'network is "cnn", but observations of agent have shape \(4,\)'),
        ("cartpole", "entities", 'network is "entities", but the game declares no lists of entities'),
        (Painter, "entities", "declares no lists"),
    ],
)
def test_a_network_that_does_not_fit_the_observations_is_refused(kind, network, text):
    game = game_of(kind)
    with pytest.raises(ConfigError, match=text):
        default_network(RoleView(game, list(game.roles)), (8,), kind=network)


class Pair(Env):
    """Observations of equal length, and parts that differ."""

    state = ()
    source = Path("pair.cu")
    action_space = Discrete(2)
    roles = MappingProxyType({"a": 1, "b": 1})
    obs_parts = MappingProxyType({"a": (Own("x", 2), Entities("agent", 2, 2)), "b": (Entities("agent", 3, 2),)})


def test_roles_share_such_a_policy_if_their_parts_are_equal():
    tag = game_of("tag_continuous")
    assert isinstance(default_network(RoleView(tag, ["tagger", "runner"]), (8,), kind="entities"), EncodedActorCritic)
    default_network(RoleView(Pair(), ["b"]), (8,), kind="entities")
    with pytest.raises(ConfigError, match="no lists of entities that observations of a and b have"):
        default_network(RoleView(Pair(), ["a", "b"]), (8,), kind="entities")


def weights_of(trainer):
    return {
        f"{name}.{key}": tensor.clone()
        for name, policy in trainer.policies.items()
        for key, tensor in policy.state_dict().items()
    }


SETUPS = [
    (Painter, {}, {"network": "cnn"}),
    ("simple_tag", {}, {"network": "entities", "shared_trunk": False}),
    ("tag_continuous", {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3}, {"network": "entities"}),
]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("kind", "arguments", "settings"), SETUPS)
def test_training_repeats_resumes_and_is_loaded_without_an_environment(
    kind, arguments, settings, normalized, device, tmp_path
):
    config = dataclasses.replace(CONFIG, normalize_obs=normalized, **settings)

    def made():
        return Trainer(gpu_vecenv.make(kind, 4, device, **arguments), config, seed=5)

    one, other = made(), made()
    start = weights_of(one)
    for _ in range(2):
        one.train_iteration()
    one.save(tmp_path / "half.safetensors")
    metrics = one.train_iteration()
    assert all(v == v for k, v in metrics.items() if k.startswith(("policy_loss", "grad_norm")))
    other.load(tmp_path / "half.safetensors")
    other.train_iteration()
    found, again = weights_of(one), weights_of(other)
    assert all(equal_bits(found[name], again[name]) for name in found)
    trained = [name for name in found if "normalizer" not in name]
    assert all(not found[name].equal(start[name]) for name in trained)
    one.save(tmp_path / "run.safetensors")
    obs = one.env.observe()
    policy = load_policy(tmp_path / "run.safetensors", game=one.env.game, device=device)
    for role, own in policy.policies.items():
        rows = own.view.obs(obs)
        assert equal_bits(own(rows)[0], one.role_policies()[role](rows)[0])


# Image, channels, filters, kernel, stride, padding: with padding and without, and where strides leave cells out.
SMALL_IMAGES = [((5, 8), 26, 32, 5, 1, 2), ((4, 5), 3, 4, 3, 1, 0), ((7, 6), 2, 3, 3, 2, 1)]


@pytest.mark.parametrize("sizes", SMALL_IMAGES, ids=str)
def test_a_product_takes_the_place_of_a_convolution(sizes):
    layer = ImageConvolution(*sizes).double()
    images = torch.randn(6, *sizes[0], sizes[1]).double().movedim(-1, 1).requires_grad_()
    found = []
    for outputs in (layer.product(images, layer.places), layer(images)):
        assert outputs.shape == (6, sizes[2], *layer.output_shape)
        found.append((outputs, *torch.autograd.grad(outputs.cos().sum(), (images, *layer.parameters()))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)  # in float64; sums in another order


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SMALL_IMAGES, ids=str)
def test_many_images_are_convolved_as_few_are(sizes, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = ImageConvolution(*sizes).cuda()
    images = torch.randn(PRODUCT_IMAGES, *sizes[0], sizes[1], device="cuda").movedim(-1, 1)
    # Sums of up to 650 products of magnitude 1, of which float32 keeps 24 bits, in another order.
    halves = torch.cat([layer(half) for half in images.split(PRODUCT_IMAGES // 2)])
    torch.testing.assert_close(layer(images), halves, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "arguments", "settings"), SETUPS)
def test_graphs_change_no_bit(kind, arguments, settings):
    config = dataclasses.replace(CONFIG, normalize_obs=True, normalize_returns=True, **settings)
    found = []
    for graphs in (True, False):
        trainer = Trainer(gpu_vecenv.make(kind, 64, "cuda", **arguments), config, graphs=graphs)
        for _ in range(4):
            trainer.train_iteration()
        found.append(weights_of(trainer))
    assert all(equal_bits(found[0][name], found[1][name]) for name in found[0])


def test_loading_changes_no_random_state(tmp_path):
    trainer = Trainer(gpu_vecenv.make("simple_spread", 4, "cpu"), dataclasses.replace(CONFIG, network="entities"))
    trainer.save(tmp_path / "a.safetensors")
    before = torch.get_rng_state()
    load_policy(tmp_path / "a.safetensors", device="cpu")
    assert torch.get_rng_state().equal(before)


def test_weights_of_another_network_are_refused(tmp_path):
    trainer = Trainer(gpu_vecenv.make("simple_spread", 4, "cpu"), dataclasses.replace(CONFIG, network="entities"))
    trainer.save(tmp_path / "a.safetensors")
    plain = Trainer(gpu_vecenv.make("simple_spread", 4, "cpu"), CONFIG)
    with pytest.raises(ConfigError, match="network is 'entities', this trainer's 'mlp'"):
        plain.load(tmp_path / "a.safetensors")


def test_the_log_says_why_torch_computes_these_networks(monkeypatch):
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    env = gpu_vecenv.make("simple_tag", 2, "cpu")
    specs = {"adversary": PolicySpec(config=dataclasses.replace(CONFIG, network="entities")), "agent": PolicySpec()}
    trainer = Trainer(env, CONFIG, policies=specs)
    assert trainer.torch_reasons == {"adversary": "network 'entities'", "agent": None}
    trainer.train_iteration()


def test_a_policy_does_not_depend_on_the_order_of_entities(device):
    """Normalised, by the policy as a whole."""
    game = game_of("tag_continuous", num_taggers=2, num_runners=6, num_neighbors="all")
    config = PPOConfig(network="entities", normalize_obs=True)
    policy: Policy = make_policy(game, ["tagger"], config, None, torch.device(device))
    randomized(policy.network)
    entities = policy.view.obs_parts.entities[0]
    rows = torch.randn(40, game.obs_dim)
    rows[:, [c[entities.presence] for c in entities.columns]] = (torch.rand(40, 7) < 0.5).float()
    assert policy.obs_normalizer is not None
    everyone = torch.ones(40, dtype=torch.bool).to(device)
    policy.obs_normalizer.update_from_moments(policy.obs_normalizer.moments(rows.to(device), everyone))
    moved = permuted(rows, entities, torch.randperm(7))
    for found, expected in zip(policy(moved.to(device)), policy(rows.to(device)), strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-14, atol=2.0**-14)  # TOLERANCE, times the heads' weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "network", "normalized"),
    mostly_exhaustive(
        [(kind, name, n) for kind, name in ((Quadrant, "cnn"), (Bids, "entities")) for n in (False, True)],
        [(Bids, "entities", True)],
    ),
)
def test_training_finds_what_is_in_images_and_lists(kind, network, normalized, device):
    """By chance they are right in a quarter and in about half of all cases."""
    settings = {"num_steps": 8, "learning_rate": 3e-3, "num_minibatches": 4, "activation": "relu"}
    steps = 24_000 if kind is Quadrant else 60_000  # after which all of four seeds are right in all cases
    config = PPOConfig(total_steps=steps, network=network, normalize_obs=normalized, **settings)
    trainer = Trainer(gpu_vecenv.make(kind, 128, device), config)
    trainer.train()
    assert trainer.evaluate(2000, greedy=True)["return_agent"] > 0.93
