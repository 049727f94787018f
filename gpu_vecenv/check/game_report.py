"""``GameReport``: what ``check_game`` found, as one table."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_vecenv.check import WIDTH, ConformanceError, Failure, Report
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.declare.env import Env
from gpu_vecenv.escapes import printable, printable_lines

if TYPE_CHECKING:
    from rich.table import Table

GAME_CHECKS = {
    "G00": "the sanitizers find nothing",
    "G01": "calls end, and access only their own environment",
    "G02": "what is read was written before",
    "G03": "rewards and observations are finite",
    "G04": "episodes end at their limit",
    "G05": "results do not depend on how a game is run",
}
MAX_SHOWN = 3  # lines of one check
STYLES = {"passed": "green", "failed": "red", "skipped": "dim"}


@dataclass
class Row:
    """Result of one check: "passed", "failed" or "skipped", and sentences about it."""

    check: str
    title: str
    result: str = "passed"
    lines: list[str] = field(default_factory=list)


@dataclass
class GameReport:
    """Results of ``check_game``; ``str(report)`` and rich render them as one table.

    Args:
        game: The game.
        rows: Check -> its result: "G00" … "G05", which are about the game's rules, then "K01" …, of its interfaces.
    """

    game: Env
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """The check and what it found, for each sentence on a failure."""
        return [f"{row.check}: {line}" for row in self.rows.values() if row.result == "failed" for line in row.lines]

    def raise_for_failures(self) -> None:
        """Raise ConformanceError, with the report as its message, if there are failures."""
        if self.failures:
            raise ConformanceError(f"\n{self}")

    def add(self, check: str, result: str = "passed", lines: Iterable[str] = ()) -> None:
        """Add the result of one of the checks G00 … G05."""
        self.rows[check] = Row(check, GAME_CHECKS[check], result, [*lines])

    def add_interface(self, name: str, report: Report) -> None:
        """Merge the report of one interface: "same_step" or another mode, or "parallel"."""
        failed = sorted({failure.check for failure in report.failures})
        for check in sorted({*report.passed, *failed, *report.skipped}):
            title = CHECKS[check].title if check in CHECKS else "the interface can be checked"
            row = self.rows.setdefault(check, Row(check, title, "skipped"))
            own = [failure for failure in report.failures if failure.check == check]
            if own:
                shown = own[:MAX_SHOWN] if check == failed[0] else own[:1]
                row.result, row.lines = "failed", [f"{name}: {_sentence(failure)}" for failure in shown]
                row.lines += [f"… and {len(own) - len(shown)} more"] if len(own) > len(shown) else []
            elif check in report.passed and row.result == "skipped":
                row.result, row.lines = "passed", []
            elif row.result == "skipped":
                row.lines = row.lines or [report.skipped[check]]

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        counts = [f"{sum(row.result == kind for row in self.rows.values())} {kind}" for kind in STYLES]
        shown = ", ".join(count for count in counts if not count.startswith("0 "))
        title = Text(printable(f"{self.game.name()}: {shown}"))
        table = Table("check", "title", "result", title=title, title_justify="left", expand=False)
        if self.failures:
            table.caption, table.caption_justify = "The checks after the first that fails are not run.", "left"
        for row in self.rows.values():
            text = "\n".join(row.lines) if row.result == "failed" else ": ".join([row.result, *row.lines[:1]])
            table.add_row(row.check, row.title, Text(printable_lines(text), STYLES[row.result]))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return out.getvalue().rstrip()


def _sentence(failure: Failure) -> str:
    location = {"environment": failure.env_index, "agent": failure.agent, "row": failure.row, "step": failure.step}
    if failure.agent is not None:
        del location["row"]
    where = ", ".join(f"{name} {value}" for name, value in location.items() if value is not None)
    return f"{where}{': ' if where else ''}{failure.got}; expected {failure.expected}"
