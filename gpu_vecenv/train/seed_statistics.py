"""Statistics over seeds: the interquartile mean and its stratified bootstrap interval.

As Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice", 2021, define them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpu_vecenv.declare.arguments import check_number
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import ConfigError

CHUNK = 1 << 22  # numbers that are resampled at a time


class Interval(NamedTuple):
    """A statistic with its confidence interval."""

    value: float
    low: float
    high: float


def interquartile_mean(scores: ArrayLike) -> float:
    """The mean of the middle half of all scores: a quarter of them, rounded down, is left out at each end.

    Args:
        scores: Finite numbers, (seeds,) or (seeds, tasks), in units in which tasks can be compared.

    Raises:
        ConfigError: There are no scores, or one of them is not finite.

    Example:
        >>> interquartile_mean([100.0, 3.0, 1.0, 2.0])
        2.5
    """
    return float(_interquartile_means(_checked(scores).reshape(1, -1))[0])


def bootstrap_interval(
    scores: ArrayLike, *, confidence: float = 0.95, repetitions: int = 50_000, seed: int = 0
) -> Interval:
    """The interquartile mean with its percentile interval by the stratified bootstrap.

    Each repetition draws, for each task by itself, as many seeds as there are, with replacement; the interval lies
    between quantiles of their interquartile means. With a single seed it has no width, and with few it is too narrow.

    Args:
        scores: Finite numbers, (seeds,) or (seeds, tasks).
        confidence: Of the interval, in (0, 1).
        repetitions: Number of bootstrap samples.
        seed: Of the draws: the result is a function of the arguments.

    Raises:
        ConfigError: There are no scores, one is not finite, or ``confidence`` is out of range.
        TypeError, ValueError: ``repetitions`` is no positive int, or ``seed`` no int that is not negative.
    """
    table = _checked(scores)
    repetitions = validate_int("repetitions", repetitions, 1)
    check_number("confidence", confidence, lambda x: 0 < x < 1, "a number between 0 and 1, such as 0.95", ConfigError)
    seeds, tasks = table.shape
    generator, means = np.random.default_rng(validate_int("seed", seed, 0)), np.empty(repetitions)
    step = max(1, CHUNK // table.size)
    for first in range(0, repetitions, step):
        count = min(step, repetitions - first)
        rows = generator.integers(seeds, size=(count, seeds, tasks))
        drawn = table[rows, np.arange(tasks)]  # of each task its own seeds
        means[first : first + count] = _interquartile_means(drawn.reshape(count, -1))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(interquartile_mean(table), float(low), float(high))


def _interquartile_means(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row of (n, scores)."""
    cut = math.floor(0.25 * samples.shape[1])
    kept: NDArray[np.float64] = np.sort(samples, axis=1)[:, cut : samples.shape[1] - cut]
    means: NDArray[np.float64] = kept.mean(axis=1)
    return means


def _checked(scores: ArrayLike) -> NDArray[np.float64]:
    """The scores as (seeds, tasks)."""
    try:
        table = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"scores are {scores!r:.80}; expected numbers (seeds,) or (seeds, tasks): {error}") from error
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ConfigError(f"scores are {scores!r:.80}; expected finite numbers, (seeds,) or (seeds, tasks)")
    return table
