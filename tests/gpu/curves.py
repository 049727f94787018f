"""Draw the learning curves of docs/results.md from the evaluations during training of tests/gpu/preset_figures.py.

usage: python tests/gpu/curves.py FIGURES.json FOLDER     writes FOLDER/<game>.png

A line is the interquartile mean over the seeds, with its 95 % bootstrap interval; the points are evaluations of a role
against random opponents, with sampled actions. Of tests/gpu/societies.py they are what it measures; seeds that lack a
number are left out, and points that more than half of the seeds lack.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_vecenv.train.plots import COLOURS
from gpu_vecenv.train.seed_statistics import bootstrap_interval

Runs = Sequence[Mapping[str, Any]]


def pictures(contents: Mapping[str, Any]) -> dict[str, dict[str, Runs]]:
    """Game -> rows, such as the kitchens of overcooked -> their runs without an error."""
    games: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in contents["runs"]:
        if not run.get("error"):
            games.setdefault(run["row"].partition("-")[0], {}).setdefault(run["row"], []).append(run)
    return games


def draw(rows: Mapping[str, Runs], path: Path, measured: str = "returns") -> None:
    """A panel for each role, or for each number by its name, a line for each row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    (roles,) = {tuple(run["curve"][0][1]) for runs in rows.values() for run in runs}
    lines = -(-len(roles) // 3)
    columns = -(-len(roles) // lines)
    figure = Figure(figsize=(5.2 * columns + 2.0 * (len(rows) > 1), 3.6 * lines), layout="constrained")
    for axes, role in zip(figure.subplots(lines, columns, squeeze=False).flat, roles, strict=True):
        for (row, runs), colour in zip(rows.items(), COLOURS, strict=False):
            points = list(zip(*(run["curve"] for run in runs), strict=True))
            intervals = {}
            for point in points:
                values = [found[role] for _, found in point if found[role] is not None]
                if 2 * len(values) >= len(point):
                    intervals[point[0][0]] = bootstrap_interval(values)
            steps, found = list(intervals), list(intervals.values())
            axes.plot(steps, [one.value for one in found], marker="o", markersize=3, color=colour, label=row)
            axes.fill_between(
                steps,
                [one.low for one in found],
                [one.high for one in found],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
        axes.set_title(f"return, {role}" if measured == "returns" else role)
        axes.set_xlabel("env-steps (all environments)")
        if measured == "returns":
            axes.set_ylabel("reward per agent and episode")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    seeds = {len(runs) for runs in rows.values()}
    title = next(iter(rows)) if len(rows) == 1 else path.stem
    figure.suptitle(f"{title}, {' to '.join(map(str, sorted(seeds)))} seeds", fontsize="medium")
    if len(rows) > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    contents = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for game, rows in pictures(contents).items():
        draw(rows, Path(sys.argv[2]) / f"{game}.png", contents.get("measured", "returns"))
