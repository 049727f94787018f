"""Check K10: episodes end, and are reset, as the autoreset mode and max_steps declare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.context import CheckContext, Findings, check, differing, mixed_actions
from gpu_vecenv.check.records import Array, Bools, Finding, Record, canonical, host
from gpu_vecenv.check.session import RowActions, Session

LONGEST = 5000  # steps that the check may run until episodes end
SOME, SEVERAL, MANY = 3, 5, 20  # the least numbers of ends from which "all of them" is concluded
NOTHING = [canonical(host(None))]  # the observation of an absent agent


class StepRecord(NamedTuple):
    """A step: its outputs, the previous ones, and the tracker's arrays, (num_envs,) or (num_envs, rows_per_env)."""

    step: int
    record: Record
    previous: Record
    age: Array
    resetting: Bools
    finished: Bools
    before: Bools
    flagged: Bools


@check("K10", "episodes end as declared")
def episode_contract(context: CheckContext) -> Findings:
    """Ends, limits, final observations and resets agree with the autoreset mode and ``max_steps``.

    If an environment has several rows, one for each agent, a row may end early: then its rewards are 0 and its flags
    False, and it is flagged again when its environment ends. There are many environments, so that in some of them
    termination and truncation coincide.
    """
    session, limit, seed = context.session(context.MANY_NUM_ENVS), context.max_steps, context.seeds[1]
    steps = max(context.steps, min(2 * limit + 3, LONGEST)) if limit else context.steps
    actions = context.actions(seed, steps)
    step_records: list[StepRecord] = []
    records = [session.reset(seed)]
    for step, action in enumerate(actions, 1):
        records.append(session.step(action))
        step_records.append(_step(session, step, records[-1], records[-2]))
        yield from _flags_and_rewards(step_records[-1], limit)
    yield from _limit(context, step_records)
    yield from _lagging(context, step_records)
    yield from _last_observations(context, session, step_records)
    yield from _after_resets(context, actions)
    if not any(step_record.finished.any() for step_record in step_records):
        context.notes.append(f"no episode ended in {steps} steps: ends and autoreset were not checked")
    elif session.mode is AutoresetMode.NEXT_STEP:
        yield from _ignored_actions(context, step_records, actions, records, seed)
    elif session.mode is AutoresetMode.DISABLED:
        yield from _step_after_end(context, actions, seed)


def _step(session: Session, step: int, record: Record, previous: Record) -> StepRecord:
    tracker, flags = session.tracker, [record.values(name) for name in ("terminations", "truncations")]
    flagged = (flags[0].astype(np.bool_) | flags[1].astype(np.bool_)).reshape(tracker.shape)
    seen = tracker.age.copy(), tracker.resetting, tracker.finished.copy(), tracker.before, flagged
    return StepRecord(step, record, previous, *seen)


def _flags_and_rewards(step_record: StepRecord, limit: int | None) -> Findings:
    shape = step_record.before.shape
    truncated = step_record.record.values("truncations").astype(np.bool_).reshape(shape)
    loud = step_record.flagged | (step_record.record.values("rewards").reshape(shape) != 0)
    resetting, finished = step_record.resetting[:, None], step_record.finished[:, None]
    age = np.broadcast_to(step_record.age[:, None], shape)
    silent = "reward 0 and flags False"
    broken = [
        ("a reward or a flag in the step that resets", silent, resetting & loud),
        ("a reward or a flag of a row that has ended", silent, step_record.before & ~resetting & ~finished & loud),
        (
            "no flag, although all rows of its environment have ended",
            "every row flagged",
            finished & ~step_record.flagged,
        ),
    ]
    if limit:
        early, late = truncated & ~resetting & (age != limit), ~resetting & ~finished & (age == limit)
        broken += [
            ("truncated", f"truncations at step {limit} only", early),
            ("the episode continues", f"its end at step {limit} at the latest", late),
        ]
    for got, expected, wrong in broken:
        if wrong.any():
            row = int(wrong.reshape(-1).argmax())
            yield Finding(f"{got} (step {age.reshape(-1)[row]} of the episode)", expected, row, step_record.step)


def _limit(context: CheckContext, step_records: Sequence[StepRecord]) -> Findings:
    limit = context.max_steps
    if not limit:
        context.notes.append("max_steps is unknown: limits are not checked")
        return
    at_limit = [(step_record, step_record.finished & (step_record.age == limit)) for step_record in step_records]
    reached = sum(int(chosen.sum()) for _, chosen in at_limit)
    if not reached:
        context.notes.append(f"no episode reached max_steps = {limit}")
    # Agents that left before the limit are not truncated at it.
    present = [(r.record, chosen[:, None] & ~r.before) for r, chosen in at_limit]
    counts = np.array([rows for _, rows in present]).sum(0)
    terminated, truncated = (
        sum(record.values(name).reshape(rows.shape).astype(np.bool_) & rows for record, rows in present)
        for name in ("terminations", "truncations")
    )
    # A single episode may terminate exactly at the limit; if all do, the limit is reported with the wrong flag.
    if reached >= SOME and not np.any(truncated):
        yield Finding(f"{reached} episodes reached step {limit}, and none was truncated", "truncations True")
        return
    if reached >= MANY and np.all(np.equal(terminated, counts)):
        yield Finding(f"{reached} episodes reached step {limit}, and all were terminated as well", "truncations only")
    never = (counts >= SEVERAL) & np.equal(truncated, 0)
    if 2 * np.sum(truncated) > reached and never.any():
        row = int(never.argmax())
        got = f"{counts.reshape(-1)[row]} episodes reached step {limit}, and none was truncated"
        yield Finding(got, "truncations True, as elsewhere", row)


def _rows_per_env(step_records: Sequence[StepRecord]) -> int:
    """Rows of each environment."""
    return int(step_records[0].before.shape[1])


def _lagging(context: CheckContext, step_records: Sequence[StepRecord]) -> Findings:
    """Observations of the step before: those of all first steps are the start's, though all others change.

    If rewards and flags of first steps do not depend on the actions either, this is only noted: an environment that
    starts at rest, moves by its velocity before it accelerates and shows positions only, such as MPE's
    simple_adversary, has the same outputs.
    """
    first, others = [0, 0], [0, 0]  # changed, counted
    for record, previous, step_record in ((each.record, each.previous, each) for each in step_records):
        calm = ~step_record.resetting & ~step_record.finished
        restarted = "after_reset.obs" if previous.named("after_reset.obs") else "obs"
        for row in np.flatnonzero((calm[:, None] & ~step_record.before).reshape(-1)).tolist():
            begins = step_record.age[row // _rows_per_env(step_records)] == 1
            counted = first if begins else others
            counted[0] += record.row("obs", row) != previous.row(restarted if begins else "obs", row)
            counted[1] += 1
    if first[1] < MANY or first[0] or not 10 * others[0] > 9 * others[1] > 0:
        return
    got = f"the first step of all {first[1]} episodes returns the first observation again"
    if _first_actions_matter(context):
        yield Finding(got, "another one, since its rewards or flags depend on the action")
    else:
        context.notes.append(f"{got}: right if all starts at rest and velocities are not observed")


def _first_actions_matter(context: CheckContext) -> bool:
    """Whether rewards or flags of the first step after a seeded reset depend on its actions."""
    seed = context.seeds[1]
    one, other = (
        context.session(context.MANY_NUM_ENVS).run(context.actions(salt, 1), seed)[-1] for salt in (seed, seed + 500)
    )
    names = "rewards", "terminations", "truncations"
    return any(not np.array_equal(one.values(name), other.values(name)) for name in names)


def _after_resets(context: CheckContext, actions: Sequence[RowActions]) -> Findings:
    """After reset(), in mid-episode or right after an end, clocks begin anew and no reset is pending."""
    limit, seed = context.max_steps, context.seeds[1]
    if not limit or limit > LONGEST:
        return
    for what, ended in (("in mid-episode", False), ("right after an end", True)):
        session = context.session(context.MANY_NUM_ENVS)
        if not ended:
            session.run(actions[: max(1, min(limit // 2, 10))], seed)
        elif not session.run_until_end(actions, seed):
            return
        previous = session.reset()
        for step, action in enumerate(actions[: limit + 1], 1):
            step_record = _step(session, step, session.step(action), previous)
            finding = next(_flags_and_rewards(step_record, limit), None)
            if finding is not None:
                yield Finding(f"after a reset {what}: {finding.got}", finding.expected, finding.row, step)
                break
            previous = step_record.record


def _last_observations(context: CheckContext, session: Session, step_records: Sequence[StepRecord]) -> Findings:
    """At an end the last observation and the first of the next episode are where the mode puts them."""
    mode = session.mode
    final, starts = {
        AutoresetMode.SAME_STEP: ("info.final_obs", "obs"),
        AutoresetMode.NEXT_STEP: ("obs", "obs"),
        AutoresetMode.DISABLED: ("obs", "after_reset.obs"),
    }[mode or AutoresetMode.NEXT_STEP]
    ends, same = np.zeros((2, session.rows), np.int64)
    cut = stale = moving = ordinary = both = both_same = 0
    for step_record in step_records:
        leaf = step_record.record.leaves.get("info.final_obs")
        finished = session.repeat_over_rows(step_record.finished)
        if mode is AutoresetMode.SAME_STEP:
            nested = [step_record.record.leaves[name] for name in step_record.record.named("info.final_obs")]
            marked = next((leaf.mask for leaf in nested if leaf.mask is not None), np.zeros(session.rows, np.bool_))
            # A row that ends before its environment may have its last observation in final_obs or in obs.
            wrong = (marked != finished) & ~(step_record.flagged.reshape(-1) & ~finished)
            if wrong.any():
                row = int(wrong.argmax())
                got = f"info['_final_obs'] is {marked[row]}" if nested else "info has no final_obs"
                yield Finding(got, f"final_obs where an episode ends: {finished[row]}", row, step_record.step)
            finished &= marked
        elif leaf is not None:
            yield Finding(f"info has final_obs, but the mode is {mode}", "no final_obs", step=step_record.step)
        resets = session.repeat_over_rows(step_record.resetting)
        last_record = step_record.previous if mode is AutoresetMode.NEXT_STEP else step_record.record
        gone = step_record.before.reshape(-1)
        ended_now = (resets if mode is AutoresetMode.NEXT_STEP else finished) & ~gone
        for row in np.flatnonzero(ended_now).tolist():
            last = last_record.row(final, row)
            ends[row] += 1
            unchanged = last == step_record.record.row(starts, row)
            same[row] += unchanged
            if last_record.values("terminations")[row] and last_record.values("truncations")[row]:
                both += 1
                both_same += unchanged
            if mode is AutoresetMode.SAME_STEP and step_record.record.values("truncations")[row]:
                cut += 1
                stale += last == step_record.previous.row("obs", row)
        for row in np.flatnonzero(~finished & ~resets & ~gone).tolist():
            ordinary += 1
            moving += step_record.record.row("obs", row) != step_record.previous.row("obs", row)
    if 2 * moving <= ordinary:
        context.notes.append("observations rarely change: last and first observations were not compared")
        return
    for row in np.flatnonzero((ends >= SOME) & (same == ends)).tolist():
        got = f"at all {ends[row]} ends the last observation equals the first one of the next episode"
        yield Finding(got, "the observation after the last step", row)
    if both >= SOME and both_same == both:
        got = f"at all {both} ends by termination and truncation the last observation equals the next first one"
        yield Finding(got, "the observation after the last step")
    # A terminating step may leave the observation as it was; a truncated one is a step like any other.
    if cut >= SOME and stale == cut:
        yield Finding(
            f"at all {cut} truncations final_obs is the observation of the step before",
            "the observation after that step",
        )


def _ignored_actions(
    context: CheckContext,
    step_records: Sequence[StepRecord],
    actions: Sequence[RowActions],
    expected: Sequence[Record],
    seed: int,
) -> Findings:
    if not context.reproducible:
        context.notes.append("two identical runs differ, see K01: other actions in steps that reset were not tried")
        return
    session, others = context.session(context.MANY_NUM_ENVS), context.actions(seed + 500, len(actions))
    ignored = [np.flatnonzero(session.repeat_over_rows(step_record.resetting)).tolist() for step_record in step_records]
    mixed = [mixed_actions(one, two, rows) for one, two, rows in zip(actions, others, ignored, strict=True)]
    yield from differing("other actions in steps that reset", session.run(mixed, seed), expected)


def _step_after_end(context: CheckContext, actions: Sequence[RowActions], seed: int) -> Findings:
    """Without autoreset a step of an ended environment raises an error or changes nothing."""
    session = context.session()
    session.resets_ended = False
    records = session.run(actions[:0], seed)
    for action in actions:
        records.append(session.step(action))
        if session.tracker.finished.any():
            break
    row = int(session.repeat_over_rows(session.tracker.finished).argmax())
    try:
        after = session.step(action)
    except context.refusals:
        return
    if after.values("rewards")[row] != 0 or after.row("obs", row) not in (records[-1].row("obs", row), NOTHING):
        yield Finding("an ended environment continues without a reset", "an error, or no change", row, len(records))
