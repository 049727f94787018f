"""Memory of training: the estimate is what is allocated, for every kind of policy; what does not fit is refused."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from games import race
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from support.cases import mostly_exhaustive
from support.training import SMALL, leaving
from torch import nn

import gpu_vecenv
from gpu_vecenv.engine.sampler import Sample
from gpu_vecenv.errors import CapacityError
from gpu_vecenv.train.capacity import bytes_per_env, max_num_envs_that_fit, stored_specs
from gpu_vecenv.train.policy_specs import PolicySpec, resolve_specs
from gpu_vecenv.train.trainer import Trainer

NUM_ENVS = 12


class Declared(Race):
    """Its central critics see more than the observations."""

    source = Path(race.__file__).with_suffix(".cu")
    critic_state = ("total", "player")


class Memory(nn.Module):
    """A recurrent network of a user's."""

    recurrent_state_size = 5

    def __init__(self):
        super().__init__()
        self.cell, self.actor, self.critic = nn.GRUCell(4, 5), nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, obs, state):
        state = self.cell(obs, state)
        return self.actor(state), self.critic(state).squeeze(-1), state


class Actor(Memory):
    """The same beside a central critic."""

    def forward(self, obs, state):
        parameters, _, state = super().forward(obs, state)
        return parameters, state


def changed(**values):
    return dataclasses.replace(SMALL, **values)


GRU, LSTM = changed(network="gru", hidden_sizes=(6, 7)), changed(network="lstm", sequence_length=2)
SETUPS = {  # game, configuration, policies
    "roles": (Crew, SMALL, None),
    "box": ("pendulum", SMALL, None),
    "box beside choices": (Economy, SMALL, None),
    "bytes": (Painter, SMALL, None),
    "turns": (Race, SMALL, None),
    "team": (Sacrifice, SMALL, None),
    "central, of observations": (Race, changed(critic="central"), None),
    "central, of a state": (Declared, changed(critic="central"), None),
    "a state that no critic sees": (Declared, SMALL, None),
    "gru": ("cartpole", GRU, None),
    "lstm, masks": (Crew, LSTM, None),
    "sequences of one role": (Crew, SMALL, {"driver": PolicySpec(config=LSTM), "helper": PolicySpec()}),
    "a frozen one, in whole": (Crew, LSTM, {"driver": PolicySpec(), "helper": PolicySpec(train=False)}),
    "a policy of two roles": ("tag_gridworld", GRU, {"tagger+runner": PolicySpec()}),
    "gru, central": (Race, changed(network="gru", critic="central"), None),
    "a network of ones own beside a critic with memory": (
        "cartpole",
        changed(network="gru", critic="central"),
        {"agent": Actor()},
    ),
    "a network of ones own": ("cartpole", SMALL, {"agent": Memory()}),
}


def storages(value):
    """The memory of all tensors in an object, by address."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    value = vars(value) if isinstance(value, Sample) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {address: size for part in parts for address, size in storages(part).items()}


@pytest.mark.parametrize(
    ("setup", "mode"),  # the trainer steps an environment of next_step, whatever that of its arguments does
    mostly_exhaustive(
        itertools.product(SETUPS, ("next_step", "same_step")),
        [*((setup, "next_step") for setup in SETUPS), ("roles", "same_step"), ("lstm, masks", "same_step")],
    ),
)
def test_the_estimate_is_what_a_trainer_stores(setup, mode, device):
    game, config, policies = SETUPS[setup]
    env = gpu_vecenv.make(game, NUM_ENVS, device, autoreset_mode=mode)
    specs = resolve_specs(env.game, config, policies)
    estimated = {n: math.prod(s) * dtype.itemsize for n, (s, dtype) in stored_specs(env, config, specs).items()}
    trainer = Trainer(env, config, policies=policies)
    states = [vars(one) for one in trainer.states.values()]
    found = storages([vars(trainer.rollout), states, trainer._parameters])
    assert sum(estimated.values()) == sum(found.values())
    assert bytes_per_env(env, config, specs) == 2 * sum(estimated.values()) / NUM_ENVS
    assert any("current" in name for name in estimated) == bool(trainer.states)


def test_the_estimate_grows_with_states_and_their_number():
    env = gpu_vecenv.make("cartpole", 4, "cpu")
    sizes = []
    for config in (SMALL, GRU, changed(network="lstm", hidden_sizes=(6, 7)), LSTM):
        sizes.append(bytes_per_env(env, config, resolve_specs(env.game, config, None)))
    # 4 bytes, twice; before the next step, and where sequences begin: GRU 2 x 7 numbers, LSTM 4 x 7 and 4 x 16.
    assert [size - sizes[0] for size in sizes] == [0, 8 * 2 * 14, 8 * 2 * 28, 8 * (1 + 4) * 64]


def test_a_rollout_too_large_for_memory_is_refused_with_bytes_and_a_size_that_fits(device):
    env, config = leaving(device), changed(num_steps=10**8)
    with pytest.raises(CapacityError) as caught:
        Trainer(env, config)
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", str(caught.value))]
    each = bytes_per_env(env, config, resolve_specs(env.game, config, None))
    assert numbers[:3] == [10**8, 6, 6 * each] and numbers[-1] == numbers[3] // each < 6


def test_recurrent_states_too_large_for_memory_are_refused(device):
    """In a rollout that would fit without them."""
    config = changed(network="gru", hidden_sizes=(2**36,))
    with pytest.raises(CapacityError, match=r"a rollout of 8 steps x 4 environments needs about [\d,]+ bytes"):
        Trainer(gpu_vecenv.make("cartpole", 4, device), config)


def test_automatic_num_envs_is_the_default_or_what_fits(device):
    def make(num_envs):
        return leaving(device, num_envs)

    def fitting(wanted, config=SMALL):
        return max_num_envs_that_fit(make, config, resolve_specs(make(1).game, config, None), wanted)

    assert fitting(10) == 10
    most = fitting(10**12)
    assert 10 < most < 10**12
    assert 2 < fitting(10**12, changed(network="lstm", hidden_sizes=(4096,))) < most / 10
    config = changed(num_steps=10**12)
    with pytest.raises(CapacityError, match=r"one environment needs about [\d,]+ bytes; [\d,]+ are free"):
        fitting(10, config)
    with pytest.raises(CapacityError):  # what was called too large would be
        Trainer(make(1), config)
