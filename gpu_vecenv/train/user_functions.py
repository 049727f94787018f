"""Calls of functions that users give: rewards, schedules, scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_vecenv.errors import ConfigError


def qualified_name(function: Callable[..., Any]) -> str:
    """Module and name of a function, of that of a ``functools.partial``, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


@contextmanager
def naming(function: str) -> Iterator[None]:
    """Around the call of a function that has this name.

    Raises:
        ConfigError: In place of its TypeError or ValueError, which would read as one of this library's arguments.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function} raised {type(error).__name__}: {error}") from error
