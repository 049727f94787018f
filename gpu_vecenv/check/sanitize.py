"""A game's host build under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own.

The module is also what that process runs: ``python -m gpu_vecenv.check.sanitize`` with a pickled game as its input.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.compile.codegen import own_source
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CompilerError, ConfigError
from gpu_vecenv.escapes import printable

# float-cast-overflow is in no group: a float too large for an int is another number on a GPU than here.
FLAGS = (
    "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr "
    "-fno-sanitize-recover=all"
)
LIBRARIES = ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so", "libclang_rt.asan.so")
RUNTIME_ERROR = re.compile(r"^(?:.*/)?([^/\s:]+:\d+)(?::\d+)?: runtime error: (.*)$", re.MULTILINE)
MEMORY_ERROR = re.compile(r"ERROR: AddressSanitizer:? (?P<kind>[\w-]+)")
ACCESS = re.compile(r"^(READ|WRITE) of size (\d+)", re.MULTILINE)
FRAME = re.compile(r"^\s*#\d+ .*?([^/\s:]+):(\d+)(?::\d+)?$", re.MULTILINE)
FILE = re.compile(r'^#line \d+ "(.*)"$', re.MULTILINE)
DONE = "done"


def sanitizer_library(command: Sequence[str]) -> Path:
    """The shared AddressSanitizer of a compiler, which a process must load before all else.

    Raises:
        CompilerError: The compiler has none.
    """
    for name in () if "ziglang" in command else LIBRARIES:
        asked = [*command, f"-print-file-name={name}"]
        path = Path(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
        if path.is_absolute() and path.is_file():
            return path.resolve()
    raise CompilerError(
        f"{' '.join(command)} has no shared AddressSanitizer; the Python package ziglang brings none. Install g++, or "
        "clang++ with compiler-rt, and name it in $CXX"
    )


def sanitizer_environment(library: Path) -> dict[str, str]:
    """Environment variables with which a process watches kernels that it compiles.

    The process must delete LD_PRELOAD before it compiles. Leaks are not reported, as Python keeps much to its end.
    """
    return {
        "LD_PRELOAD": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "GPU_VECENV_CXXFLAGS": FLAGS,
        "OMP_NUM_THREADS": "1",
    }


def sanitizer_finding(game: Env, num_envs: int, steps: int, seed: int, call_seconds: float) -> str | None:
    """What the sanitizers find first in a run with random actions, a sentence with file and line; None: nothing.

    An endless loop and a crash are findings too.

    Args:
        game: The configured game; the module of its class can be imported.
        num_envs: Number of environments.
        steps: Number of steps.
        seed: Seed of the run.
        call_seconds: Time limit of each call.

    Raises:
        CompilerError: There is no host compiler with AddressSanitizer.
        ConfigError: The class cannot be imported by another process.
    """
    environment = sanitizer_environment(sanitizer_library(HostBackend().compiler_command))
    try:
        work = pickle.dumps((game, num_envs, steps, seed))
    except (pickle.PicklingError, AttributeError) as error:
        work = b""
        reason = str(error)
    else:
        reason = "it is declared in the script that runs" if type(game).__module__ == "__main__" else ""
    if reason:
        raise ConfigError(
            f"sanitize: another process cannot import {type(game).__name__}: {reason}; put it in a module"
        )
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdin is not None
            process.stdin.write(work)
            process.stdin.close()
            call, in_time = _follow(process, call_seconds)
            if not in_time:
                process.send_signal(signal.SIGABRT)  # the sanitizer says where it is
                _wait(process, call_seconds)
            else:
                process.wait()
        finally:
            process.kill()
            process.wait()
        if in_time and process.returncode == 0:
            return None
        messages.seek(0)
        said = messages.read().decode(errors="replace")
    return _sentence(said, game, call, process.returncode, None if in_time else call_seconds)


def _follow(process: subprocess.Popen[bytes], call_seconds: float) -> tuple[str, bool]:
    """The last call that began, and whether each ended within its time."""
    assert process.stdout is not None
    text = ""
    while True:
        call = text.split("\n")[-2] if "\n" in text else ""
        limit = call_seconds if call and call != DONE else None  # it imports and compiles first
        if not select.select([process.stdout], [], [], limit)[0]:
            return call, False
        more = os.read(process.stdout.fileno(), 4096)
        if not more:
            return call, True
        text += more.decode()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(max(seconds, 10))
    except subprocess.TimeoutExpired:
        process.kill()


def _sentence(said: str, game: Env, call: str, code: int, seconds: float | None) -> str:
    """One sentence on what a process that ended has said."""
    files = set(FILE.findall(own_source(game.layout)))
    lines = [f"{file}:{line}" for file, line in FRAME.findall(said) if file in files]
    where = f"{lines[0]}: " if lines else ""
    if seconds is not None:
        return f"{where}{call} did not end within {seconds:g} s: look for a loop that does not end"
    if error := RUNTIME_ERROR.search(said):
        return f"{error[1]}: {printable(error[2])} (in {call})"
    if error := MEMORY_ERROR.search(said):
        access = ACCESS.search(said)
        size = f", a {access[1].lower()} of {access[2]} bytes" if access else ""
        return f"{where}{error['kind']}{size} (in {call})"
    last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
    return f"{call or 'the run'} ended the process: {printable(last[0])}"


def main() -> None:
    """Play the game that is pickled in the input, and print each call before it begins."""
    del os.environ["LD_PRELOAD"]  # the compiler is no part of what is watched
    game, num_envs, steps, seed = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the process that started this
    env = VecEnv(game, num_envs, "cpu")

    def separate() -> Any:
        # An allocation for each tensor: the sanitizer sees where it ends.
        specs = env.buffers_layout.specs.items()
        return env.step_buffers(**{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs})

    print("reset", flush=True)
    env.reset(seed=seed, out=separate())
    for step in range(1, steps + 1):
        actions = env.sample_actions()
        print(f"step {step}", flush=True)
        env.step(actions, out=separate())
    print(DONE, flush=True)


if __name__ == "__main__":
    main()
