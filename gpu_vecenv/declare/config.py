"""Configuration values: their declared ranges, and the check of a dataclass's values against its type hints."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from gpu_vecenv.errors import COUNTERPARTS, ConfigError, EnvDefinitionError, UnknownOptionError, nearest

ClassT = TypeVar("ClassT", bound=type)
FLOAT32_MAX = float(np.finfo(np.float32).max)
# What is given to classes of options, as it stands in presets and command lines -> where it belongs.
ELSEWHERE = {
    "num_envs": "it is an argument of gpu_vecenv.make; remove it from the options",
    "device": "it is an argument of gpu_vecenv.make; remove it from the options",
    "seed": "it is an argument of gpu_vecenv.Trainer; remove it from the options",
}


@dataclass(frozen=True)
class FixedArgument:
    """An argument of a reference environment that has one value here, see ``Env.reference_arguments``."""

    value: Any
    reason: str  # why it has no other


def param(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A configuration value in the closed range [low, high].

    Raises:
        TypeError: A bound is no number.
        EnvDefinitionError: The range is empty.
    """
    for name, bound in (("low", low), ("high", high)):
        if bound is not None and (not isinstance(bound, int | float | np.number) or isinstance(bound, bool)):
            raise TypeError(f"param: {name} is {bound!r} ({type(bound).__name__}); expected a number or None")
    if not (-math.inf if low is None else low) <= (math.inf if high is None else high):
        raise EnvDefinitionError(f"param: the range [{low}, {high}] is empty; expected low <= high")
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def with_known_options(cls: ClassT) -> ClassT:
    """Decorator of a dataclass: its constructor refuses an unknown name with the nearest ones."""
    construct = cls.__init__  # type: ignore[misc]
    known = {field.name for field in dataclasses.fields(cls) if field.init}

    @functools.wraps(construct)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        if unknown := [name for name in options if name not in known]:
            name, value = unknown[0], options[unknown[0]]
            hint = ELSEWHERE.get(COUNTERPARTS.get(name, name)) or nearest(name, known)
            raise UnknownOptionError(f"{cls.__name__} has no option {name!r} (= {value!r:.80}); {hint}")
        construct(self, *values, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def parse_json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that an option has as its value, or ConfigError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {text!r:.200}; expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {text!r:.200}; expected a JSON object")
    return found


def check_fields(config: Any) -> None:
    """Check a dataclass's values against their declared types and ranges; NumPy scalars become Python's.

    A field whose metadata has ``convert``, a function of its key and value, gets what that returns.

    Raises:
        ConfigError: Names the key, the value and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        key, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
        if convert := field.metadata.get("convert"):
            object.__setattr__(config, field.name, convert(key, value))
            continue
        hint = object if isinstance(hints[field.name], typing.TypeVar) else hints[field.name]
        object.__setattr__(config, field.name, _checked(key, field, hint, value))


def fits_device(value: int | float) -> bool:
    """Whether the device code can hold it as a 32-bit int or as a finite float32."""
    return abs(value) <= FLOAT32_MAX if isinstance(value, float) else -(2**31) <= value < 2**31


def finite_float(value: Any) -> float | None:
    """The value as a float; None if it is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _checked(key: str, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """The value as a plain Python one of the declared type, or ConfigError."""
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        if not isinstance(value, tuple | list):
            raise ConfigError(f"{key} is {value!r} ({type(value).__name__}); expected a tuple of {element.__name__}")
        return tuple(_checked(f"{key}[{index}]", field, element, item) for index, item in enumerate(value))
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    choices = [c for h in alternatives if typing.get_origin(h) is Literal for c in typing.get_args(h)]
    kinds = [h for h in alternatives if isinstance(h, type)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value = str.__str__(value)  # a member of a str enum becomes a plain str
    if float in kinds and int not in kinds and type(value) is int and abs(value) <= FLOAT32_MAX:
        value = float(value)
    plain = isinstance(value, tuple(kinds)) and not isinstance(value, int | float)  # a Path is a subclass of Path
    if type(value) not in kinds and not plain and not any(type(value) is type(c) and value == c for c in choices):
        expected = [kind.__name__ for kind in kinds] + [repr(c) for c in choices]
        whole = int in kinds and isinstance(value, float) and value.is_integer()
        spelling = f", as {int(value):_}" if whole else ""
        raise ConfigError(f"{key} is {value!r} ({type(value).__name__}); expected {' or '.join(expected)}{spelling}")
    low, high = field.metadata.get("low"), field.metadata.get("high")
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if isinstance(value, float) and not abs(value) <= FLOAT32_MAX:
        raise ConfigError(f"{key} is {value}; expected a finite float32")
    if isinstance(value, int | float) and not low <= value <= high:
        raise ConfigError(f"{key} is {value}; expected a value in [{low}, {high}]")
    return value
