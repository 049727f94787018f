"""math.cuh against float64 references, and the same bits from both devices.

GPU_VECENV_EXHAUSTIVE=1 pytest tests/compile/test_math.py tries all 2^32 arguments of each function of one
argument; it takes about an hour.
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.kernels import signature, unpack

from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.kernels import KernelSignature

pytestmark = pytest.mark.usefixtures("shipped_flags")

STRIDE = 1 if os.environ.get("GPU_VECENV_EXHAUSTIVE") == "1" else 1021
CHUNK = 1 << 22
INF, NAN = np.inf, np.nan
TINY, SMALLEST_NORMAL, LARGEST = 2.0**-149, 2.0**-126, float(np.finfo(np.float32).max)

ONE_ARGUMENT = ["sin", "cos", "exp", "tanh", "log", "sqrt", "floor", "abs"]
BODIES = {
    **{name: f"out[k] = math::{name}(a[k]);" for name in ONE_ARGUMENT},
    **{name: f"out[k] = math::{name}(a[k], b[k]);" for name in ["atan2", "mod", "min", "max"]},
    "clamp": "out[k] = math::clamp(a[k], b[k], c[k]);",
    "sincos_s": "float cosine; math::sincos(a[k], &out[k], &cosine);",
    "sincos_c": "float sine; math::sincos(a[k], &sine, &out[k]);",
    "to_int": "out[k] = math::to_int(a[k]);",
    "to_int_back": "out[k] = (float)math::to_int(a[k]);",
    "is_nan": "out[k] = math::is_nan(a[k]);",
    "is_finite": "out[k] = math::is_finite(a[k]);",
    "bits": "out[k] = math::from_bits(math::bits(a[k])) == a[k] ? (i32)math::bits(a[k]) : 0;",
    "int_abs": "out[k] = math::abs(a[k]);",
    "int_min": "out[k] = math::min(a[k], b[k]);",
    "int_max": "out[k] = math::max(a[k], b[k]);",
    "int_clamp": "out[k] = math::clamp(a[k], b[k], c[k]);",
}
TO_INT = ["to_int", "is_nan", "is_finite", "bits"]
OF_FLOAT = [name for name in BODIES if not name.startswith("int_")]
OF_ONE_FLOAT = [*ONE_ARGUMENT, "sincos_s", "sincos_c", "to_int_back", *TO_INT]


def kernel(name: str, body: str) -> tuple[KernelSignature, str]:
    source = "i32" if name.startswith("int_") else "float"
    result = "i32" if name in TO_INT else source
    inputs = ", ".join(f"const {source}* {x}" for x in "abc")
    declared = signature(f"map_{name}", f"{inputs}, {result}* out, i64 n")
    return declared, f"KERNEL(map_{name}) {{ {unpack(declared)} FOR_ITEMS(k, n) {{ {body} }} }}\n"


class Math:
    """The functions of math.cuh over arrays, on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        kernels, sources = zip(*(kernel(*item) for item in BODIES.items()), strict=True)
        source = '#include "math.cuh"\n' + "".join(sources)
        self.kernel = FunctionManager(device=device).compile(source, name="probe.cu", kernels=kernels)

    def __call__(self, name: str, *arguments: np.ndarray) -> np.ndarray:
        tensors = [torch.tensor(x, device=self.device) for x in np.broadcast_arrays(*arguments)]
        n = tensors[0].numel()
        out = torch.empty_like(tensors[0], dtype=torch.int32 if name in TO_INT else None)
        tensors = (tensors * 3)[:3] if len(tensors) == 1 else [*tensors, tensors[-1]][:3]
        self.kernel.launch(f"map_{name}", n, **dict(zip("abc", tensors, strict=True)), out=out, n=n)
        return out.cpu().numpy()


@pytest.fixture(scope="module")
def math() -> Math:
    return Math("cpu")


def f32(values) -> np.ndarray:
    return np.atleast_1d(np.asarray(values, np.float64)).astype(np.float32)


def around(values, width: int = 16) -> np.ndarray:
    """The floats nearest to the values and `width` neighbours to either side, with both signs."""
    patterns = f32(values).view(np.int32)[:, None] + np.arange(-width, width + 1, dtype=np.int32)
    patterns = patterns.ravel() & 0x7FFFFFFF
    return np.concatenate([patterns, patterns | np.int32(-(2**31))]).view(np.float32)


# The floats nearest to multiples of pi/2, found by trying all of them.
NEAR_QUADRANTS = [
    (0x6F79BE45, 0x50A3E87F, 0x6FF9BE45, 0x5123E87F, 0x437CE5F1, 0x7079BE45, 0x6A1976F1),
    (0x53B146A6, 0x65898498, 0x51A3E87F, 0x43FCE5F1, 0x77584625, 0x4C2332E9, 0x6C55DA58),
]
SPECIAL = np.concatenate(
    [
        around([0.0, SMALLEST_NORMAL], 256),
        around(2.0 ** np.arange(-149, 128), 4),
        around(np.arange(1, 16384) * np.pi / 4, 2),
        around(2.0 ** np.arange(0, 127) * np.pi / 4, 2),
        around(np.array(NEAR_QUADRANTS, np.uint32).ravel().view(np.float32)),
        # exp: overflow, the first denormal result, the last result that is not 0; and its clamps.
        around([128 * np.log(2), 126 * np.log(2), 149 * np.log(2), 150 * np.log(2), 89, 104], 256),
        around([0.625, 8.66434], 256),  # tanh: where its formula changes, and where it reaches 1
        # log: 1, and where its exponent changes; floor and to_int: the last fractions, the limits.
        around([1.0, np.sqrt(0.5), np.sqrt(2.0), 2.0**23, 2.0**31], 256),
        f32([INF, -INF, NAN, -NAN, LARGEST, -LARGEST]),
    ]
)


def floats() -> Iterator[np.ndarray]:
    yield SPECIAL
    for start in range(0, 2**32, CHUNK * STRIDE):
        stop = min(start + CHUNK * STRIDE, 2**32)
        yield np.arange(start, stop, STRIDE, dtype=np.uint64).astype(np.uint32).view(np.float32)


def random_floats(generator: np.random.Generator, n: int) -> np.ndarray:
    return generator.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


CORNERS = f32([0.0, TINY, SMALLEST_NORMAL, 0.5, 1.0, 3.0, LARGEST, INF, NAN])
CORNERS = np.concatenate([CORNERS, -CORNERS])
SPECIAL_PAIRS = tuple(x.ravel() for x in np.meshgrid(CORNERS, CORNERS))


def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Two floats with unrelated exponents, and with exponents up to a factor of 2^30 apart."""
    yield SPECIAL_PAIRS
    generator = np.random.default_rng(1)
    first = random_floats(generator, CHUNK // 2)
    yield first, random_floats(generator, CHUNK // 2)
    for reach in (1.5, 30):
        ratio = 2.0 ** generator.uniform(-reach, reach, CHUNK // 2)
        with np.errstate(over="ignore", invalid="ignore"):
            yield first, (first * ratio * generator.choice([-1, 1], CHUNK // 2)).astype(np.float32)


def arguments(name: str) -> Iterator[tuple[np.ndarray, ...]]:
    return ((x,) for x in floats()) if name in OF_ONE_FLOAT else pairs()


def ulps(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error in units of the last place of the exact result; infinity counts as 2^128."""
    exact = np.clip(exact, -(2.0**128), 2.0**128)
    result = np.clip(result.astype(np.float64), -(2.0**128), 2.0**128)
    unit = np.ldexp(1.0, np.clip(np.frexp(exact)[1], -125, 128) - 24)
    error = np.abs(result - exact) / unit
    error[np.isnan(error)] = INF
    error[np.isnan(result) & np.isnan(exact)] = 0
    return error


def assert_same_bits(result: np.ndarray, expected: np.ndarray, *inputs: np.ndarray) -> None:
    """Equal as bits, but for the sign and payload of a NaN."""
    assert result.dtype == expected.dtype
    differ = result.view(np.int32) != expected.view(np.int32)
    if result.dtype == np.float32:
        differ &= ~(np.isnan(result) & np.isnan(expected))
    first = np.flatnonzero(differ)[:5]
    assert not len(first), [(*(x[i] for x in inputs), result[i], expected[i]) for i in first]


def worst(error: np.ndarray, *inputs: np.ndarray) -> tuple[float, ...]:
    k = int(np.argmax(error))
    return float(error[k]), *(float(x[k]) for x in inputs)


@pytest.mark.parametrize(
    ("name", "reference", "bound"),
    [
        ("sin", np.sin, 0.76),
        ("cos", np.cos, 0.76),
        ("exp", np.exp, 0.88),
        ("tanh", np.tanh, 1.51),
        ("log", np.log, 0.67),
    ],
)
def test_the_error_stays_within_the_stated_bound(
    math: Math, name: str, reference: Callable[[np.ndarray], np.ndarray], bound: float
) -> None:
    for x in floats():
        result = math(name, x)
        with np.errstate(all="ignore"):
            exact = reference(x.astype(np.float64))
            found = worst(ulps(result, exact), x)
        assert found[0] <= bound, found
        wrong_sign = (np.signbit(result) != np.signbit(exact)) & ~np.isnan(exact)
        assert not wrong_sign.any(), x[wrong_sign][:5]


def test_atan2_stays_within_the_stated_bound(math: Math) -> None:
    for y, x in pairs():
        result = math("atan2", y, x)
        with np.errstate(all="ignore"):
            exact = np.arctan2(y.astype(np.float64), x.astype(np.float64))
            found = worst(ulps(result, exact), y, x)
        assert found[0] <= 1.54, found
        wrong_sign = (np.signbit(result) != np.signbit(exact)) & ~np.isnan(exact)
        assert not wrong_sign.any(), (y[wrong_sign][:5], x[wrong_sign][:5])


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("sin", [0.0, -0.0, TINY, -TINY, INF, -INF, NAN], [0.0, -0.0, TINY, -TINY, NAN, NAN, NAN]),
        ("cos", [0.0, -0.0, TINY, INF, -INF, NAN], [1.0, 1.0, 1.0, NAN, NAN, NAN]),
        ("exp", [0.0, -0.0, INF, -INF, NAN, 88.8, -104.0], [1.0, 1.0, INF, 0.0, NAN, INF, 0.0]),
        ("exp", [-103.9], [TINY]),
        ("tanh", [0.0, -0.0, INF, -INF, NAN], [0.0, -0.0, 1.0, -1.0, NAN]),
        ("log", [0.0, -0.0, 1.0, INF, NAN], [-INF, -INF, 0.0, INF, NAN]),
        ("log", [-TINY, -1.0, -INF], [NAN, NAN, NAN]),
        ("log", [TINY], [-149 * np.log(2)]),
        ("sqrt", [0.0, -0.0, 4.0, INF, -TINY, NAN], [0.0, -0.0, 2.0, INF, NAN, NAN]),
        ("floor", [-0.0, 0.5, -TINY, -1.5, INF, NAN], [-0.0, 0.0, -1.0, -2.0, INF, NAN]),
        ("abs", [-0.0, -INF, -1.5, NAN], [0.0, INF, 1.5, NAN]),
    ],
)
def test_special_arguments(math: Math, name: str, x: list[float], expected: list[float]) -> None:
    assert_same_bits(math(name, f32(x)), f32(expected), f32(x))


def test_special_angles_of_atan2_are_correctly_rounded(math: Math) -> None:
    y, x = SPECIAL_PAIRS
    exact = np.arctan2(y.astype(np.float64), x.astype(np.float64))
    on_an_axis_or_diagonal = (y == 0) | (x == 0) | np.isinf(y) | np.isinf(x) | (abs(x) == abs(y))
    result = math("atan2", y, x)
    assert_same_bits(result[on_an_axis_or_diagonal], exact[on_an_axis_or_diagonal].astype(np.float32))
    nan = np.isnan(x) | np.isnan(y)
    assert np.isnan(result[nan]).all()


@pytest.mark.parametrize("name", ["sqrt", "floor", "abs"])
def test_exact_functions_agree_with_numpy(math: Math, name: str) -> None:
    for x in floats():
        with np.errstate(invalid="ignore"):
            expected = getattr(np, name)(x)
        assert_same_bits(math(name, x), expected, x)


def test_sincos_is_sin_and_cos(math: Math) -> None:
    for x in floats():
        assert_same_bits(math("sincos_s", x), math("sin", x), x)
        assert_same_bits(math("sincos_c", x), math("cos", x), x)


def test_predicates_and_bits(math: Math) -> None:
    for x in floats():
        assert_same_bits(math("is_nan", x), np.isnan(x).astype(np.int32), x)
        assert_same_bits(math("is_finite", x), np.isfinite(x).astype(np.int32), x)
        assert_same_bits(math("bits", x), np.where(np.isnan(x), 0, x.view(np.int32)), x)


def test_to_int_truncates_and_saturates(math: Math) -> None:
    for x in floats():
        with np.errstate(invalid="ignore"):
            inside = np.clip(np.nan_to_num(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
        assert_same_bits(math("to_int", x), inside.astype(np.int32), x)
        # +0 for -0.5: no compiler may make one rounding to a whole float of the two conversions.
        assert_same_bits(math("to_int_back", x), inside.astype(np.int32).astype(np.float32), x)


def mod_pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for x, y in pairs():
        yield x, abs(y)
    y = abs(random_floats(np.random.default_rng(2), CHUNK // 4))
    for multiple in (-1, 0, 1, 2, 3, 2**24 - 1, 2**24):
        with np.errstate(over="ignore", invalid="ignore"):
            x = f32(multiple * y.astype(np.float64))
        yield x, y
        yield np.nextafter(x, np.float32(-INF)), y
        yield np.nextafter(x, np.float32(INF)), y


def test_mod_is_floored_and_below_the_modulus(math: Math) -> None:
    for x, y in mod_pairs():
        with np.errstate(all="ignore"):
            expected = np.mod(x, y)
        expected[expected == y] = 0.0
        assert_same_bits(math("mod", x, y), expected, x, y)
    assert_same_bits(math("mod", f32([-1e-9]), f32([3.0])), f32([0.0]))
    assert np.isnan(math("mod", f32([1, -1, 1, 1]), f32([0, -0.0, -2, -INF]))).all()


def test_min_and_max_give_the_second_unless_the_first_is_beyond_it(math: Math) -> None:
    for a, b in pairs():
        assert_same_bits(math("min", a, b), np.where(a < b, a, b), a, b)
        assert_same_bits(math("max", a, b), np.where(a > b, a, b), a, b)
    a, b = f32([NAN, 1.0, 0.0, -0.0]), f32([1.0, NAN, -0.0, 0.0])
    for name in ("min", "max"):
        assert_same_bits(math(name, a, b), b, a, b)


def test_clamp_keeps_nans_and_the_sign_of_zeros(math: Math) -> None:
    x = f32([NAN, -0.0, 0.0, -0.0, -2.0, 2.0, INF, -INF, 0.25])
    low = f32([-1, 0.0, -0.0, -1, -1, -1, -1, -1, -1])
    high = f32([1, 1, 0.0, 0.0, 1, 1, 1, 1, 1])
    expected = f32([NAN, -0.0, 0.0, -0.0, -1, 1, 1, -1, 0.25])
    assert_same_bits(math("clamp", x, low, high), expected, x)


def test_functions_of_ints(math: Math) -> None:
    lowest, highest = -(2**31), 2**31 - 1
    values = np.array([lowest, lowest + 1, -5, -1, 0, 1, 5, highest], np.int32)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    assert_same_bits(math("int_min", a, b), np.minimum(a, b), a, b)
    assert_same_bits(math("int_max", a, b), np.maximum(a, b), a, b)
    clamped = math("int_clamp", a, np.full_like(a, -1), abs(np.maximum(b, -highest)))
    assert_same_bits(clamped, np.clip(a, -1, abs(np.maximum(b, -highest))), a, b)
    assert_same_bits(math("int_abs", values), np.abs(values), values)


@pytest.fixture(scope="module")
def math_cuda() -> Math:
    return Math("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_FLOAT)
def test_both_devices_are_bitwise_equal(math: Math, math_cuda: Math, name: str) -> None:
    for x in arguments(name):
        assert_same_bits(math_cuda(name, *x), math(name, *x), *x)
    if name == "mod":
        for x in mod_pairs():
            assert_same_bits(math_cuda(name, *x), math(name, *x), *x)
