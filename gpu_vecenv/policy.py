"""Actor-critic modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from gpu_vecenv.env import Env
from gpu_vecenv.errors import ConfigError


class ActorCritic(nn.Module):
    """A multi-layer perceptron with tanh units that ends in logits and a value.

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened, uint8 is scaled to [0, 1].
        num_logits: Outputs of the actor.
        hidden_sizes: Units of each hidden layer.

    Weights are orthogonal, with gains as in Andrychowicz et al., "What matters in on-policy reinforcement learning?",
    2021: sqrt(2) inside, 0.01 for the logits, 1 for the value.
    """

    def __init__(self, obs_shape: Sequence[int], num_logits: int, hidden_sizes: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.obs_shape = tuple(obs_shape)
        sizes = [math.prod(self.obs_shape), *hidden_sizes]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [_orthogonal(nn.Linear(inputs, outputs), math.sqrt(2)), nn.Tanh()]
        self.trunk = nn.Sequential(*layers)
        self.actor = _orthogonal(nn.Linear(sizes[-1], num_logits), 0.01)
        self.critic = _orthogonal(nn.Linear(sizes[-1], 1), 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> logits (…, num_logits) and values (…), both f32."""
        rows = obs.flatten(obs.ndim - len(self.obs_shape))
        features = self.trunk(rows.float() / 255 if obs.dtype == torch.uint8 else rows)
        return self.actor(features), self.critic(features).squeeze(-1)


def default_policy(game: Env, hidden_sizes: Sequence[int]) -> ActorCritic:
    """The policy that all agents of a game share.

    Raises:
        ConfigError: The game's actions are continuous, or its roles have different action sizes.
    """
    if game.action.continuous or len(set(game.action.sizes.values())) > 1:
        raise ConfigError(
            f"{type(game).__name__} has actions {game.action_space}; one shared policy needs the same discrete "
            "actions for all roles"
        )
    return ActorCritic(game.observation.shape, game.action.num_logits, hidden_sizes)


def masked(logits: torch.Tensor, action_mask: torch.Tensor | None) -> torch.Tensor:
    """Logits in which choices that ``action_mask`` (same shape, bool) forbids have probability 0."""
    # Not -inf: a row without any choice, as of an agent without some head, would become NaN and its gradient too.
    return logits if action_mask is None else logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


def log_probs_and_entropies(
    logits: torch.Tensor, actions: torch.Tensor, head_sizes: Sequence[int], action_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of actions (B, heads) under logits (B, sum(head_sizes)), summed over the heads: two (B,) f32 tensors.

    A head that a row lacks, one without a choice that ``action_mask`` (same shape as the logits) allows, adds nothing.
    """
    actions = actions.clamp(min=0).long()  # -1 has no distribution: its logits are NaN, and so is its log-probability
    log_probs = logits.new_zeros(len(logits))
    entropies = logits.new_zeros(len(logits))
    masks = [None] * len(head_sizes) if action_mask is None else action_mask.split(list(head_sizes), dim=-1)
    for head, (part, mask) in enumerate(zip(logits.split(list(head_sizes), dim=-1), masks, strict=True)):
        all_log_probs = masked(part, mask).log_softmax(-1)
        log_prob = all_log_probs.gather(-1, actions[:, head, None]).squeeze(-1)
        finite = all_log_probs.clamp(min=torch.finfo(all_log_probs.dtype).min)  # an excluded choice adds 0 * -inf
        entropy = -(all_log_probs.exp() * finite).sum(-1)
        if mask is not None:
            exists = mask.any(-1)
            log_prob, entropy = torch.where(exists, log_prob, 0), torch.where(exists, entropy, 0)
        log_probs, entropies = log_probs + log_prob, entropies + entropy
    return log_probs, entropies


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
