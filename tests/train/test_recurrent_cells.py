"""Recurrent cells by a product and a kernel for each step, against float64 and against torch, emulated and on a GPU."""

import dataclasses

import pytest
import torch
from games.script import Script
from support.bitwise import equal_bits
from support.kernel_trainers import largest_difference, products_in, state_of, weights
from support.recurrent_samples import PARAMETERS, Sample, check, check_missing_gradient, check_nan, results

import gpu_vecenv
from gpu_vecenv import FunctionManager, PPOConfig, PQNConfig, Trainer
from gpu_vecenv.train import sequences
from gpu_vecenv.train.recurrent import kept
from gpu_vecenv.train.recurrent_cells import CellLayer

SCRIPT = {"num_leads": 2, "num_others": 2, "leave": 2, "max_steps": 7}
SIZES = {"num_steps": 12, "num_epochs": 2, "num_minibatches": 3, "sequence_length": 4}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


def layer_of(sample, precision, device):
    return CellLayer(FunctionManager(device), sample.cells, precision)


CASES = {
    "a GRU of 5 units": ("gru", 5, 37, 1, False),
    "two GRUs of 33 units": ("gru", 33, 18, 2, False),
    "three GRUs, trunks apart": ("gru", 33, 9, 3, True),
    "an LSTM of 33 units": ("lstm", 33, 18, 1, False),
    "two LSTMs, trunks apart": ("lstm", 5, 37, 2, True),
    "three LSTMs of 5 units": ("lstm", 5, 70, 3, False),
    "three rows": ("gru", 5, 3, 2, False),
}


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_agree_with_the_cells_in_float64(name, precision, device):
    kind, units, rows, count, apart = CASES[name]
    sample = Sample(units, rows, device, kind=kind, apart=apart, count=count)
    assert not sample.active[1:-1].all()
    with products_in(precision):
        check(sample, results(sample, layer_of(sample, precision, device)), precision)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_order_of_threads_changes_no_bit(kind, device, monkeypatch):
    sample, found = Sample(33, 20, device, kind=kind, steps=3), []
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        found.append(results(sample, layer_of(sample, "bfloat16", device)))
    assert equal_bits(*found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_sequence_is_its_steps(kind, precision, device):
    """Up to the rounding of torch's products of other numbers of rows."""
    sample = Sample(33, 20, device, kind=kind, count=3)
    layer = layer_of(sample, precision, device)
    with torch.no_grad():
        outputs = torch.stack(layer.sequence(sample.cells, sample.features, sample.state, sample.active))
        state = sample.state
        for t, active in enumerate(sample.active):
            own, state = layer.step(sample.cells, [sample.features[0].unflatten(0, sample.active.shape)[t]], state)
            within = 1e-6 if precision == "float32" else 2.0**-6
            torch.testing.assert_close(torch.stack(own), outputs[:, t], rtol=0, atol=within)
            state = kept(state, active)
        assert outputs.dtype == layer.dtype and state.dtype == torch.float32


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_elementwise_parts_of_a_step_and_of_a_sequence_have_the_same_bits(kind, device):
    """With factors of which all products and sums are exact."""
    sample = Sample(33, 20, device, kind=kind)
    with torch.no_grad():
        for weight in (sample.cells.weight_ih, sample.cells.weight_hh):
            weight.copy_(
                torch.eye(weight.shape[2], device=device).repeat(1, 4 * 33 // weight.shape[2] + 1, 1)[
                    :, : weight.shape[1]
                ]
            )
        layer = layer_of(sample, "float32", device)
        outputs = torch.stack(layer.sequence(sample.cells, sample.features, sample.state, sample.active))
        state = sample.state
        for t, active in enumerate(sample.active):
            own, state = layer.step(sample.cells, [sample.features[0].unflatten(0, sample.active.shape)[t]], state)
            assert equal_bits(torch.stack(own), outputs[:, t])
            state = kept(state, active)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_nan_spreads_as_in_torch(kind, device):
    """In its own row, up to the end of the episode; into all gradients of parameters that it reaches."""
    sample = Sample(33, 20, device, kind=kind)
    check_nan(sample, layer_of(sample, "float32", device))


def test_outputs_without_a_gradient_count_as_zero(device):
    sample = Sample(5, 17, device, steps=3)
    found = check_missing_gradient(sample, layer_of(sample, "float32", device))
    assert all(g[0].ne(0).any() and g[1].eq(0).all() for g in found)


def test_gradients_may_be_taken_twice(device):
    sample = Sample(5, 9, device)
    outputs = layer_of(sample, "float32", device).sequence(sample.cells, sample.features, sample.state, sample.active)
    own = [getattr(sample.cells, name) for name in PARAMETERS]
    first = torch.autograd.grad(list(outputs), own, sample.gradients, retain_graph=True)
    assert equal_bits(first, torch.autograd.grad(list(outputs), own, sample.gradients))


def test_no_sequences_have_gradients_of_zero(device):
    sample = Sample(5, 0, device, kind="lstm")
    outputs, *gradients = results(sample, layer_of(sample, "float32", device))
    assert outputs.shape == (2, 6, 0, 5) and all(g.eq(0).all() for g in gradients)


# The trainer

RUNS = {
    "lstm": PPOConfig(network="lstm", hidden_sizes=(8, 5), **SIZES),
    "gru, chunks": PPOConfig(network="gru", hidden_sizes=(8, 5), chunk_rows=60, shared_trunk=False, **SIZES),
    "vdn": PQNConfig(network="gru", hidden_sizes=(8, 6), mixing="vdn", optimizer="radam", **SIZES),
}


def trainer_of(device, config, patch=None, **options):
    """``patch``: pytest's monkeypatch; then torch computes the cells."""
    env = gpu_vecenv.make(Script, 6, device, autoreset_mode="next_step", **SCRIPT)
    if patch is None:
        return Trainer(env, config, seed=3, **options)
    with patch.context() as own:
        own.setattr(sequences, "why_not_cells", lambda *_: "to compare")
        return Trainer(env, config, seed=3, **options)


@pytest.mark.parametrize("name", RUNS)
def test_kernels_train_what_torch_trains(name, device, monkeypatch):
    config = RUNS[name]
    by_kernels, by_torch = trainer_of(device, config), trainer_of(device, config, monkeypatch)
    for states in by_kernels.states.values():
        assert states.torch_reason is None and states.stepwise_reason is not None
    before = weights(by_kernels)
    for _ in range(2):
        found, expected = by_kernels.train_iteration(), by_torch.train_iteration()
        assert found.keys() == expected.keys()
        for key in found:
            if "loss" in key or "grad_norm" in key or "variance" in key:
                assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    # As tolerance() in kernel_trainers.py: where a gradient is small, Adam makes its rounding 10% of a step.
    bound = 0.1 * config.learning_rate
    assert largest_difference(weights(by_kernels), weights(by_torch)) < bound
    assert largest_difference(weights(by_kernels), before) > 10 * bound


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("name", RUNS)
def test_graphs_and_eager_launches_are_bitwise_equal(name, precision):
    runs = []
    for graphs in (True, False):
        trainer = trainer_of("cuda", dataclasses.replace(RUNS[name], precision=precision), graphs=graphs)
        for _ in range(5):
            trainer.train_iteration()
        runs.append(state_of(trainer))
    assert equal_bits(*runs)
