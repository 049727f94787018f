"""Mutation gate: plants bugs one at a time in a copy of the tree, where the test meant for each must fail.

    python tests/mutation_gate.py [--level kernels|trainer] [--only NAME ...] [--jobs N] [--shard K/N]

The bugs are data, tests/mutants/kernels.toml and trainer.toml: a table for each, named as the bug, with "file", "old"
(occurs there exactly once), "new", "breaks" (the effect, in one line) and "killed_by" (the node id of the fastest test
that finds it). Exit code 1 if a bug survives, an entry is broken, or a killing test fails without a bug. Random inputs
of tests have another seed for each bug: a survivor is printed with its own, and $FUZZ_SEED sets it.

Tests run in forks of one process that has imported torch but not gpu_vecenv: each fork imports it from its own copy.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants"
LEVELS = ("kernels", "trainer")
COPIED = ("gpu_vecenv", "cuda", "adapters", "examples", "tests", "pyproject.toml")
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*", "runs")
# Modules that are slow to import; none of them imports gpu_vecenv.
PRELOADED = "scipy.stats torch torch._dynamo gymnasium pettingzoo safetensors.torch tyro rich.console mpe2".split()
SECONDS = 300  # for one bug, or for all killing tests of one file
# With these errors a test has not found the bug: the mutant does not compile or import.
NO_PROGRAM = set(
    "CompilerError KernelCompileError ImportError ModuleNotFoundError SyntaxError IndentationError NameError "
    "UnboundLocalError AttributeError TypeError".split()
)


class BrokenEntry(Exception):
    """An invalid entry of a table."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    killed_by: str

    def planted(self, text: str) -> str:
        """The source with the bug. Raises BrokenEntry if the old text does not occur exactly once."""
        if (count := text.count(self.old)) != 1:
            raise BrokenEntry(f"its old text occurs {count} times in {self.file}; expected once")
        if self.old == self.new:
            raise BrokenEntry("its new text is the old one")
        return text.replace(self.old, self.new)


@dataclass
class Outcome:
    """Result of one run of pytest: exit code, phases (test's node id, phase, outcome, error), seed of random inputs."""

    code: int
    phases: list[tuple[str, str, str, str]] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0
    seed: str = ""

    def failed(self) -> list[tuple[str, str]]:
        """Tests that failed in the call phase, and their exceptions."""
        return [(test, error) for test, when, outcome, error in self.phases if when == "call" and outcome == "failed"]

    def passed(self, test: str) -> bool:
        """Whether a test passed, or all its cases that were not skipped."""
        own = [(when, outcome) for name, when, outcome, _ in self.phases if name == test or name.startswith(f"{test}[")]
        return ("call", "passed") in own and all(outcome != "failed" for _, outcome in own)


@dataclass
class Job:
    """Tests to run, with or without a bug."""

    tests: list[str]
    mutant: Mutant | None = None


def load(path: Path) -> list[Mutant]:
    """The bugs of a table.

    Raises:
        BrokenEntry: An entry has missing or unknown keys, or a value that is not a string.
    """
    keys = {part.name for part in fields(Mutant)} - {"name"}
    mutants = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if not isinstance(entry, Mapping) or set(entry) != keys or not all(isinstance(x, str) for x in entry.values()):
            raise BrokenEntry(f"{path.name}: {name} has {entry!r:.80}; expected the strings {', '.join(sorted(keys))}")
        mutants.append(Mutant(name, **entry))
    return mutants


class Copy:
    """A copy of the tree for one bug at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
            else:
                shutil.copy(ROOT / name, folder / name)

    @contextlib.contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """Context in which the copy has this bug."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.planted(text))
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode is validated by time stamp in seconds and size, which a bug may leave equal.
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()


class _Recorder:
    def __init__(self) -> None:
        self.phases: list[tuple[str, str, str, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        error = call.excinfo.typename if call.excinfo else ""
        self.phases.append((item.nodeid, report.when, report.outcome, error))
        return report


def _in_the_fork(folder: Path, tests: Sequence[str], stop: bool) -> tuple[int, list[Any]]:
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)  # for processes that tests start
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no plugin is needed, and each takes time to load
    own = {str(ROOT), str(ROOT / "tests"), ""}
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in own)]
    importlib.invalidate_caches()
    package = importlib.import_module("gpu_vecenv")
    device_text = importlib.import_module("gpu_vecenv.files").cuda_folder()
    if Path(package.__file__ or "").parent != folder / "gpu_vecenv" or device_text != folder / "cuda":
        raise ImportError(f"{package.__file__} and {device_text} were imported instead of those in {folder}")
    recorder = _Recorder()
    options = [*(["-x"] if stop else []), "-q", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *tests], plugins=[recorder])
    return int(code), recorder.phases


def start(folder: Path, tests: Sequence[str], report: Path, *, stop: bool) -> int:
    """Run tests on a copy in a fork with its own process group, which writes ``report`` last; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    if process := os.fork():
        with contextlib.suppress(OSError):  # set by parent and child, to avoid a race
            os.setpgid(process, process)
        return process
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        with report.with_suffix(".txt").open("w") as words, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
            code, phases = _in_the_fork(folder, tests, stop)
            sys.stdout.flush()
        seed = os.environ.get("FUZZ_SEED", "")  # which tests/conftest.py has set if it was not
        report.write_text(json.dumps({"code": code, "phases": phases, "seed": seed}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def outcome_of(report: Path, seconds: float) -> Outcome:
    """The outcome that a fork has written."""
    words = report.with_suffix(".txt").read_text(errors="replace")
    if not report.exists():
        return Outcome(-1, [], words, seconds)
    found = json.loads(report.read_text())
    return Outcome(found["code"], [tuple(phase) for phase in found["phases"]], words, seconds, found["seed"])


def run(jobs: Sequence[Job], copies: Sequence[Copy], reports: Path) -> Iterator[tuple[Job, Outcome]]:
    """Run each job on the first free copy; yields outcomes as they finish."""
    waiting, running = list(enumerate(jobs)), {}
    free, stack = list(copies), contextlib.ExitStack()
    with stack:
        stack.callback(lambda: [_kill(process) for process in running])
        while waiting or running:
            while waiting and free:
                number, job = waiting.pop(0)
                planted = contextlib.ExitStack()
                copy, report = free.pop(), reports / f"{number}-{time.monotonic_ns()}.json"
                if job.mutant is not None:
                    planted.enter_context(copy.with_bug(job.mutant))
                process = start(copy.folder, job.tests, report, stop=job.mutant is not None)
                running[process] = job, copy, planted, report, time.monotonic()
            for process, (job, copy, planted, report, began) in list(running.items()):
                seconds = time.monotonic() - began
                if seconds > SECONDS:
                    _kill(process)
                elif os.waitpid(process, os.WNOHANG)[0] == 0:
                    continue
                del running[process]
                planted.close()
                free.append(copy)
                yield job, outcome_of(report, seconds)
            time.sleep(0.02)


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def verdict(outcome: Outcome) -> tuple[bool, str]:
    """Whether a test found the bug, and which one; else the reason."""
    failed = outcome.failed()
    if outcome.code == 1 and failed and failed[0][1] not in NO_PROGRAM:
        return True, f"{failed[0][0]} ({failed[0][1]})"
    if outcome.code == 0:
        return False, f"SURVIVES (FUZZ_SEED={outcome.seed} repeats it)"
    last = [line for line in outcome.output.splitlines() if line.strip()][-12:]
    why = failed[0][1] if failed else f"pytest ended with {outcome.code}"
    return False, "\n    ".join([f"BROKEN: no test failed by the bug: {why}", *last])


def clean_failures(tests: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Killing tests that do not pass without a bug."""
    return [test for test in tests if not any(outcome.passed(test) for outcome in outcomes)]


def by_file(tests: Sequence[str]) -> list[Job]:
    """One job for the tests of each file, which share its fixtures."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    return [Job(names) for names in sorted(files.values(), key=len, reverse=True)]


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    """The bugs selected on the command line."""
    tables = arguments.table or [MUTANTS / f"{level}.toml" for level in LEVELS if arguments.level in (None, level)]
    mutants = [mutant for table in tables for mutant in load(table)]
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BrokenEntry(f"several bugs are named {', '.join(twice)}")
    if unknown := sorted(set(arguments.only) - set(names)):
        raise BrokenEntry(f"no bug is named {', '.join(unknown)}")
    part, parts = arguments.shard
    return [mutant for mutant in mutants if not arguments.only or mutant.name in arguments.only][part - 1 :: parts]


def gate(mutants: Sequence[Mutant], jobs: int) -> int:
    """Plant all bugs and print a table; returns 0 if every one is found."""
    began, sound, survivors = time.monotonic(), [], 0
    for mutant in mutants:
        try:
            mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8"))
            sound.append(mutant)
        except (BrokenEntry, OSError) as error:
            print(f"{mutant.name}: BROKEN: {error}", flush=True)
            survivors += 1
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # garbage collection in a fork then does not copy these pages
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary).resolve()
        os.environ["GPU_VECENV_CACHE"] = str(folder / "cache")
        copies = [Copy(folder / f"copy{number}") for number in range(jobs)]
        tests = [mutant.killed_by for mutant in sound]
        outcomes = [outcome for _, outcome in run(by_file(tests), copies, folder)]
        if failures := clean_failures(list(dict.fromkeys(tests)), outcomes):
            print("these fail, are skipped or do not exist without a bug:", *failures, sep="\n  ")
            print(*(outcome.output[-4000:] for outcome in outcomes if outcome.code != 0), sep="\n")
            return 1
        print(f"{len(set(tests))} killing tests pass without a bug, {time.monotonic() - began:.0f} s\n")
        width = max([len(mutant.name) for mutant in sound], default=0)
        print(f"{'mutant':<{width}}  seconds  killed by", flush=True)
        for job, outcome in run([Job([mutant.killed_by], mutant) for mutant in sound], copies, folder):
            assert job.mutant is not None
            killed, by = verdict(outcome)
            survivors += not killed
            print(f"{job.mutant.name:<{width}}  {outcome.seconds:7.1f}  {by}", flush=True)
    print(f"\n{len(mutants) - survivors} of {len(mutants)} planted bugs are found, {time.monotonic() - began:.0f} s")
    return int(survivors > 0)


def shard(text: str) -> tuple[int, int]:
    """ "2/3": the second of three parts."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard; expected K/N, such as 2/3")
    return int(part), int(parts)


def main(command: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=LEVELS, help="only bugs of this table")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these bugs")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="parallel processes, each on its own copy"
    )
    parser.add_argument(
        "--shard", type=shard, default=(1, 1), metavar="K/N", help="every N-th bug, starting with the K-th"
    )
    parser.add_argument("--table", type=Path, action="append", help="table of bugs instead of those in tests/mutants")
    arguments = parser.parse_args(command)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that finally blocks run
    os.environ["OMP_NUM_THREADS"] = "1"
    # With CI set, pytest takes minutes to explain differences of long sequences; ADDOPTS could change any option.
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)
    try:
        return gate(chosen(arguments), max(1, arguments.jobs))
    except BrokenEntry as error:
        print(f"mutation_gate: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
