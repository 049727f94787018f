"""``gpu-vecenv doctor``: what this machine has (Python, torch, GPUs, compilers, drivers), and what to do about gaps.

Also runs by its path, before any installation: only the standard library is imported at the top.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from gpu_vecenv.compile import toolchain
else:  # run by its path: importing the package needs torch, which may be missing
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "compile")
    import toolchain

    del sys.path[0]  # modules of that folder must hide no others

NO_TORCH, NO_DRIVER = toolchain.Torch(), toolchain.Driver()


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for: what was found, or else the reason why not."""

    found: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything that was found."""

    torch: toolchain.Torch = NO_TORCH
    driver: toolchain.Driver = NO_DRIVER
    compiler: Finding = Finding()
    nvcc: Finding = Finding()
    nvrtc: Finding = Finding()
    pycuda: Finding = Finding()
    cuda_core: Finding = Finding()
    launches: dict[str, str] = field(default_factory=dict)  # CUDA driver -> "works" or the reason


def drivers_that_work() -> dict[str, str]:
    """Each CUDA driver with "works" or the reason why not, found by launching a kernel with it."""
    try:
        from gpu_vecenv.compile.backends import working_drivers

        return working_drivers()
    except Exception as error:
        return {"CUDA drivers": f"not tried: {toolchain.one_line(error)}"}


def examine() -> Machine:
    """Look at everything once."""
    torch = toolchain.find_torch()
    return Machine(
        torch=torch,
        driver=toolchain.find_driver(),
        compiler=_examine_compiler(),
        nvcc=_examine_nvcc(),
        nvrtc=_examine_nvrtc(),
        pycuda=_examine_module("pycuda.driver", "pycuda"),
        cuda_core=_examine_module("cuda.core", "cuda.core"),
        launches={} if torch.problem else drivers_that_work(),
    )


def _examine_compiler() -> Finding:
    command = toolchain.find_host_compiler()
    if command is None:
        return Finding(problem=f"none of $CXX, {', '.join(toolchain.HOST_COMPILERS)}, ziglang")
    words = shlex.join(command)
    ok, text = toolchain.output_of([*command, "--version"])
    if not ok:
        origin = "$CXX is set to " if os.environ.get("CXX") else ""
        return Finding(problem=f"{origin}{words}, which does not run: {toolchain.one_line(text)}")
    return Finding(f"{words} ({toolchain.one_line(text)})")


def _examine_nvcc() -> Finding:
    path = toolchain.find_nvcc()
    if path is None:
        return Finding(problem="not found")
    match = re.search(r"release ([\d.]+)", toolchain.output_of([path, "--version"])[1])
    return Finding(f"{path} (CUDA {match[1] if match else 'version unknown'})")


def _examine_nvrtc() -> Finding:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        return Finding(problem=toolchain.one_line(error))
    return Finding(f"CUDA {major}.{minor}")


def _examine_module(module: str, package: str) -> Finding:
    try:
        importlib.import_module(module)
        found = importlib.import_module(package)
    except Exception as error:
        return Finding(problem=toolchain.one_line(error))
    return Finding(str(getattr(found, "VERSION_TEXT", None) or getattr(found, "__version__", "found")))


def advice(machine: Machine) -> list[str]:
    """What to do, most important first."""
    torch, driver = machine.torch, machine.driver
    todo = []
    if not torch.version:
        index = (toolchain.cuda_wheels(driver.cuda) if driver.gpus else None) or toolchain.WHEELS + "cpu"
        todo.append(f"Install torch: {toolchain.pip('torch', '--index-url', index)}")
    elif problem := toolchain.gpu_problem(driver, torch):
        todo.append(problem)
    elif driver.problem and torch.problem:
        todo.append(f"No NVIDIA GPU ({driver.problem}): everything runs on the CPU.")
    if not torch.problem:
        core = toolchain.pip(f"cuda-core[cu{torch.cuda.split('.')[0]}]")
        if not machine.nvrtc.found and not machine.nvcc.found:
            todo.append(f"Install a CUDA compiler (NVRTC): {core}")
        if not machine.pycuda.found and not machine.cuda_core.found:
            todo.append(f"Install a CUDA driver library: {core}")
        elif machine.launches and "works" not in machine.launches.values():
            todo.append("No CUDA driver was seen to launch a kernel: the reasons stand above.")
    if machine.compiler.problem.startswith("$CXX"):
        todo.append("Set CXX to a C++ compiler, or unset it to let one be found.")
    elif not machine.compiler.found:
        todo.append(f"Install a C++ compiler, for runs on the CPU: {toolchain.pip('ziglang')}")
    return todo


def report(machine: Machine) -> str:
    """The findings as a table, then what to do."""
    torch, driver = machine.torch, machine.driver
    rows = [
        ("Python", f"{sys.version.split()[0]} ({sys.executable})"),
        ("torch", f"{torch.version}, {toolchain.torch_build(torch)}" if torch.version else torch.problem),
        ("GPU driver", driver.problem or toolchain.driver_text(driver)),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 when training cannot run here, or not on the GPU that is there."""
    argparse.ArgumentParser(prog="gpu-vecenv doctor", description=main.__doc__).parse_args(arguments)
    machine = examine()
    print(report(machine))
    if toolchain.gpu_problem(machine.driver, machine.torch) or not machine.torch.version:
        return 1
    return 1 if machine.torch.problem and not machine.compiler.found else 0


if __name__ == "__main__":
    sys.exit(main())
