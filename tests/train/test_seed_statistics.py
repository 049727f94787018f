"""Statistics over seeds: compared with the definitions of Agarwal et al. 2021, written out."""

import itertools
from statistics import fmean

import numpy as np
import pytest

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.seed_statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0, 9.0], 4.0),  # a quarter of three, rounded down, is none
        ([100.0, 3.0, 1.0, 2.0], 2.5),
        ([9.0, 1.0, 4.0, 2.0, 3.0], 3.0),
        ([0, 1, 2, 3, 4, 5, 6, 700], 3.5),
        ([[0, 1, 2, 3], [4, 5, 6, 700]], 3.5),  # of all tasks together, as rliable's
    ],
)
def test_an_interquartile_mean_leaves_out_a_quarter_at_each_end(scores, expected):
    assert interquartile_mean(scores) == expected
    assert bootstrap_interval(scores, repetitions=10).value == expected


def test_a_stratified_bootstrap_draws_seeds_of_each_task_by_itself():
    """Two seeds of two tasks have 16 samples of equal probability, whose interquartile means are a distribution.

    With seeds drawn for all tasks at once there would be 4, and none with the mean of scores 0, 0, 30, 30.
    """
    scores = np.array([[0.0, 10.0], [4.0, 30.0]])
    samples = []
    for a, b, c, d in itertools.product((0, 1), repeat=4):
        ordered = sorted([scores[a, 0], scores[b, 0], scores[c, 1], scores[d, 1]])
        samples.append(fmean(ordered[1:3]))
    for confidence in (7 / 16, 11 / 16, 15 / 16):
        found = bootstrap_interval(scores, confidence=confidence, repetitions=20_000)
        # Atoms have multiples of 1/16, and bounds lie at odd multiples of 1/32: never at an edge, so they are exact.
        expected = np.quantile(np.repeat(samples, 1250), [(1 - confidence) / 2, (1 + confidence) / 2])
        assert [found.low, found.high] == pytest.approx(expected, abs=1e-12)


def test_an_interval_is_a_function_of_its_arguments():
    scores = np.random.default_rng(5).normal(size=(9, 3))
    one = bootstrap_interval(scores, repetitions=3000)
    assert one == bootstrap_interval(scores, repetitions=3000) != bootstrap_interval(scores, repetitions=3000, seed=1)
    assert one.low < one.value < one.high
    wide = bootstrap_interval(scores, repetitions=3000, confidence=0.99)
    assert wide.low < one.low and one.high < wide.high
    assert bootstrap_interval([2.0]) == (2, 2, 2)


def test_memory_is_bounded_without_a_change_of_the_draws(monkeypatch):
    scores = np.arange(12.0).reshape(4, 3)
    whole = bootstrap_interval(scores, repetitions=100)
    monkeypatch.setattr("gpu_vecenv.train.seed_statistics.CHUNK", 7 * 12)
    assert bootstrap_interval(scores, repetitions=100) == whole


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")], [[[1.0]]], 3.0, ["a"], [[1, 2], [3]]])
def test_wrong_scores_are_refused(scores):
    for function in (interquartile_mean, bootstrap_interval):
        with pytest.raises(ConfigError, match=r"expected .*numbers"):
            function(scores)


def test_wrong_arguments_are_refused():
    for arguments, message in (({"confidence": 1.0}, "confidence is 1.0"), ({"repetitions": 0}, "repetitions is 0")):
        with pytest.raises((ConfigError, ValueError), match=message):
            bootstrap_interval([1.0, 2.0], **arguments)
