"""The host backend: C++ compiler, shared library, ctypes; kernels run on several threads without the GIL."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO

import torch

from gpu_vecenv.compile.backends import GroupShape, Launcher, LaunchShape, TensorCores, symbol
from gpu_vecenv.compile.backends.compiler_process import run_compiler
from gpu_vecenv.compile.engine_kernels import TRACES_ACCESSES
from gpu_vecenv.compile.forks import forks
from gpu_vecenv.compile.toolchain import find_host_compiler
from gpu_vecenv.errors import CompilerError
from gpu_vecenv.escapes import warn

# No contraction to FMA: the same rounding as on the GPU. No exceptions and run-time type information: kernels use none.
FLAGS = (
    "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti -fvisibility=hidden -shared"
).split()
if os.name != "nt":  # where all code is relocated when it is loaded, and compilers refuse the flag
    FLAGS.append("-fPIC")
if sys.platform == "linux":
    FLAGS.append("-Wl,-z,defs")  # a missing function fails the build, not the first call
TRACING_FLAGS = "-O1 -fsanitize=thread -c".split()  # at -O1 no access is vectorised: those of vectors are not reported
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
FILE_DESCRIPTORS = Path("/proc/self/fd")  # Linux
NO_EXECUTION = getattr(os, "ST_NOEXEC", 0)
_loads = itertools.count(1)
WORK_PER_THREAD = 4096  # with less work a second thread costs more than it saves


class HostBackend:
    """Compiles device code for the host's processor.

    ``$GPU_VECENV_CXXFLAGS`` adds compiler flags, for debug builds such as those with sanitizers; they are part of the
    key of a binary in the cache. Like ``$CXX`` they can run any command, so they are read from the environment of the
    process only, never from a configuration or another file.
    """

    device = torch.device("cpu")
    suffix = ".dll" if os.name == "nt" else ".so"  # dlopen of macOS takes any name
    fault = None
    processor_name: str | None = None
    tensor_cores: TensorCores | None = None
    resident_threads: int | None = None
    parameter_bytes: int | None = None
    driver_name: str | None = None

    def __init__(self) -> None:
        try:
            command = find_host_compiler()
        except ValueError as error:
            raise CompilerError(f"$CXX is {os.environ.get('CXX')!r}: {error}") from error
        if command is None:
            raise CompilerError(
                "no C++ compiler: looked for $CXX, c++, g++, clang++ and the Python package ziglang; "
                "install one of them, for example: pip install ziglang"
            )
        try:
            more = shlex.split(os.environ.get("GPU_VECENV_CXXFLAGS", ""))
        except ValueError as error:
            raise CompilerError(f"$GPU_VECENV_CXXFLAGS is {os.environ['GPU_VECENV_CXXFLAGS']!r}: {error}") from error
        # Kernels use no C++ library; zig would first build its own, which takes minutes.
        without_library = ["-nostdlib++"] if "ziglang" in command else []
        self.compiler_command = command
        self.traces_accesses = os.name != "nt" and not any(flag.startswith("-fsanitize") for flag in more)
        self.command = [*command, *FLAGS, NATIVE_FLAG, *without_library, *more]

    @property
    def identity(self) -> str:
        return "\n".join([*self.command, compiler_version(*self.compiler_command), _processor()])

    def device_constants(self, shape: GroupShape) -> str:
        return ""

    def default_threads_per_env(self, num_agents: int, largest_array: int = 0) -> int:
        return 1

    def compile(self, text: str, target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.cpp")
            source.write_text(text, encoding="utf-8")
            if self.traces_accesses and TRACES_ACCESSES in text:
                # Linked apart: with that flag the compiler would add a library, which has other functions of the names.
                traced, source = source, Path(folder, "kernel.o")
                flags = [flag for flag in self.command if flag != "-shared" and not flag.startswith("-Wl,")]
                run_compiler([*flags, *TRACING_FLAGS, "-o", str(source), str(traced)], " ".join(self.command))
            run_compiler([*self.command, "-o", str(target), str(source)], " ".join(self.command))

    def new_stream(self) -> None:
        pass

    def load(self, file: BinaryIO) -> HostModule:
        if not FILE_DESCRIPTORS.is_dir():
            return HostModule(ctypes.CDLL(file.name))
        if not os.fstatvfs(file.fileno()).f_flag & NO_EXECUTION:
            # Sanitizers open a library by the name that it was loaded by when they look for its lines.
            keeps_open = any(flag.startswith("-g") for flag in self.command)
            return HostModule(_library(os.dup(file.fileno()) if keeps_open else file.fileno()))
        warn(
            f"{file.name} is on a file system without execution (noexec): a copy in {tempfile.gettempdir()} is loaded "
            "instead; set $GPU_VECENV_CACHE to a folder from which libraries may be loaded",
            stacklevel=2,
        )
        with tempfile.NamedTemporaryFile(suffix=self.suffix) as copy:
            file.seek(0)
            shutil.copyfileobj(file, copy)
            copy.flush()
            return HostModule(_library(copy.fileno()))


class HostModule:
    """A loaded shared library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def launcher(self, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        function = self.library[symbol(kernel)]
        function.restype = None
        function.argtypes = [ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p]
        address = ctypes.c_void_p(ctypes.addressof(arguments))
        work = shape.items if shape.work is None else shape.work
        workers = max(1, min(_processors(), shape.items, work // WORK_PER_THREAD))

        def launch(kept_alive: ctypes.Structure = arguments) -> None:
            if workers == 1:
                function(0, 1, address)
                return
            submit = _pool(forks()).submit
            others: list[Future[None]] = []
            try:  # wait also when interrupted: the workers write to memory that the caller may free
                try:
                    others.extend(submit(function, w, workers, address) for w in range(1, workers))
                    function(0, workers, address)
                finally:
                    _wait(others)
            finally:  # again, if the first wait was interrupted
                _wait(others)

        return launch


def _library(descriptor: int) -> ctypes.CDLL:
    """Load an open file by its descriptor: the file of that descriptor, and no letters of its path have a meaning.

    The dynamic linker takes a name that it has seen for the same library, while descriptors are used again: the number
    of the load is written into the path as separators, "/" for 0 and "/." for 1.
    """
    number = "".join("/." if bit == "1" else "/" for bit in f"{next(_loads):b}")
    return ctypes.CDLL(f"{FILE_DESCRIPTORS}{number}/{descriptor}")


def _wait(others: Sequence[Future[None]]) -> None:
    for other in others:
        other.result()


def num_host_threads() -> int:
    """Maximum number of threads of one launch."""
    return _processors()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    # One pool per process: a forked process does not inherit threads.
    return ThreadPoolExecutor(max(1, _processors() - 1), thread_name_prefix="gpu_vecenv")


@cache
def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@cache
def compiler_version(*command: str) -> str:
    """What a C++ compiler says of its version; CompilerError if it cannot be run."""
    question = "version" if "ziglang" in command else "--version"
    arguments = command[:-1] if question == "version" else command  # ziglang: drop its "c++"
    try:
        return subprocess.run([*arguments, question], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(f"{' '.join(command)} could not be run: {error}") from error


@cache
def _processor() -> str:
    """Identifies the processor features that -march=native selects."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.platform()} {hashlib.sha256(features.encode()).hexdigest()}"
