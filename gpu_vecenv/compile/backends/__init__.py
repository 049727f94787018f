"""The only code that touches a compiler, a driver or a raw pointer: compile source to a binary, load it, launch it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from gpu_vecenv.declare.kernels import Array, KernelSignature
from gpu_vecenv.errors import ConfigError

Launcher = Callable[[], None]
POINTER = ctypes.c_void_p
SCALARS: dict[np.dtype[Any], Any] = {
    np.dtype(np.float32): ctypes.c_float,
    np.dtype(np.float64): ctypes.c_double,
    np.dtype(np.int32): ctypes.c_int32,
    np.dtype(np.uint32): ctypes.c_uint32,
    np.dtype(np.int64): ctypes.c_int64,
    np.dtype(np.uint64): ctypes.c_uint64,
    np.dtype(np.uint8): ctypes.c_uint8,
    np.dtype(np.bool_): ctypes.c_bool,
}
GROUP_SIZES_WITHIN_WARP = (1, 2, 4, 8, 16, 32)  # threads; several such groups share a block
GROUP_SIZES = (*GROUP_SIZES_WITHIN_WARP, *range(64, 1025, 32))  # a group of several warps has a block of its own
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)  # threads; staging.cuh needs a power of two of groups per block
DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True)
class GroupShape:
    """How a GPU's threads are distributed over environments; results do not depend on it, speed does.

    Args:
        threads_per_env: Threads that run one environment: 1, 2, 4, 8, 16 or a multiple of 32 up to 1024.
        threads_per_block: Threads of a block: a power of two from 32 to 1024; equal to threads_per_env if that is
            above 32.

    Raises:
        ConfigError: A value is not supported, or the two do not fit together.
    """

    threads_per_env: int
    threads_per_block: int

    def __post_init__(self) -> None:
        if type(self.threads_per_env) is not int or self.threads_per_env not in GROUP_SIZES:
            raise ConfigError(
                f"threads_per_env is {self.threads_per_env!r}; expected None, 1, 2, 4, 8, 16 or a multiple of "
                "32 up to 1024"
            )
        fitting = BLOCK_SIZES if self.threads_per_env in GROUP_SIZES_WITHIN_WARP else (self.threads_per_env,)
        if type(self.threads_per_block) is not int or self.threads_per_block not in fitting:
            raise ConfigError(
                f"threads_per_block is {self.threads_per_block!r} with groups of {self.threads_per_env} threads; "
                f"expected None, or {', '.join(map(str, fitting))}; see threads_per_env"
            )

    @classmethod
    def of(cls, threads_per_env: int, threads_per_block: int | None = None) -> GroupShape:
        """A shape with the default block for ``threads_per_env`` if ``threads_per_block`` is None."""
        small = type(threads_per_env) is int and threads_per_env in GROUP_SIZES_WITHIN_WARP
        return cls(
            threads_per_env,
            (DEFAULT_BLOCK_SIZE if small else threads_per_env) if threads_per_block is None else threads_per_block,
        )


@dataclass(frozen=True)
class LaunchShape:
    """The number of items that a kernel processes, and on a GPU its threads.

    ``threads_per_item`` threads process one item; blocks have ``threads_per_block`` threads and ``shared_bytes`` of
    dynamic shared memory.
    """

    items: int
    threads_per_item: int = 1
    threads_per_block: int = 256
    shared_bytes: int = 0
    work: int | None = None  # items times their size, from which the number of host threads follows; None: items
    launches: int = 1  # that are joined in one, on a GPU: the grid's size in z

    @property
    def grid(self) -> int:
        """Number of blocks, at least 1."""
        return max(1, -(-self.items * self.threads_per_item // self.threads_per_block))


@dataclass(frozen=True)
class TensorCores:
    """A GPU with the tensor cores of sm_80 or later, and the memory that its blocks share."""

    multiprocessors: int
    shared_bytes: int  # of a multiprocessor
    block_shared_bytes: int  # the most that a block may have
    reserved_shared_bytes: int = 1024  # of each block, for the system


def group_constants(
    threads_per_env: int, envs_per_block: int, groups_per_warp: int, shared_limit: int, shared_begin: int = 0
) -> str:
    """Definitions for code that steps environments by groups of threads.

    Args:
        threads_per_env: Threads of a group.
        envs_per_block: Groups of a block.
        groups_per_warp: Groups of a warp; 1 if a group has several warps.
        shared_limit: Bytes of shared memory that a block may use for environments.
        shared_begin: Bytes of dynamic shared memory before these, a multiple of 16.
    """
    return (
        f"constexpr int THREADS_PER_ENV = {threads_per_env}, ENVS_PER_BLOCK = {envs_per_block};\n"
        f"constexpr int GROUPS_PER_WARP = {groups_per_warp};\n"
        f"constexpr unsigned long long SHARED_LIMIT = {shared_limit}, SHARED_BEGIN = {shared_begin};\n"
    )


class Module(Protocol):
    """A loaded binary."""

    def launcher(self, kernel: str, arguments: ctypes.Structure, shape: LaunchShape) -> Launcher:
        """A function that launches a kernel with the values in ``arguments`` at the time of each call.

        Raises:
            AttributeError: The binary has no such kernel.
        """


class Backend(Protocol):
    """Compiles device code for one device and loads the binaries."""

    device: torch.device
    suffix: str

    @property
    def fault(self) -> str | None:
        """The error after which the device is unusable in this process; None if there was none."""

    @property
    def tensor_cores(self) -> TensorCores | None:
        """The GPU's tensor cores; None without."""

    @property
    def identity(self) -> str:
        """Everything except the source that the binary depends on: compiler, version, flags, architecture."""

    @property
    def parameter_bytes(self) -> int | None:
        """Bytes that the parameters of a kernel may have, at most; None where launches cannot be joined."""

    @property
    def traces_accesses(self) -> bool:
        """Whether the compiler can report accesses to memory, see races.cuh."""

    @property
    def driver_name(self) -> str | None:
        """Which driver loads and launches, "pycuda" or "cuda_core"; None on the CPU."""

    @property
    def resident_threads(self) -> int | None:
        """Threads that the GPU holds at the same time, at most; None on the CPU."""

    @property
    def processor_name(self) -> str | None:
        """The name of the GPU, part of the key of tuning results; None on the CPU."""

    def device_constants(self, shape: GroupShape) -> str:
        """Definitions that depend on the device, to precede a game's source."""

    def default_threads_per_env(self, num_agents: int, largest_array: int = 0) -> int:
        """Default number of threads that run one environment, whose largest array has so many items."""

    def compile(self, text: str, target: Path) -> None:
        """Write the binary of the source ``text`` to ``target``, or raise KernelCompileError or CompilerError."""

    def load(self, file: BinaryIO) -> Module:
        """Load a compiled binary, open for reading."""

    def new_stream(self) -> torch.cuda.Stream | None:
        """A stream for graph capture, on which kernels are launched without a detour; None on the CPU."""


def structure(kernel: KernelSignature) -> ctypes.Structure:
    """A kernel's argument struct, all zero; each argument is an attribute."""
    fields = [(a.name, POINTER if isinstance(a, Array) else SCALARS[a.dtype]) for a in kernel.arguments]
    arguments: ctypes.Structure = type(f"{kernel.name}_Arguments", (ctypes.Structure,), {"_fields_": fields})()
    offsets = {name: getattr(type(arguments), name).offset for name in kernel.offsets}
    if ctypes.sizeof(arguments) != kernel.struct.itemsize or offsets != kernel.offsets:
        raise AssertionError(f"{kernel.name}: ctypes lays the arguments out as {offsets}, NumPy as {kernel.offsets}")
    return arguments


def joined_structure(kernel: KernelSignature, capacity: int, values: Sequence[bytes]) -> ctypes.Structure:
    """The one parameter of a kernel that joins launches: the argument structs of up to ``capacity`` of them."""
    arguments = type(structure(kernel))
    fields = [("of", arguments * capacity)]
    joined: Any = type(f"{kernel.name}_Launches", (ctypes.Structure,), {"_fields_": fields})()
    for k, own in enumerate(values):
        joined.of[k] = arguments.from_buffer_copy(own)
    return joined  # type: ignore[no-any-return]


def parameter_spans(arguments: ctypes.Structure) -> list[tuple[int, int]]:
    """Offset and size in bytes of each field. Each is a parameter of the CUDA kernel, at the same offset."""
    fields = [getattr(type(arguments), name) for name, *_ in type(arguments)._fields_]
    return [(field.offset, field.size) for field in fields]


def symbol(kernel: str) -> str:
    """The name of a kernel in a binary, defined by KERNEL in kernel.cuh."""
    return f"kernel_{kernel}"
