"""``Report``: what the checks of an environment or of a game found, as one table."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpu_vecenv.check.context import CHECKS, PREFLIGHT
from gpu_vecenv.escapes import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MAX_FINDINGS = 20  # per check: a violation often recurs in every step
MAX_SHOWN = 5  # of these in the table; Report.failures has all
WIDTH = 120  # columns of a report as text
GAME_CHECKS = {
    "G00": "the sanitizers find nothing",
    "G01": "calls end, and access only their own environment",
    "G02": "what is read was written before",
    "G03": "rewards and observations are finite",
    "G04": "episodes end at their limit",
    "G06": "threads of a group do not race",
    "G05": "results do not depend on how a game is run",
}


class ConformanceError(AssertionError):
    """An environment violates its interface; the message is the report."""


@dataclass(frozen=True)
class Failure:
    """One violation of the interface, or of the rules for games.

    Args:
        check: "K01" … "K28", or "G00" … "G06" for a game's rules; "K00" is what all of the former rely on.
        title: Title of the check.
        got: What the environment did.
        expected: What was expected; empty where ``got`` is a whole sentence about a game.
        env_index: Index of the environment, if it concerns one.
        row: Row of the outputs; an environment may have several rows, one for each agent.
        step: Steps since the reset, 0 for the reset itself.
        agent: Name of the agent, for a ParallelEnv.
        interface: The interface of a game: its autoreset mode, or "parallel".
    """

    check: str
    title: str
    got: str
    expected: str = ""
    env_index: int | None = None
    row: int | None = None
    step: int | None = None
    agent: Any = None
    interface: str | None = None

    @property
    def message(self) -> str:
        """What the environment did, and what was expected."""
        return f"{self.got}; expected {self.expected}" if self.expected else self.got

    def __str__(self) -> str:
        if self.agent is not None:
            location = {"agent": self.agent, "step": self.step}
        else:
            location = {"env": self.env_index, "row": self.row, "step": self.step}
        where = [self.interface] if self.interface is not None else []
        where += [f"{name} {value}" for name, value in location.items() if value is not None]
        return f"{', '.join(where)}{': ' if where else ''}{self.message}"


@dataclass
class Report:
    """Results of the checks; ``str(report)`` and rich render them as a table.

    Args:
        name: ``str(env)``, or the name of the game.
        passed: Checks without failures.
        failures: All failures, up to 20 per check.
        skipped: Check -> why it does not apply.
        notes: Check -> parts of it that could not be checked, and what was accepted, compared or left out.
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

    @property
    def failed(self) -> list[str]:
        """The checks with failures."""
        return sorted({failure.check for failure in self.failures})

    def merge(self, other: Report) -> None:
        """Add another report on the same: a check passes if it passes in one and fails in none."""
        self.failures += other.failures
        self.passed = sorted({*self.passed, *other.passed}.difference(self.failed))
        skipped = {**other.skipped, **self.skipped}
        self.skipped = {check: why for check, why in skipped.items() if check not in {*self.passed, *self.failed}}
        for check, notes in other.notes.items():
            own = self.notes.setdefault(check, [])
            own += [note for note in notes if note not in own]

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were skipped, with the name."""
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return printable(f"{self.name}: {counts}")

    def summary(self, option: str) -> Group:
        """For rich: the checks that failed, the counts, and which were skipped.

        Args:
            option: What shows the table of all checks.
        """
        from rich.console import Group
        from rich.text import Text

        parts: list[Table | Text] = [self._table(self.failed, "")] if self.failures else []
        parts.append(Text(self.counts, "red" if self.failures else "green"))
        skipped = f"skipped: {' '.join(sorted(self.skipped))}; " if self.skipped else ""
        parts.append(Text(f"{skipped}{option} shows all checks, with reasons", "dim"))
        return Group(*parts)

    def __rich__(self) -> Table:
        return self._table([*self.passed, *self.failed, *self.skipped, *self.notes], self.counts)

    def _table(self, names: Iterable[str], title: str) -> Table:
        from rich.table import Table
        from rich.text import Text

        head = Text(title) if title else None
        table = Table("check", "title", "result", title=head, title_justify="left", expand=False)
        for name in sorted({*names}):
            lines = [("skipped: " + self.skipped[name], "dim")] if name in self.skipped else []
            own = [str(failure) for failure in self.failures if failure.check == name]
            lines += [(line, "red") for line in own[:MAX_SHOWN]]
            lines += [(f"… and {len(own) - MAX_SHOWN} more, see failures", "red")] if len(own) > MAX_SHOWN else []
            lines = lines or [("passed", "green")]
            lines += [(f"note: {note}", "dim") for note in self.notes.get(name, [])]
            text = Text("\n").join(Text(printable_lines(line), style) for line, style in lines)
            table.add_row(name, check_title(name), text)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return out.getvalue().rstrip()


def check_title(name: str) -> str:
    """The title of a check."""
    return GAME_CHECKS.get(name) or CHECKS.get(name, PREFLIGHT).title
