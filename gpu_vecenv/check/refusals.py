"""Checks K14 to K16: bad actions, seeds, options and calls out of order raise an error and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete, Tuple

from gpu_vecenv.check.context import CheckContext, Findings, check, differing
from gpu_vecenv.check.isolation import isolated
from gpu_vecenv.check.records import Array, Finding, Record, Tree, host
from gpu_vecenv.check.session import RowActions, Session

REFUSED = "TypeError, ValueError, RuntimeError or an error of Gymnasium"
OTHER_LAYOUTS = 10  # steps with actions in another memory layout
ACCEPTED = ": accepted"
BAD_SEEDS = (-1, 1.5, float("nan"), "7", True)
# True is an int, and Gymnasium's reset leaves options to the environment: taking these breaks no rule of the interface.
TOLERATED = ("seed=True", "an unknown option")


@check("K14", "bad actions are refused")
@isolated
def bad_actions(context: CheckContext) -> Findings:
    """A bad action raises one of ``REFUSALS``, and changes nothing.

    What an environment does with numbers outside a Box is its own rule: many clip them. Actions of another integer type
    or memory layout are refused, or mean the same.
    """
    actions = context.actions(context.seeds[1], 4)
    yield from refused_actions(context, actions, _bad_actions(context, actions[0]))
    yield from _other_layouts(context)


def _other_layouts(context: CheckContext) -> Findings:
    """Steps with the same numbers in another integer type or memory layout, unless that is refused."""
    seed = context.seeds[1]
    actions = context.actions(seed, OTHER_LAYOUTS)
    session = context.session()
    expected = session.run(actions, seed)
    for name, prepared in LAYOUTS.items():
        if not context.attempts(f"steps with actions {name}"):
            continue
        session = context.session()
        got = [session.reset(seed)]
        for step in actions:
            batch = session.batch(step)
            try:
                got.append(session.raw_step(_converted(batch, partial(prepared, session))))
            except context.refusals:
                got.append(session.raw_step(batch))
        yield from differing(f"with actions {name}", got, expected)


def _converted(tree: Tree, convert: Callable[[Array], Any]) -> Tree:
    """A tree with other arrays of numbers; objects stay as they are."""
    if isinstance(tree, Mapping):
        return {key: _converted(part, convert) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_converted(part, convert) for part in tree)
    array = host(tree)
    return convert(array) if array.ndim and array.dtype.kind in "biuf" else tree


def _other_integers(session: Session, array: Array) -> Any:
    """int32, or int64 if that is the declared type; floats stay floats."""
    if array.dtype.kind not in "iu":
        return session.send(array)
    return session.send(array.astype(np.int64 if array.dtype == np.int32 else np.int32))


def _strided(session: Session, array: Array) -> Any:
    """Every second row of an array whose other rows are other actions."""
    return session.send(np.stack([array, array[::-1]], 1).reshape(-1, *array.shape[1:]))[::2]


def _reordered(session: Session, array: Array) -> Any:
    """The first axis is the fastest in memory; NumPy's one-dimensional arrays run backwards."""
    if array.ndim > 1:
        return session.send(np.ascontiguousarray(array.swapaxes(0, -1))).swapaxes(0, -1)
    return session.send(array) if session.device is not None else array[::-1].copy()[::-1]


LAYOUTS: dict[str, Callable[[Session, Array], Any]] = {
    "of another integer type": _other_integers,
    "that are strided": _strided,
    "in another order in memory": _reordered,
}


def refused_actions(context: CheckContext, actions: Sequence[RowActions], bad: Iterable[tuple[str, Any]]) -> Findings:
    """Bad actions of a first step that are accepted, or that affect the steps after them."""
    seed = context.seeds[1]
    expected = context.session().run(actions, seed)
    session: Session | None = None
    for name, given in bad:
        if not context.attempts(f"step with {name}"):
            continue
        session = session or context.session()
        session.reset(seed)
        finding = refusal(context, partial(session.env.step, given), f"step with {name}")
        if finding is None:
            finding = steps_after_refusal(name, session, actions, expected)
        if finding is not None:
            yield finding
            session = None


def steps_after_refusal(
    name: str, session: Session, actions: Sequence[RowActions], expected: Sequence[Record]
) -> Finding | None:
    """A difference in the steps after a refused call; ``expected`` ends with their records without that call."""
    name = f"after the refusal of {name}"
    try:
        got = [*expected[: -len(actions)], *map(session.step, actions)]
    except Exception as error:
        return Finding(f"{name}: {type(error).__name__}: {error}", "the same steps as without that call")
    return next(differing(name, got, expected), None)


def refusal(context: CheckContext, call: Callable[[], Any], name: str) -> Finding | None:
    """None if the call raises one of ``context.refusals``, else the finding."""
    try:
        call()
    except context.refusals:
        return None
    except Exception as error:
        return Finding(f"{name}: {type(error).__name__}: {error}", REFUSED)
    return Finding(f"{name}{ACCEPTED}", "an error")


def _bad_actions(context: CheckContext, actions: RowActions) -> Iterator[tuple[str, Any]]:
    session = context.session()
    acting = _acting_rows(session.reset(context.seeds[1]), session.rows)
    good, space = session.batch(actions), session.env.action_space
    yield "None", None
    yield "a string", "north"
    if isinstance(space, Dict | Tuple):
        yield from _bad_trees(session, good, space, acting)
        return
    if not isinstance(space, Box | MultiDiscrete | MultiBinary):
        context.notes.append(f"action space {type(space).__name__}: only actions of other types were tried")
        return
    yield from _bad_arrays(session, good, space, acting)


def _acting_rows(record: Record, rows: int) -> Sequence[int]:
    """Rows whose next action is not ignored: all, or those of ``info["acting"]``, if there is one."""
    leaf = record.leaves.get("info.acting")
    if leaf is None or leaf.values.shape != (rows,) or leaf.values.dtype != np.bool_ or not leaf.values.any():
        return range(rows)
    found: list[int] = np.flatnonzero(leaf.values).tolist()
    return found


def _bad_trees(session: Session, good: Any, space: Any, acting: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Dictionaries and tuples of actions with parts too many, missing, or wrong."""
    if isinstance(space, Dict):
        first = next(iter(space.spaces))
        yield f"no {first!r}", {key: part for key, part in good.items() if key != first}
        parts: list[tuple[Any, Any]] = list(space.spaces.items())
    else:
        yield "one part too few", good[:-1]
        yield "one part too many", (*good, good[0])
        parts = list(enumerate(space.spaces))
    for key, inner in parts:
        further: Iterable[tuple[str, Any]] = ()
        if isinstance(inner, Dict | Tuple):
            further = _bad_trees(session, good[key], inner, acting)
        elif isinstance(inner, Box | MultiDiscrete | MultiBinary):
            further = _bad_arrays(session, good[key], inner, acting)
        for name, bad in further:
            if isinstance(space, Dict):
                yield f"{name} in {key!r}", {**good, key: bad}
            else:
                yield f"{name} in part {key}", (*good[:key], bad, *good[key + 1 :])


def _bad_arrays(session: Session, good: Any, space: Any, acting: Sequence[int]) -> Iterator[tuple[str, Any]]:
    array = host(good)
    yield "one row too few", session.send(array[:-1])
    yield "one row too many", session.send(np.concatenate([array, array[:1]]))
    yield "a single row", session.send(array[:1])
    yield "a single number", session.send(array.reshape(-1)[0].reshape(()))
    yield "an additional axis", session.send(array[..., None])
    yield "complex numbers", session.send(array.astype(np.complex64))
    if isinstance(good, np.ndarray):
        yield "dtype object", np.full(array.shape, None, object)
    elif array.dtype.kind == "f":
        yield "requires_grad", good.clone().requires_grad_()
    for where in dict.fromkeys((acting[0], acting[len(acting) // 2], acting[-1])):
        values = bad_values(space, array, where)
        for name, value in values.items():
            bad = array.copy()
            bad.reshape(len(bad), -1)[where, 0] = value
            yield f"{name} in row {where}", session.send(bad)
    if array.dtype.kind != "f":
        flags = session.send(array.astype(np.bool_))
        if not space.contains(flags):  # MultiDiscrete contains NumPy's, cast to its integers
            yield "dtype bool", flags
        for name, number in {"a fraction": array[acting[0]] + 0.5, "NaN": np.nan, "infinity": np.inf}.items():
            bad = array.astype(np.float32)
            bad[acting[0]] = number
            yield name, session.send(bad)


def bad_values(space: Any, array: np.ndarray[Any, Any], row: int) -> dict[str, Any]:
    """Name -> an invalid value for the first number of a row's action."""
    if array.dtype.kind == "f":
        return {"NaN": np.nan}
    if isinstance(space, MultiDiscrete):
        low = int(space.start[row].reshape(-1)[0])
        high = low + int(space.nvec[row].reshape(-1)[0]) - 1
    elif isinstance(space, MultiBinary):
        low, high = 0, 1
    else:
        low, high = (bound[row].reshape(-1)[0].item() for bound in (space.low, space.high))
    limits = np.iinfo(array.dtype)
    values = {"one below its range": low - 1, "one above its range": high + 1, "2**31": 2**31, "2**40": 2**40}
    return {name: value for name, value in values.items() if limits.min <= value <= limits.max}


@check("K15", "calls out of order are refused")
@isolated
def life_cycle(context: CheckContext) -> Findings:
    """Step before reset, and step or reset after close, raise an error; a second close does not."""
    (actions,) = context.actions(context.seeds[0], 1)
    fresh, closed = context.session(), context.session()
    batch = fresh.batch(actions)
    closed.reset(context.seeds[0])
    closed.env.close()
    calls: dict[str, Callable[[], Any]] = {
        "step before reset": partial(fresh.env.step, batch),
        "step after close": partial(closed.env.step, batch),
        "reset after close": partial(closed.env.reset, seed=context.seeds[0]),
    }
    for name, call in calls.items():
        finding = refusal(context, call, name) if context.attempts(name) else None
        if finding is not None:
            yield finding
    if context.attempts("a second close"):
        closed.env.close()


@check("K16", "bad seeds and options are refused")
@isolated
def bad_resets(context: CheckContext) -> Findings:
    """Reset with a bad seed, an unknown option or a bad mask raises an error and changes nothing.

    That seed=True or an unknown option is accepted is noted, not a failure.
    """
    seed = context.seeds[0]
    actions = context.actions(seed, 8)
    session = context.session()
    rows, expected = session.rows, session.run(actions, seed)
    bad: dict[str, dict[str, Any]] = {f"seed={value!r}": {"seed": value} for value in BAD_SEEDS}
    if context.masked:
        bad["an unknown option"] = {"options": {"no_such_option_at_all": 1}}
        masks = {"of floats": np.zeros(rows), "for one row too many": np.ones(rows + 1, np.bool_), "of one row": [True]}
        bad |= {f"a reset_mask {name}": {"options": {"reset_mask": np.asarray(m)}} for name, m in masks.items()}
    for name, arguments in bad.items():
        if not context.attempts(f"reset with {name}"):
            continue
        session = context.session()
        session.run(actions[:4], seed)
        finding = refusal(context, partial(session.env.reset, **arguments), f"reset with {name}")
        if finding is not None and name in TOLERATED and finding.got.endswith(ACCEPTED):
            context.notes.append(finding.got)
            continue
        if finding is None:
            finding = steps_after_refusal(name, session, actions[4:], expected)
        if finding is not None:
            yield finding
