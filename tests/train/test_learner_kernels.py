"""The kernels of the learner against float64: the oracle of advantages, and autograd through ``ppo.loss``."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.race import Race
from games.script import Script
from oracles.gae import of_deltas
from support.advantages import ALIVE, FACTORS, episodes_of, patterned
from support.emulated_cuda import EmulatedCudaBackend
from support.learning import batch_of, run_update
from torch import nn

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.distributions import random_draws
from gpu_vecenv.train.layers import are_packed, width_of
from gpu_vecenv.train.learner_kernels import LossKernel, LossSettings, advantage_launch, shuffle_launch
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.ppo import Batch, PPOConfig, advantages, loss, masked_normalize
from gpu_vecenv.train.ppo_learner import PPOLearner
from gpu_vecenv.train.rollout_storage import Rollout

# Advantages


def launched(given, gamma, gae_lambda, device):
    """Estimates and returns of arguments (steps, environments, agents); the factors are tensors (agents,)."""
    _, environments, agents = given.rewards.shape
    env = gpu_vecenv.make(Script, environments, device, num_leads=agents)
    tensors = [torch.tensor(x, device=device) for x in given]
    out = torch.full_like(tensors[0], torch.nan), torch.full_like(tensors[0], torch.nan)
    launch = advantage_launch(env, *tensors, gamma.to(device), gae_lambda.to(device), out=out)
    launch()
    return [x.cpu().numpy() for x in out]


@pytest.mark.parametrize(("kinds", "horizon"), [(ALIVE, 6), ((*ALIVE, "both", "inactive"), 5)], ids=["alive", "all"])
def test_estimates_of_every_pattern_of_a_few_steps(kinds, horizon, device):
    """Each agent with factors of its own."""
    alone = patterned(kinds, horizon)
    given = type(alone)(*(np.repeat(x[:, :, None], len(FACTORS), axis=2) for x in alone))
    gammas, lambdas = torch.tensor(FACTORS).T.contiguous()
    found, returns = launched(given, gammas, lambdas, device)
    tensors = (torch.tensor(x, device=device) for x in given)
    by_torch = advantages(*tensors, gammas.to(device), lambdas.to(device)).cpu().numpy()
    for agent, factors in enumerate(FACTORS):
        expected, bounds = np.zeros((2, *alone.rewards.shape))
        for column, steps, rows in episodes_of(alone):
            expected[steps, column], bounds[steps, column] = of_deltas(*rows, *factors)
        assert (np.abs(found[..., agent] - expected) <= bounds).all()
        # The kernel fuses the product and the sum; whether torch does is up to the processor. Both keep to the bounds.
        assert (np.abs(found[..., agent] - by_torch[..., agent]) <= 2 * bounds).all()
    assert (returns == found + given.values).all()


# Loss

NUM_STEPS, NUM_ENVS = 5, 40
TAG = {"num_taggers": 3, "num_runners": 4, "num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}


class Case(NamedTuple):
    """A policy's roles in a game, and how it squashes."""

    game: object
    arguments: dict
    roles: tuple
    squash: str = "clip"


CASES = {
    "one head": Case("cartpole", {}, ("agent",)),
    "two heads": Case("tag_continuous", TAG, ("runner",)),
    "two roles in one": Case("tag_continuous", TAG, ("tagger", "runner")),
    "fewer choices": Case(Script, {"num_others": 2, "choices_of_others": 3}, ("other",)),
    "masks, fewer heads": Case(Crew, {}, ("driver",)),
    "masks, fewer choices": Case(Crew, {}, ("helper",)),
    "box": Case(Script, {"num_leads": 2, "continuous": True}, ("lead",)),
    "box, beta": Case(Script, {"num_leads": 2, "continuous": True}, ("lead",), "beta"),
    "box, tanh": Case(Script, {"num_leads": 2, "continuous": True}, ("lead",), "tanh"),
    "box beside choices": Case(Economy, {}, ("planner",), "tanh"),
    "box beside choices, beta": Case(Economy, {}, ("planner",), "beta"),
    "choices beside a box": Case(Economy, {"num_rates": 4}, ("worker",)),
    "fewer choices beside a box": Case(Economy, {"num_rates": 1, "num_clerks": 2}, ("clerk",)),
    "turns": Case(Race, {}, ("player",)),
}


class Exact(Policy):
    """Its outputs are given, in float64; a policy's own are float32."""

    given: tuple[torch.Tensor, torch.Tensor]

    def forward(self, obs):
        return self.given


class Rows(NamedTuple):
    """A rollout and a network's outputs for some of its rows."""

    policy: Exact
    rollout: Rollout
    indices: torch.Tensor
    parameters: torch.Tensor
    values: torch.Tensor


def allowed_draws(view, masks, random):
    """A draw for each row, allowed where anything is."""
    columns, offset = [], 0
    for size in view.head_sizes:
        part = masks[:, offset : offset + size].float()
        columns.append(torch.multinomial(part + 1e-30, 1, generator=random)[:, 0])
        offset += size
    return torch.stack(columns, -1).int()


def rows_of(case, device, *, scale=1.0, spread=0.3, normalize_returns=False, seed=0):
    """Random numbers; inactive rows hold NaN, and draws that nobody could draw."""
    env = gpu_vecenv.make(case.game, NUM_ENVS, device, autoreset_mode="next_step", **case.arguments)
    random = torch.Generator().manual_seed(seed)
    policy = Exact(
        env.game, case.roles, nn.Identity(), normalize_returns=normalize_returns, squash=case.squash, device=env.device
    )
    if policy.return_normalizer is not None:
        policy.return_normalizer.var.fill_(6.25)
    view, data = policy.view, Rollout(env, NUM_STEPS)
    numbers = torch.arange(data.rewards.numel()).view(data.rewards.shape)[:, :, view.agents].flatten()
    indices = numbers[torch.randperm(len(numbers), generator=random)]
    for tensor in (data.values, data.advantages, data.returns):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    active = torch.rand(data.active.shape, generator=random) < 0.8
    data.active.copy_(active)
    if data.acting is not None:
        data.acting.copy_(torch.rand(active.shape, generator=random) < 0.5)
    parameters = torch.randn(len(indices), view.num_parameters, generator=random)
    values = torch.randn(len(indices), generator=random)
    draws = data.draws.cpu().view(data.rewards.numel(), -1)
    if view.continuous:
        parameters[:, view.num_heads :] *= 0.5
        parameters[:, : view.num_heads] *= scale
        draws[indices] = random_draws(parameters, case.squash, random)
    else:
        parameters *= scale
        masks = torch.ones(len(indices), view.num_parameters)
        if data.action_mask is not None:
            data.action_mask.copy_(torch.rand(data.action_mask.shape, generator=random) < 0.6)
            masks = view.mask(data.action_mask[:-1].flatten(0, 2)).cpu()[indices]
        draws[indices, : len(view.head_sizes)] = allowed_draws(view, masks, random).to(draws.dtype)
    gone = ~active[:-1].flatten()
    draws[gone] = torch.nan if view.continuous else -1
    data.draws.copy_(draws.view(data.draws.shape))
    parameters[gone[indices]] = values[gone[indices]] = torch.nan
    found = Rows(policy, data, *(x.to(device) for x in (indices, parameters, values)))
    exact = policy.log_probs_and_entropies(found.parameters.double(), *of_policy(found))[0]
    data.log_probs.view(-1)[found.indices] = (
        exact + spread * torch.randn(len(indices), generator=random).to(device)
    ).float()
    for tensor in (data.log_probs, data.advantages, data.returns, data.values[:-1]):
        tensor[~data.active[:-1]] = torch.nan
    if data.acting is not None:
        data.log_probs[~data.acting[:-1]] = torch.nan
    return found


def of_policy(rows):
    """Draws and masks."""
    batch = batch_of(rows.rollout, rows.policy.view, rows.indices, rows.values)
    return batch.draws, batch.action_mask


CLIP, ENTROPY_COEFFICIENT = 0.2, 0.03


def kernel_of(rows, config):
    clip, entropy_coefficient = torch.tensor([CLIP, ENTROPY_COEFFICIENT], device=rows.indices.device)
    settings = LossSettings.of(config, clip, entropy_coefficient)
    return LossKernel(rows.policy, rows.rollout, settings, chunk=len(rows.indices))


def moments_of(rows):
    """Of one minibatch of all rows."""
    functions, data, moments = rows.rollout.env.functions, rows.rollout, torch.zeros((1, 4), dtype=torch.float64)
    order, moments = torch.full_like(rows.indices, -1), moments.to(rows.indices.device)
    seed, epoch = torch.zeros((2, 1), dtype=torch.int64, device=rows.indices.device)
    given = (functions, rows.indices, seed, epoch, data.active, data.advantages)
    shuffle_launch(*given, acting=data.acting, permutes=False, out=order, moments=moments)()
    assert order.equal(rows.indices) and epoch == 1
    return moments[0]


def differentiated(rows, config=None):
    """Gradients of parameters and of values, and metrics, by the kernel."""
    kernel = kernel_of(rows, config or PPOConfig())
    return kernel(rows.indices, moments_of(rows), rows.parameters, rows.values)


def expected_of(rows, config):
    """The same by autograd through ``loss`` in float64, on the active rows; elsewhere 0."""
    data, view = rows.rollout, rows.policy.view
    active = data.active[:-1].flatten()[rows.indices]
    kept = rows.indices[active]
    gains = data.advantages.flatten()[kept].double()
    acted = active[active] if data.acting is None else data.acting[:-1].flatten()[kept]
    batch = batch_of(data, view, kept, masked_normalize(gains, acted) if config.normalize_advantages else gains)
    batch = Batch(*(x.double() if x is not None and x.dtype == torch.float32 else x for x in batch))
    parameters, values = (x[active].double().requires_grad_() for x in (rows.parameters, rows.values))
    rows.policy.given = parameters, values
    clip, weight = (torch.tensor(np.float32(x).item(), device=kept.device) for x in (CLIP, ENTROPY_COEFFICIENT))
    total, parts = loss(rows.policy, batch, config, clip=clip.double(), entropy_coefficient=weight.double())
    total.backward()
    outputs = []
    for leaf, whole in ((parameters, rows.parameters), (values, rows.values)):
        full = torch.zeros_like(whole, dtype=torch.float64)
        full[active] = leaf.grad
        outputs.append(full)
    return [*outputs, parts], int(active.sum())


CONFIGS = {
    "plain": {},
    "values clipped": {"value_clip": 0.4, "value_coefficient": 2.0},
    "advantages as they are": {"normalize_advantages": False},
    "huber": {
        "value_loss": "huber",
        "huber_delta": 0.3,
        "value_clip": 0.2,
        "scales_value_clip": True,
        "value_coefficient": 4.0,
    },
}


def check(rows, config, within):
    """Gradients of a row, and metrics, up to ``within`` of the size of a row's."""
    (*gradients, metrics), count = expected_of(rows, config)
    assert 0 < count < len(rows.indices)
    found = differentiated(rows, config)
    for own, exact in zip(found, (*gradients, metrics), strict=True):
        assert own.dtype == torch.float32 and own.shape == exact.shape
    inactive = ~rows.rollout.active[:-1].flatten()[rows.indices]
    assert all(x[inactive].eq(0).all() for x in found[:2])
    for own, exact in zip(found[:2], gradients, strict=True):
        assert exact.abs().max() * count > 0.1
        torch.testing.assert_close(own.double() * count, exact * count, rtol=within, atol=within)
    torch.testing.assert_close(found[2].double(), metrics.double(), rtol=within, atol=within)
    return metrics


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_agree_with_the_loss_in_float64(name, settings, device):
    rows = rows_of(CASES[name], device, normalize_returns=settings in ("plain", "huber"))
    # Logarithms of size 10 at most are off by some 1e-6, and so are ratios of size 3, relatively, and with them terms
    # of size 10.
    metrics = check(rows, PPOConfig(**CONFIGS[settings]), 2e-5)
    assert 0.1 < metrics[4] < 0.9


@pytest.mark.parametrize("name", CASES)
def test_extreme_parameters(name, device):
    """Probabilities that are 0 in float32, and ratios that are exactly 1 but for rounding."""
    rows = rows_of(CASES[name], device, scale=1e3, spread=0.0)
    # Logarithms of size 5000, of which differences are taken, are rounded by 2.5e-4, and stored so.
    check(rows, PPOConfig(), 5e-3)


@pytest.mark.parametrize("name", ["two heads", "two roles in one", "masks, fewer choices"])
def test_choices_that_logits_exclude(name, device):
    rows = rows_of(CASES[name], device, spread=0.0)
    draws = of_policy(rows)[0]
    sizes, offset = rows.policy.view.head_sizes, 0
    for head, size in enumerate(sizes):
        excluded = (draws[:, head].long() + 1) % size  # never the one that was drawn
        part = rows.parameters[:, offset : offset + size]
        part.scatter_(1, excluded[:, None].clamp(min=0), -torch.inf)
        offset += size
    assert rows.parameters.isinf().any()
    check(rows, PPOConfig(), 2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["two heads", "box, tanh"])
@pytest.mark.parametrize("what", ["parameters", "values", "log_probs", "old values", "advantages", "returns"])
def test_a_nonfinite_active_row_reaches_metrics_or_gradients(what, name, value, device):
    """In the metrics or gradients, either of which stops the learner, as in those of ``loss`` in torch."""
    rows = rows_of(CASES[name], device)
    row = int(rows.rollout.active[:-1].flatten()[rows.indices].nonzero()[7])
    data, place = rows.rollout, int(rows.indices[row])
    if what == "log_probs":
        value = -value  # a row that was all but impossible
    if what in ("parameters", "values"):
        getattr(rows, what)[row] = value
    else:
        named = {"old values": data.values[:-1]}
        (named[what] if what in named else getattr(data, what)).view(-1)[place] = value
    for normalize in (True, False):
        found = differentiated(rows, PPOConfig(value_clip=0.4, normalize_advantages=normalize))
        assert not all(x.isfinite().all() for x in found)
    others = torch.arange(len(rows.indices), device=rows.indices.device) != row
    assert all(x[others].isfinite().all() for x in found[:2])


def test_a_nan_distribution_gives_nan_gradients(device):
    """A draw of -1, of logits that are NaN."""
    rows = rows_of(CASES["one head"], device)
    row = int(rows.rollout.active[:-1].flatten()[rows.indices].nonzero()[0])
    rows.parameters[row] = torch.nan
    rows.rollout.draws.view(-1)[rows.indices[row]] = -1
    gradients, _, metrics = differentiated(rows)
    assert gradients[row].isnan().all() and metrics.isnan().any()


def test_rows_of_a_clipped_ratio_move_nothing_and_those_beyond_the_other_bound_do(device):
    """Ratios of 1/2, 1 and 2 with advantages of either sign, of two equally likely choices; and no advantage."""
    env = gpu_vecenv.make("cartpole", 7, device, autoreset_mode="next_step")
    policy, data = Exact(env.game, ("agent",), nn.Identity(), device=env.device), Rollout(env, 1)
    data.active.fill_(True)
    ratios = torch.tensor([0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 2.0], device=device)
    gains = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0], device=device)
    data.log_probs.view(-1)[:] = -torch.log(2 * ratios)
    data.advantages.view(-1)[:] = gains
    zeros = torch.zeros(7, 2, device=device)
    rows = Rows(policy, data, torch.arange(7, device=device), zeros, zeros[:, 0])
    gradients, _, metrics = differentiated(rows, PPOConfig(normalize_advantages=False))
    moves = torch.tensor([0.5, 1.0, 0.0, 0.0, -1.0, -2.0, 0.0], device=device)
    # The gradient of a logarithm is half of the difference; logarithms and exponentials are off by an ulp or so.
    expected = -moves[:, None] * torch.tensor([0.5, -0.5], device=device) / 7
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-7)
    assert metrics[0].item() == pytest.approx(-(0.5 + 1 + 1.2 - 0.8 - 1 - 2 + 0) / 7)
    assert metrics[4].item() == pytest.approx(5 / 7)


@pytest.mark.parametrize("name", CASES)
def test_outputs_may_be_strided(name, device):
    """As those of one product for logits and values are: the same bits."""
    rows = rows_of(CASES[name], device)
    both = torch.cat([rows.parameters, rows.values[:, None]], -1)
    strided = rows._replace(parameters=both[:, :-1], values=both[:, -1])
    turned = rows._replace(parameters=rows.parameters.T.contiguous().T)
    expected = differentiated(rows)
    for other in (strided, turned):
        assert not (other.parameters.is_contiguous() and other.values.is_contiguous())
        assert all(x.equal(y) for x, y in zip(differentiated(other), expected, strict=True))


def as_of_one_product(rows):
    """Outputs that lie together, the values behind the parameters, and anything behind them."""
    count = rows.parameters.shape[1]
    both = torch.full((len(rows.indices), width_of(count)), torch.nan, device=rows.indices.device)
    both[:, :count], both[:, count] = rows.parameters, rows.values
    return rows._replace(parameters=both[:, :count], values=both[:, count])


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_outputs_that_lie_together_do_so_too(name, device):
    """The same bits."""
    rows = rows_of(CASES[name], device)
    expected, found = differentiated(rows), differentiated(as_of_one_product(rows))
    assert are_packed(*found[:2]) and not are_packed(*expected[:2])
    assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("name", [*CASES, "many choices"])
def test_emulated_cuda_threads_are_bitwise_equal_to_the_host(name, order, monkeypatch):
    """Rows of a warp that is not whole, too; and logits that shared memory cannot hold."""
    many = {"num_taggers": 3, "num_runners": 4, "num_neighbors": 2, "acceleration_levels": 40, "turn_levels": 40}
    case = CASES.get(name, Case("tag_continuous", many, ("runner",)))
    monkeypatch.setenv("EMULATED_THREADS", order)
    host = rows_of(case, "cpu", normalize_returns=True)
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        emulated = rows_of(case, "cpu", normalize_returns=True)
    host, emulated = (Rows(*rows[:2], *(x[:-3] for x in rows[2:])) for rows in (host, emulated))
    assert len(host.indices) % 32 > 0
    config = PPOConfig(value_clip=0.4)
    for one, other in ((host, emulated), tuple(map(as_of_one_product, (host, emulated)))):
        moments = [moments_of(rows) for rows in (one, other)]
        assert moments[0].equal(moments[1])
        for x, y in zip(differentiated(one, config), differentiated(other, config), strict=True):
            assert x.equal(y)


@pytest.mark.parametrize("chunk", [1, 37])
def test_parts_of_a_minibatch_add_up(chunk, device):
    rows = rows_of(CASES["two heads"], device)
    *expected, metrics = differentiated(rows)
    kernel = kernel_of(rows, PPOConfig())
    moments, total = moments_of(rows), torch.zeros_like(metrics)
    for start in range(0, len(rows.indices), chunk):
        indices, parameters, values = (x[start : start + chunk] for x in rows[2:])
        *gradients, part = kernel(indices, moments, parameters, values)
        total += part
        for found, whole in zip(gradients, expected, strict=True):
            assert found.equal(whole[start : start + chunk])
    # Sums of 800 numbers, of size 3 / 640 each, in another order.
    torch.testing.assert_close(total, metrics, rtol=0, atol=800 * 4 * 2.0**-24)


def test_moments_are_those_of_agents_that_acted_and_count_all_active_ones(device):
    rows = rows_of(CASES["turns"], device)
    active, acting = (x[:-1].flatten()[rows.indices] for x in (rows.rollout.active, rows.rollout.acting))
    rows.rollout.advantages[~rows.rollout.acting[:-1]] = torch.nan
    gains = rows.rollout.advantages.flatten()[rows.indices][active & acting].double()
    expected = [float(len(gains)), gains.sum().item(), gains.square().sum().item(), float(active.sum())]
    assert 0 < expected[0] < expected[3] < len(rows.indices)
    assert moments_of(rows).tolist() == pytest.approx(expected, rel=1e-12)


def test_moments_are_those_of_the_active_rows(device):
    rows = rows_of(CASES["two heads"], device)
    rows.rollout.advantages += 1e4  # the mean square is then nearly the squared mean
    kept = rows.rollout.advantages.flatten()[rows.indices].double()
    kept = kept[~kept.isnan()]
    count, total, squares, value_count = moments_of(rows).tolist()
    assert count == value_count == len(kept) < len(rows.indices)
    assert total == pytest.approx(kept.sum().item(), rel=1e-14)
    # The variance, 1, is a difference of numbers of size 1e8, each off by some 1e-16 of itself.
    variance = squares / count - (total / count) ** 2
    assert variance == pytest.approx(kept.var(correction=0).item(), rel=1e-6)


@pytest.mark.parametrize("rounding", [0.0, 1e-15])
def test_advantages_that_do_not_differ_move_no_policy(rounding, device):
    """Their variance, a difference of sums that were rounded, may come out as less than 0."""
    rows, constant = rows_of(CASES["two heads"], device), np.float32(0.1).item()
    rows.rollout.advantages[rows.rollout.active[:-1]] = constant
    kernel = kernel_of(rows, PPOConfig())
    count, total, squares, value_count = moments_of(rows)
    assert total / count == constant  # a sum of some 640 equal floats is exact in float64
    moments = torch.stack([count, total, squares * (1 - rounding), value_count])
    gradients, _, metrics = kernel(rows.indices, moments, rows.parameters, rows.values)
    assert metrics[0] == 0 and metrics.isfinite().all() and gradients.isfinite().all()


def test_a_policy_of_one_role_reads_a_whole_batch_where_it_lies(device):
    """The same bits as from gathered rows."""
    results = []
    for gathers in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            rows = rows_of(CASES["one head"], device)
            view = rows.policy.view
            network = default_network(view, (16,))
        policy = Policy(rows.rollout.env.game, ("agent",), network, device=rows.rollout.env.device)
        rows.rollout.obs.copy_(torch.randn(rows.rollout.obs.shape, generator=torch.Generator().manual_seed(1)))
        config = PPOConfig(num_steps=NUM_STEPS, num_minibatches=1, chunk_rows=80, hidden_sizes=(16,))
        learner = PPOLearner(policy, config, rows.rollout, seed=0, world=World(), graph_pool=None)
        assert learner.in_order and learner.obs.data_ptr() == rows.rollout.obs.data_ptr()
        learner.in_order = not gathers
        seen = []
        network.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].data_ptr()))
        run_update(learner)
        lies = [learner.obs[start:].data_ptr() for start in (0, 80, 160)] * config.num_epochs
        assert len(seen) == len(lies) and [own == place for own, place in zip(seen, lies, strict=True)] == [
            not gathers
        ] * len(lies)
        results.append([*policy.parameters()])
    assert all(x.equal(y) for x, y in zip(*results, strict=True))


class Half(nn.Module):
    """Only its values, or only its logits, can learn."""

    def __init__(self, which):
        super().__init__()
        self.which, self.weight = which, nn.Parameter(torch.ones(4))

    def forward(self, obs):
        number, constant = (obs * self.weight).sum(-1), (obs * self.weight.detach()).sum(-1)
        logits, values = (number, constant) if self.which == "logits" else (constant, number)
        return torch.stack([logits, -logits], -1), values


@pytest.mark.parametrize("which", ["logits", "values"])
def test_a_network_may_learn_one_of_its_outputs_alone(which, device):
    rows = rows_of(CASES["one head"], device)
    policy = Policy(rows.rollout.env.game, ("agent",), Half(which), device=rows.rollout.env.device)
    rows.rollout.obs.copy_(torch.randn(rows.rollout.obs.shape, generator=torch.Generator().manual_seed(1)))
    config = PPOConfig(num_steps=NUM_STEPS, num_epochs=1)
    learner = PPOLearner(policy, config, rows.rollout, seed=0, world=World(), graph_pool=None)
    run_update(learner)
    assert policy.network.weight.isfinite().all() and policy.network.weight.ne(1).all()


@pytest.mark.parametrize(
    "change", [lambda p, v: (p, v[:, None]), lambda p, v: (p[:, :-1], v), lambda p, v: (p[:-1], v[:-1])]
)
def test_outputs_of_other_shapes_are_refused(change, device):
    rows = rows_of(CASES["two heads"], device)
    kernel = kernel_of(rows, PPOConfig())
    outputs = change(rows.parameters, rows.values)
    with pytest.raises(ConfigError, match=r"network of runner returns shapes .*; expected .*\(800, 9\), \(800,\)"):
        kernel(rows.indices, moments_of(rows), *outputs)
