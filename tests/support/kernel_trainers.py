"""The same training by the default network's kernels and by torch."""

import contextlib
from typing import NamedTuple

import pytest
import torch

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.policy_kernels import Choice
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer
from support.bitwise import equal_bits


@contextlib.contextmanager
def products_in(precision):
    """torch's products and convolutions have a precision, as while a trainer computes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


class Run(NamedTuple):
    """A game, how it is trained, and who shares a policy."""

    game: object
    config: dict
    arguments: dict = {}  # noqa: RUF012
    sharing: str = "role"


class Trainers:
    """Makes trainers whose networks are computed by kernels of an emulated backend, or by torch on the same host.

    Args:
        monkeypatch: The fixture.
        backend: Makes the backend.
        num_envs: Environments of a trainer.
        config: Of PPO, where a run has no other.
    """

    def __init__(self, monkeypatch, backend, num_envs, **config):
        self._monkeypatch, self._backend, self._num_envs, self._config = monkeypatch, backend, num_envs, config
        kernel_on(torch.device("cpu"))

    def __call__(self, run, *, kernels, seed=3):
        with self._monkeypatch.context() as patch:
            if kernels:
                patch.setattr(function_manager, "select", lambda device, driver=None: self._backend())
            else:
                by_torch = Choice(None, *2 * ["to compare"])
                patch.setattr(gpu_vecenv.train.trainer, "choose_kernels", lambda *_: by_torch)
            env = gpu_vecenv.make(run.game, self._num_envs, "cpu", autoreset_mode="next_step", **run.arguments)
            config = {**self._config, "num_minibatches": 2, "hidden_sizes": (24, 16), **run.config}
            trainer = Trainer(env, PPOConfig(total_steps=10**6, **config), seed=seed, sharing=run.sharing)
        assert all((reason is None) == kernels for reason in trainer.torch_reasons.values())
        assert trainer.by_kernels == kernels
        return trainer


def weights(trainer):
    return [p.detach().clone() for policy in trainer.policies.values() for p in policy.parameters()]


def largest_difference(one, other):
    """Of lists of weights."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def state_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state()[0].items()}


# After 12 steps of Adam, at least 3 of them not skipped. A rounding of 2^-20 of a gradient changes a step of size 3e-4
# or 3e-3 by as much, but where the gradient is about eps = 1e-5 of the largest: there by about 2^-20 / 1e-5 = 10%.
def tolerance(run):
    return 0.1 * run.config.get("learning_rate", 3e-4)


def check_training(trainer_of, run, iterations):
    """Kernels train what torch trains. Returns how far the weights moved, and the kernels' last metrics."""
    by_torch, by_kernels = (trainer_of(run, kernels=kernels) for kernels in (False, True))
    before = weights(by_kernels)
    for _ in range(iterations):
        expected, found = by_torch.train_iteration(), by_kernels.train_iteration()
        for role in by_torch.learners:
            for metric in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
                key = f"{metric}_{role}"
                # Of sums that cancel; and weights that are up to 10% of a step apart.
                assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
            for metric in ("clip_fraction", "skipped_fraction"):
                assert found[f"{metric}_{role}"] == expected[f"{metric}_{role}"]
    assert largest_difference(weights(by_torch), weights(by_kernels)) < tolerance(run)
    return largest_difference(weights(by_kernels), before), found


def check_resume(trainer_of, run, path):
    """A trainer that loads a checkpoint continues bit by bit."""
    trainer = trainer_of(run, kernels=True)
    trainer.train_iteration()
    saved = trainer.save(path)
    trainer.train_iteration()
    other = trainer_of(run, kernels=True)
    other.train_iteration()  # state of its own, which the checkpoint replaces
    other.train_iteration()
    other.load(saved)
    other.train_iteration()
    assert equal_bits(state_of(trainer), state_of(other))


def check_replaced_weights(trainer_of, run):
    """Weights that a caller replaces are those that act and learn, before the first iteration and after one."""
    trainer, other = (trainer_of(run, kernels=True) for _ in range(2))
    for _ in range(2):
        with torch.no_grad():
            for a, b in zip(trainer.policies["agent"].parameters(), other.policies["agent"].parameters(), strict=True):
                a += 0.1
                b.data = a.detach().clone()  # another tensor
        for each in (trainer, other):
            each.train_iteration()
        assert equal_bits(state_of(trainer), state_of(other))


def check_hooks(trainer_of, run):
    """A network that gets a hook is computed by torch."""
    trainers, calls = [trainer_of(run, kernels=kernels) for kernels in (False, True)], []
    for trainer in trainers:
        trainer.policies["agent"].network.critic.register_forward_hook(lambda *_: calls.append(1))
        trainer.train_iteration()
        assert calls
        calls.clear()
    assert equal_bits(*(state_of(trainer) for trainer in trainers))
