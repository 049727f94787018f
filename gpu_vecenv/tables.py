"""Tables for the console: as many blocks of columns, one below the other, as the console's width needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from gpu_vecenv.escapes import printable

GAP = 2  # spaces between columns: the padding of a cell, and the box's line between columns, which is blank
BREAK = re.compile("(?<=[_ +])")  # where a heading may continue on the next line


@dataclass(frozen=True)
class _Column:
    name: str  # the first line of its heading
    heading: Sequence[str]  # lines
    cells: Sequence[str]
    left: bool

    @property
    def width(self) -> int:
        """With the spaces that separate it from the next one."""
        return GAP + max(map(cell_len, (*self.heading, *self.cells)))

    def narrow(self) -> _Column:
        """The same with as many lines in the heading as make it as narrow as the cells, or as its longest word."""
        pieces = [BREAK.split(line) for line in self.heading]
        least = max(map(cell_len, (*self.cells, *(piece.strip() for line in pieces for piece in line))))
        lines = []
        for first, *others in pieces:
            lines.append(first)
            for piece in others:
                if cell_len(lines[-1] + piece.rstrip()) <= least:
                    lines[-1] += piece
                else:
                    lines.append(piece)
        return replace(self, heading=[line.rstrip() for line in lines])


class FittedTable:
    """Rows of cells below headings, for rich. However narrow the console is, no number and no word is cut.

    Where the columns do not fit side by side, headings have line breaks after underscores, spaces and plus signs. Those
    that still do not fit stand in further blocks below, each with the labels of the rows. Labels wider than half of the
    console are numbered, with the names below the table. Only what is wider than the console by itself is folded.

    Args:
        label: Heading of the labels.
        *headings: Headings of the other columns; ", " stands for a line break.
        left: Those of columns that are aligned to the left. All others are aligned to the right.

    Example:
        ``table = FittedTable("policies", "steps", "tagger, mean")``; ``table.add_row("all random", "99.0", "-0.51")``;
        ``Console().print(table)``.
    """

    def __init__(self, label: str, *headings: str, left: Collection[str] = ()) -> None:
        self._label, self._headings, self._left = label, headings, {label, *left}
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, label: str, *cells: str) -> None:
        """Add a row. Missing cells at its end are empty."""
        empty = len(self._headings) - len(cells)
        assert empty >= 0, "more cells than headings"
        self._rows.append(tuple(map(printable, (label, *cells, *[""] * empty))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, names = options.max_width + GAP, list[str]()
        labels, *cells = zip(*self._rows, strict=True) if self._rows else [()] * (1 + len(self._headings))
        first, *columns = (
            _Column(heading.partition(", ")[0], list(map(printable, heading.split(", "))), own, heading in self._left)
            for heading, own in zip((self._label, *self._headings), (labels, *cells), strict=True)
        )
        if sum(column.width for column in (first, *columns)) > width:
            names = [label for label in labels if cell_len(label) > options.max_width // 2]
            short = [f"({names.index(label) + 1})" if label in names else label for label in labels]
            first, *columns = (column.narrow() for column in (replace(first, cells=short), *columns))
        for number, block in enumerate(_blocks(columns, width - first.width)):
            if number > 0:
                yield Text()
            yield _table([first, *block])
        for number, name in enumerate(names):
            yield Text(f"({number + 1}) {name}", overflow="fold")


def _blocks(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """The columns in their order, in blocks that are not wider than ``width``, or have one column.

    Neighbours whose headings have the same first line stay together where they can.
    """
    blocks: list[list[_Column]] = [[]]

    def full(*more: _Column) -> bool:
        return bool(blocks[-1]) and sum(column.width for column in (*blocks[-1], *more)) > width

    for _, neighbours in groupby(columns, key=lambda column: column.name):
        group = list(neighbours)
        if full(*group):
            blocks.append([])
        for column in group:
            if full(column):
                blocks.append([])
            blocks[-1].append(column)
    return blocks


def _table(columns: Sequence[_Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        justify = "left" if column.left else "right"
        table.add_column(Text("\n".join(column.heading)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
