"""Compilers that are programs of their own: run, limited in time, with what becomes of them told apart."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence

from gpu_vecenv.errors import CompilerError, KernelCompileError

SECONDS = 900.0  # a game takes seconds; a text that takes longer never ends, as by recursive templates
LOG_LETTERS = 1_000_000  # of a compiler's words; nobody reads more
# A compiler's driver tells so, in an exit code of its own, that the system killed what it had started.
KILLED = re.compile(r"\b[Kk]illed\b.*terminated program|unable to execute command: Killed")


def run_compiler(command: Sequence[str], name: str, seconds: float = SECONDS) -> None:
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
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise CompilerError(
            f"{program} was still compiling after {seconds:g} s and has been stopped; games take seconds: does the "
            "text unroll a very long loop, or build a table while it is compiled?"
        ) from error
    except OSError as error:
        raise CompilerError(f"{program} could not be run: {error}") from error
    log = done.stderr[:LOG_LETTERS].strip()
    if done.returncode < 0 or KILLED.search(log):
        by = signal.Signals(-done.returncode).name if done.returncode < 0 else "the system"
        raise CompilerError(
            f"{program} was ended by {by} while it compiled; if nobody stopped it, memory was short. "
            f"It said: {log or 'nothing'}"
        )
    if done.returncode > 0:
        raise KernelCompileError(name, log)
