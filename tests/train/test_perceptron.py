"""The default network's kernels against float64 and against torch, on emulated CUDA threads and on a GPU."""

import copy
from dataclasses import dataclass

import pytest
import torch
from games.crew import Crew
from games.race import Race
from games.sacrifice import Sacrifice
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
    largest_difference,
    state_of,
    tolerance,
    weights,
)
from support.perceptrons import (
    BOTH,
    CASES,
    INF,
    NAN,
    check_gradients,
    check_outputs,
    expected_of,
    moments_of,
    poisoned,
    rows_of,
    settings_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_vecenv
from gpu_vecenv.compile.backends import host
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.host_kernels import TILE, HostKernels, why_not_on_host
from gpu_vecenv.train.perceptron import (
    FORWARD_TILES,
    GRADIENT_TILES,
    METRICS,
    PerceptronKernels,
    TileShape,
    why_not_fused,
)
from gpu_vecenv.train.ppo import PPOConfig, make_policy


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


def kernels_of(rows):
    on_cpu = rows.rollout.env.functions.backend.tensor_cores is None
    why_not, kind = (why_not_on_host, HostKernels) if on_cpu else (why_not_fused, PerceptronKernels)
    assert why_not(rows.policy, rows.rollout, rows.config.precision) is None
    return kind(rows.policy, rows.rollout, rows.config.precision)


def launch_of(rows, tile=None):
    """Kernels of a policy, the launch of the gradients of the rows, and its output."""
    kernels = kernels_of(rows)
    launch, parts = kernels.gradients(len(rows.indices), settings_of(rows), tile)
    moments = moments_of(rows)
    return kernels, lambda: launch(indices=rows.indices, moments=moments), parts


def differentiated(rows, tile=None):
    """The same by the kernel."""
    _, launch, parts = launch_of(rows, tile)
    parts.fill_(NAN)  # each element is written
    launch()
    sizes = [p.numel() for p in rows.policy.parameters()]
    *gradients, metrics = parts.double().sum(0).split([*sizes, METRICS])
    return [g.view_as(p) for g, p in zip(gradients, rows.policy.parameters(), strict=True)], metrics


def check(rows, tile=None):
    check_gradients(rows, *differentiated(rows, tile))


PRECISIONS = ["float32", "tf32", "bfloat16"]
BY_COLUMNS = TileShape(32, 2, 2)  # several warps have a part of a row's columns
SHARED_WEIGHTS = TileShape(64, 4, 2, tiles=2)


QUICK = [
    (n, "float32") for n in ("relu", "sizes of no unit", "two heads", "masks, fewer choices", "images", "agent ids")
]
QUICK += [("two trunks", "tf32"), ("box", "bfloat16")]
LOW = {"two trunks", "relu", "sizes of no unit", "masks", "box", "images", "agent ids"}


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        QUICK,
        [(n, p) for n in CASES for p in PRECISIONS if (p == "float32" or n in LOW) and not n.startswith("several")],
    ),
)
def test_gradients_and_metrics_agree_with_the_loss_in_float64(name, precision, device):
    check(rows_of(CASES[name], device, precision))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        # A warp has several units, not all of them as many.
        [("wide", BY_COLUMNS), ("sizes of no unit", SHARED_WEIGHTS)],
        [
            *((n, t) for n in ("sizes of no unit", "relu, two trunks") for t in (*GRADIENT_TILES, SHARED_WEIGHTS)),
            *(("wide", tile) for tile in GRADIENT_TILES if tile.column_warps > 1),
        ],
        each=1,
    ),
)
def test_every_shape_of_tile_gives_the_gradients(name, tile, device):
    rows = rows_of(CASES[name], device)
    kernels = PerceptronKernels(rows.policy, rows.rollout, "float32")
    cores = rows.rollout.env.functions.backend.tensor_cores
    assert kernels.perceptron.blocks(tile, cores, forward=False)
    check(rows, tile)


@pytest.mark.parametrize("name", ["several tiles of a block", "several tiles, many inputs"])
@pytest.mark.parametrize("tile", [GRADIENT_TILES[0], TileShape(32, 2, 2, tiles=2)], ids=["alone", "shared weights"])
def test_a_block_adds_up_several_tiles(name, tile, device):
    rows = rows_of(CASES[name], device)
    _, _, parts = launch_of(rows, tile)
    if device == "cpu":  # a GPU has more blocks
        assert len(parts) * tile.rows < len(rows.indices)
    check(rows, tile)


@pytest.mark.parametrize("name", ["two trunks", "relu"])
def test_nan_in_an_observation_reaches_the_gradients_that_it_reaches_in_torch(name, device):
    rows = poisoned(CASES[name], NAN, device)
    (exact, _, exact_metrics), (found, metrics) = expected_of(rows), differentiated(rows)
    assert any(g.isnan().any() for g in exact)
    assert all(a.isnan().equal(b.isnan()) for a, b in zip(found, exact, strict=True))
    assert metrics[:4].isnan().all() and exact_metrics[:4].isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_observation_leaves_finite_what_it_does_in_torch(sign, device):
    """Units at their bounds have no gradient, but 0 times infinity is NaN: in the column of that input."""
    rows = poisoned(CASES["three layers, two trunks"], sign * INF, device)
    (exact, _, exact_metrics), (found, metrics) = expected_of(rows), differentiated(rows)
    columns = torch.zeros_like(found[0], dtype=torch.bool)
    columns[:, 1] = True
    for a, b in zip(found, exact, strict=True):
        assert a.isnan().equal(b.isnan())
        nan = columns if a.shape == columns.shape else torch.zeros_like(a, dtype=torch.bool)
        assert a.isnan().equal(nan)
        # As `check`, with a unit more for the weights' sums, which miss a column.
        torch.testing.assert_close(a[~nan], b[~nan], rtol=0, atol=2.0**-19 * b[~nan].norm().item())
    torch.testing.assert_close(metrics, exact_metrics, rtol=2.0**-18, atol=2.0**-18)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_normalised_infinite_observation_is_clipped(sign, device):
    check(poisoned(CASES["relu"], sign * INF, device))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        [("two trunks", SHARED_WEIGHTS)],
        [
            (n, t)
            for n in ("two trunks", "masks, fewer choices")
            for t in (GRADIENT_TILES[0], BY_COLUMNS, SHARED_WEIGHTS)
        ],
        each=1,
    ),
)
def test_neither_the_order_of_threads_nor_another_launch_changes_a_bit(name, tile, device, monkeypatch):
    found = []
    for order in ("forwards", "forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        rows = rows_of(CASES[name], device)
        _, launch, parts = launch_of(rows, tile)
        for _ in range(2):
            parts.fill_(NAN)
            launch()
            found.append(parts.clone())
    assert found[0].isfinite().all() and all(equal_bits(found[0], parts) for parts in found[1:])


# The forward pass


def forward_of_step(rows, t=0, tile=None, *, only=None, kernels=None):
    """Outputs and values of a step, of all agents, or ``only`` one of them; where nothing was written, -7."""
    data, view = rows.rollout, rows.policy.view
    kernels = kernels or kernels_of(rows)
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    shape = (data.env.num_envs, data.env.num_agents)
    outputs = torch.full((*shape, sampler.num_parameters), -7.0, device=rows.indices.device)
    values = torch.full(shape, -7.0, device=rows.indices.device)
    mask = data.action_mask is not None and not view.continuous
    kernels.forward(tile)(
        obs=data.obs[t].flatten(0, 1)[(slice(None), *view.obs_slice)],
        action_mask=data.action_mask[t] if mask else None,
        outputs=None if only == "values" else outputs,
        values=None if only == "outputs" else values,
    )
    return outputs, values


def check_forward(rows, tile=None):
    outputs, values = forward_of_step(rows, tile=tile)
    check_outputs(rows, outputs, values)
    for only, both, written in (("values", values, 1), ("outputs", outputs, 0)):
        found = forward_of_step(rows, tile=tile, only=only)
        assert equal_bits(found[written], both) and found[1 - written].eq(-7).all()


FORWARD_CASES = ["two trunks", "relu", "sizes of no unit", "two roles in one", "fewer choices", "masks", "box"]
FORWARD_CASES += ["masks, fewer choices", "box beside choices", "choices beside a box", "images"]


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(QUICK, [(n, p) for n in FORWARD_CASES for p in PRECISIONS if p == "float32" or n in LOW]),
)
def test_outputs_and_values_are_those_of_the_policy(name, precision, device):
    check_forward(rows_of(CASES[name], device, precision))


@pytest.mark.parametrize(
    ("name", "tile"),
    slow_but(
        [("sizes of no unit", FORWARD_TILES[3])],
        [(n, tile) for n in ("sizes of no unit", "masks, fewer choices") for tile in FORWARD_TILES],
        each=1,
    ),
)
def test_every_shape_of_tile_gives_the_outputs(name, tile, device):
    check_forward(rows_of(CASES[name], device, num_envs=83), tile)


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        [("two trunks", "float32"), ("masks", "bfloat16")],
        [(n, p) for n in ("two trunks", "two heads", "masks", "box, tanh") for p in PRECISIONS],
    ),
)
def test_the_forward_pass_of_the_gradients_is_that_of_the_rollout_bit_by_bit(name, precision, device):
    """Where the log-probabilities are the sampler's, no ratio differs from 1; where returns are values, none is off."""
    rows = rows_of(CASES[name], device, precision)
    data = rows.rollout
    sampler = gpu_vecenv.Sampler(data.env, squash=rows.config.squash)
    kernels = kernels_of(rows)
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
    metrics = differentiated(rows, BY_COLUMNS)[1]
    assert metrics[1] == metrics[3] == metrics[4] == 0 and metrics[0].abs() < 1e-6 and metrics[2].abs() > 0.1
    # Which finds a difference in one bit of one value:
    changed = rows.indices[data.active[:-1].flatten()[rows.indices]][0]
    data.returns.view(-1)[changed] += 2.0**-20
    assert differentiated(rows, BY_COLUMNS)[1][1] > 0


# What torch computes


def test_torch_computes_what_the_kernels_do_not(device):
    rows = rows_of(CASES["two trunks"], device)
    policy, data, game = rows.policy, rows.rollout, rows.rollout.env.game

    def reason(policy=policy, precision="float32"):
        return why_not_fused(policy, data, precision)

    def made(network=None, **config):
        return make_policy(game, ("agent",), PPOConfig(**config), network, torch.device(device))

    assert reason() is None
    assert reason(made(nn.Identity())) == "not the default network"
    assert reason(made(hidden_sizes=())) == "no hidden layers"
    assert reason(made(hidden_sizes=(1024, 1024))) == "a network too large for shared memory"
    hook = policy.network.trunk[0].register_forward_hook(lambda *_: None)
    assert reason() == "not the default network"
    hook.remove()
    assert reason() is None
    hook = policy.register_forward_hook(lambda *_: None)
    assert reason() == "not the default network"
    hook.remove()
    policy.network.actor.bias.requires_grad_(False)
    assert reason() == "weights that are frozen or on another device"
    policy.network.actor.bias.requires_grad_(True)
    assert reason(made().to("meta")) == "weights that are frozen or on another device"
    obs = data.obs
    data.obs = obs.double()
    assert reason() == "float64 observations"
    data.obs = torch.cat([obs, obs], -1)[..., ::2]
    assert reason() == "observations that are not contiguous"
    data.obs = obs
    assert reason() is None


def test_a_gpu_without_tensor_cores_has_torch(device_of_networks, monkeypatch):
    rows = rows_of(CASES["two trunks"], device_of_networks)
    backend = rows.rollout.env.functions.backend
    monkeypatch.setattr(backend, "tensor_cores", None)
    monkeypatch.setattr(backend, "device", torch.device("cuda"))
    assert why_not_fused(rows.policy, rows.rollout, "float32") == "no tensor cores"


# On a CPU, by vector instructions


QUICK_ON_CPU = {"relu", "sizes of no unit", "two heads", "masks, fewer choices", "box", "images"}
ON_CPU = [pytest.param(name, marks=[] if name in QUICK_ON_CPU else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", ON_CPU)
def test_a_cpu_has_the_gradients_and_outputs(name):
    check(rows_of(CASES[name], "cpu"))
    check_forward(rows_of(CASES[name], "cpu"))


def test_samples_of_several_parts_and_tiles_on_a_cpu():
    rows = rows_of(CASES["two trunks"]._replace(rows=1500), "cpu")
    assert 1 < len(launch_of(rows)[2]) < 1500 / TILE
    check(rows)


def test_numbers_that_are_not_finite_on_a_cpu():
    test_nan_in_an_observation_reaches_the_gradients_that_it_reaches_in_torch("two trunks", "cpu")
    test_an_infinite_observation_leaves_finite_what_it_does_in_torch(1, "cpu")


@pytest.mark.parametrize("name", ["two heads", pytest.param("box, tanh", marks=pytest.mark.slow)])
def test_the_first_epoch_on_a_cpu_begins_with_the_bits_of_the_rollout(name):
    test_the_forward_pass_of_the_gradients_is_that_of_the_rollout_bit_by_bit(name, "float32", "cpu")


def test_the_number_of_threads_changes_no_bit_on_a_cpu(monkeypatch):
    found = []
    for count in (1, 2, 5):
        monkeypatch.setattr(host, "_processors", lambda count=count: count)
        rows = rows_of(CASES["two trunks"]._replace(rows=5000), "cpu")
        _, launch, parts = launch_of(rows)
        parts.fill_(NAN)
        launch()
        found.append((parts, forward_of_step(rows)[0]))
    assert all(equal_bits(found[0], other) for other in found[1:])


def test_what_torch_computes_on_a_cpu():
    rows = rows_of(CASES["two trunks"], "cpu")
    assert why_not_fused(rows.policy, rows.rollout, "float32") == "no tensor cores"
    assert why_not_on_host(rows.policy, rows.rollout, "float32") is None
    assert why_not_on_host(rows.policy, rows.rollout, "bfloat16") == "bfloat16 on a CPU"
    large = make_policy(
        rows.rollout.env.game, ("agent",), PPOConfig(hidden_sizes=(1024, 1024)), None, torch.device("cpu")
    )
    assert why_not_on_host(large, rows.rollout, "float32") == "a network too large for a CPU's caches"


# The trainer


RUNS = {
    "two trunks": Run("cartpole", {"shared_trunk": False}),
    "target_kl": Run("cartpole", {**BOTH, "activation": "relu", "target_kl": 1e-5, "learning_rate": 3e-3}),
    "box": Run("pendulum", {"normalize_returns": True, "value_clip": 0.5}),
    "roles": Run("simple_adversary", {"normalize_obs": True}),
    "masks": Run(Crew, {"shared_trunk": False, "normalize_returns": True}),
    "a policy for each agent": Run("simple_adversary", {"normalize_obs": True}, sharing="agent"),
    "turns": Run(Race, {"normalize_obs": True}),
    "deaths": Run(Sacrifice, {"shared_trunk": False, "normalize_returns": True}, {"num_units": 3}),
}


@pytest.fixture
def trainer_of(monkeypatch, one_thread):
    """Trainers whose networks are computed by emulated kernels, or by torch."""
    return Trainers(monkeypatch, EmulatedCudaBackend, 8, num_steps=8, num_epochs=2)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "target_kl" else pytest.mark.slow) for n in RUNS])
def test_the_kernels_train_what_torch_trains(name, trainer_of):
    run = RUNS[name]
    moved, found = check_training(trainer_of, run, iterations=3)
    assert moved > 20 * tolerance(run)
    if name == "target_kl":
        assert 0 < found["skipped_fraction_agent"] < 1


@pytest.mark.parametrize(
    "name", ["target_kl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("roles", "a policy for each agent"))]
)
def test_training_resumes_bit_by_bit(name, trainer_of, tmp_path):
    check_resume(trainer_of, RUNS[name], tmp_path / "checkpoint")


def test_an_iteration_in_stages_trains_the_same_bits(trainer_of):
    """As a caller with an update loop of its own does it."""
    whole, stages = (trainer_of(RUNS["roles"], kernels=True) for _ in range(2))
    for _ in range(2):
        expected = whole.train_iteration()
        stages.begin_iteration()
        for learner in stages.learners.values():
            learner.update()
        found = stages.end_iteration()
        names = [name for name in expected if "time_fraction" not in name and "_per_s" not in name]
        # Means over episodes are NaN in the beginning.
        assert [found[name] for name in names] == pytest.approx(
            [expected[name] for name in names], rel=0, abs=0, nan_ok=True
        )
    assert equal_bits(state_of(whole), state_of(stages))


class Writes(TorchDispatchMode):
    """Names of torch's operations in this block that write to memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        views = any(
            value.alias_info is not None and not value.alias_info.is_write for value in operation._schema.returns
        )
        if not views and operation is not torch.ops.aten.unbind.int:
            self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("one_launch", [True, False])
def test_an_iteration_is_kernels_and_the_copies_of_its_first_row(trainer_of, monkeypatch, one_launch):
    """Each operation of torch's would be one or more launches."""
    trainer = trainer_of(Run("cartpole", BOTH), kernels=True)
    assert trainer.rollout_reason is None
    if not one_launch:
        monkeypatch.setattr(trainer, "_fused_rollout", None)
    trainer.train_iteration()
    with Writes() as writes:
        trainer.launch_iteration()
    # Observations and who is active, which a rollout by one launch copies itself.
    assert writes.names == ([] if one_launch else 2 * ["aten.copy_.default"])
    assert trainer.read_iteration()["iteration"] == 2


@dataclass(frozen=True)
class Twins(World):
    """Two processes with equal gradients, whose average is the gradient of one."""

    size: int = 2

    def all_reduce_mean(self, tensor):
        pass

    def all_reduce_sum(self, tensor):
        pass


def test_gradients_that_were_averaged_are_clipped_by_the_norm_of_the_average(trainer_of):
    alone, twins, halved = (trainer_of(RUNS["two trunks"], kernels=True) for _ in range(3))

    class Halved(Twins):
        def all_reduce_mean(self, tensor):
            tensor.mul_(0.5)

    twins.learners["agent"].world, halved.learners["agent"].world = Twins(), Halved()
    found = []
    for trainer in (alone, twins, halved):
        trainer.begin_iteration()
        trainer.learners["agent"].update()
        found.append(trainer.end_iteration()["grad_norm_agent"])
    assert equal_bits(state_of(alone), state_of(twins)) and found[0] == found[1]
    learner = halved.learners["agent"]
    halved.begin_iteration()
    learner.minibatch_gradient(0)
    norm = learner.flat_grad.double().norm()
    learner.stages["optimizer_step"]()
    # The norm is the first that was added since the iteration began; one rounding to float32.
    torch.testing.assert_close(learner.metric_sums[5].double(), norm, rtol=2.0**-23, atol=0)


def test_the_order_of_threads_trains_the_same_bits(trainer_of, monkeypatch):
    states = []
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)
        trainer = trainer_of(RUNS["two trunks"], kernels=True)
        trainer.train_iteration()
        states.append(state_of(trainer))
    assert equal_bits(*states)


def test_an_optimizer_that_a_caller_loads_goes_on_as_loaded(trainer_of):
    """torch puts tensors of its own in the place of those that the kernel writes."""
    trainer, other = (trainer_of(RUNS["two trunks"], kernels=True) for _ in range(2))
    for each in (trainer, other):
        each.train_iteration()
    learner, loaded = trainer.learners["agent"], other.learners["agent"]
    loaded.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    assert equal_bits(learner.optimizer_state(), loaded.optimizer_state())
    for each in (trainer, other):
        each.train_iteration()
    assert equal_bits(
        learner.optimizer_state(), loaded.optimizer_state()
    )  # the state that a checkpoint has is the one in use
    assert equal_bits(state_of(trainer), state_of(other))


def test_weights_that_a_caller_replaces_are_those_that_act_and_learn(trainer_of):
    check_replaced_weights(trainer_of, RUNS["two trunks"])


@pytest.mark.parametrize("frozen", ["network.trunk.0.weight", "network.critic.bias"])
def test_weights_that_a_caller_freezes_stay(frozen, trainer_of):
    runs = []
    for kernels in (False, True):
        trainer = trainer_of(RUNS["box"], kernels=kernels)
        parameters = dict(trainer.policies["agent"].named_parameters())
        parameters[frozen].requires_grad_(False)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        trainer.train_iteration()
        assert [name for name, p in parameters.items() if p.equal(before[name])] == [frozen]
        runs.append(trainer)
    assert largest_difference(*map(weights, runs)) < tolerance(RUNS["box"])


def test_a_network_that_gets_a_hook_is_computed_by_torch(trainer_of):
    check_hooks(trainer_of, RUNS["two trunks"])
