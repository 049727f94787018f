"""Checks K11 to K13: outputs are in their spaces; outputs and arguments belong to the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from gpu_vecenv.check.context import CheckContext, Findings, check, differing
from gpu_vecenv.check.records import Finding, Record, Tree, host, show
from gpu_vecenv.check.session import OUTPUTS, REFUSALS, RowActions, Session

FEW = 15  # steps with other numbers of environments
SPACES = "observation_space", "action_space", "single_observation_space", "single_action_space"


@check("K11", "outputs are in their spaces")
def outputs_in_space(context: CheckContext) -> Findings:
    """Type, dtype, shape and range of all outputs are as declared, finite, and constant over steps.

    For any number of environments: a single one and many are run for a few steps; and with the lowest and the highest
    action in every step.
    """
    session, actions = context.session(), context.actions(context.seeds[0])
    before = {name: deepcopy(getattr(session.env, name)) for name in SPACES}
    yield from _outputs_in_space(context, session, actions)
    for name, space in before.items():
        if getattr(session.env, name) != space:
            yield Finding(f"{name} has become {getattr(session.env, name)}", f"{space}, as before")
    for num_envs in (1, context.MANY_NUM_ENVS):
        yield from _outputs_in_space(context, context.session(num_envs), actions[:FEW])
    for high in (False, True):
        session = context.session()
        extreme = [_extreme(session.env.single_action_space, action, high) for action in actions[0]]
        yield from _outputs_in_space(context, session, [extreme] * context.steps)


def _extreme(space: Space[Any], action: Tree, high: bool) -> Tree:
    """The lowest or highest action of a space; ``action`` where there is none."""
    if isinstance(space, Dict):
        return {key: _extreme(inner, action[key], high) for key, inner in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_extreme(inner, part, high) for inner, part in zip(space.spaces, action, strict=True))
    if isinstance(space, Box):
        bound = space.high if high else space.low
        return np.where(np.isfinite(bound), bound, action).astype(space.dtype)
    if isinstance(space, MultiBinary):
        return np.full(space.shape, high, space.dtype)
    if isinstance(space, Discrete | MultiDiscrete):
        sizes = space.n if isinstance(space, Discrete) else space.nvec
        return np.asarray(space.start + high * (sizes - 1), space.dtype)[()]
    return action


def _outputs_in_space(context: CheckContext, session: Session, actions: Sequence[RowActions]) -> Findings:
    first = session.reset(context.seeds[0])
    yield from _obs_findings(session, first, 0)
    kinds = {f"obs{name}": kind_of(part) for name, part in parts_of(first.raw["obs"])}
    for step, row_actions in enumerate(actions, 1):
        record = Record(dict(zip(OUTPUTS, session.env.step(session.batch(row_actions)), strict=True)), session.rows)
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
    mask = info.get("action_mask")
    if mask is not None and not (host(mask).shape[:1] == (session.rows,) and host(mask).any(-1).all()):
        yield Finding(f"info['action_mask'] = {show(host(mask))}", "some action allowed in every row", step=step)
    for key in [key for key in info if f"_{key}" in info]:
        mask = host(info[f"_{key}"])
        if mask.dtype != bool or mask.shape != (session.rows,):
            yield Finding(f"info['_{key}'] {mask.shape} {mask.dtype}", f"({session.rows},) bool", step=step)
        elif key == "final_obs":
            for row in np.flatnonzero(mask).tolist():
                found = outside(session.env.single_observation_space, _row(info[key], row))
                yield from (Finding(f"final_obs{text}", wanted, row, step) for text, wanted, _ in found)


def outside(space: Space[Any], value: Tree) -> Iterator[tuple[str, str, int | None]]:
    """Yields (location and value, expected, row) for each part of ``value`` that is not in its space."""
    if isinstance(space, Dict) and isinstance(value, Mapping) and set(value) == set(space.spaces):
        for key, inner in space.spaces.items():
            yield from ((f".{key}{text}", wanted, row) for text, wanted, row in outside(inner, value[key]))
    elif isinstance(space, Tuple) and isinstance(value, tuple) and len(value) == len(space.spaces):
        for index, inner in enumerate(space.spaces):
            yield from ((f".{index}{text}", wanted, row) for text, wanted, row in outside(inner, value[index]))
    elif isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        array = host(value)
        if array.shape != space.shape or array.dtype != space.dtype:
            yield f" {array.shape} {array.dtype}", f"{space.shape} {space.dtype}", None
        elif isinstance(space, Box):
            # NaN compares False; infinity is rejected even if the bounds contain it.
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
    """Outputs do not change after they are returned, and writing into them does not affect the environment."""
    seed = context.seeds[0]
    actions = context.actions(seed)
    expected = context.session().run(actions, seed)
    now = [record.copied_again() for record in expected]
    yield from differing("outputs read again after the last step", now, expected)
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
        # Read-only arrays and expanded tensors cannot be changed by the caller.
        with contextlib.suppress(ValueError, RuntimeError):
            if isinstance(outputs, torch.Tensor):
                outputs.fill_(1)
            elif isinstance(outputs, np.ndarray):
                outputs.fill(1)


@check("K13", "arguments belong to the caller")
def arguments_stay(context: CheckContext) -> Findings:
    """Step and reset do not modify their arguments and do not depend on them afterwards."""
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
    mask = session.repeat_over_rows(np.arange(session.num_envs) == 1)
    options = {"reset_mask": mask.copy()}
    try:
        session.env.reset(options=options)
    except REFUSALS:
        context.notes.append("reset_mask is refused: options were not checked")
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
