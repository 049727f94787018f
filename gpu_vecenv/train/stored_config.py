"""Hyperparameters in checkpoints: files of older versions lack options that have been added since."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpu_vecenv._version import __version__
from gpu_vecenv.envs.registry import GAMES, stored_configuration
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.algorithms import ALGORITHMS
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.ppo import PPOConfig

OF_ONE_CHECKPOINT = ("first_env_index", "iteration", "made_with", "progress", "rank")  # keys that differ within a run


def with_defaults(manifest: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A checkpoint's manifest whose configurations have the defaults of options that they lack, and the game's too.

    A new option's default leaves training as it was without the option; where that is not possible, the number of the
    format of checkpoints rises. Files that name no algorithm are of PPO. What is no configuration is left as it is.

    Args:
        manifest: Of a trainer.
        source: The file, for errors.

    Raises:
        CheckpointCorruptError: The algorithms are no dictionary.
        ConfigError: There is no such algorithm, or it has no such options.
    """
    found, policies = dict(manifest), manifest.get("policies")
    if isinstance(config := found.get("game_config"), Mapping):
        for kind in (kind for kind in GAMES.values() if kind.name() == found.get("game")):
            found["game_config"] = stored_configuration(kind, config)
    if "config" in found:
        found.setdefault("algorithm", PPOConfig.algorithm)
        found["config"] = _completed(f"{source}: the trainer", found["algorithm"], found["config"], manifest)
    if isinstance(policies, Mapping):
        found.setdefault("algorithms", dict.fromkeys(policies, PPOConfig.algorithm))
        if not isinstance(found["algorithms"], dict):
            raise CheckpointCorruptError(f"{source}: algorithms is {found['algorithms']!r:.80}; expected a dictionary")
        found["policies"] = {
            name: _completed(f"{source}: policy {name!r}", found["algorithms"].get(name), values, manifest)
            for name, values in policies.items()
        }
    return found


def stored_config(manifest: Mapping[str, Any], source: str) -> LearnerConfig:
    """The trainer's configuration; ``manifest`` is what ``with_defaults`` returns.

    Raises:
        CheckpointCorruptError: It is no dictionary.
    """
    return _config(f"{source}: the trainer", manifest.get("algorithm"), manifest.get("config"))


def stored_configs(manifest: Mapping[str, Any], source: str) -> dict[str, LearnerConfig]:
    """The configuration of each policy; arguments and errors as of ``stored_config``."""
    policies = manifest.get("policies")
    if not isinstance(policies, Mapping):
        raise CheckpointCorruptError(f"{source}: policies is {policies!r:.80}; expected a dictionary")
    return {
        name: _config(f"{source}: policy {name!r}", manifest["algorithms"].get(name), values)
        for name, values in policies.items()
    }


def readable_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is configured with, for people to read.

    Args:
        manifest: Of a trainer, as ``with_defaults`` returns it.

    Returns:
        Its game, sizes and options. "num_envs" are those of all processes; "policies" have what differs from "config"
        alone.
    """
    found = {key: value for key, value in manifest.items() if key not in OF_ONE_CHECKPOINT}
    if "num_envs" in found:  # exported policies have none
        found["num_envs"] *= found.pop("world_size", 1)
    common = found.get("config", {})
    found["policies"] = {
        name: {key: value for key, value in own.items() if key not in common or value != common[key]}
        for name, own in found["policies"].items()
    }
    return found


def _config(what: str, algorithm: Any, values: Any) -> LearnerConfig:
    if not isinstance(values, Mapping):
        raise CheckpointCorruptError(f"{what} has the configuration {values!r:.80}; expected a dictionary")
    return ALGORITHMS[algorithm].config(**values)


def _completed(what: str, algorithm: Any, values: Any, manifest: Mapping[str, Any]) -> Any:
    if not isinstance(values, Mapping):
        return values
    advice = f"it was made with {manifest.get('made_with')}, this is gpu_vecenv {__version__}: install that version"
    if (kind := ALGORITHMS.get(str(algorithm))) is None:
        raise ConfigError(f"{what} has the algorithm {algorithm!r:.80}; expected {' or '.join(ALGORITHMS)}; {advice}")
    defaults = {field.name: field.default for field in dataclasses.fields(kind.config)}
    if unknown := sorted(set(values) - set(defaults)):
        raise ConfigError(f"{what} has unknown configuration keys {unknown}; {advice}")
    return {**defaults, **values}
