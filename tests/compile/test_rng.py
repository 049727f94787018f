"""rng.cuh: the published known answers, the distributions, and that no two streams are alike.

Everything is deterministic. A statistic is compared with a critical value that a fair generator exceeds with
probability 1e-6 or less; the seeds were not chosen.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from oracles.philox import ONES, philox
from reliability.rng import KNOWN
from support.kernels import signature, unpack

from gpu_vecenv.compile.function_manager import FunctionManager, Program

DRAWS = 1 << 20
STREAMS = {"reset": 0, "step": 1, "sampler": 2, "random action": 3}
# 1e-6 quantiles: of the standard normal, two-sided, and of Kolmogorov's distribution, sqrt(log(2 / 1e-6) / 2).
NORMAL_QUANTILE = 4.89
KOLMOGOROV_QUANTILE = 2.70
# And of chi-square, by degrees of freedom.
CHI_SQUARE_QUANTILE = {
    1: 23.92,
    2: 27.63,
    4: 33.37,
    6: 38.25,
    99: 180.79,
    999: 1226.04,
    1023: 1252.58,
    1535: 1812.91,
}

TEXT = """
#include "rng.cuh"

HD Rng rng_of(const u64* seed, const u64* env_index, u32 stream, const u32* episode, const u32* step, i64 k) {
    u32 key[2];
    env_key(seed[k], env_index[k], key);
    return {key[0], key[1], stream, episode[k], step[k]};
}

KERNEL(known_answers) {
    auto [counter, key, out, n] = args;
    FOR_ITEMS (k, n) {
        const u32* c = counter + 4 * k;
        Philox4 block = philox({{c[0], c[1], c[2], c[3]}}, key[2 * k], key[2 * k + 1]);
        for (int i = 0; i < 4; ++i) out[4 * k + i] = block.word[i];
    }
}

KERNEL(float_of_word) {
    FOR_ITEMS (k, args.n) args.out[k] = (float)(args.word[k] >> 8) * 0x1p-24f;
}
"""
DRAW = """
KERNEL(%s) {
    %s
    FOR_ITEMS (k, n) out[k] = rng_of(seed, env_index, stream, episode, step, k).%s;
}
"""
DRAW_ARGUMENTS = (
    "const u64* seed, const u64* env_index, u32 stream, const u32* episode, const u32* step, const u32* item, "
    "const u32* draw, u32 size, {}* out, i64 n"
)
KINDS = {
    "word": ("u32", torch.uint32, "word(item[k], draw[k])"),
    "uniform": ("float", torch.float32, "uniform(item[k], draw[k])"),
    "below": ("i32", torch.int32, "below(item[k], draw[k], size)"),
    "normal": ("float", torch.float32, "normal(item[k], draw[k])"),
}


@cache
def program(device: str) -> Program:
    kernels = [signature(kind, DRAW_ARGUMENTS.format(c_type)) for kind, (c_type, _, _) in KINDS.items()]
    text = TEXT + "".join(DRAW % (own.name, unpack(own), KINDS[own.name][2]) for own in kernels)
    kernels.append(signature("known_answers", "const u32* counter, const u32* key, u32* out, i64 n"))
    kernels.append(signature("float_of_word", "const u32* word, float* out, i64 n"))
    return FunctionManager(device).compile(text, name="rng_probe.cu", kernels=kernels)


def draws(device, kind, *, seed=1, env_index=0, stream=STREAMS["step"], episode=0, step=0, item=0, draw=0, size=0):
    """The draws of one kind, the arguments broadcast against each other."""
    values = {name: np.asarray(x, np.uint64) for name, x in (("seed", seed), ("env_index", env_index))}
    narrow = {"episode": episode, "step": step, "item": item, "draw": draw}
    values |= {name: np.asarray(x, np.uint32) for name, x in narrow.items()}
    arrays = dict(zip(values, np.broadcast_arrays(*values.values()), strict=True))
    shape, n = arrays["seed"].shape, arrays["seed"].size
    tensors = {name: torch.from_numpy(np.array(x.ravel())).to(device) for name, x in arrays.items()}
    out = torch.zeros(n, dtype=KINDS[kind][1], device=device)
    program(device).launch(kind, n, **tensors, stream=stream, size=size, out=out, n=n)
    return out.cpu().numpy().reshape(shape)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2).sum() / expected)


def assert_uncorrelated(x: np.ndarray, y: np.ndarray) -> None:
    """The correlation of independent samples is normal with variance 1 / n."""
    correlation = np.corrcoef(x.ravel(), y.ravel())[0, 1]
    assert abs(correlation) * math.sqrt(x.size) < NORMAL_QUANTILE, correlation


def test_philox_gives_the_published_answers(device):
    counter, key, expected = (np.array(column, np.uint32) for column in zip(*KNOWN, strict=True))
    out = torch.zeros(expected.shape, dtype=torch.uint32, device=device)
    inputs = {name: torch.from_numpy(x).to(device) for name, x in (("counter", counter), ("key", key))}
    program(device).launch("known_answers", len(KNOWN), **inputs, out=out, n=len(KNOWN))
    assert out.cpu().numpy().tolist() == expected.tolist()


def test_the_python_form_gives_the_published_answers():
    assert [philox(counter, key) for counter, key, _ in KNOWN] == [list(answer) for *_, answer in KNOWN]


def test_every_coordinate_of_a_draw_counts_with_all_its_bits(device):
    """The layout of the counter, written once more in Python: a change of it would change every recorded run."""
    generator = np.random.default_rng(3)
    for case in range(24):
        seed, env_index = (int(generator.integers(0, 2**64, dtype=np.uint64)) for _ in range(2))
        episode, step, item = (int(generator.integers(0, 2**32)) for _ in range(3))
        draw, stream = int(generator.integers(0, 2**28)), case % 4
        where = {"seed": seed, "env_index": env_index, "stream": stream, "episode": episode, "step": step, "item": item}
        key = philox([env_index & ONES, env_index >> 32, 0, 0], [seed & ONES, seed >> 32])[:2]
        block = philox([stream << 29 | draw >> 2, item, step, episode], key)
        word = block[draw & 3]
        assert draws(device, "word", draw=draw, **where).item() == word
        assert draws(device, "uniform", draw=draw, **where).item() == (word >> 8) / 2**24
        block = philox([stream << 29 | 1 << 28 | draw, item, step, episode], key)
        for n in (1, 2, 3, 1000, 2**31 - 1):
            expected = (block[0] + (block[1] << 32)) * n >> 64
            assert draws(device, "below", draw=draw, size=n, **where).item() == expected


def test_uniform_numbers_are_at_least_0_and_below_1(device):
    words = np.array([0, 255, 256, ONES - 256, ONES - 255, ONES], np.uint32)
    out = torch.zeros(len(words), device=device)
    program(device).launch("float_of_word", 6, word=torch.from_numpy(words).to(device), out=out, n=6)
    assert out.tolist() == [0.0, 0.0, 2.0**-24, 1 - 2.0**-23, 1 - 2.0**-24, 1 - 2.0**-24]
    u = draws(device, "uniform", draw=np.arange(1 << 22))
    assert u.dtype == np.float32
    assert u.min() >= 0 and u.max() < 1
    assert u.min() < 2**-18 and u.max() > 1 - 2**-18


@pytest.mark.parametrize("axis", ["draw", "item", "step", "episode", "env_index", "seed"])
def test_uniform_numbers_are_uniform_along_every_coordinate(device, axis):
    u = draws(device, "uniform", **{axis: np.arange(DRAWS)}).astype(np.float64)
    # 24 bits: mean 1/2 - 2^-25, variance 1/12 but for 2^-50. The variance's own variance is 1/180 per draw.
    assert abs(u.mean() - 0.5) * math.sqrt(12 * DRAWS) < NORMAL_QUANTILE
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) * math.sqrt(180 * DRAWS) < NORMAL_QUANTILE
    assert chi_square(np.bincount((u * 1024).astype(int), minlength=1024)) < CHI_SQUARE_QUANTILE[1023]
    low_bits = (u * 2**24).astype(np.int64) % 1024
    assert chi_square(np.bincount(low_bits, minlength=1024)) < CHI_SQUARE_QUANTILE[1023]
    pairs = (u[::2] * 32).astype(int) * 32 + (u[1::2] * 32).astype(int)
    assert chi_square(np.bincount(pairs, minlength=1024)) < CHI_SQUARE_QUANTILE[1023]


@pytest.mark.parametrize("n", [2, 3, 5, 7, 100, 1000])
def test_bounded_integers_are_unbiased(device, n):
    drawn = draws(device, "below", size=n, item=np.arange(1024)[:, None], draw=np.arange(1024))
    assert drawn.min() == 0 and drawn.max() == n - 1
    assert chi_square(np.bincount(drawn.ravel(), minlength=n)) < CHI_SQUARE_QUANTILE[n - 1]


def test_large_bounds_are_reached_evenly(device):
    n = 3 * 2**29  # a modulo of 32 bits would draw two thirds of them 3 times for 2 of the others
    drawn = draws(device, "below", size=n, draw=np.arange(DRAWS))
    assert drawn.min() >= 0 and drawn.max() < n
    assert chi_square(np.bincount(drawn // 2**20, minlength=1536)) < CHI_SQUARE_QUANTILE[1535]
    assert set(draws(device, "below", size=1, draw=np.arange(1000))) == {0}


def test_normal_numbers_are_normal(device):
    z = draws(device, "normal", draw=np.arange(DRAWS)).astype(np.float64)
    assert np.isfinite(z).all()
    # Moments 0, 1, 0, 3, whose estimates have variances 1, 2, 15 and 96 per draw.
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        error = abs((z**power).mean() - moment)
        assert error * math.sqrt(DRAWS / variance) < NORMAL_QUANTILE, power
    z.sort()
    distribution = 0.5 * (1 + torch.erf(torch.from_numpy(z) / math.sqrt(2)).numpy())
    rank = np.arange(DRAWS + 1) / DRAWS
    distance = max((rank[1:] - distribution).max(), (distribution - rank[:-1]).max())
    assert distance * math.sqrt(DRAWS) < KOLMOGOROV_QUANTILE
    assert z[-1] > 4 and z[0] < -4


def test_normal_and_bounded_draws_share_no_words_with_each_other_or_with_uniform_ones(device):
    where = np.arange(DRAWS)
    z, n = (draws(device, kind, draw=where, size=size) for kind, size in (("normal", 0), ("below", 2**30)))
    u = draws(device, "uniform", draw=where)
    for x, y in ((z, n), (z, u), (n, u), (abs(z), n), (abs(z), u)):
        assert_uncorrelated(x, y)


def test_a_million_streams_share_none_of_their_first_four_words(device):
    """10^6 tuples (seed, env_index, stream, item): 128 bits that are all different, and evenly spread 32-bit words."""
    seed, env_index, item = np.meshgrid(np.arange(25), np.arange(100), np.arange(100))
    where = {"seed": seed.reshape(-1, 1), "env_index": env_index.reshape(-1, 1), "item": item.reshape(-1, 1)}
    blocks = np.concatenate([draws(device, "word", stream=s, draw=np.arange(4), **where) for s in STREAMS.values()])
    assert blocks.shape == (10**6, 4)
    assert len(np.unique(np.ascontiguousarray(blocks).view("V16"))) == 10**6
    # Birthdays: 4e6 words out of 2^32 have about 4e6^2 / 2^33 = 1862.6 equal pairs, Poisson.
    values = np.sort(blocks.ravel())
    equal, expected = int((values[1:] == values[:-1]).sum()), (4e6) ** 2 / 2**33
    assert abs(equal - expected) < NORMAL_QUANTILE * math.sqrt(expected)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(
    ("axis", "first"),
    [
        ("seed", 0),
        ("env_index", 0),
        ("seed", 2**32 - 500),
        ("env_index", 2**32 - 500),
        ("item", 0),
        ("step", 0),
        ("episode", 0),
    ],
)
def test_neighbouring_streams_are_uncorrelated(device, axis, first, stream):
    streams = first + np.arange(1000, dtype=np.uint64)
    u = draws(device, "uniform", stream=stream, draw=np.arange(64), **{axis: streams[:, None]})
    assert_uncorrelated(u[1:], u[:-1])
    assert_uncorrelated(u[1:, 0], u[:-1, 0])
    assert_uncorrelated(u[:, 1:], u[:, :-1])


def test_seed_and_env_index_are_not_interchangeable(device):
    """Seed 5, env_index 6 is another stream than seed 6, env_index 5: no sum of the two decides."""
    n = np.arange(300)
    u = draws(device, "uniform", seed=n[:, None, None], env_index=n[None, :, None], draw=np.arange(4))
    assert len(np.unique(u.reshape(-1, 4), axis=0)) == 300 * 300
    below = np.tril_indices(300, -1)
    assert_uncorrelated(u[below], np.swapaxes(u, 0, 1)[below])


def test_streams_of_reset_step_and_sampler_differ(device):
    u = np.stack([draws(device, "uniform", stream=s, draw=np.arange(DRAWS // 8)) for s in STREAMS.values()])
    for i in range(4):
        for j in range(i):
            assert_uncorrelated(u[i], u[j])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_both_devices_draw_bitwise_equally(kind):
    where = {"seed": 2**63 + 1, "env_index": np.arange(1 << 12)[:, None], "draw": np.arange(1 << 8), "size": 5}
    assert draws("cpu", kind, **where).tobytes() == draws("cuda", kind, **where).tobytes()
