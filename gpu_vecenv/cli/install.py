"""Install this checkout into the running Python: the torch that fits the machine, then the project.

`make` runs it by its path before anything is there, so only the standard library is imported.
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
else:  # run by its path: importing the package needs torch, which may be missing
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "compile")
    import toolchain

    del sys.path[0]  # modules of that folder must hide no others

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip")
TORCH = "torch>=2.6"  # as in pyproject.toml
CPU_WHEELS = toolchain.WHEELS + "cpu"


@dataclass(frozen=True)
class Step:
    """One `pip install`: its arguments, why it is done, and what it changes in the environment."""

    why: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def torch_steps(installed: str, gpu: bool, pinned: bool, platform: str, driver_cuda: str = "") -> list[Step]:
    """Ways to get torch, best first; one that succeeds is enough. All obey pip's constraints.

    Without a GPU, PyPI's Linux wheels would bring gigabytes of CUDA: they come last, and only for a
    constraint that names torch and that no CPU wheel meets.
    """
    if toolchain.numbers(installed) >= toolchain.numbers(TORCH.partition(">=")[2]):
        return []
    if gpu:
        plain = Step("torch with CUDA, since a GPU is there; large, takes minutes", (TORCH,))
        older = toolchain.cuda_wheels(driver_cuda) if toolchain.numbers(driver_cuda) < (13, 0) else None
        if pinned or older is None:  # PyPI's own wheels are built for CUDA 13
            return [plain]
        index = {"PIP_INDEX_URL": older, "PIP_EXTRA_INDEX_URL": older}
        return [Step(f"torch for the driver's CUDA {driver_cuda}; large, takes minutes", (TORCH,), index)]
    if platform == "darwin":
        return [Step("torch (its macOS wheels are CPU builds)", (TORCH,))]
    # Through the environment, because --index-url leaves configured extra indexes in force, and a
    # newer CUDA build there would win. Dependencies come with the project.
    cpu_only = {"PIP_INDEX_URL": CPU_WHEELS, "PIP_EXTRA_INDEX_URL": CPU_WHEELS}
    patience = ("--retries", "1", "--timeout", "30")
    steps = [
        Step("torch from pip's local wheels, if there is one", ("--no-index", "--no-deps", TORCH)),
        Step("torch's CPU wheel, since there is no GPU", ("--no-deps", *patience, TORCH), cpu_only),
    ]
    if pinned:
        steps.append(Step("torch as pip's constraint pins it", (TORCH,)))
    return steps


def project_step(extras: Iterable[str], torch_cuda: str, compiler: bool) -> Step:
    """The editable project, with the CUDA extra that fits torch and a compiler if there is none."""
    chosen, reasons = list(extras), []
    major = torch_cuda.partition(".")[0]
    if major in ("12", "13"):
        chosen.append(f"cuda{major}")
        reasons.append(f"cuda{major} to match torch")
    if not compiler:
        chosen.append("compiler")
        reasons.append("compiler because no C++ compiler was found")
    why = f"gpu-vecenv[{','.join(chosen)}]" + (f" ({'; '.join(reasons)})" if reasons else "")
    return Step(why, ("--editable", f"{ROOT}[{','.join(chosen)}]"))


def optional_steps(extras: Iterable[str], gpu: bool, nvcc: str | None) -> list[Step]:
    """What is tried but may fail. PyCUDA is compiled by pip and needs a CUDA toolkit."""
    steps = [Step(f"{extra} (optional)", (f"gpu-vecenv[{extra}]",)) for extra in extras]
    if gpu and nvcc:
        # PyCUDA derives the toolkit's folder from the first nvcc on PATH, which may be a link.
        path = os.path.dirname(os.path.realpath(nvcc)) + os.pathsep + os.environ.get("PATH", "")
        why = "pycuda (optional), since nvcc was found; compiles for minutes"
        steps.append(Step(why, ("gpu-vecenv[pycuda]",), {"PATH": path}))
    return steps


def pins_torch(constraints: Iterable[str]) -> bool:
    """Whether one of these texts of constraint files names torch."""
    entry = re.compile(r"^\s*torch\s*([<>=!~@;\[]|$)", re.MULTILINE)
    return any(entry.search(text) for text in constraints)


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
    """Do one step; return pip's last words if it failed, and nothing if it did not."""
    print(f"Installing {step.why}", flush=True)
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", *step.arguments]
    result = subprocess.run(
        command,
        env=os.environ | step.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "" if result.returncode == 0 else result.stdout.strip() or "pip failed without a word"


def run_first(steps: Sequence[Step], pip: Sequence[str] = PIP) -> str:
    """Do the first step that succeeds; return the last one's words if none does."""
    words = ""
    for step in steps:
        words = run(step, pip)
        if not words:
            break
    return words


def main(arguments: Sequence[str] | None = None, pip: Sequence[str] = PIP) -> int:
    """Install torch and this checkout into the running Python."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--extras", default="", help="extras to install, by comma")
    parser.add_argument("--try", dest="tried", default="", help="extras that may fail, by comma")
    options = parser.parse_args(arguments)

    driver = toolchain.find_driver()
    cpu_asked = os.environ.get("GPU_VECENV_DEVICE") == "cpu"
    gpu = bool(driver.gpus) and not cpu_asked
    reason = "GPU_VECENV_DEVICE=cpu" if cpu_asked else driver.problem
    print(f"GPU: {driver.gpus[0]}" if gpu else f"No NVIDIA GPU is used ({reason})")

    failure = run_first(torch_steps(installed_torch(), gpu, torch_is_pinned(pip), sys.platform, driver.cuda), pip)
    if failure:
        index = (toolchain.cuda_wheels(driver.cuda) if gpu else None) or CPU_WHEELS
        print(f"{failure}\n\ntorch could not be installed. Install it by hand, then repeat:")
        print("  " + toolchain.pip(TORCH, "--index-url", index))
        return 1

    torch_cuda = ""
    if gpu:
        importlib.invalidate_caches()
        torch = toolchain.find_torch()
        if problem := toolchain.gpu_problem(driver, torch):
            print(f"\n{problem}\n  or      set GPU_VECENV_DEVICE=cpu to install for the CPU alone")
            return 1
        torch_cuda = torch.cuda

    extras, tried = _names(options.extras), _names(options.tried)
    if "dev" in extras and not gpu:
        tried += ["compiler", "cuda13"]  # the tests compile with clang too, and CUDA text, which needs no GPU
    compiler = toolchain.find_host_compiler()
    if failure := run(project_step(extras, torch_cuda, compiler is not None), pip):
        print(failure)
        return 1
    for step in optional_steps(tried, gpu, toolchain.find_nvcc()):
        if failure := run(step, pip):
            print(f"  not installed, going on without it: {failure.splitlines()[-1]}")
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
