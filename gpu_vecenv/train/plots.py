"""Learning curves: plots of the metrics and evaluations of one or more runs over env-steps or time."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gpu_vecenv.declare.arguments import check_choice, check_kind
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import ConfigError, nearest
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output, put_file
from gpu_vecenv.train.evaluation_curves import (
    NONE,
    Points,
    read_evaluations,
    read_random_returns,
    roles_that_learn,
)
from gpu_vecenv.train.populations import members_of_metric, without_members

METRICS_FILE = "metrics.csv"
CONFIG_FILE = "config.json"  # the game, hyper-parameters and sizes, to be read by people: checkpoints have them too
TEXT_COLUMNS = ("weights",)  # columns that are not numeric
EPISODE_METRICS = ("return_", "episode_length", "terminated_fraction")  # means over episodes
SEED = re.compile(r"(.*?)[-_. ]?seed[-_=]?\d+")  # cartpole-seed0, cartpole_seed_1, seed2
# Okabe and Ito, "Color universal design", 2008, without yellow, which has too little contrast on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # of opponents
RANDOM_STYLE: dict[str, Any] = {"color": "#777777", "linestyle": (0, (1, 1)), "linewidth": 1.5}
MEMBER_STYLE: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4}  # beside that of the group
OF_EACH_RUN = "random play, in the run's colour"
LEARNS_TOO = "in training the opponent learns too"
X = Literal["env_steps", "seconds", "both"]
Rows: TypeAlias = list[dict[str, float]]
Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]


class Group(NamedTuple):
    """Runs that differ only in their seed, or a single run, with label and line style."""

    label: str
    runs: list[Rows]
    style: dict[str, Any]
    evaluations: list[dict[tuple[str, str], Points]]  # of each run
    random_returns: dict[str, float]  # role -> of random play, in the first run that has it


def read_metrics(run: Path) -> Rows:
    """The metrics of each iteration, from RUN/metrics.csv; NaN for means over episodes before there are any.

    An incomplete last line is ignored.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: The file is damaged; the message names the line.
    """
    path = Path(run) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; expected a run folder")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    reader = csv.reader(lines if not lines or lines[-1].endswith("\n") else lines[:-1], strict=True)
    rows: Rows = []
    try:
        names = next(reader, [])
        if reader.line_num and ("env_steps" not in names or len(set(names)) != len(names)):
            raise ValueError(f"the columns are {names}; expected unique names that include env_steps")
        for values in reader:
            if len(values) != len(names):
                raise ValueError(f"it has {len(values)} values; expected {len(names)}, one per column")
            row = {name: float(value) for name, value in _numbers(dict(zip(names, values, strict=True)))}
            if rows and not row["env_steps"] > rows[-1]["env_steps"]:
                raise ValueError(f"env_steps is {row['env_steps']:.0f}; expected more than in the previous line")
            rows.append(row)
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"{path}, line {reader.line_num}, is damaged: {error}") from error
    return rows


def _numbers(row: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The numeric columns of a row. Means over episodes are empty while first episodes are running."""
    no_means = float(row.get("first_episodes", 0)) > 0
    for name, text in row.items():
        if name not in TEXT_COLUMNS:
            yield name, text or ("nan" if no_means and name.startswith(EPISODE_METRICS) else text)


def plot_runs(
    runs: Sequence[Path],
    out: Path,
    *,
    metrics: Sequence[str] = (),
    x: X = "env_steps",
    smooth: int = 1,
) -> bool:
    """Plot metrics of runs, one panel per metric.

    Run folders in the same directory whose names differ only in a seed at the end, such as cartpole-seed0 and
    cartpole-seed1, become one line: their mean, with a band from minimum to maximum, over the range that all of them
    cover. Where runs are of different games, the legend names each line's game. Values between two rows are
    interpolated. Iterations without finished episodes are skipped for the metrics of episodes, and so are those before
    the first episodes of all environments have ended.

    The panel of a role's return also has the members of its population, as thin lines, its evaluations against fixed
    opponents, as lines with markers, and random play, as a horizontal line: a grey one for all runs, or where their
    returns of random play differ one in the colour of each. Its title says where other roles learn while it trains.

    Args:
        runs: Folders with a metrics.csv.
        out: The image, .png or .svg; its folder is created if necessary.
        metrics: Columns of metrics.csv, and returns in evaluations; by default the return of each role, or agent that
            is evaluated, and the episode length, without those of single members of populations and those that no run
            has or whose values never change.
        x: "env_steps", or "seconds" of training; "both": a column of panels for each.
        smooth: Number of rows of a trailing mean.

    Returns:
        False, and nothing is written, if matplotlib is not installed.

    Raises:
        FileNotFoundError: A run has no metrics.csv.
        TypeError, ConfigError: A metrics.csv is damaged, no run has the metric, or an argument is wrong.
    """
    _check_items("runs", runs, (str, Path), "paths of run folders")
    _check_items("metrics", metrics, str, "names of columns")
    check_kind("out", out, (str, Path), "a file name that ends in .png or .svg")
    check_choice("x", x, get_args(X), ConfigError)
    out, smooth = Path(out), validate_int("smooth", smooth, 1)
    if out.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"out is {out}; expected a file name that ends in .png or .svg")
    check_output("out", out)
    if not runs:
        raise ConfigError("there are no runs to plot; expected at least one folder with a metrics.csv")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.ticker import EngFormatter
    except ImportError:
        return False
    groups = _groups(runs)
    metrics = _chosen_metrics(groups, metrics)
    rows = [row for group in groups for run in group.runs for row in run]
    axes_x: tuple[str, ...] = ("env_steps", "seconds") if x == "both" else (x,)
    panels = [(name, one) for name in metrics for one in axes_x]
    columns = 2 if x == "both" else len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    lines = -(-len(panels) // columns)
    opponents = _opponent_styles(groups, metrics)
    width = max(5.2 * columns, 6.4)
    of_opponents = {name: "evaluation" if name == NONE else f"against {name}" for name in opponents}
    alike = _have_one_random_play(groups, metrics)
    labels = [*(group.label for group in groups), *of_opponents.values(), "random play" if alike else OF_EACH_RUN]
    longest = max(map(len, labels))
    across = min(max(int(9 * width / (longest + 6)), 1), len(labels))  # about 9 characters per inch; 6 for the line
    height = 3.7 * lines + 0.3 + 0.22 * -(-len(labels) // across)
    canvas = Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    FigureCanvasAgg(canvas)
    headers = [list(row) for group in groups for run in group.runs for row in islice(run, 1)]
    has_random = False
    for panel, (name, one_x) in enumerate(panels, 1):
        axes = canvas.add_subplot(lines, columns, panel)
        scale, x_label = _unit(one_x, max((row[one_x] for row in rows if one_x in row), default=0))
        for group in groups:
            runs_with_metric = [run for run in group.runs if run and name in run[0]]
            for run in runs_with_metric:
                for member in members_of_metric(name, run[0]):
                    _draw(axes, [_curve(run, member, one_x, scale, smooth)], {**group.style, **MEMBER_STYLE})
            _draw(axes, [_curve(run, name, one_x, scale, smooth) for run in runs_with_metric], group.style)
        title, unit = _title_and_unit(name)
        if name.startswith("return_"):
            role = name.removeprefix("return_")
            _draw_evaluations(axes, groups, role, opponents, one_x, scale)
            has_random |= _draw_random_play(axes, groups, role, alike)
            if any(name in header and roles_that_learn(header) - {role} for header in headers):
                title += f"\n{LEARNS_TOO}"
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel(x_label)
        axes.margins(x=0.02)
        axes.grid(alpha=0.3)
        if one_x == "env_steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles = [canvas.axes[0].plot([], [], label=printable(group.label), **group.style)[0] for group in groups]
    for name, style in opponents.items():
        handles += canvas.axes[0].plot([], [], label=printable(of_opponents[name]), **style)
    if has_random:
        style = RANDOM_STYLE if alike else {**RANDOM_STYLE, "color": COLOURS[-1]}
        handles += canvas.axes[0].plot([], [], label=labels[-1], **style)
    canvas.legend(handles=handles, loc="outside lower center", ncols=across, frameon=False)
    put_file(out, lambda draft: canvas.savefig(draft, format=out.suffix[1:].lower()))
    return True


def _check_items(name: str, items: Any, kind: Any, expected: str) -> None:
    """TypeError unless the argument is a sequence of objects of this kind."""
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise TypeError(f"{name} is {items!r:.80} ({type(items).__name__}); expected a sequence of {expected}")
    for index, item in enumerate(items):
        check_kind(f"{name}[{index}]", item, kind, expected)


def _groups(runs: Sequence[Path]) -> list[Group]:
    members: dict[Path, list[Path]] = {}
    for run in dict.fromkeys(Path(run).resolve() for run in runs):
        match = SEED.fullmatch(run.name)
        members.setdefault(run.parent / match[1] if match else run, []).append(run)
    names = [stem.name for stem in members]
    games = {stem: next(filter(None, map(_read_game, folders)), None) for stem, folders in members.items()}
    groups = []
    for index, (stem, folders) in enumerate(members.items()):
        label = stem.name if names.count(stem.name) == 1 else f"{stem.parent.name}/{stem.name}"
        if len({*games.values()} - {None}) > 1 and games[stem] is not None:
            label += f", {games[stem]}"
        if len(folders) > 1:
            label += f" (mean and range of {len(folders)} runs)"
        dashes = DASHES[index // len(COLOURS) % len(DASHES)]
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes, "linewidth": 1.8}
        evaluations = [read_evaluations(folder) for folder in folders]
        random_returns = next(filter(None, map(read_random_returns, folders)), {})
        groups.append(Group(label, [read_metrics(folder) for folder in folders], style, evaluations, random_returns))
    return groups


def _read_game(run: Path) -> str | None:
    """The name of a run's game, of RUN/config.json; None without that file."""
    path = run / CONFIG_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["game"]) if path.is_file() else None
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _opponent_styles(groups: Sequence[Group], metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Fixed opponents of the roles whose returns are plotted -> line style: colours of their own if there is one group.

    Several groups keep their colours, and opponents differ in markers.
    """
    matches = [match for group in groups for evaluations in group.evaluations for match in evaluations]
    names = dict.fromkeys(name for role, name in matches if f"return_{role}" in metrics)
    return {
        name: {
            "marker": MARKERS[index % len(MARKERS)],
            "color": COLOURS[1 + index % (len(COLOURS) - 1)] if len(groups) == 1 else COLOURS[-1],
            "markersize": 4,
            "linewidth": 1.2,
        }
        for index, name in enumerate(names)
    }


def _draw_evaluations(
    axes: Any, groups: Sequence[Group], role: str, opponents: Mapping[str, dict[str, Any]], x: str, scale: float
) -> None:
    """Draw a role's evaluations against fixed opponents."""
    for group in groups:
        for name, style in opponents.items():
            runs = [evaluations[role, name] for evaluations in group.evaluations if (role, name) in evaluations]
            own = style if len(groups) == 1 else {**style, "color": group.style["color"]}
            _draw(axes, [_curve(run, "mean_return", x, scale, 1) for run in runs], own)


def _have_one_random_play(groups: Sequence[Group], metrics: Sequence[str]) -> bool:
    """Whether random play has one return of each role that is plotted, in all groups that have it."""
    found = {(role, _shown(value)) for group in groups for role, value in group.random_returns.items()}
    roles = [role for role, _ in found if f"return_{role}" in metrics]
    return len(roles) == len(set(roles))


def _draw_random_play(axes: Any, groups: Sequence[Group], role: str, alike: bool) -> bool:
    """Draw the returns of random play, one line if all groups are ``alike``; whether there are any."""
    drawn = [group for group in groups if role in group.random_returns][: 1 if alike else None]
    heights = [_shown(group.random_returns[role]) for group in drawn]
    for index, (group, height) in enumerate(zip(drawn, heights, strict=True)):
        before, count = heights[:index].count(height), heights.count(height)
        dots = (2 * before, (1, 2 * count - 1))  # of lines at one height each has every count-th dot
        colour = {} if alike else {"color": group.style["color"]}
        axes.axhline(group.random_returns[role], **{**RANDOM_STYLE, "linestyle": dots, **colour})
    return bool(drawn)


def _shown(value: float) -> str:
    """As precisely as a picture shows it: sums in another order are the same."""
    return f"{value:.6g}"


def _chosen_metrics(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    """The metrics to plot; ConfigError if no run has one of them."""
    known = dict.fromkeys(name for group in groups for run in group.runs for row in islice(run, 1) for name in row)
    matches = [match for group in groups for evaluations in group.evaluations for match in evaluations]
    evaluated = dict.fromkeys(f"return_{role}" for role, _ in matches)
    known |= evaluated
    wanted = list(dict.fromkeys(metrics))
    if not wanted:
        default = [name for name in without_members(known) if name.startswith("return_")] + ["episode_length"]
        wanted = [name for name in default if _is_informative(groups, name)] or default[:1]
    for name in wanted if known or metrics else ():
        if name not in known:
            raise ConfigError(f"no run has the metric {name!r}; {nearest(name, known)}")
    return wanted


def _is_informative(groups: Sequence[Group], name: str) -> bool:
    """Whether the panel of a metric has two values that differ, or a first one, other than 0, that nothing follows."""
    role = name.removeprefix("return_")
    curves: list[Sequence[float]] = []
    for group in groups:
        curves += [_curve(run, name, "env_steps", 1, 1)[1].tolist() for run in group.runs if run and name in run[0]]
        if name.startswith("return_"):
            matches = [match for evaluations in group.evaluations for match in evaluations.items()]
            curves += [[point["mean_return"] for point in points] for (one, _), points in matches if one == role]
            curves.append([group.random_returns[role]] if role in group.random_returns else [])
    values = {value for curve in curves for value in curve}
    return len(values) > 1 or (values != {0} and max(map(len, curves), default=0) == 1)


def _curve(run: Rows, name: str, x: str, scale: float, smooth: int) -> Curve:
    """Finite points of one run."""
    if x not in run[0]:
        raise ConfigError(f"x is {x!r}, but a run has no such column; {nearest(x, run[0])}")
    is_episode_metric = name.startswith(EPISODE_METRICS)
    rows = [
        row
        for row in run
        if not is_episode_metric or (row.get("episodes", 1) > 0 and not row.get("first_episodes", 0) > 0)
    ]
    xs, values = (np.array([row[key] for row in rows]) for key in (x, name))
    finite = np.isfinite(values)
    xs, values = xs[finite] / scale, values[finite]
    means = [values[max(0, end - smooth) : end].mean() for end in range(1, len(values) + 1)]
    return xs, np.array(means)


def _draw(axes: Any, curves: Sequence[Curve], style: dict[str, Any]) -> None:
    """Plot one line, with a band if there are several curves."""
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    if len(curves) == 1 or first > last:  # no common range: separate lines
        for xs, values in curves:
            axes.plot(xs, values, **{"marker": "." if len(xs) == 1 else None, **style})
        return
    grid = np.unique(np.concatenate([xs[(xs >= first) & (xs <= last)] for xs, _ in curves]))
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    axes.plot(grid, values.mean(0), **{"marker": "." if len(grid) == 1 else None, **style})
    axes.fill_between(grid, values.min(0), values.max(0), color=style["color"], alpha=0.2, linewidth=0)


def _unit(x: str, largest: float) -> tuple[float, str]:
    """Scale and label of the x axis."""
    if x == "env_steps":
        return 1, "env-steps (all environments)"
    for scale, unit in ((3600, "hours"), (60, "minutes")):
        if largest >= 2 * scale:
            return scale, f"training time ({unit})"
    return 1, "training time (seconds)"


def _title_and_unit(metric: str) -> tuple[str, str]:
    """Title and unit of a panel."""
    title = metric.replace("_", " ")
    if metric.startswith("return_"):
        return f"return, {metric.removeprefix('return_')}", "reward per agent and episode"
    if metric.startswith(("entropy", "approx_kl")):
        return title, "nats"
    units = {
        "agent_steps_per_s": "agent-steps / s",
        "env_steps": "env-steps",
        "episode_length": "steps",
        "episodes": "per iteration",
        "seconds": "s",
        "terminated_fraction": "fraction of episodes",
        **dict.fromkeys(
            (f"{part}_time_fraction" for part in ("rollout", "policy", "sampling", "env", "update")),
            "fraction of time",
        ),
    }
    return title, units.get(metric, "fraction" if "_fraction" in metric else "")
