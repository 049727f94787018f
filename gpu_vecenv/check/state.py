"""The checks that write state or exchange agents, K21 and K24 to K26: one function for each promise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, RowActions, Session, check, differing
from gpu_vecenv.check.episodes import mixed_actions
from gpu_vecenv.check.interface import parts_of
from gpu_vecenv.check.records import Array, Bools, Finding, Leaf, Record, Tree, canonical, difference, host

HOW = "give state_of=…, a function from the environment to what has them"
BEFORE = 9  # steps before state is written
KINDS = ("state", "state_dict")


def state_owner(context: CheckContext, session: Session, kind: str) -> Any:
    """The object that has ``state``, a mapping, or ``state_dict`` and ``load_state_dict``; None where none has."""
    state_of = context.options.state_of
    owner = session.under_test.unwrapped if state_of is None else state_of(session.under_test)
    if kind == "state":
        return owner if isinstance(getattr(owner, "state", None), Mapping) else None
    methods = (getattr(owner, name, None) for name in ("state_dict", "load_state_dict"))
    return owner if all(map(callable, methods)) else None


def _state(owner: Any, kind: str) -> Any:
    """Live arrays of ``state``, or what ``state_dict()`` gives."""
    return owner.state if kind == "state" else owner.state_dict()


def _written(owner: Any, kind: str, write: Callable[[str, Any], None]) -> None:
    """Let ``write`` change the arrays of the state in place, each by its name."""
    state = owner.state if kind == "state" else copy.deepcopy(owner.state_dict())
    for name, part in parts_of(state):
        write(name, part)
    if kind == "state_dict":
        owner.load_state_dict(state)


@check("K21", "a reset leaves nothing of what was before")
def poison_then_reset(context: CheckContext) -> Findings:
    """State that is overwritten with 0xFF, whole or of some replicas, is by a seeded reset as in a new environment."""
    kinds = [kind for kind in KINDS if state_owner(context, context.session(), kind) is not None]
    if not kinds:
        raise Inapplicable(f"there is no state, a mapping of arrays, and no load_state_dict to write it; {HOW}")
    for kind in kinds:
        names = _changing(context, kind)
        if not names:
            context.notes.append(f"{kind}: no array in it has a row for each replica, and changes")
            continue
        yield from _poisoned_whole(context, kind, names)
        if context.masked:
            yield from _poisoned_in_part(context, kind, names)


def _changing(context: CheckContext, kind: str) -> set[str]:
    """Names of the arrays with rows for each replica that seeds or steps change; the others are constants."""
    looks: list[dict[str, Array]] = []
    for replicas, seed in (
        (context.SMALL_NUM_ENVS, context.seeds[0]),
        (context.SMALL_NUM_ENVS, context.seeds[1]),
        (context.LARGE_NUM_ENVS, 0),
    ):
        session = context.session(replicas)
        session.run(context.actions(seed, BEFORE), seed)
        state = _state(state_owner(context, session, kind), kind)
        looks.append(
            {name: host(part) for name, part in parts_of(state) if isinstance(part, np.ndarray | torch.Tensor)}
        )
    found = set()
    for name, one in looks[0].items():
        other, large = (look.get(name, np.zeros(())) for look in looks[1:])
        if one.ndim and large.ndim and len(one) % context.SMALL_NUM_ENVS == 0 and one.dtype != object:
            by_replica = len(one) * context.LARGE_NUM_ENVS == len(large) * context.SMALL_NUM_ENVS
            if by_replica and len(one) and canonical(one) != canonical(other):
                found.add(name)
    return found


def _poison(names: set[str], replicas: Bools) -> Callable[[str, Any], None]:
    def write(name: str, part: Any) -> None:
        if name not in names:
            return
        rows = np.repeat(replicas, len(part) // len(replicas))
        if isinstance(part, torch.Tensor):
            bad = (
                torch.ones((), dtype=part.dtype)
                if part.dtype == torch.bool
                else _ones(torch.empty((), dtype=part.dtype))
            )
            part[torch.as_tensor(rows, device=part.device)] = bad.to(part.device)
        else:
            one = np.ones((), part.dtype)
            part[rows] = one if part.dtype == np.bool_ else np.frombuffer(b"\xff" * one.nbytes, part.dtype)[0]

    return write


def _ones(number: torch.Tensor) -> torch.Tensor:
    """A number all of whose bits are 1: NaN, -1 or the largest."""
    number.reshape(1).view(torch.uint8).fill_(255)
    return number


def _poisoned_whole(context: CheckContext, kind: str, names: set[str]) -> Findings:
    seed, other = context.seeds[:2]
    actions = context.actions(seed)
    session = context.session()
    session.run(context.actions(other, BEFORE), other)
    _written(state_owner(context, session, kind), kind, _poison(names, np.ones(session.replicas, np.bool_)))
    expected = context.session().run(actions, seed)
    yield from differing(f"reset after {kind} was overwritten", session.run(actions, seed), expected)


def _poisoned_in_part(context: CheckContext, kind: str, names: set[str]) -> Findings:
    mask = np.arange(context.SMALL_NUM_ENVS) % 2 == 0
    seed, reseed = context.seeds[0], context.seeds[3]
    before, after = context.actions(seed, BEFORE), context.actions(reseed)
    plain, session = context.session(), context.session()
    for each in (plain, session):
        each.run(before, seed)
    expected = list(map(plain.step, after))
    _written(state_owner(context, session, kind), kind, _poison(names, mask))
    try:
        record = session.reset(reseed, mask)
    except context.refusals:
        context.notes.append("reset_mask is refused: only resets of all replicas were checked")
        return
    got = list(map(session.step, after))
    fresh = context.session().run(after, reseed)
    what = f"a masked reset after {kind} of the replicas that it names was overwritten"
    yield from differing(f"a named replica, {what}", [record, *got], fresh, session.repeat_over_rows(mask))
    yield from differing(f"a replica not named, {what}", got, expected, session.repeat_over_rows(~mask))


@check("K24", "agents that are alike may be exchanged")
def exchanged_agents(context: CheckContext) -> Findings:
    """If agents that are declared permutable exchange state and actions, they exchange what they see and get.

    State is what ``state_dict`` or ``state`` holds; an array (replicas, agents, …) goes with its agents. A replica is
    compared until its episode ends: starts are drawn by place.
    """
    session = context.session()
    groups = context.options.permutable_agents
    groups = session.env.metadata.get("permutable_agents") if groups is None else groups
    if session.rows_per_env == 1:
        raise Inapplicable("a replica is one row, there are no agents to exchange")
    if not groups:
        how = 'permutable_agents=[[0, 1, 2], …] or metadata["permutable_agents"]'
        raise Inapplicable(f"no agents are declared permutable; give {how}")
    kinds = [kind for kind in KINDS[::-1] if state_owner(context, session, kind) is not None]
    if not kinds:
        raise Inapplicable(f"agents' state cannot be exchanged: neither load_state_dict nor state is there; {HOW}")
    for order in _orders([list(range(session.rows_per_env))] if groups is True else groups, session.rows_per_env):
        for seed in context.seeds[:2]:
            yield from _exchanged(context, kinds[0], order, seed)


def _orders(groups: Sequence[Sequence[int]], rows_per_env: int) -> list[list[int]]:
    """Place -> which agent stands there: in one all groups rotated, in one reversed."""
    orders: list[list[int]] = []
    for turned in (False, True):
        order = list(range(rows_per_env))
        for group in groups:
            others = [*group[1:], group[0]] if not turned else group[::-1]
            for place, agent in zip(group, others, strict=True):
                order[place] = agent
        if order not in (list(range(rows_per_env)), *orders):
            orders.append(order)
    return orders


def _exchanged(context: CheckContext, kind: str, order: Sequence[int], seed: int) -> Findings:
    before, after = context.actions(seed, 1), context.actions(seed + 500)
    plain, session = context.session(), context.session()
    for each in (plain, session):
        each.run(before, seed)
    shape = (session.replicas, session.rows_per_env)
    rows = np.arange(session.rows).reshape(shape)[:, order].reshape(-1)

    def write(_: str, part: Any) -> None:
        if isinstance(part, np.ndarray | torch.Tensor) and tuple(part.shape[:2]) == shape:
            moved: Any = part[:, list(order)]  # a copy
            part[...] = moved

    _written(state_owner(context, session, kind), kind, write)
    if session.allowed is not None:
        session.allowed = session.allowed[rows]
    going = ~plain.tracker.finished
    for step, actions in enumerate(after, len(before) + 1):
        expected = _rows_exchanged(plain.step(actions), rows)
        got = session.step([actions[row] for row in rows.tolist()])
        last = plain.tracker.finished
        for name, replicas in (
            ("rewards", going),
            ("terminations", going),
            ("truncations", going),
            ("obs", going & ~last),
        ):
            finding = difference([got], [expected], session.repeat_over_rows(replicas), name)
            if finding is not None:
                yield Finding(f"agents in the order {list(order)}: {finding.got}", finding.expected, finding.row, step)
                return
        going &= ~last
        if not going.any():
            return


def _rows_exchanged(record: Record, rows: Array) -> Record:
    changed = copy.copy(record)
    changed.leaves = {
        name: Leaf(leaf.values[rows], None if leaf.mask is None else leaf.mask[rows])
        for name, leaf in record.leaves.items()
        if record.by_row(leaf)
    }
    return changed


@check("K25", "state_dict keeps all that matters")
def round_trip(context: CheckContext) -> Findings:
    """Loaded in the middle of episodes, into the same or another instance, it gives the same trajectory; it is a copy."""
    session = context.session()
    if state_owner(context, session, "state_dict") is None:
        raise Inapplicable(f"there are no state_dict and load_state_dict; {HOW}")
    seed, other_seed = context.seeds[:2]
    actions = context.actions(seed)
    for cut in _cuts(context, session, actions, seed):
        session = context.session()
        session.run(actions[:cut], seed)
        saved = state_owner(context, session, "state_dict").state_dict()
        kept, known = copy.deepcopy(saved), session.tracking_state()
        expected = list(map(session.step, actions[cut:]))
        yield from _unchanged(f"a state_dict of step {cut}, after later steps", saved, kept, session.rows)
        other = context.session()
        other.run(context.actions(other_seed, 3), other_seed)
        for name, each in (("another instance", other), ("the same instance", session)):
            given = copy.deepcopy(kept)
            state_owner(context, each, "state_dict").load_state_dict(given)
            each.restore_tracking(known)
            got = list(map(each.step, actions[cut:]))
            yield from differing(f"{name} after load_state_dict of step {cut}", got, expected)
            yield from _unchanged(f"a state_dict of step {cut}, loaded and stepped from", given, kept, session.rows)


def _cuts(context: CheckContext, session: Session, actions: Sequence[RowActions], seed: int) -> list[int]:
    """After how many steps state is taken: soon, later, and where some row has just ended, if one does."""
    session.reset(seed)
    for step, action in enumerate(actions[: context.steps // 2], 1):
        session.step(action)
        if session.tracker.ended.any():
            return sorted({BEFORE, step, context.steps // 2})
    return sorted({BEFORE, context.steps // 2})


def _unchanged(what: str, now: Tree, before: Tree, rows: int) -> Findings:
    yield from differing(what, [Record({"state": now}, rows)], [Record({"state": before}, rows)])


@check("K26", "who has left is silent")
def silent_agents(context: CheckContext) -> Findings:
    """A row that ended before its replica gets reward 0 and no flag, and its actions change nothing for anybody."""
    session, seed = context.session(), context.seeds[1]
    if session.rows_per_env == 1:
        raise Inapplicable("a replica is one row, which ends with it")
    base, other = context.actions(seed), context.actions(seed + 500)
    expected, mixed, seen = [session.reset(seed)], [], 0
    for step, (actions, others) in enumerate(zip(base, other, strict=True), 1):
        tracker = session.tracker
        gone = (tracker.ended & ~tracker.finished[:, None]).reshape(-1)
        mixed.append(mixed_actions(actions, others, np.flatnonzero(gone).tolist()))
        expected.append(session.step(actions))
        seen += int(gone.sum())
        record, ends = expected[-1], session.repeat_over_rows(tracker.finished)  # then every row is flagged once more
        for name, loud in (("rewards", gone), ("terminations", gone & ~ends), ("truncations", gone & ~ends)):
            values = record.values(name)
            for row in np.flatnonzero(loud & (values != 0)).tolist():
                yield Finding(f"{name} = {values[row]} for a row that has ended", "0 or False", row, step)
    if not seen:
        raise Inapplicable(f"no row ended before its replica in {context.steps} steps; more steps may show one")
    yield from differing("other actions of rows that have ended", context.session().run(mixed, seed), expected)
