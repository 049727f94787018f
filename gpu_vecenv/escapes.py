"""Text from files, arguments and the environment as a terminal may get it: control characters are written as escapes.

Imports only the standard library: ``cli/doctor.py`` uses it before any installation.
"""

from __future__ import annotations

import warnings


def printable(text: str) -> str:
    r"""The text on one line, with Python's escape for each character that cannot be printed, such as \x1b or \n."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """As ``printable``, but line feeds stay."""
    return "\n".join(map(printable, text.split("\n")))


def warn(message: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """``warnings.warn`` of ``printable_lines(message)``; ``stacklevel`` counts from the caller, as there."""
    warnings.warn(printable_lines(message), category, stacklevel=stacklevel + 1)  # noqa: TID251 - with printable text
