"""Optimizers other than Adam: steps are torch's, skipped ones and frozen weights change nothing, runs resume."""

import copy
import dataclasses

import pytest
import torch
from support.bitwise import equal_bits
from support.training import SMALL, leaving
from torch import nn

import gpu_vecenv
from gpu_vecenv import PolicySpec, PPOConfig, Trainer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.policy_kernels import Choice
from gpu_vecenv.train.run import computed_by

OPTIONS = {
    "adam": {},
    "adamw": {"weight_decay": 0.1},
    "radam": {},
    "rmsprop": {},
    "rmsprop, momentum": {"momentum": 0.8},
    "sgd": {},
    "sgd, momentum": {"momentum": 0.9},
}
NAN = float("nan")


def config_of(name, **changes):
    changes = {"learning_rate": 0.01, "final_learning_rate": None, **OPTIONS[name], **changes}
    return dataclasses.replace(SMALL, optimizer=name.split(",")[0], **changes)


def trainer_of(name, device, seed=3, **changes):
    return Trainer(leaving(device), config_of(name, **changes), seed=seed)


def learner_of(name, device, **changes):
    """A learner in an iteration, and its trainer."""
    trainer = trainer_of(name, device, **changes)
    trainer.begin_iteration()
    learner = trainer.learners["tagger"]
    learner.prepare_update(trainer.iteration)
    learner.begin_update()
    return learner, trainer


def step(learner, gradient, metrics=0.0):
    learner.flat_grad.copy_(gradient)
    learner.metrics.fill_(metrics)
    if learner.uses_kernels and learner._adam is not None:
        learner._sum_squares()  # of which the kernel of Adam computes the norm
    learner.optimizer_step()


def state_of(learner):
    return [x.detach().clone() for x in (*learner.parameters, *learner.optimizer_state().values())]


def by_torch(name, parameters):
    """torch's optimizer without fused kernels or tensors as rates."""
    rate, eps = {"lr": 0.01}, {"eps": 1e-5}
    kinds = {
        "adam": lambda p: torch.optim.Adam(p, **rate, **eps),
        "adamw": lambda p: torch.optim.AdamW(p, **rate, **eps, weight_decay=0.1),
        "radam": lambda p: torch.optim.RAdam(p, **rate, **eps),
        "rmsprop": lambda p: torch.optim.RMSprop(p, **rate, **eps),
        "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, **rate, **eps, momentum=0.8),
        "sgd": lambda p: torch.optim.SGD(p, **rate),
        "sgd, momentum": lambda p: torch.optim.SGD(p, **rate, momentum=0.9),
    }
    return kinds[name](parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_torchs_optimizer(name, device):
    learner, _ = learner_of(name, device, max_grad_norm=1e6)
    twins = [p.detach().clone().double().requires_grad_() for p in learner.parameters]
    optimizer, random = by_torch(name, twins), torch.Generator().manual_seed(1)
    for _ in range(8):  # the fifth step of RAdam is its first with second moments
        gradient = torch.randn(len(learner.flat_grad), generator=random).to(device)
        sizes = [p.numel() for p in twins]
        for p, part in zip(twins, gradient.double().split(sizes), strict=True):
            p.grad = part.view_as(p)
        before = [p.detach().clone() for p in learner.parameters]
        step(learner, gradient)
        optimizer.step()
        for p, twin, old in zip(learner.parameters, twins, before, strict=True):
            # A few roundings of float32 in each step, of weights up to 3.
            torch.testing.assert_close(p.double(), twin, rtol=1e-5, atol=1e-5)
            assert not p.equal(old)


@pytest.mark.parametrize("reason", ["a loss", "a gradient", "target_kl"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_skipped_update_changes_nothing(name, reason, device):
    learner, _ = learner_of(name, device, target_kl=0.5)
    ones = torch.ones_like(learner.flat_grad)
    step(learner, ones)
    before = state_of(learner)
    nans = ones.clone()
    nans[3] = NAN
    metrics = {"a loss": NAN, "a gradient": 0.0, "target_kl": 0.6}[reason]
    step(learner, nans if reason == "a gradient" else ones, metrics)
    step(learner, ones)  # so are the later ones of the iteration
    assert equal_bits(before, state_of(learner))
    learner.begin_update()
    step(learner, ones)
    assert all(not p.equal(old) for p, old in zip(learner.parameters, before, strict=False))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "adam"])
def test_weights_that_a_caller_freezes_neither_decay_nor_move_on(name, device):
    learner, trainer = learner_of(name, device)
    ones = torch.ones_like(learner.flat_grad)
    step(learner, ones)
    learner.parameters[1].requires_grad_(False)
    learner.prepare_update(trainer.iteration)
    before = [p.detach().clone() for p in learner.parameters]
    step(learner, ones)
    same = [p.equal(old) for p, old in zip(learner.parameters, before, strict=True)]
    assert same == [k == 1 for k in range(len(before))]
    learner.parameters[1].requires_grad_(True)
    learner.prepare_update(trainer.iteration)
    step(learner, ones)
    assert not learner.parameters[1].equal(before[1])


class Transposed(nn.Module):
    """Of cartpole, with a weight that is transposed in memory, or with a contiguous copy of it."""

    def __init__(self, contiguous):
        super().__init__()
        torch.manual_seed(5)
        weight = 0.5 * torch.randn(8, 4).T
        self.weight = nn.Parameter(weight.contiguous() if contiguous else weight)
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, obs):
        hidden = (obs @ self.weight).tanh()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_that_are_transposed_in_memory_are_trained_alike(name, device):
    found = []
    for contiguous in (False, True):
        env = gpu_vecenv.make("cartpole", 8, device)
        network = Transposed(contiguous)
        trainer = Trainer(env, config_of(name), policies={"agent": PolicySpec(network=network)})
        before = network.weight.detach().cpu().clone()
        trainer.train_iteration()
        found.append([p.detach() for p in network.parameters()])
        assert not network.weight.cpu().equal(before)
    assert equal_bits(*found)


def transposed_trainer(name, device):
    env = gpu_vecenv.make("cartpole", 8, device)
    return Trainer(env, config_of(name), policies={"agent": PolicySpec(network=Transposed(True))})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["adam", "radam", "rmsprop, momentum"])
def test_tensors_that_a_caller_replaces_are_those_that_steps_change(name, transposed, device):
    """Of a network whose gradients torch computes: weights, and the optimizer's state. CUDA graphs see them too."""
    trainer, other = (transposed_trainer(name, device) for _ in range(2))
    for each in (trainer, other):
        each.train_iteration()
    learner, changed = trainer.learners["agent"], other.learners["agent"]
    weight = other.policies["agent"].network.weight
    before = weight.detach().clone()
    changed.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    weight.data = weight.detach().T.contiguous().T if transposed else weight.detach().clone()
    if transposed:
        state = changed.optimizer.state[weight]
        first = min(name for name, tensor in state.items() if tensor.shape == weight.shape)
        state[first] = state[first].T.contiguous().T
    for _ in range(2):
        for each in (trainer, other):
            each.train_iteration()
        assert equal_bits(state_of(learner), state_of(changed))
    assert not equal_bits([before], [weight])


def test_gradients_of_weights_that_a_caller_freezes_count_in_no_norm(device):
    """Also where a graph that was captured before still computes them."""
    trainer = transposed_trainer("adam", device)
    trainer.begin_iteration()
    (learner,) = trainer.learners.values()
    assert not learner.uses_kernels
    learner.parameters[1].requires_grad_(False)
    learner.prepare_update(trainer.iteration)
    learner.begin_update()
    before = [p.detach().clone() for p in learner.parameters]
    step(learner, torch.ones_like(learner.flat_grad))
    same = [p.equal(old) for p, old in zip(learner.parameters, before, strict=True)]
    assert same == [k == 1 for k in range(len(before))]
    learns = len(learner.flat_grad) - before[1].numel()
    assert learner.metric_sums[-2].item() == pytest.approx(learns**0.5, rel=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_resumes_bit_identically(name, device, tmp_path):
    whole, first, second = (trainer_of(name, device, desired_kl=0.01) for _ in range(3))
    second.train_iteration()  # state of its own, which the checkpoint replaces
    for _ in range(2):
        first.train_iteration()
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    for trainer, iterations in ((second, 2), (whole, 4)):
        for _ in range(iterations):
            metrics = trainer.train_iteration()
    assert equal_bits(whole.state()[0], second.state()[0])
    assert metrics["skipped_fraction_tagger"] == 0


def test_runs_of_other_optimizers_are_not_resumed(device, tmp_path):
    path = trainer_of("sgd", device).save(tmp_path / "run.safetensors")
    with pytest.raises(ConfigError, match=r"config\.optimizer is 'sgd', this trainer's 'rmsprop'"):
        trainer_of("rmsprop", device).load(path)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_networks_kernels_train_what_those_of_torch_do(name, device_of_networks, monkeypatch):
    """After 16 steps; the weights of both differ by roundings of gradients alone."""
    config, trainers = config_of(name, num_minibatches=2, learning_rate=1e-3), []
    for kernels in (True, False):
        with monkeypatch.context() as patch:
            if not kernels:
                chosen = Choice(None, *2 * ["to compare"])
                patch.setattr(gpu_vecenv.train.trainer, "choose_kernels", lambda *_, chosen=chosen: chosen)
            env = gpu_vecenv.make("pendulum", 20, device_of_networks, autoreset_mode="next_step")
            trainers.append(Trainer(env, config, seed=1))
        assert trainers[-1].by_kernels == kernels
    before = [p.detach().clone() for p in trainers[0].policies["agent"].parameters()]
    for trainer in trainers:
        for _ in range(4):
            trainer.train_iteration()
    one, other = (list(trainer.policies["agent"].parameters()) for trainer in trainers)
    moved = max((a - b).abs().max() for a, b in zip(one, before, strict=True))
    # As in kernel_trainers.tolerance.
    assert max((a - b).abs().max() for a, b in zip(one, other, strict=True)) < max(0.1 * 1e-3, 0.01 * moved)
    text = computed_by(trainers[0], "agent")
    assert (f"steps by torch (optimizer {config.optimizer!r})" in text) == (name not in ("adam", "radam"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adagrad"}, "optimizer is 'adagrad' .*; expected 'adam' or"),
        ({"optimizer": torch.optim.SGD}, "optimizer is"),
        (
            {"weight_decay": 0.1},
            "weight_decay is 0.1 with optimizer 'adam', which has none; expected None, or optimizer",
        ),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum is 0.9 with optimizer 'adamw', which has none"),
        ({"optimizer": "sgd", "momentum": 1.5}, "momentum is 1.5"),
        ({"optimizer": "adamw", "weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**options)
