"""Compiles CUDA source to a cubin: NVRTC through cuda.bindings (wheels; no toolkit, no GPU needed), else nvcc."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from gpu_vecenv.compile.backends.compiler_process import run_compiler
from gpu_vecenv.compile.toolchain import find_nvcc
from gpu_vecenv.errors import CompilerError, KernelCompileError

# No contraction to FMA, IEEE division and square root, denormals kept: the same rounding as on the host.
FLAGS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
# Games with host = False may include CUDA's own headers.
SYSTEM_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<", re.MULTILINE)
NO_HEADERS = '; CUDA headers were not found: pip install "cuda-toolkit[cudart,cccl]==13.*" (or 12.*)'


@cache
def compiler() -> str:
    """Name and version of the compiler: NVRTC if it loads, else nvcc.

    Raises:
        CompilerError: Neither is available.
    """
    try:
        nvrtc = _nvrtc()
        return "nvrtc {}.{}".format(*_call(nvrtc.nvrtcVersion()))
    except Exception as error:  # the wheel is missing, or its library does not load
        missing = error
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerError(
            f"no CUDA compiler: NVRTC is not usable ({type(missing).__name__}: {missing}) and nvcc is not on PATH; "
            'install the extra that matches torch.version.cuda: pip install "gpu_vecenv[cuda13]" (or cuda12)'
        )
    return "nvcc " + subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout


def parameter_bytes(version: str) -> int:
    """Bytes of a kernel's parameters that a ``compiler()`` and each driver for it take."""
    major = re.search(r"(?:nvrtc |release )(\d+)", version)
    return 32764 if major and int(major[1]) >= 13 else 4096


def compile_cubin(text: str, architecture: str) -> bytes:
    """The cubin of ``text`` for an architecture such as "sm_90".

    Raises:
        KernelCompileError: The source does not compile; ``log`` is the compiler's output.
        CompilerError: No compiler is usable.
    """
    return _by_nvrtc(text, architecture) if compiler().startswith("nvrtc") else _by_nvcc(text, architecture)


@cache
def header_folders() -> tuple[str, ...]:
    """Folders of <cooperative_groups.h>, <cuda/std/…> and the like, in wheels or a toolkit; empty if not found."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # older versions of cuda.bindings
        return ()
    found = (find_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    return tuple(folder for folder in found if folder is not None)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _call(result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise CompilerError(f"NVRTC failed: {status!r}")
    return tuple(values)


def _by_nvrtc(text: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    folders = header_folders() if SYSTEM_HEADER.search(text) else ()
    (program,) = _call(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        headers = [f"--include-path={folder}" for folder in folders]
        options = [option.encode() for option in (*FLAGS, *headers, f"--gpu-architecture={architecture}")]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status) != 0:
            (size,) = _call(nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _call(nvrtc.nvrtcGetProgramLog(program, log))
            name = f"{compiler()} for {architecture}"
            if SYSTEM_HEADER.search(text):
                name += f"; headers are in {' and '.join(folders)}" if folders else NO_HEADERS
            raise KernelCompileError(name, log.rstrip(b"\0 \n").decode(errors="replace"))
        (size,) = _call(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        _call(nvrtc.nvrtcGetCUBIN(program, cubin))  # writes into the bytes object
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _by_nvcc(text: str, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(text, encoding="utf-8")
        command = [find_nvcc() or "nvcc", "-cubin", f"-arch={architecture}", *FLAGS, "-o", str(target), str(source)]
        run_compiler(command, f"nvcc for {architecture}")
        return target.read_bytes()
