"""The GRU's kernels against float64 and against torch, on emulated CUDA threads and on a GPU."""

import copy
import dataclasses

import pytest
import torch
from games.recall import Recall
from games.script import Script
from support.bitwise import equal_bits
from support.cases import slow_but
from support.emulated_cuda import EmulatedCudaBackend
from support.kernel_trainers import largest_difference, products_in, state_of, weights
from support.learning import batch_of
from support.recurrent_samples import PARAMETERS, STEPS, Sample, check, check_missing_gradient, check_nan, results

import gpu_vecenv
from gpu_vecenv import FunctionManager, PolicySpec, PPOConfig, Trainer
from gpu_vecenv.train import gru_kernels, sequences
from gpu_vecenv.train.gru import GruLayer
from gpu_vecenv.train.gru_kernels import GruProgram, shared_bytes
from gpu_vecenv.train.recurrent import RecurrentActorCritic, kept
from gpu_vecenv.train.run import computed_by

NAN = float("nan")
SMALL = PPOConfig(num_steps=12, num_epochs=2, num_minibatches=3, hidden_sizes=(8, 8), network="gru", sequence_length=4)
SCRIPT = {"num_leads": 2, "num_others": 2, "leave": 2, "max_steps": 7}
RATIO_WITHIN = 1e-5  # of a ratio with unchanged weights: torch rounds products of other numbers of rows otherwise

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


def layer_of(sample, precision, device):
    return GruLayer(FunctionManager(device), sample.cells.units, precision, sample.cells.count)


CASES = {
    "32 units": (32, 70, False),
    "64 units": (64, 37, False),
    "128 units": (128, 18, False),
    "two trunks": (32, 33, True),
    "units of no tile": (20, 33, False),
    "one sequence": (4, 1, False),
    "one cell": (20, 37, False),
}
QUICK = {("64 units", "float32"), ("units of no tile", "bfloat16"), ("two trunks", "tf32"), ("one sequence", "float32")}
QUICK |= {("one cell", "tf32")}


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(QUICK, [(name, precision) for name in CASES for precision in ("float32", "tf32", "bfloat16")]),
)
def test_outputs_and_gradients_agree_with_the_cells_in_float64(name, precision, device):
    units, rows, apart = CASES[name]
    sample = Sample(units, rows, device, apart=apart, count=1 if name == "one cell" else 2)
    assert not sample.active[1:-1].all()
    with products_in(precision):
        check(sample, results(sample, layer_of(sample, precision, device)), precision)


def test_blocks_take_tiles_one_after_the_other(device):
    """A GPU of one multiprocessor, with more tiles than it holds blocks, gives the bits of a larger one."""
    sample = Sample(32, 150, device, steps=2)
    layer = layer_of(sample, "float32", device)
    few = layer_of(sample, "float32", device)
    few.kernels.programs[0].most_blocks = 2
    found = results(sample, few)  # first: else what it leaves unwritten may be in the memory of the other's results
    assert equal_bits(results(sample, layer), found)


@pytest.mark.parametrize(("warp_tiles", "buffers"), [(1, 1), (1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("precision", ["tf32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tiles_of_a_warp_and_buffers_change_no_bit(precision, warp_tiles, buffers, device, monkeypatch):
    sample = Sample(20, 170, device, steps=3)
    with products_in(precision):
        expected, layer = results(sample, layer_of(sample, precision, device)), layer_of(sample, precision, device)
        monkeypatch.setattr(gru_kernels, "BUFFERS", (buffers,))
        layer.kernels.programs = [GruProgram(FunctionManager(device), 20, precision, 2, warp_tiles)]
        assert equal_bits(results(sample, layer), expected)


@pytest.mark.slow
def test_warps_have_two_tiles_where_that_saves_time(device):
    kernels = layer_of(Sample(128, 1, device), "tf32", device).kernels
    one, two = kernels.programs
    assert (one.warp_tiles, two.warp_tiles) == (1, 2) and two.most_blocks == one.most_blocks
    wave = 16 * one.most_blocks // 2  # rows of both cells, a tile each
    assert [kernels.program_of(rows) for rows in (1, wave, wave + 1, 2 * wave)] == [one, one, two, two]
    assert kernels.program_of(2 * wave + 1) == one  # 3 steps of one tile, 2 of two


def test_the_order_of_threads_changes_no_bit(device, monkeypatch):
    sample, found = Sample(20, 70, device, steps=3), []
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        found.append(results(sample, layer_of(sample, "bfloat16", device)))
    assert equal_bits(*found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_sequence_has_the_bits_of_its_steps_and_a_row_those_of_its_own(precision, device):
    sample = Sample(32, 70, device)
    kernels = layer_of(sample, precision, device).kernels
    cells = [p.detach() for p in (sample.cells.weight_hh, sample.cells.bias_ih, sample.cells.bias_hh)]
    inputs = torch.randn((2, STEPS, 70, 96), generator=torch.Generator().manual_seed(3)).to(device, kernels.dtype)
    previous = torch.full((2, STEPS, 70, 32), NAN, dtype=kernels.dtype, device=device)
    after = torch.full((70, 64), NAN, device=device)
    outputs = kernels.forward(inputs, cells, sample.state, sample.active, previous=previous, next_state=after)
    state, next_state = sample.state, torch.empty_like(sample.state)
    for t, active in enumerate(sample.active):
        own = kernels.forward(inputs[:, t : t + 1], cells, state, None, next_state=next_state)
        assert equal_bits(own[:, 0], outputs[:, t])
        assert equal_bits(previous[:, t], state.view(70, 2, 32).movedim(1, 0).to(kernels.dtype))
        state = kept(next_state, active)
    assert equal_bits(after, next_state)
    alone = kernels.forward(inputs[:, :, 41:42], cells, sample.state[41:42], sample.active[:, 41:42].contiguous())
    assert equal_bits(alone, outputs[:, :, 41:42])


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_nan_spreads_as_in_torch(precision, device):
    """In its own row, up to the end of the episode; into all gradients of parameters that it reaches."""
    sample = Sample(32, 20, device)
    check_nan(sample, layer_of(sample, precision, device))


def test_outputs_without_a_gradient_count_as_zero(device):
    sample = Sample(20, 17, device, steps=3)
    found = check_missing_gradient(sample, layer_of(sample, "float32", device))
    assert all(g[0].ne(0).any() and g[1].eq(0).all() for g in found)


@pytest.mark.parametrize("learns", [0, 1])
def test_a_trunk_learns_beside_a_frozen_one(learns, device):
    sample = Sample(8, 9, device, apart=True)
    features = [x.clone().requires_grad_(number == learns) for number, x in enumerate(sample.features)]
    layer = layer_of(sample, "float32", device)
    outputs = layer.sequence(sample.cells, features, sample.state, sample.active)
    (found,) = torch.autograd.grad(list(outputs), [features[learns]], sample.gradients)
    assert equal_bits(found, results(sample, layer)[1 + len(PARAMETERS) + learns].float())


def test_no_sequences_have_gradients_of_zero(device):
    sample = Sample(8, 0, device)
    outputs, *gradients = results(sample, layer_of(sample, "float32", device))
    assert outputs.shape == (2, STEPS, 0, 8) and all(g.eq(0).all() for g in gradients)


# What is computed by kernels


class LittleMemory(EmulatedCudaBackend):
    """Blocks of a GPU in which no GRU fits."""

    tensor_cores = dataclasses.replace(EmulatedCudaBackend.tensor_cores, block_shared_bytes=1 << 10)


def changed(**values):
    return dataclasses.replace(SMALL, **values)


def trainer_of(device, config=SMALL, game=Script, *, by_torch=None, policies=None, arguments=SCRIPT, **options):
    """``by_torch``: pytest's monkeypatch; then torch computes the GRU."""
    env = gpu_vecenv.make(game, 6, device, autoreset_mode="next_step", **arguments)
    if by_torch is None:
        return Trainer(env, config, seed=3, policies=policies, **options)
    with by_torch.context() as patch:
        patch.setattr(sequences, "why_not_cells", lambda *_: "to compare")
        return Trainer(env, config, seed=3, policies=policies, **options)


def reasons(trainer):
    return {states.torch_reason for states in trainer.states.values()}


def test_a_run_says_what_computes_its_gru(device, monkeypatch):
    def told(**changes):
        trainer = trainer_of(device, changed(**changes), Recall, arguments={})
        return computed_by(trainer, "player")

    by_kernels = "torch (a recurrent network), its cells by kernels"
    assert told() == by_kernels
    assert told(network="lstm") == f"{by_kernels} step by step (an LSTM)"
    assert told(hidden_sizes=(6,)) == f"{by_kernels} step by step (units that are no multiple of 4)"
    assert told(hidden_sizes=(256,)) == f"{by_kernels} step by step (a GRU too large for shared memory)"
    assert told(hidden_sizes=(176,), precision="bfloat16") == by_kernels


def test_a_network_of_ones_own_and_a_cpu_have_none():
    class Own(RecurrentActorCritic):
        """Of a class of its own, but the same computation."""

    class Other(torch.nn.Module):
        recurrent_state_size = 4

        def __init__(self):
            super().__init__()
            self.cell, self.heads = torch.nn.GRUCell(2, 4), torch.nn.Linear(4, 3)

        def forward(self, obs, state):
            state = self.cell(obs, state)
            out = self.heads(state)
            return out[:, :2], out[:, 2], state

    trainer = trainer_of("cpu", changed(network="mlp"), Recall, policies={"player": Other()}, arguments={})
    assert reasons(trainer) == {"not the default network"}
    trainer = trainer_of("cpu", SMALL, Recall, policies={"player": Own((2,), 2, (8,))}, arguments={})
    assert reasons(trainer) == {"no GPU"}


@pytest.mark.parametrize("units", [4, 20, 64, 128])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_gru_of_common_sizes_fit(units, precision):
    assert shared_bytes(units, precision) <= EmulatedCudaBackend.tensor_cores.block_shared_bytes


# The trainer

RUNS = {
    "one trunk": {},
    "two trunks, relu": {"shared_trunk": False, "activation": "relu", "normalize_obs": True},
    "no trunk, whole rollouts": {"hidden_sizes": (12,), "sequence_length": None, "normalize_returns": True},
    "chunks": {"chunk_rows": 60, "num_steps": 8, "num_epochs": 1},
    "one step": {"sequence_length": 1},
    "central critic": {"critic": "central", "agent_ids": True, "num_epochs": 1},
}
QUICK_RUNS = "chunks", "central critic"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK_RUNS else pytest.mark.slow) for n in RUNS])
def test_kernels_train_what_torch_trains(name, device, monkeypatch):
    config = changed(**RUNS[name])
    by_kernels, by_torch = trainer_of(device, config), trainer_of(device, config, by_torch=monkeypatch)
    assert reasons(by_kernels) == {None} and reasons(by_torch) == {"to compare"}
    before = weights(by_kernels)
    for _ in range(2):
        found, expected = by_kernels.train_iteration(), by_torch.train_iteration()
        for role in ("lead", "other"):
            for metric in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
                key = f"{metric}_{role}"
                assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    # As tolerance() in kernel_trainers.py: where a gradient is small, Adam makes its rounding 10% of a step.
    bound = 0.1 * config.learning_rate
    assert largest_difference(weights(by_kernels), weights(by_torch)) < bound
    assert largest_difference(weights(by_kernels), before) > 10 * bound


def far_from_even(trainer):
    """Weights with which states and choices differ a lot."""
    random = torch.Generator().manual_seed(1)
    for policy in trainer.policies.values():
        for p in policy.parameters():
            p.data.copy_(torch.randn(p.shape, generator=random) * 0.7)
    return trainer


def test_with_unchanged_weights_every_ratio_is_one(device):
    trainer = far_from_even(
        trainer_of(device, changed(learning_rate=0.0, hidden_sizes=(8, 20), num_steps=8, num_epochs=1))
    )
    trainer.train_iteration()
    trainer.begin_iteration()
    ends = 0
    for learner in trainer.learners.values():
        learner.shuffle()
        for indices in learner.order.view(3, -1):
            with torch.no_grad():
                ((part, (parameters, _)),) = learner.sequences.outputs(indices, 1000, learner._rows, learner._context)
            batch = batch_of(trainer.rollout, learner.policy.view, part, trainer.rollout.advantages.flatten()[part])
            log_probs, _ = learner.policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask)
            assert ((log_probs - batch.log_probs).exp()[batch.active] - 1).abs().max() <= RATIO_WITHIN
            active = batch.active.view(4, -1)
            ends += int((active[:-1] & ~active[1:]).any(0).sum())
    assert ends > 0


@pytest.mark.slow
def test_training_resumes_bit_by_bit(device, tmp_path):
    alone, again = trainer_of(device), trainer_of(device)
    alone.train_iteration()
    path = alone.save(tmp_path / "checkpoint")
    again.load(path)
    for trainer in (alone, again):
        trainer.train_iteration()
    assert equal_bits(state_of(alone), state_of(again))


def test_cells_with_a_hook_are_computed_by_torch(device, monkeypatch):
    trainers, calls = [trainer_of(device), trainer_of(device, by_torch=monkeypatch)], []
    for trainer in trainers:
        for policy in trainer.policies.values():
            policy.network.cells.register_forward_hook(lambda *_: calls.append(1))
        trainer.train_iteration()
        assert calls
        calls.clear()
    assert equal_bits(*(weights(trainer) for trainer in trainers))


def test_kernels_are_only_in_place_while_a_trainer_computes(device):
    trainer = trainer_of(device, policies={"lead": PolicySpec(train=False), "other": PolicySpec()})
    trainer.train_iteration()
    for policy in trainer.policies.values():
        assert policy.network.cells.kernels is None
        copy.deepcopy(policy)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_graphs_and_eager_launches_are_bitwise_equal(precision):
    runs = []
    for graphs in (True, False):
        config = changed(precision=precision, hidden_sizes=(64, 64), shared_trunk=False)
        trainer = trainer_of("cuda", config, graphs=graphs)
        assert reasons(trainer) == {None}
        for _ in range(5):
            trainer.train_iteration()
        runs.append(state_of(trainer))
    assert equal_bits(*runs)
