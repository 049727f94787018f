"""Running statistics of observations and returns, with which a policy's network computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpu_vecenv.declare.obs_parts import EntityList
from gpu_vecenv.engine.running_statistics import merge_moments

VAR_EPS = 1e-8  # added to variances
OBS_CLIP = 10.0  # normalised observations are clamped to [-OBS_CLIP, OBS_CLIP]: limits the influence of outliers


def unit_scaled(obs: torch.Tensor, scale: float) -> torch.Tensor:
    """Observations in float32, of which uint8 is divided by ``scale``, that of ``ObservationLayout``."""
    return obs.float() / scale if obs.dtype == torch.uint8 else obs


class Normalizer(nn.Module):
    """Running mean and variance of all rows seen, weighted equally; float64 buffers, saved with the policy.

    Args:
        shape: Shape of one row.
        entities: Lists of entities in a row. Each is normalised with the statistics of all entities of its list, so
            that their order does not matter, and a presence feature stays as it is.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: Sequence[int] = (), entities: Sequence[EntityList] = ()) -> None:
        super().__init__()
        self.entities = tuple(entities)
        for index, one in enumerate(self.entities):
            self.register_buffer(f"columns_{index}", torch.tensor(one.columns), persistent=False)
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer(
            "count", torch.tensor(1e-4, dtype=torch.float64)
        )  # weight of the initial mean and variance

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation, (*shape) float32."""
        return (self.var + VAR_EPS).sqrt().float()

    def moments(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Count, sum and sum of squares of the deviations from the mean, (1 + 2 * size,) float64.

        Of ``rows`` (n, *shape) where ``mask`` (n,) bool is True. Moments of several batches or processes are summed.
        """
        deviations = torch.where(mask.view(-1, *[1] * self.mean.ndim), rows.double() - self.mean, 0)
        return torch.cat([mask.sum()[None].double(), deviations.sum(0).flatten(), deviations.square().sum(0).flatten()])

    def update_from_moments(self, moments: torch.Tensor) -> None:
        """Update from the moments of a batch; nothing changes if it has no rows or its moments are not finite."""
        moments = torch.where(moments.isfinite().all(), moments, 0)
        size = moments[0]
        delta, squares = (moments[1:] / size.clamp(min=1)).view(2, *self.mean.shape)
        var = (squares - delta.square()).clamp(min=0)
        own = (self.mean, self.var, self.count)
        for old, new in zip(own, merge_moments(*own, size, delta, var), strict=True):
            old.copy_(new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (…, *shape) with mean 0 and variance 1, clamped to [-10, 10], float32."""
        mean, std = self.statistics()
        return ((x - mean) / std).clamp(-OBS_CLIP, OBS_CLIP)

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows are normalised with: mean and standard deviation, (*shape) float32 each."""
        if not self.entities:
            return self.mean.float(), self.std
        mean, var = self.mean.clone(), self.var.clone()
        for index, one in enumerate(self.entities):
            columns: torch.Tensor = getattr(self, f"columns_{index}")
            means, variances = mean[columns], var[columns]  # (count, features)
            center = means.mean(0)
            variance = variances.mean(0) + (means - center).square().mean(0)
            for statistic, of_list in ((mean, center), (var, variance)):
                statistic.index_copy_(0, columns.flatten(), of_list.repeat(one.count))
            if one.presence is not None:
                mean.index_fill_(0, columns[:, one.presence], 0)
                var.index_fill_(0, columns[:, one.presence], 1)
        return mean.float(), (var + VAR_EPS).sqrt().float()


class ValueNorm(Normalizer):
    """Statistics of returns whose weights decay, without the bias of a mean that begins at 0.

    As in the reference implementation of Yu et al., "The surprising effectiveness of PPO in cooperative, multi-agent
    games", 2022. ``count`` is the sum of the weights.

    Args:
        beta: What remains of a weight at each update.
    """

    sums: torch.Tensor
    least_var, least_count = 0.01, 1e-5

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))  # weighted, of returns and their squares
        self.var.fill_(self.least_var)
        self.count.zero_()

    def update_from_moments(self, moments: torch.Tensor, times: int = 1) -> None:
        """Update, so many times, from the count, sum and sum of squares of returns, (3,) float64.

        Nothing changes if there are none, or if the moments are not finite.
        """
        usable = moments.isfinite().all() & (moments[0] > 0)
        weight = self.beta**times
        means = moments[1:] / moments[0].clamp(min=1)
        sums, count = weight * self.sums + (1 - weight) * means, weight * self.count + (1 - weight)
        mean, square = sums / count.clamp(min=self.least_count)
        found = (sums, count, mean, (square - mean.square()).clamp(min=self.least_var))
        for old, new in zip((self.sums, self.count, self.mean, self.var), found, strict=True):
            old.copy_(torch.where(usable, new, old))
