"""Tables of results at any width of the console: words and numbers stay whole."""

import io
import re

import pytest
from rich.console import Console

from gpu_vecenv.tables import FittedTable

HEADINGS = ("terminated", "cautious_walker, mean", "cautious_walker, worst", "collected_by_the_walkers")
ROWS = {
    "all random": ("22.0%", "-1234.56", "-123456.78", "12345.67"),
    "cautious_walker against random": ("0.5%", "0.86", "0.00", "2.52"),
    "[red]empty": (),
}
WORDS = {"policies", "terminated", "cautious_", "walker", "mean", "worst", "collected_", "by_the_", "walkers"}


def shown(table, width):
    """The table's blocks, each the list of its lines."""
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return [block.splitlines() for block in re.split(r"\n *\n", out.getvalue())]


def table_of(rows=ROWS, headings=HEADINGS, **options):
    table = FittedTable("policies", *headings, **options)
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def test_a_table_that_fits_is_one_block():
    (lines,) = shown(table_of(), 120)
    assert lines[0].split() == ["cautious_walker", "cautious_walker"] and lines[1].split()[0] == "policies"
    assert lines[3].split() == ["all", "random", *ROWS["all random"]] and lines[5].split() == ["[red]empty"]


@pytest.mark.parametrize("width", [45, 60, 80])
def test_columns_that_do_not_fit_stand_below_with_the_labels_and_nothing_is_cut(width):
    blocks, cells = shown(table_of(), width), []
    assert len(blocks) > 1 or width == 80
    for lines in blocks:
        rule = next(index for index, line in enumerate(lines) if set(line) == {"─"})
        assert {word for line in lines[:rule] for word in line.split()} <= WORDS
        assert lines[rule + 1].startswith("all random ")
        cells += lines[rule + 1].split()[2:]
    assert tuple(cells) == ROWS["all random"]


def test_columns_of_one_name_stay_together():
    headings = ("steps", "runner, mean", "runner, worst")
    blocks = shown(table_of({"all": ("123456.0", "123456.0", "123456.0")}, headings), 30)
    assert [lines[-1].split() for lines in blocks] == [["all", "123456.0"], ["all", "123456.0", "123456.0"]]


def test_labels_wider_than_half_of_the_console_are_numbered():
    rows = {"a/longer/path/to/runs/1": ("1.0",), "short": ("2.0",)}
    (lines,) = shown(table_of(rows, ["steps"]), 27)
    assert [line.split() for line in lines[-3:]] == [
        ["(1)", "1.0"],
        ["short", "2.0"],
        ["(1)", "a/longer/path/to/runs/1"],
    ]


def test_texts_are_aligned_to_the_left():
    (lines,) = shown(table_of({"one": ("a", "1"), "two": ("bbb", "22")}, ("kind", "steps"), left=["kind"]), 40)
    assert lines[-2:] == ["one       a         1", "two       bbb      22"]
