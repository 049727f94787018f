"""Scripts and modules in processes of their own that begin with torch already imported: most of a short one's time."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from support.processes import child_environment

CONTEXT = multiprocessing.get_context("forkserver")
# One server for each process that asks; it never runs a kernel, nor touches a GPU.
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "gpu_vecenv.cli.main", "safetensors.torch", "pytest", "pygame", "matplotlib.pyplot"]
)


class WarmProcess:
    """``python arguments…`` in a folder, for a script, -m and a module or -c and code, with subprocess.Popen's methods.

    It begins within 0.1 s, where Python needs 3 to 5 s of CPU time. Its output and errors are written to two files.
    What the script itself does that is deprecated, ends it.
    """

    def __init__(
        self, folder: Path, *arguments: object, environment: Mapping[str, str], output: Path, errors: Path
    ) -> None:
        with patch.dict(os.environ, child_environment()):  # the server imports the tested package
            forkserver.ensure_running()
        words = tuple(map(str, arguments))
        self._process = CONTEXT.Process(target=_main, args=(folder, words, dict(environment), output, errors))
        self._process.start()
        self.pid: int = self._process.pid
        self.arguments = words

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(
    *arguments: object, folder: Path, variables: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """``support.processes.run_child`` with a WarmProcess, for what does not depend on what is imported already."""
    environment = child_environment(**(variables or {}))
    with tempfile.TemporaryDirectory() as own:
        output, errors = Path(own, "output"), Path(own, "errors")
        process = WarmProcess(folder, *arguments, environment=environment, output=output, errors=errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.arguments, code, output.read_text(), errors.read_text())


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
        elif arguments[0] == "-c":
            sys.path.insert(0, str(folder))
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path.insert(0, str((folder / arguments[0]).parent))
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves without
