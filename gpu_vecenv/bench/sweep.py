"""Throughput over the number of environments or agents: sizes, range of linear growth, and a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.plots import COLOURS

Sweep = Literal["environments", "agents"]
AGENTS = (5, 10, 20, 50, 100, 200, 500, 1000)
STAGES = ("step", "sample_and_step")
LINEAR_TOLERANCE = 0.1  # of the best rate per environment or agent so far
FORMATS = (".png", ".svg")


def environment_counts(most: int) -> list[int]:
    """1, 3, 10, 32, 100 ... (rounded powers of the square root of 10) below ``most``, and ``most``."""
    powers = (round(10 ** (half / 2)) for half in range(2 * len(str(most))))
    return [*(power for power in powers if power < most), most]


def with_agents(game: Env, num_agents: int) -> Env:
    """``game`` with ``num_agents`` agents in total, its roles in the same proportion, each with at least one agent.

    A role can grow if adding 1 to a field of the configuration adds one agent of that role and of no other. Other roles
    keep their number of agents.

    Raises:
        ConfigError: No role can grow, or the others alone have too many agents.
    """
    fields = _sizes(game)
    if not fields:
        raise ConfigError(
            f"{game.name()} has no field that sets the number of a role's agents; expected a game with one, such as "
            "tag_gridworld, tag_continuous or simple_spread"
        )
    left = num_agents - sum(count for role, count in game.layout.roles.items() if role not in fields)
    if left < len(fields):
        raise ConfigError(f"{game.name()} cannot have {num_agents} agents; expected at least one of each role")
    total, growing = (
        sum(game.layout.roles[role] for role in fields),
        sorted(fields, key=lambda role: game.layout.roles[role]),
    )
    sizes: dict[str, Any] = {}
    for number, role in enumerate(growing, 1):  # the largest is last and absorbs the rounding
        count = max(1, round(left * game.layout.roles[role] / total))
        sizes[fields[role]] = count if number < len(growing) else left - sum(sizes.values())
    return dataclasses.replace(game, **sizes)


def _sizes(game: Env) -> dict[str, str]:
    """Role -> the field that sets its number of agents."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(game):
        value = getattr(game, field.name)
        if type(value) is not int:
            continue
        try:
            grown_by_one: dict[str, Any] = {field.name: value + 1}
            more = dataclasses.replace(game, **grown_by_one).roles
        except ConfigError:  # out of its range: not a number of agents
            continue
        grown = {
            role: count - game.layout.roles[role]
            for role, count in more.items()
            if count != game.layout.roles.get(role)
        }
        if list(grown.values()) == [1]:
            found.setdefault(next(iter(grown)), field.name)
    return found


def linear_up_to(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """The last of these increasing sizes up to which throughput grows linearly.

    Growth is linear while the rate per environment or agent, rate / size, is at least 90 % of the best at any smaller
    size; sizes after the first that is below do not count.
    """
    best, last = 0.0, sizes[0]
    for size, rate in zip(sizes, rates, strict=True):
        if rate / size < (1 - LINEAR_TOLERANCE) * best:
            break
        best, last = max(best, rate / size), size
    return last


def size(sweep: Sweep, row: Mapping[str, Any]) -> int:
    """The x value of a row."""
    return int(row["num_envs" if sweep == "environments" else "num_agents"])


def rate(sweep: Sweep, stage: str, row: Mapping[str, Any]) -> float:
    """The y value of a row: env-steps/s over environments, agent-steps/s over agents."""
    return float(row[f"{stage}_{'env' if sweep == 'environments' else 'agent'}_steps_per_s"])


def linearity(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Stage -> the last size at which its throughput still grows linearly."""
    sizes = [size(sweep, row) for row in rows]
    return {stage: linear_up_to(sizes, [rate(sweep, stage, row) for row in rows]) for stage in STAGES}


def check_figure(out: Path) -> None:
    """Raise ConfigError unless the figure can be drawn, before anything is measured."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot is {out}; expected a name ending in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plot needs matplotlib, which is not installed; run: pip install matplotlib") from error


def draw(sweep: Sweep, rows: Sequence[Mapping[str, Any]], device: str, out: Path) -> None:
    """Draw the rates with both axes logarithmic; dashed lines show linear growth from the first point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, NullFormatter

    canvas = Figure(figsize=(6.4, 4.4), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    sizes = [size(sweep, row) for row in rows]
    for stage, colour in zip(STAGES, COLOURS, strict=False):
        rates = [rate(sweep, stage, row) for row in rows]
        label = {"step": "steps with given actions", "sample_and_step": "sampling and steps"}[stage]
        axes.plot(sizes, rates, marker="o", markersize=4, linewidth=1.8, color=colour, label=label)
        ideal = [rates[0] * n / sizes[0] for n in sizes]
        axes.plot(sizes, ideal, linestyle="--", linewidth=1.2, color=colour, alpha=0.6, label="linear growth")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(NullFormatter())
    key, noun = ("num_agents", "agent") if sweep == "environments" else ("num_envs", "environment")
    fixed = f"{rows[0][key]:,} {noun}{'s' * (rows[0][key] != 1)}"
    axes.set_title(f"{rows[0]['game']}, {fixed}, {device}")
    axes.set_xlabel("environments" if sweep == "environments" else "agents per environment")
    axes.set_ylabel("env-steps / s" if sweep == "environments" else "agent-steps / s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas.savefig(out)
