"""Layers in training: gradients by the kernel against torch's own and float64, and where the kernel must keep away."""

import copy

import pytest
import torch
from support.emulated_cuda import EmulatedCudaBackend
from torch import nn

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.layers import (
    NO_ACTIVATION,
    RELU,
    TANH,
    LayerKernel,
    are_packed,
    kernel_on,
    packed,
    parameters_of,
    width_of,
)
from gpu_vecenv.train.networks import ActorCritic

HALF_ULP = 2.0**-24  # the most by which a float32 operation is off, relative to its result
SHAPES = [(0, 4), (1, 1), (5, 3), (15, 8), (100, 64), (999, 43), (999, 44), (4099, 7), (70000, 4), (300, 1100)]


def numbers(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def outputs_of(activation, x):
    return {NO_ACTIVATION: lambda x: None, TANH: torch.tanh, RELU: torch.relu}[activation](x)


@pytest.fixture
def kernel(device):
    return LayerKernel(FunctionManager(device))


@pytest.mark.parametrize("activation", [NO_ACTIVATION, TANH, RELU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_torchs_and_sums_those_of_float64(shape, activation, kernel, device):
    gradients, x = numbers(*shape, device=device), numbers(*shape, seed=1, device=device).requires_grad_()
    outputs = outputs_of(activation, x)
    expected = gradients if outputs is None else torch.autograd.grad(outputs, x, gradients)[0]
    found, sums = kernel(gradients, None if outputs is None else outputs.detach(), activation)
    # Torch's own backward of tanh may fuse a product and a difference: 1 - y * y is then off by half an ulp of 1 less.
    torch.testing.assert_close(found, expected, rtol=4 * HALF_ULP, atol=4 * HALF_ULP * 5)
    exact = found.double()
    bound = HALF_ULP * (shape[0] + 1) * exact.abs().sum(0)
    assert sums.shape == shape[1:] and ((sums - exact.sum(0)).abs() <= bound).all()


def test_what_is_not_finite_stays_so(kernel, device):
    gradients = torch.tensor([[1.0, torch.nan, torch.inf, 2.0]], device=device)
    outputs = torch.tensor([[torch.nan, 0.5, 0.5, 1.0]], device=device)
    for activation in (TANH, RELU):
        found, sums = kernel(gradients, outputs, activation)
        assert found.equal(sums[None]) or found.isnan().equal(sums[None].isnan())
        assert found[0, 1].isnan() and found[0, 2] == torch.inf
        assert found[0, 0].isnan() == (activation == TANH)  # as torch's own: the gradient goes on where x <= 0 is false


def test_an_output_of_0_lets_nothing_through_a_rectifier(kernel, device):
    gradients, outputs = numbers(40, 4, device=device), torch.zeros(40, 4, device=device)
    found, sums = kernel(gradients, outputs, RELU)
    assert found.eq(0).all() and sums.eq(0).all()


@pytest.mark.parametrize("offset", [0, 1])
def test_a_matrix_may_begin_anywhere(offset, kernel, device):
    """The same bits: a word's width is none of the sums' affair."""
    gradients, outputs = numbers(500 * 8 + 1, device=device), numbers(500 * 8 + 1, seed=1, device=device).tanh()
    parts = [x[offset : offset + 4000].view(500, 8) for x in (gradients, outputs)]
    for one, other in zip(kernel(*parts, TANH), kernel(*(x.clone() for x in parts), TANH), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("activation", [NO_ACTIVATION, TANH, RELU])
def test_emulated_cuda_threads_are_bitwise_equal_to_the_host(activation, order, monkeypatch):
    monkeypatch.setenv("EMULATED_THREADS", order)
    host = LayerKernel(FunctionManager("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        emulated = LayerKernel(FunctionManager("cpu"))
    for shape in SHAPES[:-2]:
        gradients, outputs = numbers(*shape), outputs_of(activation, numbers(*shape, seed=1))
        for one, other in zip(
            host(gradients, outputs, activation), emulated(gradients, outputs, activation), strict=True
        ):
            assert one.equal(other)


# Networks

NETWORKS = {
    "tanh": {},
    "relu": {"activation": "relu"},
    "one layer": {"hidden_sizes": (5,)},
    "no layer": {"hidden_sizes": ()},
    "apart": {"shared_trunk": False},
    "gaussian": {"gaussian": True},
    "gaussian, apart": {"gaussian": True, "shared_trunk": False},
}


def network_of(device, num_outputs=6, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ActorCritic((9,), num_outputs, **{"hidden_sizes": (16, 12), **settings}).to(device)
        for p in network.parameters():
            nn.init.normal_(p, std=0.4)
    return network


def fuses(output):
    """Whether the gradient of an output comes through one of our functions."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return any(node.name() in ("_LayerBackward", "_HeadsBackward") for node in seen)


def differentiated(network, rows, weights):
    """Outputs, and the parameters' gradients of their weighted sum."""
    outputs = network(rows)
    total = sum((x * weights[:, k : k + 1] if x.ndim == 2 else x * weights[:, k]).sum() for k, x in enumerate(outputs))
    return [x.detach() for x in outputs], torch.autograd.grad(total, list(network.parameters()))


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_network_are_those_of_float64(name, num_outputs, device):
    network = network_of(device, num_outputs, **NETWORKS[name])
    rows, weights = numbers(300, 9, device=device), numbers(300, 2, seed=1, device=device)
    network.fused = True
    exact = differentiated(copy.deepcopy(network).double(), rows.double(), weights.double())
    outputs, gradients = differentiated(network, rows, weights)
    # 300 rows of some 16 products of magnitude 1, each off by half an ulp, add up at random.
    for found, expected in zip((*outputs, *gradients), (*exact[0], *exact[1]), strict=True):
        assert found.shape == expected.shape and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert all(fuses(x) for x in network(rows))


@pytest.mark.parametrize("name", ["tanh", "apart"])
def test_gradients_of_observations_too(name, device):
    network, rows = network_of(device, **NETWORKS[name]), numbers(50, 9, device=device)
    found = []
    for network.fused in (False, True):
        given = rows.clone().requires_grad_()
        outputs, values = network(given)
        found.append(torch.autograd.grad(outputs.square().sum() + values.square().sum(), given)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)  # sums of 16 products in another order


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_outputs_alone(which, device):
    """The other's weights get zeros, or nothing."""
    network, rows = network_of(device), numbers(50, 9, device=device)
    found = []
    for network.fused in (False, True):
        total = network(rows)[which].square().sum()
        gradients = torch.autograd.grad(total, list(network.parameters()), allow_unused=True, materialize_grads=True)
        found.append(gradients)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums of 50 rows in another order


def test_what_is_not_just_linear_layers_and_activations_is_called_as_it_is(device):
    rows = numbers(20, 9, device=device)
    network = network_of(device)
    assert not any(map(fuses, network(rows)))
    network.fused = True
    assert all(map(fuses, network(rows))) and not any(map(fuses, network(rows.view(4, 5, 9))))
    with torch.no_grad():
        assert not any(map(fuses, network(rows)))
    seen = []
    changes = {
        "a normalisation between": lambda n: n.trunk.insert(1, nn.LayerNorm(16)),
        "a normalisation in a layer's place": lambda n: n.trunk.__setitem__(2, nn.LayerNorm(16)),
        "another activation": lambda n: n.trunk.__setitem__(1, nn.GELU()),
        "no bias": lambda n: n.trunk.__setitem__(0, nn.Linear(9, 16, bias=False)),
        "a hook": lambda n: n.trunk[0].register_forward_hook(lambda *_: seen.append("a layer")),
        "a hook of a head": lambda n: n.critic.register_forward_pre_hook(lambda *_: seen.append("a head")),
        "a hook of all": lambda n: n.trunk.register_full_backward_hook(lambda *_: None),
        "weights of a norm": lambda n: nn.utils.parametrizations.weight_norm(n.trunk[2]),
        "a forward of its own": lambda n: vars(n.trunk[0]).update(forward=n.trunk[0].forward),
        "float64": lambda n: n.double(),
    }
    for name, change in changes.items():
        changed = copy.deepcopy(network)
        if name == "a normalisation in a layer's place":
            changed = network_of(device, hidden_sizes=(16, 16))
            changed.fused = True
        change(changed)
        outputs = changed.to(device)(rows.double() if name == "float64" else rows)
        assert not any(map(fuses, outputs)), name
    assert "a layer" in seen
    with torch.autocast(rows.device.type, torch.bfloat16):
        assert not any(map(fuses, network(rows)))


def test_a_layer_that_comes_twice_counts_twice(device):
    network, rows = network_of(device, hidden_sizes=(9, 9)), numbers(50, 9, device=device)
    linear, activation = network.trunk[0], network.trunk[1]
    network.trunk = nn.Sequential(linear, activation, linear, activation)
    found = []
    for network.fused in (False, True):
        outputs, values = network(rows)
        assert fuses(values) == network.fused
        total = outputs.square().sum() + values.square().sum()
        found.append([outputs.detach(), *torch.autograd.grad(total, list(network.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums of 50 rows in another order


def test_names_of_weights_are_the_same():
    network = network_of("cpu", gaussian=True)
    before = list(network.state_dict())
    network.fused = True
    assert list(network.state_dict()) == before and "fused" not in before


# Where gradients lie


@pytest.mark.parametrize("count", [1, 2, 3, 4, 42])
def test_columns_of_one_tensor_are_joined_without_a_copy(count):
    rows = numbers(10, width_of(count))
    assert width_of(count) % 4 == 0 and count < width_of(count) <= count + 4
    parameters, values = rows[:, :count], rows[:, count]
    assert are_packed(parameters, values)
    both = packed(parameters, values)
    assert both.data_ptr() == rows.data_ptr() and both.equal(rows)
    for others in ((parameters.clone(), values), (parameters, values.clone()), (rows[:, 1 : count + 1], rows[:, 0])):
        assert not are_packed(*others)
        both = packed(*others)
        assert both.shape == rows.shape and both[:, :count].equal(others[0])
        assert both[:, count].equal(others[1]) and both.isfinite().all()
    cut = rows.flatten()[: -(width_of(count) - count - 1) or None].clone()  # without what fills the last row
    if len(cut) < rows.numel():
        part = cut.as_strided((10, count), (width_of(count), 1)), cut[count :: width_of(count)]
        assert not are_packed(*part) and packed(*part)[:, : count + 1].equal(rows[:, : count + 1])


def test_a_device_has_one_kernel(device):
    place = torch.zeros(1, device=device).device
    assert kernel_on(place) is kernel_on(place)


def test_parameters_are_those_of_torch_in_their_order():
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(shared, nn.Linear(2, 1, bias=False)))
    module = nn.ModuleDict({"a": inner, "b": nn.PReLU(), "c": shared, "d": nn.Sequential()})
    module.own = nn.Parameter(torch.zeros(1))
    module.register_module("none", None)
    found, expected = parameters_of(module), list(module.parameters())
    assert len(found) == len(expected) == 7
    assert all(one is other for one, other in zip(found, expected, strict=True))
