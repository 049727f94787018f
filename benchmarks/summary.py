"""Medians and quartiles of repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_vecenv.engine.timing import quartiles


def spread(values: Sequence[float], digits: int) -> dict[str, Any]:
    """Median, and lower and upper quartile, rounded to significant digits."""
    lower, median, upper = quartiles(values)
    return {"median": _rounded(median, digits), "quartiles": [_rounded(lower, digits), _rounded(upper, digits)]}


def compared(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one workload from the repeats of both sides; a ratio is that of one repeat and its neighbour."""
    rates = {name: [r["env_steps"] / r["seconds"] for r in side] for name, side in (("ours", ours), ("theirs", theirs))}
    ratios = [mine / other for mine, other in zip(rates["ours"], rates["theirs"], strict=True)]
    first = min(repeat["started"] for repeat in (*ours, *theirs))
    raw = {
        f"{name}_{key}": [round(repeat[source] - zero, 6) for repeat in side]
        for name, side in (("ours", ours), ("theirs", theirs))
        for key, source, zero in (("started_s", "started", first), ("seconds", "seconds", 0.0))
    }
    return {
        **{f"{name}_env_steps_per_s": spread(values, 4) for name, values in rates.items()},
        "ratio": spread(ratios, 3),
        **raw,
        "ours_env_steps_per_repeat": ours[0]["env_steps"],
        "theirs_env_steps_per_repeat": theirs[0]["env_steps"],
    }


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
