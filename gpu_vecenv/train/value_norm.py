"""The update of MAPPO's statistics of returns from a rollout, and of the rollout's values with them."""

from __future__ import annotations

import torch

from gpu_vecenv.train.env_ranges import EnvRanges
from gpu_vecenv.train.normalizer_kernels import moments_launch
from gpu_vecenv.train.normalizers import ValueNorm
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.rollout_storage import Rollout


class ValueNormUpdate:
    """The update of a policy's ``ValueNorm`` from a rollout, before its first minibatch.

    The critic's outputs stay as they are, so that values of the rollout change with the statistics.

    Args:
        policy: Its return normalizer is a ``ValueNorm``.
        rollout: The samples.
        indices: (rows,) int64, those of the policy, which count through (T, E, A).
        num_updates: Minibatches of an iteration; the statistics take in the rollout's returns with each of them.
        envs: The environments in which the policy acts.

    Attributes:
        add_samples: Adds the moments of the active samples' returns to ``moments``.
        moments: (3,) float64: count, sum and sum of squares. Those of several processes are summed before ``apply``.
    """

    def __init__(
        self, policy: Policy, rollout: Rollout, indices: torch.Tensor, num_updates: int, envs: EnvRanges
    ) -> None:
        assert isinstance(policy.return_normalizer, ValueNorm)
        self._normalizer, self._num_updates = policy.return_normalizer, num_updates
        self._values = [rollout.values[:-1, own] for own in envs.slices]
        self._agents = policy.view.agents
        zeros = torch.zeros(1, dtype=torch.int64, device=indices.device)
        self.add_samples, self.moments = moments_launch(
            rollout.env.functions,
            rollout.returns.view(-1, 1),
            zeros,
            indices,
            rollout.learned,
            torch.zeros(1, dtype=torch.float64, device=indices.device),
        )

    def apply(self) -> None:
        """Update the statistics, express the rollout's values by them, and set the moments to 0."""
        normalizer, values = self._normalizer, [part[:, :, self._agents] for part in self._values]
        outputs = [(part - normalizer.mean.float()) / normalizer.std for part in values]
        normalizer.update_from_moments(self.moments, self._num_updates)
        for part, of_part in zip(self._values, outputs, strict=True):
            part[:, :, self._agents] = of_part * normalizer.std + normalizer.mean.float()
        self.moments.zero_()
