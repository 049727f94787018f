"""Cases of a test of which each change runs some, and ``make test-exhaustive`` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_exhaustive(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``, marked exhaustive but for the usual ones.

    Raises:
        ValueError: A usual case is none of the cases.
    """
    cases = list(cases)
    if missing := [case for case in usual if case not in cases]:
        raise ValueError(f"usual has {missing!r}; expected some of {cases!r}")
    return [case if case in usual else _exhaustive(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def _exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)
