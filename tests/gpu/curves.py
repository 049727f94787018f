"""Draw the learning curves of docs/results.md from the evaluations during training of tests/gpu/preset_figures.py.

usage: python tests/gpu/curves.py FIGURES.json FOLDER     writes FOLDER/<game>.png

A line is the interquartile mean over the seeds, with its 95 % bootstrap interval; the points are evaluations of a role
against random opponents, with sampled actions. Of tests/gpu/societies.py they are what it measures; seeds that lack a
number are left out, and points that more than half of the seeds lack.

Horizontal lines are random play and the scripts in references.json of tests/gpu/references.py, beside FIGURES.json; in
the same place sb3.json has the seeds of Stable-Baselines3. Seconds are those of all seeds that were trained at once,
in proportion to env-steps: above the panels, or where rows of a picture differ in speed, in panels of their own.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpu_vecenv.files import replace_file
from gpu_vecenv.train.plots import COLOURS, RANDOM_STYLE
from gpu_vecenv.train.seed_statistics import bootstrap_interval

Runs = Sequence[Mapping[str, Any]]
SAME_PACE = 1.05  # largest ratio of seconds per env-step with which rows share an axis of seconds
SHORT = 0.05  # of the env-steps: a shorter training of Stable-Baselines3 is drawn as a horizontal line
FAR = 2.0  # heights of a panel: random play that is further from the curves is a number in the legend, not a line
APART = 0.02  # of the height of a panel: random play of rows that differ by less is one line, their mean
UNITS = {  # of what is measured in place of returns, as docs/games.md defines it
    "productivity": "coin of all workers at the end",
    "equality": "equality, 0 to 1",
    "utility": "apples of all players per step",
    "sustainability": "mean step of a meal",
    "peace": "players that are not out",
}
SB3_COLOUR, SCRIPT_COLOURS = COLOURS[1], (COLOURS[2], COLOURS[3])


@dataclass(frozen=True)
class Beside:
    """What is drawn beside the curves: row -> role -> return or script, row -> runs of Stable-Baselines3."""

    random: Mapping[str, Mapping[str, float]]
    scripts: Mapping[str, Mapping[str, Mapping[str, Any]]]
    sb3: Mapping[str, Runs]


def pictures(contents: Mapping[str, Any]) -> dict[str, dict[str, Runs]]:
    """Game -> rows, such as the kitchens of overcooked -> their runs without an error."""
    games: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in contents["runs"]:
        if not run.get("error"):
            games.setdefault(run["row"].partition("-")[0], {}).setdefault(run["row"], []).append(run)
    return games


def beside(contents: Mapping[str, Any], folder: Path) -> Beside:
    """The references and seeds of Stable-Baselines3 that a folder has; of societies, random players of their file."""
    if contents.get("measured", "returns") != "returns":
        found = {row: random_society(row, rows) for rows in pictures(contents).values() for row in rows}
        return Beside(found, {}, {})
    references = _found(folder / "references.json").get("rows", {})
    return Beside(
        {row: found["random"] for row, found in references.items()},
        {row: found["scripts"] for row, found in references.items()},
        {row: runs for rows in pictures(_found(folder / "sb3.json")).values() for row, runs in rows.items()},
    )


def _read(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents


def _found(path: Path) -> dict[str, Any]:
    """A file of what is drawn beside the curves; without it, nothing is."""
    return _read(path) if path.is_file() else {"runs": []}


def random_society(row: str, rows: Mapping[str, Runs]) -> dict[str, float]:
    """What random players, or workers under the taxes of a row, reach: number by name -> interquartile mean."""
    taxes = row.partition("-")[2]
    measured = [one for runs in rows.values() for run in runs for one in run["rows"]]
    played = [one for one in measured if "random" in (one.get("players"), one.get("workers"))]
    found = {}
    for name in rows[row][0]["curve"][0][1]:
        values = [one[name] for one in played if one.get("taxes", taxes) == taxes]
        there = [value for value in values if value is not None]
        if there and 2 * len(there) >= len(values):
            found[name] = bootstrap_interval(there).value
    return found


def pace(runs: Runs) -> float:
    """Seconds per env-step, the median of the seeds."""
    return median(run["seconds"] / run["env_steps"] for run in runs)


def curve(axes: Any, points: Sequence[Sequence[Any]], role: str, scale: float, **style: Any) -> None:
    """Interquartile means and intervals over the seeds of points, (env-steps, numbers by name) of each seed."""
    intervals = {}
    for point in points:
        values = [found[role] for _, found in point if found[role] is not None]
        if 2 * len(values) >= len(point):
            intervals[scale * point[0][0]] = bootstrap_interval(values)
    x, found = list(intervals), list(intervals.values())
    axes.plot(x, [one.value for one in found], markersize=3, **style)
    low, high = [one.low for one in found], [one.high for one in found]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def draw_sb3(axes: Any, runs: Runs, role: str, longest: int) -> None:
    """Its evaluations and that of its final policies; of a training that is short beside ``longest`` only the end."""
    steps, seconds = runs[0]["env_steps"], median(run["seconds"] for run in runs)
    label = f"Stable-Baselines3, {len(runs)} seeds, {seconds:.0f} s each on one core"
    if steps < SHORT * longest:
        final = bootstrap_interval([run["sampled"][role] for run in runs])
        label = f"Stable-Baselines3 after {steps:,} env-steps, {len(runs)} seeds,\n{seconds:.0f} s each on one core"
        axes.axhline(final.value, color=SB3_COLOUR, linestyle="--", linewidth=1.2, label=label)
        axes.axhspan(final.low, final.high, color=SB3_COLOUR, alpha=0.1, linewidth=0)
        return
    points = list(zip(*([*run["curve"], [run["env_steps"], run["sampled"]]] for run in runs), strict=True))
    curve(axes, points, role, 1, marker="s", color=SB3_COLOUR, linestyle="--", label=label)


def draw_references(axes: Any, rows: Mapping[str, Runs], role: str, others: Beside) -> None:
    """Horizontal lines: random play, one in the colour of each row where they differ, and scripts."""
    values = {row: others.random[row][role] for row in rows if role in others.random.get(row, {})}
    low, high = axes.get_ylim()
    apart = bool(values) and max(values.values()) - min(values.values()) > APART * (high - low)
    for row, colour in zip(rows if apart else (), COLOURS, strict=False):
        if row in values:
            axes.axhline(values[row], **{**RANDOM_STYLE, "color": colour})
    if values:
        mean, label, reach = fmean(values.values()), "random play", FAR * (high - low)
        if not apart and not low - reach <= mean <= high + reach:
            label = f"random play, {role}: {mean:.4g}, {'below' if mean < low else 'above'} the panel"
        elif not apart:
            axes.axhline(mean, **RANDOM_STYLE)
        axes.plot([], [], label=label, **RANDOM_STYLE)
    for row in rows:
        for one, colour in zip(others.scripts.get(row, {}).items(), SCRIPT_COLOURS, strict=False):
            if one[0] == role:
                label = f"script: {one[1]['script']}"
                axes.axhline(one[1]["return"], color=colour, linestyle="-.", linewidth=1.2, label=label)


def draw(rows: Mapping[str, Runs], path: Path, others: Beside, devices: Sequence[str], measured: str) -> None:
    """A panel for each role, or for each number by its name, a line for each row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    (roles,) = {tuple(run["curve"][0][1]) for runs in rows.values() for run in runs}
    paces = {row: pace(runs) for row, runs in rows.items()}
    apart = max(paces.values()) > SAME_PACE * min(paces.values())
    panels = [(role, x) for role in roles for x in (("env-steps", "seconds") if apart else ("env-steps",))]
    lines = len(roles) if apart else -(-len(roles) // 3)
    columns = len(panels) // lines
    at_once = " to ".join(map(str, sorted({run.get("at_once", 1) for runs in rows.values() for run in runs})))
    clock = f"seconds, {at_once} seeds at once on {' or '.join(devices)}"
    longest = max(run["env_steps"] for runs in rows.values() for run in runs)
    figure = Figure(figsize=(5.2 * columns + 2.0 * (len(rows) > 1), 3.9 * lines + 0.5), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (role, x) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=True):
        for (row, runs), colour in zip(rows.items(), COLOURS, strict=False):
            label = row if len(rows) > 1 else f"gpu_vecenv, {len(runs)} seeds"
            points = list(zip(*(run["curve"] for run in runs), strict=True))
            curve(axes, points, role, paces[row] if x == "seconds" else 1, marker="o", color=colour, label=label)
            if x == "env-steps" and row in others.sb3 and role in others.sb3[row][0]["sampled"]:
                draw_sb3(axes, others.sb3[row], role, longest)
        draw_references(axes, rows, role, others)
        against = ", against random opponents" if len(roles) > 1 else ""
        axes.set_title(f"return, {role}{against}" if measured == "returns" else role, fontsize="medium")
        axes.set_xlabel("env-steps (all environments)" if x == "env-steps" else clock)
        axes.set_ylabel("reward per agent and episode" if measured == "returns" else UNITS[role])
        axes.set_xlim(left=0)
        if x == "env-steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if not apart:
            mean = sum(paces.values()) / len(paces)
            functions = (lambda steps, mean=mean: steps * mean), (lambda seconds, mean=mean: seconds / mean)
            axes.secondary_xaxis("top", functions=functions).set_xlabel(clock, fontsize="small")
        axes.grid(alpha=0.3)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    title = next(iter(rows)) if len(rows) == 1 else path.stem
    seeds = " to ".join(map(str, sorted({len(runs) for runs in rows.values()})))
    figure.suptitle(title if len(rows) == 1 else f"{title}, {seeds} seeds", fontsize="medium")
    where = "outside right center" if len(rows) > 1 else "outside lower center"
    ncols = 1 if len(rows) > 1 or columns == 1 else 2
    figure.legend(list(handles.values()), list(handles), loc=where, ncols=ncols, frameon=False, fontsize="small")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """A PNG with a palette, a third as large as one of all colours."""
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    Image.open(drawn).convert("RGB").quantize(64, kmeans=1, dither=Image.Dither.NONE).save(packed, "png", optimize=True)
    replace_file(path, packed.getvalue())


def main(file: Path, folder: Path) -> None:
    """Draw the picture of each game in a file."""
    contents = _read(file)
    others = beside(contents, file.parent)
    for game, rows in pictures(contents).items():
        parts = {run["part"] for runs in rows.values() for run in runs}
        devices = sorted({contents["parts"][part]["device"] for part in parts})
        draw(rows, folder / f"{game}.png", others, devices, contents.get("measured", "returns"))


if __name__ == "__main__":
    if len(sys.argv) < 3 or "--help" in sys.argv:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
