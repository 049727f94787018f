"""The default network layer by layer against float64 and against torch, on emulated CUDA threads and on a GPU."""

import dataclasses
from itertools import product

import pytest
import torch
from games.crew import Crew
from support.bitwise import equal_bits
from support.cases import slow_but
from support.emulated_cuda import EmulatedCudaBackend
from support.kernel_trainers import (
    Run,
    Trainers,
    check_hooks,
    check_replaced_weights,
    check_resume,
    check_training,
    products_in,
    state_of,
    tolerance,
)
from support.perceptrons import (
    APART,
    BOTH,
    CASES,
    FEW,
    INF,
    NAN,
    Case,
    check_gradients,
    check_outputs,
    expected_of,
    moments_of,
    poisoned,
    rows_of,
    settings_of,
)
from torch import nn

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train import layerwise, policy_kernels
from gpu_vecenv.train.host_kernels import HostKernels
from gpu_vecenv.train.layerwise import LayerwiseKernels, multiply, why_not_layerwise
from gpu_vecenv.train.perceptron import METRICS, PerceptronKernels
from gpu_vecenv.train.policy_kernels import choose_kernels
from gpu_vecenv.train.ppo import PPOConfig, make_policy
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.run import computed_by
from gpu_vecenv.train.trainer import Trainer

WIDE = {
    "tanh": Case("tag_continuous", ("runner",), {"normalize_obs": True, "hidden_sizes": (256, 256)}, FEW),
    "more units than threads have": Case("cartpole", ("agent",), {"hidden_sizes": (8, 2056)}),
    "several tiles": Case("cartpole", ("agent",), {**APART, "hidden_sizes": (20, 36)}, rows=1500),
}
ALL = {**CASES, **WIDE}
ROUNDING = 2.0**-8  # to bfloat16, relatively: half a unit of the last of 7 bits of fraction


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


def kernels_of(rows, chunk_rows=2**20):
    assert why_not_layerwise(rows.policy, rows.rollout) is None
    return LayerwiseKernels(rows.policy, rows.rollout, rows.config.precision, chunk_rows)


def launch_of(rows, chunk_rows=2**20):
    """Computes the gradients of the rows, and their output."""
    launch, parts = kernels_of(rows, chunk_rows).gradients(len(rows.indices), settings_of(rows))
    moments = moments_of(rows)
    return lambda: launch(indices=rows.indices, moments=moments), parts


def differentiated(rows, chunk_rows=2**20):
    """Gradients by parameter, and metrics."""
    launch, parts = launch_of(rows, chunk_rows)
    parts.fill_(NAN)  # each element is written
    launch()
    sizes = [p.numel() for p in rows.policy.parameters()]
    *gradients, metrics = parts.double().sum(0).split([*sizes, METRICS])
    return [g.view_as(p) for g, p in zip(gradients, rows.policy.parameters(), strict=True)], metrics


QUICK = {
    *(("relu", "float32"), ("two heads", "float32"), ("masks, fewer choices", "float32"), ("images", "float32")),
    *(("agent ids", "float32"), ("agent ids, images", "float32")),
    *(("sizes of no unit", "bfloat16"), ("box, tanh", "tf32"), ("relu, two trunks", "bfloat16"), ("tanh", "tf32")),
}


# The bounds of the lower precisions are relative to a gradient, which with more rows is less than their gradients. Of
# "huber" one sample's value is so near the bound of value_clip that rounding to bfloat16 takes it to the other side.
GRADIENT_CASES = [
    (name, precision)
    for name, precision in product(ALL, ["float32", "tf32", "bfloat16"])
    if precision == "float32" or not name.startswith("several")
    if (name, precision) != ("huber", "bfloat16")
]


@pytest.mark.parametrize(("name", "precision"), slow_but(QUICK, GRADIENT_CASES))
def test_gradients_and_metrics_agree_with_the_loss_in_float64(name, precision, device):
    rows = rows_of(ALL[name], device, precision)
    with products_in(precision):
        check_gradients(rows, *differentiated(rows))


@pytest.mark.parametrize("chunk_rows", [96, 40])
def test_gradients_of_chunks_add_up(chunk_rows, device):
    rows = rows_of(ALL["relu, two trunks"], device)
    assert kernels_of(rows, chunk_rows).chunk == chunk_rows
    check_gradients(rows, *differentiated(rows, chunk_rows))


@pytest.mark.parametrize("name", ["two trunks", "relu"])
def test_nan_in_an_observation_reaches_the_gradients_that_it_reaches_in_torch(name, device):
    rows = poisoned(ALL[name], NAN, device)
    (exact, _, exact_metrics), (found, metrics) = expected_of(rows), differentiated(rows)
    assert any(g.isnan().any() for g in exact)
    assert all(a.isnan().equal(b.isnan()) for a, b in zip(found, exact, strict=True))
    assert metrics[:4].isnan().all() and exact_metrics[:4].isnan().all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_observation_leaves_finite_what_it_does_in_torch(sign, precision, device):
    """Units at their bounds have no gradient, but 0 times infinity is NaN: in the column of that input."""
    rows = poisoned(ALL["three layers, two trunks"], sign * INF, device)
    rows = rows._replace(config=dataclasses.replace(rows.config, precision=precision))
    (exact, _, _), (found, metrics) = expected_of(rows), differentiated(rows)
    for a, b in zip(found, exact, strict=True):
        assert a.isnan().equal(b.isnan())
        nan = torch.zeros_like(a, dtype=torch.bool)
        if a.shape == found[0].shape:
            nan[:, 1] = True
        assert a.isnan().equal(nan) and a[~nan].isfinite().all()
    assert metrics.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_normalised_infinite_observation_is_clipped(sign, device):
    rows = poisoned(ALL["relu"], sign * INF, device)
    check_gradients(rows, *differentiated(rows))


@pytest.mark.parametrize("name", ["masks, fewer choices", "several tiles"])
def test_neither_the_order_of_threads_nor_another_launch_changes_a_bit(name, device, monkeypatch):
    found = []
    for order in ("forwards", "forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        launch, parts = launch_of(rows_of(ALL[name], device), 700)
        for _ in range(2):
            parts.fill_(NAN)
            launch()
            found.append(parts.clone())
    assert found[0].isfinite().all() and all(equal_bits(found[0], parts) for parts in found[1:])


def test_tiles_of_more_than_a_block_of_rows_give_the_same_gradients(device, monkeypatch):
    monkeypatch.setattr(layerwise, "MAX_TILES", 2)  # as with 2^18 rows and more
    rows = rows_of(ALL["several tiles"], device)
    assert launch_of(rows)[0] and kernels_of(rows).chunk > 2 * layerwise.LOSS_BLOCK
    check_gradients(rows, *differentiated(rows))


# Products in bfloat16


def bfloat16(*shape, seed, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


@pytest.fixture(params=["tanh", "relu"])
def products(request, device):
    """Kernels of a network whose hidden layers have 80 and 128 units, for up to 610 rows; sizes of no tile."""
    case = Case("cartpole", ("agent",), {"hidden_sizes": (128, 75), "activation": request.param}, rows=600)
    kernels = kernels_of(rows_of(case, device, "bfloat16"))
    with torch.no_grad():
        kernels.parameters.flat.mul_(0.5)
    kernels.store_weights()
    return kernels


def test_products_forward_are_those_of_float64(products, device):
    layer, rows = products.layers.towers[0][1], 501
    inputs = bfloat16(rows, 128, seed=0, device=device)
    launch, found = products.product(layer, "ACTIVATIONS", 75), bfloat16(rows, 80, seed=1, device=device)
    launch(inputs, found)
    weight, bias = layer.part(products._weights).double(), products.parameters.flat[layer.bias :][:75].double()
    sums = inputs.double() @ weight.T[:, :75] + bias
    expected = sums.clamp(min=0) if products.perceptron.relu else sums.tanh()
    # A rounding to bfloat16; tanh.approx is within 2^-11; sums of 128 products of size 1 in float32.
    torch.testing.assert_close(found[:, :75].double(), expected, rtol=ROUNDING + 2.0**-11, atol=2.0**-16)
    assert found[:, 75:].eq(0).all() and expected.abs().max() > 0.5
    alone = torch.zeros_like(found[:3])
    launch(inputs[97:100], alone)
    assert equal_bits(alone, found[97:100])
    inputs[98] = NAN
    launch(inputs, again := found.clone())
    assert again[98, :75].isnan().all() and again[98, 75:].eq(0).all()
    again[98] = found[98]
    assert equal_bits(again, found)


def test_products_of_heads_are_those_of_float64(products, device):
    layer, rows = products.layers.towers[0][2], 70
    inputs, found = bfloat16(rows, 80, seed=0, device=device), torch.full((rows, 8), NAN, device=device)
    products.product(layer, "RESULTS", 8)(inputs, found)
    expected = inputs.double() @ layer.part(products._weights).double().T
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-18, atol=2.0**-18)  # sums of 80 in float32
    assert expected.abs().max() > 0.5 and found[:, 3:].eq(0).all()


@pytest.mark.parametrize("tile_rows", [64, 192])
def test_products_back_are_those_of_float64(products, tile_rows, device):
    layer, rows = products.layers.towers[0][1], 501
    gradients, outputs = bfloat16(rows, 80, seed=0, device=device), bfloat16(rows, 128, seed=1, device=device).tanh()
    tiles, columns = -(-rows // tile_rows), products.layers.num_sums
    sums, found = torch.full((tiles, columns), -7.0, device=device), torch.full_like(outputs, NAN)
    launch = products.product(layer, "GRADIENTS", 120, first_sum=5)
    launch(gradients, found, activations=outputs, sums=sums, tile_rows=tile_rows)
    expected = gradients.double() @ layer.part(products._weights).double()
    of_outputs = outputs.double()
    expected *= (of_outputs > 0).double() if products.perceptron.relu else 1 - of_outputs.square()
    # Two roundings to bfloat16.
    torch.testing.assert_close(found[:, :120].double(), expected[:, :120], rtol=2 * ROUNDING, atol=2.0**-16)
    assert found[:, 120:].eq(0).all()
    # Of terms that were rounded once.
    for own, terms in zip(sums[:, 5:125], expected[:, :120].split(tile_rows), strict=True):
        assert ((own - terms.sum(0)).abs() <= ROUNDING * terms.abs().sum(0) + 2.0**-16).all()
    assert sums[:, :5].eq(-7).all() and sums[:, 125:].eq(-7).all()


# The forward pass


def forward_of_step(rows, t=0, *, only_values=False, kernels=None):
    """Outputs and values of a step, of all agents; where nothing was written, -7."""
    data, view = rows.rollout, rows.policy.view
    kernels = kernels or kernels_of(rows)
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    shape = (data.env.num_envs, data.env.num_agents)
    outputs = torch.full((*shape, sampler.num_parameters), -7.0, device=rows.indices.device)
    values = torch.full(shape, -7.0, device=rows.indices.device)
    mask = data.action_mask is not None and not view.continuous
    kernels.begin_rollout()
    kernels.forward()(
        obs=data.obs[t].flatten(0, 1)[(slice(None), *view.obs_slice)],
        action_mask=data.action_mask[t] if mask else None,
        outputs=None if only_values else outputs,
        values=values,
    )
    return outputs, values


@pytest.mark.parametrize("chunk_rows", [2**20, 7])
@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but({("masks, fewer choices", "float32"), ("two trunks", "bfloat16")}, product(ALL, ["float32", "bfloat16"])),
)
def test_outputs_and_values_are_those_of_the_policy(name, precision, chunk_rows, device):
    rows = rows_of(ALL[name], device, precision)
    kernels = kernels_of(rows, chunk_rows)
    outputs, values = forward_of_step(rows, kernels=kernels)
    check_outputs(rows, outputs, values)
    alone = forward_of_step(rows, kernels=kernels, only_values=True)
    assert equal_bits(alone[1], values) and alone[0].eq(-7).all()


@pytest.mark.parametrize("name", ["two heads", "masks", "box, tanh"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_forward_pass_of_the_gradients_is_that_of_the_rollout_bit_by_bit(name, precision, device):
    """Where the log-probabilities are the sampler's, no ratio differs from 1; where returns are values, none is off.

    In bfloat16 with any number of rows: products are kernels. In float32 a chunk has as many rows as a step.
    """
    rows = rows_of(ALL[name], device, precision)
    data, agents = rows.rollout, rows.policy.view.agents
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    kernels = kernels_of(rows, data.rewards[0, :, agents].numel() if precision == "float32" else 2**20)
    data.env.reset(seed=0)
    if data.action_mask is not None:
        data.action_mask[..., 0] = True  # a head without choices is for the loss none at all
    for t in range(len(data.draws)):
        outputs, values = forward_of_step(rows, t, kernels=kernels)
        outputs[outputs == -7] = 0
        drawn = sampler.sample(outputs)
        data.draws[t].copy_(drawn.actions if drawn.draws is None else drawn.draws)
        data.log_probs[t].copy_(drawn.log_probs)
        data.values[t].copy_(values)
        data.returns[t].copy_(values)
    data.advantages.nan_to_num_()
    numbers = torch.arange(data.rewards.numel(), device=rows.indices.device).view(data.rewards.shape)
    rows = rows._replace(indices=numbers[:, :, agents].flatten().contiguous())
    metrics = differentiated(rows, kernels.chunk)[1]
    assert metrics[1] == metrics[3] == metrics[4] == 0 and metrics[2].abs() > 0.1
    # Which finds a difference in one bit of one value:
    data.returns.view(-1)[rows.indices[data.active[:-1].flatten()[rows.indices]][0]] += 2.0**-20
    assert differentiated(rows, kernels.chunk)[1][1] > 0


# What is computed layer by layer


class LittleMemory(EmulatedCudaBackend):
    """Blocks of a GPU on which no network fits."""

    tensor_cores = dataclasses.replace(EmulatedCudaBackend.tensor_cores, block_shared_bytes=1 << 10)


@pytest.fixture
def small_steps(monkeypatch):
    """Kernels layer by layer also where torch would be faster."""
    monkeypatch.setattr(policy_kernels, "MIN_STEP_ROWS", 0)


def choice_of(device, precision="float32", network=None, **config):
    env = gpu_vecenv.make("tag_continuous", 2, device, autoreset_mode="next_step", **FEW)
    settings = PPOConfig(precision=precision, **config)
    policy = make_policy(env.game, ("runner",), settings, network, torch.device(device))
    return choose_kernels(policy, Rollout(env, 2), precision, settings.chunk_rows)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_networks_that_do_not_fit_are_computed_layer_by_layer(precision, device, small_steps):
    kernels, unfused_reason, torch_reason = choice_of(device, precision, hidden_sizes=(256, 256))
    assert isinstance(kernels, LayerwiseKernels) and torch_reason is None
    assert unfused_reason == "a network too large for shared memory"


@pytest.mark.parametrize(
    ("num_envs", "precision", "layerwise"),
    [
        (2**16 - 1, "float32", False),
        (2**16 - 1, "tf32", False),
        (2**16 - 1, "bfloat16", True),
        (2**16, "float32", True),
        (2**16, "tf32", True),
    ],
)
def test_small_steps_are_torchs_but_in_bfloat16(num_envs, precision, layerwise, device):
    env = gpu_vecenv.make("cartpole", num_envs, device, autoreset_mode="next_step")
    policy = make_policy(env.game, ("agent",), PPOConfig(hidden_sizes=(256, 256)), None, torch.device(device))
    kernels, _, torch_reason = choose_kernels(policy, Rollout(env, 1), precision, 1024)
    assert isinstance(kernels, LayerwiseKernels) == layerwise
    why = "faster than kernels layer by layer with 65,535 agents in a step; from 65,536 on it is not"
    assert torch_reason == (None if layerwise else why)


def test_the_agents_of_all_policies_count(device):
    """6 in an environment: 10,923 environments have 2^16."""
    for num_envs, by_torch in ((10_922, True), (10_923, False)):
        env = gpu_vecenv.make("tag_gridworld", num_envs, device, autoreset_mode="next_step", num_taggers=5)
        policy = make_policy(env.game, ("runner",), PPOConfig(hidden_sizes=(256, 256)), None, env.device)
        assert (choose_kernels(policy, Rollout(env, 1), "float32", 1024).kernels is None) == by_torch


def test_networks_that_fit_have_one_kernel_and_others_torch(device):
    kernels, *reasons = choice_of(device)
    assert isinstance(kernels, PerceptronKernels) and reasons == [None, None]
    assert choice_of(device, network=nn.Identity()) == (None, "not the default network", "not the default network")
    assert choice_of(device, hidden_sizes=()) == (None, "no hidden layers", "no hidden layers")


def test_action_spaces_that_do_not_fit_are_torchs(device):
    env = gpu_vecenv.make("tag_continuous", 2, device, **{**FEW, "acceleration_levels": 7000})
    policy = make_policy(env.game, ("runner",), PPOConfig(), None, torch.device(device))
    assert why_not_layerwise(policy, Rollout(env, 2)) == "an action space too large for shared memory"


def test_a_cpu_has_kernels_of_its_own():
    kernels, unfused_reason, torch_reason = choice_of("cpu", hidden_sizes=(256, 256))
    # With 2 environments: the rule for small steps is of kernels layer by layer.
    assert isinstance(kernels, HostKernels) and unfused_reason == "no tensor cores" and torch_reason is None


# The trainer


RUNS = {
    "two trunks": Run("cartpole", {"shared_trunk": False, "num_minibatches": 1, "chunk_rows": 20}),
    "target_kl": Run(
        "cartpole", {**BOTH, "activation": "relu", "target_kl": 1e-5, "learning_rate": 3e-3, "num_epochs": 2}
    ),
    "box": Run("pendulum", {"normalize_returns": True, "value_clip": 0.5, "hidden_sizes": (9, 8)}),
    "roles": Run("simple_adversary", {"normalize_obs": True}),
    "masks": Run(Crew, {"shared_trunk": False, "normalize_returns": True}),
    "a policy for each agent": Run(Crew, {"num_minibatches": 1}, sharing="agent"),
}


@pytest.fixture
def trainer_of(monkeypatch, one_thread, small_steps):
    """Trainers whose networks are computed layer by layer, with emulated kernels, or by torch."""
    trainers = Trainers(monkeypatch, LittleMemory, 6, num_steps=4, num_epochs=1)

    def make(run, *, kernels):
        trainer = trainers(run, kernels=kernels)
        assert None not in trainer.unfused_reasons.values()
        return trainer

    return make


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("target_kl", "two trunks") else pytest.mark.slow) for n in RUNS]
)
def test_layer_by_layer_trains_what_torch_trains(name, trainer_of):
    run = RUNS[name]
    moved, _ = check_training(trainer_of, run, iterations=2)
    assert moved > 10 * tolerance(run)


@pytest.mark.parametrize("name", ["box", *(pytest.param(n, marks=pytest.mark.slow) for n in ("target_kl", "roles"))])
def test_training_resumes_bit_by_bit(name, trainer_of, tmp_path):
    check_resume(trainer_of, RUNS[name], tmp_path / "checkpoint")


def test_an_iteration_in_stages_trains_the_same_bits(trainer_of):
    """As several processes do it, or a caller with an update loop of its own."""
    whole, stages = (trainer_of(RUNS["box"], kernels=True) for _ in range(2))
    for _ in range(2):
        whole.train_iteration()
        stages.begin_iteration()
        for learner in stages.learners.values():
            for k in range(learner.num_updates):
                learner.minibatch_gradient(k)
                learner.stages["optimizer_step"]()
        stages.end_iteration()
    assert equal_bits(state_of(whole), state_of(stages))


def test_a_rollout_has_the_weights_of_its_first_step(trainer_of):
    trainer = trainer_of(RUNS["box"], kernels=True)
    trainer.train_iteration()
    policy, data = trainer.policies["agent"], trainer.rollout
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1
        trainer.begin_iteration()
        for t in (0, 1, -1):
            expected = policy(policy.view.obs(data.obs[t]))[1]
            torch.testing.assert_close(data.values[t], expected, rtol=1e-5, atol=1e-5)  # other roundings


def test_weights_that_a_caller_replaces_are_those_that_act_and_learn(trainer_of):
    check_replaced_weights(trainer_of, RUNS["two trunks"])


def test_a_run_says_what_computes_its_policies(trainer_of, monkeypatch):
    told = [computed_by(trainer_of(RUNS["box"], kernels=kernels), "agent") for kernels in (False, True)]
    assert told == ["torch (to compare)", "kernels layer by layer (a network too large for shared memory)"]
    on_cpu = Trainer(gpu_vecenv.make("pendulum", 2, "cpu"), PPOConfig(num_steps=4, hidden_sizes=(16,)))
    assert computed_by(on_cpu, "agent") == "one kernel each, by vector instructions"
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    trainer = Trainer(gpu_vecenv.make("pendulum", 2, "cpu"), PPOConfig(num_steps=4, hidden_sizes=(16,)))
    assert computed_by(trainer, "agent") == "one kernel each"


def test_a_network_that_gets_a_hook_is_computed_by_torch(trainer_of):
    check_hooks(trainer_of, RUNS["two trunks"])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("shared_trunk", [True, False])
def test_iterations_as_graphs_train_the_same_bits_as_eager_ones(precision, shared_trunk, small_steps):
    states = []
    for graphs in (True, False):
        env = gpu_vecenv.make("tag_continuous", 64, "cuda", autoreset_mode="next_step", **FEW)
        sizes = {"hidden_sizes": (256, 256), "shared_trunk": shared_trunk, "num_steps": 16, "chunk_rows": 700}
        trainer = Trainer(env, PPOConfig(total_steps=10**6, precision=precision, **sizes), graphs=graphs)
        assert trainer.by_kernels and None not in trainer.unfused_reasons.values()
        for _ in range(3):
            trainer.train_iteration()
        assert (trainer._graphed_iteration.graph is not None) == graphs
        states.append(state_of(trainer))
        trainer.close()
    assert equal_bits(*states)


@pytest.mark.gpu
def test_products_of_bfloat16_are_added_up_in_float32():
    """1 + 2^-10 has no bfloat16; a sum of 2^-10 and ones needs more bits still."""
    if not layerwise.HAS_OUT_DTYPE:
        pytest.skip("torch before 2.8")
    a = torch.ones(64, 256, dtype=torch.bfloat16, device="cuda")
    a[:, 0] = 2.0**-10
    out = torch.zeros(64, 64, device="cuda")
    multiply(a, torch.ones(256, 64, dtype=torch.bfloat16, device="cuda"), out=out)
    assert out.eq(255 + 2.0**-10).all()
