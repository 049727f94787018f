"""Throughput over the number of replicas or agents: which sizes, how far it grows linearly, and its picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.plots import COLOURS

Sweep = Literal["replicas", "agents"]
AGENTS = (5, 10, 20, 50, 100, 200, 500, 1000)
STAGES = ("step", "sample_and_step")
LINEAR_TOLERANCE = 0.1  # of what is best so far; beyond it growth counts as linear no more
PICTURES = (".png", ".svg")


def replicas(most: int) -> list[int]:
    """1, 3, 10, 32, 100 … (powers of the root of 10, rounded) as far as ``most``, and ``most``."""
    powers = (round(10 ** (half / 2)) for half in range(2 * len(str(most))))
    return [*(power for power in powers if power < most), most]


def with_agents(game: Env, num_agents: int) -> Env:
    """``game`` with so many agents in all, its roles in the same proportion as before, each at least one agent.

    A role can grow where one more in a field of the configuration makes one more agent of that role, and of no other.
    Roles that cannot keep their number.

    Raises:
        ConfigError: No role can grow, or the others alone are too many.
    """
    fields = _sizes(game)
    if not fields:
        raise ConfigError(
            f"{game.name()} has no field that sets the number of a role's agents; expected a game that has one, as "
            "tag_gridworld, tag_continuous or simple_spread"
        )
    left = num_agents - sum(count for role, count in game.layout.roles.items() if role not in fields)
    if left < len(fields):
        raise ConfigError(f"{game.name()} cannot have {num_agents} agents; expected at least one of each role")
    whole, growing = (
        sum(game.layout.roles[role] for role in fields),
        sorted(fields, key=lambda role: game.layout.roles[role]),
    )
    sizes: dict[str, int] = {}
    for place, role in enumerate(growing, 1):  # the largest comes last and takes what rounding has left
        share = max(1, round(left * game.layout.roles[role] / whole))
        sizes[fields[role]] = share if place < len(growing) else left - sum(sizes.values())
    return dataclasses.replace(game, **sizes)


def _sizes(game: Env) -> dict[str, str]:
    """Role -> the field that sets its number of agents."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(game):
        value = getattr(game, field.name)
        if type(value) is not int:
            continue
        try:
            more = dataclasses.replace(game, **{field.name: value + 1}).roles
        except ConfigError:  # out of its range: this field it is not
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
    """The last size of those, in order, at which throughput still grows linearly.

    It does as long as the rate for each replica or agent, rate / size, is at least 90 % of the best at any smaller
    size. The first size that falls short ends it, whatever larger ones do.
    """
    best, last = 0.0, sizes[0]
    for size, rate in zip(sizes, rates, strict=True):
        if rate / size < (1 - LINEAR_TOLERANCE) * best:
            break
        best, last = max(best, rate / size), size
    return last


def size(sweep: Sweep, row: Mapping[str, Any]) -> int:
    """What a row is plotted over."""
    return int(row["num_envs" if sweep == "replicas" else "num_agents"])


def rate(sweep: Sweep, stage: str, row: Mapping[str, Any]) -> float:
    """What a row is plotted as: env-steps/s over replicas, agent-steps/s over agents."""
    return float(row[f"{stage}_{'env' if sweep == 'replicas' else 'agent'}_steps_per_s"])


def linearity(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Stage -> the last size at which its throughput still grows linearly."""
    sizes = [size(sweep, row) for row in rows]
    return {stage: linear_up_to(sizes, [rate(sweep, stage, row) for row in rows]) for stage in STAGES}


def check_picture(out: Path) -> None:
    """Raise ConfigError unless the picture can be drawn, before anything is measured."""
    if out.suffix.lower() not in PICTURES:
        raise ConfigError(f"plot is {out}; expected a name that ends in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plot needs matplotlib, which is not installed here; run: pip install matplotlib") from error


def draw(sweep: Sweep, rows: Sequence[Mapping[str, Any]], device: str, out: Path) -> None:
    """Both axes logarithmic; dashed, what the first point would become if it grew linearly."""
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
        label = {"step": "steps, actions given", "sample_and_step": "sampling and steps"}[stage]
        axes.plot(sizes, rates, marker="o", markersize=4, linewidth=1.8, color=colour, label=label)
        ideal = [rates[0] * n / sizes[0] for n in sizes]
        axes.plot(sizes, ideal, linestyle="--", linewidth=1.2, color=colour, alpha=0.6, label="the same, if linear")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(NullFormatter())
    key, word = ("num_agents", "agent") if sweep == "replicas" else ("num_envs", "replica")
    other = f"{rows[0][key]:,} {word}{'s' * (rows[0][key] != 1)}"
    axes.set_title(f"{rows[0]['game']}, {other}, {device}")
    axes.set_xlabel("replicas" if sweep == "replicas" else "agents of a replica")
    axes.set_ylabel("env-steps / s" if sweep == "replicas" else "agent-steps / s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas.savefig(out)
