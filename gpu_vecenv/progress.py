"""Progress of long commands: a bar in a terminal; elsewhere plain lines, so that a log file shows it too."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = "GPU_VECENV_PROGRESS_SECONDS"  # environment variable: seconds between two lines
DEFAULT_INTERVAL = 30.0
WARM_UP_REPORTS = 2  # before an estimate: the first part of a task compiles, allocates and captures CUDA graphs

# A callback of long functions: the fraction of the work that is done, and the name of the current part.
OnProgress: TypeAlias = Callable[[float, str], None]


def no_progress(fraction: float, text: str) -> None:
    """The OnProgress that shows nothing."""


def part(on_progress: OnProgress, index: int, count: int, label: str = "") -> OnProgress:
    """The OnProgress of part ``index`` of ``count`` equal parts of a task; ``label`` comes before its texts."""
    prefix = label and f"{label}: "
    return lambda fraction, text: on_progress((index + fraction) / count, f"{prefix}{text}")


class ProgressDisplay:
    """Shows a task's progress: ``with ProgressDisplay("check") as on_progress: on_progress(0.25, "K07 seeds")``.

    A terminal shows a bar. Elsewhere, for example in a file, a line is printed every ``interval`` seconds, and a first
    one as soon as there is an estimate of the time left, if that is longer than the interval. A task that ends within
    its first interval prints nothing, or its last line if ``show_end``.

    Args:
        label: Name of the task, at the start of each line.
        console: Where it is shown; None: stderr, so that the output of a command has its results alone.
        interval: Seconds between two lines, 0 for a line at every call; None: the environment variable
            GPU_VECENV_PROGRESS_SECONDS, or 30.
        show_end: Print the last line of a short task too.
        clock: Seconds from any origin.

    Raises:
        ConfigError: The environment variable is no number >= 0.
    """

    def __init__(
        self,
        label: str,
        console: Console | None = None,
        *,
        interval: float | None = None,
        show_end: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console  # importing rich draws from Python's global random numbers
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._label, self._console, self._clock = label, console or Console(stderr=True), clock
        self._interval = line_interval() if interval is None else interval
        self._show_end = show_end
        self._bar = Progress(
            BarColumn(bar_width=10),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1)),
            console=self._console,
            disable=not self._console.is_interactive,
            redirect_stdout=not self._console.stderr,
        )
        self._task = self._bar.add_task(label, total=1.0)
        self._start = self._line_time = clock()
        self._first: tuple[float, float] | None = None  # clock time and fraction of the first report
        self._reports = self._lines = 0

    def __enter__(self) -> OnProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, fraction: float, text: str) -> None:
        """Show that the fraction ``fraction`` in [0, 1] of the task is done; ``text`` says what it does now."""
        now = self._clock()
        self._first = self._first or (now, fraction)
        self._reports += 1
        left = self._seconds_left(now, fraction)
        status = f"{self._label}: {math.floor(100 * fraction)}%"
        if fraction >= 1:
            status += f", done in {duration(now - self._start)}"
        elif left is not None:
            status += f", about {duration(left)} left"
        status = printable(f"{status}  {text}")
        if self._console.is_interactive:
            self._bar.update(self._task, completed=fraction, description=status)
            return
        first_estimate = self._reports == WARM_UP_REPORTS + 1 and left is not None and left > self._interval
        end = fraction >= 1 and (self._show_end or self._lines > 0)
        if first_estimate or end or now - self._line_time >= self._interval:
            self._console.print(status, highlight=False, markup=False, soft_wrap=True)
            self._lines, self._line_time = self._lines + 1, now

    def _seconds_left(self, now: float, fraction: float) -> float | None:
        """Estimate from the rate since the first report; None before there is one."""
        assert self._first is not None
        start, before = self._first
        if self._reports <= WARM_UP_REPORTS or fraction <= before:
            return None
        return (now - start) / (fraction - before) * (1 - fraction)


def duration(seconds: float) -> str:
    """A duration in words: "45 s", "12 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def line_interval() -> float:
    """Seconds between two lines. Raises ConfigError if the environment variable is no number >= 0."""
    text = os.environ.get(INTERVAL, str(DEFAULT_INTERVAL))
    try:
        interval = float(text)
    except ValueError:
        interval = math.nan
    if not 0 <= interval < math.inf:
        raise ConfigError(f"{INTERVAL} is {text!r}; expected the seconds between two lines of progress, such as 30")
    return interval
