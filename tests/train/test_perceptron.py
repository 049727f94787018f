"""The default network's kernels against float64 and against torch, on emulated CUDA threads and on a GPU."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.script import Script
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend
from support.learning import batch_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.perceptron import (
    FORWARD_TILES,
    GRADIENT_TILES,
    METRICS,
    PerceptronKernels,
    why_not_fused,
)
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import Batch, PPOConfig, loss, make_policy, masked_normalize
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.trainer import Trainer

NAN, INF = float("nan"), float("inf")
CLIP, ENTROPY_COEFFICIENT = 0.2, 0.03
HUBER = {"value_loss": "huber", "huber_delta": 0.3, "value_clip": 0.2, "scales_value_clip": True}
APART = {"shared_trunk": False}
BOTH = {"normalize_obs": True, "normalize_returns": True}
FEW = {"num_taggers": 2, "num_runners": 5, "num_neighbors": 3, "acceleration_levels": 3, "turn_levels": 4}
# Of the factors of a product, relatively: 10 and 7 bits of fraction, TF32 within 2/3 of the last one. tanh.approx is
# within 2^-11 too.
ROUNDING_UNITS = {"tf32": 2.0**-10 * 2 / 3, "bfloat16": 2.0**-9 + 2.0**-11}


class Case(NamedTuple):
    """A policy's roles in a game, and its network."""

    game: object
    roles: tuple
    config: dict
    arguments: dict = {}  # noqa: RUF012
    rows: int = 97  # the last tile is not full


CASES = {
    "one layer": Case("cartpole", ("agent",), {"hidden_sizes": (32,)}),
    "two trunks": Case("cartpole", ("agent",), {**APART, "hidden_sizes": (64, 48), "value_clip": 0.4}),
    "relu": Case("cartpole", ("agent",), {**BOTH, "hidden_sizes": (32, 48), "activation": "relu", "value_clip": 0.1}),
    "huber": Case("cartpole", ("agent",), {**APART, **BOTH, **HUBER, "hidden_sizes": (24, 16)}),
    "relu, two trunks": Case("acrobot", ("agent",), {**APART, **BOTH, "hidden_sizes": (24, 40), "activation": "relu"}),
    "sizes of no unit": Case("tag_gridworld", ("tagger",), {"hidden_sizes": (40, 24, 19)}),
    "wide": Case("cartpole", ("agent",), {"hidden_sizes": (128, 100)}),
    "three layers, two trunks": Case("acrobot", ("agent",), {**APART, "hidden_sizes": (33, 64, 7)}),
    "two heads": Case("tag_continuous", ("runner",), {"normalize_obs": True, "hidden_sizes": (40, 32)}, FEW),
    "two roles in one": Case("tag_continuous", ("tagger", "runner"), {**APART, "hidden_sizes": (24,)}, FEW),
    "fewer choices": Case(Script, ("other",), {"hidden_sizes": (16, 32)}, {"num_others": 2, "choices_of_others": 3}),
    "masks": Case(Crew, ("driver",), {**BOTH, "hidden_sizes": (32, 32)}),
    "masks, fewer choices": Case(Crew, ("helper",), {**APART, "hidden_sizes": (32, 40)}),
    "box": Case("pendulum", ("agent",), {**APART, **BOTH, "hidden_sizes": (64, 32)}),
    "box, tanh": Case("pendulum", ("agent",), {"hidden_sizes": (48, 32), "squash": "tanh", "value_clip": 0.3}),
    "box beside choices": Case(Economy, ("planner",), {"hidden_sizes": (32, 24)}),
    "choices beside a box": Case(Economy, ("worker",), {**APART, "hidden_sizes": (32, 24)}),
    "images": Case(Painter, ("agent",), {"hidden_sizes": (40, 24)}),
    "more outputs than a unit": Case("tag_continuous", ("tagger",), {"hidden_sizes": (32,)}),
    "raw advantages": Case("cartpole", ("agent",), {"hidden_sizes": (32,), "normalize_advantages": False}),
    "several tiles of a block": Case("cartpole", ("agent",), {**APART, "hidden_sizes": (64, 64)}, rows=1500),
    "several tiles, many inputs": Case("tag_continuous", ("runner",), {"hidden_sizes": (32,)}, FEW, rows=1500),
}


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


class Rows(NamedTuple):
    """A policy, a rollout of random numbers, and the indices of some of its samples."""

    policy: Policy
    rollout: Rollout
    indices: torch.Tensor
    config: PPOConfig


def rows_of(case, device, precision="float32", num_envs=None):
    """Some samples are not active; nothing of them but their observation is a number."""
    random = torch.Generator().manual_seed(1)
    game, steps = gpu_vecenv.configure(case.game, **case.arguments), 5

    def normal(*shape):
        return torch.randn(shape, generator=random)

    config = PPOConfig(precision=precision, **case.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        policy = make_policy(game, case.roles, config, None, torch.device(device))
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1 * normal(*p.shape).to(device)
    view = policy.view
    num_envs = num_envs or -(-case.rows // (steps * view.num_agents)) + 1
    env = gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step")
    data = Rollout(env, steps)
    images = data.obs.dtype == torch.uint8
    obs = torch.randint(0, 256, data.obs.shape, generator=random) if images else normal(*data.obs.shape)
    data.obs.copy_(obs)
    if policy.obs_normalizer is not None:
        policy.obs_normalizer.mean.copy_(normal(*view.obs_shape))
        policy.obs_normalizer.var.copy_(0.5 + torch.rand(view.obs_shape, generator=random))
    if policy.return_normalizer is not None:
        policy.return_normalizer.mean.fill_(1.5)
        policy.return_normalizer.var.fill_(6.25)
    data.active.copy_(torch.rand(data.active.shape, generator=random) < 0.8)
    numbers = torch.arange(data.rewards.numel()).view(data.rewards.shape)[:, :, view.agents].flatten()
    indices = numbers[torch.randperm(len(numbers), generator=random)][: case.rows].to(device)
    for tensor in (data.values, data.advantages, data.returns):
        tensor.copy_(normal(*tensor.shape))
    draws = torch.zeros(data.rewards.numel(), data.draws.numel() // data.rewards.numel())
    if view.continuous:
        draws[:, : view.num_heads] = normal(len(draws), view.num_heads)
    else:
        masks = torch.ones(len(draws), view.num_parameters)
        if data.action_mask is not None:
            data.action_mask.copy_(torch.rand(data.action_mask.shape, generator=random) < 0.6)
            masks = view.mask(data.action_mask[:-1].flatten(0, 2)).cpu() + 1e-30
        for head, part in enumerate(masks.split(list(view.head_sizes), -1)):
            draws[:, head] = torch.multinomial(part, 1, generator=random)[:, 0]
    data.draws.copy_(draws.view(data.draws.shape))
    found = Rows(policy, data, indices, config)
    with torch.no_grad():
        log_probs, _, _ = forward_of(found, torch.float64)
    data.log_probs.view(-1)[indices] = (log_probs + 0.3 * normal(len(indices)).to(device)).float()
    gone = ~data.active[:-1]
    for tensor in (data.log_probs, data.advantages, data.returns, data.values[:-1]):
        tensor[gone] = NAN
    return found


def inputs_of(policy, obs, dtype):
    """What the network's first layer gets."""
    obs = obs.to(dtype) / 255 if obs.dtype == torch.uint8 else obs.to(dtype)
    normalizer = policy.obs_normalizer
    if normalizer is None:
        return obs
    return ((obs - normalizer.mean.float().to(dtype)) / normalizer.std.to(dtype)).clamp(-10, 10)


def by_layers(network, inputs):
    """As ActorCritic.forward, with a call of each layer."""
    rows = inputs.flatten(inputs.ndim - len(network.obs_shape))
    features = network.trunk(rows)
    outputs = network.actor(features)
    if network.log_std is not None:
        outputs = torch.cat([outputs, network.log_std.expand_as(outputs)], -1)
    return outputs, network.critic(features if network.critic_trunk is None else network.critic_trunk(rows)).squeeze(-1)


class Exact(nn.Module):
    """A policy with all sums and products in another dtype; statistics are rounded to float32 as ever."""

    def __init__(self, policy, dtype):
        super().__init__()
        self.policy, self.network, self.dtype = policy, copy.deepcopy(policy.network).to(dtype), dtype
        self.log_probs_and_entropies = policy.log_probs_and_entropies
        normalizer = policy.return_normalizer
        self.value_scale = 1.0 if normalizer is None else normalizer.std.to(dtype)

    def forward(self, obs):
        parameters, values = by_layers(self.network, inputs_of(self.policy, obs, self.dtype))
        normalizer = self.policy.return_normalizer
        return parameters, values if normalizer is None else values * self.value_scale + normalizer.mean.float()


def batch_in(rows, indices, advantages, dtype):
    batch = batch_of(rows.rollout, rows.policy.view, indices, advantages)
    return Batch(batch.obs, *(x.to(dtype) if x is not None and x.dtype.is_floating_point else x for x in batch[1:]))


def forward_of(rows, dtype):
    """Log-probabilities and entropies of what was drawn, and values."""
    policy = Exact(rows.policy, dtype)
    batch = batch_in(rows, rows.indices, torch.zeros(len(rows.indices), device=rows.indices.device), dtype)
    parameters, values = policy(batch.obs)
    return *policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask), values


def expected_of(rows, dtype=torch.float64):
    """Gradients by parameter, their sizes, and metrics, by autograd through ``loss``, of the active samples.

    A size is the gradient's norm, or of a bias, which is a sum over samples that may cancel, the norm of the sums of
    absolute values: the samples' errors are relative to these.
    """
    data, policy = rows.rollout, Exact(rows.policy, dtype)
    sums = {}
    for name, layer in policy.network.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, __, out, name=name: sum_gradients(out, sums, f"{name}.bias"))
    active = data.active[:-1].flatten()[rows.indices]
    kept = rows.indices[active]
    gains = data.advantages.flatten()[kept].double()
    if rows.config.normalize_advantages:
        gains = masked_normalize(gains, active[active])
    batch = batch_in(rows, kept, gains, dtype)
    clip, weight = (torch.tensor(x, device=kept.device).to(dtype) for x in (CLIP, ENTROPY_COEFFICIENT))
    total, metrics = loss(policy, batch, rows.config, clip=clip, entropy_coefficient=weight)
    gradients = torch.autograd.grad(total, list(policy.network.parameters()))
    names = [name for name, _ in policy.network.named_parameters()]
    sizes = [sums.get(name, g).double().norm().item() for name, g in zip(names, gradients, strict=True)]
    return [g.double() for g in gradients], sizes, metrics.double()


def sum_gradients(output, sums, name):
    """Put the sums over the rows of the absolute gradients with respect to a layer's output into ``sums``."""
    output.register_hook(lambda gradient: sums.update({name: gradient.abs().sum(0)}))


def launch_of(rows, tile=None):
    """Kernels of a policy, the launch of the gradients of the rows, and its output."""
    clip, entropy_coefficient = torch.tensor([CLIP, ENTROPY_COEFFICIENT], device=rows.indices.device)
    assert why_not_fused(rows.policy, rows.rollout, rows.config.precision) is None
    kernels = PerceptronKernels(rows.policy, rows.rollout, rows.config.precision)
    launch, parts = kernels.gradients(
        len(rows.indices),
        clip=clip,
        entropy_coefficient=entropy_coefficient,
        value_coefficient=rows.config.value_coefficient,
        value_clip=rows.config.value_clip,
        normalize_advantages=rows.config.normalize_advantages,
        scales_value_clip=rows.config.scales_value_clip,
        huber_delta=rows.config.huber_delta if rows.config.value_loss == "huber" else None,
        tile=tile,
    )
    active = rows.rollout.active[:-1].flatten()[rows.indices]
    gains = rows.rollout.advantages.flatten()[rows.indices][active].double()
    moments = torch.stack([active.sum().double(), gains.sum(), gains.square().sum()])
    return kernels, lambda: launch(indices=rows.indices, moments=moments), parts


def differentiated(rows, tile=None):
    """The same by the kernel."""
    _, launch, parts = launch_of(rows, tile)
    parts.fill_(NAN)  # each element is written
    launch()
    sizes = [p.numel() for p in rows.policy.parameters()]
    *gradients, metrics = parts.double().sum(0).split([*sizes, METRICS])
    return [g.view_as(p) for g, p in zip(gradients, rows.policy.parameters(), strict=True)], metrics


def norms_of_errors(found, exact):
    return [(a - b).norm().item() for a, b in zip(found, exact, strict=True)]


def check(rows, tile=None):
    """Of each parameter, the norm of the gradient's error, relative to the gradient's size; and the metrics."""
    exact, sizes, exact_metrics = expected_of(rows)
    found, metrics = differentiated(rows, tile)
    errors = norms_of_errors(found, exact)
    precision = rows.config.precision
    if precision == "float32":
        # As many roundings as torch's own, in another order, and factors without their last 2 bits. The floor is for
        # tensors whose sums torch happens to round well: a GPU cuts off sums, by up to 2^-23 for each of the steps.
        by_torch, _, metrics_by_torch = expected_of(rows, torch.float32)
        bounds = [max(4 * e, 2.0**-20 * n) for e, n in zip(norms_of_errors(by_torch, exact), sizes, strict=True)]
        errors_of_metrics = (metrics_by_torch - exact_metrics).abs()
        metric_bounds = torch.maximum(4 * errors_of_metrics, 2.0**-20 * (1 + exact_metrics.abs()))
    else:
        # Each layer rounds inputs, weights and activations, and in the backward pass what it propagates and multiplies.
        count = 6 * len(rows.policy.network.sizes)
        unit = count * ROUNDING_UNITS[precision]
        bounds, metric_bounds = [unit * n for n in sizes], unit * (1 + exact_metrics.abs())
    names = [name for name, _ in rows.policy.network.named_parameters()]
    assert all(n > 0 for n in sizes) and 0.05 < exact_metrics[4] < 0.9
    wrong = {name: (e, b) for name, e, b in zip(names, errors, bounds, strict=True) if not e <= b}
    assert not wrong
    assert ((metrics - exact_metrics).abs() <= metric_bounds).all(), (metrics, exact_metrics)


PRECISIONS = ["float32", "tf32", "bfloat16"]


def slow_but(quick, cases):
    """Each case compiles programs of its own: together they are slow."""
    return [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.slow, id="-".join(map(str, case)))
        for case in cases
    ]


QUICK = [(n, "float32") for n in ("relu", "sizes of no unit", "two heads", "masks, fewer choices", "images")]
QUICK += [("two trunks", "tf32"), ("box", "bfloat16")]
LOW = {"two trunks", "relu", "sizes of no unit", "masks", "box", "images"}


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        QUICK,
        [(n, p) for n in CASES for p in PRECISIONS if (p == "float32" or n in LOW) and not n.startswith("several")],
    ),
)
def test_gradients_and_metrics_agree_with_the_loss_in_float64(name, precision, device):
    check(rows_of(CASES[name], device, precision))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        [("wide", GRADIENT_TILES[2])],  # a warp has several units, not all of them as many
        [
            *((n, tile) for n in ("sizes of no unit", "relu, two trunks") for tile in GRADIENT_TILES),
            *(("wide", tile) for tile in GRADIENT_TILES[2:]),
        ],
    ),
)
def test_every_shape_of_tile_gives_the_gradients(name, tile, device):
    rows = rows_of(CASES[name], device)
    kernels = PerceptronKernels(rows.policy, rows.rollout, "float32")
    cores = rows.rollout.env.functions.backend.tensor_cores
    assert kernels.perceptron.blocks(tile, cores, forward=False)
    check(rows, tile)


@pytest.mark.parametrize("name", ["several tiles of a block", "several tiles, many inputs"])
def test_a_block_adds_up_several_tiles(name, device):
    rows = rows_of(CASES[name], device)
    _, _, parts = launch_of(rows, GRADIENT_TILES[0])
    if device == "cpu":  # a GPU has more blocks
        assert len(parts) * GRADIENT_TILES[0].rows < len(rows.indices)
    check(rows, GRADIENT_TILES[0])


def poisoned(case, value, device):
    """The observation of an active sample has one such element."""
    rows = rows_of(case, device)
    data, view = rows.rollout, rows.policy.view
    active = data.active[:-1].flatten()[rows.indices]
    data.flat_obs(view)[rows.indices[active][3], 1] = value
    return rows


@pytest.mark.parametrize("name", ["two trunks", "relu"])
def test_nan_in_an_observation_reaches_the_gradients_that_it_reaches_in_torch(name, device):
    rows = poisoned(CASES[name], NAN, device)
    (exact, _, exact_metrics), (found, metrics) = expected_of(rows), differentiated(rows)
    assert any(g.isnan().any() for g in exact)
    assert all(a.isnan().equal(b.isnan()) for a, b in zip(found, exact, strict=True))
    assert metrics[:4].isnan().all() and exact_metrics[:4].isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_observation_leaves_finite_what_it_does_in_torch(sign, device):
    """Units at their bounds have no gradient, but 0 times infinity is NaN: in the column of that input."""
    rows = poisoned(CASES["three layers, two trunks"], sign * INF, device)
    (exact, _, exact_metrics), (found, metrics) = expected_of(rows), differentiated(rows)
    columns = torch.zeros_like(found[0], dtype=torch.bool)
    columns[:, 1] = True
    for a, b in zip(found, exact, strict=True):
        assert a.isnan().equal(b.isnan())
        nan = columns if a.shape == columns.shape else torch.zeros_like(a, dtype=torch.bool)
        assert a.isnan().equal(nan)
        # As `check`, with a unit more for the weights' sums, which miss a column.
        torch.testing.assert_close(a[~nan], b[~nan], rtol=0, atol=2.0**-19 * b[~nan].norm().item())
    torch.testing.assert_close(metrics, exact_metrics, rtol=2.0**-18, atol=2.0**-18)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_normalised_infinite_observation_is_clipped(sign, device):
    check(poisoned(CASES["relu"], sign * INF, device))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        [("two trunks", GRADIENT_TILES[2])],
        [(n, GRADIENT_TILES[k]) for n in ("two trunks", "masks, fewer choices") for k in (0, 2)],
    ),
)
def test_neither_the_order_of_threads_nor_another_launch_changes_a_bit(name, tile, device, monkeypatch):
    found = []
    for order in ("forwards", "forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        rows = rows_of(CASES[name], device)
        _, launch, parts = launch_of(rows, tile)
        for _ in range(2):
            parts.fill_(NAN)
            launch()
            found.append(parts.clone())
    assert found[0].isfinite().all() and all(equal_bits(found[0], parts) for parts in found[1:])


# The forward pass


def forward_of_step(rows, t=0, tile=None, *, only_values=False, kernels=None):
    """Outputs and values of a step, of all agents; where nothing was written, -7."""
    data, view = rows.rollout, rows.policy.view
    kernels = kernels or PerceptronKernels(rows.policy, data, rows.config.precision)
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    shape = (data.env.num_envs, data.env.num_agents)
    outputs = torch.full((*shape, sampler.num_parameters), -7.0, device=rows.indices.device)
    values = torch.full(shape, -7.0, device=rows.indices.device)
    mask = data.action_mask is not None and not view.continuous
    kernels.forward(tile)(
        obs=data.obs[t].flatten(0, 1)[(slice(None), *view.obs_slice)],
        action_mask=data.action_mask[t] if mask else None,
        outputs=None if only_values else outputs,
        values=values,
    )
    return outputs, values


def own_columns(view, outputs):
    return outputs[:, view.agents][..., view.parameter_columns]


def check_forward(rows, tile=None):
    data, view, precision = rows.rollout, rows.policy.view, rows.config.precision
    outputs, values = forward_of_step(rows, tile=tile)
    obs = view.obs(data.obs[0])
    with torch.no_grad():
        exact, exact_values = Exact(rows.policy, torch.float64)(obs)
        by_torch, values_by_torch = Exact(rows.policy, torch.float32)(obs)
    count = 3 * len(rows.policy.network.sizes)  # each layer rounds inputs, weights and activations
    mask = None if data.action_mask is None else view.mask(data.action_mask[0][:, view.agents])
    allowed = torch.ones_like(exact, dtype=torch.bool) if mask is None else mask
    found = own_columns(view, outputs)
    assert found[~allowed].eq(torch.finfo(torch.float32).min).all() and (mask is None or not allowed.all())
    for own, torchs, full in (
        (found[allowed], by_torch[allowed], exact[allowed]),
        (values[:, view.agents], values_by_torch, exact_values),
    ):
        size = full.abs().max()
        if precision == "float32":  # as of the gradients
            bound = torch.maximum(4 * (torchs - full).abs().max(), 2.0**-20 * size)
        else:
            bound = count * ROUNDING_UNITS[precision] * size
        assert ((own - full).abs() <= bound).all() and size > 0.1
    written = torch.zeros_like(outputs, dtype=torch.bool)
    own = written[:, view.agents]
    own[..., view.parameter_columns] = True
    assert outputs[~written].eq(-7).all()
    others = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    others[:, view.agents] = False
    assert values[others].eq(-7).all()
    assert equal_bits(forward_of_step(rows, tile=tile, only_values=True)[1], values)
    assert forward_of_step(rows, tile=tile, only_values=True)[0].eq(-7).all()


FORWARD_CASES = ["two trunks", "relu", "sizes of no unit", "two roles in one", "fewer choices", "masks", "box"]
FORWARD_CASES += ["masks, fewer choices", "box beside choices", "choices beside a box", "images"]


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(QUICK, [(n, p) for n in FORWARD_CASES for p in PRECISIONS if p == "float32" or n in LOW]),
)
def test_outputs_and_values_are_those_of_the_policy(name, precision, device):
    check_forward(rows_of(CASES[name], device, precision))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        [("sizes of no unit", FORWARD_TILES[3])],
        [(n, tile) for n in ("sizes of no unit", "masks, fewer choices") for tile in FORWARD_TILES],
    ),
)
def test_every_shape_of_tile_gives_the_outputs(name, tile, device):
    check_forward(rows_of(CASES[name], device, num_envs=83), tile)


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        [("two trunks", "float32"), ("masks", "bfloat16")],
        [(n, p) for n in ("two trunks", "two heads", "masks", "box, tanh") for p in PRECISIONS],
    ),
)
def test_the_forward_pass_of_the_gradients_is_that_of_the_rollout_bit_by_bit(name, precision, device):
    """Where the log-probabilities are the sampler's, no ratio differs from 1; where returns are values, none is off."""
    rows = rows_of(CASES[name], device, precision)
    data = rows.rollout
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    kernels = PerceptronKernels(rows.policy, data, precision)
    data.env.reset(seed=0)
    if data.action_mask is not None:
        data.action_mask[..., 0] = True  # a head without choices is for the loss none at all
    for t in range(len(data.draws)):
        outputs, values = forward_of_step(rows, t, kernels=kernels)
        outputs[outputs == -7] = 0
        drawn = sampler.sample(outputs)
        data.draws[t].copy_(drawn.actions if drawn.draws is None else drawn.draws)
        data.log_probs[t].copy_(drawn.log_probs)
        data.values[t].copy_(values)
        data.returns[t].copy_(values)
    metrics = differentiated(rows, GRADIENT_TILES[2])[1]
    assert metrics[1] == metrics[3] == metrics[4] == 0 and metrics[0].abs() < 1e-6 and metrics[2].abs() > 0.1
    # Which finds a difference in one bit of one value:
    changed = rows.indices[data.active[:-1].flatten()[rows.indices]][0]
    data.returns.view(-1)[changed] += 2.0**-20
    assert differentiated(rows, GRADIENT_TILES[2])[1][1] > 0


# What torch computes


def test_torch_computes_what_the_kernels_do_not(device):
    rows = rows_of(CASES["two trunks"], device)
    policy, data, game = rows.policy, rows.rollout, rows.rollout.env.game

    def reason(policy=policy, precision="float32"):
        return why_not_fused(policy, data, precision)

    def made(network=None, **config):
        return make_policy(game, ("agent",), PPOConfig(**config), network, torch.device(device))

    assert reason() is None
    assert reason(made(nn.Identity())) == "not the default network"
    assert reason(made(hidden_sizes=())) == "no hidden layers"
    assert reason(made(hidden_sizes=(1024, 1024))) == "a network too large for shared memory"
    hook = policy.network.trunk[0].register_forward_hook(lambda *_: None)
    assert reason() == "not the default network"
    hook.remove()
    assert reason() is None
    hook = policy.register_forward_hook(lambda *_: None)
    assert reason() == "not the default network"
    hook.remove()
    policy.network.actor.bias.requires_grad_(False)
    assert reason() == "weights that are frozen or on another device"
    policy.network.actor.bias.requires_grad_(True)
    assert reason(made().to("meta")) == "weights that are frozen or on another device"
    obs = data.obs
    data.obs = obs.double()
    assert reason() == "float64 observations"
    data.obs = torch.cat([obs, obs], -1)[..., ::2]
    assert reason() == "observations that are not contiguous"
    data.obs = obs
    assert reason() is None


def test_a_processor_without_tensor_cores_has_torch():
    rows = rows_of(CASES["two trunks"], "cpu")
    assert why_not_fused(rows.policy, rows.rollout, "float32") == "no tensor cores"


# The trainer


class Run(NamedTuple):
    """A game, and how it is trained."""

    game: object
    config: dict
    arguments: dict = {}  # noqa: RUF012


RUNS = {
    "two trunks": Run("cartpole", {"shared_trunk": False}),
    "target_kl": Run("cartpole", {**BOTH, "activation": "relu", "target_kl": 1e-5, "learning_rate": 3e-3}),
    "box": Run("pendulum", {"normalize_returns": True, "value_clip": 0.5}),
    "roles": Run("simple_adversary", {"normalize_obs": True}),
    "masks": Run(Crew, {"shared_trunk": False, "normalize_returns": True}),
}


@pytest.fixture
def trainer_of(monkeypatch):
    """Trainers whose networks are computed by emulated kernels, or by torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over rows then always have the same order
    kernel_on(torch.device("cpu"))

    def make(run, *, kernels, seed=3):
        with monkeypatch.context() as patch:
            if kernels:
                patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
            env = gpu_vecenv.make(run.game, 8, "cpu", autoreset_mode="next_step", **run.arguments)
            config = {"num_steps": 8, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (24, 16), **run.config}
            trainer = Trainer(env, PPOConfig(total_steps=10**6, **config), seed=seed)
        assert all((reason is None) == kernels for reason in trainer.torch_reasons.values())
        return trainer

    yield make
    torch.set_num_threads(threads)


def weights(trainer):
    return [p.detach().clone() for policy in trainer.policies.values() for p in policy.parameters()]


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(weights(one), weights(other), strict=True))


def state_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state()[0].items()}


# After 12 steps of Adam, at least 3 of them not skipped. A rounding of 2^-20 of a gradient changes a step of size 3e-4
# or 3e-3 by as much, but where the gradient is about eps = 1e-5 of the largest: there by about 2^-20 / 1e-5 = 10%.
def tolerance(run):
    return 0.1 * run.config.get("learning_rate", 3e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "target_kl" else pytest.mark.slow) for n in RUNS])
def test_the_kernels_train_what_torch_trains(name, trainer_of):
    run = RUNS[name]
    by_torch, by_kernels = (trainer_of(run, kernels=kernels) for kernels in (False, True))
    before = weights(by_kernels)
    for _ in range(3):
        expected, found = by_torch.train_iteration(), by_kernels.train_iteration()
        for role in by_torch.learners:
            for metric in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
                key = f"{metric}_{role}"
                # Of sums that cancel; and weights that are up to 10% of a step apart.
                assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
            for metric in ("clip_fraction", "skipped_fraction"):
                assert found[f"{metric}_{role}"] == expected[f"{metric}_{role}"]
    moved = max((a - b).abs().max().item() for a, b in zip(weights(by_kernels), before, strict=True))
    assert moved > 20 * tolerance(run) and distance(by_torch, by_kernels) < tolerance(run)
    if name == "target_kl":
        assert 0 < found["skipped_fraction_agent"] < 1


@pytest.mark.parametrize("name", ["target_kl", pytest.param("roles", marks=pytest.mark.slow)])
def test_training_resumes_bit_by_bit(name, trainer_of, tmp_path):
    trainer = trainer_of(RUNS[name], kernels=True)
    trainer.train_iteration()
    path = trainer.save(tmp_path / "checkpoint")
    trainer.train_iteration()
    other = trainer_of(RUNS[name], kernels=True)
    other.train_iteration()  # state of its own, which the checkpoint replaces
    other.train_iteration()
    other.load(path)
    other.train_iteration()
    assert equal_bits(state_of(trainer), state_of(other))


def test_an_iteration_in_stages_trains_the_same_bits(trainer_of):
    """As a caller with an update loop of its own does it."""
    whole, stages = (trainer_of(RUNS["roles"], kernels=True) for _ in range(2))
    for _ in range(2):
        expected = whole.train_iteration()
        stages.begin_iteration()
        for learner in stages.learners.values():
            learner.update()
        found = stages.end_iteration()
        names = [name for name in expected if "time_fraction" not in name and "_per_s" not in name]
        # Means over episodes are NaN in the beginning.
        assert [found[name] for name in names] == pytest.approx(
            [expected[name] for name in names], rel=0, abs=0, nan_ok=True
        )
    assert equal_bits(state_of(whole), state_of(stages))


class Writes(TorchDispatchMode):
    """Names of torch's operations in this block that write to memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        views = any(
            value.alias_info is not None and not value.alias_info.is_write for value in operation._schema.returns
        )
        if not views and operation is not torch.ops.aten.unbind.int:
            self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("one_launch", [True, False])
def test_an_iteration_is_kernels_and_the_copies_of_its_first_row(trainer_of, monkeypatch, one_launch):
    """Each operation of torch's would be one or more launches."""
    trainer = trainer_of(Run("cartpole", BOTH), kernels=True)
    assert trainer.rollout_reason is None
    if not one_launch:
        monkeypatch.setattr(trainer, "_fused_rollout", None)
    trainer.train_iteration()
    with Writes() as writes:
        trainer.launch_iteration()
    # Observations and who is active, which a rollout by one launch copies itself.
    assert writes.names == ([] if one_launch else 2 * ["aten.copy_.default"])
    assert trainer.read_iteration()["iteration"] == 2


@dataclass(frozen=True)
class Twins(World):
    """Two processes with equal gradients, whose average is the gradient of one."""

    size: int = 2

    def all_reduce_mean(self, tensor):
        pass

    def all_reduce_sum(self, tensor):
        pass


def test_gradients_that_were_averaged_are_clipped_by_the_norm_of_the_average(trainer_of):
    alone, twins, halved = (trainer_of(RUNS["two trunks"], kernels=True) for _ in range(3))

    class Halved(Twins):
        def all_reduce_mean(self, tensor):
            tensor.mul_(0.5)

    twins.learners["agent"].world, halved.learners["agent"].world = Twins(), Halved()
    found = []
    for trainer in (alone, twins, halved):
        trainer.begin_iteration()
        trainer.learners["agent"].update()
        found.append(trainer.end_iteration()["grad_norm_agent"])
    assert equal_bits(state_of(alone), state_of(twins)) and found[0] == found[1]
    learner = halved.learners["agent"]
    halved.begin_iteration()
    learner.minibatch_gradient(0)
    norm = learner.flat_grad.double().norm()
    learner.stages["optimizer_step"]()
    # The norm is the first that was added since the iteration began; one rounding to float32.
    torch.testing.assert_close(learner.metric_sums[5].double(), norm, rtol=2.0**-23, atol=0)


def test_the_order_of_threads_trains_the_same_bits(trainer_of, monkeypatch):
    states = []
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)
        trainer = trainer_of(RUNS["two trunks"], kernels=True)
        trainer.train_iteration()
        states.append(state_of(trainer))
    assert equal_bits(*states)


def test_an_optimizer_that_a_caller_loads_goes_on_as_loaded(trainer_of):
    """torch puts tensors of its own in the place of those that the kernel writes."""
    trainer, other = (trainer_of(RUNS["two trunks"], kernels=True) for _ in range(2))
    for each in (trainer, other):
        each.train_iteration()
    learner, loaded = trainer.learners["agent"], other.learners["agent"]
    loaded.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    assert equal_bits(learner.state(), loaded.state())
    for each in (trainer, other):
        each.train_iteration()
    assert equal_bits(learner.state(), loaded.state())  # the state that a checkpoint has is the one in use
    assert equal_bits(state_of(trainer), state_of(other))


def test_weights_that_a_caller_replaces_are_those_that_act_and_learn(trainer_of):
    trainer, other = (trainer_of(RUNS["two trunks"], kernels=True) for _ in range(2))
    with torch.no_grad():
        for a, b in zip(trainer.policies["agent"].parameters(), other.policies["agent"].parameters(), strict=True):
            a += 0.1
            b.data = a.detach().clone()  # another tensor
    for each in (trainer, other):
        each.train_iteration()
    assert equal_bits(state_of(trainer), state_of(other))


@pytest.mark.parametrize("frozen", ["network.trunk.0.weight", "network.critic.bias"])
def test_weights_that_a_caller_freezes_stay(frozen, trainer_of):
    runs = []
    for kernels in (False, True):
        trainer = trainer_of(RUNS["box"], kernels=kernels)
        parameters = dict(trainer.policies["agent"].named_parameters())
        parameters[frozen].requires_grad_(False)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        trainer.train_iteration()
        assert [name for name, p in parameters.items() if p.equal(before[name])] == [frozen]
        runs.append(trainer)
    assert distance(*runs) < tolerance(RUNS["box"])


def test_a_network_that_gets_a_hook_is_computed_by_torch(trainer_of):
    trainers, calls = [trainer_of(RUNS["two trunks"], kernels=kernels) for kernels in (False, True)], []
    for trainer in trainers:
        trainer.policies["agent"].network.critic.register_forward_hook(lambda *_: calls.append(1))
        trainer.train_iteration()
        assert calls
        calls.clear()
    assert equal_bits(*(state_of(trainer) for trainer in trainers))
