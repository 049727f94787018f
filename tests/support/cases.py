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


def slow_but(quick: Collection[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]], *, each: int = 0) -> list[Any]:
    """``cases`` that compile programs of their own, for ``pytest.mark.parametrize``; all but the quick ones are marked.

    Of all cases that have a value at position ``each`` in common, one runs with every change, a quick one or a slow
    one; which of the others' values it has differs from value to value. The rest is exhaustive.
    """
    cases, groups = list(cases), dict[Any, list[tuple[Any, ...]]]()
    for case in cases:
        groups.setdefault(case[each], []).append(case)
    usual = [
        group[k % len(group)] for k, group in enumerate(groups.values()) if not any(case in quick for case in group)
    ]
    marks = [(pytest.mark.slow, *(() if case in usual else (pytest.mark.exhaustive,))) for case in cases]
    return [
        pytest.param(*case, marks=() if case in quick else own, id="-".join(map(str, case)))
        for case, own in zip(cases, marks, strict=True)
    ]


def _exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)
