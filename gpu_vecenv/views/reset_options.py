"""Options of ``reset`` in the views: a mask of environments, and ranges of the initial state as in Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gpu_vecenv.declare.config import finite_float
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import f32
from gpu_vecenv.declare.randomize import with_values
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, nearest

MASK = "reset_mask"
Ranges = Mapping[str, tuple[float, float]]  # state field -> range [low, high) of its initial value


class ResetOptions(NamedTuple):
    """``mask`` is the caller's, unchecked; ``ranges`` is empty without options for them."""

    mask: Any
    ranges: Ranges


def parse_reset_options(vec_env: VecEnv, options: Any, *, masks: bool = True) -> ResetOptions:
    """Check the options of a reset.

    Args:
        vec_env: The environments.
        options: None, or a mapping of "reset_mask" and the game's ``reset_options``.
        masks: Whether "reset_mask" is an option.

    Raises:
        TypeError, ConfigError: The options are no mapping, have other keys, or values that are no range.
    """
    if options is None:
        return ResetOptions(None, {})
    if not isinstance(options, Mapping):
        raise TypeError(f"reset: options is a {type(options).__name__}; expected a dict")
    game = vec_env.game
    known = [*([MASK] if masks else []), *game.reset_options]
    if unknown := sorted(set(options) - set(known), key=str):
        expected = nearest(str(unknown[0]), known) if known else "expected none"
        raise ConfigError(f"reset: options has {unknown}; {expected}")
    bounds = {name: _number(name, value) for name, value in options.items() if name != MASK}
    return ResetOptions(options.get(MASK), _checked_ranges(vec_env, bounds) if bounds else {})


def move_initial_state(vec_env: VecEnv, options: ResetOptions, mask: torch.Tensor | None, obs: torch.Tensor) -> None:
    """Move the initial state that the game has drawn into the ranges of the options, and write its observations.

    A value at some fraction of the game's own range goes to the same fraction of the other range; on the device, in
    float64, rounded once.

    Args:
        vec_env: The environments, just reset.
        options: Their ``ranges`` are used.
        mask: (num_envs,) bool, the environments that were reset; None for all.
        obs: Tensor of the step buffers, rewritten.
    """
    if not options.ranges:
        return
    own = _initial_ranges(vec_env.game, {})
    for field, (low, high) in options.ranges.items():
        state, (own_low, own_high) = vec_env.state[field], own[field]
        fraction = (state.double() - own_low) / (own_high - own_low)
        moved = (fraction * (high - low) + low).to(state.dtype)
        rows = None if mask is None else mask.view(-1, *[1] * (state.ndim - 1))
        state.copy_(moved if rows is None else torch.where(rows, moved, state))
    vec_env.observe(out=obs)


def _number(name: str, value: Any) -> float:
    number = finite_float(value)
    if number is None:
        raise ConfigError(f"reset: options[{name!r}] is {value!r}; expected a finite number")
    return number


def _initial_ranges(game: Env, options: Mapping[str, float]) -> Ranges:
    """What the game's hook returns, or EnvDefinitionError."""
    ranges = game.initial_ranges(options)
    fields = {field.name for field in game.layout.fields if field.dtype == f32 and not field.shared}
    if not isinstance(ranges, Mapping) or not all(
        name in fields
        and isinstance(bounds, tuple | list)
        and len(bounds) == 2
        and None not in map(finite_float, bounds)
        for name, bounds in ranges.items()
    ):
        raise EnvDefinitionError(
            f"{game.layout.name}: initial_ranges({dict(options)}) returns {ranges!r:.200}; expected a mapping, name of "
            "a float32 state field -> (low, high)"
        )
    return ranges


def _checked_ranges(vec_env: VecEnv, bounds: Mapping[str, float]) -> Ranges:
    game, own = vec_env.game, _initial_ranges(vec_env.game, {})
    unknown_values = dict.fromkeys((name for name, _, _ in game.randomize), math.nan)
    if repr(with_values(game, unknown_values).initial_ranges({})) != repr(own):
        raise ConfigError(
            f"reset: options {dict(bounds)} move the initial state, but its own range is randomised: "
            f"{', '.join(unknown_values)}"
        )
    ranges = {field: bound for field, bound in _initial_ranges(game, bounds).items() if bound != own[field]}
    for field, (low, high) in ranges.items():
        if low > high:
            raise ConfigError(
                f"reset: options {dict(bounds)} give {field} the range [{low}, {high}); expected low <= high"
            )
        if own[field][0] >= own[field][1]:
            raise ConfigError(
                f"reset: options {dict(bounds)} move the initial {field}, which is always {own[field][0]} in this "
                "configuration; expected a game whose own range is not empty"
            )
        if field in vec_env.build.initial_fields:
            raise ConfigError(f"reset: options {dict(bounds)} move {field}, whose values come from initial_states")
    return ranges
