"""Install this checkout into the running Python: a suitable torch, then the project.

The Makefile runs the file as a script before any installation, so that its imports are limited to the standard library.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from gpu_vecenv.compile import toolchain
else:  # run as a script: importing the package needs torch, which may be missing
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "compile")
    import toolchain

    del sys.path[0]  # modules of that folder must not hide others

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip")
TORCH = "torch>=2.6"  # as in pyproject.toml
CPU_WHEELS = toolchain.WHEELS + "cpu"


@dataclass(frozen=True)
class Step:
    """One `pip install`: its purpose, its arguments, and changes to environment variables."""

    purpose: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def torch_steps(installed: str, gpu: bool, pinned: bool, platform: str, driver_cuda: str = "") -> list[Step]:
    """Ways to install torch in order of preference, of which one must succeed. All respect pip's constraints.

    Without a GPU, PyPI's Linux wheels, which depend on gigabytes of CUDA libraries, come last, and only if a
    constraint names torch, since a CPU wheel may not satisfy it.
    """
    if toolchain.numbers(installed) >= toolchain.numbers(TORCH.partition(">=")[2]):
        return []
    if gpu:
        plain = Step("torch with CUDA, since a GPU was found; a large download", (TORCH,))
        older = toolchain.cuda_wheels(driver_cuda) if toolchain.numbers(driver_cuda) < (13, 0) else None
        if pinned or older is None:  # PyPI's own wheels are built for CUDA 13
            return [plain]
        index = {"PIP_INDEX_URL": older, "PIP_EXTRA_INDEX_URL": older}
        return [Step(f"torch for CUDA {driver_cuda}, the driver's version; a large download", (TORCH,), index)]
    if platform == "darwin":
        return [Step("torch (its macOS wheels are CPU builds)", (TORCH,))]
    # Environment variables, because --index-url does not disable configured extra indexes, and a newer CUDA build
    # there would be preferred. Dependencies are installed with the project.
    cpu_only = {"PIP_INDEX_URL": CPU_WHEELS, "PIP_EXTRA_INDEX_URL": CPU_WHEELS}
    network_limits = ("--retries", "1", "--timeout", "30")
    steps = [
        Step("torch from wheels on this computer, if pip has some", ("--no-index", "--no-deps", TORCH)),
        Step("torch for the CPU, since no GPU is used", ("--no-deps", *network_limits, TORCH), cpu_only),
    ]
    if pinned:
        steps.append(Step("torch in the version of pip's constraint", (TORCH,)))
    return steps


def project_step(extras: Iterable[str], torch_cuda: str, compiler: bool) -> Step:
    """The editable project, with the CUDA extra for torch's version, and a C++ compiler if none was found."""
    chosen, reasons = list(extras), []
    major = torch_cuda.partition(".")[0]
    if major in ("12", "13"):
        chosen.append(f"cuda{major}")
        reasons.append(f"cuda{major} to match torch")
    if not compiler:
        chosen.append("compiler")
        reasons.append("compiler because no C++ compiler was found")
    purpose = f"gpu-vecenv[{','.join(chosen)}]" + (f" ({'; '.join(reasons)})" if reasons else "")
    return Step(purpose, ("--editable", f"{ROOT}[{','.join(chosen)}]"))


def optional_steps(extras: Iterable[str], gpu: bool, nvcc: str | None) -> list[Step]:
    """Installations that may fail. PyCUDA is compiled by pip and needs a CUDA toolkit."""
    steps = [Step(f"{extra} (optional)", (f"gpu-vecenv[{extra}]",)) for extra in extras]
    if gpu and nvcc:
        # PyCUDA derives the toolkit's folder from the first nvcc on PATH, which may be a link.
        path = os.path.dirname(os.path.realpath(nvcc)) + os.pathsep + os.environ.get("PATH", "")
        purpose = "pycuda (optional), since nvcc was found; compilation takes minutes"
        steps.append(Step(purpose, ("gpu-vecenv[pycuda]",), {"PATH": path}))
    return steps


def locked_steps(lock: str) -> list[Step]:
    """Exactly the packages of a lock file, whose digests pip compares, then the project, of which there is none.

    Nothing is resolved, and only wheels are taken: no code of a package runs while it is installed.
    """
    exact = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", lock)
    project = ("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    return [Step(f"the packages of {lock}", exact), Step("gpu-vecenv", project)]


def pins_torch(constraints: Iterable[str]) -> bool:
    """Whether one of these constraint files' contents names torch."""
    entry = re.compile(r"^\s*torch\s*([<>=!~@;\[]|$)", re.MULTILINE)
    return any(entry.search(content) for content in constraints)


def constraint_files(pip_config: str) -> list[str]:
    """The files named by any `constraint` entry in the output of `pip config list`."""
    values = re.findall(r"^\S*\.constraint=(.*)$", pip_config, re.MULTILINE)
    return [path for value in values for path in str(ast.literal_eval(value)).split()]


def torch_is_pinned(pip: Sequence[str] = PIP) -> bool:
    """Whether pip's configuration, PIP_CONSTRAINT included, constrains torch."""
    files = constraint_files(toolchain.output_of([*pip, "config", "list"])[1])
    return pins_torch(Path(path).read_text() for path in files if Path(path).is_file())


def installed_torch() -> str:
    """The version of the installed torch, without importing it; empty when there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def run(step: Step, pip: Sequence[str] = PIP) -> str:
    """Run one step; return pip's output if it failed, else an empty string."""
    print(f"Installing {step.purpose}", flush=True)
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", *step.arguments]
    result = subprocess.run(
        command,
        env=os.environ | step.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "" if result.returncode == 0 else result.stdout.strip() or "pip failed without output"


def run_first(steps: Sequence[Step], pip: Sequence[str] = PIP) -> str:
    """Run the steps until one succeeds; return the output of the last if none does, else an empty string."""
    failure = ""
    for step in steps:
        failure = run(step, pip)
        if not failure:
            break
    return failure


def run_all(steps: Iterable[Step], pip: Sequence[str] = PIP) -> str:
    """Run the steps until one fails; return its output, else an empty string."""
    return next(filter(None, (run(step, pip) for step in steps)), "")


def unmet_requirements(pip: Sequence[str] = PIP) -> str:
    """What installed packages require and is not installed, one a line; empty if there is nothing."""
    command = [*pip, "check", "--disable-pip-version-check"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if result.returncode == 0 else result.stdout.strip() or "pip check failed without output"


def shadowing_note(clone: Path = ROOT) -> str:
    """Where scripts import the clone's folder in place of the package, if it has the package's name; else empty.

    The folder is a namespace package to Python, and its import of installed packages that can be edited comes later.
    """
    if clone.name != "gpu_vecenv":
        return ""
    return (
        f"Keep your scripts in {clone} or elsewhere, but not in {clone.parent}: there Python imports the clone's folder"
    )


def main(arguments: Sequence[str] | None = None, pip: Sequence[str] = PIP) -> int:
    """Install torch and this checkout into the running Python."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--extras", default="", help="extras to install, comma-separated")
    parser.add_argument("--try", dest="tried", default="", help="extras that may fail, comma-separated")
    parser.add_argument("--lock", help="a requirements file with digests, which replaces the extras; see `make lock`")
    options = parser.parse_args(arguments)
    if options.lock and (options.extras or options.tried):
        parser.error("--lock replaces the extras: leave out --extras and --try")

    driver = toolchain.find_driver()
    cpu_requested = os.environ.get("GPU_VECENV_DEVICE") == "cpu"
    gpu = bool(driver.gpus) and not cpu_requested
    reason = "GPU_VECENV_DEVICE=cpu" if cpu_requested else driver.problem
    print(f"GPU: {driver.gpus[0]}" if gpu else f"No NVIDIA GPU is used ({reason})")

    failure = run_first(torch_steps(installed_torch(), gpu, torch_is_pinned(pip), sys.platform, driver.cuda), pip)
    if failure:
        index = (toolchain.cuda_wheels(driver.cuda) if gpu else None) or CPU_WHEELS
        print(f"{failure}\n\ntorch could not be installed. Install it manually, then repeat:")
        print("  " + toolchain.pip(TORCH, "--index-url", index))
        return 1

    torch_cuda = ""
    if gpu:
        importlib.invalidate_caches()
        torch = toolchain.find_torch()
        if problem := toolchain.gpu_problem(driver, torch):
            print(f"\n{problem}\n  or      set GPU_VECENV_DEVICE=cpu to install for the CPU only")
            return 1
        torch_cuda = torch.cuda

    if options.lock:
        if failure := run_all(locked_steps(options.lock), pip) or unmet_requirements(pip):
            print(failure)
        return int(bool(failure))

    extras, tried = _names(options.extras), _names(options.tried)
    if "dev" in extras and not gpu:
        tried += ["compiler", "cuda13"]  # the tests also compile with clang, and with NVRTC, which needs no GPU
    compiler = toolchain.find_host_compiler()
    if failure := run(project_step(extras, torch_cuda, compiler is not None), pip):
        print(failure)
        return 1
    for step in optional_steps(tried, gpu, toolchain.find_nvcc()):
        if failure := run(step, pip):
            print(f"  not installed, continuing without it: {failure.splitlines()[-1]}")
    if note := shadowing_note():
        print(note)
    return 0


def _names(option: str) -> list[str]:
    return [name for name in option.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
