"""In a rollout, the actions of policies without a network."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_vecenv.train.evaluation import FunctionActions
from gpu_vecenv.train.fixed_policy import FixedPolicy
from gpu_vecenv.train.opponents import Opponents
from gpu_vecenv.train.rollout_storage import Rollout


class FixedActions:
    """Replaces the actions, which were drawn for a step, of agents whose policy has no network.

    The agents that opponents play are left to these; of snapshots a policy without a network is what it is now.

    Args:
        policies: The policies.
        rollout: The rollout.
        opponents: Of some of the environments; None: there are none.
    """

    def __init__(self, policies: Iterable[FixedPolicy], rollout: Rollout, opponents: Opponents | None = None) -> None:
        self._rollout, self._opponents = rollout, opponents
        own = {policy.view.name: policy for policy in policies}
        views = {name: policy.view for name, policy in own.items()}
        functions = {name: policy.function(rollout.env.device) for name, policy in own.items()}
        self._write = FunctionActions(rollout.env, views, functions)

    def __call__(self, t: int) -> None:
        """Of step t."""
        actions = self._rollout.samples[t].actions
        drawn = None if self._opponents is None else actions.clone()
        self._write(self._rollout.obs[t], actions)
        if self._opponents is not None and drawn is not None:
            plays = self._opponents.plays
            of_opponents = plays.view(*plays.shape, *(1,) * (actions.ndim - plays.ndim))
            actions.copy_(torch.where(of_opponents, drawn, actions))
