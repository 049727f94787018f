"""Random play: parameters from which a sampler draws every allowed choice with the same probability."""

from __future__ import annotations

import torch

from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.step_buffers import StepBuffers


class UniformParameters:
    """Parameters of a sampler for random play: 0, of choices that the action mask forbids -inf.

    Attributes:
        tensor: (num_envs, num_agents, num_parameters) f32.

    Args:
        sampler: That draws from them.
        buffers: Of the steps of its environment, with the mask of the coming one.
    """

    def __init__(self, sampler: Sampler, buffers: StepBuffers) -> None:
        env = sampler.env
        self.tensor = torch.zeros((env.num_envs, env.num_agents, sampler.num_parameters), device=env.device)
        self._mask, action = buffers.action_mask, env.game.layout.action
        self._is_discrete = torch.ones((env.num_agents, 1), dtype=torch.bool, device=env.device)
        for role in action.bounds:  # their parameters are means and deviations
            self._is_discrete[env.game.layout.role_slices[role]] = False
        self._mixed = bool(action.bounds)
        self._numbers = self.tensor.new_tensor(0.0), self.tensor.new_tensor(-torch.inf)

    def refresh(self) -> None:
        """Follow the mask of the last step or reset; nothing of games without masks."""
        if self._mask is None:
            return
        allowed = self._mask | ~self._is_discrete if self._mixed else self._mask
        torch.where(allowed, *self._numbers, out=self.tensor[..., : allowed.shape[-1]])
