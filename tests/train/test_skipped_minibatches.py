"""Minibatches that come after the one at which ``target_kl`` ends an iteration's updates are not computed."""

import dataclasses

import pytest
import torch
from support.emulated_cuda import EmulatedCudaBackend

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.optimizer import sum_parts_launch

CONFIG = PPOConfig(
    total_steps=10**6,
    num_steps=8,
    num_epochs=4,
    num_minibatches=2,
    hidden_sizes=(8,),
    learning_rate=0.02,
    target_kl=0.002,
)
TIMES = "time_fraction", "_per_s"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["plain", pytest.param("emulated", marks=pytest.mark.slow)])
def trainer_of(request, monkeypatch, device):
    """A function of options of the configuration; also with the kernels of a GPU, emulated on the CPU."""
    if request.param == "emulated":
        if device != "cpu":
            pytest.skip("emulated on the CPU")
        kernel_on(torch.device("cpu"))  # which other tests share, compiled for the host
        monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())

    def make(**changes):
        env = gpu_vecenv.make("cartpole", 8, device, autoreset_mode="next_step", max_steps=30)
        trainer = Trainer(env, dataclasses.replace(CONFIG, **changes), seed=3)
        assert trainer.learners["agent"].uses_kernels
        return trainer

    return make


def test_their_gradients_and_sums_are_not_computed(trainer_of):
    trainer = trainer_of()
    trainer.train_iteration()
    (learner,), (kernels,) = trainer.learners.values(), trainer.kernels.values()
    rows = len(learner.indices) // 2
    launch, parts = kernels.gradients(rows, learner.loss_settings)
    arguments = {"indices": learner.order[:rows], "moments": learner.moments[0]}
    parts.fill_(float("nan"))
    learner.flat_grad_and_metrics.fill_(7)
    learner.skip_update.fill_(1)
    launch(**arguments)
    learner._gradient(**arguments)
    assert parts.isnan().all() and learner.flat_grad_and_metrics.eq(7).all()
    learner.skip_update.fill_(0)
    launch(**arguments)
    learner._gradient(**arguments)
    assert not parts.isnan().any() and not learner.flat_grad_and_metrics.eq(7).any()


def test_weights_and_metrics_are_those_of_a_trainer_that_computes_them(trainer_of):
    trainer, twin = trainer_of(), trainer_of()
    for learner, kernels in zip(twin.learners.values(), twin.kernels.values(), strict=True):
        settings = dataclasses.replace(learner.loss_settings, skip_update=None)
        learner._gradients, parts = kernels.gradients(len(learner.indices) // 2, settings)
        flat = learner.flat_grad_and_metrics
        given = {"trainable": learner._is_trainable, "out": flat, "num_squared": len(learner.flat_grad)}
        learner._sum_parts = sum_parts_launch(twin.env.functions, parts, **given, squares=learner._squares)
    skipped = 0
    for _ in range(4):
        metrics, expected = trainer.train_iteration(), twin.train_iteration()
        names = [name for name in metrics if not any(part in name for part in TIMES)]
        assert str([metrics[name] for name in names]) == str([expected[name] for name in names])
        skipped += 0 < metrics["skipped_fraction_agent"] < 0.8  # several of them, and not all
        assert all(x.equal(y) for x, y in zip(trainer.state()[0].values(), twin.state()[0].values(), strict=True))
    assert skipped > 1


def test_an_iteration_after_one_that_was_cut_short_computes_again(trainer_of):
    trainer = trainer_of()
    found = [trainer.train_iteration() for _ in range(3)]
    assert all(0 < metrics["skipped_fraction_agent"] < 1 for metrics in found)
    assert len({metrics["policy_loss_agent"] for metrics in found}) == 3


def test_means_are_over_the_minibatches_that_were_computed(trainer_of):
    """Of an iteration that ends at the second: those of an iteration with two."""
    stopped, whole = trainer_of(num_epochs=4, target_kl=1e-12), trainer_of(num_epochs=1, target_kl=None)
    metrics, expected = stopped.train_iteration(), whole.train_iteration()
    assert metrics["skipped_fraction_agent"] == 7 / 8 and expected["skipped_fraction_agent"] == 0
    names = ["policy_loss_agent", "value_loss_agent", "entropy_agent", "approx_kl_agent", "grad_norm_agent"]
    assert [metrics[name] for name in names] == [expected[name] for name in names]
