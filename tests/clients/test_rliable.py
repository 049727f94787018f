"""rliable, the library of Agarwal et al.: our interquartile mean over seeds and its interval are those it finds."""

import numpy as np
import pytest
from rliable import library, metrics

from gpu_vecenv.train.seed_statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize("shape", [(10, 1), (7, 3), (16, 2)])
def test_the_interquartile_mean_and_its_interval_are_those_of_rliable(shape):
    scores = np.random.default_rng(shape[0]).normal([100.0, -3.0, 7.0][: shape[1]], 2.0, shape)
    assert interquartile_mean(scores) == pytest.approx(metrics.aggregate_iqm(scores), rel=1e-12)
    repetitions = 5_000
    _, intervals = library.get_interval_estimates(
        {"ours": scores}, lambda table: np.array([metrics.aggregate_iqm(table)]), reps=repetitions
    )
    found = bootstrap_interval(scores, repetitions=repetitions)
    # Both are quantiles of random draws: over 50 seeds of ours they scatter by 1 % of the interval's width.
    width = found.high - found.low
    assert [found.low, found.high] == pytest.approx(intervals["ours"].ravel().tolist(), abs=0.06 * width)
