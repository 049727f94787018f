"""Checks K21 and K24 to K26: overwritten and restored state, permuted agents, agents that have left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, check, differing, mixed_actions
from gpu_vecenv.check.outputs import parts_of
from gpu_vecenv.check.records import Array, Bools, Finding, Leaf, Record, Tree, canonical, difference, host
from gpu_vecenv.check.session import RowActions, Session

HOW = "give state_of=…, a function from the environment to the object that has them"
BEFORE = 9  # steps before state is written or saved
KINDS = ("state", "state_dict")


def state_owner(context: CheckContext, session: Session, kind: str) -> Any:
    """The object with ``state``, a mapping, or ``state_dict`` and ``load_state_dict``; None if there is none."""
    state_of = context.options.state_of
    owner = session.under_test.unwrapped if state_of is None else state_of(session.under_test)
    if kind == "state":
        return owner if isinstance(getattr(owner, "state", None), Mapping) else None
    methods = (getattr(owner, name, None) for name in ("state_dict", "load_state_dict"))
    return owner if all(map(callable, methods)) else None


def _state(owner: Any, kind: str) -> Any:
    """``state``, live arrays, or ``state_dict()``."""
    return owner.state if kind == "state" else owner.state_dict()


def _written(owner: Any, kind: str, write: Callable[[str, Any], None]) -> None:
    """Call ``write(name, array)`` on each array of the state, then load the state if it is a copy."""
    state = owner.state if kind == "state" else copy.deepcopy(owner.state_dict())
    for name, part in parts_of(state):
        write(name, part)
    if kind == "state_dict":
        owner.load_state_dict(state)


@check("K21", "a seeded reset does not depend on earlier state")
def poison_then_reset(context: CheckContext) -> Findings:
    """After its state was overwritten with 0xFF, a seeded reset makes an environment bitwise equal to a new one."""
    kinds = [kind for kind in KINDS if state_owner(context, context.session(), kind) is not None]
    if not kinds:
        raise Inapplicable(f"there is neither state, a mapping of arrays, nor load_state_dict; {HOW}")
    for kind in kinds:
        names = _changing(context, kind)
        if not names:
            context.notes.append(f"{kind}: no array has a row for each environment and changes")
            continue
        yield from _poisoned_whole(context, kind, names)
        yield from _own_rows(context, kind, names)
        if context.masked:
            yield from _poisoned_in_part(context, kind, names)


def _changing(context: CheckContext, kind: str) -> set[str]:
    """Names of arrays with rows for each environment that depend on the seed; the others are constants."""
    states: list[dict[str, Array]] = []
    for num_envs, seed in (
        (context.SMALL_NUM_ENVS, context.seeds[0]),
        (context.SMALL_NUM_ENVS, context.seeds[1]),
        (context.LARGE_NUM_ENVS, 0),
    ):
        session = context.session(num_envs)
        session.run(context.actions(seed, BEFORE), seed)
        state = _state(state_owner(context, session, kind), kind)
        states.append(
            {name: host(part) for name, part in parts_of(state) if isinstance(part, np.ndarray | torch.Tensor)}
        )
    names = set()
    for name, one in states[0].items():
        other, large = (other_state.get(name, np.zeros(())) for other_state in states[1:])
        if one.ndim and large.ndim and len(one) % context.SMALL_NUM_ENVS == 0 and one.dtype != object:
            by_env = len(one) * context.LARGE_NUM_ENVS == len(large) * context.SMALL_NUM_ENVS
            if by_env and len(one) and canonical(one) != canonical(other):
                names.add(name)
    return names


def _poison(names: set[str], env_mask: Bools) -> Callable[[str, Any], None]:
    def write(name: str, part: Any) -> None:
        if name not in names:
            return
        rows = np.repeat(env_mask, len(part) // len(env_mask))
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
    """Set all bits: NaN, -1 or the largest value."""
    number.reshape(1).view(torch.uint8).fill_(255)
    return number


def _poisoned_whole(context: CheckContext, kind: str, names: set[str]) -> Findings:
    seed, other = context.seeds[:2]
    actions = context.actions(seed)
    session = context.session()
    session.run(context.actions(other, BEFORE), other)
    _written(state_owner(context, session, kind), kind, _poison(names, np.ones(session.num_envs, np.bool_)))
    expected = context.session().run(actions, seed)
    yield from differing(f"reset after {kind} was overwritten", session.run(actions, seed), expected)


def _own_rows(context: CheckContext, kind: str, names: set[str]) -> Findings:
    """The state of one environment, written into the rows of another, changes no third one."""
    seed, steps = context.seeds[0], context.steps
    actions = [*context.actions(seed, BEFORE), *context.actions(context.seeds[1]), *context.actions(seed)]
    plain, session = context.session(), context.session()
    source, target = 1, 2
    plain.reset(seed)
    records, goes_on = list[Record](), list[bool]()
    for action in actions:
        records.append(plain.step(action))
        goes_on.append(not (plain.tracker.finished | plain.tracker.resetting)[target])
    # A step that ends or begins an episode may show nothing of the state before it.
    lasting = [n for n in range(BEFORE, BEFORE + steps) if goes_on[n]]
    begin = lasting[0] if lasting else BEFORE
    session.run(actions[:begin], seed)
    differed = False

    def write(name: str, part: Any) -> None:
        nonlocal differed
        if name in names:
            size = len(part) // session.num_envs
            rows: Any = part[source * size : (source + 1) * size] * 1  # a copy
            differed |= bool((part[target * size : (target + 1) * size] != rows).any())
            part[target * size : (target + 1) * size] = rows

    _written(state_owner(context, session, kind), kind, write)
    others = session.repeat_over_rows(np.arange(session.num_envs) != target)
    tracker = session.tracker
    for by_env in (tracker.age, tracker.finished, tracker.ended):
        by_env[target] = by_env[source]
    if session.allowed is not None:
        # An environment may compute masks from its state, or keep the ones that it returned.
        session.allowed[session.rows_of(target)] &= session.allowed[session.rows_of(source)]
    expected = records[begin : begin + steps]
    got = list(map(session.step, actions[begin : begin + steps]))
    what = f"after {kind} of env {source} was written into the rows of env {target}"
    yield from differing(what, got, expected, others)
    same = all(session.trajectory(got, r) == session.trajectory(expected, r) for r in range(session.num_envs))
    if same and lasting and differed:
        yield Finding(f"{kind} of env {target} was overwritten, and its trajectory is the same", "another trajectory")


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
        context.notes.append("reset_mask is refused: only resets of all environments were checked")
        return
    got = list(map(session.step, after))
    fresh = context.session().run(after, reseed)
    what = f"a masked reset after {kind} of the environments in its mask was overwritten"
    yield from differing(f"an environment in the mask, {what}", [record, *got], fresh, session.repeat_over_rows(mask))
    yield from differing(f"an environment outside the mask, {what}", got, expected, session.repeat_over_rows(~mask))


@check("K24", "permutable agents can be permuted")
def permuted_agents(context: CheckContext) -> Findings:
    """Permuting the state and actions of permutable agents permutes their observations, rewards and flags.

    State is ``state_dict()`` or ``state``; arrays (num_envs, agents, …) are permuted. An environment is compared until
    its episode ends, because starts are drawn by agent index.
    """
    session = context.session()
    groups = context.options.permutable_agents
    groups = session.env.metadata.get("permutable_agents") if groups is None else groups
    if session.rows_per_env == 1:
        raise Inapplicable("an environment has one row: there are no agents to permute")
    if not groups:
        how = 'permutable_agents=[[0, 1, 2], …] or metadata["permutable_agents"]'
        raise Inapplicable(f"no agents are declared permutable; give {how}")
    kinds = [kind for kind in KINDS[::-1] if state_owner(context, session, kind) is not None]
    if not kinds:
        raise Inapplicable(f"agents' state cannot be written: there is neither load_state_dict nor state; {HOW}")
    for order in _orders([list(range(session.rows_per_env))] if groups is True else groups, session.rows_per_env):
        for seed in context.seeds[:2]:
            yield from _permuted(context, kinds[0], order, seed)


def _orders(groups: Sequence[Sequence[int]], rows_per_env: int) -> list[list[int]]:
    """Agent orders to try: all groups rotated, and all groups reversed."""
    orders: list[list[int]] = []
    for turned in (False, True):
        order = list(range(rows_per_env))
        for group in groups:
            others = [*group[1:], group[0]] if not turned else group[::-1]
            for agent_index, agent in zip(group, others, strict=True):
                order[agent_index] = agent
        if order not in (list(range(rows_per_env)), *orders):
            orders.append(order)
    return orders


def _permuted(context: CheckContext, kind: str, order: Sequence[int], seed: int) -> Findings:
    before, after = context.actions(seed, 1), context.actions(seed + 500)
    plain, session = context.session(), context.session()
    for each in (plain, session):
        each.run(before, seed)
    shape = (session.num_envs, session.rows_per_env)
    rows = np.arange(session.rows).reshape(shape)[:, order].reshape(-1)

    def write(_: str, part: Any) -> None:
        if isinstance(part, np.ndarray | torch.Tensor) and tuple(part.shape[:2]) == shape:
            moved: Any = part[:, list(order)]  # a copy
            part[...] = moved

    _written(state_owner(context, session, kind), kind, write)
    if session.allowed is not None:
        session.allowed = session.allowed[rows]
    running = ~plain.tracker.finished
    for step, actions in enumerate(after, len(before) + 1):
        expected = _rows_permuted(plain.step(actions), rows)
        got = session.step([actions[row] for row in rows.tolist()])
        last = plain.tracker.finished
        for name, env_mask in (
            ("rewards", running),
            ("terminations", running),
            ("truncations", running),
            ("obs", running & ~last),
        ):
            finding = difference([got], [expected], session.repeat_over_rows(env_mask), name)
            if finding is not None:
                yield Finding(f"agents in the order {list(order)}: {finding.got}", finding.expected, finding.row, step)
                return
        running &= ~last
        if not running.any():
            return


def _rows_permuted(record: Record, rows: Array) -> Record:
    changed = copy.copy(record)
    changed.leaves = {
        name: Leaf(leaf.values[rows], None if leaf.mask is None else leaf.mask[rows])
        for name, leaf in record.leaves.items()
        if record.by_row(leaf)
    }
    return changed


@check("K25", "state_dict is complete")
def round_trip(context: CheckContext) -> Findings:
    """Loaded mid-episode, into the same or another instance, it gives the same trajectory; it is a copy."""
    session = context.session()
    if state_owner(context, session, "state_dict") is None:
        raise Inapplicable(f"there are no state_dict and load_state_dict; {HOW}")
    seed, other_seed = context.seeds[:2]
    actions = context.actions(seed)
    plain = context.session().run(actions, seed)
    for cut in _cuts(context, session, actions, seed):
        session = context.session()
        session.run(actions[:cut], seed)
        saved = state_owner(context, session, "state_dict").state_dict()
        kept, tracking = copy.deepcopy(saved), session.tracking_state()
        expected = list(map(session.step, actions[cut:]))
        yield from differing(f"after state_dict() at step {cut}", expected, plain[cut + 1 :])
        yield from _unchanged(f"a state_dict of step {cut}, after later steps", saved, kept, session.rows)
        other = context.session()
        other.run(context.actions(other_seed, 3), other_seed)
        for name, each in (("another instance", other), ("the same instance", session)):
            given = copy.deepcopy(kept)
            state_owner(context, each, "state_dict").load_state_dict(given)
            each.restore_tracking(tracking)
            got = list(map(each.step, actions[cut:]))
            yield from differing(f"{name} after load_state_dict of step {cut}", got, expected)
            yield from _unchanged(f"a state_dict of step {cut}, loaded and stepped from", given, kept, session.rows)


def _cuts(context: CheckContext, session: Session, actions: Sequence[RowActions], seed: int) -> list[int]:
    """Steps after which state is saved: at once, early, halfway, and where a row has just ended, if one does."""
    session.reset(seed)
    for step, action in enumerate(actions[: context.steps // 2], 1):
        session.step(action)
        if session.tracker.ended.any():
            return sorted({0, BEFORE, step, context.steps // 2})
    return sorted({0, BEFORE, context.steps // 2})


def _unchanged(what: str, now: Tree, before: Tree, rows: int) -> Findings:
    yield from differing(what, [Record({"state": now}, rows)], [Record({"state": before}, rows)])


@check("K26", "rows that have ended get reward 0 and no flag")
def ended_rows(context: CheckContext) -> Findings:
    """A row that ended before its environment gets reward 0 and no flag, and its actions change nothing."""
    session, seed = context.session(), context.seeds[1]
    if session.rows_per_env == 1:
        raise Inapplicable("an environment has one row, which ends with it")
    base, other = context.actions(seed), context.actions(seed + 500)
    expected, mixed, seen = [session.reset(seed)], [], 0
    for step, (actions, others) in enumerate(zip(base, other, strict=True), 1):
        tracker = session.tracker
        gone = (tracker.ended & ~tracker.finished[:, None]).reshape(-1)
        mixed.append(mixed_actions(actions, others, np.flatnonzero(gone).tolist()))
        expected.append(session.step(actions))
        seen += int(gone.sum())
        record, ends = expected[-1], session.repeat_over_rows(tracker.finished)  # then every row is flagged again
        for name, loud in (("rewards", gone), ("terminations", gone & ~ends), ("truncations", gone & ~ends)):
            values = record.values(name)
            for row in np.flatnonzero(loud & (values != 0)).tolist():
                yield Finding(f"{name} = {values[row]} for a row that has ended", "0 or False", row, step)
    if not seen:
        raise Inapplicable(f"no row ended before its environment in {context.steps} steps; try more steps")
    yield from differing("other actions of rows that have ended", context.session().run(mixed, seed), expected)
