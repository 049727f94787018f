"""The WebAssembly compiler: the host's source as a module for browsers, which the page instantiates."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_vecenv.compile.backends.compiler_process import run_compiler
from gpu_vecenv.compile.backends.host import compiler_version
from gpu_vecenv.compile.toolchain import find_webassembly_compiler, pip
from gpu_vecenv.errors import CompilerError

STACK_BYTES = 1 << 20
# The host's rules for floats: no contraction to FMA. A reactor is a library: it has no main. Without a C++ library, and
# with memory alone from C's, the module imports nothing.
FLAGS = (
    "-target wasm32-wasi -mexec-model=reactor -std=c++17 -O2 -msimd128 -mbulk-memory -ffp-contract=off "
    "-fno-math-errno -fno-exceptions -fno-rtti -fvisibility=hidden -nostdlib++ -Wl,--strip-all -Wl,--export-dynamic "
    f"-Wl,--export=__heap_base -Wl,-z,stack-size={STACK_BYTES}"
).split()


class WebAssemblyCompiler:
    """Compiles device code to a WebAssembly module with 32-bit addresses and SIMD instructions.

    The module exports its memory, ``kernel_<name>`` of each kernel with the parameters of the host's (worker, workers,
    address of the arguments) and ``__heap_base``, from where on memory is free.

    Raises:
        CompilerError: The package ziglang is not installed.
    """

    suffix = ".wasm"

    def __init__(self) -> None:
        command = find_webassembly_compiler()
        if command is None:
            raise CompilerError(
                "no compiler for WebAssembly: the Python package ziglang is not installed; "
                f"install it: {pip('gpu-vecenv[compiler]')}"
            )
        self.command = [*command, *FLAGS]
        self._version = compiler_version(*command)

    @property
    def identity(self) -> str:
        """Everything except the source that the module depends on."""
        return "\n".join(["WebAssembly", *self.command[1:], self._version])

    def compile(self, text: str, target: Path) -> None:
        """Write the module of the source ``text`` to ``target``, or raise KernelCompileError or CompilerError."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.cpp")
            source.write_text(text, encoding="utf-8")
            run_compiler([*self.command, "-o", str(target), str(source)], " ".join(self.command))
