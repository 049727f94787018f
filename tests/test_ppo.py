import contextlib
import copy
import errno
import itertools
import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpu_vecenv
from gpu_vecenv.checkpoint import load_checkpoint
from gpu_vecenv.errors import CapacityError, CheckpointCorruptError, ConfigError, NonFiniteError
from gpu_vecenv.policy import ActorCritic, log_probs_and_entropies
from gpu_vecenv.ppo import LOSS_NAMES, Batch, PPOConfig, Rollout, Trainer, advantages, fitting_num_envs, loss

# Runners leave one by one, so that some agents are inactive in running episodes; two action heads.
LEAVING = {"num_taggers": 3, "num_runners": 4, "side": 3.0, "tagging_distance": 0.2, "max_steps": 13}
LEAVING |= {"num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}
# Taggers in the middle of 21 x 21 cells, the runner in the corner: in 11 ticks nobody can be caught by walking.
TOO_FAR = {"max_steps": 11}
ROW_UP = 3  # action "row + 1" of tag_gridworld
SMALL = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=4, hidden_sizes=(16,))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over rows then always have the same order
    yield
    torch.set_num_threads(before)


def leaving(device, num_envs=6, **arguments):
    arguments = {"autoreset_mode": "next_step", **arguments}
    return gpu_vecenv.make("tag_continuous", num_envs, device, **arguments, **LEAVING)


def too_far(device, num_envs=8):
    return gpu_vecenv.make("tag_gridworld", num_envs, device, autoreset_mode="next_step", **TOO_FAR)


def changed(config, **values):
    return PPOConfig(**{**vars(config), **values})


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}


def equal_bits(one, other):
    return one.keys() == other.keys() and all(one[name].cpu().equal(other[name].cpu()) for name in one)


# Advantages


def advantages_by_definition(rewards, values, terminations, truncations, active, gamma, gae_lambda):
    """Sum over k of (gamma lambda)^k delta(t + k), up to where the episode ends or the agent is out of the game.

    The second result is the same sum of absolute values, for rounding bounds.
    """
    ticks = len(rewards)
    estimates, sizes = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for t in range(ticks):
        alive = np.ones(rewards.shape[1:], bool)
        for s in range(t, ticks):
            alive &= active[s]
            parts = rewards[s], np.where(terminations[s], 0, gamma * values[s + 1]), -values[s]
            estimates[t] += np.where(alive, (gamma * gae_lambda) ** (s - t) * sum(parts), 0)
            sizes[t] += np.where(alive, (gamma * gae_lambda) ** (s - t) * sum(map(np.abs, parts)), 0)
            alive &= ~(terminations[s] | truncations[s])
    return estimates, sizes


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.7), (0.5, 1.0)])
@pytest.mark.parametrize("kinds", ["continue terminate truncate", "continue terminate truncate both inactive"])
def test_advantages_equal_their_definition_for_every_pattern_of_six_ticks(kinds, gamma, gae_lambda, device):
    patterns = np.array(list(itertools.product(kinds.split(), repeat=6))).T  # (6, columns)
    generator = np.random.default_rng(3)
    rewards = generator.normal(size=patterns.shape).astype(np.float32)
    values = generator.normal(size=(7, patterns.shape[1])).astype(np.float32)
    flags = [np.isin(patterns, [kind, "both"]) for kind in ("terminate", "truncate")] + [patterns != "inactive"]
    exact = [x.astype(np.float64) for x in (rewards, values)]
    expected, sizes = advantages_by_definition(*exact, *flags, gamma, gae_lambda)
    given = [torch.tensor(x, device=device) for x in (rewards, values, *flags)]
    found = advantages(*given, gamma, gae_lambda).cpu().numpy()
    # Each of at most 6 summands meets at most 6 roundings a tick; a rounding is half an epsilon of the summands.
    assert (np.abs(found - expected) <= 36 * np.finfo(np.float32).eps / 2 * sizes).all()
    assert (found[~flags[2]] == 0).all()


def test_a_truncated_constant_reward_is_worth_its_discounted_sum(device):
    """With true values 1 / (1 - gamma) there is nothing left to gain, wherever the episode is cut off."""
    truncations = torch.zeros((20, 1), dtype=torch.bool, device=device)
    truncations[7::8] = True
    none, ones = torch.zeros_like(truncations), torch.ones((20, 1), dtype=torch.float64, device=device)
    values = torch.full((21, 1), 4.0, dtype=torch.float64, device=device)
    assert advantages(ones, values, none, truncations, ~none, 0.75, 0.9).eq(0).all()
    assert advantages(ones, values, truncations, none, ~none, 0.75, 0.9)[7] == 1 - 4


# Rollout


def test_a_rollout_holds_what_a_twin_environment_gives_for_its_actions(device):
    trainer, twin = Trainer(leaving(device), SMALL, seed=5), leaving(device)
    obs, info = twin.reset(seed=5)
    resets = left = 0
    for _ in range(4):
        acting = copy.deepcopy(trainer.policy)
        trainer.train_iteration()
        data = trainer.rollout
        for t in range(SMALL.num_steps):
            assert data.obs[t].equal(obs) and data.active[t].equal(info["active"])
            with torch.no_grad():
                logits, values = acting(obs)
                found = log_probs_and_entropies(
                    logits.flatten(0, 1), data.actions[t].flatten(0, 1), twin.game.action.head_sizes
                )
            assert data.values[t].equal(values)
            for stored, again in zip((data.log_probs[t], data.entropies[t]), found, strict=True):
                # Two heads, each a float32 logarithm of a sum, of magnitude 2 to 4: 4 half-ulps on either side.
                torch.testing.assert_close(stored.flatten(), again, rtol=0, atol=8 * 2.0**-22)
            over = ~info["active"].any(1)
            resets += int(over.sum())
            left += int((~info["active"] & info["active"].any(1, keepdim=True)).sum())
            obs, rewards, terminations, truncations, info = twin.step(data.actions[t])
            assert data.rewards[t].equal(rewards)
            assert data.terminations[t].equal(terminations) and data.truncations[t].equal(truncations)
            assert not data.active[t][over].any()  # the tick that resets teaches nothing
        with torch.no_grad():
            assert data.values[-1].equal(acting(obs)[1])
        assert data.obs[-1].equal(obs) and data.active[-1].equal(info["active"])
    assert resets > 0 and left > 0
    assert trainer.env.faults().eq(0).all()


def test_the_figures_of_an_iteration_are_those_of_its_episodes(device):
    trainer = Trainer(leaving(device, 5), SMALL, seed=2)
    returns, lengths = torch.zeros(5, 7, dtype=torch.float64, device=device), torch.zeros(5, device=device)
    seen = 0
    for iteration in range(6):
        figures, data = trainer.train_iteration(), trainer.rollout
        ended = []
        for t in range(SMALL.num_steps):
            returns += data.rewards[t] * data.active[t]
            lengths += data.active[t].any(1)
            for replica in (data.active[t].any(1) & ~data.active[t + 1].any(1)).nonzero().flatten():
                terminated = float(not data.truncations[t][replica].any())  # by its last tick
                split = returns[replica, :3].mean().item(), returns[replica, 3:].mean().item()
                ended.append((lengths[replica].item(), terminated, *split))
                returns[replica] = lengths[replica] = 0
        seen += len(ended)
        names = ("episode_length", "terminated_share", "return_tagger", "return_runner")
        assert figures["episodes"] == len(ended) and figures["iteration"] == iteration + 1
        assert figures["env_steps"] == (iteration + 1) * 8 * 5
        # Rewards are whole numbers, so float32 sums are exact; a mean over 3 or 4 agents is rounded once or twice.
        expected = dict(zip(names, np.mean(ended, axis=0) if ended else [0] * 4, strict=True))
        assert {name: figures[name] for name in names} == pytest.approx(expected, rel=1e-6)
    assert seen > 10


class Recorder(nn.Module):
    """A user's own policy; remembers the observations of every call with gradients."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.linear, self.seen = nn.Linear(obs_size, num_logits + 1), []

    def forward(self, obs):
        if torch.is_grad_enabled():
            self.seen.append(obs.clone())
        out = self.linear(obs)
        return out[..., :-1].contiguous(), out[..., -1]


def test_every_row_is_visited_exactly_once_an_epoch_in_another_order(device):
    env = leaving(device, 6, autoreset_mode="same_step")
    policy = Recorder(env.game.obs_size, env.game.action.num_logits)
    trainer = Trainer(env, changed(SMALL, num_epochs=3, num_minibatches=4), policy=policy, seed=1)
    trainer.train_iteration()
    assert [len(rows) for rows in policy.seen] == [8 * 6 * 7 // 4] * 12
    collected = trainer.rollout.obs[:-1].flatten(0, 2).tolist()
    epochs = [torch.cat(policy.seen[start : start + 4]).tolist() for start in (0, 4, 8)]
    active = trainer.rollout.active[:-1].flatten().tolist()
    told_apart = {tuple(row) for row, kept in zip(collected, active, strict=True) if kept}
    assert len(told_apart) == sum(active) > len(collected) / 2
    assert all(sorted(epoch) == sorted(collected) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_an_update_is_that_of_a_textbook_on_the_active_rows_alone(device):
    """One minibatch, so that the order of rows does not matter; the loss as in the papers, on selected rows."""
    config = changed(SMALL, num_epochs=4, num_minibatches=1, learning_rate=0.03, clip=0.1, anneal=False)
    trainer = Trainer(leaving(device), config, seed=3)
    trainer.train_iteration()
    policy = copy.deepcopy(trainer.policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03, eps=1e-5)
    optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    figures, data = trainer.train_iteration(), trainer.rollout
    kept = data.active[:-1]
    assert 0 < int((~kept).sum()) < kept.numel() / 2
    exact = [x.double().cpu().numpy() for x in (data.rewards, data.values)]
    flags = [x.cpu().numpy() for x in (data.terminations, data.truncations, kept)]
    estimates, _ = advantages_by_definition(*exact, *flags, config.gamma, config.gae_lambda)
    gains = torch.tensor(estimates, dtype=torch.float32, device=device)[kept]
    targets = gains + data.values[:-1][kept]
    scaled = (gains - gains.mean()) / gains.std(correction=0)
    sums = torch.zeros(6, device=device)
    for _ in range(4):
        logits, values = policy(data.obs[:-1][kept])
        heads = [torch.distributions.Categorical(logits=part) for part in logits.split([4, 5], -1)]
        log_probs = sum(head.log_prob(data.actions[kept][:, k]) for k, head in enumerate(heads))
        entropy = sum(head.entropy() for head in heads).mean()
        ratio = (log_probs - data.log_probs[kept]).exp()
        objective = torch.min(ratio * scaled, ratio.clamp(0.9, 1.1) * scaled).mean()
        value_loss = (values - targets).square().mean() / 2
        optimizer.zero_grad()
        (-objective + 0.5 * value_loss - 0.01 * entropy).backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        outside = ((ratio - 1).abs() > 0.1).float().mean()
        kl = ((ratio - 1) - ratio.log()).mean()
        sums += torch.stack([-objective, value_loss, entropy, kl, outside, norm]).detach()
    assert sums[4] > 0.2  # the clip mattered
    found = torch.tensor([figures[name] for name in LOSS_NAMES])
    # The same sums in another order, carried through 4 steps of Adam: measured 1e-6, a wrong row or sign gives 1e-2.
    torch.testing.assert_close(found, (sums / 4).cpu(), rtol=1e-4, atol=1e-5)
    for own, expected in zip(trainer.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_the_first_minibatch_has_ratio_one(device):
    """With a learning rate of 0 every minibatch is the first."""
    trainer = Trainer(leaving(device), changed(SMALL, learning_rate=0.0), seed=4)
    before = weights(trainer)
    figures = trainer.train_iteration()
    # Log-probabilities by two implementations differ by at most 2e-6 (above); the estimate is half the square.
    assert abs(figures["approximate_kl"]) < 1e-6 and figures["clip_share"] == 0
    assert equal_bits(weights(trainer), before)


# Loss


def random_batch(rows, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, 15, generator=generator)
    actions = torch.randint(4, (rows, 2), generator=generator, dtype=torch.int32)
    numbers = torch.randn(3, rows, generator=generator)
    active = torch.rand(rows, generator=generator) < 0.6
    return Batch(*(x.to(device) for x in (obs, actions, numbers[0] - 3, numbers[1], numbers[2], active)))


def gradients(policy, batch):
    policy.zero_grad()
    total, parts = loss(policy, batch, (4, 5), PPOConfig())
    total.backward()
    return {"total": total.detach(), "parts": parts} | {
        name: tensor.grad.clone() for name, tensor in policy.named_parameters()
    }


@pytest.mark.parametrize("what", Batch._fields[: Batch._fields.index("active")])
def test_an_inactive_row_changes_neither_loss_nor_gradient(what, device):
    torch.manual_seed(0)
    policy, batch = ActorCritic((15,), 9, (8,)).to(device), random_batch(64, device)
    other = getattr(random_batch(64, device, seed=1), what)
    given = getattr(batch, what)
    inactive = (~batch.active).view(-1, *[1] * (given.ndim - 1))
    altered = batch._replace(**{what: torch.where(inactive, other, given)})
    assert not getattr(altered, what).equal(given)
    assert equal_bits(gradients(policy, altered), gradients(policy, batch))
    everywhere = batch._replace(**{what: torch.where(inactive, given, other)})  # an active row does matter
    assert not equal_bits(gradients(policy, everywhere), gradients(policy, batch))


def test_a_minibatch_without_an_active_row_moves_nothing(device):
    policy, batch = ActorCritic((15,), 9, (8,)).to(device), random_batch(16, device)
    found = gradients(policy, batch._replace(active=torch.zeros_like(batch.active)))
    assert all(tensor.eq(0).all() for tensor in found.values())


# Configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["total_steps", "num_steps", "num_epochs", "num_minibatches"], [0, -1]),
        *itertools.product(["gamma", "gae_lambda"], [-0.1, 1.1, float("nan"), float("inf")]),
        *itertools.product(["learning_rate", "clip", "value_coefficient"], [-1e-9, float("nan"), float("inf")]),
        *itertools.product(["entropy_coefficient", "max_grad_norm"], [-1e-9, float("nan"), float("inf")]),
        *itertools.product(["hidden_sizes[0]"], [0, -1, 2.5, True]),
        *[("num_steps", 2.5), ("num_steps", "8"), ("num_minibatches", True), ("gamma", "high")],
        *[("gamma", None), ("hidden_sizes", 64), ("anneal", "no")],
    ],
)
def test_a_bad_value_of_the_configuration_is_named(key, value):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**({"hidden_sizes": (value, 8)} if key == "hidden_sizes[0]" else {key: value}))
    assert key in str(caught.value) and str(value).strip("(),").split(", ")[-1] in str(caught.value)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_ends_of_a_range_belong_to_it(value):
    assert PPOConfig(gamma=value, gae_lambda=value).gamma == value


def test_minibatches_that_do_not_divide_are_refused_with_the_numbers(device):
    with pytest.raises(ConfigError, match=r"num_minibatches is 9; .* = 8 x 6 x 7 = 336$"):
        Trainer(leaving(device), changed(SMALL, num_minibatches=9))


def test_a_rollout_too_large_for_memory_is_refused_with_bytes_and_a_size_that_fits(device):
    env, steps = leaving(device), 10**8
    with pytest.raises(CapacityError) as caught:
        Trainer(env, changed(SMALL, num_steps=steps))
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", str(caught.value))]
    each = Rollout.bytes_per_env(env, steps)
    assert numbers[:3] == [steps, 6, 6 * each] and numbers[-1] == numbers[3] // each < 6


def test_the_memory_estimate_covers_what_a_rollout_allocates(device):
    env = leaving(device, 64)
    rollout = Rollout(env, 8)
    tensors = [x for x in vars(rollout).values() if isinstance(x, torch.Tensor)]
    tensors += [slab.final_mask for slab in rollout.slabs]
    assert sum(tensor.nbytes for tensor in tensors) <= 64 * Rollout.bytes_per_env(env, 8)


def test_the_automatic_size_is_what_was_asked_for_or_what_fits(device):
    def make(num_envs):
        return leaving(device, num_envs)

    assert fitting_num_envs(make, 8, 10) == 10
    most = fitting_num_envs(make, 8, 10**12)
    env = make(1)
    assert 10 < most < 10**12
    assert (
        most * (env.bytes_per_env() + Rollout.bytes_per_env(env, 8))
        < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        or torch.device(device).type == "cuda"
    )
    with pytest.raises(CapacityError, match=r"one replica needs about [\d,]+ bytes; [\d,]+ are free"):
        fitting_num_envs(make, 10**12, 10)


# Training


def test_an_environment_of_another_autoreset_mode_serves_as_a_pattern(device):
    given = leaving(device, autoreset_mode="same_step")
    trainer, expected = (Trainer(env, SMALL, seed=7) for env in (given, leaving(device)))
    assert trainer.env.autoreset_mode == "next_step" and trainer.env is not given and given.seed is None
    trainer.train_iteration(), expected.train_iteration()
    assert equal_bits(weights(trainer), weights(expected))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(device):
    def trained(seed):
        trainer = Trainer(leaving(device), SMALL, seed=seed)
        start = weights(trainer)
        for _ in range(3):
            trainer.train_iteration()
        return start, weights(trainer)

    (start, end), (again, end_again), (other, end_other) = trained(11), trained(11), trained(12)
    assert equal_bits(start, again) and equal_bits(end, end_again)
    assert not equal_bits(start, end) and not equal_bits(start, other) and not equal_bits(end, end_other)


def test_global_state_of_torch_numpy_and_random_is_left_alone(device, tmp_path):
    def state():
        generators = [random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]
        if device == "cuda":
            generators.append(torch.cuda.get_rng_state().tolist())
        switches = [torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]
        switches += [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]
        return generators + switches

    before = state()
    trainer = Trainer(leaving(device), SMALL, seed=1)
    assert state() == before
    trainer.train_iteration()
    trainer.evaluate(5)
    trainer.load(trainer.save(tmp_path / "policy"))
    assert state() == before


def test_training_runs_all_iterations_and_tells_of_each(device):
    told = []
    config = changed(SMALL, total_steps=8 * 6 * 3 + 1, learning_rate=0.4)
    trainer = Trainer(leaving(device), config, on_iteration=told.append)
    last = trainer.train()
    assert trainer.num_iterations == 4 and told[-1] == last
    assert [figures["iteration"] for figures in told] == [1, 2, 3, 4]
    assert [figures["env_steps"] for figures in told] == [48, 96, 144, 192]
    assert [figures["learning_rate"] for figures in told] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert all(figures["agent_steps_per_s"] > 0 for figures in told)
    assert trainer.train() == {} and len(told) == 4
    constant = Trainer(leaving(device), changed(config, anneal=False), on_iteration=told.append)
    constant.train()
    assert [figures["learning_rate"] for figures in told[4:]] == [0.4] * 4


@pytest.mark.parametrize("part", ["critic", "actor"])
def test_a_loss_that_is_not_finite_stops_training(part, device):
    trainer = Trainer(leaving(device), SMALL)
    getattr(trainer.policy, part).bias.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"iteration 1: .*nan"):
        trainer.train()


def test_a_loss_that_is_not_finite_updates_nothing(device):
    trainer = Trainer(leaving(device), SMALL)
    trainer.policy.critic.bias.data.fill_(float("nan"))
    before = weights(trainer)
    with pytest.raises(NonFiniteError):
        trainer.train_iteration()
    after = weights(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before if name != "critic.bias")


def test_a_policy_of_the_users_own_is_trained_evaluated_and_saved(device, tmp_path):
    env = leaving(device)
    policy = Recorder(env.game.obs_size, env.game.action.num_logits)
    trainer = Trainer(env, SMALL, policy=policy)
    assert trainer.policy is policy
    before = weights(trainer)
    trainer.train_iteration()
    assert not equal_bits(weights(trainer), before)
    assert trainer.evaluate(6)["episodes"] == 6
    kept = weights(trainer)
    trainer.save(tmp_path / "own")
    trainer.train_iteration()
    trainer.load(tmp_path / "own")
    assert equal_bits(weights(trainer), kept)


def test_training_raises_the_share_of_caught_runners(device):
    """Two taggers on 7 x 7 cells catch a random runner in a third of the episodes; trained ones in many more."""
    env = gpu_vecenv.make("tag_gridworld", 256, device, num_taggers=2, grid=6, max_steps=20)
    config = PPOConfig(total_steps=160_000, num_steps=16, learning_rate=3e-3, hidden_sizes=(32, 32))
    trainer = Trainer(env, config, seed=0)
    at_random = trainer.evaluate(1000, random_roles=["tagger", "runner"])
    trainer.train()
    trained = trainer.evaluate(1000, random_roles=["runner"])
    # A share of 1,000 episodes has a standard error of at most 1.6 points; the gain measured with 3 seeds is over 25.
    assert trained["terminated_share"] > at_random["terminated_share"] + 0.2
    assert trained["return_tagger"] > at_random["return_tagger"] + 2
    assert trained["return_runner"] < at_random["return_runner"]


# Evaluation


def test_evaluation_does_not_change_what_training_does(device):
    evaluated, twin = (Trainer(leaving(device), SMALL, seed=9) for _ in range(2))
    for _ in range(2):
        evaluated.evaluate(7)
        evaluated.evaluate(3, random_roles=["runner"], greedy=True)
        figures, expected = evaluated.train_iteration(), twin.train_iteration()
        for name in figures.keys() - {"agent_steps_per_s"}:
            assert figures[name] == expected[name], name
    assert equal_bits(weights(evaluated), weights(twin))
    assert equal_bits(evaluated.env.state_dict(), twin.env.state_dict())


@pytest.mark.parametrize("episodes", [1, 7, 8, 9, 37])
def test_evaluation_counts_exactly_the_episodes_asked_for(episodes, device):
    """All episodes last 11 ticks: any other mean would come of one counted twice or left out."""
    found = Trainer(too_far(device), SMALL).evaluate(episodes)
    assert (found["episodes"], found["episode_length"], found["terminated_share"]) == (episodes, 11.0, 0.0)


def test_evaluation_plays_the_episodes_that_a_loop_by_hand_plays(device):
    trainer = Trainer(leaving(device, 6), SMALL, seed=3)
    found = trainer.evaluate(6, seed=21)
    env = leaving(device, 6, autoreset_mode="disabled")
    sampler, returns = gpu_vecenv.Sampler(env), torch.zeros(6, 7, dtype=torch.float64, device=device)
    lengths, terminated = torch.zeros(6, device=device), torch.zeros(6, dtype=torch.bool, device=device)
    obs, _ = env.reset(seed=21)
    while env.active.any():
        lengths += env.active.any(1)
        with torch.no_grad():
            actions = sampler.sample(trainer.policy(obs)[0]).actions
        running = env.active.any(1)
        obs, rewards, _, truncations, info = env.step(actions)
        returns += rewards
        terminated |= running & ~info["active"].any(1) & ~truncations.any(1)
    # Rewards are whole numbers; only the means over agents and episodes are rounded.
    assert found == pytest.approx(
        {
            "episodes": 6,
            "episode_length": lengths.mean().item(),
            "terminated_share": terminated.double().mean().item(),
            "return_tagger": returns[:, :3].mean().item(),
            "return_runner": returns[:, 3:].mean().item(),
        },
        rel=1e-6,
    )


class Walker(nn.Module):
    """Always the same action."""

    def __init__(self, action):
        super().__init__()
        self.logits = nn.Parameter(100.0 * nn.functional.one_hot(torch.tensor(action), 5))

    def forward(self, obs):
        return self.logits.expand(*obs.shape[:-1], 5), obs[..., 0] * 0


def test_random_roles_act_at_random_and_the_others_by_the_policy(device):
    """Row + 1 eleven times: a tagger walks into the wall once, at the last tick; the runner never does."""
    trainer = Trainer(too_far(device), SMALL, policy=Walker(ROW_UP))
    tagger, runner = -0.11 - 0.1, 0.11
    results = {
        random_roles: trainer.evaluate(40, random_roles=random_roles)
        for random_roles in [(), ("tagger",), ("runner",), ("tagger", "runner")]
    }
    for random_roles, found in results.items():
        # float32 sums of 11 rewards
        assert (found["return_tagger"] == pytest.approx(tagger, abs=1e-6)) == ("tagger" not in random_roles)
        assert (found["return_runner"] == pytest.approx(runner, abs=1e-6)) == ("runner" not in random_roles)
        assert found["terminated_share"] == 0


def test_an_evaluation_with_all_roles_at_random_does_not_depend_on_the_policy(device):
    one, other = (Trainer(leaving(device), SMALL, seed=seed) for seed in (0, 1))
    other.policy.actor.weight.data *= 1000  # two policies that act differently nearly always
    roles = ["tagger", "runner"]
    assert one.evaluate(20, random_roles=roles) == other.evaluate(20, random_roles=roles)
    assert one.evaluate(20) != other.evaluate(20)


def test_greedy_evaluation_is_deterministic_and_sampling_follows_its_seed(device):
    trainer = Trainer(too_far(device), SMALL)
    greedy = trainer.evaluate(20, greedy=True)
    assert greedy == trainer.evaluate(20, greedy=True)
    # All start from the same cells, so that without chance all episodes are one and the same (sums in one order).
    assert trainer.evaluate(1, greedy=True, seed=99) == pytest.approx({**greedy, "episodes": 1})
    sampled = trainer.evaluate(20)
    assert sampled == trainer.evaluate(20) != trainer.evaluate(20, seed=2)
    assert sampled != greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"random_roles": ["tagger", "hunter"]}, r"\['hunter'\]; the roles are \['tagger', 'runner'\]"),
        ({"episodes": 0}, "episodes is 0; at least 1"),
        ({"episodes": -3}, "episodes is -3; at least 1"),
    ],
)
def test_a_bad_evaluation_is_refused(arguments, message, device):
    with pytest.raises(ConfigError, match=message):
        Trainer(leaving(device), SMALL).evaluate(**arguments)


# Checkpoints


@pytest.fixture
def trainer():
    made = Trainer(leaving("cpu"), SMALL, seed=6)
    made.train_iteration()
    return made


def refused(trainer, path, *errors):
    """Load a file that has to be refused, and see that nothing has changed."""
    before = weights(trainer)
    with pytest.raises(errors) as caught:
        trainer.load(path)
    assert equal_bits(weights(trainer), before)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_gives_back_weights_and_manifest(trainer, tmp_path):
    path = tmp_path / "new" / "policy.safetensors"
    assert trainer.save(path) == path
    assert trainer.save(str(path)) == path and os.listdir(path.parent) == [path.name]
    other = Trainer(leaving("cpu"), SMALL, seed=7)
    manifest = other.load(str(path))
    assert equal_bits(weights(other), weights(trainer))
    assert other.evaluate(10) == trainer.evaluate(10)
    assert manifest["game"] == "tag_continuous" and manifest["seed"] == 6 and manifest["iteration"] == 1
    assert manifest["num_envs"] == 6 and manifest["gpu_vecenv"] == gpu_vecenv.__version__
    assert manifest["game_config"].items() >= LEAVING.items()
    assert PPOConfig(**{**manifest["ppo_config"], "hidden_sizes": (16,)}) == SMALL


def test_a_checkpoint_of_another_game_is_refused(trainer, tmp_path):
    path = Trainer(too_far("cpu"), SMALL).save(tmp_path / "grid")
    assert "'tag_gridworld'; expected 'tag_continuous'" in refused(trainer, path, ConfigError)


def test_a_checkpoint_of_another_shape_is_refused(trainer, tmp_path):
    path = Trainer(leaving("cpu"), changed(SMALL, hidden_sizes=(17,))).save(tmp_path / "wider")
    message = refused(trainer, path, ConfigError)
    assert "(17, 15)" in message and "(16, 15)" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_checkpoint_with_weights_that_are_not_finite_is_refused(value, trainer, tmp_path):
    broken = Trainer(leaving("cpu"), SMALL)
    broken.policy.actor.weight.data[1, 2] = value
    refused(trainer, broken.save(tmp_path / "broken"), CheckpointCorruptError)


def test_a_truncated_checkpoint_is_refused(trainer, tmp_path):
    content = trainer.save(tmp_path / "policy").read_bytes()
    path = tmp_path / "short"
    header = 8 + int.from_bytes(content[:8], "little")
    for size in {0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:size])
        refused(trainer, path, CheckpointCorruptError)
    path.write_bytes(content + b"\0")
    refused(trainer, path, CheckpointCorruptError)


def test_a_flipped_bit_of_the_header_is_refused_or_harmless(trainer, tmp_path):
    """Harmless: a digit of the manifest. The weights that are loaded are never others."""
    content, path = trainer.save(tmp_path / "policy").read_bytes(), tmp_path / "flipped"
    header, before, found = 8 + int.from_bytes(content[:8], "little"), weights(trainer), dict[str, int]()
    bits = [*range(64), *(8 * place + place % 7 for place in range(8, header, 2))]
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            trainer.load(path)
            outcome = "loaded"
        except (CheckpointCorruptError, ConfigError) as error:
            outcome = type(error).__name__
        except Exception as error:
            raise AssertionError(f"bit {bit}, in {bytes(content[max(bit // 8 - 20, 0) : bit // 8 + 20])}") from error
        found[outcome] = found.get(outcome, 0) + 1
        assert equal_bits(weights(trainer), before), f"bit {bit}: {outcome}"
    assert found["CheckpointCorruptError"] >= 64


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"format": "1"},
        {"format": "2", "manifest": "{}"},
        {"format": "1", "manifest": "{"},
        {"format": "1", "manifest": "[1]"},
        {"format": "1", "manifest": "null"},
    ],
)
def test_a_foreign_safetensors_file_is_refused(metadata, trainer, tmp_path):
    path = tmp_path / "foreign"
    save_file(load_file(trainer.save(tmp_path / "policy")), path, metadata)
    refused(trainer, path, CheckpointCorruptError)


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_is_refused_unread(trainer, tmp_path):
    plain, by_torch, sprung = tmp_path / "policy.pkl", tmp_path / "policy.pt", tmp_path / "sprung"
    plain.write_bytes(pickle.dumps(Trap(sprung)))
    torch.save({**trainer.policy.state_dict(), "trap": Trap(sprung)}, by_torch)
    for path in (plain, by_torch):
        refused(trainer, path, CheckpointCorruptError)
    assert not sprung.exists()
    pickle.loads(plain.read_bytes())
    assert sprung.is_dir()  # the trap was live


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_missing_file_or_a_folder_is_no_checkpoint(name, trainer, tmp_path):
    refused(trainer, tmp_path / name, FileNotFoundError)


@contextlib.contextmanager
def read_only(folder):
    """Root may write everywhere, so it becomes another user for that time."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@contextlib.contextmanager
def full_disk():
    """Files may not grow beyond 1 KiB: a write fails in its middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("failure", ["read-only folder", "full disk"])
def test_a_failed_save_leaves_the_former_file(failure, trainer):
    with tempfile.TemporaryDirectory() as name:  # tmp_path lies below a folder that other users cannot enter
        folder = Path(name)
        folder.chmod(0o755)
        path = trainer.save(folder / "policy")
        before = path.read_bytes()
        trainer.train_iteration()
        refusal = read_only(folder) if failure == "read-only folder" else full_disk()
        with refusal, pytest.raises(OSError) as caught:
            trainer.save(path)
        assert caught.value.errno in (errno.EACCES, errno.EFBIG)
        assert path.read_bytes() == before and os.listdir(folder) == ["policy"]
        trainer.save(path)
        assert path.read_bytes() != before


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from gpu_vecenv.checkpoint import load_checkpoint, save_checkpoint
torch.set_num_threads(1)
path, size = Path(sys.argv[1]), 1_000_000

def save(version):
    save_checkpoint(path, {"a": torch.full((size,), float(version)), "b": torch.arange(9) + version}, {"v": version})

save(0)
start = time.perf_counter()
save(0)
duration = time.perf_counter() - start
seen = kill = 0
while kill < 20 or (seen < 3 and kill < 200):  # at least 3 in the middle of a save, which leave a draft
    begun, begin = os.pipe()
    child = os.fork()
    if child == 0:
        for version in range(1, 10**9):
            os.write(begin, b"!")
            save(version)
    for _ in range(3):
        assert os.read(begun, 1) == b"!"
    start = time.perf_counter()
    while time.perf_counter() < start + duration * (1 + kill % 20 / 3):  # another moment of some save each time
        pass
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    tensors, manifest = load_checkpoint(path)
    version = manifest["v"]
    assert tensors["a"].shape == (size,) and tensors["a"].eq(version).all(), version
    assert tensors["b"].equal(torch.arange(9) + version), version
    drafts = [name for name in os.listdir(path.parent) if name != path.name]
    for name in drafts:
        (path.parent / name).unlink()
    os.close(begun), os.close(begin)
    seen, kill = seen + len(drafts), kill + 1
print(kill, seen)
"""


def test_a_kill_while_saving_leaves_a_whole_file():
    package = Path(gpu_vecenv.__file__).parents[1]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # no waiting for a disk: kills then hit all of a save
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        child = subprocess.run(
            [sys.executable, "-c", KILLED, f"{folder}/policy"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(package)},
        )
        assert child.returncode == 0, child.stderr
        kills, seen = map(int, child.stdout.split())
        assert kills >= 20 and seen >= 3
        tensors, manifest = load_checkpoint(Path(folder, "policy"))
        assert float(tensors["a"][0]) == manifest["v"]


def test_a_checkpoint_is_plain_data(trainer, tmp_path):
    """Header and manifest are JSON that any reader understands."""
    content = trainer.save(tmp_path / "policy").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header.pop("__metadata__")["manifest"])["game"] == "tag_continuous"
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in trainer.policy.state_dict().items()
    }


class Masking(torch.nn.Module):
    """Never chooses the last action."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(obs_size, num_logits), torch.nn.Linear(obs_size, 1)

    def forward(self, obs):
        logits = self.actor(obs)
        excluded = torch.arange(logits.shape[-1], device=obs.device) == logits.shape[-1] - 1
        return logits.masked_fill(excluded, float("-inf")), self.critic(obs).squeeze(-1)


def test_a_policy_may_exclude_choices(device):
    env = gpu_vecenv.make("tag_gridworld", 16, device, grid=4)
    trainer = Trainer(env, PPOConfig(total_steps=1, num_steps=8), policy=Masking(env.game.obs_size, 5))
    assert trainer.train()["entropy"] > 0
    assert int(trainer.rollout.actions.max()) == 3


def test_an_evaluation_with_nan_logits_ends(device):
    env = gpu_vecenv.make("tag_gridworld", 16, device, grid=4)
    trainer = Trainer(env, PPOConfig(total_steps=1, num_steps=8))
    with torch.no_grad():
        trainer.policy.actor.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="logits"):
        trainer.evaluate(10)


class Cliff(torch.nn.Module):
    """Its value is finite, its gradient is not."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(obs_size, num_logits), torch.nn.Linear(obs_size, 1)

    def forward(self, obs):
        value = self.critic(obs).squeeze(-1)
        return self.actor(obs), value + torch.sqrt((value * 0).abs())


def test_a_gradient_that_is_not_finite_stops_training_and_changes_nothing(device):
    env = gpu_vecenv.make("tag_gridworld", 16, device, grid=4)
    config = PPOConfig(total_steps=1, num_steps=8, num_epochs=1, num_minibatches=1)
    trainer = Trainer(env, config, policy=Cliff(env.game.obs_size, 5))
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    with pytest.raises(NonFiniteError, match="gradient_norm"):
        trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.policy.state_dict().items())
