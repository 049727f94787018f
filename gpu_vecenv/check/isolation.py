"""Runs a check in a process of its own: an environment that a wrong call ends takes only that process with it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

import torch

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, error_text
from gpu_vecenv.check.records import Finding

ContextT = TypeVar("ContextT", bound=CheckContext)
MAX_CRASHES = 5  # then the check ends
MAX_FINDINGS = 20
PATIENCE = 120.0  # seconds without a sign of life after which a call is taken for hanging


def isolated(rule: Callable[[ContextT], Findings]) -> Callable[[ContextT], Findings]:
    """The rule, run in a forked process; in this one where forking is not possible, which is noted.

    The factory of an environment need not be picklable. The rule calls ``context.attempts(name)`` before each call that
    may end the process: if one does, it is a finding, and the rule is run again without it.
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
            for _ in range(MAX_CRASHES + 1):
                child = _Child(rule, context)
                if child.crash is None:
                    break
                yield child.crash
                if child.attempt is None or len(context.avoided) == MAX_CRASHES:
                    break
                context.avoided.add(child.attempt)
        finally:
            context.avoided = set()
        if child.inapplicable is not None:
            raise Inapplicable(child.inapplicable)
        context.notes += child.notes
        yield from child.findings

    return run


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


class _Child:
    """One run in a process: ``findings`` and ``notes``, or ``crash`` and the ``attempt`` that led to it."""

    def __init__(self, rule: Callable[[ContextT], Findings], context: ContextT) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.attempt: str | None = None
        self.inapplicable: str | None = None
        self.crash: Finding | None = None
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_run, args=(rule, context, sender.send))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking beside threads
            process.start()
        sender.close()
        finished = self._receive(receiver)
        if finished is not True:
            if finished is None:
                process.kill()
            process.join()
            what = f"did not return in {PATIENCE:.0f} s" if finished is None else _end(process.exitcode)
            self.crash = Finding(
                f"{self.attempt or 'a correct call'}: {what}", "an error" if self.attempt else "no end"
            )
        process.join()
        receiver.close()

    def _receive(self, receiver: Any) -> bool | None:
        """True if the rule has finished, False if the process has ended before, None if it hangs."""
        try:
            while receiver.poll(PATIENCE):
                kind, value = receiver.recv()
                if kind == "done":
                    self.findings, self.notes = value
                    return True
                if kind == "inapplicable":
                    self.inapplicable = value
                    return True
                self.attempt = value
        except EOFError:
            return False
        return None


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process has exited with code {code}"


def _run(rule: Callable[[ContextT], Findings], context: ContextT, send: Callable[[tuple[str, Any]], None]) -> None:
    """In the process: run the rule, send attempts as they are made, and the findings at the end."""
    gc.freeze()  # objects of the parent process must not be finalised here
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    context.report_attempt = lambda name: send(("attempt", name))
    findings: list[Finding] = []
    try:
        for finding in islice(rule(context), MAX_FINDINGS):
            findings.append(finding)
    except Inapplicable as reason:
        send(("inapplicable", str(reason)))
        return
    except Exception as error:  # any error of the environment
        findings.append(Finding(error_text(error), "no error"))
    try:
        context.close()
    except Exception as error:
        findings.append(Finding(f"close: {error_text(error)}", "no error"))
    send(("done", (findings, context.notes)))
