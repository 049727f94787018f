"""Runs a compiler as a child process with a time limit, and turns its failures into errors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence

from gpu_vecenv.errors import CompilerError, KernelCompileError

TIMEOUT_SECONDS = 900.0  # a game takes seconds; recursive templates may never end
MAX_LOG_CHARACTERS = 1_000_000
# Printed by the compiler's driver when the system killed the process that compiles.
KILLED = re.compile(r"\b[Kk]illed\b.*terminated program|unable to execute command: Killed")


def run_compiler(command: Sequence[str], name: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Run a compiler and wait for it.

    Args:
        command: Program and arguments.
        name: Its name in KernelCompileError.
        seconds: Time limit, after which it is killed.

    Raises:
        KernelCompileError: It rejected the source; ``log`` is its output.
        CompilerError: It could not be run, was killed, or exceeded the time limit.
    """
    program = command[0]
    try:
        # A process group of its own, since the program starts others, which must be killed with it.
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"{program} could not be run: {error}") from error
    try:
        _, output = running.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(running.pid, signal.SIGKILL)
            else:  # Windows has no process groups of this kind
                running.kill()
        running.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CompilerError(
            f"{program} was still compiling after {seconds:g} s and was stopped; games take seconds. Look for a very "
            "long unrolled loop, or a table that is computed at compile time"
        ) from error
    log = output[:MAX_LOG_CHARACTERS].strip()
    if running.returncode < 0 or KILLED.search(log):
        by = signal.Signals(-running.returncode).name if running.returncode < 0 else "the system"
        raise CompilerError(
            f"{program} was ended by {by} while it compiled, usually because memory ran out. "
            f"Its output: {log or 'none'}"
        )
    if running.returncode > 0:
        raise KernelCompileError(name, log)
