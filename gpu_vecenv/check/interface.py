"""The checks on values, memory and calls, K11 to K18: one function for each promise."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium.error
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from gpu_vecenv.check.context import OUTPUTS, REFUSALS, CheckContext, Findings, RowActions, Session, check, differing
from gpu_vecenv.check.records import Finding, Record, Tree, canonical, host, show

CLOSED = (gymnasium.error.ClosedEnvironmentError, RuntimeError)
BAD_SEEDS = (-1, 1.5, float("nan"), "7", True)
CYCLES, LOOKS = 10, 5  # environments made and closed between two looks at what is left over, and the looks
# What a cycle may leave behind. Python's lists of free objects, and caches, fill by some hundred bytes for a while; a
# kept environment is more than a kilobyte. Resident memory moves by whole arenas of the allocator, so only a leak of
# many pages is told from that.
LEFT_OVER = {
    "Python bytes": 1024,
    "tensor bytes": 0,
    "CUDA bytes": 0,
    "threads": 0,
    "files": 0,
    "resident bytes": 2**18,
}


@check("K11", "outputs are in their spaces")
def outputs_in_space(context: CheckContext) -> Findings:
    """Kind, dtype, shape and range of all outputs are as declared, finite, and the same in every step."""
    session = context.session()
    first = session.reset(context.seeds[0])
    yield from _obs_findings(session, first, 0)
    kinds = {f"obs{name}": kind_of(part) for name, part in parts_of(first.raw["obs"])}
    for step, actions in enumerate(context.actions(context.seeds[0]), 1):
        record = Record(dict(zip(OUTPUTS, session.env.step(session.batch(actions)), strict=True)), session.rows)
        yield from _obs_findings(session, record, step)
        parts = {f"{name}{inner}": part for name in OUTPUTS[:4] for inner, part in parts_of(record.raw[name])}
        for name, part in parts.items():
            kind = kinds.setdefault(name, kind_of(part))
            if kind_of(part) != kind:
                yield Finding(f"{name} are {kind_of(part)}", f"{kind}, as before", step=step)
        for name in OUTPUTS[1:4]:
            values = record.values(name)
            wanted = "iuf" if name == "rewards" else "b"
            if values.dtype.kind not in wanted or values.shape != (session.rows,):
                kind = "numbers" if name == "rewards" else "bool"
                yield Finding(f"{name} {values.shape} {values.dtype}", f"({session.rows},) {kind}", step=step)
            elif not np.isfinite(values).all():
                row = int((~np.isfinite(values)).argmax())
                yield Finding(f"{name} = {values[row]}", "a finite number", row, step)
        session.track(record)


def _obs_findings(session: Session, record: Record, step: int) -> Findings:
    space = session.env.observation_space
    yield from (Finding(f"obs{text}", wanted, row, step) for text, wanted, row in outside(space, record.raw["obs"]))
    info = record.raw["info"]
    for key in [key for key in info if f"_{key}" in info]:
        mask = host(info[f"_{key}"])
        if mask.dtype != bool or mask.shape != (session.rows,):
            yield Finding(f"info['_{key}'] {mask.shape} {mask.dtype}", f"({session.rows},) bool", step=step)
        elif key == "final_obs":
            for row in np.flatnonzero(mask).tolist():
                found = outside(session.env.single_observation_space, _row(info[key], row))
                yield from (Finding(f"final_obs{text}", wanted, row, step) for text, wanted, _ in found)


def outside(space: Space[Any], value: Tree) -> Iterator[tuple[str, str, int | None]]:
    """What lies outside its space: where and what, what was expected, the row."""
    if isinstance(space, Dict) and isinstance(value, Mapping) and set(value) == set(space.spaces):
        for key, inner in space.spaces.items():
            yield from ((f".{key}{text}", wanted, row) for text, wanted, row in outside(inner, value[key]))
    elif isinstance(space, Tuple) and isinstance(value, tuple) and len(value) == len(space.spaces):
        for place, inner in enumerate(space.spaces):
            yield from ((f".{place}{text}", wanted, row) for text, wanted, row in outside(inner, value[place]))
    elif isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        array = host(value)
        if array.shape != space.shape or array.dtype != space.dtype:
            yield f" {array.shape} {array.dtype}", f"{space.shape} {space.dtype}", None
        elif isinstance(space, Box):
            # A NaN is in no range; an infinite number is refused even where the bounds would let it pass.
            inside = (array >= space.low) & (array <= space.high) & np.isfinite(array)
            if not inside.all():
                at = tuple(np.argwhere(~inside)[0].tolist())
                bounds = f"finite, in [{space.low[at]}, {space.high[at]}]"
                yield f"[{', '.join(map(str, at))}] = {array[at]}", bounds, at[0] if at else None
        elif not space.contains(array[()] if isinstance(space, Discrete) else array):
            yield f" = {show(array)}", str(space), None
    elif not space.contains(value):
        yield f" = {show(value)}", str(space), None


def parts_of(value: Tree) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each array of a tree."""
    if isinstance(value, Mapping | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from ((f".{key}{name}", part) for name, part in parts_of(inner))
    else:
        yield "", value


def kind_of(value: Any) -> str:
    """The type, dtype and shape of an output."""
    if isinstance(value, torch.Tensor):
        return f"torch {value.dtype} {tuple(value.shape)} on {value.device}"
    return " ".join(
        [type(value).__name__, *(str(getattr(value, name)) for name in ("dtype", "shape") if hasattr(value, name))]
    )


def _row(tree: Tree, row: int) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _row(value, row) for key, value in tree.items()}
    return tuple(_row(value, row) for value in tree) if isinstance(tree, tuple) else tree[row]


@check("K12", "outputs belong to the caller")
def outputs_stay(context: CheckContext) -> Findings:
    """No output changes after it was returned, and writing into it changes nothing in the environment."""
    seed = context.seeds[0]
    actions = context.actions(seed)
    expected = context.session().run(actions, seed)
    now = [record.copied_again() for record in expected]
    yield from differing("looked at again after the last step", now, expected)
    session = context.session()
    got = [session.reset(seed)]
    for step in actions:
        _overwrite_outputs(got[-1].raw)
        got.append(session.step(step))
    yield from differing("after its outputs were written into", got, expected)


def _overwrite_outputs(outputs: Tree) -> None:
    if isinstance(outputs, Mapping | tuple):
        for part in list(outputs.values() if isinstance(outputs, Mapping) else outputs):
            _overwrite_outputs(part)
        if isinstance(outputs, MutableMapping):
            outputs.clear()
    elif isinstance(outputs, np.ndarray) and outputs.dtype == object:
        for element in outputs.flat:
            _overwrite_outputs(element)
    else:
        # What refuses to be written to, a view of one number say, is safe from its caller.
        with contextlib.suppress(ValueError, RuntimeError):
            if isinstance(outputs, torch.Tensor):
                outputs.fill_(1)
            elif isinstance(outputs, np.ndarray):
                outputs.fill(1)


@check("K13", "arguments belong to the caller")
def arguments_stay(context: CheckContext) -> Findings:
    """Step and reset change nothing in what they are given, and do not depend on it afterwards."""
    seed = context.seeds[0]
    base, other = context.actions(seed), context.actions(seed + 500)
    expected = context.session().run(base, seed)
    session = context.session()
    got = [session.reset(seed)]
    for step, (actions, garbage) in enumerate(zip(base, other, strict=True), 1):
        given, kept, overwriting = session.batch(actions), session.batch(actions), session.batch(garbage)
        got.append(session.raw_step(given))
        before, after = (Record({"actions": tree}, session.rows) for tree in (kept, given))
        for finding in differing("the actions given to step", [after], [before]):
            yield Finding(finding.got, finding.expected, finding.row, step)
        _overwrite(given, overwriting)
    yield from differing("after the actions of earlier steps were overwritten", got, expected)
    if context.masked:
        yield from _options_stay(session, context)


def _options_stay(session: Session, context: CheckContext) -> Findings:
    mask = session.repeat_over_rows(np.arange(session.replicas) == 1)
    options = {"reset_mask": mask.copy()}
    try:
        session.env.reset(options=options)
    except REFUSALS:
        context.notes.append("reset_mask is refused: what happens to options is not checked")
    else:
        if list(options) != ["reset_mask"]:
            yield Finding(f"reset left {list(options)} in the caller's options", "['reset_mask'], as given")
        elif not np.array_equal(options["reset_mask"], mask):
            yield Finding("reset changed the caller's reset_mask", "no change")


def _overwrite(target: Tree, source: Tree) -> None:
    for (_, part), (_, new) in zip(parts_of(target), parts_of(source), strict=False):
        if isinstance(part, torch.Tensor | np.ndarray):
            part[...] = new
    if isinstance(target, MutableMapping):
        target.clear()
        target.update(source)


@check("K14", "bad actions are refused")
def bad_actions(context: CheckContext) -> Findings:
    """A bad action raises TypeError, ValueError, AssertionError or Gymnasium's Error, and changes nothing."""
    actions = context.actions(context.seeds[1], 4)
    yield from refused_actions(context, actions, _bad_actions(context, actions[0]))


def refused_actions(context: CheckContext, actions: Sequence[RowActions], bad: Iterable[tuple[str, Any]]) -> Findings:
    """Which bad actions of a first step are accepted, or change what the ``actions`` after them do."""
    seed = context.seeds[1]
    expected = context.session().run(actions, seed)
    session: Session | None = None
    for name, given in bad:
        session = session or context.session()
        session.reset(seed)
        finding = refusal(partial(session.env.step, given), f"step with {name}", context.refusals)
        if finding is None:
            finding = steps_after_refusal(name, session, actions, expected)
        if finding is not None:
            yield finding
            session = None


def steps_after_refusal(
    name: str, session: Session, actions: Sequence[RowActions], expected: Sequence[Record]
) -> Finding | None:
    """What the steps after a refused call show; ``expected`` ends with what they give without that call."""
    name = f"after the refusal of {name}"
    try:
        got = [*expected[: -len(actions)], *map(session.step, actions)]
    except Exception as error:
        return Finding(f"{name}: {type(error).__name__}: {error}", "steps as if it had not been")
    return next(differing(name, got, expected), None)


def refusal(call: Callable[[], Any], name: str, errors: tuple[type[Exception], ...]) -> Finding | None:
    """None if the call raises one of the errors."""
    try:
        call()
    except errors:
        return None
    except Exception as error:
        return Finding(f"{name}: {type(error).__name__}: {error}", "TypeError, ValueError or an error of Gymnasium")
    return Finding(f"{name}: accepted", "an error")


def _bad_actions(context: CheckContext, actions: RowActions) -> Iterator[tuple[str, Any]]:
    session = context.session()
    session.reset(context.seeds[1])
    good, space = session.batch(actions), session.env.action_space
    yield "None", None
    yield "a word", "north"
    if not isinstance(space, Box | MultiDiscrete | MultiBinary):
        context.notes.append(f"action space {type(space).__name__}: only actions of another type were tried")
        return
    array = host(good)
    yield "one row less", session.send(array[:-1])
    yield "one row more", session.send(np.concatenate([array, array[:1]]))
    yield "one row for all", session.send(array[:1])
    yield "one number for all", session.send(array.reshape(-1)[0].reshape(()))
    yield "one more axis", session.send(array[..., None])
    yield "complex numbers", session.send(array.astype(np.complex64))
    if isinstance(good, np.ndarray):
        yield "dtype object", np.full(array.shape, None, object)
    elif array.dtype.kind == "f":
        yield "a gradient", good.clone().requires_grad_()
    for where in (0, session.rows - 1):
        values = bad_values(space, array, where)
        for name, value in values.items():
            bad = array.copy()
            bad.reshape(len(bad), -1)[where, 0] = value
            yield f"{name} in row {where}", session.send(bad)
    if array.dtype.kind != "f":
        yield "dtype bool", session.send(array.astype(np.bool_))
        for name, number in {"dtype float32": array[0], "NaN": np.nan, "infinity": np.inf}.items():
            bad = array.astype(np.float32)
            bad[0] = number
            yield name, session.send(bad)


def bad_values(space: Any, array: np.ndarray[Any, Any], row: int) -> dict[str, Any]:
    """Name -> a value that the first number of a row's action must not have."""
    if isinstance(space, MultiDiscrete):
        low = int(space.start[row].reshape(-1)[0])
        high = low + int(space.nvec[row].reshape(-1)[0]) - 1
    elif isinstance(space, MultiBinary):
        low, high = 0, 1
    else:
        low, high = (bound[row].reshape(-1)[0].item() for bound in (space.low, space.high))
    if array.dtype.kind == "f":
        values = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf}
        bounds = {"a value below its range": low, "a value above its range": high}
        toward = {"a value below its range": -np.inf, "a value above its range": np.inf}
        return values | {
            name: np.nextafter(array.dtype.type(bound), array.dtype.type(toward[name]))
            for name, bound in bounds.items()
            if np.isfinite(bound)
        }
    limits = np.iinfo(array.dtype)
    values = {"one below its range": low - 1, "one above its range": high + 1, "2**31": 2**31, "2**40": 2**40}
    return {name: value for name, value in values.items() if limits.min <= value <= limits.max}


@check("K15", "calls out of order are refused")
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
        finding = refusal(call, name, (*context.refusals, *CLOSED))
        if finding is not None:
            yield finding
    closed.env.close()


@check("K16", "bad seeds and options are refused")
def bad_resets(context: CheckContext) -> Findings:
    """Reset with a bad seed, an unknown option or a bad mask raises an error, and changes nothing."""
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
        session = context.session()
        session.run(actions[:4], seed)
        finding = refusal(partial(session.env.reset, **arguments), f"reset with {name}", context.refusals)
        if finding is None:
            finding = steps_after_refusal(name, session, actions[4:], expected)
        if finding is not None:
            yield finding


@check("K17", "the global random numbers are left alone")
def global_random_state(context: CheckContext) -> Findings:
    """Neither drawn from nor seeded nor depended on: those of ``random``, NumPy and torch."""
    saved = _global_states()
    actions = context.actions(context.seeds[0])
    trajectories = []
    try:
        for salt in context.seeds[:2]:
            random.seed(salt)
            np.random.seed(salt % 2**32)
            torch.manual_seed(salt)
            before = {name: canonical(state) for name, (state, _) in _global_states().items()}
            session = context.session()
            trajectories.append(session.run(actions, context.seeds[0]))
            session.env.close()
            for name, (state, _) in _global_states().items():
                if name in before and canonical(state) != before[name]:
                    yield Finding(f"the state of {name} has changed", "no change")
    finally:
        for state, restore in saved.values():
            restore(state)
    yield from differing("with other global random states", trajectories[1], trajectories[0])


def _global_states() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Name -> its state, and the function that sets it."""
    states: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "random": (random.getstate(), random.setstate),
        "numpy.random": (np.random.get_state(), np.random.set_state),
        "torch": (torch.get_rng_state(), torch.set_rng_state),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state_all(), torch.cuda.set_rng_state_all
    return states


@check("K18", "close lets go of everything")
def nothing_is_left(context: CheckContext) -> Findings:
    """Making, using and closing environments again and again leaves no memory, threads or files behind."""
    actions = context.actions(context.seeds[0], 3)

    def cycle() -> weakref.ref[Any]:
        session = context.make_unmanaged(context.SMALL_NUM_ENVS)
        session.run(actions, context.seeds[0])
        session.env.close()
        return weakref.ref(session.env.unwrapped)

    tracing, frozen = tracemalloc.is_tracing(), gc.get_freeze_count()
    tracemalloc.start()
    cycle()  # what the first one sets up is there from now on
    gc.collect()
    if not frozen:
        gc.freeze()  # what is there already need not be looked through each time
    try:
        looks = []
        for _ in range(LOOKS):
            left = [cycle() for _ in range(CYCLES)]
            gc.collect()
            looks.append(_in_use())
    finally:
        if not frozen:
            gc.unfreeze()
        if not tracing:
            tracemalloc.stop()
    alive = sum(ref() is not None for ref in left)
    if alive:
        yield Finding(f"{alive} of {CYCLES} closed environments are still referred to", "none")
    for name, allowed in LEFT_OVER.items():
        # Whatever is set up once is there after the first look; a leak grows between all looks.
        grown = min(new[name] - old[name] for old, new in pairwise(looks)) / CYCLES
        if grown > allowed:
            yield Finding(f"{grown:,.0f} {name} more for each environment made and closed", f"{allowed} at most")


def _in_use() -> dict[str, int]:
    found = (value for value in gc.get_objects() if type(value) is torch.Tensor)
    dense = (value for value in found if value.layout is torch.strided and value.device.type != "meta")  # of memory
    storages = [value.untyped_storage() for value in dense]
    tensors = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return {
        "Python bytes": tracemalloc.get_traced_memory()[0],
        "tensor bytes": sum(tensors.values()),
        "CUDA bytes": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "resident bytes": _resident_bytes(),
    }


def _resident_bytes() -> int:
    """0 where the system does not tell it by a file."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
