"""PTX instructions and built-ins of CUDA against NumPy: emulated in both orders of threads, and a GPU's own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.emulated_cuda import EmulatedCudaBackend
from support.emulated_ptx import translate
from support.kernels import signature

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.errors import KernelCompileError

ROOT = Path(__file__).resolve().parents[2]
THREADS = 64  # two warps
SHARED_BYTES = 4096
LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4  # groupID and threadID_in_group of the PTX manual

# Shape and types of a product, and its numbers of registers of A and B.
PRODUCTS = {"m16n8k4": ("tf32", 2, 1), "m16n8k8": ("tf32", 4, 2), "m16n8k16": ("bf16", 4, 2)}


def product_source(shape: str, dtype: str, a: int, b: int) -> str:
    """C in the registers of D, and in others."""
    names = [f"%{k}" for k in range(a + b + 8)]
    inputs = [f'"r"(own[{k}])' for k in range(a + b)]
    kernels = []
    for suffix, access, c, more in (
        ("", "+", names[:4], []),
        ("_apart", "=", names[-4:], [f'"f"(c[{k}])' for k in range(4)]),
    ):
        operands = names[:4], names[4 : 4 + a], names[4 + a : 4 + a + b], c
        kernels.append(f"""KERNEL(mma_{shape}{suffix}) {{
            const u32* own = args.x + (i64)threadIdx.x * {a + b};
            const float* c = args.y + (i64)threadIdx.x * 4;
            float d[4] = {{c[0], c[1], c[2], c[3]}};
            asm volatile("mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 "
                         "{", ".join("{" + ", ".join(part) + "}" for part in operands)};\\n"
                         : {", ".join(f'"{access}f"(d[{k}])' for k in range(4))} : {", ".join(inputs + more)});
            UNROLL for (int k = 0; k < 4; ++k) args.z[(i64)threadIdx.x * 4 + k] = d[k];
        }}""")
    return "\n".join(kernels)


def load_source(name: str, count: int, form: str, array: str) -> str:
    return f"""KERNEL({name}) {{
        {array}
        for (int k = threadIdx.x; k < {SHARED_BYTES // 4}; k += blockDim.x) ((u32*)tiles)[k] = args.x[k];
        __syncthreads();
        u32 address = (u32)__cvta_generic_to_shared(tiles + args.y[threadIdx.x]), d[{count}];
        asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{form}.shared.b16 "
                     "{{{", ".join(f"%{k}" for k in range(count))}}}, [%{count}];"  // a comment (
                     : {", ".join(f'"=r"(d[{k}])' for k in range(count))} : "r"(address) : "memory");
        UNROLL for (int k = 0; k < {count}; ++k) args.z[(i64)threadIdx.x * {count} + k] = d[k];
    }}"""


DYNAMIC = "unsigned char* tiles = shared_memory;"
STATIC = f"__shared__ __align__(16) unsigned char tiles[{SHARED_BYTES}];"
LOADS = {
    f"ldmatrix_x{count}{form.replace('.', '_')}{'_static' if array is STATIC else ''}": (count, form, array)
    for count in (2, 4)
    for form in ("", ".trans")
    for array in (DYNAMIC, STATIC)
}
SHUFFLES = """
    int lane = threadIdx.x % 32;
    auto x = args.x[threadIdx.x];
    auto* out = args.z + (i64)threadIdx.x * 8;
    out[0] = __shfl_xor_sync(0xffffffffu, x, 5);
    out[1] = __shfl_xor_sync(0xffffffffu, x, 1, 4);
    out[2] = __shfl_sync(0xffffffffu, x, 37);
    out[3] = __shfl_sync(0xffffffffu, x, 2, 8);
    out[4] = __shfl_down_sync(0xffffffffu, x, 3);
    out[5] = __shfl_down_sync(0xffffffffu, x, 3, 8);
    out[6] = x;
    if (lane >= 16) out[6] = __shfl_xor_sync(0xffff0000u, x, 3);
    out[7] = __shfl_sync(0xffffffffu, x, (lane + 1) % 32);
"""
SHUFFLED = [
    LANE ^ 5,
    LANE ^ 1,
    np.full(32, 5),
    LANE // 8 * 8 + 2,
    np.where(LANE + 3 < 32, LANE + 3, LANE),
    np.where(LANE % 8 + 3 < 8, LANE + 3, LANE),
    np.where(LANE >= 16, LANE ^ 3, LANE),
    (LANE + 1) % 32,
]
# A thread copies 4, 8 and 16 bytes in a first group and 16 in a second, each to 16 bytes of its own, and writes these
# 64 bytes before it waits, after the first group and after both.
COPIES = """
    unsigned char* own = shared_memory + threadIdx.x * 64;
    const u8* from = args.x + (i64)threadIdx.x * 64;
    u32 to = (u32)__cvta_generic_to_shared(own);
    u8* out = args.z + (i64)threadIdx.x * 192;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to + 16), "l"(from + 16), "n"(8) : "memory");
    asm volatile("cp.async.ca.shared.global [%0 + 32], [%1 + 32], 16;" :: "r"(to), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + 48), "l"(from + 48) : "memory");
    asm volatile("cp.async.commit_group;\\n" ::: "memory");
    for (int k = 0; k < 64; ++k) out[k] = own[k];
    asm volatile("cp.async.wait_group %0;" :: "n"(1) : "memory");
    for (int k = 0; k < 64; ++k) out[64 + k] = own[k];
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int k = 0; k < 64; ++k) out[128 + k] = own[k];
"""
# Copies of the first block that it does not wait for.
ABANDONED = """
    u32 to = (u32)__cvta_generic_to_shared(shared_memory + threadIdx.x * 16);
    if (blockIdx.x == 0) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(args.x) : "memory");
    if (blockIdx.x == 1) asm volatile("cp.async.wait_all;" ::: "memory");
    if (blockIdx.x == 1) args.z[threadIdx.x] = shared_memory[threadIdx.x * 16];
"""
BUILTINS = """
    float4 x = ((const float4*)args.x)[threadIdx.x];
    float2 y = make_float2(__fdividef(x.x, x.y), __expf(x.z));
    ((float4*)args.z)[threadIdx.x] = make_float4(y.x, y.y, __logf(x.w), __ldg(args.x + threadIdx.x));
    int4 n = make_int4(1, 2, 3, 4);
    uint2 m = make_uint2(5, 6);
    u32 before = atomicAdd(args.n, (u32)(n.x + n.w) + m.y);
    __threadfence();
    args.n[1 + threadIdx.x] = before;
"""
# Each warp has a barrier of its own; whether one of its threads has a 7.
BARRIERS = """
    volatile i32* shown = (volatile i32*)shared_memory;
    shown[threadIdx.x] = args.x[threadIdx.x];
    asm volatile("barrier.sync %0, %1;" : : "r"(1 + threadIdx.x / 32), "n"(32) : "memory");
    args.z[threadIdx.x] = shown[threadIdx.x ^ 31];
    u32 any;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.red.or.pred p, %2, %3, p; selp.u32 %0, 1, 0, p; }"
                 : "=r"(any)
                 : "r"((u32)(args.x[threadIdx.x] == 7)), "r"(1 + threadIdx.x / 32), "n"(32)
                 : "memory");
    args.z[blockDim.x + threadIdx.x] = (i32)any;
"""
CONVERSIONS = """
KERNEL(to_tf32) { int k = threadIdx.x; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(args.z[k]) : "f"(args.x[k])); }
KERNEL(to_bf16x2) {
    int k = threadIdx.x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(args.z[k]) : "f"(args.x[k]), "f"(args.y[k]));
}
KERNEL(tanh) { int k = threadIdx.x; asm("tanh.approx.f32 %0, %1;" : "=f"(args.z[k]) : "f"(args.x[k])); }
KERNEL(exp2) { int k = threadIdx.x; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(args.z[k]) : "f"(args.x[k])); }
"""
LOADED, FLOATS = "const u32* x, const u32* y, u32* z", "const float* x, float* z"
KERNELS = {
    **{f"mma_{s}{suffix}": "const u32* x, const float* y, float* z" for s in PRODUCTS for suffix in ("", "_apart")},
    **dict.fromkeys(LOADS, LOADED),
    "to_tf32": "const float* x, u32* z",
    "to_bf16x2": "const float* x, const float* y, u32* z",
    "tanh": FLOATS,
    "exp2": FLOATS,
    "shuffle_float": FLOATS,
    "shuffle_int": "const i32* x, i32* z",
    "barriers": "const i32* x, i32* z",
    "copy": "const u8* x, u8* z",
    "abandon": "const u8* x, u8* z",
    "builtins": "const float* x, float* z, u32* n",
}
SOURCE = "\n".join(
    [
        "extern __shared__ __align__(16) unsigned char shared_memory[];",
        *(product_source(shape, *parts) for shape, parts in PRODUCTS.items()),
        *(load_source(name, *parts) for name, parts in LOADS.items()),
        CONVERSIONS,
        f"KERNEL(shuffle_float) {{ {SHUFFLES} }}",
        f"KERNEL(shuffle_int) {{ {SHUFFLES} }}",
        f"KERNEL(barriers) {{ {BARRIERS} }}",
        f"KERNEL(copy) {{ {COPIES} }}",
        f"KERNEL(abandon) {{ {ABANDONED} }}",
        f"KERNEL(builtins) {{ {BUILTINS} }}",
    ]
)


def emulated(source: str, kernels: dict[str, str]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        manager = FunctionManager("cpu")
    return manager.compile(source, "instructions.cu", kernels=[signature(*item) for item in kernels.items()])


@pytest.fixture(scope="module")
def program(device):
    if device == "cpu":
        return emulated(SOURCE, KERNELS)
    return FunctionManager(device).compile(
        SOURCE, "instructions.cu", kernels=[signature(*item) for item in KERNELS.items()]
    )


@pytest.fixture(params=["forwards", "backwards"])
def launch(request, program, monkeypatch):
    """Runs a kernel with blocks of THREADS threads; ``z`` is its result."""
    monkeypatch.setenv("EMULATED_THREADS", request.param)

    def run(kernel: str, z: np.ndarray, blocks: int = 1, **inputs: np.ndarray) -> np.ndarray:
        shape = LaunchShape(blocks * THREADS, threads_per_block=THREADS, shared_bytes=SHARED_BYTES)
        given = {name: torch.from_numpy(x.copy()).to(program.device) for name, x in {**inputs, "z": z}.items()}
        program.prepare(kernel, shape, **given)()
        for name, x in inputs.items():
            x[...] = given[name].cpu().numpy()
        return given["z"].cpu().numpy()

    return run


# Layouts of the PTX manual: row and column of each of a lane's elements, of shape (32, elements).


def layout_of_a(k: int, elements: int):
    i = np.arange(elements)
    if k == 16:
        rows = GROUP[:, None] + np.where((i < 2) | ((i >= 4) & (i < 6)), 0, 8)
        return rows, IN_GROUP[:, None] * 2 + (i & 1) + np.where(i < 4, 0, 8)
    return GROUP[:, None] + np.where(i % 2 == 0, 0, 8), IN_GROUP[:, None] + np.where(i < 2, 0, 4)


def layout_of_b(k: int, elements: int):
    i = np.arange(elements)
    columns = np.repeat(GROUP[:, None], elements, axis=1)
    if k == 16:
        return IN_GROUP[:, None] * 2 + (i & 1) + np.where(i < 2, 0, 8), columns
    return IN_GROUP[:, None] + 4 * i, columns


def layout_of_c():
    i = np.arange(4)
    return GROUP[:, None] + np.where(i < 2, 0, 8), IN_GROUP[:, None] * 2 + (i & 1)


def registers_of(values: np.ndarray, dtype: str, random: np.random.Generator) -> np.ndarray:
    """Elements (32, n) as registers: bf16 in pairs with the first in the lower half; tf32 with 13 bits of no effect."""
    bits = values.astype(np.float32).view(np.uint32)
    if dtype == "tf32":
        return bits | random.integers(0, 1 << 13, bits.shape, dtype=np.uint32)
    assert not (bits & 0xFFFF).any()
    return bits[:, ::2] >> 16 | bits[:, 1::2]


@pytest.mark.parametrize("suffix", ["", "_apart"])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products_of_matrices(shape, suffix, launch, random_seed):
    """Integers, whose sums are exact in every order."""
    random, k = np.random.default_rng(random_seed), int(shape.rpartition("k")[2])
    dtype, words_a, words_b = PRODUCTS[shape]
    most, per_word = (1023, 1) if dtype == "tf32" else (255, 2)
    fragments, sums, expected = [], [], []
    for _ in range(THREADS // 32):
        a, b, c = (random.integers(-most, most + 1, size) for size in ((16, k), (k, 8), (16, 8)))
        of_a = registers_of(a[layout_of_a(k, words_a * per_word)], dtype, random)
        of_b = registers_of(b[layout_of_b(k, words_b * per_word)], dtype, random)
        fragments.append(np.concatenate([of_a, of_b], axis=1))
        sums.append(c[layout_of_c()].astype(np.float32))
        expected.append((a @ b + c)[layout_of_c()])
    x, y = np.concatenate(fragments), np.concatenate(sums)
    found = launch(f"mma_{shape}{suffix}", np.zeros((THREADS, 4), np.float32), x=x, y=y)
    assert np.array_equal(found, np.concatenate(expected))


@pytest.mark.parametrize("name", LOADS)
def test_loads_of_matrices(name, launch, random_seed):
    random, (count, form, _) = np.random.default_rng(random_seed), LOADS[name]
    memory = random.integers(0, 1 << 16, SHARED_BYTES // 2, dtype=np.uint16)
    rows = random.choice(SHARED_BYTES // 16, THREADS, replace=False).astype(np.uint32) * 16
    expected = np.empty((THREADS, count, 2), np.uint16)
    for warp in range(THREADS // 32):
        for j in range(count):
            first = rows[warp * 32 + j * 8 :][:8] // 2
            matrix = np.stack([memory[at : at + 8] for at in first])
            if form:
                matrix = matrix.T
            for lane in range(32):
                expected[warp * 32 + lane, j] = matrix[lane // 4, lane % 4 * 2 :][:2]
    found = launch(name, np.zeros((THREADS, count), np.uint32), x=memory.view(np.uint32), y=rows)
    assert np.array_equal(found.view(np.uint16).reshape(expected.shape), expected)


def floats(random: np.random.Generator) -> np.ndarray:
    """Of all magnitudes."""
    return random.integers(0, 1 << 32, THREADS, dtype=np.uint32).view(np.float32)


def test_rounding_to_tf32(launch, random_seed):
    x = floats(np.random.default_rng(random_seed))
    tie = np.float32(1 + 2**-11)
    x[8] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # a NaN that a sum would carry into the sign
    x[:8] = 1, tie, -tie, np.nextafter(tie, np.float32(0)), 1 + 2**-10 + 2**-11, np.inf, -np.inf, np.nan
    found = launch("to_tf32", np.zeros(THREADS, np.uint32), x=x).view(np.float32)
    assert np.isnan((found.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)).tolist() == np.isnan(x).tolist()
    exact = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        unit = 2.0 ** np.maximum(np.frexp(exact)[1] - 11, -126 - 10)
        expected = np.copysign(np.floor(np.abs(exact) / unit + 0.5) * unit, exact)
    finite = np.isfinite(x)
    expected[~finite] = exact[~finite]
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)  # the largest round to infinity
    assert np.array_equal(found[~np.isnan(x)], expected[~np.isnan(x)])
    assert found[:7].tolist() == [1, 1 + 2**-10, -1 - 2**-10, 1, 1 + 2**-9, np.inf, -np.inf]


def test_rounding_to_bf16(launch, random_seed):
    random = np.random.default_rng(random_seed)
    x, y = floats(random), floats(random)
    tie = np.float32(1 + 2**-8)
    x[:5] = tie, 1 + 3 * 2**-8, np.nextafter(tie, np.float32(2)), np.inf, np.nan
    y[0] = np.array(0x7F800001, np.uint32).view(np.float32)  # a NaN whose upper half is infinity
    found = launch("to_bf16x2", np.zeros(THREADS, np.uint32), x=x, y=y).view(np.uint16).reshape(THREADS, 2)
    for half, values in ((1, x), (0, y)):
        rounded = torch.from_numpy(found[:, half].view(np.int16).copy()).view(torch.bfloat16)
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
        assert rounded.isnan().equal(torch.from_numpy(np.isnan(values)))
        assert rounded[~expected.isnan()].equal(expected[~expected.isnan()])


def test_approximations(launch, random_seed):
    """Within the bounds of the PTX manual: relative 2**-11 and 2**-22."""
    random = np.random.default_rng(random_seed)
    x = random.normal(size=THREADS, scale=3).astype(np.float32)
    found = launch("tanh", np.zeros_like(x), x=x)
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=2**-11, atol=0)
    x = random.uniform(-125, 127, THREADS).astype(np.float32)
    x[:4] = -127, -150, np.inf, -np.inf
    expected = np.exp2(x.astype(np.float64))
    expected[:2] = 0  # subnormal results are flushed
    np.testing.assert_allclose(launch("exp2", np.zeros_like(x), x=x), expected, rtol=2**-22, atol=0)


@pytest.mark.parametrize("warp", [0, 1])
def test_barriers_with_numbers_are_those_of_their_threads(warp, launch):
    x = np.arange(100, 100 + THREADS, dtype=np.int32)
    x[32 * warp + 5] = 7
    shown, any_seven = launch("barriers", np.zeros((2, THREADS), np.int32), x=x)
    assert np.array_equal(shown, x[np.arange(THREADS) ^ 31])
    assert np.array_equal(any_seven, np.arange(THREADS) // 32 == warp)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_shuffles_keep_every_bit(kind, launch, random_seed):
    random, dtype = np.random.default_rng(random_seed), {"float": np.float32, "int": np.int32}[kind]
    bits = random.integers(0, 1 << 32, THREADS, dtype=np.uint32)
    bits[::5] = random.integers(0x7F800001, 0x80000000, len(bits[::5]), dtype=np.uint32)  # NaNs
    found = launch(f"shuffle_{kind}", np.zeros((THREADS, 8), dtype), x=bits.view(dtype)).view(np.uint32)
    for warp in (slice(0, 32), slice(32, 64)):
        assert np.array_equal(found[warp].T, [bits[warp][source] for source in SHUFFLED])


def test_asynchronous_copies_are_there_once_they_are_waited_for(program, launch, random_seed):
    random = np.random.default_rng(random_seed)
    x = random.integers(0, 256, (THREADS, 4, 16), dtype=np.uint8)
    before, first, both = np.moveaxis(launch("copy", np.zeros((THREADS, 3, 4, 16), np.uint8), x=x), 1, 0)
    for found in (first, both):
        for j, size in enumerate((4, 8, 16)):
            assert np.array_equal(found[:, j, :size], x[:, j, :size])
    assert np.array_equal(both[:, 3], x[:, 3])
    if program.device.type == "cpu":  # what a GPU has not to have copied yet is not copied; nothing beyond is written
        assert (before == 0xCD).all() and (first[:, 3] == 0xCD).all()
        assert (both[:, 0, 4:] == 0xCD).all() and (both[:, 1, 8:] == 0xCD).all()


def test_asynchronous_copies_end_with_their_block(program, launch):
    found = launch("abandon", np.zeros(THREADS, np.uint8), blocks=2, x=np.ones(16, np.uint8))
    assert program.device.type != "cpu" or (found == 0xCD).all()  # a GPU's shared memory begins with anything


def test_builtins(launch, random_seed):
    random = np.random.default_rng(random_seed)
    x = random.uniform(2, 9, (THREADS, 4)).astype(np.float32)
    n = np.zeros(1 + THREADS, np.uint32)
    found = launch("builtins", np.zeros_like(x), x=x, n=n)
    exact = x.astype(np.float64)
    expected = [exact[:, 0] / exact[:, 1], np.exp(exact[:, 2]), np.log(exact[:, 3]), exact.ravel()[:THREADS]]
    # CUDA's manual: 2 ulp, 2 + 1.173 x ulp with x < 9, and 3 ulp.
    np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=13 * 2**-23)
    assert n[0] == 11 * THREADS and np.array_equal(np.sort(n[1:]), 11 * np.arange(THREADS))


# The translation


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        (
            'asm volatile("mma.k8 {%0,%1}, {%2}, {%0,%1};" : "+f"(c[0]), "+f"(c[f(1, 2)]) : "r"(a >> 2)); next',
            "ptx::mma_k8((c[0]),(c[f(1, 2)]), ptx::r(a >> 2), (c[0]),(c[f(1, 2)])); next",
        ),
        ('asm("a.b::c "\n  "[%1], %0;"\n: "=&r" (x) : "l"(n::p ? p : q));', "ptx::a_b_c(ptx::l(n::p ? p : q), (x));"),
        ('asm volatile("bar.arrive 3, %0;" :: "n"(N) : "memory");', "ptx::bar_arrive(3, ptx::n(N));"),
        ('#define F(x) asm("f" \\\n  " %0;" : : "r"(x))\n', "#define F(x) ptx::f(ptx::r(x))\n"),
        ('asm volatile("fence;" ::: "memory");', "ptx::fence();"),
        ('// asm("a")\n/* asm( */ s = "asm(";', '// asm("a")\n/* asm( */ s = "asm(";'),
    ],
)
def test_a_statement_becomes_a_call(statement, call):
    assert translate(statement) == call


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('asm("a.b %0; c.d %0;" : "+r"(x));', "not one PTX instruction"),
        ('asm("" ::: "memory");', "not one PTX instruction"),
        ('asm("a.b %1;" : "+r"(x));', "no operand %1"),
        ('asm("a.b %0, %0;" : "=r"(x));', "reads %0"),
        ('asm("a.b %0;" : [x] "=r"(x));', "operand without a translation"),
    ],
)
def test_a_statement_without_a_translation_is_an_error(statement, message):
    with pytest.raises(ValueError, match=message):
        translate(statement)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm volatile("nanosleep.u32 %0;" :: "r"(7));', "nanosleep_u32"),
        ('u32 to; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to) : "r"(args.z[0])); args.z[0] = to;', "deleted"),
        ('asm("tanh.approx.f32 %0, %1;" :: "f"(args.z[0]), "f"(args.z[1]));', "float&"),
    ],
)
def test_an_unknown_instruction_or_operand_does_not_compile(body, message):
    with pytest.raises(KernelCompileError, match=message):
        emulated(f"KERNEL(some) {{ {body} }}", {"some": "float* z"})


FORBIDDEN = """
import sys
sys.path[:0] = ["tests", "tests/engine"]
import torch
from test_emulated_ptx import LaunchShape, emulated
program = emulated("KERNEL(some) { " + sys.argv[1] + " }", {"some": "float* z"})
program.prepare("some", LaunchShape(1, threads_per_block=int(sys.argv[2])), z=torch.zeros(64))()
"""
LOAD = 'asm("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(threadIdx.x * STEP));'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "threads", "message"),
    [
        ("args.z[0] = __shfl_sync(1u << threadIdx.x % 32, 1.0f, 3);", 32, "thread 0: a shuffle reads a lane that its"),
        (f"u32 x, y; {LOAD.replace('STEP', '8u')}", 32, "an address in shared memory is not aligned"),
        (f"u32 x, y; {LOAD.replace('STEP', '16u')}", 48, "thread 32: an instruction of a whole warp runs in one that"),
        ('asm("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(0), "l"(args.z + 1));', 32, "cp.async reads from an"),
        ('asm("cp.async.cg.shared.global [%0], [%1], 8;" :: "r"(0), "l"(args.z));', 32, "cp.async.cg copies 16 bytes"),
        ("args.z[0] = __cvta_generic_to_shared((void*)(1ull << 60));", 32, "outside of shared memory"),
    ],
)
def test_what_no_gpu_permits_ends_the_program(body, threads, message):
    command = [sys.executable, "-c", FORBIDDEN, body, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and message in done.stderr, done.stderr
