"""Runs a function in a process of its own, where a crash or an endless loop is a sentence and not the end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from gpu_vecenv.escapes import printable

At = Callable[[str], None]  # called before each call that may not end, with its name; "" where any time is fine
MEANINGS = {
    signal.SIGFPE: "an integer division by zero",
    signal.SIGSEGV: "an access to an address that is not the process's own",
    signal.SIGBUS: "an access to an address that is not the process's own",
    signal.SIGILL: "code that cannot be reached, or an instruction that this processor lacks",
    signal.SIGABRT: "memory of the allocator was overwritten",
}


class ProcessEnded(Exception):
    """The process crashed or was stopped at its time limit; the message is a sentence."""


def run_isolated(work: Callable[[At], Any], seconds: float) -> Any:
    """The result of ``work``, computed in a forked process.

    Args:
        work: Takes a function that it calls before each call that may not end. It must use the CPU only.
        seconds: Time limit of each such call.

    Raises:
        ProcessEnded: It crashed, or a call took longer.
        Exception: What ``work`` raises.
    """
    context = multiprocessing.get_context("fork")  # games need not be picklable
    own, others = context.Pipe()
    with tempfile.TemporaryFile() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside torch's threads: the child uses none
        process = context.Process(target=_child, args=(work, others, messages.fileno()), daemon=True)
        process.start()
        others.close()
        call = ""
        try:
            while True:
                if not own.poll(seconds if call else None):
                    raise ProcessEnded(f"{call} did not end within {seconds:g} s: look for a loop that does not end")
                try:
                    kind, value = own.recv()
                except EOFError:
                    process.join()
                    raise ProcessEnded(_sentence(call, process.exitcode or 0, messages)) from None
                if kind == "at":
                    call = value
                elif kind == "raised":
                    raise value
                else:
                    return value
        finally:
            process.kill()
            process.join()
            own.close()


def _sentence(call: str, code: int, messages: Any) -> str:
    if code >= 0:
        return f"{call} ended the process with exit code {code}"
    messages.seek(0)
    said = messages.read().decode(errors="replace").strip().splitlines()
    ended = signal.Signals(-code)
    meaning = f", {MEANINGS[ended]}" if ended in MEANINGS else ""
    return f"{call} crashed with {ended.name}{meaning}" + (f" ({printable(said[0])})" if said else "")


def _child(work: Callable[[At], Any], pipe: Connection, messages: int) -> None:
    torch.set_num_threads(1)  # those of the parent do not exist here
    faulthandler.disable()  # where Python stands at a crash says nothing of the game
    os.dup2(messages, 2)  # what the allocator says before it aborts
    try:
        result = "done", work(lambda call: pipe.send(("at", call)))
    except BaseException as error:
        result = "raised", error
    pipe.send(result)
