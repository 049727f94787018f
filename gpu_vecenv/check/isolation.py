"""Runs functions and checks in a process of their own, where a crash or an endless loop does not end this one."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from functools import partial, wraps
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, error_text
from gpu_vecenv.check.records import Finding
from gpu_vecenv.escapes import printable

ContextT = TypeVar("ContextT", bound=CheckContext)
At = Callable[[str], None]  # called before each call that may not end, with its name; "" where any time is fine
CORRECT_CALL = "a correct call"
MAX_CRASHES = 5  # then the check ends
MAX_FINDINGS = 20
PATIENCE = 120.0  # seconds after which a call of a check is taken for an endless loop
MEANINGS = {
    signal.SIGFPE: "an integer division by zero",
    signal.SIGSEGV: "an access to an address that is not the process's own",
    signal.SIGBUS: "an access to an address that is not the process's own",
    signal.SIGILL: "code that cannot be reached, or an instruction that this processor lacks",
    signal.SIGABRT: "an abort, as when the allocator finds its memory overwritten",
}


class ProcessEnded(Exception):
    """The process crashed or was stopped at its time limit; the message is a sentence, ``call`` the call."""

    def __init__(self, call: str, how: str) -> None:
        super().__init__(f"{call} {how}")
        self.call = call


def run_isolated(work: Callable[[At], Any], seconds: float) -> Any:
    """The result of ``work``, computed in a forked process.

    Args:
        work: Takes a function that it calls before each call that may not end. It must use the CPU only.
        seconds: Time limit of each such call.

    Raises:
        ProcessEnded: It crashed, or a call took longer.
        Exception: What ``work`` raises.
    """
    fork = multiprocessing.get_context("fork")  # games and factories need not be picklable
    receiver, sender = fork.Pipe(duplex=False)
    with tempfile.TemporaryFile() as messages:
        process = fork.Process(target=_run, args=(work, sender, messages.fileno()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside torch's threads: the child uses none
            process.start()
        sender.close()
        call = ""
        try:
            while True:
                if not receiver.poll(seconds if call else None):
                    raise ProcessEnded(call, f"did not end within {seconds:g} s: look for a loop that does not end")
                try:
                    kind, value = receiver.recv()
                except EOFError:
                    process.join()
                    raise ProcessEnded(call, _end(process.exitcode or 0, messages)) from None
                if kind == "at":
                    call = value
                    continue
                process.join()  # an environment of the process may have processes of its own to end
                if kind == "raised":
                    raise value
                return value
        finally:
            process.kill()
            process.join()
            receiver.close()


def _end(code: int, messages: Any) -> str:
    if code >= 0:
        return f"ended the process with exit code {code}"
    messages.seek(0)
    said = messages.read().decode(errors="replace").strip().splitlines()
    ended = signal.Signals(-code)
    meaning = f", {MEANINGS[ended]}" if ended in MEANINGS else ""
    return f"crashed with {ended.name}{meaning}" + (f" ({printable(said[0])})" if said else "")


def _run(work: Callable[[At], Any], sender: Connection, messages: int) -> None:
    """In the process."""
    gc.freeze()  # objects of the parent process must not be finalised here
    torch.set_num_threads(1)  # those of the parent do not exist here
    faulthandler.disable()  # where Python stands at a crash says nothing of what crashed
    os.dup2(messages, 2)  # what the allocator says before it aborts
    try:
        result = "done", work(lambda call: sender.send(("at", call)))
    except BaseException as error:
        result = "raised", error
    sender.send(result)


def isolated(rule: Callable[[ContextT], Findings]) -> Callable[[ContextT], Findings]:
    """The rule, run by ``run_isolated``; in this process where forking is not possible, which is noted.

    The rule calls ``context.attempts(name)`` before each call that may end the process: if one does, it is a finding,
    and the rule is run again without it.
    """

    @wraps(rule)
    def run(context: ContextT) -> Findings:
        reason = _why_not_forked()
        if reason:
            context.notes.append(f"not run in a process of its own: {reason}")
            yield from rule(context)
            return
        context.avoided = set()
        try:
            while True:
                try:
                    findings, notes = run_isolated(partial(_findings, rule, context), PATIENCE)
                    break
                except ProcessEnded as ended:
                    correct = ended.call == CORRECT_CALL
                    yield Finding(str(ended), "no end" if correct else "an error")
                    if correct or len(context.avoided) == MAX_CRASHES:
                        return
                    context.avoided.add(ended.call)
        finally:
            context.avoided = set()
        context.notes += notes
        yield from findings

    return run


def _findings(rule: Callable[[ContextT], Findings], context: ContextT, at: At) -> tuple[list[Finding], list[str]]:
    """In the process: findings and notes of the rule."""
    context.report_attempt = at
    at(CORRECT_CALL)
    findings: list[Finding] = []
    try:
        for finding in islice(rule(context), MAX_FINDINGS):
            findings.append(finding)
    except Inapplicable:
        raise
    except Exception as error:  # any error of the environment
        findings.append(Finding(error_text(error), "no error"))
    try:
        context.close()
    except Exception as error:
        findings.append(Finding(f"close: {error_text(error)}", "no error"))
    return findings, context.notes


def _why_not_forked() -> str | None:
    if not hasattr(os, "fork"):
        return "this system cannot fork"
    folder = "/proc/self/fd"
    links = [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    if torch.cuda.is_initialized() or any(_target(link).startswith("/dev/nvidia") for link in links):
        return "CUDA is in use, which does not survive a fork"
    return None


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed by now
        return ""
