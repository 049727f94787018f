"""What a policy learns from a rollout: losses and updates against a textbook in float64, and what must not teach."""

import copy
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.script import Script
from oracles.shuffle import order_of
from support.learning import batch_of, metrics_of, run_update
from torch import nn

import gpu_vecenv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.normalizers import Normalizer
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.ppo import Batch, PPOConfig, loss, masked_mean, masked_normalize
from gpu_vecenv.train.ppo_learner import LOSS_METRICS, PPOLearner
from gpu_vecenv.train.rollout_storage import Rollout

# Two action heads, of 4 and 5 choices; 3 taggers and 4 runners.
TAG = {"num_taggers": 3, "num_runners": 4, "side": 3.0, "tagging_distance": 0.2, "max_steps": 13}
TAG |= {"num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}
NUM_ENVS, NUM_STEPS = 6, 8
# A large learning rate, so that a step that is wrong, missing or one too many cannot be overlooked.
SMALL = PPOConfig(num_steps=NUM_STEPS, num_epochs=2, num_minibatches=4, hidden_sizes=(16,), learning_rate=0.01)


def changed(config, **values):
    return PPOConfig(**{**vars(config), **values})


def made(game, device):
    arguments = {"tag_continuous": TAG, Script: {"num_leads": 3, "continuous": True}, Crew: {}}[game]
    return gpu_vecenv.make(game, NUM_ENVS, device, autoreset_mode="next_step", **arguments)


def begun(device, config=SMALL, *, game="tag_continuous", roles=("runner",), seed=0, spread=0.3):
    """A learner, and a rollout of random numbers whose log-probabilities are ``spread`` off the policy's."""
    env, random = made(game, device), torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        policy = Policy(env.game, roles, nn.Identity(), squash=config.squash)
        layers = config.hidden_sizes, config.activation, config.shared_trunk
        network = default_network(policy.view, *layers, squash=config.squash)
        settings = {"normalize_obs": config.normalize_obs, "normalize_returns": config.normalize_returns}
        policy = Policy(env.game, roles, network, squash=config.squash, device=env.device, **settings)
    for p in policy.parameters():  # the first logits are all but equal, which would hide much
        p.data += 0.3 * torch.randn(p.shape, generator=random).to(device)
    for normalizer in (policy.obs_normalizer, policy.return_normalizer):
        if normalizer is not None:
            rows = 2 + 3 * torch.randn(50, *normalizer.mean.shape, generator=random).to(device)
            normalizer.update_from_moments(normalizer.moments(rows, torch.ones(50, dtype=torch.bool, device=device)))
    data = Rollout(env, NUM_STEPS)
    for tensor in (data.obs, data.values, data.rewards, data.advantages, data.returns):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    data.active.copy_(torch.rand(data.active.shape, generator=random) < 0.7)
    for flags in (data.terminations, data.truncations):
        flags.copy_(torch.rand(flags.shape, generator=random) < 0.1)
    if data.action_mask is not None:
        allowed = torch.rand(data.action_mask.shape, generator=random) < 0.6
        allowed[..., [0, 5]] = True  # the first choice of each head
        data.action_mask.copy_(allowed)
    if env.game.layout.action.continuous:
        draws = torch.randn(data.draws.shape, generator=random)
        data.draws.copy_(draws.sigmoid() if config.squash == "beta" else draws)
    else:
        sizes = torch.tensor(env.game.layout.action.sizes[roles[0]])
        draws = torch.rand((*data.draws.shape[:3], len(sizes)), generator=random) * sizes
        data.draws[..., : len(sizes)] = draws.int().to(device)
        if data.action_mask is not None:
            data.draws.zero_()  # the choice that is always allowed
    learner = PPOLearner(policy, config, data, seed=seed, world=World(), graph_pool=None)
    with torch.no_grad():
        batch = whole(learner)
        own = policy.log_probs_and_entropies(policy(batch.obs)[0], batch.draws, batch.action_mask)[0]
        own += spread * torch.randn(own.shape, generator=random).to(device)
        data.log_probs.view(-1)[learner.indices] = own
    return learner


def whole(learner):
    """All rows of a learner."""
    data, indices = learner.rollout, learner.indices
    return batch_of(data, learner.policy.view, indices, data.advantages.flatten()[indices])


def updated(learner, progress=0.0, iteration=0):
    """The metrics of an update."""
    learner.update_statistics()
    return run_update(learner, progress, iteration)


def state(learner):
    """Copies of weights and of Adam's state."""
    tensors = {**learner.policy.state_dict(), **learner.optimizer_state()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal_bits(one, other):
    return one.keys() == other.keys() and all(one[name].cpu().equal(other[name].cpu()) for name in one)


def steps_taken(learner):
    counts = {float(x) for name, x in learner.optimizer_state().items() if name.endswith("step")}
    assert len(counts) == 1
    return counts.pop()


# The textbook: float64, active rows selected, distributions and optimiser those of torch


class Terms(NamedTuple):
    """Of the loss, as a log has them."""

    total: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    clip_fraction: torch.Tensor


def textbook_terms(policy, batch, config, clip=None, entropy_coefficient=None):
    """``policy`` is in float64; ``batch`` has active rows only."""
    obs = batch.obs.double()
    if policy.obs_normalizer is not None:
        obs = ((obs - policy.obs_normalizer.mean) / (policy.obs_normalizer.var + 1e-8).sqrt()).clamp(-10, 10)
    parameters, values = policy.network(obs)
    unit = 1.0
    if policy.return_normalizer is not None:
        unit = (policy.return_normalizer.var + 1e-8).sqrt()
        values = values * unit + policy.return_normalizer.mean
    if policy.view.continuous:
        means, log_stds = parameters.chunk(2, -1)
        normal = torch.distributions.Normal(means, log_stds.exp())
        log_probs, entropies = normal.log_prob(batch.draws.double()).sum(-1), normal.entropy().sum(-1)
        if policy.squash == "beta":
            beta = torch.distributions.Beta(*(1 + nn.functional.softplus(x) for x in (means, log_stds)))
            log_probs, entropies = beta.log_prob(batch.draws.double()).sum(-1), beta.entropy().sum(-1)
        if policy.squash == "tanh":
            log_probs = log_probs - (1 - batch.draws.double().tanh() ** 2).log().sum(-1)
    else:
        if batch.action_mask is not None:
            parameters = parameters.masked_fill(~batch.action_mask, -torch.inf)
        parts = parameters.split(list(policy.view.head_sizes), -1)
        heads = [torch.distributions.Categorical(logits=part) for part in parts]
        log_probs = sum(head.log_prob(batch.draws[:, k]) for k, head in enumerate(heads))
        entropies = sum(head.entropy() for head in heads)
    ratio, gains, returns = (log_probs - batch.log_probs).exp(), batch.advantages.double(), batch.returns.double()
    clip = config.clip if clip is None else clip
    policy_loss = -torch.min(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains).mean()

    def error_of(values):
        if config.value_loss == "huber":
            return 2 * nn.functional.huber_loss(
                values / unit, returns / unit, reduction="none", delta=config.huber_delta
            )
        return ((values - returns) / unit) ** 2

    errors = error_of(values)
    if config.value_clip is not None:
        limit = config.value_clip * (unit if config.scales_value_clip else 1)
        near = batch.values + (values - batch.values).clamp(-limit, limit)
        errors = torch.max(errors, error_of(near))
    value_loss = errors.mean() / 2
    weight = config.entropy_coefficient if entropy_coefficient is None else entropy_coefficient
    total = policy_loss + config.value_coefficient * value_loss - weight * entropies.mean()
    kl, outside = (ratio - 1 - ratio.log()).mean(), ((ratio - 1).abs() > clip).double().mean()
    return Terms(total, policy_loss, value_loss, entropies.mean(), kl, outside)


def in_float64(policy):
    twin = copy.deepcopy(policy)
    for p in twin.parameters():
        p.grad = None
    return twin.double()


def selected(batch):
    return Batch(*(None if x is None else x[batch.active] for x in batch))


class Textbook:
    """All steps of an update; ``weights[k]`` are those after k of them, ``metrics[k]`` those of step k."""

    def __init__(self, learner, seed=0, progress=0.0, iteration=0):
        config, data, policy = learner.config, learner.rollout, in_float64(learner.policy)
        rate, clip, entropy_coefficient = config.schedule(progress)
        optimizer = torch.optim.Adam(policy.parameters(), lr=rate, eps=config.adam_epsilon)
        indices = learner.indices.tolist()
        self.weights, self.metrics = [copy.deepcopy(policy.state_dict())], []
        for epoch in range(config.num_epochs):
            order = order_of(seed, iteration * config.num_epochs + epoch, len(indices))
            for rows in np.array(order).reshape(config.num_minibatches, -1):
                at = torch.tensor([indices[row] for row in rows], device=data.obs.device)
                batch = selected(batch_of(data, policy.view, at, data.advantages.flatten()[at]))
                if config.normalize_advantages:
                    gains = batch.advantages.double()
                    batch = batch._replace(advantages=(gains - gains.mean()) / gains.std(correction=0))
                terms = textbook_terms(policy, batch, config, clip, entropy_coefficient)
                optimizer.zero_grad()
                terms.total.backward()
                norm = nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
                optimizer.step()
                self.weights.append(copy.deepcopy(policy.state_dict()))
                self.metrics.append([x.item() for x in (*terms[1:], norm)])

    def check(self, learner, step=-1):
        own = learner.policy.state_dict()
        for name in dict(learner.policy.named_parameters()):
            # Measured 3e-7 after 8 steps. A step of Adam is the learning rate times a quotient of gradients, and some
            # gradient may be nearly 0, so that its rounding shows. One step less or more gives 7e-3.
            torch.testing.assert_close(own[name].double(), self.weights[step][name], rtol=0, atol=1e-5)


SETTINGS = {
    "two heads": {},
    "values clipped": {"value_clip": 0.2, "value_coefficient": 2.0},
    "advantages as they are": {"normalize_advantages": False},
    "separate layers": {"shared_trunk": False, "activation": "relu"},
    "normalised": {"normalize_obs": True, "normalize_returns": True, "value_clip": 0.5},
    "chunks": {"chunk_rows": 13},
    "huber": {"value_loss": "huber", "huber_delta": 0.2, "max_grad_norm": 1e6},
    "mappo": {
        "value_loss": "huber",
        "huber_delta": 0.3,
        "value_clip": 0.2,
        "scales_value_clip": True,
        "normalize_returns": True,
        "adam_epsilon": 1e-3,
        "actor_gain": 0.5,
    },
    "no gradient clipping": {"max_grad_norm": 1e6, "clip": 0.05, "entropy_coefficient": 0.3},
    "box": {"game": Script, "roles": ("lead",)},
    "box, tanh": {"game": Script, "roles": ("lead",), "squash": "tanh"},
    "box, beta": {"game": Script, "roles": ("lead",), "squash": "beta"},
    "masks": {"game": Crew, "roles": ("helper",)},
}
OTHER_GAME = ("game", "roles")


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_update_is_that_of_a_textbook_on_the_active_rows_alone(setting, device):
    changes = dict(SETTINGS[setting])
    where = {name: changes.pop(name) for name in OTHER_GAME if name in changes}
    learner = begun(device, changed(SMALL, **changes), seed=11, **where)
    assert 0.1 < (~whole(learner).active).float().mean() < 0.5
    book = Textbook(learner, seed=11, progress=0.25, iteration=3)
    metrics = updated(learner, progress=0.25, iteration=3)
    book.check(learner)
    means = np.mean(book.metrics, axis=0)
    found, share = [metrics[name] for name in LOSS_METRICS], LOSS_METRICS.index("clip_fraction")
    # Measured 3e-7. The clipped share counts rows, of which one may lie at the very edge; a minibatch has 12 or more.
    bounds = [1 / 12 / 8 + 1e-6 if k == share else 1e-5 for k in range(len(found))]
    assert (abs(np.array(found) - means) <= bounds).all(), (found, means)
    assert metrics["clip_fraction"] > 0.1 and metrics["skipped_fraction"] == 0  # the clip mattered
    assert steps_taken(learner) == 8


def test_two_updates_go_on_with_adams_state(device):
    """What one update of four epochs does, two of two do, on the same data: the same bits."""
    config = changed(SMALL, num_minibatches=1, final_learning_rate=None)
    twice, once = begun(device, config), begun(device, changed(config, num_epochs=4))
    updated(twice), updated(twice), updated(once)
    assert equal_bits(state(twice), state(once)) and steps_taken(twice) == 4


def test_a_learner_learns_from_its_own_agents_alone(device):
    learner, twin = begun(device, roles=("tagger",)), begun(device, roles=("tagger",))
    assert learner.indices.tolist() == [k for k in range(NUM_STEPS * NUM_ENVS * 7) if k % 7 < 3]
    for tensor in vars(twin.rollout).values():
        if isinstance(tensor, torch.Tensor):
            tensor[:, :, 3:] = 1  # the runners'
    updated(learner), updated(twin)
    assert equal_bits(state(learner), state(twin))


# Order of the rows


class Watched:
    """Row numbers, which stand in the first number of each observation, of every call with gradients."""

    def __init__(self, learner):
        obs, self.calls = learner.rollout.obs, []
        obs[:-1, ..., 0] = torch.arange(obs[:-1, ..., 0].numel(), device=obs.device).view(obs[:-1, ..., 0].shape) / 256
        learner.policy.network.register_forward_pre_hook(lambda _, arguments: self.see(*arguments))

    def see(self, obs):
        self.calls.append((obs[..., 0] * 256).long().tolist())


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_every_row_is_visited_once_an_epoch_in_an_order_of_seed_epoch_and_row(seed, device):
    """By numbers that Python computes, so that all devices agree."""
    learner = begun(device, changed(SMALL, num_epochs=3), seed=seed)
    indices, watched = learner.indices.tolist(), Watched(learner)
    orders = []
    for iteration in (0, 1, 5):
        updated(learner, iteration=iteration)
        assert [len(rows) for rows in watched.calls] == [len(indices) // 4] * 12
        for epoch, start in enumerate((0, 4, 8)):
            order = list(itertools.chain(*watched.calls[start : start + 4]))
            assert sorted(order) == indices
            assert order == [indices[row] for row in order_of(seed, 3 * iteration + epoch, len(indices))]
            orders.append(tuple(order))
        watched.calls.clear()
    assert len(set(orders)) == 9


def test_the_order_does_not_depend_on_what_was_learnt_before(device):
    fresh, worn = begun(device), begun(device)
    updated(worn)
    calls = []
    for learner in (fresh, worn):
        watched = Watched(learner)
        updated(learner, iteration=4)
        calls.append(watched.calls)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("chunk_rows", [1, 13, 47, 48])
def test_chunks_change_gradients_by_rounding_alone(chunk_rows, device):
    config = changed(SMALL, num_epochs=1)
    learner, parts = begun(device, config), begun(device, changed(config, chunk_rows=chunk_rows))
    watched, watched_parts = Watched(learner), Watched(parts)
    updated(learner)
    metrics = updated(parts)
    rows = NUM_STEPS * NUM_ENVS * 4 // 4  # of a minibatch
    sizes = [chunk_rows] * (rows // chunk_rows) + [rows % chunk_rows] * (rows % chunk_rows > 0)
    assert [len(rows) for rows in watched_parts.calls] == 4 * sizes
    assert list(itertools.chain(*watched_parts.calls)) == list(itertools.chain(*watched.calls))
    found, expected = state(parts), state(learner)
    for name in expected:
        if name.endswith("exp_avg"):  # a mean of gradients: no quotient that would enlarge an error
            # Sums of 48 terms, of magnitude at most 1 each after clipping, in another order: 48 roundings, 4 times.
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=200 * 2.0**-24)
    expected_figures = metrics_of(learner)
    assert metrics == pytest.approx(expected_figures, rel=1e-4, abs=1e-4)


def test_minibatches_that_do_not_divide_are_refused_with_the_numbers(device):
    with pytest.raises(ConfigError, match=r"num_minibatches is 9; .* = 8 x 6 x 4 = 192$"):
        begun(device, changed(SMALL, num_minibatches=9))


# When steps are not taken


def place_of_step(learner, step):
    """A place in the rollout that the minibatch of this step, in the first epoch, has, and that is active."""
    size = len(learner.indices) // learner.config.num_minibatches
    rows = order_of(0, 0, len(learner.indices))[step * size : (step + 1) * size]
    active = learner.rollout.active[:-1].flatten()
    return next(int(learner.indices[row]) for row in rows if active[learner.indices[row]])


@pytest.mark.parametrize("step", [0, 1, 3])
def test_from_a_minibatch_beyond_the_target_kl_on_no_step_is_taken(step, device):
    """One row of the step's minibatch was drawn by quite another policy; all other rows by this very one."""
    learner = begun(device, changed(SMALL, target_kl=0.1, learning_rate=1e-3), spread=0.0)
    book = Textbook(learner)
    place = place_of_step(learner, step)
    learner.rollout.log_probs.view(-1)[place] -= 4
    kls = [metrics[LOSS_METRICS.index("approx_kl")] for metrics in Textbook(learner).metrics]
    # The same row comes again in the second epoch; all other minibatches alone would not have been in the way.
    assert kls[step] > 1 and sum(kl > 0.1 for kl in kls) == 2
    metrics = updated(learner)
    assert metrics["skipped_fraction"] == (8 - step) / 8 and steps_taken(learner) == step
    book.check(learner, step)
    if step == 0:
        assert equal_bits(state(learner), state(begun(device, learner.config, spread=0.0)))


def test_on_a_cpu_torch_computes_no_minibatch_that_is_skipped():
    learner = begun(torch.device("cpu"), changed(SMALL, target_kl=0.1, learning_rate=1e-3), spread=0.0)
    learner.rollout.log_probs.view(-1)[place_of_step(learner, 1)] -= 4
    calls = []
    learner.policy.network.register_forward_pre_hook(lambda *_: calls.append(None))  # with hooks there are no kernels
    assert updated(learner)["skipped_fraction"] == 7 / 8 and len(calls) == 2


@pytest.mark.parametrize("taken", [1, 2, 4])
def test_weights_and_adams_state_stay_those_of_the_last_step(taken, device):
    """With one minibatch an epoch, the same bits as with so many epochs."""
    config = changed(SMALL, num_epochs=6, num_minibatches=1)
    book = Textbook(begun(device, config, spread=0.0))
    kls = [metrics[LOSS_METRICS.index("approx_kl")] for metrics in book.metrics]
    assert all(x < y for x, y in itertools.pairwise(kls))
    target = (kls[taken - 1] + kls[taken]) / 2
    stopped = begun(device, changed(config, target_kl=target), spread=0.0)
    fewer, one_more = (begun(device, changed(config, num_epochs=n), spread=0.0) for n in (taken, taken + 1))
    metrics, expected = updated(stopped), updated(one_more)
    updated(fewer)
    # Those of the steps that were taken and of the first that was not; they were added up alike.
    assert [metrics[name] for name in LOSS_METRICS] == [expected[name] for name in LOSS_METRICS]
    assert equal_bits(state(stopped), state(fewer)) and metrics["skipped_fraction"] == pytest.approx((6 - taken) / 6)
    stopped.rollout.log_probs.copy_(begun(device, config, spread=0.0).rollout.log_probs)
    before = state(stopped)
    updated(stopped)  # too far from that policy at once
    assert equal_bits(state(stopped), before)
    batch = whole(stopped)
    with torch.no_grad():
        own = stopped.policy.log_probs_and_entropies(stopped.policy(batch.obs)[0], batch.draws)[0]
    stopped.rollout.log_probs.view(-1)[stopped.indices] = own
    assert updated(stopped)["skipped_fraction"] < 1  # the next iteration begins anew
    assert not equal_bits(state(stopped), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", [0, 2])
def test_from_a_gradient_that_is_not_finite_on_no_step_is_taken(step, value, device):
    """The same bits as where the policy has moved too far at that step: what came before it has been taken."""
    config = changed(SMALL, target_kl=0.1, learning_rate=1e-3)
    broken, stopped = (begun(device, config, spread=0.0) for _ in range(2))
    place = place_of_step(broken, step)
    broken.rollout.returns.view(-1)[place] = value
    stopped.rollout.log_probs.view(-1)[place] -= 4
    metrics = updated(broken)
    updated(stopped)
    assert steps_taken(broken) == step and equal_bits(state(broken), state(stopped))
    assert not np.isfinite(metrics["value_loss"]) and metrics["skipped_fraction"] == (8 - step) / 8


class Cliff(nn.Module):
    """Its value is finite, its gradient is not."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, obs):
        parameters, values = self.network(obs)
        return parameters, values + torch.sqrt((values * 0).abs())


def test_a_gradient_that_is_not_finite_behind_a_finite_loss_changes_nothing(device):
    learner = begun(device)
    before = state(learner)
    learner.policy.network = Cliff(learner.policy.network)
    metrics = updated(learner)
    assert not np.isfinite(metrics["grad_norm"]) and np.isfinite(metrics["value_loss"])
    learner.policy.network = learner.policy.network.network
    assert equal_bits(state(learner), before) and metrics["skipped_fraction"] == 1


# Gradients and schedules


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.1])
def test_gradients_are_scaled_down_to_their_largest_norm(share, device):
    config = changed(SMALL, num_epochs=1, num_minibatches=1)
    free = begun(device, changed(config, max_grad_norm=1e9))
    norm = updated(free)["grad_norm"]
    clipped = begun(device, changed(config, max_grad_norm=share * norm))
    assert updated(clipped)["grad_norm"] == pytest.approx(norm, rel=1e-6)  # before it is scaled

    def gradient(learner):
        """Adam's first mean is a tenth of it."""
        return 10 * torch.cat(
            [x.flatten() for name, x in learner.optimizer_state().items() if name.endswith("exp_avg")]
        )

    # The norm plus 1e-6 divides, as in torch's own function.
    torch.testing.assert_close(gradient(clipped), min(share, 1) * gradient(free), rtol=1e-5, atol=1e-8)
    assert gradient(free).norm().item() == pytest.approx(norm, rel=1e-5)


def test_schedules_run_linearly_to_their_ends_or_stay():
    config = PPOConfig(learning_rate=0.4, clip=0.2, entropy_coefficient=0.1)
    assert config.schedule(0.0) == (0.4, 0.2, 0.1)
    assert config.schedule(0.25) == pytest.approx((0.3, 0.2, 0.1)) and config.schedule(1.0) == (0.0, 0.2, 0.1)
    moving = changed(config, final_learning_rate=None, final_clip=0.1, final_entropy_coefficient=0.5)
    assert moving.schedule(0.0) == (0.4, 0.2, 0.1)
    assert moving.schedule(0.5) == pytest.approx((0.4, 0.15, 0.3)) and moving.schedule(1.0) == (0.4, 0.1, 0.5)
    rising = changed(config, final_learning_rate=0.8)
    assert rising.schedule(0.75)[0] == pytest.approx(0.7)


@pytest.mark.parametrize("key", ["learning_rate", "clip", "entropy_coefficient"])
def test_an_update_uses_what_the_schedule_says(key, device):
    ends = {"learning_rate": 0.002, "clip": 0.05, "entropy_coefficient": 0.9}
    constant = changed(SMALL, final_learning_rate=None)
    config = changed(constant, **{f"final_{key}": ends[key]})
    scheduled, plain, first = (begun(device, c) for c in (config, constant, constant))
    indices = ("learning_rate", "clip", "entropy_coefficient")
    twin = begun(device, changed(constant, **{key: config.schedule(0.75)[indices.index(key)]}))
    updated(scheduled, progress=0.75), updated(twin), updated(plain, progress=0.75), updated(first)
    assert equal_bits(state(scheduled), state(twin))
    assert not equal_bits(state(scheduled), state(plain)) and equal_bits(state(plain), state(first))


def test_a_rate_of_0_moves_no_weight(device):
    learner = begun(device, changed(SMALL, learning_rate=0.0), spread=0.0)
    before = {name: x.clone() for name, x in learner.policy.state_dict().items()}
    metrics = updated(learner)
    assert equal_bits(learner.policy.state_dict(), before) and steps_taken(learner) == 8
    # The stored log-probabilities were computed by the same function, on another number of rows.
    assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_fraction"] == 0


def test_a2c_takes_one_step_along_the_policy_gradient(device):
    """Mnih et al. 2016: the gradient of -log pi(a) A, with A neither normalised nor clipped, is that of the loss."""
    config = PPOConfig.a2c(hidden_sizes=(16,), value_coefficient=0.25, max_grad_norm=1e6)
    assert (config.num_steps, config.num_epochs, config.num_minibatches, config.gae_lambda) == (5, 1, 1, 1.0)
    assert not config.normalize_advantages and PPOConfig.a2c(num_steps=7, learning_rate=0.1).num_steps == 7
    with pytest.raises(ConfigError, match=r"gae_lambda is 2\.0"):
        PPOConfig.a2c(gae_lambda=2.0)
    learner = begun(device, changed(config, num_steps=NUM_STEPS), spread=0.0)
    policy, batch = in_float64(learner.policy), selected(whole(learner))
    parameters, values = policy.network(batch.obs.double())
    heads = [torch.distributions.Categorical(logits=part) for part in parameters.split([4, 5], -1)]
    log_probs = sum(head.log_prob(batch.draws[:, k]) for k, head in enumerate(heads))
    entropy = sum(head.entropy() for head in heads).mean()
    total = -(log_probs * batch.advantages).mean() - 0.01 * entropy
    (total + 0.25 * (values - batch.returns).square().mean() / 2).backward()
    updated(learner)
    found = [x for name, x in learner.optimizer_state().items() if name.endswith("exp_avg")]
    for tensor, p in zip(found, policy.parameters(), strict=True):
        # float32 means of about 130 rows
        torch.testing.assert_close(10 * tensor.double(), p.grad, rtol=1e-4, atol=1e-5)
    assert steps_taken(learner) == 1


# Loss


def differentiated(policy, batch, config=SMALL, **settings):
    policy.zero_grad()
    total, parts = loss(policy, batch, config, **settings)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    return {"total": total.detach(), "parts": parts, **gradients}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loss_and_its_gradient_are_those_of_a_textbook(setting, device):
    changes = dict(SETTINGS[setting])
    where = {name: changes.pop(name) for name in OTHER_GAME if name in changes}
    learner = begun(device, changed(SMALL, **changes), **where)
    policy, config, batch = copy.deepcopy(learner.policy), learner.config, whole(learner)
    twin = in_float64(policy)
    for clip, weight in ((None, None), (0.05, 0.4)):
        given = {} if clip is None else {"clip": torch.tensor(clip), "entropy_coefficient": torch.tensor(weight)}
        given = {name: x.to(device) for name, x in given.items()}
        found = differentiated(policy, batch, config, **given)
        twin.zero_grad()
        terms = textbook_terms(twin, selected(batch), config, clip, weight)
        terms.total.backward()
        # Some 130 rows of float32; ratios come of differences of logarithms near 3, so of some 1e-6 each.
        assert found["parts"].tolist() == pytest.approx([x.item() for x in terms[1:]], rel=1e-5, abs=1e-5)
        assert found["total"].item() == pytest.approx(terms.total.item(), rel=1e-5, abs=1e-5)
        for name, p in twin.named_parameters():
            torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-4, atol=2e-5)


def test_the_total_is_the_weighted_sum_of_its_terms(device):
    learner = begun(device)
    for value, entropy in ((0.0, 0.0), (1.0, 0.0), (0.0, 2.0), (3.0, 0.5)):
        config = changed(SMALL, value_coefficient=value, entropy_coefficient=entropy)
        total, parts = loss(learner.policy, whole(learner), config)
        expected = parts[0] + value * parts[1] - entropy * parts[2]
        assert total.item() == pytest.approx(expected.item(), rel=1e-6) and not parts.requires_grad


def test_values_are_clipped_about_those_of_the_rollout(device):
    """Values 0, 1 and 3, which were 1, all with the return 2: clipped to 0.5, 1 and 1.5, and the worse counts."""
    env = made("tag_continuous", device)

    class Given(nn.Module):
        def forward(self, obs):
            return torch.zeros(len(obs), 9, device=obs.device), obs[:, 0]

    policy, rows = Policy(env.game, ("runner",), Given(), device=env.device), torch.zeros(3, 2, device=device)
    obs = torch.tensor([[0.0], [1.0], [3.0]], device=device)
    ones, active = torch.ones(3, device=device), torch.ones(3, dtype=torch.bool, device=device)
    batch = Batch(obs, rows.int(), rows[:, 0], ones, rows[:, 0], 2 * ones, active)
    for value_clip, errors in ((None, [4, 1, 1]), (0.5, [4, 1, 1]), (0.0, [4, 1, 1]), (2.0, [4, 1, 1])):
        parts = loss(policy, batch, changed(SMALL, value_clip=value_clip))[1]
        assert parts[1].item() == pytest.approx(sum(errors) / 6)
    near = batch._replace(returns=torch.tensor([0.0, 1.0, 3.0], device=device))
    for value_clip, errors in ((None, [0, 0, 0]), (0.5, [0.25, 0, 2.25]), (0.0, [1, 0, 4]), (2.0, [0, 0, 0])):
        parts = loss(policy, near, changed(SMALL, value_clip=value_clip))[1]
        assert parts[1].item() == pytest.approx(sum(errors) / 6)


FLOATS = ("obs", "draws", "log_probs", "values", "advantages", "returns")


@pytest.mark.parametrize("what", FLOATS)
def test_an_inactive_row_changes_neither_loss_nor_gradient(what, device):
    learner, config = begun(device), changed(SMALL, value_clip=0.2)
    policy, batch = copy.deepcopy(learner.policy), whole(learner)
    given = getattr(batch, what)
    other = given.flip(0)
    inactive = (~batch.active).view(-1, *[1] * (given.ndim - 1))
    altered = batch._replace(**{what: torch.where(inactive, other, given)})
    assert not getattr(altered, what).equal(given)
    expected = differentiated(policy, batch, config)
    assert equal_bits(differentiated(policy, altered, config), expected)
    everywhere = batch._replace(**{what: torch.where(inactive, given, other)})  # an active row does matter
    assert not equal_bits(differentiated(policy, everywhere, config), expected)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), -1e30, 1e30])
def test_an_inactive_rows_log_probability_may_be_anything(value, device):
    """Its ratio is then no number, and neither would be 0 times its gradient."""
    learner = begun(device)
    policy, batch = copy.deepcopy(learner.policy), whole(learner)
    altered = batch._replace(log_probs=torch.where(batch.active, batch.log_probs, value))
    assert equal_bits(differentiated(policy, altered), differentiated(policy, batch))


def test_a_minibatch_without_an_active_row_moves_nothing(device):
    learner = begun(device)
    batch = whole(learner)
    found = differentiated(copy.deepcopy(learner.policy), batch._replace(active=torch.zeros_like(batch.active)))
    assert all(tensor.eq(0).all() for tensor in found.values())
    learner.rollout.active.zero_()
    before = {name: x.clone() for name, x in learner.policy.state_dict().items()}
    metrics = updated(learner)
    assert equal_bits(learner.policy.state_dict(), before) and all(metrics[name] == 0 for name in LOSS_METRICS)


def test_losses_of_parts_add_up_with_the_count_of_the_whole(device):
    learner = begun(device)
    policy, batch = copy.deepcopy(learner.policy), whole(learner)
    count = batch.active.sum()
    expected = differentiated(policy, batch)
    parts = [Batch(*(None if x is None else x[part] for x in batch)) for part in (slice(0, 50), slice(50, None))]
    found = [differentiated(policy, part, count=count) for part in parts]
    for name in expected:  # two sums of some 60 rows in place of one
        torch.testing.assert_close(found[0][name] + found[1][name], expected[name], rtol=1e-4, atol=1e-5)


def test_means_and_normalised_numbers_are_those_of_active_rows(device):
    random = torch.Generator().manual_seed(0)
    x, active = 3 + 2 * torch.randn(500, generator=random), torch.rand(500, generator=random) < 0.4
    x[~active] = float("nan")
    kept = x[active].double()
    x, active = x.to(device), active.to(device)
    assert masked_mean(x, active).item() == pytest.approx(kept.mean().item(), rel=1e-5)
    assert masked_mean(x, active, torch.tensor(7, device=device)).item() == pytest.approx(
        kept.sum().item() / 7, rel=1e-5
    )
    expected = (kept - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(masked_normalize(x, active)[active].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert masked_mean(x, torch.zeros_like(active)) == 0
    constant = masked_normalize(torch.full_like(x, 2.5), active)  # nothing to tell rows apart: 0, not 0 / 0
    assert constant.eq(0).all()


# What an iteration is told, and statistics


def test_explained_variance_is_that_of_the_active_rows(device):
    learner = begun(device)
    data = learner.rollout
    data.returns.copy_(data.advantages + data.values[:-1])
    batch = whole(learner)
    kept = [x[batch.active].double().cpu().numpy() for x in (batch.returns, batch.values)]
    expected = 1 - (kept[0] - kept[1]).var() / kept[0].var()
    assert updated(learner)["explained_variance"] == pytest.approx(expected, abs=1e-5)


def sums_of_rewards(data, agents, gamma, sums):
    """Discounted sums (T, E, A) of each agent's rewards since its episode began, after ``sums`` before; float64."""
    found, sums = np.zeros((NUM_STEPS, *sums.shape)), sums.copy()
    rewards, active, *ends = (
        x[:NUM_STEPS, :, agents].cpu().numpy() for x in (data.rewards, data.active, data.terminations, data.truncations)
    )
    for index in np.ndindex(found.shape):
        row = index[1:]
        if active[index]:
            sums[row] = found[index] = rewards[index] + gamma * sums[row]
        if ends[0][index] or ends[1][index]:
            sums[row] = 0
    return found, sums


def test_statistics_move_at_the_end_of_an_update_and_count_active_rows_of_own_agents(device):
    learner = begun(device, changed(SMALL, normalize_obs=True, normalize_returns=True, gamma=0.9))
    policy, seen = learner.policy, set()
    before = copy.deepcopy((policy.obs_normalizer, policy.return_normalizer))
    policy.network.register_forward_hook(lambda *_: seen.add(tuple(policy.obs_normalizer.mean.tolist())))
    batch = whole(learner)
    sums, _ = sums_of_rewards(learner.rollout, policy.view.agents, 0.9, np.zeros(learner.reward_sums.shape))
    learner.rollout.obs[:-1][~learner.rollout.active[:-1]] = 1e6
    updated(learner)
    assert seen == {tuple(before[0].mean.tolist())}
    own = policy.obs_normalizer, policy.return_normalizer
    seen_rows = (batch.obs, torch.tensor(sums, device=device).flatten())
    for normalizer, old, rows in zip(own, before, seen_rows, strict=True):
        expected = copy.deepcopy(old)
        expected.update_from_moments(old.moments(rows, batch.active))
        assert normalizer.count.item() == pytest.approx(old.count.item() + int(batch.active.sum()))
        for name in ("mean", "var"):  # sums step by step, or of all at once; float32 sums of rewards
            torch.testing.assert_close(getattr(normalizer, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
            assert not getattr(normalizer, name).equal(getattr(old, name))
    moved = copy.deepcopy(own)
    learner.rollout.active.zero_()
    updated(learner)
    assert all(equal_bits(x.state_dict(), y.state_dict()) for x, y in zip(own, moved, strict=True))


def test_sums_of_rewards_continue_in_the_next_rollout(device):
    learner = begun(device, changed(SMALL, normalize_returns=True, gamma=0.9))
    sums = np.zeros(learner.reward_sums.shape)
    for _ in range(2):
        learner.update_statistics()
        _, sums = sums_of_rewards(learner.rollout, learner.policy.view.agents, 0.9, sums)
        assert np.count_nonzero(sums) > 3
        np.testing.assert_allclose(learner.reward_sums.cpu(), sums, rtol=1e-5)  # float32
    learner.discard_statistics()  # the interrupted rollout's steps are not known
    assert learner.reward_sums.eq(0).all()


def test_the_unit_of_values_does_not_depend_on_the_critic(device):
    """Otherwise its errors would enlarge its own output: values that run away."""
    learners = [begun(device, changed(SMALL, normalize_returns=True)) for _ in range(2)]
    for tensor in (learners[1].rollout.values, learners[1].rollout.advantages, learners[1].rollout.returns):
        tensor.mul_(1e6)
    for learner in learners:
        learner.update_statistics()
        learner.update_normalizers()
    assert equal_bits(*(learner.policy.return_normalizer.state_dict() for learner in learners))


def test_what_was_looked_at_is_taken_in_once(device):
    learner = begun(device, changed(SMALL, normalize_returns=True, learning_rate=0.0))
    normalizer = learner.policy.return_normalizer
    assert isinstance(normalizer, Normalizer)
    start, count = normalizer.count.item(), int(whole(learner).active.sum())
    for k in (1, 2, 3):
        updated(learner)
        assert normalizer.count.item() == pytest.approx(start + k * count)


# Configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["total_steps", "num_steps", "num_epochs", "num_minibatches", "chunk_rows"], [0, -1]),
        *itertools.product(["gamma", "gae_lambda"], [-0.1, 1.1, float("nan"), float("inf")]),
        *itertools.product(["learning_rate", "clip", "value_coefficient"], [-1e-9, float("nan"), float("inf")]),
        *itertools.product(["entropy_coefficient", "max_grad_norm"], [-1e-9, float("nan"), float("inf")]),
        *itertools.product(["final_learning_rate", "final_clip", "final_entropy_coefficient"], [-1e-9, float("inf")]),
        *itertools.product(["value_clip", "target_kl"], [-1e-9, float("nan"), "no"]),
        *itertools.product(["hidden_sizes[0]"], [0, -1, 2.5, True]),
        *[("num_steps", 2.5), ("num_steps", "8"), ("num_minibatches", True), ("gamma", "high")],
        *[("gamma", None), ("learning_rate", None), ("hidden_sizes", 64), ("normalize_advantages", "no")],
        *[("normalize_obs", 1), ("shared_trunk", None), ("activation", "gelu"), ("squash", "sigmoid")],
        *[("precision", "float16"), ("precision", None), ("chunk_rows", None)],
    ],
)
def test_a_bad_value_of_the_configuration_is_named(key, value):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**({"hidden_sizes": (value, 8)} if key == "hidden_sizes[0]" else {key: value}))
    assert key in str(caught.value) and str(value).strip("(),").split(", ")[-1] in str(caught.value)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_ends_of_a_range_belong_to_it(value):
    assert PPOConfig(gamma=value, gae_lambda=value).gamma == value


@pytest.mark.parametrize(
    "key", ["final_learning_rate", "final_clip", "final_entropy_coefficient", "value_clip", "target_kl"]
)
def test_none_switches_off_what_may_be_off(key):
    assert getattr(PPOConfig(**{key: None}), key) is None
    assert getattr(PPOConfig(**{key: 0}), key) == 0.0
