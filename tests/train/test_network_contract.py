"""The contract of a network: modules that fulfil it are trained; the others are refused, and the error says why."""

import pytest
import torch
from support.bitwise import equal_bits
from support.training import SMALL
from torch import nn

import gpu_vecenv
from gpu_vecenv import PolicySpec, Trainer
from gpu_vecenv.errors import ConfigError

UNITS = 8


class Network(nn.Module):
    """For CartPole: 4 numbers, 2 choices."""

    def __init__(self):
        super().__init__()
        self.layer, self.actor, self.critic = nn.Linear(4, UNITS), nn.Linear(UNITS, 2), nn.Linear(UNITS, 1)

    def forward(self, obs):
        x = self.layer(obs).tanh()
        return self.actor(x), self.critic(x).squeeze(-1)


class Heads(nn.Module):
    recurrent_state_size = UNITS

    def __init__(self, units=UNITS):
        super().__init__()
        self.actor, self.critic = nn.Linear(units, 2), nn.Linear(units, 1)


class Recurrent(Heads):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, UNITS)

    def forward(self, obs, state):
        state = self.cell(obs, state)
        return self.actor(state), self.critic(state).squeeze(-1), state


# What is trained


class PlainLSTM(Heads):
    """torch's LSTM of one time step; its two states lie side by side."""

    recurrent_state_size = 2 * UNITS

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, UNITS)

    def forward(self, obs, state):
        x, states = self.lstm(obs[None], tuple(part.contiguous() for part in state[None].chunk(2, -1)))
        return self.actor(x[0]), self.critic(x[0]).squeeze(-1), torch.cat(states, -1)[0]


class LastObservations(Heads):
    """A transformer over the last four observations: its state depends on no weight."""

    recurrent_state_size = 12

    def __init__(self):
        super().__init__(4)
        self.layer = nn.TransformerEncoderLayer(4, 2, UNITS, dropout=0, batch_first=True)

    def forward(self, obs, state):
        seen = torch.cat([state, obs], 1)
        x = self.layer(seen.unflatten(1, (4, 4)))[:, -1]
        return self.actor(x), self.critic(x).squeeze(-1), seen[:, 4:]


class LinearRecurrence(Heads):
    """Decays that do not depend on the observation."""

    def __init__(self):
        super().__init__()
        self.decay, self.layer = nn.Parameter(torch.linspace(-2, 2, UNITS)), nn.Linear(4, UNITS)

    def forward(self, obs, state):
        state = state * self.decay.sigmoid() + self.layer(obs)
        return self.actor(state), self.critic(state).squeeze(-1), state


class NoCritic(Network):
    """Values are 0 by intention: every weight is the actor's."""

    def __init__(self):
        super().__init__()
        del self.critic

    def forward(self, obs):
        return self.actor(self.layer(obs).tanh()), torch.zeros_like(obs[..., 0])


class ListOfOutputs(Network):
    def forward(self, obs):
        return list(super().forward(obs))


class TrainedElsewhere(Network):
    """A head that no output needs."""

    def __init__(self):
        super().__init__()
        self.elsewhere = nn.Linear(UNITS, 3)


class Lazy(Network):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(UNITS)


class NormalisedWeights(Network):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.layer)


TRAINED = {
    "a perceptron": Network,
    "a list of outputs": ListOfOutputs,
    "no critic": NoCritic,
    "a head for something else": TrainedElsewhere,
    "a lazy layer": Lazy,
    "normalised weights": NormalisedWeights,
    "TorchScript": lambda: torch.jit.script(Network()),
    "traced": lambda: torch.jit.trace(Network(), torch.zeros(3, 4)),
    "compiled": lambda: torch.compile(Network(), backend="eager"),
    "a cell": Recurrent,
    "an LSTM": PlainLSTM,
    "a window of observations": LastObservations,
    "a linear recurrence": LinearRecurrence,
}


@pytest.fixture(autouse=True)
def initial_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def trainer_of(network, device, num_envs=8, **options):
    env = gpu_vecenv.make("cartpole", num_envs, device, autoreset_mode="next_step", max_steps=9)
    return Trainer(env, SMALL, policies={"agent": network}, seed=1, **options)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "compiled")) for kind in TRAINED]
)
def test_any_module_that_fulfils_the_contract_is_trained(kind, device):
    network = TRAINED[kind]()
    trainer = trainer_of(network, device)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for _ in range(2):
        trainer.train_iteration()
    assert trainer.networks_checked
    unmoved = {name for name, p in network.named_parameters() if equal_bits([before[name]], [p.detach()])}
    assert unmoved == {name for name in before if name.startswith("elsewhere")}


# What is refused


class Changed(Network):
    """Its outputs changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, obs):
        return self.change(*super().forward(obs))


class ChangedState(Recurrent):
    """Its outputs changed by a function, which gets what went in too."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, obs, state):
        return self.change(*super().forward(obs, state))


class Writes(Network):
    def forward(self, obs):
        return super().forward(obs.mul_(0.5))


class WritesThroughAView(Network):
    def forward(self, obs):
        obs[..., 0] = 0
        return super().forward(obs)


class WritesState(Recurrent):
    def forward(self, obs, state):
        parameters, values, after = super().forward(obs, state)
        return parameters, values, state.copy_(after)


class WritesObservations(Recurrent):
    def forward(self, obs, state):
        return super().forward(obs.clamp_(-1, 1), state)


class NoGradients(Network):
    @torch.no_grad()
    def forward(self, obs):
        return super().forward(obs)


class InferenceMode(Network):
    @torch.inference_mode()
    def forward(self, obs):
        return super().forward(obs)


class Halves(Network):
    """The most likely choice, as an action."""

    def forward(self, obs):
        parameters, values = super().forward(obs)
        return nn.functional.one_hot(parameters.argmax(-1), 2), values


class PlainTensor(Network):
    """A tensor that ``to(device)`` does not move."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4, device="meta")

    def forward(self, obs):
        return super().forward(obs * self.scale)


class Noise(Network):
    def forward(self, obs):
        parameters, values = super().forward(obs)
        return parameters + 1e-6 * torch.randn_like(parameters), values


class Dropout(Network):
    """So little that it spares most rows."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(1e-3)

    def forward(self, obs):
        x = self.dropout(self.layer(obs).tanh())
        return self.actor(x), self.critic(x).squeeze(-1)


class KeepsStateOfRollouts(Network):
    """A state of its own, where it gets as many rows as there are environments: updates get others."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(4, UNITS), torch.zeros(ENVS, UNITS)

    def forward(self, obs):
        rows = obs.flatten(0, -2)
        hidden = self.hidden.to(obs.device) if len(rows) == ENVS else rows.new_zeros((len(rows), UNITS))
        x = self.cell(rows, hidden)
        if len(rows) == ENVS:
            self.hidden = x.detach()
        x = x.view(*obs.shape[:-1], UNITS)
        return self.actor(x), self.critic(x).squeeze(-1)


class KeepsStateOfItsFirstRows(KeepsStateOfRollouts):
    """As many rows as in its first call, or else torch raises."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def forward(self, obs):
        rows = obs.flatten(0, -2)
        self.hidden = x = self.cell(rows, self.hidden).detach()
        x = x.view(*obs.shape[:-1], UNITS)
        return self.actor(x), self.critic(x).squeeze(-1)


class BatchFirst(Heads):
    """Rows where nn.GRU has an axis of sequences, and a state without one."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, UNITS, batch_first=True)

    def forward(self, obs, state):
        x, after = self.gru(obs[:, None], state)
        return self.actor(x[:, 0]), self.critic(x[:, 0]).squeeze(-1), after


ENVS = 52  # more than the rows that are compared
REFUSED = {
    "observations of another width": (
        lambda: nn.Sequential(nn.Linear(5, 3)),
        r"raises RuntimeError: mat1 .*; expected forward\(obs\), observations \(…, 4\), to return parameters and",
    ),
    "one output": (lambda: nn.Linear(4, 2), "returns a Tensor; expected parameters and values, tensors$"),
    "an output too many": (
        lambda: Changed(lambda p, v: (p, v, v)),
        "returns a Tensor, a Tensor and a Tensor; expected parameters and values, tensors; .*recurrent_state_size = n",
    ),
    "a distribution": (
        lambda: Changed(lambda p, v: (torch.distributions.Categorical(logits=p), v)),
        "returns a Categorical and a Tensor; expected parameters and values, tensors$",
    ),
    "values with an axis": (lambda: Changed(lambda p, v: (p, v[..., None])), r"returns shapes \[.*\(52, 1, 1\)\]"),
    "a parameter too few": (lambda: Changed(lambda p, v: (p[..., 1:], v)), r"returns shapes \[\(52, 1, 1\)"),
    "choices in place of logits": (Halves, r"returns parameters in torch.int64; expected floating-point numbers"),
    "parameters elsewhere": (
        lambda: Changed(lambda p, v: (p.to("meta"), v)),
        "returns parameters on meta; expected c.*, where its observations are",
    ),
    "a tensor elsewhere": (PlainTensor, "raises .*Its tensor scale is on meta, not on c.*register_buffer"),
    "written observations": (Writes, "writes to its observations; .* clone"),
    "written columns": (WritesThroughAView, "writes to its observations"),
    "no gradients": (NoGradients, "parameters that require no gradient; .*no_grad"),
    "inference mode": (InferenceMode, "parameters that require no gradient"),
    "detached parameters": (lambda: Changed(lambda p, v: (p.detach(), v)), "parameters that require no gradient"),
    "detached values": (
        lambda: Changed(lambda p, v: (p, v.detach())),
        r"values that require no gradient, and \['critic.weight', 'critic.bias'\] would not be trained",
    ),
    "little dropout": (Dropout, "draws random numbers.*dropout"),
    "little noise": (Noise, "draws random numbers"),
    "a state of its own in rollouts": (KeepsStateOfRollouts, "is called again.*Memory goes in and out"),
    "a state of its own of some rows": (
        KeepsStateOfItsFirstRows,
        "raises RuntimeError when it gets some of the rows: .*",
    ),
    # Recurrent ones.
    "a state of another shape": (lambda: ChangedState(lambda p, v, s: (p, v, s[:, 1:])), r"returns .*\(52, 7\)\] for"),
    "no rows of states": (BatchFirst, "raises RuntimeError.*one time step"),
    "a state of whole numbers": (
        lambda: ChangedState(lambda p, v, s: (p, v, s.round().long())),
        "returns the next state in torch.int64; expected floating-point",
    ),
    "a state elsewhere": (
        lambda: ChangedState(lambda p, v, s: (p, v, s.to("meta"))),
        "returns the next state on meta; expected c",
    ),
    "a written state": (WritesState, "writes to its state"),
    "written observations of a recurrent one": (WritesObservations, "writes to its observations"),
    "detached parameters of a recurrent one": (
        lambda: ChangedState(lambda p, v, s: (p.detach(), v, s)),
        "parameters that require no gradient",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_network_that_breaks_the_contract_is_refused_and_the_error_says_why(kind, device):
    make, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=f"network of agent .*{words}"):
        trainer_of(make(), device, num_envs=ENVS)


@pytest.mark.parametrize("kind", ["no gradients", "detached values", "little noise"])
def test_what_is_not_trained_needs_no_gradients_and_may_draw(kind, device):
    trainer = trainer_of(PolicySpec(network=REFUSED[kind][0](), train=False), device, num_envs=ENVS)
    trainer.train_iteration()
