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
    """Two seeds of two tasks have 16 samples of equal probability: interquartile means 0 (5 of them), 5 (6), 10 (5).

    With seeds drawn for all tasks at once all means would be 5.
    """
    scores = np.array([[0.0, 10.0], [10.0, 0.0]])
    samples = []
    for a, b, c, d in itertools.product((0, 1), repeat=4):
        ordered = sorted([scores[a, 0], scores[b, 0], scores[c, 1], scores[d, 1]])
        samples.append(fmean(ordered[1:3]))
    assert sorted(samples) == [0.0] * 5 + [5.0] * 6 + [10.0] * 5
    # Bounds at 1/4 and 3/4, 7/16 and 9/16: a sixteenth or more from the ends of these, so that they are exact.
    for confidence, expected in ((1 / 2, (5, 0, 10)), (1 / 8, (5, 5, 5))):
        assert bootstrap_interval(scores, confidence=confidence, repetitions=20_000) == expected


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


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")], [[[1.0]]], 3.0, ["a"], [[1, 2], [3]], [10**400]])
def test_wrong_scores_are_refused(scores):
    for function in (interquartile_mean, bootstrap_interval):
        with pytest.raises(ConfigError, match=r"expected .*numbers"):
            function(scores)


def test_wrong_arguments_are_refused():
    for arguments, message in (
        ({"confidence": 1.0}, "confidence is 1.0; expected"),
        ({"confidence": None}, "confidence is None; expected"),
        ({"repetitions": 0}, "repetitions is 0.*; expected"),
        ({"seed": -1}, "seed is -1.*; expected"),
        ({"seed": "a"}, "seed is 'a'.*; expected"),
    ):
        with pytest.raises((ConfigError, TypeError, ValueError), match=message):
            bootstrap_interval([1.0, 2.0], **arguments)
