"""A learning rate that follows the KL divergence, on the device: its rule in all kernels, logs, resumed runs."""

import dataclasses
import itertools

import pytest
import torch
from support.bitwise import equal_bits
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.learner_kernels import clip_grad_norm_launch
from gpu_vecenv.train.optimizer import adam_launch, adam_launch_by_addresses
from gpu_vecenv.train.ppo import adapted_rate

RULE = PPOConfig(desired_kl=0.01, least_learning_rate=1e-4, most_learning_rate=1e-3)
DIVERGENCES = [0.0, -1e-9, 1e-9, 0.004, 0.00501, 0.01, 0.0199, 0.021, 5.0, float("nan")]
KERNELS = ["clip_grad_norm", "adam_step", "adam_step_by_addresses"]
FOLLOWS = {"desired_kl": 0.01, "rate_limits": (1e-4, 1e-3)}


def step_of(functions, kernel, rate, kl, rule, skip_update=0.0):
    """A step with gradient 1 of a parameter that was 0: the rate, and the parameter."""
    device = functions.device
    tensors = {
        "metrics": torch.tensor([0.0, 0.0, 0.0, kl, 0.0], device=device),
        "metric_sums": torch.zeros(7, device=device),
        "skip_update": torch.tensor(skip_update, device=device),
        "learning_rate": torch.tensor(rate, device=device),
    }
    settings = {**tensors, **rule, "max_grad_norm": 2.0, "target_kl": None, "kl_index": 3}
    parameter, gradient = torch.zeros(1, device=device), torch.ones(1, device=device)
    if kernel == "clip_grad_norm":
        metrics = settings.pop("metrics")
        clip_grad_norm_launch(functions, torch.ones((), device=device), metrics, gradient, **settings)()
        return tensors["learning_rate"].item(), None
    moments = torch.zeros((2, 1), device=device)
    state = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "steps": torch.zeros(1, device=device)}
    settings |= {"gradient": gradient, "squares": torch.ones(1, dtype=torch.float64, device=device)}
    if kernel == "adam_step":
        adam_launch(functions, parameters=parameter, **state, **settings)()
    else:
        addresses = torch.tensor([[x.data_ptr() for x in (parameter, *state.values())]], device=device)
        adam_launch_by_addresses(functions, addresses, [1], **settings)()
    return tensors["learning_rate"].item(), parameter.item()


def check_rule(functions, kernel):
    for rate, kl in itertools.product([1e-4, 1.2e-4, 4e-4, 8e-4, 1e-3], DIVERGENCES):
        found, parameter = step_of(functions, kernel, rate, kl, FOLLOWS)
        assert found == pytest.approx(adapted_rate(rate, kl, RULE), rel=2e-7)
        if parameter is not None and kl == kl:  # the first step of Adam is as long as the rate; NaN takes none
            assert parameter == pytest.approx(-found, rel=1e-4)
        assert step_of(functions, kernel, rate, kl, FOLLOWS, skip_update=1.0)[0] == pytest.approx(rate, rel=1e-7)
        assert step_of(functions, kernel, rate, kl, {})[0] == pytest.approx(rate, rel=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_rate_of_a_step_follows_its_divergence(kernel, functions):
    check_rule(functions, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_emulated_cuda_threads_follow_it_too(kernel, emulated):
    check_rule(emulated, kernel)


CONFIG = dataclasses.replace(SMALL, desired_kl=0.005, learning_rate=1e-3)


def check_run(env, config):
    """From step to step, and in the log."""
    trainer = Trainer(env, config, seed=3)
    (name, learner), *_ = trainer.learners.items()
    rate, rates = config.learning_rate, []
    for _ in range(3):
        trainer.begin_iteration()
        learner.prepare_update(trainer.iteration)
        for k in range(learner.num_updates):
            learner.minibatch_gradient(k)
            rate = adapted_rate(rate, learner.metrics[3].item(), config)
            learner.optimizer_step()
            assert learner.learning_rate.item() == pytest.approx(rate, rel=1e-6)
        rates.append(rate)
        assert trainer.end_iteration()[f"learning_rate_{name}"] == pytest.approx(rate, rel=1e-6)
    assert len(set(rates)) > 1
    return trainer


def test_a_run_follows_it(device):
    check_run(leaving(device), CONFIG)


def test_a_run_by_the_networks_kernels_follows_it(device_of_networks):
    env = gpu_vecenv.make("cartpole", 6, device_of_networks, autoreset_mode="next_step")
    trainer = check_run(env, dataclasses.replace(CONFIG, staggered_starts=False))
    assert all(learner.uses_kernels for learner in trainer.learners.values())


def test_a_run_resumes_bit_identically(device, tmp_path):
    whole, first, second = (Trainer(leaving(device), CONFIG, seed=5) for _ in range(3))
    first.train_iteration()
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    for trainer, iterations in ((second, 2), (whole, 3)):
        for _ in range(iterations):
            metrics = trainer.train_iteration()
    assert equal_bits(whole.state()[0], second.state()[0])
    assert metrics["learning_rate_tagger"] != CONFIG.learning_rate


def test_limits_in_the_wrong_order():
    with pytest.raises(ConfigError, match="expected the former not to be larger"):
        PPOConfig(least_learning_rate=1e-2, most_learning_rate=1e-3)


@pytest.mark.parametrize("rate", [9e-6, 2e-2])
def test_a_rate_outside_its_limits(rate):
    PPOConfig(learning_rate=rate)  # a schedule has no limits
    with pytest.raises(ConfigError, match=f"learning_rate is {rate} with desired_kl; expected one of .*1e-05, to"):
        PPOConfig(learning_rate=rate, desired_kl=0.01)
