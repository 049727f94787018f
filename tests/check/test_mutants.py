"""The planted bugs apply to the current sources, and the mutation gate reports which ones the tests find.

``python tests/mutation_gate.py``, a job of continuous integration, plants all of them.
"""

import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import pytest
from mutants.parallel_envs import PLANTED_PARALLEL
from mutants.vector_envs import PLANTED
from mutation_gate import (
    LEVELS,
    MUTANTS,
    ROOT,
    BrokenEntry,
    Copy,
    Mutant,
    Outcome,
    chosen,
    clean_failures,
    load,
    shard,
    verdict,
)

BUGS = {level: load(MUTANTS / f"{level}.toml") for level in LEVELS}
ALL = [mutant for mutants in BUGS.values() for mutant in mutants]

# A bug that is found, one that changes nothing, two that do not compile or import, and one whose old text is missing.
FOUND = """
[a-bug-that-is-found]
file = "cuda/engine/rng.cuh"
old = "round < 10"
new = "round < 9"
breaks = "the generator"
killed_by = "tests/compile/test_rng.py::test_philox_gives_the_published_answers[cpu]"
"""
SURVIVES = """
[another-way-to-write-the-same]
file = "cuda/engine/rng.cuh"
old = "round < 10"
new = "round <= 9"
breaks = "nothing"
killed_by = "tests/compile/test_rng.py::test_philox_gives_the_published_answers[cpu]"
"""
NO_PROGRAM = """
[a-typing-error]
file = "cuda/engine/rng.cuh"
old = "round < 10"
new = "rnd < 10"
breaks = "compilation"
killed_by = "tests/compile/test_rng.py::test_philox_gives_the_published_answers[cpu]"
"""
NO_IMPORT = """
[a-missing-name]
file = "gpu_vecenv/train/ppo.py"
old = "from dataclasses import dataclass\\n"
new = ""
breaks = "the import"
killed_by = "tests/compile/test_rng.py::test_the_python_form_gives_the_published_answers"
"""
MOVED = """
[a-missing-text]
file = "cuda/engine/rng.cuh"
old = "round < 11"
new = "round < 10"
breaks = "nothing"
killed_by = "tests/compile/test_rng.py::test_philox_gives_the_published_answers[cpu]"
"""


def test_bugs_have_distinct_names_and_changes():
    assert all(len(mutants) >= 30 for mutants in BUGS.values())
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_source_to_change_occurs_once(mutant):
    path = ROOT / mutant.file
    assert path.relative_to(ROOT).parts[0] in ("cuda", "examples", "gpu_vecenv")
    assert mutant.planted(path.read_text(encoding="utf-8"))
    assert mutant.breaks and "\n" not in mutant.breaks


@pytest.mark.slow
def test_the_killing_tests_exist(collected_tests):
    """A new process collects those of files that this run has not collected, since that imports the test modules."""
    tests, found = {mutant.killed_by for mutant in ALL}, set(collected_tests)
    if files := sorted({test.partition("::")[0] for test in tests} - {test.partition("::")[0] for test in found}):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        found |= set(done.stdout.splitlines())
    functions = {test.partition("[")[0] for test in found}
    assert {test for test in tests if test not in found and test not in functions} == set()


def test_the_document_has_the_number_of_bugs():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    counts = re.search(r"plants (\d+) bugs .* Another\s(\d+),", text, re.DOTALL)
    assert counts and [int(number) for number in counts.groups()] == [len(ALL), len(PLANTED) + len(PLANTED_PARALLEL)]


def gate(folder: Path, *tables: str, options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """Exit code and output lines of the gate on a table of bugs."""
    table = folder / "bugs.toml"
    table.write_text("".join(tables), encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "mutation_gate.py"), "--table", str(table), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def line_of(name: str, lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith(name)]
    return line


@pytest.mark.exhaustive
def test_the_gate_reports_found_and_surviving_bugs(tmp_path, monkeypatch):
    monkeypatch.delenv("FUZZ_SEED")  # so that each test under the gate draws its own
    before = (ROOT / "cuda" / "engine" / "rng.cuh").read_bytes()
    code, lines = gate(tmp_path, FOUND, SURVIVES, NO_PROGRAM, NO_IMPORT, MOVED)
    assert code == 1 and lines[-1].startswith("1 of 5 planted bugs are found")
    found = line_of("a-bug-that-is-found", lines)
    assert "test_philox_gives_the_published_answers[cpu] (AssertionError)" in found
    assert re.search(r"SURVIVES \(FUZZ_SEED=\d+ repeats it\)$", line_of("another-way-to-write-the-same", lines))
    assert line_of("a-typing-error", lines).endswith("BROKEN: no test failed by the bug: KernelCompileError")
    assert "BROKEN: no test failed by the bug" in line_of("a-missing-name", lines)
    assert "NameError: name 'dataclass' is not defined" in "\n".join(lines)
    assert line_of("a-missing-text", lines).endswith("occurs 0 times in cuda/engine/rng.cuh; expected once")
    assert (ROOT / "cuda" / "engine" / "rng.cuh").read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [tmp_path / "bugs.toml"]


@pytest.mark.exhaustive
def test_the_gate_passes_if_all_bugs_are_found(tmp_path):
    code, lines = gate(tmp_path, FOUND, SURVIVES, options=("--only", "a-bug-that-is-found", "--jobs", "1"))
    assert code == 0 and lines[-1].startswith("1 of 1 planted bugs are found"), lines


def test_killing_tests_that_fail_without_a_bug_are_reported():
    phases = [("a[x]", "call", "passed", ""), ("a[y]", "call", "skipped", ""), ("b", "call", "failed", "")]
    phases += [("c", "setup", "skipped", ""), ("ab", "call", "failed", ""), ("d", "call", "passed", "")]
    outcomes = [Outcome(1, phases), Outcome(0, [("d", "teardown", "failed", "")]), Outcome(4)]
    assert clean_failures(["a", "a[x]", "a[y]", "b", "c", "d", "gone"], outcomes) == ["a[y]", "b", "c", "gone"]


def test_wrong_tables_and_names_are_refused(tmp_path):
    assert gate(tmp_path, FOUND, options=("--only", "nonsuch")) == (1, ["mutation_gate: no bug is named nonsuch"])
    wrong = tmp_path / "wrong.toml"
    for text in ('[a]\nfile = "x"\n', FOUND + "line = 3\n", FOUND.replace('"the generator"', "3"), "a = 1\n"):
        wrong.write_text(text)
        with pytest.raises(
            BrokenEntry, match=r"wrong\.toml: .* expected the strings breaks, file, killed_by, new, old"
        ):
            load(wrong)


def test_a_copy_has_the_bug_inside_the_context_only(tmp_path):
    bug = next(mutant for mutant in ALL if mutant.file.endswith(".py"))
    copy, text = Copy(tmp_path / "copy"), (ROOT / bug.file).read_text(encoding="utf-8")
    path = copy.folder / bug.file
    (path.parent / "__pycache__").mkdir(exist_ok=True)
    stale = path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc"
    stale.touch()
    with pytest.raises(ZeroDivisionError), copy.with_bug(bug):
        assert path.read_text(encoding="utf-8") == text.replace(bug.old, bug.new) != text
        assert not stale.exists()  # else stale bytecode could be used: size and time stamp may be equal
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == text
    for old in ("nowhere in this file", "self."):
        with pytest.raises(BrokenEntry, match="expected once"), copy.with_bug(Mutant("x", bug.file, old, "", "", "")):
            pass
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("code", "phases", "killed"),
    [
        (1, [("a", "setup", "passed", ""), ("a", "call", "failed", "AssertionError")], True),
        (1, [("a", "setup", "failed", "AssertionError")], False),
        (1, [("a", "call", "failed", "KernelCompileError")], False),
        (1, [("a", "call", "failed", "NameError")], False),
        (1, [("a", "call", "passed", ""), ("a", "teardown", "failed", "AssertionError")], False),
        (0, [("a", "call", "passed", "")], False),
        (0, [("a", "call", "skipped", "Skipped")], False),
        (2, [], False),
        (-1, [], False),
    ],
)
def test_only_a_failing_test_finds_a_bug(code, phases, killed):
    outcome = Outcome(code, phases, "words")
    assert verdict(outcome)[0] == killed
    assert outcome.passed("a") == (phases[-1:] == [("a", "call", "passed", "")])


def test_shards_partition_the_bugs():
    assert shard("2/3") == (2, 3)
    parts = [chosen(Namespace(table=None, level="kernels", only=[], shard=(part, 3))) for part in (1, 2, 3)]
    assert {mutant.name for part in parts for mutant in part} == {mutant.name for mutant in BUGS["kernels"]}
    assert sum(map(len, parts)) == len(BUGS["kernels"])
    for text in ("0/3", "4/3", "3", "1/", "/2", "a/b", "-1/2", "1/0"):
        with pytest.raises(ArgumentTypeError, match="expected K/N"):
            shard(text)
