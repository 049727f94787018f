"""Distributions over actions in torch: masks, log-probabilities, entropies, squashing.

The reference of ``distribution`` in ``cuda/learner/learner.cu``. B is the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from gpu_vecenv.engine.sampler import Squash

LEAST_DRAW, MOST_DRAW = 2.0**-126, 1 - 2.0**-24  # of Beta distributions, as in beta.cuh


def masked(logits: torch.Tensor, action_mask: torch.Tensor | None) -> torch.Tensor:
    """Logits that give probability 0 to the choices that ``action_mask`` (same shape, bool) forbids."""
    # Not -inf: a head without any allowed choice, which some agents have, would give NaN, also in the gradient.
    return logits if action_mask is None else logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


def log_probs_and_entropies(
    logits: torch.Tensor, actions: torch.Tensor, head_sizes: Sequence[int], action_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, (B,) float32 each, summed over the heads.

    ``actions`` are (B, heads), ``logits`` (B, sum(head_sizes)). A head without a choice that ``action_mask`` (same
    shape as the logits) allows adds nothing.
    """
    actions = actions.clamp(min=0).long()  # the sampler returns -1 for NaN logits; their log-probability is NaN
    log_probs = logits.new_zeros(len(logits))
    entropies = logits.new_zeros(len(logits))
    masks = [None] * len(head_sizes) if action_mask is None else action_mask.split(list(head_sizes), dim=-1)
    for head, (part, mask) in enumerate(zip(logits.split(list(head_sizes), dim=-1), masks, strict=True)):
        all_log_probs = masked(part, mask).log_softmax(-1)
        log_prob = all_log_probs.gather(-1, actions[:, head, None]).squeeze(-1)
        finite = all_log_probs.clamp(min=-1e30)  # a forbidden choice adds 0 * this; no weight makes it overflow
        entropy = -(all_log_probs.exp() * finite).sum(-1)
        if mask is not None:
            exists = mask.any(-1)
            log_prob, entropy = torch.where(exists, log_prob, 0), torch.where(exists, entropy, 0)
        log_probs, entropies = log_probs + log_prob, entropies + entropy
    return log_probs, entropies


def has_log_std(squash: Squash) -> bool:
    """Whether a default network has means as outputs and log standard deviations as parameters, or only outputs."""
    return squash != "beta"


def box_log_probs_and_entropies(
    parameters: torch.Tensor, draws: torch.Tensor, squash: Squash
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, (B,) float32 each, summed over the k numbers of an action.

    ``draws`` are (B, k), ``parameters`` (B, 2k); those of a Gaussian unless ``squash`` is "beta".
    """
    of_kind = beta_log_probs_and_entropies if squash == "beta" else gaussian_log_probs_and_entropies
    return of_kind(parameters, draws, squash)


def gaussian_log_probs_and_entropies(
    parameters: torch.Tensor, draws: torch.Tensor, squash: Squash
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, (B,) float32 each, summed over the k actions.

    ``draws`` are Gaussian samples (B, k), ``parameters`` means and log standard deviations (B, 2k). With "clip" the
    density is that of the sample before clipping, so that samples outside the bounds still have a gradient. With "tanh"
    it is that of tanh(sample) (Haarnoja et al., "Soft actor-critic", 2018, appendix C), in a form that keeps its
    precision where tanh is near 1. The entropy is that of the Gaussian in both cases.
    """
    means, log_stds = parameters.chunk(2, -1)
    scaled = (draws - means) * (-log_stds).exp()
    log_probs = -0.5 * scaled.square() - log_stds - 0.5 * math.log(2 * math.pi)
    if squash == "tanh":
        log_probs = log_probs - 2 * (math.log(2) - draws - nn.functional.softplus(-2 * draws))
    entropies = log_stds + 0.5 * math.log(2 * math.pi * math.e)
    return log_probs.sum(-1), entropies.sum(-1)


def concentrations(parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters alpha and beta (…, k) of Beta distributions, at least 1, from a network's outputs (…, 2k).

    Chou et al., "Improving stochastic policy gradients in continuous control with deep reinforcement learning using the
    Beta distribution", 2017: 1 + softplus, so that densities have one mode and no poles.
    """
    alphas, betas = (1 + nn.functional.softplus(parameters)).chunk(2, -1)
    return alphas, betas


def beta_log_probs_and_entropies(
    parameters: torch.Tensor, draws: torch.Tensor, squash: Squash = "beta"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of Beta distributions, (B,) float32 each, summed over the k actions.

    ``draws`` are (B, k), inside (0, 1); ``parameters`` are those of ``concentrations``, (B, 2k). Densities are those of
    the draw: those of the action would differ by a constant, the logarithm of the Box's width.
    """
    # In float64: terms of large concentrations cancel.
    alphas, betas = concentrations(parameters.double())
    both, draws = alphas + betas, draws.double()
    log_norms = torch.lgamma(alphas) + torch.lgamma(betas) - torch.lgamma(both)
    log_probs = (alphas - 1) * draws.log() + (betas - 1) * (-draws).log1p() - log_norms
    slopes = [(x - 1) * torch.digamma(x) for x in (alphas, betas)]
    entropies = log_norms - slopes[0] - slopes[1] + (both - 2) * torch.digamma(both)
    return log_probs.sum(-1).float(), entropies.sum(-1).float()


def mean_draws(parameters: torch.Tensor, squash: Squash) -> torch.Tensor:
    """Draws (…, k) of a policy that does not sample: the mean of the Gaussian, or of the Beta distribution."""
    if squash == "beta":
        alphas, betas = concentrations(parameters)
        return alphas / (alphas + betas)
    return parameters.chunk(2, -1)[0]


def random_draws(parameters: torch.Tensor, squash: Squash, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws (…, k) of the distributions with these parameters (…, 2k), by a generator on their device."""
    if squash == "beta":
        gammas = [torch._standard_gamma(x, generator=generator) for x in concentrations(parameters)]
        return (gammas[0] / (gammas[0] + gammas[1])).clamp(LEAST_DRAW, MOST_DRAW)
    means, log_stds = parameters.chunk(2, -1)
    return means + log_stds.exp() * torch.empty_like(means).normal_(generator=generator)


def squashed(draws: torch.Tensor, action_bounds: torch.Tensor, squash: Squash) -> torch.Tensor:
    """Draws (…, k) as actions in the Box ``action_bounds`` (2, k)."""
    low, high = action_bounds
    inside = draws.clamp(-1, 1)
    if squash != "clip":
        inside = draws.tanh() if squash == "tanh" else 2 * draws - 1
    middle, half = low / 2 + high / 2, high / 2 - low / 2  # halved before the sum: a wide Box must not overflow
    return torch.clamp(middle + half * inside, low, high)
