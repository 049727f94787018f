"""A backend that compiles the CUDA branch of the sources for the host and runs thread by thread, see emulated_cuda.hpp.

It takes the place of the host's backend and tests without a GPU what only the CUDA branch has: groups of threads,
barriers, shared memory, launch shapes, PTX instructions. It finds no races within a warp and nothing about the GPU's
floats or speed.
"""

import ctypes
from pathlib import Path
from typing import BinaryIO

from gpu_vecenv.compile.backends import GroupShape, Launcher, LaunchShape, TensorCores, symbol
from gpu_vecenv.compile.backends.cuda import cuda_constants, default_threads_per_env
from gpu_vecenv.compile.backends.host import HostBackend
from support import emulated_ptx

PRELUDE = "".join(Path(__file__).with_name(f"emulated_{part}.hpp").read_text() for part in ("cuda", "ptx"))
TRANSLATION = Path(emulated_ptx.__file__).read_text()
SHARED_LIMIT = 232448  # bytes that a block may have on an H200


class EmulatedCudaBackend(HostBackend):
    """Emulates a GPU's blocks on the host."""

    suffix = ".emulated"  # one dot: the cache reads the key before it
    processor_name = "emulated CUDA threads"
    resident_threads = 2 * 2048  # of two multiprocessors
    parameter_bytes = 4096
    tensor_cores = TensorCores(multiprocessors=2, shared_bytes=SHARED_LIMIT + 1024, block_shared_bytes=SHARED_LIMIT)

    def __init__(self) -> None:
        super().__init__()
        self.traces_accesses = False
        self.command = [flag for flag in self.command if flag != "-O3"] + ["-O1", "-Wno-unknown-pragmas"]

    @property
    def identity(self) -> str:
        return f"{super().identity}\n{PRELUDE}\n{TRANSLATION}"

    def device_constants(self, shape: GroupShape) -> str:
        return cuda_constants(shape.threads_per_env, SHARED_LIMIT, shape.threads_per_block)

    def default_threads_per_env(self, num_agents: int, largest_array: int = 0) -> int:
        return default_threads_per_env(num_agents, largest_array)

    def compile(self, text: str, target: Path) -> None:
        # A kernel takes the address of its arguments, however many: launch() calls every kernel in the same way.
        text = text.replace("(name##_PARAMETERS)", "(const name##_Arguments& arguments)")
        text = text.replace("({name##_FIELDS})", "(arguments)")
        text = text.replace("(const __grid_constant__ name##_Launches launches)", "(const name##_Launches& launches)")
        text = text.replace("extern __shared__ __align__(16) unsigned char shared_memory[];", "")
        super().compile(PRELUDE + emulated_ptx.translate(text), target)

    def load(self, file: BinaryIO) -> "EmulatedCudaModule":
        return EmulatedCudaModule(super().load(file).library)


class EmulatedCudaModule:
    """A loaded library of emulated kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def launcher(self, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        address, function = ctypes.byref(arguments), self.library[symbol(kernel)]

        def launch() -> None:
            shared_bytes = ctypes.c_size_t(shape.shared_bytes)
            grid = shape.grid, shape.launches
            self.library.launch(function, *grid, shape.threads_per_block, shared_bytes, address)

        return launch
