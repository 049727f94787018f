"""Versions of a game's rules that one declaration plays: which configuration plays which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OtherVersion:
    """A version of a game's rules other than that of its default configuration.

    Args:
        config: The configuration values that play it: ``{"egocentric": False}``. They tell it from all others.
        preset: num_envs and PPOConfig values that train it well.
    """

    config: Mapping[str, Any]
    preset: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
