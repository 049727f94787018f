"""Compilers that are programs of their own: run, limited in time, with what becomes of them told apart."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence

from gpu_vecenv.errors import CompilerError, KernelCompileError

TIMEOUT_SECONDS = 900.0  # a game takes seconds; a text that takes longer never ends, as by recursive templates
MAX_LOG_CHARACTERS = 1_000_000  # of a compiler's words; nobody reads more
# A compiler's driver tells so, in an exit code of its own, that the system killed what it had started.
KILLED = re.compile(r"\b[Kk]illed\b.*terminated program|unable to execute command: Killed")


def run_compiler(command: Sequence[str], name: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Run a compiler to its end.

    Args:
        command: Program and arguments.
        name: What KernelCompileError calls it.
        seconds: After these it is killed.

    Raises:
        KernelCompileError: It refused the text; ``log`` has its words.
        CompilerError: It could not be run, was killed, or took too long.
    """
    program = command[0]
    try:
        # A group of its own: what does the work is started by the program.
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
        _, said = running.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CompilerError(
            f"{program} was still compiling after {seconds:g} s and has been stopped; games take seconds: does the "
            "text unroll a very long loop, or build a table while it is compiled?"
        ) from error
    log = said[:MAX_LOG_CHARACTERS].strip()
    if running.returncode < 0 or KILLED.search(log):
        by = signal.Signals(-running.returncode).name if running.returncode < 0 else "the system"
        raise CompilerError(
            f"{program} was ended by {by} while it compiled; if nobody stopped it, memory was short. "
            f"It said: {log or 'nothing'}"
        )
    if running.returncode > 0:
        raise KernelCompileError(name, log)
