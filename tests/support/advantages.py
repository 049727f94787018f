"""Inputs of the advantage estimators: every pattern of endings over a few steps, and the episodes in them."""

import itertools
from typing import NamedTuple

import numpy as np
from oracles.gae import stretches

FACTORS = [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.7), (0.5, 1.0)]  # gamma, lambda
ALIVE = ("continue", "terminate", "truncate")
JUNK = np.float32(1e30)  # where a number must not matter; finite, as those of any network that is still of use


class Given(NamedTuple):
    """Arguments of ``advantages``, each (steps, …)."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    active: np.ndarray


def patterned(kinds, horizon):
    """Random numbers for every pattern of ``kinds`` over ``horizon`` steps, one a column."""
    patterns = np.array(list(itertools.product(kinds, repeat=horizon))).T
    random = np.random.default_rng(3).normal(size=(3, *patterns.shape)).astype(np.float32)
    rewards, values, next_values = random
    active = patterns != "inactive"
    terminations, truncations = (np.isin(patterns, [kind, "both"]) for kind in ("terminate", "truncate"))
    goes_on = (patterns[:-1] == "continue") & active[1:]
    next_values[:-1][goes_on] = values[1:][goes_on]  # elsewhere they are of a state that has no row
    next_values[terminations] = JUNK
    random[:, ~active] = JUNK
    return Given(rewards, values, next_values, terminations, truncations, active)


def episodes_of(given):
    """Column, steps, and the three float64 rows of each stretch of activity; nothing is worth what was terminated."""
    exact = [x.astype(np.float64) for x in given[:3]]
    exact[2][given.terminations] = 0
    for column in range(given.rewards.shape[1]):
        for steps in stretches(*(x[:, column] for x in given[3:])):
            yield column, steps, [x[steps, column] for x in exact]
