"""Policies with the default network, random samples for them, and what float64 gives for both."""

import copy
from typing import NamedTuple

import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter, Stencil
from games.race import Race
from games.script import Script
from torch import nn

import gpu_vecenv
from gpu_vecenv.train.learner_kernels import LossSettings
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import Batch, PPOConfig, loss, make_policy, masked_normalize
from gpu_vecenv.train.rollout_storage import Rollout
from support.learning import batch_of

NAN, INF = float("nan"), float("inf")
CLIP, ENTROPY_COEFFICIENT = 0.2, 0.03
HUBER = {"value_loss": "huber", "huber_delta": 0.3, "value_clip": 0.2, "scales_value_clip": True}
APART = {"shared_trunk": False}
BOTH = {"normalize_obs": True, "normalize_returns": True}
FEW = {"num_taggers": 2, "num_runners": 5, "num_neighbors": 3, "acceleration_levels": 3, "turn_levels": 4}
MANY = {**FEW, "num_runners": 11, "num_neighbors": 12}  # a thread loads the 85 inputs of its rows in several batches
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
    "agents apart": Case("tag_continuous", ("runner_2", "tagger_0", "runner_0"), {**BOTH, "hidden_sizes": (24,)}, FEW),
    "an agent": Case(Crew, ("helper_1",), {**APART, "hidden_sizes": (24,)}),
    "fewer choices": Case(Script, ("other",), {"hidden_sizes": (16, 32)}, {"num_others": 2, "choices_of_others": 3}),
    "masks": Case(Crew, ("driver",), {**BOTH, "hidden_sizes": (32, 32)}),
    "masks, fewer choices": Case(Crew, ("helper",), {**APART, "hidden_sizes": (32, 40)}),
    "box": Case("pendulum", ("agent",), {**APART, **BOTH, "hidden_sizes": (64, 32)}),
    "box, tanh": Case("pendulum", ("agent",), {"hidden_sizes": (48, 32), "squash": "tanh", "value_clip": 0.3}),
    "box, beta": Case("pendulum", ("agent",), {**APART, "hidden_sizes": (48, 32), "squash": "beta", "value_clip": 0.3}),
    "box beside choices, beta": Case(Economy, ("planner",), {"hidden_sizes": (32, 24), "squash": "beta"}),
    "box beside choices": Case(Economy, ("planner",), {"hidden_sizes": (32, 24)}),
    "choices beside a box": Case(Economy, ("worker",), {**APART, "hidden_sizes": (32, 24)}),
    "images": Case(Painter, ("agent",), {"hidden_sizes": (40, 24)}),
    "agent ids": Case(
        "tag_continuous",
        ("runner_2", "tagger_0", "runner_0"),
        {**BOTH, "agent_ids": True, "hidden_sizes": (24,)},
        FEW,
    ),
    "agent ids, two trunks": Case("simple_spread", ("agent",), {**APART, "agent_ids": True, "hidden_sizes": (32, 24)}),
    "agent ids, images": Case(Painter, ("agent",), {"agent_ids": True, "hidden_sizes": (40, 24)}),
    "images of flags": Case(Stencil, ("agent",), {"hidden_sizes": (40, 24)}),
    "more outputs than a unit": Case("tag_continuous", ("tagger",), {"hidden_sizes": (32,)}),
    "turns": Case(Race, ("player",), {"hidden_sizes": (32, 24)}),
    "turns, two trunks": Case(Race, ("player",), {**APART, **BOTH, "hidden_sizes": (32, 24), "value_clip": 0.4}),
    "turns, huber": Case(Race, ("player",), {**BOTH, **HUBER, "hidden_sizes": (32, 24)}),
    "raw advantages": Case("cartpole", ("agent",), {"hidden_sizes": (32,), "normalize_advantages": False}),
    "several tiles of a block": Case("cartpole", ("agent",), {**APART, "hidden_sizes": (64, 64)}, rows=1500),
    "several tiles, many inputs": Case("tag_continuous", ("runner",), {"hidden_sizes": (32,)}, MANY, rows=1500),
}


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
    images, most = data.obs.dtype == torch.uint8, int(policy.obs_scale)
    obs = torch.randint(0, most + 1, data.obs.shape, generator=random) if images else normal(*data.obs.shape)
    data.obs.copy_(obs)
    if policy.obs_normalizer is not None:
        policy.obs_normalizer.mean.copy_(normal(*view.obs_shape))
        policy.obs_normalizer.var.copy_(0.5 + torch.rand(view.obs_shape, generator=random))
    if policy.return_normalizer is not None:
        policy.return_normalizer.mean.fill_(1.5)
        policy.return_normalizer.var.fill_(6.25)
    data.active.copy_(torch.rand(data.active.shape, generator=random) < 0.8)
    if data.acting is not None:
        data.acting.copy_(torch.rand(data.acting.shape, generator=random) < 0.5)
    numbers = torch.arange(data.rewards.numel(), device=device).view(data.rewards.shape)
    numbers = numbers[:, :, view.agents].flatten().cpu()
    indices = numbers[torch.randperm(len(numbers), generator=random)][: case.rows].to(device)
    for tensor in (data.values, data.advantages, data.returns):
        tensor.copy_(normal(*tensor.shape))
    draws = torch.zeros(data.rewards.numel(), data.draws.numel() // data.rewards.numel())
    if view.continuous:
        draws[:, : view.num_heads] = normal(len(draws), view.num_heads)
        if config.squash == "beta":
            draws = draws.sigmoid()
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
    noise = 0.3 * normal(len(indices))
    ratios = (-noise).exp()
    near = torch.minimum((ratios - 1 + CLIP).abs(), (ratios - 1 - CLIP).abs()) < 0.03
    noise[near] += 0.1  # so that no rounding moves a sample, one of few, to the other side of the clip
    data.log_probs.view(-1)[indices] = (log_probs + noise.to(device)).float()
    gone = ~data.active[:-1]
    for tensor in (data.log_probs, data.advantages, data.returns, data.values[:-1]):
        tensor[gone] = NAN
    return found


def poisoned(case, value, device):
    """The observation of an active sample has one such element."""
    rows = rows_of(case, device)
    data, view = rows.rollout, rows.policy.view
    active = data.active[:-1].flatten()[rows.indices]
    data.flat_obs(view)[rows.indices[active][3], 1] = value
    return rows


def inputs_of(policy, obs, dtype):
    """What the network's first layer gets."""
    obs, normalizer = obs.to(dtype), policy.obs_normalizer
    if normalizer is None:
        return obs / policy.obs_scale
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
    """A policy with all sums and products in another dtype; statistics are rounded to float32 as ever.

    With ``agent_ids`` rows are of ``agents``, numbers along the last leading axis of the observations.
    """

    def __init__(self, policy, dtype, agents):
        super().__init__()
        self.agents = agents
        self.policy, self.network, self.dtype = policy, copy.deepcopy(policy.network).to(dtype), dtype
        self.log_probs_and_entropies = policy.log_probs_and_entropies
        normalizer = policy.return_normalizer
        self.value_scale = 1.0 if normalizer is None else normalizer.std.to(dtype)

    def forward(self, obs):
        inputs = inputs_of(self.policy, obs, self.dtype)
        if self.policy.agent_ids:
            inputs = inputs.flatten(inputs.ndim - len(self.policy.view.obs_shape))
            ids = nn.functional.one_hot(self.agents, self.policy.view.num_agents).to(inputs)
            inputs = torch.cat([inputs, ids.expand(*inputs.shape[:-1], -1)], -1)
        parameters, values = by_layers(self.network, inputs)
        normalizer = self.policy.return_normalizer
        return parameters, values if normalizer is None else values * self.value_scale + normalizer.mean.float()


def batch_in(rows, indices, advantages, dtype):
    batch = batch_of(rows.rollout, rows.policy.view, indices, advantages)
    return Batch(batch.obs, *(x.to(dtype) if x is not None and x.dtype.is_floating_point else x for x in batch[1:]))


def agents_at(rows, indices):
    """Numbers of the samples' agents among the policy's."""
    data, own = rows.rollout, list(rows.policy.view.agent_numbers)
    return torch.tensor([own.index(k) for k in (indices % data.rewards.shape[2]).tolist()], device=indices.device)


def forward_of(rows, dtype):
    """Log-probabilities and entropies of what was drawn, and values."""
    policy = Exact(rows.policy, dtype, agents_at(rows, rows.indices))
    batch = batch_in(rows, rows.indices, torch.zeros(len(rows.indices), device=rows.indices.device), dtype)
    parameters, values = policy(batch.obs)
    return *policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask), values


def expected_of(rows, dtype=torch.float64):
    """Gradients by parameter, their sizes, and metrics, by autograd through ``loss``, of the active samples.

    A size is the gradient's norm, or of a bias, which is a sum over samples that may cancel, the norm of the sums of
    absolute values: the samples' errors are relative to these.
    """
    data = rows.rollout
    active = data.active[:-1].flatten()[rows.indices]
    kept = rows.indices[active]
    policy, sums = Exact(rows.policy, dtype, agents_at(rows, kept)), {}
    for name, layer in policy.network.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, __, out, name=name: sum_gradients(out, sums, f"{name}.bias"))
    gains = data.advantages.flatten()[kept].double()
    if rows.config.normalize_advantages:
        gains = masked_normalize(gains, active[active] if data.acting is None else data.acting[:-1].flatten()[kept])
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


def moments_of(rows):
    """What the kernels take beside the samples."""
    data = rows.rollout
    acted = active = data.active[:-1].flatten()[rows.indices]
    if data.acting is not None:
        acted = active & data.acting[:-1].flatten()[rows.indices]
    gains = data.advantages.flatten()[rows.indices][acted].double()
    return torch.stack([acted.sum(), gains.sum(), gains.square().sum(), active.sum()])


def settings_of(rows):
    """Of the loss in ``expected_of``."""
    clip, entropy_coefficient = torch.tensor([CLIP, ENTROPY_COEFFICIENT], device=rows.indices.device)
    return LossSettings.of(rows.config, clip, entropy_coefficient)


def norms_of_errors(found, exact):
    return [(a - b).norm().item() for a, b in zip(found, exact, strict=True)]


def check_gradients(rows, found, metrics):
    """Of each parameter, the norm of the gradient's error, relative to the gradient's size; and the metrics."""
    exact, sizes, exact_metrics = expected_of(rows)
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
        # A ReLU whose input rounds to the other side of 0 has another gradient. That are few, about a share `unit` of
        # all, but each differs wholly: of the norm it is the square root.
        of_gradients = unit**0.5 if rows.config.activation == "relu" else unit
        bounds, metric_bounds = [of_gradients * n for n in sizes], unit * (1 + exact_metrics.abs())
    names = [name for name, _ in rows.policy.network.named_parameters()]
    assert all(n > 0 for n in sizes) and 0.05 < exact_metrics[4] < 0.9
    wrong = {name: (e, b) for name, e, b in zip(names, errors, bounds, strict=True) if not e <= b}
    assert not wrong, wrong
    assert ((metrics - exact_metrics).abs() <= metric_bounds).all(), (metrics, exact_metrics)


def own_columns(view, outputs):
    return outputs[:, view.agents][..., view.parameter_columns]


def check_outputs(rows, outputs, values):
    """Outputs and values of step 0, of all agents; where nothing was written, -7."""
    data, view, precision = rows.rollout, rows.policy.view, rows.config.precision
    obs = view.obs(data.obs[0])
    with torch.no_grad():
        agents = torch.arange(view.num_agents, device=obs.device)
        exact, exact_values = Exact(rows.policy, torch.float64, agents)(obs)
        by_torch, values_by_torch = Exact(rows.policy, torch.float32, agents)(obs)
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
    for agent in view.agent_numbers:
        written[:, agent, view.parameter_columns] = True
    assert outputs[~written].eq(-7).all()
    others = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    others[:, view.agents] = False
    assert values[others].eq(-7).all()
