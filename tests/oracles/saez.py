"""Oracle of economy's taxes by Saez's formula, in float64, written from ai-economist's description of its own."""

import numpy as np

BINS = 100


def smoothed_elasticity(incomes, rates, before, log):
    """The elasticity of the last period and what these incomes say of it; ``log`` is that of float32."""
    kept = (incomes > 0) & (rates < 1)
    if kept.sum() < 10 or rates[kept].astype(float).std() < 1e-6:
        return before
    x = np.array([log(np.float32(1) - rate) for rate in rates[kept]], float)
    y = np.array([log(max(income, np.float32(1e-9))) for income in incomes[kept]], float)
    slope = np.cov(x, y, bias=True)[0, 1] / x.var()
    return np.float32(0.02 * max(slope, 0) + 0.98 * float(before))


def bracket_rates(incomes, cutoffs, elasticity):
    """Mean rates within brackets by Saez's formula, with weights 1 / income; not yet limited."""
    incomes, cutoffs, elasticity = incomes.astype(float), np.array(cutoffs, float), float(elasticity)
    edges = np.linspace(0, cutoffs[-1], BINS + 1)
    middles, width, everybody = (edges[1:] + edges[:-1]) / 2, edges[1], len(incomes)
    beyond, below = incomes[incomes > edges[-1]], (incomes < 0).sum()
    counts = np.append(np.histogram(incomes, edges)[0], len(beyond))
    weights = np.append(counts[:-1] / np.maximum(1, middles), (1 / np.maximum(1, beyond)).sum())
    weights /= weights.sum() + below + 1e-9
    shares = counts / everybody
    from_edge = weights[::-1].cumsum()[::-1] / (shares[::-1].cumsum()[::-1] + 1e-9)
    mean_weight = np.append((from_edge[1:] + from_edge[:-1]) / 2, from_edge[-1])
    above_middle = np.clip(1 - (np.minimum(shares.cumsum() + below / everybody, 1) - shares / 2), 0, 1)
    pareto = np.append(middles * shares[:-1] / (above_middle[:-1] + 1e-9) / width, 0)
    if len(beyond):
        pareto[-1] = beyond.mean() / (beyond.mean() - edges[-1] + 1e-9)
    rates = (1 - mean_weight) / (1 - mean_weight + pareto * elasticity + 1e-9)
    known = np.append(np.flatnonzero(counts[:-1]), BINS)  # before the first one, on a line from 0
    rates = np.interp(np.arange(BINS + 1), np.append(-1, known), np.append(0, rates[known]))
    due = [(rates[:-1] * np.clip(cutoff - edges[:-1], 0, width)).sum() for cutoff in cutoffs]
    return np.append(np.diff(np.maximum(due, 0)) / np.diff(cutoffs), rates[-1])
