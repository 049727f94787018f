"""Oracle of generalised advantage estimates, in float64, one agent and one start step at a time; no recursion.

Schulman et al., "High-dimensional continuous control using generalized advantage estimation", 2016. With
delta(t) = r(t) + gamma V(t + 1) - V(t), the estimate at step t is the sum over k >= 0 of (gamma lambda)^k delta(t + k),
as far as the agent's episode goes (equation 16). The state after a terminated step is worth nothing; the one after a
truncated step, or after the last step seen, keeps its value. A step with both flags is terminated.

The same number is a mixture of returns less the value (Sutton and Barto, "Reinforcement learning", 2018, equations 12.2
and 12.3): the n-step return G(n) = r(t) + … + gamma^(n - 1) r(t + n - 1) + gamma^n V(t + n) has the weight
(1 - lambda) lambda^(n - 1), the longest one, of all N steps left, has lambda^(N - 1).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

HALF_ULP = 2.0**-24  # the most by which a float32 operation is off, relative to its result


class Estimates(NamedTuple):
    """``exact`` (steps,) float64, and how far float32 arithmetic may be from it."""

    exact: np.ndarray
    bounds: np.ndarray


def of_deltas(rewards, values, next_values, gamma, gae_lambda) -> Estimates:
    """One agent from some step to the end of its episode, each (steps,); next_values is 0 where it terminated.

    Bounds: in the usual recursion, trace(t) = delta(t) + gamma lambda trace(t + 1), the three parts of a delta meet at
    most 4 roundings: gamma's own, its product, the two sums. Entering the trace costs 1 more; each earlier step at
    most 5 more: of gamma, of lambda, of the two products, of a sum. Flags as factors add nothing, they are 0 and 1. So
    a part of delta(t + k) meets at most n = 5 (k + 1) roundings and is off by a share of at most n u / (1 - n u), u
    half an ulp (Higham, "Accuracy and stability of numerical algorithms", lemma 3.1).
    """
    steps = len(rewards)
    exact, bounds = np.zeros(steps), np.zeros(steps)
    for t in range(steps):
        for k in range(steps - t):
            parts = rewards[t + k], gamma * next_values[t + k], -values[t + k]
            roundings = 5 * (k + 1) * HALF_ULP
            exact[t] += (gamma * gae_lambda) ** k * sum(parts)
            bounds[t] += (gamma * gae_lambda) ** k * sum(map(abs, parts)) * roundings / (1 - roundings)
    return Estimates(exact, bounds)


def of_decisions(rewards, values, next_values, acting, gamma, gae_lambda) -> Estimates:
    """As ``of_deltas``, where the agent acts only in the steps that ``acting`` (steps,) marks.

    From decision to decision as in a semi-Markov process (Bradtke and Duff, "Reinforcement learning methods for
    continuous-time Markov decision problems", 1994): an agent that acts at step d, and next at step e, has
    delta(d) = r(d) + gamma r(d + 1) + … + gamma^(e - d - 1) r(e - 1) + gamma^(e - d) V(e) - V(d). The estimate at step
    t is the sum over its decisions from t on, d(0) = t, d(1), …, of gamma^(d(k) - t) lambda^k delta(d(k)). After the
    last one the state after the last step takes the place of V(e). A step without a decision is a start like one with.

    Bounds: as in ``of_deltas``, of the recursion that adds and subtracts the values between decisions too.
    """
    steps = len(rewards)
    exact, bounds = np.zeros(steps), np.zeros(steps)
    for t in range(steps):
        decisions = [t, *(d for d in range(t + 1, steps) if acting[d]), steps]
        for k, (d, e) in enumerate(pairwise(decisions)):
            value = values[e] if e < steps else next_values[-1]
            delta = sum(gamma ** (s - d) * rewards[s] for s in range(d, e)) + gamma ** (e - d) * value - values[d]
            exact[t] += gamma ** (d - t) * gae_lambda**k * delta
            for s in range(d, e):
                size = abs(rewards[s]) + abs(gamma * next_values[s]) + abs(values[s])
                roundings = 5 * (s - t + 1) * HALF_ULP
                bounds[t] += gamma ** (s - t) * gae_lambda**k * size * roundings / (1 - roundings)
    return Estimates(exact, bounds)


def of_returns(rewards, values, next_values, gamma, gae_lambda) -> np.ndarray:
    """The same as ``of_deltas(…).exact``, by the mixture of n-step returns."""
    steps = len(rewards)
    estimates = np.zeros(steps)
    for t in range(steps):
        left, paid = steps - t, 0.0
        for n in range(1, left + 1):
            paid += gamma ** (n - 1) * rewards[t + n - 1]
            weight = gae_lambda ** (left - 1) if n == left else (1 - gae_lambda) * gae_lambda ** (n - 1)
            estimates[t] += weight * (paid + gamma**n * next_values[t + n - 1])
        estimates[t] -= values[t]
    return estimates


def stretches(terminations, truncations, active) -> list[slice]:
    """Where one agent's steps, (steps,) each, belong together: unbroken activity, up to and with a flag."""
    found, start = [], None
    for t in range(len(active)):
        if start is not None and not active[t]:
            found.append(slice(start, t))
        start = (t if start is None else start) if active[t] else None
        if active[t] and (terminations[t] or truncations[t]):
            found.append(slice(start, t + 1))
            start = None
    return found if start is None else [*found, slice(start, len(active))]
