"""Finds compilers, torch and the NVIDIA driver.

Imports only the standard library: ``cli/install.py`` and ``cli/doctor.py`` use it before any installation.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

WHEELS = "https://download.pytorch.org/whl/"
HOST_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Torch:
    """The installed torch. `problem` says why it cannot use a GPU; it is empty when it can."""

    version: str = ""
    cuda: str = ""  # empty: a CPU build
    problem: str = ""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver as reported by nvidia-smi; `cuda` is the newest CUDA version it supports."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    problem: str = ""


def numbers(version: str) -> tuple[int, ...]:
    """'12.8' as (12, 8), to compare versions; suffixes are dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def output_of(command: Sequence[str]) -> tuple[bool, str]:
    """Whether a command succeeded, and its output; at most 30 s."""
    try:
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",  # a compiler writes in the encoding of its own locale
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    return result.returncode == 0, result.stdout.strip()


def find_torch() -> Torch:
    """The installed torch. Launches a kernel, since a visible GPU may be unsupported."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Torch(problem=one_line(error))
    version, cuda = str(torch.__version__), torch.version.cuda
    if cuda is None:
        return Torch(version, problem="this torch is a CPU build")
    try:
        torch.ones(1, device="cuda").add(1).item()
    except Exception as error:
        return Torch(version, cuda, one_line(error))
    return Torch(version, cuda)


def find_driver() -> Driver:
    """The NVIDIA driver and its GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(problem="nvidia-smi not found")
    query = "--query-gpu=name,driver_version,compute_cap,memory.total"
    ok, table = output_of([program, query, "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    if not ok or not rows or any(len(row) != 4 for row in rows):
        return Driver(problem="nvidia-smi: " + one_line(table or "no GPU listed"))
    match = re.search(r"CUDA[\w ]* Version: *([\d.]+)", output_of([program])[1])
    gpus = tuple(f"{name}, compute capability {cap}, {size}" for name, _, cap, size in rows)
    return Driver(rows[0][1], match[1] if match else "", gpus)


def find_nvcc() -> str | None:
    """The path of nvcc: on PATH, else in the usual folders of a CUDA toolkit."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    candidates = (shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes if home)
    return shutil.which("nvcc") or next(filter(None, candidates), None)


@cache
def _runs(program: str, changed: int) -> bool:
    return bool(output_of([program, "--version"])[0])


def find_host_compiler() -> list[str] | None:
    """The C++ compiler, as the beginning of its command line.

    $CXX is returned even if it names no program, so that its use fails visibly instead of selecting another compiler.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in HOST_COMPILERS:
        program = shutil.which(name)
        # The program may be a stub that only offers to install a compiler.
        if program and _runs(program, os.stat(program).st_mtime_ns):
            return [program]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def find_webassembly_compiler() -> list[str] | None:
    """The C++ compiler that makes WebAssembly, that of the package ziglang; None if it is not installed."""
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


def cuda_wheels(driver_cuda: str) -> str | None:
    """The index of torch wheels for a driver that supports `driver_cuda`, None if it is too old.

    Releases of CUDA 12 run on any CUDA 12 driver, hence 12.6 for all drivers older than 12.8.
    """
    for least, tag in (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126")):
        if numbers(driver_cuda) >= least:
            return WHEELS + tag
    return None


def gpu_problem(driver: Driver, torch: Torch) -> str:
    """Why torch cannot use a GPU that is present, and the remedy; empty if there is no problem."""
    if not driver.gpus or not torch.problem:
        return ""
    hidden, index = os.environ.get("CUDA_VISIBLE_DEVICES"), cuda_wheels(driver.cuda)
    if torch.cuda and hidden is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is set to {hidden!r}; unset it if it hides the GPU"
    elif index is None:
        remedy = "update the NVIDIA driver: https://www.nvidia.com/drivers"
    else:
        remedy = pip("--force-reinstall", "torch", "--index-url", index)
        if numbers(torch.cuda)[:1] > numbers(driver.cuda)[:1]:
            remedy = f"update the NVIDIA driver, or {remedy}"
    return (
        f"torch cannot use the GPU: {torch.problem}\n"
        f"  GPU     {driver.gpus[0]}\n"
        f"  driver  {describe_driver(driver)}\n"
        f"  torch   {torch.version or 'missing'}, {describe_build(torch)}\n"
        f"  remedy  {remedy}"
    )


def describe_driver(driver: Driver) -> str:
    """The driver's version, and the newest CUDA version that it supports."""
    return f"{driver.version}, supports CUDA up to {driver.cuda or 'an unknown version'}"


def describe_build(torch: Torch) -> str:
    """The CUDA version that torch was built for."""
    return f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"


def pip(*arguments: str) -> str:
    """The command that installs packages into this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def one_line(message: object) -> str:
    """The first line of a string or of an error's message."""
    return next(iter(str(message).splitlines()), type(message).__name__)
