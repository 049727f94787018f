"""Concurrent processes fill a cold compile cache; one of them is killed during its build."""

import multiprocessing
import os
import random
import shlex
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from support.kernels import signature

from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.compile.toolchain import find_host_compiler
from gpu_vecenv.errors import KernelCompileError
from reliability.experiment import Experiment, Metrics, said

DEADLINE = 120.0  # seconds; a process that takes longer hangs
# Runs the compiler and records the process that started it.
COMPILER = """
#!/bin/sh
case " $* " in *" -o "*) echo $PPID >> {log} ;; esac
exec {compiler} "$@"
"""
# The factor differs in each round, so that a binary of another round gives another result.
SCALE = '#include "kernel.cuh"\nKERNEL(scale) {{ FOR_ITEMS (k, args.n) args.x[k] *= {factor}; }}\n'
WRONG = '#include "kernel.cuh"\nKERNEL(scale) {{ undeclared_{factor} = args.n; }}\n'
SCALE_KERNEL = signature("scale", "float* x, i64 n")


@dataclass(kw_only=True)
class Cache(Experiment):
    """Processes request a kernel that is not in the cache; the builder is killed; then the entry is damaged."""

    count: int = 20
    """Rounds."""
    processes: int = 16
    """Concurrent processes."""

    depends_on = ("gpu_vecenv/compile/cache.py",)

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork
            return self._rounds(Path(name))

    def _rounds(self, place: Path) -> Metrics:
        compiler, log = place / "compiler", place / "log"
        command = find_host_compiler()
        assert command, "no C++ compiler"
        text = COMPILER.format(log=shlex.quote(str(log)), compiler=shlex.join(command))
        compiler.write_text(textwrap.dedent(text).lstrip())
        compiler.chmod(0o700)
        before = {key: os.environ.get(key) for key in ("CXX", "GPU_VECENV_CACHE", "TMPDIR")}
        (place / "tmp").mkdir()
        os.environ |= {"CXX": str(compiler), "GPU_VECENV_CACHE": str(place / "kernels"), "TMPDIR": str(place / "tmp")}
        cache_dir.cache_clear()
        tempfile.tempdir = None  # so that TMPDIR is read again
        try:
            self.built = log
            _ = FunctionManager("cpu").backend.identity  # queries the compiler version once
            return self._measured(place)
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
            tempfile.tempdir = None
            cache_dir.cache_clear()

    def _measured(self, place: Path) -> Metrics:
        rng, kernels = random.Random(self.seed), place / "kernels"
        compiled = {"healthy": 0, "killed": 0, "damaged": 0, "wrong": 0}
        longest, kills, most_drafts, warned = 0.0, 0, 0, 0
        for number in range(self.count):
            # No process is killed: one process compiles, the others wait for it.
            text = SCALE.format(factor=f"{4 * number + 2}.0f")
            answers, built = self._wave(f"round {number}, cold", text, [])
            self._all_right(f"round {number}, cold", answers, 4 * number + 2, self.processes)
            self.check(built == 1, f"round {number}, cold: {built} compilations of one kernel")
            compiled["healthy"] += built
            # The builder is killed during its build, or just after it.
            text = SCALE.format(factor=f"{4 * number + 3}.0f")
            started = time.monotonic()
            answers, built = self._wave(f"round {number}, kill", text, [rng.uniform(0, 0.3)])
            longest = max(longest, time.monotonic() - started)
            self._all_right(f"round {number}, kill", answers, 4 * number + 3, self.processes - 1)
            self.check(built <= 2, f"round {number}, kill: {built} compilations")
            compiled["killed"] += built
            kills += 1
            drafts = [path.name for path in kernels.iterdir() if path.suffix == ".draft"]
            most_drafts = max(most_drafts, len(drafts))
            # The entry is damaged while no process has it open.
            entry = max(kernels.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
            damage(entry, rng)
            answers, built = self._wave(f"round {number}, damage", text, [])
            self._all_right(f"round {number}, damage", answers, 4 * number + 3, self.processes)
            self.check(built == 1, f"round {number}, damage: {built} compilations")
            compiled["damaged"] += built
            words = [message for _, messages in answers for message in messages]
            warned += len(words)
            self.check(len(words) == 1 and "is damaged" in words[0], f"round {number}: warnings of damage {words}")
            # A compile error is reported with the same message to all processes and is not cached.
            answers, built = self._wave(f"round {number}, wrong", WRONG.format(factor=number), [])
            errors = {result for result, _ in answers}
            self.check(
                len(answers) == self.processes and len(errors) == 1 and "undeclared" in str(errors),
                f"round {number}, wrong: {len(answers)} answers, {errors}",
            )
            self.check(built == self.processes, f"round {number}, wrong: compiled {built} times, so it was kept")
            compiled["wrong"] += built
        left = [path.name for path in kernels.iterdir() if path.suffix == ".draft"]
        self.check(len(left) <= 1, f"drafts left in the cache: {left}")
        entries = len(list(kernels.glob("*.so")))
        self.check(entries == 2 * self.count, f"{entries} entries; expected {2 * self.count}")
        return {
            "processes": self.processes,
            "rounds": self.count,
            "kills": kills,
            **{f"compiled_{name}": number for name, number in compiled.items()},
            "warnings": warned,
            "longest_round_with_a_kill_s": round(longest, 2),
            "most_drafts_after_a_kill": most_drafts,
            "left_in_the_end": len(left),
            "left_of_compilers": len(list((place / "tmp").iterdir())),
        }

    def _wave(self, what: str, text: str, kills: list[float]) -> tuple[list[tuple[Any, list[str]]], int]:
        """Start all processes, kill a builder after a delay; returns their results and the compilations."""
        self.built.write_text("")
        context = multiprocessing.get_context("fork")
        start, ready = context.Event(), context.Semaphore(0)
        children: list[BaseProcess] = []
        receivers: list[Any] = []
        for _ in range(self.processes):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            children.append(context.Process(target=answer, args=(text, ready, start, sender)))
            children[-1].start()
            sender.close()
        try:
            for _ in children:
                self.check(ready.acquire(timeout=DEADLINE), f"{what}: a process does not start")
            start.set()
            for delay in kills:
                self._kill_builder(what, children, delay)
            return self._answers(what, children, receivers, len(kills))
        finally:
            for child in children:
                child.kill()
                child.join()

    def _answers(
        self, what: str, children: list[BaseProcess], receivers: list[Any], killed: int
    ) -> tuple[list[tuple[Any, list[str]]], int]:
        end, answers, dead = time.monotonic() + DEADLINE, [], 0
        for child, receiver in zip(children, receivers, strict=True):
            if not self.check(receiver.poll(max(end - time.monotonic(), 0)), f"{what}: a process hangs"):
                continue
            try:
                answers.append(receiver.recv())
            except EOFError:
                child.join()
                dead += 1
                self.check(child.exitcode == -signal.SIGKILL, f"{what}: a process ended with {child.exitcode}")
            receiver.close()
        self.check(dead <= killed, f"{what}: {dead} processes died, {killed} were killed")
        return answers, len(self.built.read_text().split())

    def _kill_builder(self, what: str, children: list[BaseProcess], delay: float) -> None:
        end = time.monotonic() + DEADLINE
        while not (builders := self.built.read_text().split()) and time.monotonic() < end:
            time.sleep(0.002)
        if not self.check(bool(builders), f"{what}: nobody builds"):
            return
        time.sleep(delay)
        builder = int(builders[0])
        known = [child for child in children if child.pid == builder]
        if self.check(bool(known), f"{what}: process {builder} builds, which is none of them"):
            known[0].kill()

    def _all_right(self, what: str, answers: list[tuple[Any, list[str]]], factor: int, least: int) -> None:
        right = [1.0 * factor, 2.0 * factor, 3.0 * factor]
        wrong = [result for result, _ in answers if result != right]
        self.check(not wrong, f"{what}: {wrong[:1]}; expected {right}")
        self.check(len(answers) >= least, f"{what}: {len(answers)} answers; expected {least}")

    def plant(self) -> Metrics:
        return {"an entry of another kernel": said(Poisoned(count=1, processes=2))}


class Poisoned(Cache):
    def _wave(self, what: str, text: str, kills: list[float]) -> tuple[list[tuple[Any, list[str]]], int]:
        if what.endswith("damage"):
            one, other = sorted(cache_dir().glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
            other.write_bytes(one.read_bytes())
        return super()._wave(what, text, kills)


def answer(text: str, ready: Any, start: Any, sender: Any) -> None:
    """In a child process: build, launch, send the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        x = torch.tensor([1.0, 2.0, 3.0])
        ready.release()
        start.wait()
        try:
            FunctionManager("cpu").compile(text, kernels=[SCALE_KERNEL]).launch("scale", 3, x=x, n=3)
            result: Any = x.tolist()
        except KernelCompileError as error:
            result = str(error)
        sender.send((result, [str(warning.message) for warning in caught]))
        sender.close()
    sys.stdout.flush()
    os._exit(0)


def damage(path: Path, rng: random.Random) -> None:
    """Replace a file by a copy with a changed byte or truncated; processes that loaded the old file keep it."""
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    draft = path.with_suffix(".damaged")
    draft.write_bytes(content)
    draft.replace(path)
