"""Checks of arguments that all packages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def check_kind(name: str, value: Any, kind: Any, expected: str, *, optional: bool = False) -> None:
    """TypeError unless the argument is an instance of ``kind``, or None if it is ``optional``."""
    if not isinstance(value, kind) and not (optional and value is None):
        none = " or None" if optional else ""
        raise TypeError(f"{name} is {value!r:.80} ({type(value).__name__}); expected {expected}{none}")


def check_flag(name: str, value: Any) -> None:
    """TypeError unless the argument is a bool."""
    if not isinstance(value, bool):
        check_kind(name, value, bool, "True or False")


def check_number(
    name: str, value: Any, is_valid: Callable[[Any], bool], expected: str, error: type[Exception] = ValueError
) -> None:
    """``error`` unless the argument is a number for which ``is_valid``."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not is_valid(value):
        raise error(f"{name} is {value!r:.200}; expected {expected}")


def check_choice(name: str, value: Any, choices: Sequence[str], error: type[Exception] = ValueError) -> None:
    """``error`` unless the argument is one of the words."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise error(f"{name} is {value!r:.200}; expected {expected}")
