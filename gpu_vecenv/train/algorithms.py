"""The algorithms: of each its hyperparameters, whose class decides for it, what makes a policy, and the learner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train import ppo, pqn
from gpu_vecenv.train.learner import Learner
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo_learner import PPOLearner
from gpu_vecenv.train.pqn_learner import PQNLearner
from gpu_vecenv.train.q_networks import recurrent_q_weights
from gpu_vecenv.train.recurrent import CellKind, recurrent_weights


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
    learner: Callable[..., Learner[Any]]  # takes the arguments of ``Learner``
    recurrent_weights: Callable[[Sequence[int], CellKind], list[tuple[int, ...]]]  # shapes in the default network


ALGORITHMS = {
    kind.config.algorithm: kind
    for kind in (
        Algorithm(ppo.PPOConfig, ppo.make_policy, PPOLearner, recurrent_weights),
        Algorithm(pqn.PQNConfig, pqn.make_policy, PQNLearner, recurrent_q_weights),
    )
}
CONFIGS = tuple(kind.config for kind in ALGORITHMS.values())


def algorithm_of(config: LearnerConfig) -> Algorithm:
    """The algorithm that a configuration is of."""
    return ALGORITHMS[config.algorithm]


def stored_configs(source: str, manifest: Mapping[str, Any]) -> dict[str, LearnerConfig]:
    """The configuration of each policy that a checkpoint's manifest describes; ``source`` is named in errors.

    Raises:
        CheckpointCorruptError: A configuration is no dictionary.
        ConfigError: There is no such algorithm, or it has no such options.
    """
    # Before there were several they were not named.
    algorithms = manifest.get("algorithms", dict.fromkeys(manifest["policies"], ppo.PPOConfig.algorithm))
    if not isinstance(algorithms, dict):
        raise CheckpointCorruptError(f"{source}: algorithms is {algorithms!r:.80}; expected a dictionary")
    made_with = manifest.get("made_with")
    return {
        name: stored_config(f"{source}: policy {name!r}", algorithms.get(name), values, made_with)
        for name, values in manifest["policies"].items()
    }


def stored_config(source: str, algorithm: Any, values: Any, made_with: Any = None) -> LearnerConfig:
    """One configuration in a manifest; errors as for ``stored_configs``, and begin with ``source``."""
    if not isinstance(values, dict):
        raise CheckpointCorruptError(f"{source} has the configuration {values!r:.80}; expected a dictionary")
    advice = f"it was made with {made_with}: install that version"
    if (kind := ALGORITHMS.get(str(algorithm))) is None:
        raise ConfigError(f"{source} has the algorithm {algorithm!r:.80}; expected {' or '.join(ALGORITHMS)}; {advice}")
    if unknown := sorted(set(values) - {field.name for field in dataclasses.fields(kind.config)}):
        raise ConfigError(f"{source} has unknown configuration keys {unknown}; {advice}")
    return kind.config(**values)
