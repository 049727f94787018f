"""What the attributes of a declaration's class may be: one table, checked when a game is configured."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_vecenv.declare.config import FixedArgument
from gpu_vecenv.declare.field import Field
from gpu_vecenv.declare.kernels import KernelSignature
from gpu_vecenv.declare.source_rules import SOURCE_RULES
from gpu_vecenv.declare.versions import OtherVersion
from gpu_vecenv.errors import EnvDefinitionError

PROPERTIES = (
    "roles",
    "num_agents",
    "obs_parts",
    "obs_dim",
    "obs_shape",
    "obs_dtype",
    "observation_space",
    "agent_id_size",
    "action_space",
)

# Arguments of ``gpu_vecenv.make`` beside the configuration, whose names its keys cannot have.
ARGUMENTS_OF_MAKE = frozenset(
    "game num_envs device autoreset_mode agents_as_envs driver validate arrays initial_states randomize "
    "first_env_index end_on_nonfinite".split()
)


class Attribute(NamedTuple):
    """What an attribute may be: a test of its value, and the words for what passes it."""

    is_valid: Callable[[Any], bool]
    expected: str


def _tuple_of(kind: type, example: str) -> Attribute:
    def is_valid(value: Any) -> bool:
        return isinstance(value, tuple | list) and all(isinstance(item, kind) for item in value)

    return Attribute(is_valid, f"a tuple of {kind.__name__}, such as {example}")


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _int_from(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_action(value: Any) -> bool:
    numbers = value if isinstance(value, tuple | list) and value else (value,)
    return all(type(x) in (int, float) and math.isfinite(x) for x in numbers)


PRESET_ALGORITHMS = "pqn", "pqn-vdn"  # that games may have presets of, beside PPO
_FLAG = Attribute(lambda value: isinstance(value, bool), "True or False")
_TEXT = Attribute(lambda value: isinstance(value, str), "a str")
ATTRIBUTES = {
    "state": _tuple_of(Field, '(Field("x", f32),)'),
    "derived": _tuple_of(str, '("area",), names of attributes that the device code gets as constants'),
    "host": _FLAG,
    "kernels": _tuple_of(KernelSignature, '(KernelSignature("count", …),)'),
    "allows": Attribute(
        lambda value: isinstance(value, tuple | list) and all(item in list(SOURCE_RULES) for item in value),
        f"a tuple of names from {', '.join(map(repr, SOURCE_RULES))}",
    ),
    "obs_staging_bytes": Attribute(_int_from(0, 2**31 - 1), "a number of bytes, 0 … 2^31 - 1"),
    "source": Attribute(
        lambda value: value is None or isinstance(value, str | Path),
        "the path of the .cu file, or None: beside the declaration",
    ),
    "termination_label": _TEXT,
    "preset": Attribute(_mapping, 'a mapping, such as {"num_envs": 1000}'),
    "sample_efficient_preset": Attribute(_mapping, 'a mapping, such as {"num_envs": 8}'),
    "preset_opponents": Attribute(_mapping, 'a mapping, such as {"members": ("snapshots", "random")}'),
    "preset_schedules": Attribute(
        lambda value: _mapping(value) and all(map(_mapping, value.values())),
        'a mapping of mappings, such as {"shared": {"wind": [(0, 0.0), (1, 2.0)]}}',
    ),
    "algorithm_presets": Attribute(
        lambda value: _mapping(value) and set(value) <= set(PRESET_ALGORITHMS) and all(map(_mapping, value.values())),
        f'a mapping of mappings, such as {{"pqn": {{"num_envs": 1000}}}}, of some of {", ".join(PRESET_ALGORITHMS)}',
    ),
    "critic_state": _tuple_of(str, '("cell",), names of fields of the state'),
    "state_metrics": _tuple_of(str, '("cell",), names of fields of the state'),
    "agent_critic_state": _tuple_of(str, '("cell",), names of fields of the state'),
    "masks_actions": _FLAG,
    "clip_actions": _FLAG,
    "takes_turns": _FLAG,
    "team_reward": Attribute(
        lambda value: (
            isinstance(value, bool)
            or (isinstance(value, tuple | list) and all(isinstance(role, str) for role in value))
        ),
        'True, False or a tuple of roles, such as ("scout",)',
    ),
    "noop": Attribute(
        lambda value: value is None or _is_action(value) or (_mapping(value) and all(map(_is_action, value.values()))),
        "a number, a tuple of numbers, a mapping, role -> that, or None",
    ),
    "zero_sum": _FLAG,
    "title": _TEXT,
    "reset_options": _tuple_of(str, '("low", "high")'),
    "gymnasium_time_limit": _FLAG,
    "reward_threshold": Attribute(
        lambda value: value is None or (type(value) in (int, float) and math.isfinite(value)), "a finite number or None"
    ),
    "render_fps": Attribute(_int_from(1, 1000), "an int, 1 … 1000 steps per second"),
    "reference_arguments": Attribute(
        lambda value: _mapping(value) and all(isinstance(to, str | FixedArgument) for to in value.values()),
        "a mapping, name there -> name of a field, or FixedArgument",
    ),
    "reference_methods": Attribute(
        lambda value: _mapping(value) and all(map(callable, value.values())), "a mapping, name there -> function"
    ),
    "version": Attribute(_int_from(0, 2**31 - 1), "an int, 0 … 2^31 - 1"),
    "other_versions": Attribute(
        lambda value: (
            isinstance(value, Mapping)
            and all(_int_from(0, 2**31 - 1)(number) for number in value)
            and all(
                isinstance(other, OtherVersion) and _mapping(other.config) and other.config and _mapping(other.preset)
                for other in value.values()
            )
        ),
        'a mapping, number -> OtherVersion(config={"old_rules": True})',
    ),
}


def check_attributes(game: type[Any], ancestor: type[Any]) -> None:
    """Check a class derived from ``ancestor``, which is ``Env``; or EnvDefinitionError."""
    name, own = game.__name__, vars(game)
    values = [hint for hint in own.get("__annotations__", {}).values() if "ClassVar" not in str(hint)]
    if values and "__dataclass_fields__" not in own:
        raise EnvDefinitionError(
            f"{name} declares configuration values: write @dataclass(frozen=True, kw_only=True) above it"
        )
    keys = {field.name: field for field in dataclasses.fields(game)}
    if keys["randomize"] is not ancestor.__dataclass_fields__["randomize"]:
        raise EnvDefinitionError(f"{name}: randomize is the name of a field of every game; rename the value")
    for attribute, (is_valid, expected) in ATTRIBUTES.items():
        if attribute in keys:
            raise EnvDefinitionError(
                f"{name}: {attribute} is a key of the configuration; expected an attribute of the class, "
                f"{attribute} = … without a type: give the key another name"
            )
        if not is_valid(value := getattr(game, attribute)):
            raise EnvDefinitionError(f"{name}: {attribute} is {value!r:.200}; expected {expected}")
    taken = (ARGUMENTS_OF_MAKE | {*dir(ancestor)}) - {*PROPERTIES, "randomize"}
    if reserved := sorted(taken & keys.keys()):
        raise EnvDefinitionError(
            f"{name}: {', '.join(reserved)} {'are keys' if reserved[1:] else 'is a key'} of the configuration, and an "
            "argument of make or an attribute of every game; rename it"
        )
    fields = [field.name for field in game.state if not field.shared and not field.when]
    for attribute in ("critic_state", "agent_critic_state", "state_metrics"):
        if unknown := [field for field in getattr(game, attribute) if field not in fields]:
            raise EnvDefinitionError(
                f"{name}: {attribute} has {unknown}; expected fields of its state that are not shared and that "
                f"all configurations have, some of {fields}"
            )
    for argument, target in own.get("reference_arguments", {}).items():
        if isinstance(target, str) and target not in keys and argument not in ancestor.reference_arguments:
            raise EnvDefinitionError(
                f"{name}: reference_arguments[{argument!r}] is {target!r}; expected a field, one of {sorted(keys)}"
            )
    for number, other in game.other_versions.items():
        if number == game.version or not set(other.config) <= set(keys):
            raise EnvDefinitionError(
                f"{name}: other_versions[{number}] has the configuration {dict(other.config)}; expected fields, some "
                f"of {sorted(keys)}, and a number other than version = {game.version}"
            )
    for attribute in PROPERTIES:
        if inspect.isfunction(own.get(attribute)):
            raise EnvDefinitionError(f"{name}: {attribute} is a method; expected a property: write @property above it")
