"""Launches of one kernel joined in one: each computes what it would alone; what is recorded and what cannot be."""

import dataclasses
import threading

import pytest
import torch
import torch._dynamo  # which takes seconds, at the first operation under a TorchDispatchMode
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend
from support.kernels import SCALE, SCALE_KERNEL, signature

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.backends.cuda_compiler import parameter_bytes
from gpu_vecenv.compile.joined_launches import MAX_JOINED, RecordedLaunch
from gpu_vecenv.compile.recording import NotRecordableError, RecordedOperation, recorded, recorder
from gpu_vecenv.files import cuda_folder

# Blocks add up their items, and the last of them all sums: with a counter of its own, static and dynamic shared memory.
TOTAL = f"""#include "{cuda_folder() / "learner/blocks.cuh"}"
"""
TOTAL += """
extern __shared__ __align__(16) unsigned char shared_memory[];
BLOCK_KERNEL(total, 64) {
    SHARED i64 sums[64];
    i64* doubled = (i64*)shared_memory;
    FOR_BLOCKS (tile, args.tiles) {
        FOR_THREADS (k, 64) doubled[k] = 2 * args.x[tile * 64 + k];
        block_barrier();
        FOR_THREADS (k, 64) sums[k] = doubled[63 - k];
        add_up<64>(sums);
        FOR_THREADS (k, 1) args.parts[tile] = sums[0];
        if (!arrives_last(args.ticket, args.tiles)) continue;
        FOR_THREADS (k, 1) {
            i64 sum = 0;
            for (i64 other = 0; other < args.tiles; ++other) sum += args.parts[other];
            *args.out = sum;
        }
    }
}
"""
TOTAL_KERNEL = signature("total", "const i64* x, i64* parts, i32* ticket, i64* out, i64 tiles")
TILES = 3


@pytest.fixture(
    params=["forwards", "backwards", *(pytest.param(d, marks=pytest.mark.gpu) for d in ("pycuda", "cuda_core"))]
)
def functions(request, monkeypatch):
    """Of a GPU with either driver, or of emulated CUDA threads."""
    if request.param in ("pycuda", "cuda_core"):
        return FunctionManager("cuda", request.param)
    monkeypatch.setenv("EMULATED_THREADS", request.param)
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        return FunctionManager("cpu")


def joined(*launches):
    """A function that does these launches as one."""
    (first,), *others = [recorded(launch) for launch in launches]
    assert all(other.kind == first.kind for (other,) in others)
    return first.join([other for (other,) in others])


def totals(functions, count):
    """Launches of `total`, each with numbers of its own, their outputs and what these must be."""
    program = functions.compile(TOTAL, "total.cu", kernels=[TOTAL_KERNEL])
    shape = LaunchShape(TILES * 64, threads_per_block=64, shared_bytes=64 * 8)
    launches, outputs, expected = [], [], []
    for k in range(count):
        x = torch.arange(TILES * 64, device=functions.device) * (k + 1)
        outputs.append(torch.zeros(1, dtype=torch.int64, device=functions.device))
        expected.append(2 * int(x.sum()))
        parts = torch.zeros(TILES, dtype=torch.int64, device=functions.device)
        ticket = torch.zeros(1, dtype=torch.int32, device=functions.device)
        launches.append(program.prepare("total", shape, x=x, parts=parts, ticket=ticket, out=outputs[-1], tiles=TILES))
    return launches, outputs, expected


@pytest.mark.parametrize("count", [1, 2, MAX_JOINED, 2 * MAX_JOINED + 3])
def test_each_launch_has_its_own_arguments_and_counters(functions, count):
    launches, outputs, expected = totals(functions, count)
    run = joined(*launches)
    for _ in range(2):  # counters are 0 again
        for out in outputs:
            out.zero_()
        run()
        assert [out.item() for out in outputs] == expected


def test_launches_join_as_far_as_their_arguments_fit(functions):
    """Those of many arguments are several launches."""
    names = [f"x{k}" for k in range(90)]
    kernel = signature("many", ", ".join(f"i64* {name}" for name in names))
    source = (
        f"KERNEL(many) {{ FOR_ITEMS (k, 1) {{ {' '.join(f'*args.{name} += {k};' for k, name in enumerate(names))} }} }}"
    )
    program = functions.compile(source, kernels=[kernel])
    tensors = [torch.zeros(90, dtype=torch.int64, device=functions.device) for _ in range(9)]
    launches = [
        program.prepare("many", LaunchShape(1), **{name: x[k : k + 1] for k, name in enumerate(names)}) for x in tensors
    ]
    joined(*launches)()
    assert all(x.tolist() == list(range(90)) for x in tensors)


def scaled(functions, n, source=SCALE, **shape):
    x = torch.arange(1.0, n + 1, device=functions.device)
    program = functions.compile(source, kernels=[SCALE_KERNEL])
    return program.prepare("scale", LaunchShape(n, **shape), x=x, a=2.0, n=n), x


def test_arguments_are_those_of_the_recording(functions):
    program = functions.compile(SCALE, kernels=[SCALE_KERNEL])
    launch = program.prepare("scale", LaunchShape(3), n=3)
    x = torch.ones(3, device=functions.device)

    def twice():
        launch(x=x, a=3.0)
        launch(x=x, a=5.0)

    first, second = recorded(twice)
    assert x.eq(1).all() and recorder() is None
    first.join([])()
    assert x.eq(3).all()
    second.join([])()
    assert x.eq(15).all()


def test_only_launches_of_one_kernel_and_shape_are_of_one_kind(functions):
    def kind(*arguments, **changes):
        (one,) = recorded(scaled(functions, *arguments, **changes)[0])
        assert isinstance(one, RecordedLaunch)
        return one.kind

    assert kind(300) == kind(301)  # as many blocks
    others = [kind(600), kind(300, threads_per_block=512), kind(300, shared_bytes=64), kind(300, SCALE + "// other\n")]
    assert all(other != kind(300) for other in others)


def test_only_the_thread_that_records_is_recorded(functions):
    launch, x = scaled(functions, 3)

    def in_another_thread():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()

    assert recorded(in_another_thread) == [] and x.tolist() == [2, 4, 6]


def test_writes_of_torch_are_done_one_by_one():
    tensors = [torch.zeros(2, 3) for _ in range(2)]

    def write(x):
        x[1].fill_(4)
        x[0].copy_(x[1])
        x.view(3, 2).add_(1)

    each = [recorded(lambda x=x: write(x)) for x in tensors]
    assert all(x.eq(0).all() for x in tensors)
    assert all(isinstance(work, RecordedOperation) for own in each for work in own)
    assert [work.kind for work in each[0]] == [work.kind for work in each[1]]
    for works in zip(*each, strict=True):
        works[0].join(works[1:])()
    expected = torch.zeros(2, 3)
    write(expected)
    assert all(equal_bits(x, expected) for x in tensors)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.sum(),
        lambda x: x.clone(),
        lambda x: torch.zeros(3),
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: torch.add(x, x, out=x),
    ],
    ids=["addition", "sum", "clone", "allocation", "number", "flag", "out argument"],
)
def test_other_uses_of_torch_cannot_be_recorded(use):
    x = torch.zeros(3)
    with pytest.raises(NotRecordableError, match="aten"):
        recorded(lambda: use(x))
    assert recorder() is None and x.eq(0).all()


def test_all_drivers_of_a_compiler_take_the_parameters():
    assert [parameter_bytes(v) for v in ("nvrtc 12.9", "nvrtc 13.0", "nvrtc 11.8")] == [4096, 32764, 4096]
    nvcc = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V{}.48\n"
    assert [parameter_bytes(nvcc.format(v, v)) for v in ("12.4", "13.1")] == [4096, 32764]


def test_the_host_joins_nothing():
    assert FunctionManager("cpu").backend.parameter_bytes is None
    assert dataclasses.replace(LaunchShape(1), launches=3).grid == 1
