"""Several launches of one kernel as one: each is a layer of the grid in z, with arguments of its own.

The source is compiled a second time, with another definition of KERNEL (kernel.cuh): a kernel's one parameter is an
array of argument structs. Each layer computes what its launch alone would, bit for bit: no kernel depends on
``blockIdx.z`` or ``gridDim.z``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from gpu_vecenv.compile.backends import Backend, LaunchShape, Module, joined_structure
from gpu_vecenv.declare.kernels import KernelSignature

MAX_JOINED = 16  # launches in one; parameters take memory and time even where they are not used


def joined_source(text: str, parameter_bytes: int) -> str:
    """A source with other entry points of its kernels, for joined launches."""
    return f"#define JOINED_LAUNCHES {MAX_JOINED}\n#define PARAMETER_BYTES {parameter_bytes}\n{text}"


class JoinedKernels:
    """The kernels of one source, for joined launches. Compiled when they are first used.

    Args:
        backend: Of the device.
        text: The source.
        load: Compiles and loads a source.
    """

    def __init__(self, backend: Backend, text: str, load: Callable[[str], Module]) -> None:
        self._backend, self._text, self._load = backend, text, load

    @property
    def kind(self) -> Hashable:
        """Equal for equal kernels on the same driver."""
        return self._backend.driver_name, self._text

    @cached_property
    def _module(self) -> Module:
        return self._load(joined_source(self._text, self._parameter_bytes))

    @property
    def _parameter_bytes(self) -> int:
        assert self._backend.parameter_bytes is not None
        return self._backend.parameter_bytes

    def launcher(self, kernel: KernelSignature, shape: LaunchShape, values: Sequence[bytes]) -> Callable[[], None]:
        """A function that launches the kernel once for each argument struct in ``values``, joined as far as they fit.

        Args:
            kernel: Its signature.
            shape: Of each launch.
            values: The bytes of the argument structs.
        """
        capacity = min(MAX_JOINED, self._parameter_bytes // kernel.struct.itemsize)
        count = -(-len(values) // capacity)
        ends = [len(values) * k // count for k in range(count + 1)]
        launchers = []
        for first, end in pairwise(ends):
            arguments = joined_structure(kernel, capacity, values[first:end])
            joined = dataclasses.replace(shape, launches=end - first)
            launchers.append(self._module.launcher(kernel.name, arguments, joined))

        def launch() -> None:
            for own in launchers:
                own()

        return launch


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch that was recorded, with the values of its arguments at that time."""

    kernels: JoinedKernels
    kernel: KernelSignature
    shape: LaunchShape
    values: bytes

    @property
    def kind(self) -> Hashable:
        """The kernel, its blocks and their shared memory."""
        shape = self.shape
        return self.kernels.kind, self.kernel, shape.grid, shape.threads_per_block, shape.shared_bytes

    def join(self, others: Sequence[RecordedLaunch]) -> Callable[[], None]:
        """A function that launches this and the others as one."""
        return self.kernels.launcher(self.kernel, self.shape, [self.values, *(other.values for other in others)])
