"""Hyperparameters in checkpoints: files of older versions lack options that have been added since."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpu_vecenv._version import __version__
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.ppo import PPOConfig


def with_defaults(manifest: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A checkpoint's manifest whose configurations have the defaults of options that they lack.

    A new option's default leaves training as it was without the option; where that is not possible, the number of the
    format of checkpoints rises. What is no configuration is left as it is.

    Args:
        manifest: Of a trainer.
        source: The file, for errors.

    Raises:
        ConfigError: A configuration has an option that PPOConfig does not have.
    """
    defaults = dataclasses.asdict(PPOConfig())
    made_with = manifest.get("made_with")

    def completed(values: Any, name: str) -> Any:
        if not isinstance(values, Mapping):
            return values
        if unknown := sorted(set(values) - set(defaults)):
            raise ConfigError(
                f"{source}: {name} has unknown configuration keys {unknown}; it was made with {made_with}, this is "
                f"gpu_vecenv {__version__}: install that version"
            )
        return {**defaults, **values}

    found, policies = dict(manifest), manifest.get("policies")
    if "config" in found:
        found["config"] = completed(found["config"], "the trainer")
    if isinstance(policies, Mapping):
        found["policies"] = {name: completed(values, f"policy {name!r}") for name, values in policies.items()}
    return found
