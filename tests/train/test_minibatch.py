"""Orders of rows, and copies of rows: permutations that seed and epoch alone decide, and what a minibatch reads."""

import itertools

import pytest
import torch
from oracles.shuffle import order_of
from scipy.stats import chi2

from gpu_vecenv import FunctionManager
from gpu_vecenv.train.learner_kernels import RowGather, clip_grad_norm_launch, shuffle_launch

P_VALUE = 1e-6  # of a chance test, for a function that is right


class Order:
    """Row numbers in the order of any seed and epoch."""

    def __init__(self, functions, rows):
        self.indices, self.seed, self.epoch = (
            torch.arange(rows, device=functions.device),
            *torch.zeros((2, 1), dtype=torch.int64, device=functions.device),
        )
        self.out = torch.full_like(self.indices, -1)
        self.launch = shuffle_launch(
            functions,
            self.indices,
            self.seed,
            self.epoch,
            torch.ones(rows, dtype=torch.bool, device=functions.device),
            torch.zeros(rows, device=functions.device),
            permutes=True,
            out=self.out,
            moments=torch.zeros((1, 4), dtype=torch.float64, device=functions.device),
        )

    def __call__(self, seed, epoch):
        self.seed.fill_(seed - (seed >> 63 << 64))
        self.epoch.fill_(epoch)
        self.launch()
        return self.out.cpu()


POWERS = [2**k + d for k in (9, 10, 13, 16, 17) for d in (-1, 0, 1)]


@pytest.mark.parametrize("numbers", [range(1, 301), POWERS, [524288, 1375000]], ids=["few", "powers", "many"])
def test_every_row_comes_once(numbers, functions):
    for rows in numbers:
        found = Order(functions, rows)(seed=rows, epoch=3)
        assert found.sort().values.equal(torch.arange(rows)), rows


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("rows", [1, 2, 3, 192, 255, 256, 257, 1000, 5000])
def test_orders_are_those_that_python_computes(rows, seed, functions):
    order = Order(functions, rows)
    for epoch in (0, 1, 2**40):
        assert order(seed, epoch).tolist() == order_of(seed, epoch, rows)


@pytest.mark.parametrize("rows", [1, 37, 300, 1025])
def test_emulated_cuda_threads_shuffle_like_the_host(rows, emulated):
    host, other = Order(FunctionManager("cpu"), rows), Order(emulated, rows)
    for seed, epoch in ((0, 0), (2**64 - 3, 12)):
        assert host(seed, epoch).clone().equal(other(seed, epoch))


def test_places_are_what_is_ordered(functions):
    order = Order(functions, 500)
    numbers = order(1, 1).clone()
    order.indices.copy_(order.indices.flip(0))
    assert order(1, 1).equal(499 - numbers)


def test_orders_of_other_epochs_and_seeds_are_others(functions):
    order = Order(functions, 4000)
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (0, 2**32), (2**63, 0)]
    orders = [torch.arange(4000), *(order(*key).clone() for key in keys)]
    for one, other in itertools.combinations(orders, 2):
        # Equal indices of two random orders are Poisson distributed about 1: more than 15 have a chance of 2e-14.
        assert one.eq(other).sum() <= 15


def spread_of(counts, expected):
    """Pearson's statistic, in units of its bound; one degree of freedom less than there are counts."""
    statistic = ((counts - expected).square() / expected).sum().item()
    return statistic / chi2.isf(P_VALUE, counts.numel() - 1)


@pytest.mark.parametrize("rows", [2, 5, 12, 100, 257])
@pytest.mark.parametrize("by", ["epoch", "seed"])
def test_each_row_goes_everywhere_equally_often(by, rows, functions):
    order, times = Order(functions, rows), 40 * max(rows, 25)
    counts = torch.zeros(3, rows, dtype=torch.float64)  # of the first row, one in the middle, the last
    for k in range(times):
        found = order(*((5, k) if by == "epoch" else (k, 5)))
        for count, row in zip(counts, (0, rows // 2, rows - 1), strict=True):
            count[found[row]] += 1
    assert all(spread_of(count, times / rows) < 1 for count in counts)


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_likely(rows, functions):
    """So every pair of rows goes to every pair of indices."""
    order, numbers = Order(functions, rows), list(itertools.permutations(range(rows)))
    counts = torch.zeros(len(numbers), dtype=torch.float64)
    for k in range(40 * len(numbers)):
        counts[numbers.index(tuple(order(9, k).tolist()))] += 1
    assert spread_of(counts, 40.0) < 1


def test_neighbours_are_neither_near_nor_in_order_more_often_than_by_chance(functions):
    """Distances of 2,000,000 pairs of rows that lie side by side, modulo the number of rows."""
    rows = 100_000
    order, counts = Order(functions, rows), torch.zeros(100, dtype=torch.float64)
    for epoch in range(20):
        found = order(3, epoch)
        distances = (found[1:] - found[:-1]) % rows  # from 1 to rows - 1, equally often
        counts += torch.bincount(distances * 100 // rows, minlength=100)
    expected = torch.full((100,), 20.0 * 1000, dtype=torch.float64)
    expected[0] -= 20  # a distance of 0 does not occur
    assert spread_of(counts, expected) < 1


# Copies


def table_of(rows, shape, dtype, device):
    numbers = torch.randint(-(2**31), 2**31 - 1, (rows, *shape), generator=torch.Generator().manual_seed(0))
    return (numbers % 256 if dtype == torch.uint8 else numbers).to(dtype).to(device)


def gathered(functions, table, indices):
    return RowGather(functions, table, len(indices))(indices)


def places_of(rows, number, device):
    return torch.randint(rows, (number,), generator=torch.Generator().manual_seed(1)).to(device)


SHAPES = [(), (1,), (3,), (4,), (5,), (16,), (20,), (71,), (4, 5, 3), (33, 4), (300,), (1029,), (4100,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64, torch.bool])
def test_copies_are_the_rows_at_their_places(dtype, shape, functions, device):
    table = table_of(50, shape, dtype, device)
    for number in (1, 31, 32, 500):
        indices = places_of(50, number, device)
        found = gathered(functions, table, indices)
        assert found.dtype == dtype and found.is_contiguous() and found.equal(table[indices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(("start", "width"), [(0, 4), (1, 3), (1, 4), (4, 8), (3, 17), (2, 0)])
def test_rows_may_lie_apart_and_begin_anywhere(start, width, dtype, functions, device):
    """A column on either side of them is never written, and what is read is theirs."""
    table = table_of(50, (24,), dtype, device)[:, start : start + width]
    indices = places_of(50, 100, device)
    assert gathered(functions, table, indices).equal(table[indices])


def test_rows_in_pieces(functions, device):
    """Parts of images, as a role with smaller ones has."""
    table = table_of(40, (3, 4, 5), torch.float32, device)[:, :2, 1:3, :4]
    indices = places_of(40, 70, device)
    assert gathered(functions, table, indices).equal(table[indices])


def test_fewer_rows_than_the_most(functions, device):
    table, indices = table_of(40, (6,), torch.float32, device), places_of(40, 70, device)
    gather = RowGather(functions, table, 70)
    assert gather(indices[:13]).equal(table[indices[:13]]) and gather(indices[:0]).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (4,), (5,), (20,), (71,), (160,), (1029,), (4100,)], ids=str)
def test_emulated_cuda_threads_gather_like_the_host(shape, dtype, emulated):
    whole = table_of(50, (*shape[:-1], shape[-1] + 7), dtype, "cpu")
    for table in (table_of(50, shape, dtype, "cpu"), whole[:, 3 : 3 + shape[0]]):  # also rows that lie apart
        for number in (1, 32, 300):
            indices = places_of(50, number, "cpu")
            assert gathered(emulated, table, indices).equal(table[indices])


@pytest.mark.parametrize("most", [1, 40, 5000])
def test_emulated_cuda_threads_gather_the_same_from_any_launch(most, emulated):
    table, indices = table_of(50, (20,), torch.float32, "cpu"), places_of(50, 2500, "cpu")
    assert RowGather(emulated, table, most)(indices).equal(table[indices])


# Steps

FINITE = [0.5, -0.25, 1.5, 0.01, 0.125]


def limited(functions, metrics, norm, *, max_grad_norm=0.5, target_kl=None, skip_update=0.0, size=700):
    """Gradient, whether no step is taken, and sums of metrics that were 1 before."""
    device = functions.device
    tensors = [torch.tensor(x, dtype=torch.float32, device=device) for x in (norm, metrics, skip_update)]
    gradient, metric_sums = torch.arange(size, device=device) / 8, torch.ones(len(metrics) + 2, device=device)
    settings = {"max_grad_norm": max_grad_norm, "target_kl": target_kl, "kl_index": 3}
    settings["learning_rate"] = torch.ones((), device=device)
    clip_grad_norm_launch(
        functions, *tensors[:2], gradient, skip_update=tensors[2], metric_sums=metric_sums, **settings
    )()
    return gradient.cpu(), tensors[2].item(), metric_sums.cpu()


@pytest.mark.parametrize(("norm", "scale"), [(0.0, 1.0), (0.49, 1.0), (1.0, 0.5), (8.0, 0.0625), (float("inf"), 0.0)])
def test_a_gradient_is_scaled_down_to_the_largest_norm(norm, scale, functions):
    gradient, skip_update, metric_sums = limited(functions, FINITE, norm)
    # The norm plus 1e-6 divides, as in torch's own function.
    torch.testing.assert_close(gradient, torch.arange(700) / 8 * scale, rtol=2e-6, atol=0)
    assert metric_sums.equal(1 + torch.tensor([*FINITE, norm, skip_update])) and skip_update == (norm == float("inf"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", range(6))
def test_what_is_not_finite_stops(place, value, functions):
    numbers = [*FINITE, 0.3]
    numbers[place] = value
    assert limited(functions, numbers[:5], numbers[5])[1] == 1


def test_kl_above_target_skips_this_update_and_all_later_ones(functions):
    for target, skip_update, expected in ((None, 0, 0), (0.02, 0, 0), (0.005, 0, 1), (0.02, 1, 1), (0.0, 0, 1)):
        assert limited(functions, FINITE, 0.3, target_kl=target, skip_update=float(skip_update))[1] == expected


def test_emulated_cuda_threads_clip_like_the_host(emulated):
    for norm in (0.3, 7.7):
        host, other = (limited(x, FINITE, norm, target_kl=0.005) for x in (FunctionManager("cpu"), emulated))
        assert host[0].equal(other[0]) and host[1] == other[1] and host[2].equal(other[2])
