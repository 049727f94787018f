"""Calls of functions that users give: rewards, schedules, scripts."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_vecenv.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


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
        ConfigError: In place of errors that would read as ones of this library's arguments or code; with the last line
            of the function, or of what it calls, that is not a library's.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, NameError, ArithmeticError, AssertionError) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not _is_library(frame.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{function} raised {type(error).__name__}: {error}{where}") from error


def _is_library(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE) or "site-packages" in Path(file).parts
