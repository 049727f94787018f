"""RecurrentLayer: torch's equations over sequences in which episodes end, by kernels and by torch."""

import copy

import pytest
import torch
from support.bitwise import equal_bits
from torch import nn

import gpu_vecenv
from gpu_vecenv import RecurrentLayer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.gru import GruLayer
from gpu_vecenv.train.recurrent_cells import CellLayer

STEPS, ROWS, INPUTS, UNITS = 6, 5, 7, 8
CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["torch", "kernels"])
def env(request, device_of_networks):
    made = gpu_vecenv.make("cartpole", 3, device_of_networks)
    yield made if request.param == "kernels" else None
    made.close()


def samples(layer, device):
    """Rows, states, which of them are kept; float64 cells of torch with the layer's weights."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((STEPS, ROWS, INPUTS), generator=generator).to(device)
    state = torch.randn((ROWS, layer.state_size), generator=generator).to(device)
    active = (torch.rand((STEPS, ROWS), generator=generator) > 0.3).to(device)
    for bias in (layer.cells.bias_ih, layer.cells.bias_hh):
        bias.data.copy_(torch.randn(bias.shape, generator=generator))
    cell = CELLS[layer.cells.kind](INPUTS, UNITS, device=device, dtype=torch.float64)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data.copy_(getattr(layer.cells, name).data[0])
    return rows, state, active, cell


def by_torch(cell, rows, state, active):
    """Outputs of all steps, and their states after each."""
    state, outputs, states = state.double(), [], []
    for row, is_active in zip(rows.double(), active, strict=True):
        given = state if isinstance(cell, nn.GRUCell) else tuple(state.chunk(2, -1))
        parts = cell(row, given)
        state = parts if isinstance(parts, torch.Tensor) else torch.cat(parts, -1)
        states.append(state)
        outputs.append(state[:, :UNITS])
        state = torch.where(is_active[:, None], state, 0)
    return torch.stack(outputs), states


@pytest.mark.parametrize("kind", CELLS)
def test_outputs_and_gradients_are_those_of_the_cells_of_torch(kind, env, device_of_networks):
    layer = RecurrentLayer(INPUTS, UNITS, kind, env=env).to("cpu" if env is None else env.device)
    device = layer.cells.weight_ih.device
    rows, state, active, cell = samples(layer, device)
    rows.requires_grad_()
    outputs = layer.sequence(rows, state, active)
    expected, _ = by_torch(cell, rows, state, active)
    within = {"rtol": 0, "atol": 1e-5}  # float32 of values and sums below 30
    torch.testing.assert_close(outputs.double(), expected, **within)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4)).to(device)
    found = torch.autograd.grad((outputs * weights).sum(), [rows, layer.cells.weight_hh, layer.cells.bias_ih])
    wanted = torch.autograd.grad((expected * weights).sum(), [rows, cell.weight_hh, cell.bias_ih])
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double().view_as(other), other.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CELLS)
def test_a_step_is_a_sequence_of_one_and_gives_the_next_state(kind, env):
    layer = RecurrentLayer(INPUTS, UNITS, kind, env=env)
    rows, state, active, cell = samples(layer, layer.cells.weight_ih.device)
    _, states = by_torch(cell, rows[:1], state, active[:1])
    with torch.no_grad():
        outputs, following = layer(rows[0], state)
    torch.testing.assert_close(following.double(), states[0].detach(), rtol=0, atol=1e-6)  # a few roundings
    assert equal_bits(outputs, following[:, :UNITS].contiguous())


def test_its_kernels_are_chosen_by_its_size(device_of_networks):
    with_kernels = gpu_vecenv.make("cartpole", 3, device_of_networks)
    kinds = [
        type(RecurrentLayer(4, units, kind, env=with_kernels).cells.kernels)
        for units, kind in ((8, "gru"), (7, "gru"), (8, "lstm"))
    ]
    assert kinds == [GruLayer, CellLayer, CellLayer]
    with_kernels.close()


def test_without_kernels_and_in_a_copy_torch_computes_it(device_of_networks):
    env = gpu_vecenv.make("cartpole", 3, device_of_networks)
    layer = RecurrentLayer(INPUTS, UNITS, env=env)
    assert layer.cells.kernels is not None and RecurrentLayer(INPUTS, UNITS).cells.kernels is None
    other = copy.deepcopy(layer)
    assert other.cells.kernels is None and layer.cells.kernels is not None
    rows, state, active, _ = samples(layer, env.device)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(
        other.sequence(rows, state, active), layer.sequence(rows, state, active), rtol=0, atol=1e-5
    )
    env.close()


def test_a_trainer_leaves_a_layer_its_kernels(device_of_networks):
    class Network(nn.Module):
        def __init__(self, env):
            super().__init__()
            self.layer = RecurrentLayer(4, UNITS, env=env)
            self.heads = nn.Linear(UNITS, 3)
            self.recurrent_state_size = self.layer.state_size

        def forward(self, obs, state):
            outputs, state = self.layer(obs, state)
            heads = self.heads(outputs)
            return heads[:, :2], heads[:, 2], state

    env = gpu_vecenv.make("cartpole", 8, device_of_networks, autoreset_mode="next_step")
    network = Network(env).to(env.device)
    own = network.layer.cells.kernels
    config = gpu_vecenv.PPOConfig(num_steps=8, sequence_length=4, num_minibatches=2, num_epochs=1, total_steps=10**6)
    trainer = gpu_vecenv.Trainer(env, config, policies={"agent": network}, graphs=False)
    trainer.train_iteration()
    assert network.layer.cells.kernels is own is not None
    trainer.close()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"inputs": 0}, ValueError, "inputs"),
        ({"units": 2.0}, TypeError, "units"),
        ({"kind": "rnn"}, ConfigError, "kind is 'rnn'"),
        ({"kind": ["gru"]}, ConfigError, r"kind is \['gru'\]"),
        ({"precision": "half"}, ConfigError, "precision is 'half'"),
        ({"env": 3}, TypeError, "env"),
    ],
)
def test_wrong_arguments_are_refused(change, error, said):
    with pytest.raises(error, match=said):
        RecurrentLayer(**{"inputs": 4, "units": 8, **change})
