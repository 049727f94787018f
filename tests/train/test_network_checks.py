"""Networks whose output for a row depends on more than the row: found before they are trained; others never refused."""

import pytest
import torch
from games.crew import Crew
from games.scouts import Scouts
from support.training import SMALL, leaving
from torch import nn

import gpu_vecenv
from gpu_vecenv import PolicySpec, Trainer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.ppo import PPOConfig

CARTPOLE = {"max_steps": 13}
GRID = {"grid": 4, "max_steps": 11}  # every episode begins alike


class Network(nn.Module):
    """A layer of 8 units, what a test puts between, and heads for a game with 2 actions."""

    def __init__(self, between=None, actions=2):
        super().__init__()
        self.first, self.between = nn.LazyLinear(8), between
        self.actor, self.critic = nn.Linear(8, actions), nn.Linear(8, 1)

    def features(self, x):
        return self.between(x)

    def forward(self, obs):
        x = self.features(self.first(obs))
        return self.actor(x), self.critic(x).squeeze(-1)


class TimeFirst(Network):
    """The default of nn.LSTM: the first axis is time."""

    def features(self, x):
        return self.between(x)[0]


class OneTimeStep(Network):
    def features(self, x):
        return self.between(x.flatten(0, -2)[None])[0].view_as(x)


class OverRows(Network):
    """For modules that take one leading axis."""

    def features(self, x):
        return self.between(x.flatten(0, -2)).view_as(x)


class AttentionOverRows(Network):
    def features(self, x):
        rows = x.flatten(0, -2)[None]
        return self.between(rows, rows, rows)[0].view_as(x)


class AttentionOverUnits(Network):
    """Attention within each row."""

    def features(self, x):
        units = x.reshape(-1, 4, 2)
        return self.between(units, units, units)[0].reshape(x.shape)


class OverAgents(Network):
    """Adds a mean over the agents of an environment, which only rollouts have on an axis of their own."""

    def features(self, x):
        return x + x.mean(1, keepdim=True) if x.ndim == 3 else x


class CountsRows(Network):
    def features(self, x):
        return x * x[..., 0].numel()


class KeepsSome(Network):
    """Adds what it saw in its last call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("last", torch.zeros(8))

    def features(self, x):
        seen = self.last.clone()
        self.last.copy_(x.flatten(0, -2).mean(0))
        return x + seen


class Jumps(Network):
    """One row of a call is far from what it is elsewhere, as where rounding changes an argmax."""

    def features(self, x):
        return x + 10.0 * (torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1) == 5)


class NotFinite(Network):
    """Logits that exclude a choice, and values that are not numbers."""

    def features(self, x):
        return x

    def forward(self, obs):
        logits, values = super().forward(obs)
        return torch.where(logits > 0, logits, -torch.inf), torch.where(values > 0, values, torch.nan)


@pytest.fixture(autouse=True)
def initial_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def trainer(network, device, game="cartpole", num_envs=8, config=SMALL, **arguments):
    env = gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step", **arguments)
    return Trainer(env, config, policies={"+".join(env.game.layout.roles): network}, seed=1)


MIXING = {
    "time first": (lambda **k: TimeFirst(nn.LSTM(8, 8), **k), "gets the rows in another order"),
    "batch first, with rows as time": (
        lambda **k: TimeFirst(nn.GRU(8, 8, batch_first=True), **k),
        "gets the rows in another order",
    ),
    "batch normalisation": (lambda **k: OverRows(nn.BatchNorm1d(8), **k), "gets half of the rows"),
    "attention over rows": (
        lambda **k: AttentionOverRows(nn.MultiheadAttention(8, 2, batch_first=True), **k),
        "gets half of the rows",
    ),
    "their number": (CountsRows, "gets half of the rows"),
    "dropout": (lambda **k: Network(nn.Dropout(0.5), **k), "is called again"),
    "memory": (KeepsSome, "is called again"),
}
RIGHT = {
    "one time step": lambda: OneTimeStep(nn.LSTM(8, 8)),
    "running statistics": lambda: OverRows(nn.BatchNorm1d(8).eval()),
    "normalised rows": lambda: OverRows(nn.LayerNorm(8)),
    "attention within rows": lambda: AttentionOverUnits(nn.MultiheadAttention(2, 1, batch_first=True)),
    "jumps": Jumps,
    "not finite": NotFinite,
    "the default": lambda: ActorCritic((4,), 2, (16,)),
    "zero": lambda: Network(nn.Threshold(torch.inf, 0.0)),
}


@pytest.mark.parametrize("kind", MIXING)
def test_a_network_that_mixes_rows_is_refused_when_the_trainer_is_made(kind, device):
    make, words = MIXING[kind]
    with pytest.raises(ConfigError, match=f"network of agent gives other outputs for a row when it {words}.*LayerNorm"):
        trainer(make(), device)


@pytest.mark.parametrize("kind", ["batch normalisation", "attention over rows"])
def test_where_all_episodes_begin_alike_it_is_refused_before_the_first_update(kind, device):
    network = MIXING[kind][0](actions=5)
    config = PPOConfig(num_steps=8, num_minibatches=4, staggered_starts=False)
    own = trainer(network, device, "tag_gridworld", num_envs=64, config=config, num_taggers=1, **GRID)
    before = {
        name: x.clone() for name, x in network.state_dict().items() if "running" not in name and "num_" not in name
    }
    for _ in range(2):  # refused again, not forgotten
        with pytest.raises(ConfigError, match=r"network of tagger\+runner .* gets half of the rows"):
            own.train_iteration()
    assert all(network.state_dict()[name].equal(x) for name, x in before.items()) and own.iteration == 0


def test_what_mixes_the_agents_of_an_environment_is_refused(device):
    with pytest.raises(ConfigError, match="gets the rows along two leading axes"):
        trainer(OverAgents(actions=5), device, "tag_gridworld", **GRID)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", RIGHT)
def test_networks_whose_rows_are_independent_are_trained(kind, precision, device):
    config = PPOConfig(num_steps=8, num_minibatches=4, precision=precision)
    own = trainer(RIGHT[kind](), device, config=config, **CARTPOLE)
    own.begin_iteration()
    assert own._networks_checked


@pytest.mark.parametrize("game", [Crew, Scouts, "tag_continuous", "pendulum"])
def test_default_networks_of_all_kinds_of_games_are_trained(game, device):
    """Action masks, observations of several shapes and of uint8, several heads and roles, a Box."""
    env = leaving(device, 1) if game == "tag_continuous" else gpu_vecenv.make(game, 1, device)
    own = Trainer(env, SMALL, seed=1)
    own.train_iteration()
    assert own.iteration == 1


def test_what_is_checked_does_not_change(device):
    """A frozen policy may draw and keep what it likes: it is not trained. Neither is touched before the first step."""
    network = nn.Sequential(OverRows(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))))
    network(torch.zeros(2, 4))
    before = {name: x.clone() for name, x in network.state_dict().items()}
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    trainer(PolicySpec(network=network, train=False), device, **CARTPOLE)
    assert state[0].equal(torch.get_rng_state())
    assert device == "cpu" or state[1].equal(torch.cuda.get_rng_state())
    assert all(network.state_dict()[name].equal(x.to(device)) for name, x in before.items())
    refused = OverRows(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    refused(torch.zeros(2, 4))
    before = {name: x.clone() for name, x in refused.state_dict().items()}
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    with pytest.raises(ConfigError, match="is called again"):
        trainer(refused, device, **CARTPOLE)
    assert state[0].equal(torch.get_rng_state())
    assert device == "cpu" or state[1].equal(torch.cuda.get_rng_state())
    assert all(refused.state_dict()[name].equal(x.to(device)) for name, x in before.items())
