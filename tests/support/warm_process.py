"""Scripts and modules in processes of their own that begin with torch already imported: most of a short one's time."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# One server for each process that asks; it never runs a kernel, nor touches a GPU.
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "gpu_vecenv.cli.main", "pygame", "matplotlib.pyplot"])


def run_python(
    folder: Path, *arguments: str, environment: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Like ``python arguments…`` in a folder, for a script's name or -m and a module's; in 0.1 s where that takes 3.

    What the script itself does that is deprecated, ends it.
    """
    outputs = [folder / f".{name}-{os.getpid()}" for name in ("stdout", "stderr")]
    process = CONTEXT.Process(target=_main, args=(folder, arguments, dict(environment), *outputs))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, timeout)
    texts = [path.read_text() for path in outputs]
    for path in outputs:
        path.unlink()
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def _main(folder: Path, arguments: tuple[str, ...], environment: dict[str, str], *outputs: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(outputs, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, str(folder))
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str((folder / arguments[0]).parent))
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves without
