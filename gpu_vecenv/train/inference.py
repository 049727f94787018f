"""What an exported file computes of a policy, as a module of torch: normalisation, network and most likely actions."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.distributions import masked, mean_draws, squashed
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.normalizers import OBS_CLIP, unit_scaled
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.recurrent import RecurrentTower


class _Inference(nn.Module):
    """Normalisation, network and actions, in float32 on the CPU.

    Args:
        policy: The policies of a game.
        one: Which of them; it is copied.
    """

    mean: torch.Tensor
    std: torch.Tensor
    action_bounds: torch.Tensor

    def __init__(self, policy: GamePolicy, one: Policy) -> None:
        super().__init__()
        self.network = copy.deepcopy(one.network).cpu().eval().requires_grad_(False)
        self.normalizes = one.obs_normalizer is not None
        if one.obs_normalizer is not None:
            mean, std = (x.detach().cpu() for x in one.obs_normalizer.statistics())
            self.register_buffer("mean", mean)
            self.register_buffer("std", std)
        self.register_buffer("action_bounds", one.action_bounds.cpu())
        self.obs_scale = one.obs_scale
        self.flattens, self.obs_axes = isinstance(one.network, Tower | RecurrentTower), len(one.view.obs_shape)
        self.continuous, self.squash = one.view.continuous, one.squash
        self.head_sizes, self.has_heads = list(one.view.head_sizes), bool(policy.game.layout.action.shape)

    def _inputs(self, obs: torch.Tensor) -> torch.Tensor:
        """What the network gets."""
        if self.normalizes:
            obs = ((obs - self.mean) / self.std).clamp(-OBS_CLIP, OBS_CLIP)
        else:
            obs = unit_scaled(obs, self.obs_scale)
        return obs.flatten(obs.ndim - self.obs_axes) if self.flattens else obs

    def _actions(self, parameters: torch.Tensor, action_mask: torch.Tensor | None) -> torch.Tensor:
        """The most likely ones."""
        if self.continuous:
            return squashed(mean_draws(parameters, self.squash), self.action_bounds, self.squash)
        logits = masked(parameters, action_mask).split(self.head_sizes, -1)
        heads = [x.argmax(-1).int() for x in logits]
        return torch.stack(heads, -1) if self.has_heads else heads[0]


class InferencePolicy(_Inference):
    """Of a policy without a state."""

    def __init__(self, policy: GamePolicy, one: Policy) -> None:
        super().__init__(policy, one)
        self.is_actor = one.critic is not None

    def forward(self, obs: torch.Tensor, action_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Most likely actions and the parameters of their distribution.

        Args:
            obs: (rows, *obs_shape) float32 or uint8.
            action_mask: (rows, n) bool, for games with masks.

        Returns:
            Actions (rows[, heads]) int32 or (rows, k) float32, and parameters (rows, n) float32, before any mask.
        """
        outputs = self.network(self._inputs(obs))
        parameters = (outputs if self.is_actor else outputs[0]).float()
        return self._actions(parameters, action_mask), parameters


class RecurrentInferencePolicy(_Inference):
    """Of a recurrent policy."""

    def forward(
        self, obs: torch.Tensor, state: torch.Tensor, action_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Most likely actions, the parameters of their distribution and the next state.

        Args:
            obs: (rows, *obs_shape) float32 or uint8.
            state: (rows, recurrent_state_size) float32: the next state of the call before, and 0 where ``obs`` is the
                first of an episode.
            action_mask: (rows, n) bool, for games with masks.

        Returns:
            Actions and parameters as of ``InferencePolicy``, and the next state, like ``state``.
        """
        parameters, *_, next_state = self.network(self._inputs(obs), state)
        parameters = parameters.float()
        return self._actions(parameters, action_mask), parameters, next_state.float()
