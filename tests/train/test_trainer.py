"""Training: rollouts, the policies of roles, metrics, repetition, going on from a checkpoint, and what is refused."""

import copy
import dataclasses
import gc
import json
import pickle
import random
import re
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.probes import Target
from safetensors.torch import load_file, save_file
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend
from torch import nn

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.envs.registry import GAMES, Game, load_game
from gpu_vecenv.errors import CapacityError, CheckpointCorruptError, ClosedEnvError, ConfigError, NonFiniteError
from gpu_vecenv.train.distributions import masked, squashed
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.policy_specs import RUN_WIDE_KEYS, PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.ppo_learner import LOSS_METRICS
from gpu_vecenv.train.staggered_starts import stagger, staggered_steps
from gpu_vecenv.train.trainer import Trainer

# Runners leave one by one, so that some agents are inactive in running episodes; two action heads.
LEAVING = {"num_taggers": 3, "num_runners": 4, "side": 3.0, "tagging_distance": 0.2, "max_steps": 13}
LEAVING |= {"num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}
SMALL = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=4, hidden_sizes=(16,))
BOTH = {"normalize_obs": True, "normalize_returns": True}
STAGES = ("policy", "sampling", "env")  # of a rollout of several launches a step
TIMES = {"agent_steps_per_s", *(f"{part}_time_fraction" for part in ("rollout", *STAGES, "update"))}
POISONED = 1  # a seed by which one environment is ill, and not in the first minibatches
FROZEN = {"tagger": PolicySpec(), "runner": PolicySpec(train=False)}


@dataclass(frozen=True)
class Setup:
    """A game, and what is to be trained on it."""

    game: Game
    arguments: Mapping = field(default_factory=dict)
    config: PPOConfig = SMALL
    policies: Mapping | None = None

    def env(self, device, num_envs=8, **arguments):
        return gpu_vecenv.make(
            self.game, num_envs, device, **{"autoreset_mode": "next_step", **arguments}, **self.arguments
        )

    def trainer(self, device, num_envs=8, *, seed=5, **arguments):
        return Trainer(
            self.env(device, num_envs), self.config, **{"seed": seed, "policies": self.policies, **arguments}
        )


def changed(config=SMALL, **values):
    return dataclasses.replace(config, **values)


SETUPS = {
    "roles": Setup("tag_continuous", LEAVING),
    "shared": Setup("tag_continuous", LEAVING, policies={"tagger+runner": PolicySpec()}),
    "frozen": Setup("tag_continuous", LEAVING, policies=FROZEN),
    "cells": Setup("tag_gridworld", {"grid": 4, "max_steps": 11}),
    "masks": Setup(Crew),
    "mixed": Setup(Economy, {}, changed(**BOTH, squash="tanh")),
    "particles": Setup("simple_adversary", {"max_steps": 9}),
    "clip": Setup("pendulum", {"max_steps": 13}, changed(**BOTH, activation="relu", shared_trunk=False)),
    "tanh": Setup("pendulum", {"max_steps": 13}, changed(**BOTH, squash="tanh", value_clip=0.5)),
    "target_kl": Setup(
        "cartpole", {"max_steps": 13}, changed(target_kl=1e-4, learning_rate=0.01, final_clip=0.1, chunk_rows=7)
    ),
    "a2c": Setup("cartpole", {"max_steps": 13}, PPOConfig.a2c(total_steps=10**6, hidden_sizes=(16,))),
    "bfloat16": Setup("tag_continuous", LEAVING, changed(precision="bfloat16", normalize_obs=True)),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=SETUPS)
def setup(request):
    return SETUPS[request.param]


def leaving(device, num_envs=6, **arguments):
    return SETUPS["roles"].env(device, num_envs, **arguments)


def bits(trainer):
    """All that the next iteration depends on, as it is now."""
    return {name: tensor.detach().clone() for name, tensor in trainer.state()[0].items()}


def weights(trainer, role):
    return {name: tensor.detach().clone() for name, tensor in trainer.policies[role].state_dict().items()}


def iterated(trainer, iterations):
    """Their metrics but for times, which nobody can repeat."""
    return [
        {name: value for name, value in trainer.train_iteration().items() if name not in TIMES}
        for _ in range(iterations)
    ]


# Rollout


def acting(trainer):
    """A function of observations and masks: what the policies give as they are now, laid out for the sampler.

    Its values are parameters and values, by the kernels of those networks that have kernels, else by torch.
    """
    data, policies, launches = trainer.rollout, copy.deepcopy(trainer.policies), {}
    for name, policy in policies.items():
        if trainer.torch_reasons[name] is None:
            launches[name] = type(trainer.kernels[name])(policy, data, trainer.config.precision).forward()

    @torch.no_grad()
    def act(obs, mask):
        rows = obs.shape[:2]
        parameters = torch.zeros((*rows, trainer.sampler.num_parameters), device=obs.device)
        values = torch.zeros(rows, device=obs.device)
        for name, policy in policies.items():
            view = policy.view
            own_mask = None if mask is None else view.mask(mask[:, view.agents])
            if launch := launches.get(name):
                flat = obs.flatten(0, 1)[(slice(None), *view.obs_slice)]
                masks = None if own_mask is None else mask.contiguous()
                launch(obs=flat, action_mask=masks, outputs=parameters, values=values)
            else:
                given, values[:, view.agents] = policy(view.obs(obs))
                parameters[:, view.agents][..., view.parameter_columns] = masked(given, own_mask)
        return parameters, values

    return act, policies


def check_rollouts(setup, device):
    """Those of a trainer hold what another environment gives for the same actions, and what the networks give."""
    trainer, twin = setup.trainer(device), setup.env(device)
    sampler = Sampler(twin, squash=setup.config.squash)
    _, info = twin.reset(seed=5)
    stagger(twin)
    obs = twin.observe()
    seen = {"reset": 0, "left": 0}
    steps = setup.config.num_steps
    for _ in range(32 // steps):
        (act, policies), data = acting(trainer), trainer.rollout
        trainer.train_iteration()
        for t in range(steps):
            mask, active = info.get("action_mask"), info["active"]
            assert data.obs[t].equal(obs) and data.active[t].equal(active)
            assert mask is None or data.action_mask[t].equal(mask)
            parameters, values = act(obs, mask)
            drawn = sampler.sample(parameters)
            assert data.values[t].equal(values) and data.log_probs[t].equal(drawn.log_probs)
            assert data.draws[t].equal(drawn.actions if drawn.draws is None else drawn.draws)
            for policy in policies.values():
                own = policy.view
                again, _ = policy.log_probs_and_entropies(
                    parameters[:, own.agents][..., own.parameter_columns].flatten(0, 1),
                    data.draws[t][:, own.agents].reshape(8 * own.num_agents, -1)[:, : own.num_heads],
                    None if mask is None or own.continuous else own.mask(mask[:, own.agents]).flatten(0, 1),
                )
                # Up to three float32 logarithms of sums, of magnitude 2 to 4, by two implementations; with "tanh" a
                # softplus more: 8 half-ulps on either side.
                torch.testing.assert_close(again.view(8, -1), data.log_probs[t][:, own.agents], rtol=0, atol=2.0**-18)
            seen["reset"] += int((~active.any(1)).sum())
            seen["left"] += int((~active & active.any(1, keepdim=True)).sum())
            obs, rewards, terminations, truncations, info = twin.step(drawn.actions)
            assert data.rewards[t].equal(rewards)
            assert data.terminations[t].equal(terminations) and data.truncations[t].equal(truncations)
        assert data.values[-1].equal(act(obs, None)[1])
        assert data.obs[-1].equal(obs) and data.active[-1].equal(info["active"])
        assert "action_mask" not in info or data.action_mask[-1].equal(info["action_mask"])
        # Where an episode has just ended the next step only resets; where an agent has left it does nothing.
        assert data.advantages[~data.active[:-1]].eq(0).all()
        assert data.returns.equal(data.advantages + data.values[:-1])
    assert seen["reset"] > 0 and (seen["left"] > 0) == (setup.game in ("tag_continuous", Crew, Economy))
    assert trainer.env.faults().eq(0).all()


def test_a_rollout_holds_what_a_twin_environment_gives_for_its_actions(setup, device):
    check_rollouts(setup, device)


@pytest.mark.slow
def test_a_rollout_by_emulated_kernels_holds_it_too(setup, monkeypatch):
    kernel_on(torch.device("cpu"))  # which other tests share, compiled for the host
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    check_rollouts(setup, "cpu")


class Wide(nn.Module):
    """Draws far beyond the Box; makes means and logarithms of deviations from the observation, no weight holds them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 3)
        with torch.no_grad():
            self.linear.bias.copy_(torch.tensor([0.0, 2.0, 0.0]))

    def forward(self, obs):
        out = self.linear(obs)
        return out[..., :2].contiguous(), out[..., 2]


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_draws_are_stored_and_actions_stay_inside_the_box(squash, device):
    game = Target(low=2.0, high=6.0)
    env = gpu_vecenv.make(game, 64, device, autoreset_mode="next_step")
    trainer = Trainer(env, changed(squash=squash), policies={"agent": Wide()}, seed=1)
    before = weights(trainer, "agent")
    metrics = trainer.train_iteration()
    draws, boxed = trainer.rollout.draws, trainer.rollout.samples[-1].actions
    assert draws.abs().max() > 5 and metrics["entropy_agent"] > 2
    assert 2 <= boxed.min() < 2.1 and 5.9 < boxed.max() <= 6
    bounds = torch.tensor([[2.0], [6.0]], device=device)
    # A tanh by two implementations, stretched to half a width of 2 about 4: 4 ulps of 8.
    torch.testing.assert_close(boxed, squashed(draws[-1], bounds, squash), rtol=0, atol=4 * 2.0**-20)
    assert trainer.env.faults().eq(0).all() and not equal_bits(weights(trainer, "agent"), before)
    assert trainer.evaluate(10)["return_agent"] <= 0


def test_the_last_row_of_an_iteration_is_the_first_of_the_next(setup, device):
    trainer = setup.trainer(device)
    data = trainer.rollout
    rows = [tensor for tensor in (data.obs, data.active, data.action_mask) if tensor is not None]
    for _ in range(3):
        last = [tensor[-1].clone() for tensor in rows]
        trainer.train_iteration()
        assert all(tensor[0].equal(before) for tensor, before in zip(rows, last, strict=True))
    assert not data.obs[-1].equal(last[0])


@pytest.mark.parametrize("game", ["tag_continuous", Crew, "cartpole", "pendulum"])
def test_looking_again_gives_the_row_that_the_step_wrote(game, device):
    """At the end of all episodes, in the middle of others, and where agents have left: what a load relies on."""
    arguments = {**LEAVING, "max_steps": 8} if game == "tag_continuous" else {"max_steps": 8}
    trainer, left, ended = Setup(game, arguments).trainer(device), 0, 0
    data = trainer.rollout
    rows = [tensor for tensor in (data.obs, data.active, data.action_mask) if tensor is not None]
    for _ in range(4):
        trainer.train_iteration()
        written = [tensor[-1].clone() for tensor in rows]
        for tensor in rows:
            tensor[-1] = 1
        data.refresh_last_step()
        assert all(tensor[-1].equal(row) for tensor, row in zip(rows, written, strict=True))
        over = ~written[1].any(1, keepdim=True)
        ended += int(over.sum())
        left += int((~written[1] & ~over).sum())
    assert ended > 0 and (left > 0) == (game in ("tag_continuous", Crew))


# Figures


def test_metrics_of_an_iteration_are_those_of_its_episodes(device):
    trainer = Trainer(leaving(device, 5), SMALL, seed=2)
    returns, lengths = torch.zeros(5, 7, dtype=torch.float64, device=device), torch.zeros(5, device=device)
    seen = silent = 0
    latest = {}  # of each environment, the episodes of the last iteration in which any ended
    shortened = set((staggered_steps(trainer.env) > 0).nonzero().flatten().tolist())
    assert len(shortened) == 4
    for iteration in range(9):
        metrics, data = trainer.train_iteration(), trainer.rollout
        ended = {}
        for t in range(SMALL.num_steps):
            returns += data.rewards[t] * data.active[t]
            lengths += data.active[t].any(1)
            for environment in (data.active[t].any(1) & ~data.active[t + 1].any(1)).nonzero().flatten().tolist():
                terminated = float(not data.truncations[t][environment].any())  # by its last step
                split = returns[environment, :3].mean().item(), returns[environment, 3:].mean().item()
                ended.setdefault(environment, []).append((lengths[environment].item(), terminated, *split))
                returns[environment] = lengths[environment] = 0
        number = sum(map(len, ended.values()))
        for environment in shortened.intersection(ended):  # its first episode does not count
            shortened.remove(environment)
            number -= 1
            del ended[environment]
        latest |= ended
        first = 5 - len(latest)
        seen, silent = seen + number, silent + bool(first and ended)
        names = ("episode_length", "terminated_fraction", "return_tagger", "return_runner")
        assert (metrics["episodes"], metrics["first_episodes"]) == (number, first)
        assert metrics["iteration"] == iteration + 1 and metrics["env_steps"] == (iteration + 1) * 8 * 5
        # Rewards are whole numbers, so float32 sums are exact; a mean over 3 or 4 agents is rounded once or twice.
        means = [np.nan] * 4 if first else np.mean([one for some in latest.values() for one in some], axis=0)
        found = [metrics[name] for name in names]
        assert found == pytest.approx(list(means), rel=1e-6, nan_ok=True)
    assert seen > 10 and silent > 0


def time_fractions_of(trainer):
    parts = ("rollout",) if trainer.rollout_reason is None else STAGES
    return [f"{part}_time_fraction" for part in (*parts, "update")]


@pytest.mark.parametrize("name", ["roles", "shared", "frozen"])
def test_metrics_have_the_names_of_policies_and_roles(name, device):
    setup = SETUPS[name]
    trainer = setup.trainer(device)
    iterated(trainer, 4)  # by their end every environment has ended an episode that counts
    metrics = trainer.train_iteration()
    trained = {"roles": ["tagger", "runner"], "shared": ["tagger+runner"], "frozen": ["tagger"]}[name]
    each = [*LOSS_METRICS, "skipped_fraction", "explained_variance", "learning_rate"]
    assert set(metrics) == {
        *("iteration", "env_steps", "episodes", "first_episodes", "episode_length", "terminated_fraction"),
        *("agent_steps_per_s", *time_fractions_of(trainer)),
        *("return_tagger", "return_runner"),
        *(f"{figure}_{policy}" for figure in each for policy in trained),
    }
    assert all(type(value) in (int, float) and np.isfinite(value) for value in metrics.values())


def test_shares_of_time_are_parts_of_a_whole(device):
    trainer = SETUPS["roles"].trainer(device)
    for _ in range(4):
        metrics = trainer.train_iteration()
        shares = [metrics[name] for name in time_fractions_of(trainer)]
        # On a GPU the parts are measured by its clock and the whole by the host's: a millionth for each of the parts.
        assert min(shares) >= 0 and 0 < sum(shares) <= 1 + 4e-6
        assert metrics["update_time_fraction"] > 0 and metrics["agent_steps_per_s"] > 0


def test_training_calls_back_after_each_iteration(device, tmp_path):
    told = []
    config = changed(total_steps=8 * 6 * 3 + 1, learning_rate=0.4)
    trainer = Trainer(leaving(device), config, on_iteration=told.append)
    last = trainer.train()
    assert trainer.env_steps_per_iteration == 48 and trainer.num_iterations == 4 and told[-1] == last
    assert [metrics["iteration"] for metrics in told] == [1, 2, 3, 4]
    assert [metrics["env_steps"] for metrics in told] == [48, 96, 144, 192]
    for name in ("learning_rate_tagger", "learning_rate_runner"):  # with which the iteration was
        assert [metrics[name] for metrics in told] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    with pytest.warns(RuntimeWarning, match="all 4 iterations are done, nothing was trained; to train on, save"):
        assert trainer.train() == {} and len(told) == 4
    trainer.save(tmp_path / "done.safetensors")
    longer = Trainer(leaving(device), changed(config, total_steps=2 * config.total_steps))
    longer.load(tmp_path / "done.safetensors")
    assert longer.train()["iteration"] == longer.num_iterations == 7
    constant = Trainer(leaving(device), changed(config, final_learning_rate=None), on_iteration=told.append)
    constant.train()
    assert [metrics["learning_rate_tagger"] for metrics in told[4:]] == [0.4] * 4


@pytest.mark.parametrize(("total_steps", "iterations"), [(1, 1), (48, 1), (49, 2), (144, 3)])
def test_the_last_iteration_completes_the_total(total_steps, iterations, device):
    trainer = Trainer(leaving(device), changed(total_steps=total_steps))
    assert trainer.train()["env_steps"] == 48 * iterations >= total_steps > 48 * (iterations - 1)


@pytest.mark.parametrize(("answer", "told"), [(True, 2), (False, 4), (None, 4)])
def test_training_ends_when_the_callback_returns_false(answer, told, device):
    trainer = Trainer(leaving(device), changed(total_steps=48 * 4))
    trainer.on_iteration = lambda metrics: answer if metrics["iteration"] == 2 else None
    assert trainer.train()["iteration"] == told == trainer.iteration


# Rows of an update


class Recorder(nn.Module):
    """A user's own network; remembers the observations of every call with gradients."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.linear, self.seen = nn.Linear(obs_size, num_logits + 1), []

    def forward(self, obs):
        if torch.is_grad_enabled():
            self.seen.append(obs.clone())
        out = self.linear(obs)
        return out[..., :-1].contiguous(), out[..., -1]


def test_every_row_of_a_role_is_visited_exactly_once_an_epoch_in_another_order(device):
    env = leaving(device, 6, autoreset_mode="same_step")
    networks = {
        role: Recorder(env.game.layout.obs_size, env.game.layout.action.num_logits) for role in ("tagger", "runner")
    }
    trainer = Trainer(env, changed(num_epochs=3), policies=networks, seed=1, graphs=False)
    for network in networks.values():
        network.seen.clear()  # the check whether its outputs require gradients
    trainer.train_iteration()
    for role, network in networks.items():
        where = env.game.layout.role_slices[role]
        rows = trainer.rollout.obs[:-1, :, where].flatten(0, 2).tolist()
        assert [len(batch) for batch in network.seen] == [len(rows) // 4] * 12
        epochs = [torch.cat(network.seen[start : start + 4]).tolist() for start in (0, 4, 8)]
        active = trainer.rollout.active[:-1, :, where].flatten().tolist()
        told_apart = {tuple(row) for row, kept in zip(rows, active, strict=True) if kept}
        assert len(told_apart) == sum(active) > len(rows) / 2
        assert all(sorted(epoch) == sorted(rows) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


# Policies


def test_by_default_each_role_has_a_policy_of_its_own(device):
    trainer = Trainer(leaving(device), SMALL)
    tagger, runner = trainer.policies.values()
    assert list(trainer.policies) == list(trainer.learners) == ["tagger", "runner"]
    assert not {p.data_ptr() for p in tagger.parameters()} & {p.data_ptr() for p in runner.parameters()}
    assert not equal_bits(weights(trainer, "tagger"), weights(trainer, "runner"))  # nor the same numbers


def test_roles_may_share_a_policy(device):
    trainer = SETUPS["shared"].trainer(device)
    (policy,) = trainer.policies.values()
    assert list(trainer.policies) == ["tagger+runner"] and policy.view.num_agents == 7
    assert len(trainer.learners["tagger+runner"].indices) == 8 * 8 * 7
    before = weights(trainer, "tagger+runner")
    trainer.train_iteration()
    assert not equal_bits(weights(trainer, "tagger+runner"), before)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tagger"], r"policies are for \['tagger'\]; expected each of the roles \['tagger', 'runner'\] once"),
        (["tagger", "runner", "hunter"], r"unknown role 'hunter' of .*; the roles are \['tagger', 'runner'\]"),
        (["tagger+runner", "runner"], r"for \['tagger\+runner', 'runner'\]; expected each of the roles"),
        (["tagger+tagger", "runner"], r"tagger\+tagger has tagger_0 of TagContinuous twice"),
        ([], r"policies are for \[\]; expected each of the roles \['tagger', 'runner'\] once"),
    ],
)
def test_roles_that_are_unknown_missing_or_named_twice_are_refused(names, message, device):
    with pytest.raises(ConfigError, match=message):
        Trainer(leaving(device), SMALL, policies={name: PolicySpec() for name in names})


def test_roles_that_differ_cannot_share(device):
    with pytest.raises(ConfigError, match=r"'helper' of Crew has observations .* one policy for each"):
        Trainer(SETUPS["masks"].env(device), SMALL, policies={"driver+helper": PolicySpec()})


OTHER = {"total_steps": 10**5, "num_steps": 16, "staggered_starts": False, "squash": "tanh", "precision": "bfloat16"}


@pytest.mark.parametrize("key", RUN_WIDE_KEYS)
def test_keys_of_the_run_must_agree(key, device):
    with pytest.raises(ConfigError) as caught:
        Trainer(
            leaving(device),
            SMALL,
            policies={"tagger": PolicySpec(), "runner": PolicySpec(config=changed(**{key: OTHER[key]}))},
        )
    assert f"{key} of runner is {OTHER[key]!r}; expected {getattr(SMALL, key)!r}, as in the trainer's config" in str(
        caught.value
    )


def test_each_policy_learns_by_its_own_configuration(device):
    """The rollout is the same, so that each update is the one of a run in which all learn so."""
    values = {"learning_rate": 0.02, "gamma": 0.5, "gae_lambda": 0.3, "num_epochs": 3, "num_minibatches": 2}
    other = changed(**values, entropy_coefficient=0.2, clip=0.05, normalize_advantages=False)
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(config=other)}
    mixed, one, two = (
        Trainer(leaving(device), config, seed=3, policies=policies)
        for config, policies in ((SMALL, specs), (SMALL, None), (other, None))
    )
    before = bits(mixed)
    assert equal_bits(before, bits(one)) and equal_bits(before, bits(two))
    metrics = {trainer: trainer.train_iteration() for trainer in (mixed, one, two)}
    after = {trainer: bits(trainer) for trainer in (mixed, one, two)}
    for role, same, different in (("tagger", one, two), ("runner", two, one)):
        own = {trainer: {n: x for n, x in state.items() if f".{role}." in n} for trainer, state in after.items()}
        assert equal_bits(own[mixed], own[same]) and not equal_bits(own[mixed], own[different])
        names = [f"{name}_{role}" for name in (*LOSS_METRICS, "explained_variance", "learning_rate")]
        assert [metrics[mixed][name] for name in names] == [metrics[same][name] for name in names]


def test_each_policy_has_the_network_of_its_own_configuration(device):
    config = changed(hidden_sizes=(5, 7), shared_trunk=False, normalize_obs=True)
    trainer = Trainer(
        leaving(device), SMALL, policies={"tagger": PolicySpec(), "runner": PolicySpec(config=config)}, seed=3
    )
    tagger, runner = (trainer.policies[role] for role in ("tagger", "runner"))
    assert [layer.out_features for layer in tagger.network.trunk[::2]] == [16]
    assert [layer.out_features for layer in runner.network.critic_trunk[::2]] == [5, 7]
    assert tagger.obs_normalizer is None and runner.obs_normalizer is not None
    assert all(np.isfinite(value) for value in iterated(trainer, 5)[-1].values())


def test_a_frozen_policy_acts_and_stays_as_it_is(device):
    config = changed(**BOTH)
    former = Trainer(leaving(device), config, seed=8)
    former.train_iteration()
    given = weights(former, "runner")
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(train=False, weights=given)}
    trainer = Trainer(leaving(device), config, seed=9, policies=specs)
    assert equal_bits(weights(trainer, "runner"), given)
    before = weights(trainer, "tagger")
    metrics = iterated(trainer, 3)
    assert equal_bits(weights(trainer, "runner"), given) and not equal_bits(weights(trainer, "tagger"), before)
    assert not any(name.startswith("policy_loss_runner") for name in metrics[-1])
    policy = trainer.policies["runner"]
    assert all(not p.requires_grad and p.grad is None for p in policy.parameters())
    with torch.no_grad():  # it is the one that acts
        assert policy(policy.view.obs(trainer.rollout.obs[-1]))[1].equal(trainer.rollout.values[-1, :, 3:])


def test_a_policy_that_normalises_moves_its_statistics(device):
    trainer = Trainer(leaving(device), changed(**BOTH), seed=1)
    policy, counts = trainer.policies["tagger"], []
    for _ in range(2):
        trainer.train_iteration()
        counts.append([policy.obs_normalizer.count.item(), policy.return_normalizer.count.item()])
    active = int(trainer.rollout.active[:-1, :, :3].sum())
    assert counts[1] == pytest.approx([count + active for count in counts[0]])


def test_a_run_without_anything_to_learn_is_a_run(device):
    trainer = Trainer(leaving(device), SMALL, policies={"tagger+runner": PolicySpec(train=False)})
    before = weights(trainer, "tagger+runner")
    assert iterated(trainer, 2)[-1]["env_steps"] == 96
    assert equal_bits(weights(trainer, "tagger+runner"), before)


def test_a_policy_begins_with_the_weights_given(device):
    given = {name: tensor + 1 for name, tensor in weights(Trainer(leaving(device), SMALL), "runner").items()}
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(weights=given)}
    trainer = Trainer(leaving(device), SMALL, policies=specs)
    assert equal_bits(weights(trainer, "runner"), given)
    trainer.train_iteration()
    assert not equal_bits(weights(trainer, "runner"), given)


@pytest.mark.parametrize("change", [{"hidden_sizes": (17,)}, {"hidden_sizes": (16, 16)}, {"normalize_obs": True}])
def test_weights_of_another_shape_are_refused(change, device):
    given = weights(Trainer(leaving(device), changed(**change)), "runner")
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(weights=given)}
    with pytest.raises(ConfigError, match="weights for runner are"):
        Trainer(leaving(device), SMALL, policies=specs)


def test_minibatches_that_do_not_divide_are_refused_with_the_numbers(device):
    with pytest.raises(ConfigError, match=r"num_minibatches is 9; .* 8 x 6 x 4 = 192$"):
        Trainer(leaving(device), changed(num_minibatches=9))  # it divides the taggers' 8 x 6 x 3


def test_discrete_games_are_not_squashed(device):
    with pytest.raises(ConfigError, match="squash is 'tanh', but TagContinuous has discrete actions"):
        Trainer(leaving(device), changed(squash="tanh"))


class Masking(nn.Module):
    """Never chooses the last action."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.actor, self.critic = nn.Linear(obs_size, num_logits), nn.Linear(obs_size, 1)

    def forward(self, obs):
        logits = self.actor(obs)
        excluded = torch.arange(logits.shape[-1], device=obs.device) == logits.shape[-1] - 1
        return logits.masked_fill(excluded, float("-inf")), self.critic(obs).squeeze(-1)


def test_a_policy_may_exclude_choices(device):
    env = SETUPS["cells"].env(device, 16)
    policies = {"tagger+runner": Masking(env.game.layout.obs_size, 5)}
    trainer = Trainer(env, changed(total_steps=1), policies=policies)
    assert trainer.train()["entropy_tagger+runner"] > 0
    assert int(trainer.rollout.draws.max()) == 3


def test_a_network_of_the_users_own_is_trained_evaluated_and_saved(device, tmp_path):
    env = leaving(device)
    network = nn.Sequential(Recorder(env.game.layout.obs_size, env.game.layout.action.num_logits))
    trainer = Trainer(env, SMALL, policies={"tagger+runner": network})
    assert trainer.policies["tagger+runner"].network is network
    before = weights(trainer, "tagger+runner")
    trainer.train_iteration()
    assert not equal_bits(weights(trainer, "tagger+runner"), before)
    assert trainer.evaluate(6)["episodes"] == 6
    kept = bits(trainer)
    trainer.save(tmp_path / "own")
    trainer.train_iteration()
    trainer.load(tmp_path / "own")
    assert equal_bits(bits(trainer), kept)


# Repetition


def test_equal_seeds_are_bitwise_equal_and_others_differ(setup, device):
    one, again, other = (setup.trainer(device, seed=seed) for seed in (11, 11, 12))
    start = bits(one)
    metrics, figures_again, others = (iterated(trainer, 4) for trainer in (one, again, other))
    assert metrics == figures_again != others
    assert equal_bits(bits(one), bits(again))
    for name, tensor in bits(one).items():
        if "trunk" in name and name.startswith("policy") and "runner" not in name:
            assert not tensor.equal(start[name]) and not tensor.equal(bits(other)[name])


def test_first_weights_follow_the_seed_alone(device):
    """Before any episode, which would make them differ anyway."""
    one, other = (SETUPS["roles"].trainer(device, num_envs=n, seed=3) for n in (8, 2))
    third = SETUPS["roles"].trainer(device, seed=4)
    for role in ("tagger", "runner"):
        assert equal_bits(weights(one, role), weights(other, role))
        for name in ("network.trunk.0.weight", "network.actor.weight", "network.critic.weight"):
            assert not weights(one, role)[name].equal(weights(third, role)[name])


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_have_64_bits(seed, device):
    one, again, other = (SETUPS["shared"].trainer(device, seed=number) for number in (seed, seed, seed - 2**62))
    assert iterated(one, 2) == iterated(again, 2) != iterated(other, 2)
    assert equal_bits(bits(one), bits(again)) and not equal_bits(bits(one), bits(other))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1"])
def test_other_seeds_are_refused(seed, device):
    with pytest.raises((ValueError, TypeError), match="seed"):
        Trainer(leaving(device), SMALL, seed=seed)


@pytest.mark.gpu
def test_graphs_change_no_bit(setup):
    captured, plain = (setup.trainer("cuda", graphs=graphs) for graphs in (True, False))
    assert iterated(captured, 5) == iterated(plain, 5)
    assert equal_bits(bits(captured), bits(plain))
    repeated = [captured._graphed_iteration, captured._graphed_rollout, captured._graphed_end]
    repeated += [stage for learner in captured.learners.values() for stage in learner.stages.values()]
    called = [stage for stage in repeated if stage._warm]
    assert called and all(stage.graph is not None for stage in called)


def test_global_state_of_torch_numpy_and_random_is_left_alone(device, tmp_path):
    def state():
        generators = [random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]
        if device == "cuda":
            generators += [torch.cuda.get_rng_state().tolist(), torch.backends.cuda.matmul.allow_tf32]
        switches = [torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]
        switches += [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]
        return generators + switches

    before = state()
    trainer = Trainer(leaving(device), changed(precision="tf32"), seed=1)
    assert state() == before
    trainer.train_iteration()
    trainer.evaluate(5)
    trainer.load(trainer.save(tmp_path / "policy"))
    assert state() == before


def test_evaluation_does_not_change_what_training_does(setup, device):
    evaluated, twin = (setup.trainer(device, seed=9) for _ in range(2))
    role = next(iter(evaluated.env.game.roles))
    for _ in range(2):
        evaluated.evaluate(7)
        evaluated.evaluate(3, random_roles=[role], greedy=True)
        assert iterated(evaluated, 1) == iterated(twin, 1)
    assert equal_bits(bits(evaluated), bits(twin))


@pytest.mark.parametrize(
    "arguments", [{"autoreset_mode": "same_step"}, {"agents_as_envs": True}, {"autoreset_mode": "disabled"}]
)
def test_an_environment_that_does_not_fit_serves_as_a_pattern(arguments, device):
    given = leaving(device, **arguments)
    trainer, expected = (Trainer(env, SMALL, seed=7) for env in (given, leaving(device)))
    assert trainer.env.autoreset_mode == "next_step" and not trainer.env.agents_as_envs
    assert trainer.env is not given and given.seed is None
    trainer.train_iteration(), expected.train_iteration()
    assert equal_bits(bits(trainer), bits(expected))
    trainer.close()
    assert not given.closed


def test_an_environment_that_fits_is_stepped_itself(device):
    env = leaving(device)
    assert Trainer(env, SMALL).env is env


def test_closing_frees_environment_and_rollout_at_once(device):
    trainer = SETUPS["masks"].trainer(device)
    trainer.train_iteration()
    learner = trainer.learners["driver"]
    kept = [weakref.ref(x) for x in (trainer.rollout.obs, trainer.rollout.rewards, learner, learner.metric_sums)]
    del learner
    gc.disable()
    try:
        trainer.close()
        assert trainer.env.closed and [reference() for reference in kept] == [None] * 4
    finally:
        gc.enable()
    with pytest.raises(ClosedEnvError):
        trainer.env.reset()
    trainer.close()


# Going on from a checkpoint


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(setup, device, tmp_path):
    trainer = setup.trainer(device)
    iterated(trainer, 3)
    path, kept = trainer.save(tmp_path / "run" / "three"), bits(trainer)
    metrics = iterated(trainer, 3)
    resumed = setup.trainer(device)
    assert not equal_bits(bits(resumed), kept)
    manifest = resumed.load(path)
    assert manifest["iteration"] == resumed.iteration == 3 and equal_bits(bits(resumed), kept)
    for name in ("obs", "active", "action_mask"):
        row, expected = (getattr(x.rollout, name) for x in (resumed, trainer))
        assert (row is None) == (expected is None)
    assert iterated(resumed, 3) == metrics
    assert equal_bits(bits(resumed), bits(trainer))
    for name in ("obs", "draws", "log_probs", "values", "rewards", "advantages", "returns", "active"):
        assert equal_bits(getattr(resumed.rollout, name), getattr(trainer.rollout, name))


def test_a_trainer_goes_back_to_its_own_checkpoint(device, tmp_path):
    """Also once graphs have been captured: the tensors that they work on are filled, not replaced."""
    trainer = SETUPS["tanh"].trainer(device)
    iterated(trainer, 2)
    path = trainer.save(tmp_path / "two")
    metrics, after = iterated(trainer, 3), bits(trainer)
    trainer.load(path)
    assert iterated(trainer, 3) == metrics and equal_bits(bits(trainer), after)


def test_the_manifest_says_what_the_tensors_belong_to(tmp_path):
    trainer = SETUPS["roles"].trainer("cpu", 6)
    iterated(trainer, 1)
    manifest = SETUPS["roles"].trainer("cpu", 6).load(str(trainer.save(str(tmp_path / "policy"))))
    assert manifest["game"] == "tag_continuous" and manifest["seed"] == 5 and manifest["iteration"] == 1
    assert manifest["num_envs"] == 6 and manifest["first_env_index"] == 0
    assert manifest["made_with"]["gpu_vecenv"] == gpu_vecenv.__version__
    assert manifest["made_with"]["torch"] == torch.__version__
    assert manifest["game_config"].items() >= LEAVING.items()
    assert PPOConfig(**{**manifest["config"], "hidden_sizes": (16,)}) == SMALL
    assert set(manifest["policies"]) == {"tagger", "runner"} and manifest["trained"] == ["tagger", "runner"]


@pytest.fixture
def trainer():
    made = SETUPS["roles"].trainer("cpu", 6)
    made.train_iteration()
    return made


def refused(trainer, path, *errors):
    """Load a file that has to be refused, and see that nothing has changed."""
    before, iteration, rows = bits(trainer), trainer.iteration, trainer.rollout.obs[-1].clone()
    with pytest.raises(errors) as caught:
        trainer.load(path)
    assert equal_bits(bits(trainer), before) and trainer.iteration == iteration
    assert trainer.rollout.obs[-1].equal(rows)
    assert str(path) in str(caught.value)
    return str(caught.value)


OTHERS = {
    "another game": (Setup("tag_gridworld"), {}, "game is 'tag_gridworld', this trainer's 'tag_continuous'"),
    "another configuration of the game": (
        Setup("tag_continuous", {**LEAVING, "side": 4.0}),
        {},
        r"game_config\.side is 4.0, this trainer's 3.0",
    ),
    "other environments": (SETUPS["roles"], {"num_envs": 7}, "num_envs is 7, this trainer's 6"),
    "another seed": (SETUPS["roles"], {"seed": 6}, "seed is 6, this trainer's 5"),
    "a wider network": (Setup("tag_continuous", LEAVING, changed(hidden_sizes=(17,))), {}, r"hidden_sizes is \[17\]"),
    "a normaliser": (Setup("tag_continuous", LEAVING, changed(normalize_obs=True)), {}, "normalize_obs is True"),
    "another learning rate": (Setup("tag_continuous", LEAVING, changed(learning_rate=0.1)), {}, "learning_rate"),
    "another activation": (Setup("tag_continuous", LEAVING, changed(activation="relu")), {}, "activation"),
    "a shared policy": (SETUPS["shared"], {}, r"tagger\+runner"),
    "a frozen policy": (SETUPS["frozen"], {}, "trained"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(other, trainer, tmp_path):
    setup, arguments, message = OTHERS[other]
    path = setup.trainer("cpu", **{"num_envs": 6, "seed": 5, **arguments}).save(tmp_path / "other")
    assert re.search(message, refused(trainer, path, ConfigError))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["weights", "optimiser"])
def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(part, value, trainer, tmp_path):
    broken = SETUPS["roles"].trainer("cpu", 6)
    with torch.no_grad():
        if part == "weights":
            broken.policies["runner"].network.actor.weight[1, 2] = value
        else:
            broken.learners["runner"].optimizer_state()["0.exp_avg"][0, 0] = value
    message = refused(trainer, broken.save(tmp_path / "broken"), CheckpointCorruptError)
    assert ("policy.runner.network.actor.weight" if part == "weights" else "optimizer.runner.0.exp_avg") in message


def test_a_damaged_checkpoint_is_refused(trainer, tmp_path):
    content, path = trainer.save(tmp_path / "policy").read_bytes(), tmp_path / "damaged"
    header = 8 + int.from_bytes(content[:8], "little")
    for size in (0, 7, header // 2, header, len(content) - 1):
        path.write_bytes(content[:size])
        refused(trainer, path, CheckpointCorruptError)
    for place in (3, header // 3, header + 5, len(content) - 2):
        flipped = bytearray(content)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        refused(trainer, path, CheckpointCorruptError)
    save_file(load_file(tmp_path / "policy"), path)
    refused(trainer, path, CheckpointCorruptError)
    refused(trainer, tmp_path / "missing", FileNotFoundError)


def test_another_number_of_threads_is_warned_of(trainer, tmp_path):
    path = trainer.save(tmp_path / "policy")
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="'threads': 1.* this is .*'threads': 2.* results may differ bitwise"):
        trainer.load(path)


@dataclass(frozen=True, kw_only=True)
class Chosen(Target):
    """Its configuration has a tuple, which JSON writes as a list."""

    sizes: tuple[int, ...] = (1, 2)


def test_a_tuple_in_a_games_configuration_comes_back(tmp_path):
    one, other = (Setup(Chosen()).trainer("cpu") for _ in range(2))
    one.train_iteration()
    other.load(one.save(tmp_path / "policy"))
    assert equal_bits(bits(one), bits(other))


# What is not finite

POISON = """from dataclasses import dataclass
import numpy as np
from gymnasium.spaces import Discrete
from gpu_vecenv import Env, Field


@dataclass(frozen=True, kw_only=True)
class Poison(Env):
    healthy: int = 18
    of_rewards: int = 1
    one_in: int = 1
    obs_dim = 2
    action_space = Discrete(3)
    state = (Field("ill", np.int32),)
"""
POISON_TEXT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { ONCE s.ill[0] = io.rng.below(0, 0, ONE_IN) == 0; }
HD float sick(State s, Io io) { return math::sqrt(s.ill[0] != 0 && io.elapsed_steps > HEALTHY ? -1.0f : 0.0f); }
HD void step(State s, Io io) {
    ONCE {
        io.rewards[0] = io.action(0) - 1.0f + OF_REWARDS * sick(s, io);
        io.truncations[0] = io.elapsed_steps >= 24;
    }
}
HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = 0.01f * io.elapsed_steps + (OF_REWARDS ? 0.0f : sick(s, io));
        io.obs[0][1] = 1;
    }
}
"""


@pytest.fixture(scope="module")
def poison(tmp_path_factory):
    """A game that pays or shows NaN after some healthy steps, in one environment of so many."""
    folder, paths = tmp_path_factory.mktemp("poison"), list(sys.path)
    (folder / "poison.py").write_text(POISON)
    (folder / "poison.cu").write_text(POISON_TEXT)
    yield load_game(folder / "poison.py")
    for name in set(GAMES) & {"poison"}:
        del GAMES[name]
    for title in [title for title in gymnasium.registry if title.startswith("gpu_vecenv/poison-")]:
        del gymnasium.registry[title]
    del sys.modules["poison"]
    sys.path[:] = paths


def learned(trainer):
    """Weights and the optimiser's tensors: what steps change."""
    others = ("env.", "episodes.", "_normalizer", "reward_sums")
    return {name: x for name, x in bits(trainer).items() if not any(other in name for other in others)}


@pytest.mark.parametrize("of_rewards", [1, 0])
@pytest.mark.parametrize("normalised", [{}, {"normalize_obs": True}, {"normalize_returns": True}])
def test_nan_of_a_game_stops_training_and_spoils_nothing(normalised, of_rewards, poison, device, tmp_path):
    setup = Setup(poison(of_rewards=of_rewards), config=changed(**normalised))
    trainer = setup.trainer(device)
    iterated(trainer, 2)
    before = learned(trainer)
    what = "rewards" if of_rewards else "observations"
    with pytest.raises(NonFiniteError, match=rf"iteration 3: .*nan.*; the game's {what} are not finite: mend"):
        trainer.train()
    assert equal_bits(learned(trainer), before) and trainer.iteration == 2
    statistics = {name: tensor for name, tensor in bits(trainer).items() if "_normalizer" in name}
    assert all(tensor.isfinite().all() for tensor in (learned(trainer) | statistics).values())
    setup.trainer(device).load(trainer.save(tmp_path / "policy"))
    if of_rewards:
        assert trainer.evaluate(4)["episode_length"] == 24
    else:
        with pytest.raises(NonFiniteError, match=r"received an invalid action.*a network returned NaN"):
            trainer.evaluate(4)


def test_after_a_gradient_that_is_not_finite_no_step_is_taken(poison, device):
    """Few environments are ill: minibatches before the first of their rows teach, those after it no more."""
    config = changed(num_epochs=1, num_minibatches=32, normalize_advantages=False)
    trainer = Setup(poison(healthy=4, one_in=32), config=config).trainer(device, 32, seed=POISONED)
    ill = trainer.env.state["ill"].flatten().bool()
    assert 0 < int(ill.sum()) < 4
    with pytest.raises(NonFiniteError):
        trainer.train_iteration()
    (learner,) = trainer.learners.values()
    order = learner.order.view(32, -1) % 32  # with one agent, indices count environments within steps
    first = int(ill[order].any(1).int().argmax())
    state = learner.optimizer_state()
    assert first > 1 and state["0.step"].item() == first
    assert all(tensor.isfinite().all() for tensor in [*state.values(), *learner.parameters])


class Cliff(nn.Module):
    """Its value is finite, its gradient is not."""

    def __init__(self, obs_size, num_logits):
        super().__init__()
        self.actor, self.critic = nn.Linear(obs_size, num_logits), nn.Linear(obs_size, 1)

    def forward(self, obs):
        value = self.critic(obs).squeeze(-1)
        return self.actor(obs), value + torch.sqrt((value * 0).abs())


def test_a_gradient_that_is_not_finite_stops_training_and_changes_nothing(device):
    env = SETUPS["cells"].env(device, 16)
    trainer = Trainer(env, changed(total_steps=1), policies={"tagger+runner": Cliff(env.game.layout.obs_size, 5)})
    before = weights(trainer, "tagger+runner")
    with pytest.raises(NonFiniteError, match=r"grad_norm_tagger\+runner': nan"):
        trainer.train()
    assert equal_bits(weights(trainer, "tagger+runner"), before)


@pytest.mark.parametrize("part", ["critic", "actor"])
def test_weights_that_are_not_finite_stop_training_of_their_policy(part, device):
    trainer = Trainer(leaving(device), SMALL)
    getattr(trainer.policies["tagger"].network, part).bias.data.fill_(float("nan"))
    before = weights(trainer, "tagger")
    with pytest.raises(NonFiniteError, match=r"iteration 1: .*nan.*smaller learning_rate"):
        trainer.train()
    assert equal_bits(weights(trainer, "tagger"), before)


# Memory


@pytest.mark.parametrize("num_envs", [10**9, 10**15])
def test_too_many_envs_are_refused_before_anything_is_allocated(num_envs, device):
    with pytest.raises(CapacityError, match=rf"num_envs = {num_envs:,} .* at most num_envs = [\d,]+ fit"):
        leaving(device, num_envs)


# Learning


@pytest.mark.slow
def test_training_raises_the_share_of_caught_runners(device):
    """Two taggers on 7 x 7 cells catch a random runner in a third of the episodes; trained ones in many more."""
    env = gpu_vecenv.make("tag_gridworld", 256, device, num_taggers=2, grid=6, max_steps=20)
    config = PPOConfig(total_steps=160_000, num_steps=16, learning_rate=3e-3, hidden_sizes=(32, 32))
    trainer = Trainer(env, config, seed=0, policies={"tagger+runner": PolicySpec()})
    at_random = trainer.evaluate(1000, random_roles=["tagger", "runner"])
    trainer.train()
    trained = trainer.evaluate(1000, random_roles=["runner"])
    # A share of 1,000 episodes has a standard error of at most 1.6 points; the gain measured with 3 seeds is over 25.
    assert trained["terminated_fraction"] > at_random["terminated_fraction"] + 0.2
    assert trained["return_tagger"] > at_random["return_tagger"] + 2
    assert trained["return_runner"] < at_random["return_runner"]


# What lies beside the environments, and what was broken off


def test_shared_fields_that_were_changed_come_back_and_are_played(device, tmp_path):
    def made():
        env = gpu_vecenv.make("simple_spread", 6, device, autoreset_mode="next_step", curriculum=True)
        return Trainer(env, SMALL, seed=3)

    one, other = made(), made()
    before = one.evaluate(20)
    one.env.state["curriculum_stage"].fill_(1)
    assert one.evaluate(20) != before  # collisions cost something now
    one.train_iteration()
    other.load(one.save(tmp_path / "one"))
    assert int(other.env.state["curriculum_stage"]) == 1
    metrics = [
        {k: v for k, v in t.train_iteration().items() if "fraction" not in k and "_per_s" not in k}
        for t in (one, other)
    ]
    assert metrics[0] == metrics[1] and equal_bits(one.state()[0], other.state()[0])


@pytest.mark.parametrize("levels", [False, True])
def test_an_environment_that_the_trainer_makes_has_shared_fields_as_they_are(levels, device):
    """It makes one where the environment given is of another mode, or has initial states that it replays."""
    starts = {"position": torch.zeros(2, 3, 2)} if levels else None
    env = gpu_vecenv.make("simple_spread", 6, device, curriculum=True, initial_states=starts)
    env.state["curriculum_stage"].fill_(1)
    trainer = Trainer(
        env, SMALL, seed=3, curriculum=gpu_vecenv.Curriculum(levels=gpu_vecenv.LevelReplay()) if levels else None
    )
    assert trainer.env is not env and int(trainer.env.state["curriculum_stage"]) == 1


def test_policies_whose_weights_a_caller_has_frozen_train_on_unchanged(device):
    for network in ("mlp", "gru"):
        trainer = Trainer(leaving(device), changed(network=network, num_minibatches=3), seed=8, graphs=False)
        for policy in trainer.policies.values():
            policy.requires_grad_(False)
        before = {name: weights(trainer, name) for name in trainer.policies}
        metrics = trainer.train_iteration()
        assert all(equal_bits(weights(trainer, name), x) for name, x in before.items())
        assert metrics["entropy_tagger"] > 0 and metrics["grad_norm_tagger"] == 0


def test_an_iteration_that_was_broken_off_does_not_spoil_the_next(device, monkeypatch):
    # Its rollouts take several launches a step: one launch is not broken off.
    env = gpu_vecenv.make("pendulum", 6, device, autoreset_mode="next_step", validate="sync")
    trainer = Trainer(env, changed(normalize_obs=True), seed=3, graphs=False)
    trainer.train_iteration()
    step, calls = trainer.sampler.step, []

    def interrupted(*arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(*arguments, **named)

    monkeypatch.setattr(trainer.sampler, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train_iteration()
    now = trainer.env.observe()
    trainer.train_iteration()
    assert trainer.rollout.obs[0].equal(now)


class Sharing(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.heads = trunk, nn.Linear(4, 6)

    def forward(self, obs):
        out = self.heads(self.trunk(obs))
        return out[..., :-1], out[..., -1]


def test_policies_that_share_only_a_part_are_refused(device):
    env = gpu_vecenv.make("tag_gridworld", 4, device)
    trunk = nn.Linear(env.game.layout.obs_size, 4)
    with pytest.raises(ConfigError, match="share weights; expected separate networks"):
        Trainer(env, SMALL, policies={"tagger": Sharing(trunk), "runner": Sharing(trunk)})


def test_a_checkpoint_of_other_types_is_of_a_different_run(device, tmp_path):
    """0 equals False in Python, and 1 equals 1.0."""
    trainer = Trainer(leaving(device, 4), SMALL)
    tensors, manifest = trainer.state()
    manifest = json.loads(json.dumps(manifest))
    trainer.load_state(tensors, manifest, "the same")
    assert type(manifest["config"]["normalize_advantages"]) is bool and type(manifest["seed"]) is int
    for changed in (
        {"config": manifest["config"] | {"normalize_advantages": int(manifest["config"]["normalize_advantages"])}},
        {"seed": float(manifest["seed"])},
        {"trained": manifest["trained"][:-1]},
    ):
        with pytest.raises(ConfigError, match=f"is of a different run: its {next(iter(changed))}"):
            trainer.load_state(tensors, manifest | changed, "another")


# A step of the caller's own


class Doubling(gpu_vecenv.VecEnv):
    """Pays twice what the game does."""

    def step(self, actions, out=None):
        outputs = super().step(actions, out)
        outputs[1].mul_(2)
        return outputs


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_step_of_a_derived_class_is_called(mode, device):
    """Also where the trainer and the evaluation step other environments than the given one."""
    rewards = []
    for kind in (gpu_vecenv.VecEnv, Doubling):
        env = kind(gpu_vecenv.configure("cartpole"), 4, device, autoreset_mode=mode)
        trainer = Trainer(env, SMALL, seed=3)
        trainer.begin_iteration()
        rewards.append(trainer.rollout.rewards.clone())
        assert type(trainer.env.like(num_envs=2)) is kind
    assert rewards[0].any() and rewards[1].equal(2 * rewards[0])


def test_a_step_that_was_replaced_on_the_instance_is_called_or_refused(device):
    env = gpu_vecenv.make("cartpole", 4, device, autoreset_mode="next_step")
    own_step = env.step

    def doubled(actions, out=None):
        outputs = own_step(actions, out)
        outputs[1].mul_(2)
        return outputs

    env.step = doubled
    trainer = Trainer(env, SMALL, seed=3)
    trainer.begin_iteration()
    assert trainer.rollout.rewards.amax() == 2
    with pytest.raises(ConfigError, match=r"like: step of this environment was replaced.*class derived from VecEnv"):
        trainer.evaluate(4)
    env = gpu_vecenv.make("cartpole", 4, device)
    env.step = env.step
    with pytest.raises(ConfigError, match="like: step of this environment was replaced"):
        Trainer(env, SMALL)
