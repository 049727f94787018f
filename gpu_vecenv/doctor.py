"""What this machine offers (Python, torch, GPUs, compilers, drivers), and what to do about gaps.

Only the standard library is imported: the file also runs by its path, before any installation.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

WHEELS = "https://download.pytorch.org/whl/"
HOST_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Part:
    """One thing that was looked for: what was found, or else the reason why not."""

    found: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Torch:
    """The installed torch. `problem` says why it cannot use a GPU; it is empty when it can."""

    version: str = ""
    cuda: str = ""  # empty: a CPU build
    problem: str = ""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, as nvidia-smi tells; `cuda` is the newest CUDA version it supports."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything that was found."""

    torch: Torch = Torch()
    driver: Driver = Driver()
    compiler: Part = Part()
    nvcc: Part = Part()
    nvrtc: Part = Part()
    pycuda: Part = Part()
    cuda_core: Part = Part()
    launches: dict[str, str] = field(default_factory=dict)  # CUDA driver -> "works" or the reason


def numbers(version: str) -> tuple[int, ...]:
    """'12.8' as (12, 8), to compare versions; what follows the numbers is dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def output_of(command: Sequence[str]) -> tuple[bool, str]:
    """Whether a short command succeeded, and what it printed."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    return result.returncode == 0, result.stdout.strip()


def find_torch() -> Torch:
    """The installed torch; it launches a kernel, since a visible GPU may be an unsupported one."""
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
    """The path of nvcc: on PATH, else where a CUDA toolkit usually lies."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    beside = (shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes if home)
    return shutil.which("nvcc") or next(filter(None, beside), None)


@cache
def _answers(program: str, changed: int) -> bool:
    return bool(output_of([program, "--version"])[0])


def find_host_compiler() -> list[str] | None:
    """The C++ compiler to call, as the first words of its command line.

    $CXX is taken at its word, even when it names nothing: to use another silently would be worse.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in HOST_COMPILERS:
        program = shutil.which(name)
        # A found name may be a stub that only offers to install a compiler.
        if program and _answers(program, os.stat(program).st_mtime_ns):
            return [program]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def drivers_that_work() -> dict[str, str]:
    """Each CUDA driver with "works" or the reason why not, found by launching a kernel with it."""
    try:
        backends = importlib.import_module("gpu_vecenv.backends")
        return dict(backends.working_drivers())
    except Exception as error:
        return {"CUDA drivers": f"not tried: {one_line(error)}"}


def examine() -> Machine:
    """Look at everything once."""
    torch = find_torch()
    return Machine(
        torch=torch,
        driver=find_driver(),
        compiler=_examine_compiler(),
        nvcc=_examine_nvcc(),
        nvrtc=_examine_nvrtc(),
        pycuda=_examine_module("pycuda.driver", "pycuda"),
        cuda_core=_examine_module("cuda.core", "cuda.core"),
        launches={} if torch.problem else drivers_that_work(),
    )


def _examine_compiler() -> Part:
    command = find_host_compiler()
    if command is None:
        return Part(problem=f"none of $CXX, {', '.join(HOST_COMPILERS)}, ziglang")
    words = shlex.join(command)
    ok, text = output_of([*command, "--version"])
    if not ok:
        origin = "$CXX is set to " if os.environ.get("CXX") else ""
        return Part(problem=f"{origin}{words}, which does not run: {one_line(text)}")
    return Part(f"{words} ({one_line(text)})")


def _examine_nvcc() -> Part:
    path = find_nvcc()
    if path is None:
        return Part(problem="not found")
    match = re.search(r"release ([\d.]+)", output_of([path, "--version"])[1])
    return Part(f"{path} (CUDA {match[1] if match else 'version unknown'})")


def _examine_nvrtc() -> Part:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        return Part(problem=one_line(error))
    return Part(f"CUDA {major}.{minor}")


def _examine_module(module: str, package: str) -> Part:
    try:
        importlib.import_module(module)
        found = importlib.import_module(package)
    except Exception as error:
        return Part(problem=one_line(error))
    return Part(str(getattr(found, "VERSION_TEXT", None) or getattr(found, "__version__", "found")))


def cuda_wheels(driver_cuda: str) -> str | None:
    """The index of torch wheels for a driver that supports `driver_cuda`, None when it is too old.

    Releases within CUDA 12 run on any CUDA 12 driver, hence 12.6 for all that is older than 12.8.
    """
    for least, tag in (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126")):
        if numbers(driver_cuda) >= least:
            return WHEELS + tag
    return None


def gpu_problem(driver: Driver, torch: Torch) -> str:
    """Why torch cannot use the GPU that is there, and the remedy; empty when nothing is wrong."""
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
        f"  driver  {_driver_text(driver)}\n"
        f"  torch   {torch.version or 'missing'}, {_torch_build(torch)}\n"
        f"  remedy  {remedy}"
    )


def advice(machine: Machine) -> list[str]:
    """What to do, most important first."""
    torch, driver = machine.torch, machine.driver
    todo = []
    if not torch.version:
        index = (cuda_wheels(driver.cuda) if driver.gpus else None) or WHEELS + "cpu"
        todo.append(f"Install torch: {pip('torch', '--index-url', index)}")
    elif problem := gpu_problem(driver, torch):
        todo.append(problem)
    elif driver.problem and torch.problem:
        todo.append(f"No NVIDIA GPU ({driver.problem}): everything runs on the CPU.")
    if not torch.problem:
        core = pip(f"cuda-core[cu{torch.cuda.split('.')[0]}]")
        if not machine.nvrtc.found and not machine.nvcc.found:
            todo.append(f"Install a CUDA compiler (NVRTC): {core}")
        if not machine.pycuda.found and not machine.cuda_core.found:
            todo.append(f"Install a CUDA driver library: {core}")
        elif machine.launches and "works" not in machine.launches.values():
            todo.append("No CUDA driver was seen to launch a kernel: the reasons stand above.")
    if machine.compiler.problem.startswith("$CXX"):
        todo.append("Set CXX to a C++ compiler, or unset it to let one be found.")
    elif not machine.compiler.found:
        todo.append(f"Install a C++ compiler, for runs on the CPU: {pip('ziglang')}")
    return todo


def report(machine: Machine) -> str:
    """The findings as a table, then what to do."""
    torch, driver = machine.torch, machine.driver
    rows = [
        ("Python", f"{sys.version.split()[0]} ({sys.executable})"),
        ("torch", f"{torch.version}, {_torch_build(torch)}" if torch.version else torch.problem),
        ("GPU driver", driver.problem or _driver_text(driver)),
        *((f"GPU {number}", gpu) for number, gpu in enumerate(driver.gpus)),
        ("GPU in torch", torch.problem or "works"),
    ]
    parts = {
        "C++ compiler": machine.compiler,
        "nvcc": machine.nvcc,
        "NVRTC": machine.nvrtc,
        "PyCUDA": machine.pycuda,
        "cuda.core": machine.cuda_core,
    }
    rows += [(title, part.found or f"missing: {part.problem}") for title, part in parts.items()]
    rows += [(f"launch: {name}", result) for name, result in machine.launches.items()]
    width = max(len(title) for title, _ in rows)
    todo = advice(machine) or ["Nothing: all that matters is there."]
    table = [f"{title:{width}}  {text}" for title, text in rows]
    return "\n".join([*table, "", "What to do", *(f"- {line}" for line in todo)])


def _driver_text(driver: Driver) -> str:
    return f"{driver.version}, supports CUDA up to {driver.cuda or 'an unknown version'}"


def _torch_build(torch: Torch) -> str:
    return f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"


def pip(*arguments: str) -> str:
    """The command that installs something into this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def one_line(words: object) -> str:
    """The first line of a text or of an error's message."""
    return next(iter(str(words).splitlines()), type(words).__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 when training cannot run here, or not on the GPU that is there."""
    argparse.ArgumentParser(prog="gpu-vecenv doctor", description=main.__doc__).parse_args(arguments)
    machine = examine()
    print(report(machine))
    if gpu_problem(machine.driver, machine.torch) or not machine.torch.version:
        return 1
    return 1 if machine.torch.problem and not machine.compiler.found else 0


if __name__ == "__main__":
    # Run by its path, Python searches this folder first, where modules may hide others by name.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main())
