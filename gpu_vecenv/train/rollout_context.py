"""What a policy's networks read of a rollout beside the observations of the agents themselves."""

from __future__ import annotations

import torch

from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.env_ranges import EnvRanges, all_envs
from gpu_vecenv.train.learner_kernels import RowGather
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.rollout_storage import Rollout


class RolloutContext:
    """The ``Context`` of a policy's steps and samples.

    Args:
        policy: The policy.
        rollout: Its rollout.
        chunk: The largest number of samples at once.
        envs: The environments in which the policy acts; None: all.
    """

    def __init__(self, policy: Policy, rollout: Rollout, chunk: int = 1, envs: EnvRanges | None = None) -> None:
        self._envs = envs or all_envs(rollout.env.num_envs)
        self._num_agents, self._agents, self._rows = rollout.env.num_agents, policy.view.agents, None
        self._positions = policy.view.positions() if policy.agent_ids else None
        self._states = None if policy.critic is None else rollout.critic_states()
        if self._states is not None:
            self._agents_per_state = (
                self._num_agents // self._states.shape[2]
            )  # agents of an environment with one state
            self._rows = RowGather(rollout.env.functions, self._states[:-1].flatten(0, 2), chunk)

    def of_step(self, t: int) -> Context:
        """Of observations (num_envs, agents of the policy, *obs_shape) of step t, in the policy's environments."""
        if self._states is None:
            return Context()
        states = self._envs.of(self._states[t])
        return Context(states if states.shape[1] == 1 else states[:, self._agents])

    def of_steps(self, steps: slice, envs: slice) -> Context:
        """Of observations (steps, envs, agents of the policy, *obs_shape), of a policy with a central critic."""
        assert self._states is not None
        states = self._states[steps, envs]
        return Context(states if states.shape[2] == 1 else states[:, :, self._agents])

    def of_samples(self, indices: torch.Tensor) -> Context:
        """Of samples at ``indices`` (n,) int64, which count through (T, E, A)."""
        state = None if self._rows is None else self._rows(indices // self._agents_per_state)
        return Context(state, None if self._positions is None else self._positions[indices % self._num_agents])
