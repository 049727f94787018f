"""Policies with Beta distributions: densities and gradients in torch, actions, files, and training."""

import pytest
import scipy.stats
import torch
from games.painter import Painter
from support.training import policy_of

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, load_policy
from gpu_vecenv.train.distributions import beta_log_probs_and_entropies, concentrations, mean_draws, random_draws
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.watch.episode import rollout

P_VALUE = 1e-6  # a fair sampler's Kolmogorov-Smirnov test gives a smaller one with this probability


@pytest.mark.parametrize("k", [1, 3])
def test_densities_entropies_and_gradients_are_those_of_torchs_distribution(k, device):
    parameters = 3 * torch.randn(500, 2 * k, generator=torch.Generator().manual_seed(1))
    draws = random_draws(parameters, "beta", torch.Generator().manual_seed(2)).to(device)
    given = parameters.to(device).requires_grad_()
    exact = parameters.detach().double().to(device).requires_grad_()
    alphas, betas = (1 + torch.logaddexp(exact, torch.zeros_like(exact))).chunk(2, -1)
    distribution = torch.distributions.Beta(alphas, betas)
    expected = distribution.log_prob(draws.double()).sum(-1), distribution.entropy().sum(-1)
    found = beta_log_probs_and_entropies(given, draws)
    for one, other in zip(found, expected, strict=True):
        # Sums of numbers up to 30, which cancel; draws near 1 lose what 1 - u has.
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    weights = torch.randn(2, 500, generator=torch.Generator().manual_seed(3)).double().to(device)
    sum((weights[i] * expected[i]).sum() for i in range(2)).backward()
    sum((weights[i].float() * found[i]).sum() for i in range(2)).backward()
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_a_density_integrates_to_one(device):
    u = (torch.arange(100000, device=device).double() + 0.5) / 100000
    log_probs, _ = beta_log_probs_and_entropies(
        torch.tensor([[0.4, -0.7]], device=device).double().expand(len(u), 2), u[:, None]
    )
    assert log_probs.exp().mean().item() == pytest.approx(1, abs=1e-6)


def test_actions_are_drawn_from_the_box(device):
    """The painter's Box: [-1, 1] x [0, 3]."""
    env = gpu_vecenv.make(Painter, 2, device)
    policy = Trainer(env, PPOConfig(squash="beta", hidden_sizes=(4,), num_steps=8)).policies["agent"]
    assert policy.network.log_std is None and policy.network.actor.out_features == 4
    with torch.no_grad():
        policy.network.actor.weight.zero_()
        policy.network.actor.bias.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    obs = torch.zeros(20000, 1, 4, 5, 3, dtype=torch.uint8, device=device)
    actions = policy.act(obs, generator=torch.Generator(device).manual_seed(1))
    assert policy.act(obs, generator=torch.Generator(device).manual_seed(1)).equal(actions)
    alphas, betas = (x.double() for x in concentrations(policy.network.actor.bias.detach().cpu()))
    low, width = torch.tensor([-1.0, 0.0]).double(), torch.tensor([2.0, 3.0]).double()
    u = (actions[:, 0].cpu().double() - low) / width
    for k in range(2):
        exact = scipy.stats.beta(alphas[k].item(), betas[k].item())
        assert scipy.stats.kstest(u[:, k].numpy(), exact.cdf).pvalue > P_VALUE
    greedy = policy.act(obs[:1], greedy=True)[0, 0].cpu().double()
    torch.testing.assert_close(greedy, low + width * alphas / (alphas + betas), rtol=0, atol=1e-6)
    assert mean_draws(policy.network.actor.bias, "beta").cpu().tolist() == pytest.approx(
        (alphas / (alphas + betas)).tolist()
    )


def test_a_network_of_ones_own_has_all_parameters_as_outputs(device):
    env = gpu_vecenv.make("pendulum", 8, device, autoreset_mode="next_step")

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, obs):
            outputs = self.linear(obs)
            return outputs[..., :2], outputs[..., 2]

    config = PPOConfig(squash="beta", num_steps=8, num_minibatches=2)
    trainer = Trainer(env, config, policies={"agent": Own()})
    before = trainer.policies["agent"].network.linear.weight.detach().clone()
    trainer.train_iteration()
    assert not trainer.policies["agent"].network.linear.weight.equal(before)
    assert trainer.rollout.draws.gt(0).all() and trainer.rollout.draws.lt(1).all()


def test_a_policy_of_a_checkpoint_plays_and_is_recorded(device, tmp_path):
    env = gpu_vecenv.make("pendulum", 8, device, autoreset_mode="next_step", max_steps=20)
    trainer = Trainer(env, PPOConfig(squash="beta", num_steps=8, num_minibatches=2, hidden_sizes=(8,)), seed=1)
    trainer.train_iteration()
    loaded = load_policy(trainer.save(tmp_path / "policy.safetensors"), device=device)
    own, other = trainer.policies["agent"], loaded.policies["agent"]
    assert other.squash == "beta"
    for greedy in (False, True):
        results = [evaluate(env, {"agent": policy}, 8, greedy=greedy) for policy in (own, other)]
        assert results[0] == results[1]
    assert rollout(env, {"agent": other})["actions"].max() <= 2


def test_a_gaussian_policy_has_other_weights():
    env = gpu_vecenv.make("pendulum", 2, "cpu")
    gaussian = policy_of(env, "agent")
    assert gaussian.network.log_std is not None and gaussian.network.actor.out_features == 1


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_learned(seed, device):
    """Torques of zero, and random ones, get about -1200; a swing to the top and a hold of it at least -400."""
    env = gpu_vecenv.make("pendulum", 64, device, autoreset_mode="next_step")
    settings = {"num_steps": 64, "num_epochs": 6, "num_minibatches": 8, "learning_rate": 3e-3, "gamma": 0.9}
    settings |= {"entropy_coefficient": 0.0, "normalize_returns": True, "hidden_sizes": (32, 32)}
    trainer = Trainer(env, PPOConfig(total_steps=64 * 64 * 60, squash="beta", **settings), seed=seed)
    assert trainer.evaluate(100)["return_agent"] < -1000
    trainer.train()
    # Of these three seeds -246 to -257, and -230 to -247.
    assert trainer.evaluate(100)["return_agent"] > -400 and trainer.evaluate(100, greedy=True)["return_agent"] > -400
