"""The number of forks between the process that imported the library and this one, without a system call."""

from __future__ import annotations

import os

_forks = 0


def forks() -> int:
    """0 where the library was imported; another number in each forked process than in its parent."""
    return _forks


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_count)
