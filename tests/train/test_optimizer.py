"""The optimizer's kernels: sums of partial gradients and of squares, and steps of Adam with a clipped gradient."""

import ctypes

import numpy as np
import pytest
import torch

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile.backends import symbol
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.optimizer import (
    KERNELS,
    adam_launch,
    adam_launch_by_addresses,
    column_sums_launch,
    few_squares,
    num_squares,
    sum_parts_launch,
    sum_squares_launch,
)

HALF_ULP = 2.0**-24  # the largest relative error of a rounding to float32
FINITE = [0.5, -0.25, 1.5, 0.01, 0.125]
KL = 3  # index of 0.01
NAN, INF = float("nan"), float("inf")
SIZES = [1, 31, 1024, 5000, 20000]  # two blocks, or two host threads, begin at 257 and 8192


def bits(*tensors):
    return [tensor.cpu().numpy().tobytes() for tensor in tensors]


def on_workers(functions, kernel, launch, workers):
    """Runs a host kernel on worker after worker, from the last to the first."""
    program = functions.compile(cuda_folder() / "learner/optimizer.cu", kernels=KERNELS)
    function = program.module.library[symbol(kernel)]
    for worker in reversed(range(workers)):
        function(worker, workers, ctypes.byref(launch.fields))


# Sums


def parts_of(rows, columns):
    """Numbers of many sizes, so that another order gives other bits."""
    random = np.random.default_rng(rows)
    return (random.normal(size=(rows, columns)) * 10.0 ** random.uniform(-3, 3, (rows, columns))).astype(np.float32)


def sum_in_order(parts):
    """32 sums of every 32nd row, each from 0; then their sum."""
    groups = np.zeros((32, parts.shape[1]), np.float32)
    for row, part in enumerate(parts):
        groups[row % 32] += part
    total = groups[0]
    for group in groups[1:]:
        total = total + group
    return total


class Sums:
    """A launch that sums parts, all of whose columns can learn, and what it writes."""

    def __init__(self, functions, parts, num_squared=None):
        parts = torch.from_numpy(parts).to(functions.device)
        self.trainable = torch.ones(parts.shape[1], dtype=torch.bool, device=functions.device)
        self.out = torch.full((parts.shape[1],), NAN, device=functions.device)
        self.squares = torch.full((num_squares(parts.shape[1]),), NAN, dtype=torch.float64, device=functions.device)
        written = {"trainable": self.trainable, "out": self.out, "squares": self.squares}
        num_squared = parts.shape[1] if num_squared is None else num_squared
        self.launch = sum_parts_launch(functions, parts, **written, num_squared=num_squared)

    def __call__(self):
        self.launch()
        return self.out.cpu().numpy()


def summed(functions, parts):
    return Sums(functions, parts)()


SHAPES = [(1, 1), (7, 31), (8, 32), (9, 33), (64, 5), (65, 64), (132, 1000), (264, 1025)]


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (132, 70000)])
def test_sums_have_one_order(rows, columns, functions):
    parts = parts_of(rows, columns)
    assert summed(functions, parts).tobytes() == sum_in_order(parts).tobytes()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_emulated_cuda_threads_sum_like_the_host(rows, columns, emulated):
    parts = parts_of(rows, columns)
    assert summed(emulated, parts).tobytes() == sum_in_order(parts).tobytes()


def test_zeros_of_either_sign_and_what_is_not_finite(functions):
    parts = np.zeros((64, 4), np.float32)
    parts[:, 0], parts[17, 1], parts[28, 2], parts[3, 3], parts[20, 3] = -0.0, NAN, INF, INF, -INF
    found = summed(functions, parts)
    np.testing.assert_array_equal(found, [0, NAN, INF, NAN])
    assert not np.signbit(found[0])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_host_threads_gives_the_same_sums(workers):
    functions, parts = FunctionManager("cpu"), parts_of(20, 100)
    sums, whole = Sums(functions, parts), Sums(functions, parts)
    on_workers(functions, "sum_parts", sums.launch, workers)
    whole()
    assert bits(sums.out) == [sum_in_order(parts).tobytes()] and sums.squares.equal(whole.squares)


@pytest.mark.parametrize("num_squared", [0, 1, 31, 64, 95, 100])
def test_squares_are_those_of_the_first_sums(num_squared, functions):
    parts = parts_of(20, 100)
    sums = Sums(functions, parts, num_squared)
    found = sums().astype(np.float64)
    blocks = [found[k : min(k + 32, num_squared)] for k in range(0, 100, 32)]
    # Each sum of 32 squares in double has an order of its own.
    np.testing.assert_allclose(sums.squares.cpu(), [(block**2).sum() for block in blocks], rtol=1e-14)


def test_emulated_cuda_threads_square_like_the_host(emulated):
    parts = parts_of(9, 70)
    host, other = Sums(FunctionManager("cpu"), parts, 66), Sums(emulated, parts, 66)
    host(), other()
    assert host.squares.equal(other.squares)


def test_columns_that_cannot_learn_have_no_gradient(functions):
    parts = parts_of(12, 70)
    parts[3, 40] = NAN  # not even of what is not finite
    sums = Sums(functions, parts)
    sums.trainable[30:50] = False
    found, expected = sums(), sum_in_order(parts)
    expected[30:50] = 0
    assert found.tobytes() == expected.tobytes()
    assert sums.squares.sum().item() == pytest.approx((expected.astype(np.float64) ** 2).sum(), rel=1e-14)


def check_order(functions, rows, columns):
    """Two calls with other tensors, as the gradients of a layer have."""
    random = np.random.default_rng(columns)
    out_indices = random.permutation(columns).astype(np.int32)
    launch = column_sums_launch(functions, rows, torch.from_numpy(out_indices).to(functions.device))
    for factor in (1, 3):
        parts = factor * parts_of(rows, columns)
        out = torch.full((columns,), NAN, device=functions.device)
        launch(parts=torch.from_numpy(parts).to(functions.device), out=out)
        assert out.cpu().numpy()[out_indices].tobytes() == sum_in_order(parts).tobytes()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_of_columns_are_stored_in_another_order(rows, columns, functions):
    check_order(functions, rows, columns)


def test_emulated_cuda_threads_store_sums_in_another_order(emulated):
    check_order(emulated, 65, 100)


class Squares:
    """A launch that sums the squares of a gradient, of which every seventh element cannot learn, and what it writes."""

    def __init__(self, functions, size, count):
        device = functions.device
        self.before = torch.from_numpy(parts_of(1, size)[0]).to(device)
        self.before[::7] = NAN  # not even this counts
        self.gradient = self.before.clone()
        self.trainable = (torch.arange(size) % 7 != 0).to(device)
        self.squares, self.skip_update = torch.full((count,), NAN, dtype=torch.float64), torch.zeros(())
        self.squares, self.skip_update = self.squares.to(device), self.skip_update.to(device)
        written = {"trainable": self.trainable, "squares": self.squares, "skip_update": self.skip_update}
        self.launch = sum_squares_launch(functions, self.gradient, **written)

    @property
    def written(self):
        return self.gradient, self.squares


COUNTS = [(1, 1), (7, 3), (256, 1), (257, 2), (5000, 20), (5000, 157), (20000, 1), (10, 9)]  # also with empty parts


@pytest.mark.parametrize(("size", "count"), [*COUNTS, (10**6, few_squares(10**6))])
def test_squares_of_a_gradient_are_summed_part_after_part(size, count, functions):
    sums = Squares(functions, size, count)
    sums.launch()
    expected = torch.where(sums.trainable, sums.before, 0)
    assert bits(sums.gradient) == bits(expected)
    width = -(-size // count)
    squares = torch.nn.functional.pad(expected.double().square(), (0, width * count - size)).view(count, width).sum(1)
    # Each sum of squares in double has an order of its own.
    torch.testing.assert_close(sums.squares, squares, rtol=1e-13, atol=0)


def test_no_squares_are_summed_of_a_skipped_update(functions):
    sums = Squares(functions, 600, 3)
    sums.skip_update.fill_(1)
    sums.launch()
    assert bits(sums.gradient) == bits(sums.before) and sums.squares.isnan().all()


@pytest.mark.parametrize(("size", "count"), COUNTS)
def test_emulated_cuda_threads_sum_squares_like_the_host(size, count, emulated):
    host, other = Squares(FunctionManager("cpu"), size, count), Squares(emulated, size, count)
    host.launch(), other.launch()
    assert bits(*host.written) == bits(*other.written)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_host_threads_sums_the_same_squares(workers):
    functions = FunctionManager("cpu")
    sums, whole = Squares(functions, 5000, 20), Squares(functions, 5000, 20)
    on_workers(functions, "sum_squares", sums.launch, workers)
    whole.launch()
    assert bits(*sums.written) == bits(*whole.written)


# Steps


class Adam:
    """Parameters, Adam's state and what one launch reads and writes."""

    def __init__(
        self,
        functions,
        size,
        *,
        start=0,
        max_grad_norm=0.5,
        target_kl=None,
        learning_rate=0.01,
        betas=(0.9, 0.999),
        **rates,
    ):
        self.random = torch.Generator().manual_seed(size)
        device = functions.device
        # From below eps to 1: each parameter has its own.
        self.gradient_scale = 10 ** (-6 * torch.rand(size, generator=self.random))
        self.parameters = torch.randn(size, generator=self.random).to(device)
        self.exp_avg, self.exp_avg_sq, self.gradient = torch.zeros((3, size), device=device)
        self.steps = torch.full((3,), float(start), device=device)
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.metrics = torch.tensor(FINITE, device=device)
        self.metric_sums, self.skip_update = torch.zeros(7, device=device), torch.zeros((), device=device)
        self.squares = torch.zeros(num_squares(size), dtype=torch.float64, device=device)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        del tensors["gradient_scale"]
        written = {"trainable": torch.ones(size, dtype=torch.bool, device=device), "squares": self.squares}
        self.square = sum_squares_launch(
            functions, self.gradient, **written, skip_update=torch.zeros_like(self.steps[0])
        )
        settings = {"max_grad_norm": max_grad_norm, "target_kl": target_kl, "kl_index": KL, "betas": betas, **rates}
        self.launch = self.prepared(functions, tensors, settings)

    def prepared(self, functions, tensors, settings):
        return adam_launch(functions, **tensors, **settings)

    def draw(self):
        gradient = torch.randn(len(self.gradient), generator=self.random) * self.gradient_scale
        self.gradient.copy_(gradient)
        self.square()

    @property
    def updated(self):
        return self.parameters, self.exp_avg, self.exp_avg_sq, self.steps

    @property
    def written(self):
        return *self.updated, self.metric_sums, self.skip_update


class AdamByAddresses(Adam):
    """The same, of parameters that are tensors of their own, between which nothing is written."""

    def prepared(self, functions, tensors, settings):
        left, sizes = len(self.gradient), list[int]()
        for count in (1, 300, 0, 256, 255, 512):
            if count <= left:
                sizes.append(count)
                left -= count
        sizes.append(left)
        flat = [tensors.pop(name) for name in ("parameters", "exp_avg", "exp_avg_sq")]
        steps = tensors.pop("steps")
        # Each parameter is followed by ten numbers that are no parameter's.
        self.kept = [torch.full((len(self.gradient) + 10 * len(sizes),), 7.0, device=functions.device) for _ in flat]
        pairs = [count for size in sizes for count in (size, 10)]
        self.parts = [kept.split(pairs) for kept in self.kept]
        for parts, values in zip(self.parts, flat, strict=True):
            for part, own in zip(parts[::2], values.split(sizes), strict=True):
                part.copy_(own)
        self.own_steps = [steps[0].clone() for _ in sizes]
        tensors_of = zip(*(parts[::2] for parts in self.parts), self.own_steps, strict=True)
        addresses = torch.tensor([[x.data_ptr() for x in own] for own in tensors_of]).to(functions.device)
        return adam_launch_by_addresses(functions, addresses, sizes, **tensors, **settings)

    @property
    def updated(self):
        assert all(gap.eq(7).all() for parts in self.parts for gap in parts[1::2])
        assert len({step.item() for step in self.own_steps}) == 1
        return *(torch.cat(parts[::2]) for parts in self.parts), self.own_steps[0].expand(3)


def torch_step(gradient, learning_rate, betas, parameters, exp_avg, exp_avg_sq, steps):
    """Parameters, moments and number of steps after a step of torch's optimizer."""
    parameters = parameters.clone()
    parameters.grad = gradient
    settings = {"lr": learning_rate, "betas": betas, "eps": 1e-5}
    optimizer = torch.optim.Adam([parameters], **settings, fused=True, capturable=gradient.device.type == "cuda")
    state = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone(), "step": steps[0].clone()}
    optimizer.state[parameters] = state
    optimizer.step()
    return parameters, *state.values()


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("size", SIZES)
def test_steps_are_those_of_torch(size, max_grad_norm, start, functions):
    """Each of 20, from where the one before has led."""
    on_gpu = functions.device.type == "cuda"
    # Torch's code for GPUs rounds the decay rates to float, which would make 1 - 0.999 smaller by 1.3e-5: these are
    # floats. It takes their powers in float too, up to 4 ulps off (CUDA's documentation of powf), of numbers below 1.
    betas, error_of_power = ((0.875, 1 - 2.0**-10), 4 * HALF_ULP) if on_gpu else ((0.9, 0.999), 0)
    adam = Adam(functions, size, start=start, max_grad_norm=max_grad_norm, betas=betas)
    for step in range(start + 1, start + 21):
        adam.draw()
        adam.learning_rate.fill_(0.01 * (1 - (step - start) / 40))
        adam.metric_sums.zero_()
        before, gradient = [x.clone() for x in adam.updated], adam.gradient.clone()
        adam.launch()
        norm = adam.metric_sums[5]
        # Both add squares in double, in orders of their own, and then round to float, perhaps to neighbours.
        torch.testing.assert_close(norm, gradient.double().norm().float(), rtol=2 * HALF_ULP, atol=0)
        # A number that torch divides by a tensor is multiplied by its reciprocal, with one rounding more.
        clipped = gradient * (torch.full_like(norm, max_grad_norm) / (norm + 1e-6)).clamp(max=1)
        parameters, exp_avg, exp_avg_sq, steps = torch_step(clipped, adam.learning_rate, betas, *before)
        assert steps == step and adam.steps.eq(step).all() and adam.gradient.equal(gradient)
        # Torch rounds each operation to float. For the first moment these are three, with numbers as large as the
        # larger of moment and gradient; for the second they are four. On a GPU they are fewer, fused with a product.
        # Ours rounds once. Measured on a CPU 2.0 and 3.1 half ulps.
        largest = torch.maximum(before[1].abs(), clipped.abs())
        assert ((adam.exp_avg - exp_avg).abs() <= 4 * HALF_ULP * largest).all()
        assert ((adam.exp_avg_sq - exp_avg_sq).abs() <= 5 * HALF_ULP * exp_avg_sq).all()
        # One ulp of the parameter, and of its change what the moments differ by (half as much under the root), six
        # operations and the corrections of the bias. Measured on a CPU 3.4 half ulps of the change.
        first, second = (1 - beta**step for beta in betas)
        correction = error_of_power / first + error_of_power / second / 2
        root = (exp_avg_sq.double() / second).sqrt()
        change = adam.learning_rate * largest.double() / first / (root + 1e-5)
        bound = 2 * HALF_ULP * parameters.abs() + ((4 + 2.5 + 6) * HALF_ULP + correction) * change
        assert ((adam.parameters - parameters).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
def test_every_device_takes_the_same_steps(size, functions):
    runs = []
    for where in (FunctionManager("cpu"), functions):
        adam = Adam(where, size)
        for _ in range(5):
            adam.draw()
            adam.launch()
        runs.append(bits(*adam.written))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("size", [1, 31, 256, 257, 1025, 5000])
def test_emulated_cuda_threads_step_like_the_host(size, emulated):
    runs = []
    for where in (FunctionManager("cpu"), emulated):
        adam = Adam(where, size, target_kl=0.02)
        for kl in (0.01, 0.01, 0.03, 0.01):  # the last two are skipped
            adam.draw()
            adam.metrics[KL] = kl
            adam.launch()
        assert adam.steps.tolist() == [2, 2, 2] and adam.skip_update == 1
        runs.append(bits(*adam.written))
    assert runs[0] == runs[1]


def check_addresses(functions, size):
    """Steps with parameters that lie apart have the bits of those with parameters in one tensor."""
    runs = []
    for kind in (Adam, AdamByAddresses):
        adam = kind(functions, size, start=9, target_kl=0.02, desired_kl=0.004)
        for kl in (0.01, 0.001, 0.03, 0.01):  # the last two are skipped
            adam.draw()
            adam.metrics[KL] = kl
            adam.launch()
        assert adam.updated[3].tolist() == [11] * 3 and adam.skip_update == 1
        runs.append(bits(*adam.written, adam.learning_rate))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("size", [*SIZES, 10**6])
def test_parameters_may_be_anywhere(size, functions):
    check_addresses(functions, size)


@pytest.mark.parametrize("size", [1, 600, 5000])
def test_emulated_cuda_threads_find_parameters_anywhere(size, emulated):
    check_addresses(emulated, size)


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_host_threads_finds_the_parameters(workers):
    functions = FunctionManager("cpu")
    one, many = AdamByAddresses(functions, 3000), AdamByAddresses(functions, 3000)
    for _ in range(3):
        one.draw()
        many.draw()
        one.launch()
        on_workers(functions, "adam_step_by_addresses", many.launch, workers)
    assert bits(*one.written) == bits(*many.written)


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("size", [1, 1000])
def test_any_number_of_host_threads_takes_the_same_steps(size, workers):
    functions = FunctionManager("cpu")
    one, many = Adam(functions, size), Adam(functions, size)
    for step in (1, 2, 3):
        one.draw()
        many.draw()
        on_workers(functions, "adam_step", one.launch, 1)
        on_workers(functions, "adam_step", many.launch, workers)
        assert one.steps.tolist() == [step] * 3
    assert bits(*one.written) == bits(*many.written)


# Skipped updates


def decided(functions, *, size=3000, metrics=FINITE, gradient=None, skip_update=0.0, **settings):
    """Whether the update was skipped; all that a launch writes was right for that."""
    adam = Adam(functions, size, **settings)
    adam.draw()
    adam.exp_avg.fill_(0.25)
    adam.exp_avg_sq.fill_(0.5)
    if gradient is not None:
        adam.gradient[size // 2] = gradient
        adam.square()
    adam.metrics.copy_(torch.tensor(metrics))
    adam.metric_sums.fill_(1)
    adam.skip_update.fill_(skip_update)
    before = bits(*adam.updated)
    adam.launch()
    after, skipped = bits(*adam.updated), adam.skip_update.item()
    assert skipped in (0, 1) and all((a == b) == bool(skipped) for a, b in zip(after, before, strict=True))
    norm = adam.gradient.double().norm().float().item()
    # After a skipped update metrics and norm are of none.
    expected = (
        torch.tensor([*metrics, norm, skipped] if skip_update == 0 else [*[0.0] * (len(metrics) + 1), skipped]) + 1
    )
    # The norm's sum of squares has another order, and one more rounding follows.
    torch.testing.assert_close(adam.metric_sums.cpu(), expected, rtol=4 * HALF_ULP, atol=0, equal_nan=True)
    return skipped


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", range(5))
def test_a_metric_that_is_not_finite_skips_the_update(place, value, functions):
    assert decided(functions, metrics=[value if k == place else x for k, x in enumerate(FINITE)])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 31, 5000])
def test_a_gradient_that_is_not_finite_skips_the_update(size, value, functions):
    assert decided(functions, size=size, gradient=value)


def test_the_squares_of_large_gradients_are_finite(functions):
    """Their sum is beyond a float, their norm is not."""
    assert not decided(functions, gradient=1e30)


@pytest.mark.parametrize(
    ("target", "before", "expected"),
    [(None, 0, 0), (0.02, 0, 0), (0.005, 0, 1), (0.0, 0, 1), (0.02, 1, 1), (None, 1, 1)],
)
def test_kl_above_target_skips_this_update(target, before, expected, functions):
    assert decided(functions, target_kl=target, skip_update=float(before)) == expected


def test_updates_are_skipped_until_the_flag_is_cleared(functions):
    adam, steps = Adam(functions, 2500, target_kl=0.02), []
    for kl, cleared in ((0.01, False), (0.03, False), (0.01, False), (0.01, True), (0.01, False)):
        adam.draw()
        adam.metrics[KL] = kl
        if cleared:
            adam.skip_update.zero_()
        adam.launch()
        steps.append((adam.steps[0].item(), adam.skip_update.item()))
    assert steps == [(1, 0), (1, 1), (1, 1), (2, 0), (3, 0)] and adam.metric_sums[6] == 2
