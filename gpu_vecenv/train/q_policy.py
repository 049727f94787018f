"""QPolicy: acts epsilon-greedily by the Q values of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.train.distributions import masked
from gpu_vecenv.train.policy import Policy


class QPolicy(Policy):
    """Policy of one or more roles whose network's parameters are Q values of each choice, head after head.

    The Q value of an action of several heads is the sum over them. The network's values are not used. Acting greedily
    it takes the choices with the largest Q values; otherwise, of each head, with probability ``epsilon`` one of the
    allowed choices at random.

    Attributes:
        epsilon: () float32; a learner writes it before each rollout, and checkpoints have it.

    Args:
        game: The game.
        roles: The roles that use this policy, which have choices, not a Box.
        network: As for ``Policy``.
        settings: Further arguments of ``Policy``.

    Raises:
        ConfigError: As for ``Policy``.
    """

    epsilon: torch.Tensor
    torch_reason = "Q-learning"

    def __init__(self, game: Env, roles: Sequence[str], network: nn.Module, **settings: Any) -> None:
        super().__init__(game, roles, network, **settings)
        self.register_buffer("epsilon", torch.ones((), device=self.action_bounds.device))

    def distribution(
        self, outputs: torch.Tensor, action_mask: torch.Tensor | None, *, greedy: bool = False
    ) -> torch.Tensor:
        """Log-probabilities of the epsilon-greedy choices, or with ``greedy`` the Q values."""
        if greedy:
            return masked(outputs, action_mask)
        return epsilon_greedy(outputs, self.view.head_sizes, action_mask, self.epsilon)

    def state_values(
        self, outputs: torch.Tensor, values: torch.Tensor, action_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The Q values of the greedy choices."""
        return greedy_values(outputs, self.view.head_sizes, action_mask)


def epsilon_greedy(
    q_values: torch.Tensor,
    head_sizes: Sequence[int],
    action_mask: torch.Tensor | None,
    epsilon: torch.Tensor,
) -> torch.Tensor:
    """Log-probabilities of each head's choices: ``epsilon`` evenly for the allowed ones, the rest for the best.

    Choices without any probability have the least float. Where a Q value is NaN so is its log-probability, which makes
    an invalid action.

    Args:
        q_values: (…, n) float32.
        head_sizes: Of n in all.
        action_mask: (…, n) bool; None: all choices are allowed.
        epsilon: () float32, in [0, 1].
    """
    sizes, least = list(head_sizes), torch.finfo(q_values.dtype).min
    allowed = torch.ones_like(q_values, dtype=torch.bool) if action_mask is None else action_mask
    heads = []
    for q, own in zip(masked(q_values, action_mask).split(sizes, -1), allowed.split(sizes, -1), strict=True):
        even = epsilon / own.sum(-1, keepdim=True).clamp(min=1)
        best = torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1)
        log_probs = (even + (1 - epsilon) * best).log().clamp(min=least)
        heads.append(torch.where(q.isnan(), q, log_probs))
    return masked(torch.cat(heads, -1), action_mask)


def greedy_values(
    q_values: torch.Tensor, head_sizes: Sequence[int], action_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest Q value (…) of the allowed choices, summed over the heads; of a head without any it is 0."""
    heads = [head.amax(-1) for head in masked(q_values, action_mask).split(list(head_sizes), -1)]
    return _summed(heads, head_sizes, action_mask)


def chosen_values(
    q_values: torch.Tensor, actions: torch.Tensor, head_sizes: Sequence[int], action_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The Q values (rows,) of actions (rows, heads) int, summed over the heads; of a head without choices it is 0."""
    heads = []
    for head, part in enumerate(q_values.split(list(head_sizes), -1)):
        taken = torch.arange(part.shape[-1], device=part.device) == actions[:, head, None]
        heads.append(torch.where(taken, part, 0).sum(-1))  # whose gradient needs no atomics, as that of gather does
    return _summed(heads, head_sizes, action_mask)


def _summed(heads: Sequence[torch.Tensor], head_sizes: Sequence[int], action_mask: torch.Tensor | None) -> torch.Tensor:
    if action_mask is not None:
        exist = [mask.any(-1) for mask in action_mask.split(list(head_sizes), -1)]
        heads = [torch.where(own, head, 0) for head, own in zip(heads, exist, strict=True)]
    return sum(heads[1:], heads[0])
