"""A conformance checker for any Gymnasium vector environment: ``check_vector_env``."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

import gpu_vecenv.check.calls
import gpu_vecenv.check.rules  # noqa: F401, both fill CHECKS
from gpu_vecenv.check.subject import CHECKS, Check, Inapplicable, Make, Subject
from gpu_vecenv.check.trace import Finding
from gpu_vecenv.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.table import Table

MOST = 20  # findings that one check reports; what breaks once breaks in every step
SHOWN = 5  # of these, in the table; Report.failures has all
WIDTH = 120  # columns of a report as text


class ConformanceError(AssertionError):
    """An environment breaks promises of the vector interface; the message is the report."""


@dataclass(frozen=True)
class Failure:
    """One broken promise.

    Args:
        check: "K01" … "K18".
        title: What the check is about.
        got: What came.
        expected: What should have come.
        replica: Which of the replicas, where it is one's affair.
        row: Which row of the outputs; several rows may make up a replica.
        step: Steps since the reset, 0 for the reset itself.
    """

    check: str
    title: str
    got: str
    expected: str
    replica: int | None = None
    row: int | None = None
    step: int | None = None


@dataclass
class Report:
    """What the checks found; ``str(report)`` and rich render it as a table.

    Args:
        name: The environment, as it calls itself.
        passed: The checks that found nothing.
        failures: What the others found.
        skipped: Check -> why it has nothing to check here.
        notes: Check -> parts of it that could not be checked, though the rest was.
    """

    name: str
    passed: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def raise_for_failures(self) -> None:
        """Raise ConformanceError, with the report as its message, if there are failures."""
        if self.failures:
            raise ConformanceError(f"\n{self}")

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        failed = sorted({failure.check for failure in self.failures})
        counts = f"{len(self.passed)} passed, {len(failed)} failed, {len(self.skipped)} skipped"
        table = Table("check", "what", "", title=f"{self.name}: {counts}", title_justify="left", expand=False)
        for name in sorted({*self.passed, *failed, *self.skipped}):
            lines = [("skipped: " + self.skipped[name], "dim")] if name in self.skipped else []
            own = [_line(failure) for failure in self.failures if failure.check == name]
            lines += [(line, "red") for line in own[:SHOWN]]
            lines += [(f"… and {len(own) - SHOWN} more, see failures", "red")] if len(own) > SHOWN else []
            lines = lines or [("passed", "green")]
            lines += [(f"note: {note}", "dim") for note in self.notes.get(name, [])]
            text = Text("\n").join(Text(line, style) for line, style in lines)
            table.add_row(name, CHECKS[name].title, text)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return out.getvalue().rstrip()


def check_vector_env(
    make: Make,
    *,
    checks: Iterable[str] | None = None,
    seed: int = 17,
    steps: int = 300,
    max_steps: int | None = None,
) -> Report:
    """Check that a vector environment keeps the promises of its interface: seeds, replicas, episodes, values, calls.

    It runs environments of 4 and of 7 replicas, many times, with random valid actions, and compares bit by bit: NumPy
    or torch, CPU or CUDA, in any autoreset mode. Where ``info["action_mask"]`` forbids a choice, another is taken.

    An environment may have n rows, one for each agent, for each replica: ``num_envs`` is n times what ``make`` was
    asked for, and a replica's rows lie side by side. A row may end before its replica does. Rewards 0 and flags False
    follow, and a flag once more when the replica ends.

    Args:
        make: Number of replicas -> a new ``gymnasium.vector.VectorEnv``.
        checks: Which, of "K01" … "K18"; None runs all.
        seed: The first of the seeds; its neighbours are used as well.
        steps: Length of most runs. What happens later than that stays unseen.
        max_steps: Length at which episodes are truncated; None takes it from ``env.spec``. Where both say nothing,
            limits are not checked.

    Returns:
        The report. An error that the environment raises is a failure in it.

    Raises:
        ConfigError: An unknown check, or a number out of range.
        TypeError, ValueError: ``make`` gives no vector environment, or one of another size.
    """
    chosen = sorted(CHECKS if checks is None else checks)
    for name in chosen:
        if name not in CHECKS:
            raise ConfigError(f"checks: unknown check {name!r}; {nearest(name, CHECKS)}")
    for key, value, least in (("seed", seed, 0), ("steps", steps, 10), ("max_steps", max_steps, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{key} is {value!r}; expected an int >= {least}")
    subject = Subject(make, seed, steps, max_steps)
    report = Report(subject.name)
    for name in chosen:
        _run(CHECKS[name], subject, report)
    return report


def _run(check: Check, subject: Subject, report: Report) -> None:
    subject.notes = []
    findings: list[Finding] = []
    try:
        for finding in islice(check.rule(subject), MOST):
            findings.append(finding)
    except Inapplicable as reason:
        if not findings:
            report.skipped[check.id] = str(reason)
    except Exception as error:  # whatever the environment raises
        findings.append(Finding(_text(error), "no error"))
    try:
        subject.close()
    except Exception as error:
        findings.append(Finding(f"close: {_text(error)}", "no error"))
    for finding in findings:
        replica = None if finding.row is None else finding.row // subject.block
        report.failures.append(
            Failure(check.id, check.title, finding.got, finding.expected, replica, finding.row, finding.step)
        )
    if not findings and check.id not in report.skipped:
        report.passed.append(check.id)
    if subject.notes:
        report.notes[check.id] = subject.notes


def _text(error: Exception) -> str:
    where = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"


def _line(failure: Failure) -> str:
    places = {"replica": failure.replica, "row": failure.row, "step": failure.step}
    place = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    return f"{place}{': ' if place else ''}{failure.got}; expected {failure.expected}"
