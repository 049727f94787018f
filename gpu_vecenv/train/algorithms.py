"""The algorithms: for each the class of its configuration, which selects it, of its policy, and of its learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.train import ppo, pqn
from gpu_vecenv.train.learner import Learner
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo_learner import PPOLearner
from gpu_vecenv.train.pqn_learner import PQNLearner


class MakePolicy(Protocol):
    """Makes the policy of some roles, with a network or the default one of the configuration."""

    def __call__(
        self, game: Env, roles: Sequence[str], config: Any, network: nn.Module | None, device: torch.device
    ) -> Policy:
        """Make it."""


class Algorithm(NamedTuple):
    """One algorithm."""

    config: type[LearnerConfig]
    make_policy: MakePolicy
    learner: type[Learner[Any]]
    num_cells: Callable[[Any], int]  # in a default network with recurrent layers, of a configuration


ALGORITHMS = {
    kind.config.algorithm: kind
    for kind in (
        Algorithm(ppo.PPOConfig, ppo.make_policy, PPOLearner, lambda config: 1 if config.critic == "central" else 2),
        Algorithm(pqn.PQNConfig, pqn.make_policy, PQNLearner, lambda config: 1),
    )
}
CONFIGS = tuple(kind.config for kind in ALGORITHMS.values())


def algorithm_of(config: LearnerConfig) -> Algorithm:
    """The algorithm that a configuration is of."""
    return ALGORITHMS[config.algorithm]
