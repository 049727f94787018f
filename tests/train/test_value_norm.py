"""Statistics of returns of MAPPO, and its preset, in Python and on the command line."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from games.sacrifice import Sacrifice
from support.bitwise import equal_bits
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.checkpoint import CheckpointFolder
from gpu_vecenv.train.normalizers import ValueNorm
from gpu_vecenv.train.ppo import MAPPO
from gpu_vecenv.train.rollout_context import RolloutContext

SETTINGS = {**MAPPO, "num_epochs": 3, "hidden_sizes": (16,)}
CONFIG = dataclasses.replace(SMALL, **SETTINGS)


class Reference:
    """The equations of the reference implementation of MAPPO, in float64."""

    def __init__(self, beta):
        self.beta, self.mean, self.square, self.debiasing = beta, 0.0, 0.0, 0.0

    def update(self, returns):
        old, new = self.beta, 1 - self.beta
        self.mean = old * self.mean + new * returns.mean().item()
        self.square = old * self.square + new * returns.square().mean().item()
        self.debiasing = old * self.debiasing + new

    def mean_and_var(self):
        mean, square = self.mean / max(self.debiasing, 1e-5), self.square / max(self.debiasing, 1e-5)
        return mean, max(square - mean**2, 1e-2)


def moments_of(returns):
    return torch.tensor([len(returns), returns.sum(), returns.square().sum()], dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.99999, 0.9])
@pytest.mark.parametrize("spread", [3.0, 0.01])  # the variance is then 1e-4, and 1e-2 counts
def test_statistics_are_those_of_the_reference_implementation(beta, spread):
    own, reference = ValueNorm(beta), Reference(beta)
    assert (own.mean.item(), own.var.item()) == reference.mean_and_var() == (0, 0.01)
    random = torch.Generator().manual_seed(0)
    for k in range(5):
        returns = k + spread * torch.randn(50, generator=random, dtype=torch.float64)
        own.update_from_moments(moments_of(returns), 3)
        for _ in range(3):
            reference.update(returns)
        # beta^3 is rounded once where the reference rounds three times, and 1 - 0.99999 has 11 digits.
        assert (own.mean.item(), own.var.item()) == pytest.approx(reference.mean_and_var(), rel=1e-8)
    before = {name: x.clone() for name, x in own.state_dict().items()}
    for unusable in (torch.zeros(3), torch.tensor([2.0, torch.nan, 1.0]), torch.tensor([2.0, 1.0, torch.inf])):
        own.update_from_moments(unusable.double())
        assert equal_bits(own.state_dict(), before)


def test_returns_of_a_rollout_count_once_for_each_update_and_values_follow(device):
    """So that the loss clips changes of the critic's output, and not those of the statistics."""
    trainer, references = Trainer(leaving(device), CONFIG, seed=2), {}
    for _ in range(2):
        trainer.begin_iteration()
        data = trainer.rollout
        before = data.values.clone()
        for name, learner in trainer.learners.items():
            policy, reference = learner.policy, references.setdefault(name, Reference(CONFIG.value_norm_beta))
            own = (slice(None), slice(None), policy.view.agents)
            returns = data.returns[own][data.active[:-1][own]].double()
            for _ in range(CONFIG.num_epochs):
                reference.update(returns)
            learner.prepare_update(trainer.iteration)
            learner.minibatch_gradient(0)
            normalizer = policy.return_normalizer
            assert (normalizer.mean.item(), normalizer.var.item()) == pytest.approx(reference.mean_and_var(), rel=1e-6)
            context = RolloutContext(policy, data)
            values = torch.stack(
                [policy(policy.view.obs(data.obs[t]), context=context.of_step(t))[1] for t in range(8)]
            )
            torch.testing.assert_close(data.values[:-1][own], values, rtol=1e-4, atol=1e-4)
            assert not before[:-1][own].equal(data.values[:-1][own])
            for k in range(1, learner.num_updates):
                learner.minibatch_gradient(k)
                learner.optimizer_step()
        trainer.end_iteration()


@pytest.mark.parametrize("beta", [0.9, 0.99999])
def test_a_team_counts_its_dead(beta, device):
    """Returns and statistics of NumPy, where units die before their episode ends and are paid at its end."""
    config = dataclasses.replace(CONFIG, value_norm_beta=beta, num_epochs=2, num_steps=11, num_minibatches=1)
    env = gpu_vecenv.make(Sacrifice, 16, device, num_units=3, max_steps=4, autoreset_mode="next_step")
    trainer, reference = Trainer(env, config, seed=2), Reference(beta)
    (learner,), dead = trainer.learners.values(), 0
    for _ in range(3):
        trainer.begin_iteration()
        data = trainer.rollout
        names = ("rewards", "values", "active", "acting")
        rewards, values, active, acting = (getattr(data, name).cpu().numpy() for name in names)
        returns = np.zeros(rewards.shape)
        for env_index, unit in np.ndindex(rewards.shape[1:]):
            advantage = 0.0
            for t in reversed(range(len(rewards))):
                at = (t, env_index, unit)
                if not active[at]:  # the step that resets
                    advantage = 0.0
                    continue
                following = (t + 1, env_index, unit)
                goes_on = config.gamma * bool(active[following])  # to the episode's end, also once it has died
                gae_lambda = config.gae_lambda if acting[following] else 1.0  # between the unit's own decisions
                delta = rewards[at] + goes_on * float(values[following]) - values[at]
                advantage = delta + goes_on * gae_lambda * advantage
                returns[at] = advantage + values[at]
        counted, idle = active[:-1], active[:-1] & ~acting[:-1]
        dead += idle.sum()
        np.testing.assert_allclose(data.returns.cpu().numpy()[counted], returns[counted], rtol=1e-4, atol=1e-5)
        for _ in range(config.num_epochs):
            reference.update(torch.from_numpy(returns[counted]))
        learner.prepare_update(trainer.iteration)
        learner.minibatch_gradient(0)
        normalizer = learner.policy.return_normalizer
        expected = reference.mean_and_var()
        assert (normalizer.mean.item(), normalizer.var.item()) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        others = returns[counted & acting[:-1]]
        assert abs(others.mean() - returns[counted].mean()) > 2e-3  # the statistics tell which samples counted
        for k in range(1, learner.num_updates):
            learner.minibatch_gradient(k)
            learner.optimizer_step()
        trainer.end_iteration()
    assert dead > 100


def test_a_run_resumes_bit_identically(device, tmp_path):
    whole, first, second = (Trainer(leaving(device), CONFIG, seed=5) for _ in range(3))
    for _ in range(2):
        first.train_iteration()
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    second.train_iteration()
    for _ in range(3):
        whole.train_iteration()
    assert equal_bits(whole.state()[0], second.state()[0])
    assert not equal_bits(whole.state()[0], first.state()[0])


def test_the_preset_in_python_and_on_the_command_line(command):
    config = PPOConfig.mappo(num_steps=7, clip=0.1)
    assert config == dataclasses.replace(PPOConfig(), **{**MAPPO, "num_steps": 7, "clip": 0.1})
    with pytest.raises(ConfigError, match="expected one of them"):
        PPOConfig.mappo(normalize_returns=True)
    sizes = ("--num-envs", 4, "--total-steps", 64, "--num-steps", 8, "--episodes", 2)
    options = (*sizes, "--num-epochs", 2, "--best-episodes", 0, "--device", "cpu", "--out", "run")
    code, _, errors = command("train", "simple_spread", "--preset", "mappo", *options)
    assert code == 0, errors
    manifest = CheckpointFolder(Path("run/checkpoints")).load()[1]
    found = {name: value for name, value in manifest["config"].items() if name in MAPPO}
    assert found == json.loads(json.dumps({**MAPPO, "num_epochs": 2}))
    code, _, errors = command("train", "simple_spread", "--preset", "mappo", "--algorithm", "a2c", *options)
    assert code and "--preset mappo is of PPO" in "".join(errors)
    code, _, errors = command("train", "--resume", "run", "--total-steps", 128)
    assert code == 0, errors
