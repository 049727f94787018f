"""Kernels of one's own, named tensors, the compilers and the cache of what they built."""

import errno
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kernels import SCALE, SCALE_KERNEL, signature
from support.processes import child_environment

import gpu_vecenv
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.backends.compiler_process import run_compiler
from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.compile.cache import DIGEST_BYTES, MIN_FREE_BYTES, cache_dir, cached, open_cached, temporary_dir
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.compile.toolchain import find_host_compiler
from gpu_vecenv.declare.field import C_TYPES, f32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.engine.data_manager import TORCH_TYPES, DataManager
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.errors import CompilerError, EnvDefinitionError, KernelCompileError

ROOT = Path(gpu_vecenv.__file__).parent.parent


def doubled(functions: FunctionManager, text: str = SCALE, name: str | None = None) -> list[float]:
    """Compiles, launches and reads back; [2, 4, 6] when all is well."""
    x = torch.tensor([1.0, 2.0, 3.0], device=functions.device)
    functions.compile(text, name, kernels=[SCALE_KERNEL]).launch("scale", 3, x=x, a=2, n=3)
    return x.tolist()


# ---------------------------------------------------------------------- kernels of one's own


def test_a_kernel_of_ones_own_runs_on_a_games_tensors(device):
    env = gpu_vecenv.make("tag_gridworld", 6, device, full_observation=False)
    env.reset(seed=1)
    env.data.push("by", np.arange(6, dtype=np.int32))
    text = """#include "kernel.cuh"
    KERNEL(shift) { FOR_ITEMS (k, args.n) args.cell[k] += args.by[k / args.each]; }
    """
    before = env.data.pull("state_cell")
    shift = signature("shift", "i32* cell, const i32* by, i64 each, i64 n")
    program = env.functions.compile(text, name="shift.cu", kernels=[shift])
    program.launch("shift", 60, cell=env.state["cell"], by=env.data["by"], each=10, n=60)
    assert np.array_equal(env.data.pull("state_cell"), before + np.arange(6)[:, None, None])
    own_column = env.observe()[:, -1, 0] * env.game.grid
    assert own_column.round().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_kernel_compiled_with_a_game_sees_its_constants(device):
    game = gpu_vecenv.configure("tag_gridworld", grid=13, wall_penalty=0.3)
    text = "KERNEL(constants) { FOR_ITEMS (k, 1) { args.out[0] = GRID; args.out[1] = WALL_PENALTY; } }"
    out = torch.zeros(2, device=device)
    program = FunctionManager(device).compile(text, kernels=[signature("constants", "float* out")], game=game)
    program.launch("constants", 1, out=out)
    assert out.cpu().numpy().tolist() == np.array([13, 0.3], np.float32).tolist()


def test_scalars_of_every_width_and_null_pointers_arrive(device):
    parameters = "u8 z, i32 a, bool y, u32 b, i64 c, bool w, u64 d, float e, double f"
    every = signature("every", f"{parameters}, const void* none, i64* ints, double* floats")
    text = """KERNEL(every) {
        FOR_ITEMS (k, 1) {
            args.ints[0] = args.a; args.ints[1] = args.b; args.ints[2] = args.c; args.ints[3] = (i64)args.d;
            args.ints[4] = args.none == nullptr; args.ints[5] = args.w; args.ints[6] = args.y; args.ints[7] = args.z;
            args.floats[0] = args.e; args.floats[1] = args.f;
        }
    }
    """
    ints = torch.zeros(8, dtype=torch.int64, device=device)
    floats = torch.zeros(2, dtype=torch.float64, device=device)
    scalars = {"a": -(2**31), "b": 2**32 - 1, "c": -(2**63), "d": 2**63 + 5, "e": 0.1, "f": 0.1}
    small = {"z": 255, "y": False, "w": True}
    program = FunctionManager(device).compile(text, kernels=[every])
    program.launch("every", 1, **scalars, **small, none=None, ints=ints, floats=floats)
    assert ints.tolist() == [-(2**31), 2**32 - 1, -(2**63), 5 - 2**63, 1, 1, 0, 255]
    assert floats.tolist() == [float(np.float32(0.1)), 0.1]


def test_a_struct_laid_out_otherwise_than_python_fills_it_does_not_compile():
    scale = SCALE_KERNEL.source.replace("float a;\n    i64 n;", "i64 n;\n    float a;")
    assert scale != SCALE_KERNEL.source
    with pytest.raises(KernelCompileError) as error:
        FunctionManager("cpu").compile(scale, kernels=[])
    assert "laid out as Python fills it" in error.value.log


def test_a_macro_may_write_kernels(device):
    text = """#include "kernel.cuh"
    #define FILL(name, value) KERNEL(name) { FOR_ITEMS (k, args.n) args.x[k] = value; }
    FILL(ones, 1)
    FILL(twos, 2)
    """
    x = torch.zeros(3, device=device)
    kernels = [signature(name, "float* x, i64 n") for name in ("ones", "twos")]
    FunctionManager(device).compile(text, kernels=kernels).launch("twos", 3, x=x, n=3)
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 255, 256, 257, 4097, 100_003])
def test_every_item_is_visited_once(device, n):
    text = "KERNEL(count) { FOR_ITEMS (k, args.n) args.x[k] += 1; }"
    x = torch.zeros(n + 1, dtype=torch.int32, device=device)
    program = FunctionManager(device).compile(text, kernels=[signature("count", "i32* x, i64 n")])
    program.launch("count", n, x=x, n=n)
    np.testing.assert_array_equal(x.cpu(), [1] * n + [0])


def test_a_file_may_include_its_neighbours(device, tmp_path):
    (tmp_path / "factor.cuh").write_text("#pragma once\nHD float factor() { return 10; }\n")
    (tmp_path / "mine.cu").write_text(
        '#include "kernel.cuh"\n#include "factor.cuh"\n#include "factor.cuh"\n'
        "KERNEL(scale) { FOR_ITEMS (k, args.n) args.x[k] *= args.a * factor(); }\n"
    )
    functions = FunctionManager(device)
    assert doubled(functions, tmp_path / "mine.cu") == [20, 40, 60]
    (tmp_path / "factor.cuh").write_text("#pragma once\nHD float factor() { return 1; }\n")
    assert doubled(functions, tmp_path / "mine.cu") == [2, 4, 6]
    (tmp_path / "factor.cuh").unlink()
    with pytest.raises(EnvDefinitionError, match=r'mine\.cu:2: #include "factor\.cuh": no such file'):
        functions.compile(tmp_path / "mine.cu", kernels=[SCALE_KERNEL])


def test_a_prepared_launch_takes_the_other_arguments_at_each_call(device):
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    program = FunctionManager(device).compile(SCALE, kernels=[SCALE_KERNEL], name="mine.cu")
    launch = program.prepare("scale", LaunchShape(3), n=3)
    launch(x=x, a=2)
    launch(x=y, a=5)
    launch(a=2, x=x)
    assert x.tolist() == [4, 4, 4] and y.tolist() == [5, 5, 5]
    with pytest.raises(TypeError, match=r"mine\.cu: scale: arguments missing a; not expected n; expected a, x"):
        launch(x=x, n=3)


WRONG_ARGUMENTS = [
    ({"a": "2"}, TypeError, "argument a is a str; expected float32"),
    ({"a": True}, TypeError, "argument a is a bool; expected float32"),
    ({"a": torch.ones(())}, TypeError, "argument a is a Tensor; expected float32"),
    ({"a": 1e300}, ValueError, "argument a is out of range; expected float32, up to 3.40"),
    ({"a": 10**400}, ValueError, "argument a is out of range; expected float32, up to 3.40"),
    ({"x": torch._neg_view(torch.ones(3))}, ValueError, "argument x is a lazily negated or conjugated view"),
    ({"n": 3.0}, TypeError, "argument n is a float; expected int64"),
    ({"n": True}, TypeError, "argument n is a bool; expected int64"),
    ({"n": 2**63}, ValueError, "argument n is 9223372036854775808; expected int64, from -9223372036854775808 to"),
    ({"x": None}, TypeError, "argument x is a NoneType; expected a tensor"),
    ({"x": np.ones(3)}, TypeError, "argument x is a ndarray; expected a tensor"),
    (
        {"x": torch.ones(3, dtype=torch.float64)},
        TypeError,
        "argument x has dtype torch.float64; expected torch.float32",
    ),
    ({"x": torch.ones(3, device="meta")}, ValueError, "argument x is on meta; expected a tensor on cpu"),
    ({"x": torch.ones(6)[::2]}, ValueError, r"argument x has strides (2,); expected a contiguous tensor"),
    ({"x": torch.ones(4)}, ValueError, "argument x has 4 elements; expected n = 3"),
    ({"b": 1}, TypeError, "arguments not expected b; expected a, n, x"),
    ({"n": ...}, TypeError, "arguments missing n; expected "),
]


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(("change", "error", "message"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused_with_kernel_name_and_what_is_expected(change, error, message, prepared):
    """Those that are prepared, and those of the call."""
    sized = KernelSignature("scale", (Array("x", f32, shape=("n",)), Scalar("a", f32), Scalar("n", i64)))
    program = FunctionManager("cpu").compile(SCALE, kernels=[sized], name="mine.cu")
    x = torch.ones(3)
    arguments = {"x": x, "a": 2.0, "n": 3} | change
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    with pytest.raises(error, match=rf"^mine\.cu: scale: {re.escape(message)}"):
        if prepared:
            program.prepare("scale", LaunchShape(3), **arguments)()
        else:
            program.prepare("scale", LaunchShape(3))(**arguments)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("items", [-5, True, 2.5, None, "3"])
def test_a_wrong_number_of_items_is_refused(items):
    x = torch.ones(3)
    program = FunctionManager("cpu").compile(SCALE, kernels=[SCALE_KERNEL], name="mine.cu")
    with pytest.raises((TypeError, ValueError), match=r"mine\.cu: scale: items is .*; expected an int >= 0"):
        program.launch("scale", items, x=x, a=2.0, n=3)
    assert x.tolist() == [1, 1, 1]


def test_constants_need_no_newline(device):
    out = torch.zeros(1, device=device)
    text = "KERNEL(constant) { FOR_ITEMS (k, 1) args.out[0] = Q; }"
    kernels = [signature("constant", "float* out")]
    program = FunctionManager(device).compile(text, kernels=kernels, constants="constexpr float Q = 3.0f;")
    program.launch("constant", 1, out=out)
    assert out.tolist() == [3]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: KernelSignature("k", ()), ValueError, "kernel 'k' has no arguments"),
        (lambda: signature("k", "float* x, i64 x"), ValueError, "kernel 'k' has several arguments x"),
        (lambda: signature("k k", "float* x"), ValueError, "the name 'k k'; expected a C"),
        (lambda: KernelSignature("k", (Array("x", f32, shape=("n",)),)), ValueError, "the shape of 'x' names n"),
        (lambda: Scalar("x", np.complex64), TypeError, "argument 'x' has dtype <class 'numpy.complex64'>"),
        (lambda: Scalar("x", None), TypeError, "argument 'x' has dtype None"),
    ],
)
def test_a_signature_that_no_struct_can_have_is_refused(build, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build()


@pytest.mark.parametrize("name", ["nonesuch", "Scale", "abs"])  # abs is in every C library
def test_an_unknown_kernel_is_named_with_its_program(device, name):
    program = FunctionManager(device).compile(SCALE, name="mine.cu", kernels=[SCALE_KERNEL])
    with pytest.raises(AttributeError, match=rf"mine\.cu.*{name}"):
        program.prepare(name, LaunchShape(1))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_compile_error_has_file_line_and_compiler_message(device, tmp_path, as_file):
    text = SCALE + "\nvoid wrong() { undeclared[0] = 1; }\n"
    path = tmp_path / "mine.cu"
    path.write_text(text)
    functions = FunctionManager(device)
    messages = set()
    for _ in range(3):
        with pytest.raises(KernelCompileError) as error:
            functions.compile(path if as_file else text, name="mine.cu", kernels=[SCALE_KERNEL])
        messages.add(str(error.value))
        assert "undeclared" in error.value.log
    (message,) = messages
    assert message.startswith("mine.cu did not compile")
    assert re.search(r'mine\.cu(:4:\d+|\(4\)): error: .*"?undeclared', message), message


# ---------------------------------------------------------------------- named tensors


def test_values_of_every_type_go_there_and_back(device):
    data = DataManager(torch.device(device))
    for dtype in C_TYPES:
        array = np.array([[0, 1, 1], [1, 0, 1]], dtype)
        tensor = data.push(dtype.name, array)
        assert tensor is data[dtype.name]
        assert tensor.dtype == TORCH_TYPES[dtype] and tensor.device.type == device
        back = data.pull(dtype.name)
        assert back.dtype == dtype and np.array_equal(back, array)
        back[:] = 0
        assert np.array_equal(data.pull(dtype.name), array)
    assert list(data) == [dtype.name for dtype in C_TYPES] and len(data) == len(C_TYPES)


def test_push_writes_into_the_same_memory(device):
    data = DataManager(torch.device(device))
    tensor = data.allocate("x", (2, 2), np.dtype(np.float32))
    assert tensor.tolist() == [[0, 0], [0, 0]]
    pointer = tensor.data_ptr()
    ones = np.ones((4, 4), np.float32)
    for array in (
        ones[:2, :2],
        torch.ones(2, 2),
        ones[::2, ::2],
        ones[1::-1, 1::-1],
        np.broadcast_to(ones[0, 0], (2, 2)),
    ):
        tensor.zero_()
        assert data.push("x", array).data_ptr() == pointer
        assert tensor.tolist() == [[1, 1], [1, 1]]


def test_push_and_allocate_refuse_what_does_not_fit(device):
    data = DataManager(torch.device(device))
    data.push("x", np.ones(3, np.float32))
    wrong_shapes, wrong_types = [(4,), (1, 3), ()], [np.float64, np.int32]
    for wrong in [np.zeros(shape, np.float32) for shape in wrong_shapes] + [np.zeros(3, kind) for kind in wrong_types]:
        with pytest.raises(ValueError, match=r"push\('x'\): got .*expected \(3,\) torch\.float32"):
            data.push("x", wrong)
    assert data.pull("x").tolist() == [1, 1, 1]
    for wrong in (torch.ones(3).to_sparse(), torch.ones(3, device="meta"), np.ones(3, ">f4"), np.array(["a"])):
        with pytest.raises((TypeError, ValueError), match=r"push\('y'\): array (is a|has dtype) .*expected"):
            data.push("y", wrong)
    assert "y" not in data
    with pytest.raises(KeyError, match="already allocated"):
        data.allocate("x", (3,), torch.float32)
    for call in (data.pull, data.__getitem__):
        with pytest.raises(KeyError, match="nothing"):
            call("nothing")


def test_a_state_is_a_copy_that_can_be_loaded_again(device):
    data = DataManager(torch.device(device))
    data.push("x", np.arange(3, dtype=np.float32))
    data.push("y", np.arange(2))
    state, pointer = data.state_dict(), data["x"].data_ptr()
    data["x"].fill_(9)
    assert state["x"].tolist() == [0, 1, 2] and state["x"].device == data["x"].device
    data.load_state_dict({name: tensor.cpu() for name, tensor in state.items()})
    assert data["x"].tolist() == [0, 1, 2] and data["x"].data_ptr() == pointer
    state["x"].fill_(7)
    assert data["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, r"state has \['x'\]; expected \['x', 'y'\]"),
        ({"z": torch.zeros(1)}, r"state has \['x', 'y', 'z'\]"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, r"'y' is \(3,\) torch.int64; expected \(2,\) torch.int64"),
        ({"y": torch.zeros(2)}, r"'y' is \(2,\) torch.float32; expected \(2,\) torch.int64"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(device, change, message):
    data = DataManager(torch.device(device))
    data.push("x", np.arange(3, dtype=np.float32))
    data.push("y", np.arange(2))
    state = {**data.state_dict(), **change, "x": torch.full((3,), 5.0)}
    with pytest.raises(ValueError, match=message):
        data.load_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})
    assert data["x"].tolist() == [0, 1, 2] and data["y"].tolist() == [0, 1]


# ---------------------------------------------------------------------- the compile cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder; it does not exist yet."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("GPU_VECENV_CACHE", str(path))
    cache_dir.cache_clear()
    yield path
    cache_dir.cache_clear()


def contents(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Name -> inode, time of the last change and bytes of every file but the locks, which stay."""
    files = [file for file in path.rglob("*") if file.suffix != ".lock"]
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_nothing_is_built_twice(device, cache):
    assert doubled(FunctionManager(device)) == [2, 4, 6]
    assert len(contents(cache)) == 1
    gpu_vecenv.make("tag_gridworld", 2, device).reset(seed=1)
    built = contents(cache)
    assert len(built) == 2
    assert doubled(FunctionManager(device)) == [2, 4, 6]
    gpu_vecenv.make("tag_gridworld", 7, device).reset(seed=1)  # the number of environments is no constant
    assert contents(cache) == built
    gpu_vecenv.make("tag_gridworld", 2, device, grid=19).reset(seed=1)
    assert len(contents(cache)) == 3
    assert {name: entry for name, entry in contents(cache).items() if name in built} == built


def test_other_compiler_flags_make_another_entry(cache, monkeypatch):
    command = shlex.join(find_host_compiler())
    for flags in ("", " -DSOMETHING=1", " -DSOMETHING=2"):
        monkeypatch.setenv("CXX", command + flags)
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    assert len(contents(cache)) == 3


def test_a_damaged_entry_is_built_anew(device, cache):
    functions = FunctionManager(device)
    assert doubled(functions) == [2, 4, 6]
    (entry,) = (file for file in cache.iterdir() if file.suffix != ".lock")
    good = entry.read_bytes()
    middle, last = len(good) // 2, len(good) - 1
    damages = [good[:n] for n in (0, 1, 31, 32, 33, middle, last)]
    damages += [good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in (0, middle, last - 32, last)]
    for damage in [*damages, good + b"x"]:
        draft = cache.with_name("damaged")
        draft.write_bytes(damage)
        draft.replace(entry)  # what is loaded already keeps its own file
        with pytest.warns(UserWarning, match=f"{entry.name} is damaged: it is compiled anew"):
            assert doubled(functions) == [2, 4, 6]
        assert len(entry.read_bytes()) == len(good)
        rebuilt = contents(cache)
        assert list(rebuilt) == [entry.name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert doubled(functions) == [2, 4, 6]
        assert contents(cache) == rebuilt


def test_a_failed_build_leaves_nothing(device, cache):
    functions = FunctionManager(device)
    for _ in range(2):
        with pytest.raises(KernelCompileError):
            functions.compile("nonsense", kernels=[])
        assert contents(cache) == {}
    assert doubled(functions) == [2, 4, 6]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_may_enter_the_cache(cache, umask):
    previous = os.umask(umask)
    try:
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    finally:
        os.umask(previous)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o022 for file in cache.iterdir()} == {0}


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_cache_that_others_can_write_to_is_not_used(cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    with pytest.warns(
        UserWarning, match=r"kept for this process only: .*kernels belongs to another user or is writable by others"
    ):
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    assert contents(cache) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_the_cache_of_another_user_is_not_used(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 65534, 65534)
    with pytest.warns(UserWarning, match="belongs to"):
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    assert contents(cache) == {}


@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME", "GPU_VECENV_CACHE"])
def test_without_a_home_kernels_are_kept_for_the_process(cache, monkeypatch, tmp_path, name):
    for other in ("XDG_CACHE_HOME", "GPU_VECENV_CACHE"):
        monkeypatch.delenv(other, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(name, str(tmp_path / "file" / "home"))
    with pytest.warns(UserWarning, match="compiled kernels are kept for this process only"):
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert len(contents(cache_dir())) == 1
    assert cache_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["$LIB", "$ORIGIN", "${PLATFORM}", "a b;'%s", "-l\u00e4\U0001f600"])
def test_no_letters_of_the_caches_path_have_a_meaning(cache, monkeypatch, name):
    """The dynamic linker expands $LIB, $ORIGIN and $PLATFORM in the name of a library."""
    monkeypatch.setenv("GPU_VECENV_CACHE", str(cache / name))
    assert doubled(FunctionManager("cpu")) == [2, 4, 6]
    assert len(contents(cache / name)) == 1


def test_what_is_loaded_is_the_file_that_was_checked(cache):
    backend = HostBackend()
    answers = []
    for answer in (41, 42):
        text = f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {answer}; }}'
        with open_cached(text, ".so", lambda draft, text=text: backend.compile(text, draft)) as file:
            draft = cache / "draft"
            draft.write_bytes(b"of somebody else")
            draft.replace(file.name)
            descriptor = file.fileno()
            answers.append((descriptor, backend.load(file).library["answer"]()))
    # The second file has the descriptor of the first, which the dynamic linker must not take for the same library.
    assert answers == [(descriptor, 41), (descriptor, 42)]


@pytest.mark.parametrize("build_error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_cache_that_becomes_full_is_left_for_a_temporary_folder(cache, build_error):
    def build(draft: Path) -> None:
        if draft.is_relative_to(cache):
            raise OSError(build_error, os.strerror(build_error))
        draft.write_bytes(b"built")

    with pytest.warns(
        UserWarning, match=r"for this process only: .*; to keep them, set \$GPU_VECENV_CACHE to a folder"
    ):
        path = cached("one", ".so", build)
    assert path.parent == temporary_dir() and contents(cache) == {}


def test_an_entry_that_cannot_be_replaced_is_built_in_a_temporary_folder(cache):
    path = cached("one", ".so", lambda draft: draft.write_text("whole"))
    path.unlink()
    path.mkdir()  # stands for a file of another user in a folder with the sticky bit
    with pytest.warns(UserWarning, match="to keep them, set"):
        assert cached("one", ".so", lambda draft: draft.write_text("whole")).parent == temporary_dir()


def test_a_cache_whose_path_is_too_long_is_left_for_a_temporary_folder(cache, monkeypatch):
    longest = os.pathconf("/", "PC_PATH_MAX")
    folder = cache
    while len(str(folder)) < longest - 300:
        folder = folder / ("x" * 200)
    folder = folder / ("y" * (longest - 50 - len(str(folder)) - 1))
    monkeypatch.setenv("GPU_VECENV_CACHE", str(folder))
    with pytest.warns(UserWarning, match=r"File name too long.*to keep them, set"):
        assert doubled(FunctionManager("cpu")) == [2, 4, 6]


NOEXEC = """
mount -t tmpfs -o noexec,mode=0700 tmpfs "$GPU_VECENV_CACHE" || exit 77
exec "$0" -W always -c "$1"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_cache_without_execution_loads_a_copy(cache):
    """On such a file system dlopen fails with "failed to map segment"."""
    cache.mkdir(mode=0o700)
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DOUBLE}\nprint(doubled())"
    command = ["unshare", "-rm", "sh", "-c", NOEXEC, sys.executable, script]
    variables = child_environment() | {"GPU_VECENV_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user cannot mount")
    assert done.stdout == "[2.0, 4.0, 6.0]\n", done.stderr
    assert "(noexec): a copy in" in done.stderr and "set $GPU_VECENV_CACHE to a folder" in done.stderr


def killed_builder(key: str) -> None:
    """A process that builds an entry and is killed in the middle of it, having written half of a file."""
    begun, begin = os.pipe()
    child = os.fork()
    if child == 0:

        def build(draft: Path) -> None:
            draft.write_bytes(b"half")
            os.write(begin, b"!")
            signal.pause()

        try:
            cached(key, ".so", build)
        finally:
            os._exit(1)
    os.close(begin)
    assert os.read(begun, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(begun)


def entries(path: Path) -> list[str]:
    return sorted(file.read_bytes()[:-DIGEST_BYTES].decode() for file in path.iterdir() if file.suffix == ".so")


def drafts(path: Path) -> list[Path]:
    return list(path.glob("*.draft"))


def test_an_entry_whose_builder_was_killed_is_built_by_the_next_process(cache):
    killed_builder("one")
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".draft"}  # the lock file without its lock
    assert cached("one", ".so", lambda draft: draft.write_text("whole")).parent == cache
    assert entries(cache) == ["whole"] and drafts(cache) == []


def test_drafts_of_killed_builders_go_when_something_else_is_built(cache):
    killed_builder("one")
    assert len(drafts(cache)) == 1
    cached("another", ".so", lambda draft: draft.write_text("whole"))
    assert entries(cache) == ["whole"] and drafts(cache) == []


def test_the_draft_of_a_living_builder_stays_and_others_wait_for_it(cache):
    waiting, found, built = [], [], []

    def build(draft: Path) -> None:
        draft.write_text("first")
        cached("another", ".so", lambda other: other.write_text("other"))  # which clears what killed ones have left
        waiting.append(threading.Thread(target=lambda: found.append(cached("one", ".so", built.append))))
        waiting[0].start()
        assert draft.read_text() == "first" and not found

    path = cached("one", ".so", build)
    waiting[0].join()
    assert found == [path] and built == []
    assert entries(cache) == ["first", "other"] and drafts(cache) == []


def test_without_locks_each_builds_for_itself(cache, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)

    def build(draft: Path) -> None:
        cached("one", ".so", lambda other: other.write_text("by another"))  # it need not wait
        assert entries(cache) == ["by another"]
        draft.write_text("last")

    cached("one", ".so", build)
    assert entries(cache) == ["last"] and drafts(cache) == []


@pytest.mark.parametrize(
    "failing", [CompilerError("none"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_a_build_that_breaks_off_lets_the_next_one_in(cache, failing):
    def build(draft: Path) -> None:
        draft.write_text("half")
        raise failing

    for _ in range(2):
        with pytest.raises(type(failing)):
            cached("one", ".so", build)
        assert entries(cache) == drafts(cache) == []
    cached("one", ".so", lambda draft: draft.write_text("whole"))
    assert entries(cache) == ["whole"]


def test_a_full_disk_is_no_cache(cache):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIN_FREE_BYTES - 1, before[1]))  # the last byte fails, as on a full disk
    try:
        with pytest.warns(UserWarning, match="kept for this process only"):
            used = cache_dir()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert used != cache and list(cache.iterdir()) == []


# A process with these lines first obeys permissions even if it belongs to root.
OBEY = """
import ctypes, os
if os.getuid() == 0:
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
"""
DOUBLE = f"""
import warnings
import numpy as np, torch
from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
def doubled():
    x = torch.tensor([1.0, 2.0, 3.0])
    kernel = KernelSignature("scale", (Array("x", np.float32), Scalar("a", np.float32), Scalar("n", np.int64)))
    FunctionManager("cpu").compile({SCALE!r}, kernels=[kernel]).launch("scale", 3, x=x, a=2, n=3)
    return x.tolist()
"""


def output_of(script: str, **environment: str) -> str:
    """What a new Python process prints; it must succeed."""
    inherited = child_environment().items()
    kept = {name: value for name, value in inherited if not name.startswith(("GPU_VECENV", "XDG_"))}
    variables = {**kept, **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_with_a_read_only_home_kernels_are_kept_for_the_process(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    script = textwrap.dedent("""
        import json, pathlib
        try:
            pathlib.Path.home().joinpath("x").mkdir()
        except PermissionError:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                print(json.dumps([doubled(), [str(w.message) for w in caught], str(cache_dir())]))
    """)
    result, (warning,), used = json.loads(output_of(OBEY + DOUBLE + script, HOME=str(home)))
    assert result == [2, 4, 6]
    assert warning.startswith("compiled kernels are kept for this process only: ") and str(home) in warning
    assert list(home.iterdir()) == []
    assert not Path(used).exists()  # it ended with the process


@pytest.mark.slow
def test_eight_processes_that_want_one_entry_compile_it_once(tmp_path):
    # One import, then eight forks that start together. The compiler notes each time that it builds something.
    compiler = tmp_path / "compiler"
    note = f'case " $* " in *" -o "*) echo built >> {shlex.quote(str(tmp_path / "log"))} ;; esac'
    compiler.write_text(f'#!/bin/sh\n{note}\nexec {shlex.join(find_host_compiler())} "$@"\n')
    compiler.chmod(0o700)
    script = DOUBLE + textwrap.dedent("""
        import multiprocessing
        context = multiprocessing.get_context("fork")
        start, results = context.Barrier(8), context.SimpleQueue()
        def work():
            start.wait()
            results.put(doubled())
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        processes = [context.Process(target=work) for _ in range(8)]
        for process in processes: process.start()
        for process in processes: process.join()
        assert [process.exitcode for process in processes] == [0] * 8
        print([results.get() for _ in processes])
    """)
    variables = {"GPU_VECENV_CACHE": str(tmp_path / "kernels"), "CXX": shlex.quote(str(compiler))}
    assert output_of(script, **variables).strip() == str([[2.0, 4.0, 6.0]] * 8)
    assert len(contents(tmp_path / "kernels")) == 1
    assert (tmp_path / "log").read_text() == "built\n"


# ---------------------------------------------------------------------- compilers


@pytest.mark.parametrize("command", ["/nowhere/c++", "nosuchcompiler -O2"])
def test_a_compiler_that_is_not_there_is_named(monkeypatch, cache, command):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(CompilerError, match=re.escape(command.split()[0])):
        doubled(FunctionManager("cpu"))
    assert contents(cache) == {}


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        ("echo 'k.cu:3: error: no' >&2; exit 1", KernelCompileError, "^mine$"),
        (
            "echo half >&2; kill -9 $$",
            CompilerError,
            "was ended by SIGKILL while it compiled.*memory ran out.*output: half$",
        ),
        (
            "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
            CompilerError,
            "was ended by the system while it compiled",
        ),
    ],
)
def test_failures_of_a_compiler_are_distinguished(tmp_path, does, error, words):
    program = tmp_path / "c++"
    program.write_text(f"#!/bin/sh\ncd {shlex.quote(str(tmp_path))}\n{does}\n")
    program.chmod(0o755)
    with pytest.raises(error, match=words) as raised:
        run_compiler([str(program)], "mine")
    if error is KernelCompileError:
        assert raised.value.log == "k.cu:3: error: no"


def test_a_compiler_that_takes_too_long_is_killed_with_what_it_started(tmp_path):
    program, pipe = tmp_path / "c++", tmp_path / "pipe"
    os.mkfifo(pipe)
    # What it starts holds the pipe open for as long as it runs, but not the output, whose end run_compiler waits for.
    program.write_text(f"#!/bin/sh\n(echo runs; exec sleep 200) >{shlex.quote(str(pipe))} 2>&1 &\nwait\n")
    program.chmod(0o755)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(CompilerError, match="was still compiling after 2 s and was stopped"):
            run_compiler([str(program)], "mine", seconds=2)
        assert os.read(held, 100) == b"runs\n"
        assert select.select([held], [], [], 60)[0], "it runs on"
        assert os.read(held, 100) == b""  # the end: no process holds the pipe
    finally:
        os.close(held)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compare with")
def test_clang_from_a_wheel_is_bitwise_equal_to_gcc(shipped_flags, monkeypatch):
    digests = {}
    for compiler in ("g++", f"{shlex.quote(sys.executable)} -m ziglang c++"):
        monkeypatch.setenv("CXX", compiler)
        for name, config in (("tag_gridworld", {}), ("tag_continuous", {"num_runners": 20, "max_steps": 40})):
            env = gpu_vecenv.make(name, 100, "cpu", **config)
            digests.setdefault(name, []).append(trajectory_digest(env, 5, 120).hex())
            assert env.episode_statistics()["episodes"].min() >= 1
    for name, (by_gcc, by_clang) in digests.items():
        assert by_gcc == by_clang, name


FUSED_ON_THE_HOST = re.compile(r"\b(?:vf(?:m|nm)(?:add|sub)\w*|f(?:n?madd|n?msub|ml[as]))\b")


@pytest.mark.slow
def test_the_host_fuses_only_what_is_written(shipped_flags, tmp_path):
    text = game_source(gpu_vecenv.configure("tag_continuous").layout)
    written = "return __builtin_fmaf(a, b, c);"
    assert text.count(written) == 1
    (tmp_path / "kernel.cpp").write_text(text.replace(written, "return a * b + c;"))
    command = [*HostBackend().command, "-S", "-o", "-", str(tmp_path / "kernel.cpp")]
    assembly, fused = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        for more in ((), ("-ffp-contract=fast",))
    )
    assert "vecenv_step" in assembly
    if not FUSED_ON_THE_HOST.search(fused):
        pytest.skip("this processor has no fused multiply-add")
    assert FUSED_ON_THE_HOST.findall(assembly) == []
