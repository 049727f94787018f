"""What a policy's networks read of a rollout beside the observations of the agents themselves."""

from __future__ import annotations

import torch

from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.learner_kernels import RowGather
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.rollout_storage import Rollout


class RolloutContext:
    """The ``Context`` of a policy's steps and samples.

    Args:
        policy: The policy.
        rollout: Its rollout.
        chunk: The largest number of samples at once.
    """

    def __init__(self, policy: Policy, rollout: Rollout, chunk: int = 1) -> None:
        self._agents, self._first = rollout.env.num_agents, policy.view.agents.start
        self._agent_ids, self._rows = policy.agent_ids, None
        self._states = None if policy.critic is None else rollout.critic_states()
        if self._states is not None:
            table = self._states[:-1].flatten(0, 1)
            self._rows = RowGather(rollout.env.functions, table, chunk)

    def of_step(self, t: int) -> Context:
        """Of observations (num_envs, agents of the policy, *obs_shape) of step t."""
        return Context(None if self._states is None else self._states[t][:, None])

    def of_samples(self, indices: torch.Tensor) -> Context:
        """Of samples at ``indices`` (n,) int64, which count through (T, E, A)."""
        state = None if self._rows is None else self._rows(indices // self._agents)
        return Context(state, indices % self._agents - self._first if self._agent_ids else None)
