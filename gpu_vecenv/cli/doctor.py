"""``gpu-vecenv doctor``: report torch, GPUs, compilers and CUDA drivers, and recommend what to install.

The file also runs as a script before any installation, so that its imports are limited to the standard library.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from gpu_vecenv.compile import toolchain
    from gpu_vecenv.escapes import printable, printable_lines
else:  # run as a script: importing the package needs torch, which may be missing
    PACKAGE = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(PACKAGE / "compile"), str(PACKAGE)]
    import toolchain
    from escapes import printable, printable_lines

    del sys.path[:2]  # modules of these folders must not hide others

NO_TORCH, NO_DRIVER = toolchain.Torch(), toolchain.Driver()


@dataclass(frozen=True)
class Finding:
    """What was found, or the reason why nothing was."""

    found: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings."""

    torch: toolchain.Torch = NO_TORCH
    driver: toolchain.Driver = NO_DRIVER
    compiler: Finding = Finding()
    nvcc: Finding = Finding()
    nvrtc: Finding = Finding()
    pycuda: Finding = Finding()
    cuda_core: Finding = Finding()
    ziglang: Finding = Finding()
    launches: dict[str, str] = field(default_factory=dict)  # CUDA driver -> "works" or the reason


def drivers_that_work() -> dict[str, str]:
    """Driver name -> "works", or why launching a kernel with it failed."""
    try:
        from gpu_vecenv.compile.backends.select import working_drivers

        return working_drivers()
    except Exception as error:
        return {"CUDA drivers": f"not tested: {toolchain.one_line(error)}"}


def examine() -> Diagnosis:
    """Collect all findings."""
    torch = toolchain.find_torch()
    return Diagnosis(
        torch=torch,
        driver=toolchain.find_driver(),
        compiler=_examine_compiler(),
        nvcc=_examine_nvcc(),
        nvrtc=_examine_nvrtc(),
        pycuda=_examine_module("pycuda.driver", "pycuda"),
        cuda_core=_examine_module("cuda.core", "cuda.core"),
        ziglang=_examine_ziglang(),
        launches={} if torch.problem else drivers_that_work(),
    )


def _examine_compiler() -> Finding:
    try:
        command = toolchain.find_host_compiler()
    except ValueError as error:  # shlex: a quotation mark is missing
        return Finding(problem=f"$CXX is {os.environ['CXX']!r}: {error}")
    if command is None:
        return Finding(problem=f"none of $CXX, {', '.join(toolchain.HOST_COMPILERS)}, ziglang")
    shell_command = shlex.join(command)
    ok, output = toolchain.output_of([*command, "--version"])
    if not ok:
        origin = "$CXX is set to " if os.environ.get("CXX") else ""
        return Finding(problem=f"{origin}{shell_command}, which does not run: {toolchain.one_line(output)}")
    return Finding(f"{shell_command} ({toolchain.one_line(output)})")


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


def _examine_ziglang() -> Finding:
    """The compiler of pages, which is also one for the CPU."""
    command = toolchain.find_webassembly_compiler()
    if command is None:
        return Finding(problem="gpu-vecenv web and train --watch need it")
    ok, output = toolchain.output_of([*command[:-1], "version"])
    return Finding(toolchain.one_line(output)) if ok else Finding(problem=toolchain.one_line(output))


def _examine_module(module: str, package: str) -> Finding:
    try:
        importlib.import_module(module)
        found = importlib.import_module(package)
    except Exception as error:
        return Finding(problem=toolchain.one_line(error))
    return Finding(str(getattr(found, "VERSION_TEXT", None) or getattr(found, "__version__", "found")))


def recommendations(diagnosis: Diagnosis) -> list[str]:
    """What to install or change, most important first."""
    torch, driver = diagnosis.torch, diagnosis.driver
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
        if not diagnosis.nvrtc.found and not diagnosis.nvcc.found:
            todo.append(f"Install a CUDA compiler (NVRTC): {core}")
        if not diagnosis.pycuda.found and not diagnosis.cuda_core.found:
            todo.append(f"Install a CUDA driver library: {core}")
        elif diagnosis.launches and "works" not in diagnosis.launches.values():
            todo.append("No CUDA driver could launch a kernel; the reasons are in the table.")
    if diagnosis.compiler.problem.startswith("$CXX"):
        todo.append("Set CXX to a C++ compiler, or unset it to use the first one on PATH.")
    elif not diagnosis.compiler.found:
        todo.append(f"Install a C++ compiler, for runs on the CPU and for pages: {toolchain.pip('ziglang')}")
    if not diagnosis.ziglang.found and (diagnosis.compiler.found or diagnosis.compiler.problem.startswith("$CXX")):
        todo.append(f"Install the compiler of pages, for gpu-vecenv web and train --watch: {toolchain.pip('ziglang')}")
    return todo


def report(diagnosis: Diagnosis) -> str:
    """The findings as a table, followed by recommendations."""
    torch, driver = diagnosis.torch, diagnosis.driver
    rows = [
        ("Python", f"{sys.version.split()[0]} ({sys.executable})"),
        ("torch", f"{torch.version}, {toolchain.describe_build(torch)}" if torch.version else torch.problem),
        ("GPU driver", driver.problem or toolchain.describe_driver(driver)),
        *((f"GPU {number}", gpu) for number, gpu in enumerate(driver.gpus)),
        ("GPU in torch", torch.problem or "works"),
    ]
    parts = {
        "C++ compiler": diagnosis.compiler,
        "nvcc": diagnosis.nvcc,
        "NVRTC": diagnosis.nvrtc,
        "PyCUDA": diagnosis.pycuda,
        "cuda.core": diagnosis.cuda_core,
        "ziglang": diagnosis.ziglang,
    }
    rows += [(title, part.found or f"missing: {part.problem}") for title, part in parts.items()]
    rows += [(f"launch: {name}", result) for name, result in diagnosis.launches.items()]
    width = max(len(title) for title, _ in rows)
    todo = recommendations(diagnosis) or ["Nothing: everything required was found."]
    table = [printable(f"{title:{width}}  {value}") for title, value in rows]
    return "\n".join([*table, "", "Recommendations", *(printable_lines(f"- {line}") for line in todo)])


@dataclass(frozen=True)
class Doctor:
    """Report torch, GPUs, compilers, drivers; say what to install."""

    def __call__(self) -> int:
        """Print the report; 1 if training cannot run, or cannot use the GPU that is present."""
        diagnosis = examine()
        print(report(diagnosis))
        if toolchain.gpu_problem(diagnosis.driver, diagnosis.torch) or not diagnosis.torch.version:
            return 1
        return 1 if diagnosis.torch.problem and not diagnosis.compiler.found else 0


if __name__ == "__main__":
    sys.exit(Doctor()())
