"""Output of the benchmark: a table on a terminal, else one JSON line per row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpu_vecenv.escapes import printable, printable_lines

Row: TypeAlias = Mapping[str, Any]
STAGES = ("step", "sampling", "sample_and_step", "rollout")
WIDTH = 150  # of a table; a narrower terminal gets each row as lines, a heading and its values in each
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Column headings by kind of row; all but the first two columns are numbers.
HEADINGS = {
    "games": (
        *(
            "game",
            "stage",
            "envs x agents",
            "µs",
            "env-steps/s",
            "agent-steps/s",
            "B/agent-step",
            "GB/s",
            "of copy",
        ),
        *("memory, B", "first step, s"),
    ),
    "training": (
        *("game", "update, precision", "envs x agents x steps", "units", "ms/iteration", "env-steps/s"),
        *("agent-steps/s", "policy", "sampling", "env", "update", "memory, B"),
    ),
    "interface": ("interface", "game", "envs", "µs", "VecEnv.step, µs", "launch, µs", "overhead, µs"),
    "baseline": ("baseline", "game", "envs x agents", "baseline env-steps/s", "gpu_vecenv env-steps/s", "ratio"),
}


def kind(row: Row) -> str:
    """The kind of measurement of a row."""
    return next((key for key in ("interface", "baseline") if key in row), "training" if "update" in row else "games")


@contextlib.contextmanager
def printing(as_table: bool) -> Iterator[Callable[[Row], None]]:
    """Yield a callback for finished rows. On a terminal the table grows; elsewhere it is printed at the end."""
    if not as_table:
        yield lambda row: print(json.dumps(row), flush=True)
        return
    table: Table | None = None
    out = console()
    if out.width < WIDTH:
        yield lambda row: out.print(_upright(row))
        return
    live = Live(console=out, auto_refresh=False, vertical_overflow="visible") if out.is_terminal else None

    def add(row: Row) -> None:
        nonlocal table
        if table is None:
            table = _empty(row)
        for line in lines(row):
            table.add_row(*(Text(printable(cell)) for cell in line))
        if live:
            live.update(table, refresh=True)

    try:
        with live or contextlib.nullcontext():
            yield add
    finally:
        if table and not live:
            out.print(table)


def console() -> Console:
    """Standard output, wide enough for a table if it is not a terminal."""
    stdout = Console(highlight=False)
    return stdout if stdout.is_terminal else Console(highlight=False, width=WIDTH)


def print_summary(results: Row, sweep: str | None) -> None:
    """Print the footer of the table: device, versions, and results about all rows."""
    facts = [f"{key} {results[key]}" for key in ("device", "processors", "torch", "cuda", "gpu_vecenv", "commit")]
    if "copy_bytes_per_s" in results:
        facts.append(f"copy bandwidth {results['copy_bytes_per_s'] / 1e9:,.1f} GB/s")
    out = console()
    out.print("; ".join(facts), markup=False)
    for stage, size in results.get("linear_up_to", {}).items():
        out.print(f"{stage}: within 10 % of linear up to {size:,} {sweep}", markup=False)
    if "stopped" in results:
        out.print(printable_lines(f"stopped: {results['stopped']}"), markup=False)
    if compared := results.get("compared"):
        out.print(printable(f"compared with {compared['file']}: {compared['rows']} rows match"), markup=False)
        for key, (then, now) in compared["then_now"].items():
            out.print(printable(f"  {key} was {str(then)[:40]}, is {str(now)[:40]}"), markup=False)


def lines(row: Row) -> Iterator[list[str]]:
    """The table lines of one row, cell by cell; a row of a game has one line per stage."""
    size = " x ".join(f"{row[key]:,}" for key in ("num_envs", "num_agents") if key in row)
    if kind(row) == "games":
        for number, stage in enumerate(stage for stage in STAGES if f"{stage}_us" in row):
            rates = [si_prefixed(row[f"{stage}_{what}_steps_per_s"]) for what in ("env", "agent")]
            shared = [row["game"], size, _number(row["bytes_per_agent_step"]), _number(row["first_step_s"])]
            game, sizes, each, first = shared if number == 0 else ["", "", "", ""]
            share, speed = (row.get(f"{stage}_{name}") for name in ("share_of_copy_bandwidth", "gb_per_s"))
            memory = row.get("rollout_peak_bytes") if stage == "rollout" else row.get("peak_bytes", row["env_bytes"])
            traffic = [
                _number(speed),
                _percent(share),
                si_prefixed(memory) if number == 0 or stage == "rollout" else "",
            ]
            yield [game, stage, sizes, _number(row[f"{stage}_us"]), *rates, each, *traffic, first, *_ratio(row, stage)]
    elif kind(row) == "training":
        rates = [si_prefixed(row[f"{what}_steps_per_s"]) for what in ("env", "agent")]
        shares = [_percent(row.get(f"{name}_time_fraction")) for name in ("policy", "sampling", "env", "update")]
        what = [row["game"], f"{row['update']}, {row['precision']}", f"{size} x {row['num_steps']}", str(row["units"])]
        times = [_number(row["iteration_ms"]), *rates, *shares, si_prefixed(row.get("peak_bytes"))]
        yield [*what, *times, *_ratio(row, "iteration")]
    elif kind(row) == "interface":
        times = [_number(row[key]) for key in ("interface_us", "vec_env_step_us", "launch_us", "overhead_us")]
        yield [row["interface"], row["game"], size, *times, *_ratio(row, "interface")]
    else:
        rates = [si_prefixed(row[f"{stage}_env_steps_per_s"]) for stage in ("baseline", "step")]
        library = f"{row['baseline']} {row['version']}"
        yield [library, row["game"], size, *rates, _number(row["speedup"]), *_ratio(row, "step")]


def si_prefixed(number: float | None) -> str:
    """Three digits and an SI prefix, like 2.26 G; a dash for None, a value that was not measured."""
    if number is None:
        return "-"
    scale, letter = next(((scale, letter) for scale, letter in PREFIXES if number >= scale), (1.0, ""))
    return f"{number / scale:.3g} {letter}".strip() if number / scale < 999.5 else f"{number / scale:,.0f} {letter}"


def _headings(row: Row) -> list[str]:
    return [*HEADINGS[kind(row)], *(["now / then"] if "ratios" in row else [])]


def _upright(row: Row) -> Table:
    """One row's lines as columns beside their headings."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for heading, *cells in zip(_headings(row), *lines(row), strict=True):
        table.add_row(heading, *(Text(printable(cell)) for cell in cells))
    table.add_row("")
    return table


def _empty(row: Row) -> Table:
    table = Table()
    for column, heading in enumerate(_headings(row)):
        table.add_column(heading, justify="left" if column < 2 else "right")
    return table


def _ratio(row: Row, stage: str) -> list[str]:
    if "ratios" not in row:
        return []
    ratio = (row["ratios"] or {}).get(stage)
    return ["no match" if ratio is None else f"{ratio:.3f}"]


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:,.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
