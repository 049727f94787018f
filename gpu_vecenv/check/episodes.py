"""The checks on seeds, replicas and episodes, K01 to K10: one function for each promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.context import (
    REFUSALS,
    CheckContext,
    Findings,
    Inapplicable,
    RowActions,
    Session,
    check,
    differing,
)
from gpu_vecenv.check.records import Array, Bools, Finding, Record, canonical, difference, host

EPISODES = 6  # of each replica, to see whether they differ
LONGEST = 5000  # steps that a check may take to see episodes end
SOME = 3  # ends from which on "all of them" is no coincidence
NOTHING = [canonical(host(None))]  # the observation of an agent that is not there
VARIED = 8  # different starts among 16 from which on three of six are expected to differ


@check("K01", "same seed and actions, same trajectory")
def same_seed(context: CheckContext) -> Findings:
    """Two instances agree in every bit, whatever else runs beside them; so does one that is seeded once more."""
    for seed in context.seeds[:2]:
        actions = context.actions(seed)
        first, twin, other = context.session(), context.session(), context.session()
        expected = first.run(actions, seed)
        other.reset(seed + 1000)
        got = [twin.reset(seed)]
        for step in actions:
            other.step(step)
            got.append(twin.step(step))
        yield from differing(f"a second instance, seed {seed}", got, expected)
        yield from differing(f"the same instance, seed {seed} given again", first.run(actions, seed), expected)


@check("K02", "another seed, another trajectory")
def other_seed(context: CheckContext) -> Findings:
    """Under equal actions no replica sees the same under two seeds, be they neighbours or far apart."""
    context.require_randomness()
    first, session = context.seeds[0], context.session()
    far = first + 2**32
    actions = context.same_actions_everywhere(context.actions(first), session)
    trajectories = dict(context.trajectories)
    try:
        records = session.run(actions, far)
    except REFUSALS:
        context.notes.append(f"seed {far} is refused, and so not compared")
    else:
        trajectories |= {(far, replica): session.trajectory(records, replica) for replica in range(session.replicas)}
    for replica in range(session.replicas):
        seeds = sorted(seed for seed, own in trajectories if own == replica)
        seen: dict[bytes, int] = {}
        for seed in seeds:
            earlier = seen.setdefault(trajectories[seed, replica], seed)
            if earlier != seed:
                yield Finding(
                    f"seeds {earlier} and {seed} give the same",
                    "different trajectories",
                    replica * session.rows_per_env,
                )


@check("K03", "replicas differ")
def replicas_differ(context: CheckContext) -> Findings:
    """Under one seed and equal actions no two replicas see the same."""
    context.require_randomness()
    yield from _repeated(context, lambda one, two: one[0] == two[0])


@check("K04", "no stream is used twice")
def streams_differ(context: CheckContext) -> Findings:
    """No replica repeats what another one saw under another seed (as seed + replica makes them do)."""
    context.require_randomness()
    yield from _repeated(context, lambda one, two: one[0] != two[0] and one[1] != two[1])


def _repeated(context: CheckContext, compared: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Findings:
    rows_per_env = context.session().rows_per_env
    pairs = list(context.trajectories.items())
    for place, (key, trajectory) in enumerate(pairs):
        for other, earlier in pairs[:place]:
            if trajectory == earlier and compared(key, other):
                what = "(seed {}, replica {}) repeats (seed {}, replica {})".format(*key, *other)
                yield Finding(what, "different trajectories", key[1] * rows_per_env)


@check("K05", "the number of replicas changes nothing")
def prefix(context: CheckContext) -> Findings:
    """The replicas of a small environment are, bit by bit, the first ones of a larger environment."""
    for seed in context.seeds[:2]:
        actions = context.actions(seed)
        small, large = context.session(), context.session(context.LARGE_NUM_ENVS)
        what = f"{large.replicas} replicas, not {small.replicas}, seed {seed}"
        every = np.ones(small.rows, np.bool_)
        yield from differing(what, large.run(actions, seed), small.run(actions, seed), every)


@check("K06", "replicas do not touch each other")
def isolation(context: CheckContext) -> Findings:
    """Other actions of one replica leave all the others' bits as they are."""
    seed = context.seeds[1]
    base, other = context.actions(seed), context.actions(seed + 500)
    expected = context.session().run(base, seed)
    inert = True
    for replica in range(context.SMALL_NUM_ENVS):
        session = context.session()
        own = range(session.rows)[session.rows_of(replica)]
        got = session.run([mixed_actions(one, two, own) for one, two in zip(base, other, strict=True)], seed)
        chosen = np.arange(context.SMALL_NUM_ENVS) != replica
        yield from differing(f"replica {replica} acts otherwise", got, expected, session.repeat_over_rows(chosen))
        inert &= session.trajectory(got, replica) == session.trajectory(expected, replica)
    if inert:
        context.notes.append("no replica's trajectory depends on its own actions")


def mixed_actions(base: RowActions, other: RowActions, rows: Sequence[int]) -> RowActions:
    """Other actions for these rows."""
    return [other[row] if row in rows else action for row, action in enumerate(base)]


@check("K07", "a reset without a seed goes on")
def unseeded_reset(context: CheckContext) -> Findings:
    """reset() after reset(seed=…) is no repetition of it, yet is itself repeatable."""
    seed = context.seeds[0]
    actions = context.actions(seed)
    session, twin = context.session(), context.session()
    first, again = session.run(actions, seed), session.run(actions)
    twin.run(actions, seed)
    yield from differing("a second instance, reset() after the same steps", twin.run(actions), again)
    if not context.random:
        context.notes.append("nothing in it is random: whether reset() repeats an episode cannot be seen")
    elif all(session.trajectory(first, r) == session.trajectory(again, r) for r in range(session.replicas)):
        yield Finding("reset() repeats what reset(seed=…) began, in every replica", "other episodes")


@check("K08", "autoreset begins new episodes")
def episodes_differ(context: CheckContext) -> Findings:
    """Six episodes in a row of one replica, acted alike, differ; so do their first observations, where starts vary."""
    context.require_randomness()
    session = context.session()
    longest = min(LONGEST, 10 * context.steps if not context.max_steps else (EPISODES + 1) * (context.max_steps + 1))
    starts, episodes = _episodes(session, context, longest)
    if min(map(len, episodes)) < EPISODES:
        raise Inapplicable(f"some replica ends fewer than {EPISODES} episodes in {longest} steps")
    varied = len(context.starts) >= VARIED
    for name, trajectories in (("first observations", starts), ("episodes", episodes)):
        kinds = [len(set(own[:EPISODES])) for own in trajectories]
        if varied:
            for replica, count in enumerate(kinds):
                if count < 3:
                    got = f"{count} different {name} in {EPISODES} episodes"
                    yield Finding(got, "3 or more", replica * session.rows_per_env)
        elif max(kinds) == 1 and (name == "episodes" or len(context.starts) > 1):
            yield Finding(f"every replica repeats its {name}", "different ones")


def _episodes(session: Session, context: CheckContext, longest: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Of each replica the starts and the trajectories of its episodes; the action depends on the episode's age alone."""
    seed, replicas = context.seeds[0], range(session.replicas)
    script = context.same_actions_everywhere(context.actions(seed), session)
    first = session.reset(seed)
    starts = [[first.bits(first.named("obs"), session.rows_of(r))] for r in replicas]
    episodes: list[list[bytes]] = [[] for _ in replicas]
    trajectory = [own[0] for own in starts]
    for _ in range(longest):
        tracker = session.tracker
        age = np.where(tracker.finished, 0, tracker.age)
        ages = session.repeat_over_rows(age)
        record = session.step([script[age % len(script)][row] for row, age in enumerate(ages)])
        begins = tracker.resetting if session.mode is AutoresetMode.NEXT_STEP else tracker.finished
        last = record.named("rewards", "terminations", "truncations")
        for replica in replicas:
            rows = session.rows_of(replica)
            if not tracker.resetting[replica]:
                at_once = begins[replica] and session.mode is AutoresetMode.SAME_STEP
                trajectory[replica] += record.bits(last if at_once else [*last, *record.named("obs")], rows)
            if tracker.finished[replica]:
                episodes[replica].append(trajectory[replica])
            if begins[replica]:
                trajectory[replica] = record.bits(record.named("after_reset.obs") or record.named("obs"), rows)
                starts[replica].append(trajectory[replica])
        if min(map(len, episodes)) >= EPISODES:
            break
    return starts, episodes


@check("K09", "a masked reset touches what it names")
def masked_reset(context: CheckContext) -> Findings:
    """options["reset_mask"] resets these replicas, with a seed reseeds these, and leaves all others' bits alone."""
    mask = np.arange(context.SMALL_NUM_ENVS) % 2 == 0
    seed, reseed = context.seeds[0], context.seeds[3]
    before, after = context.actions(seed, 5), context.actions(reseed)
    plain = context.session()
    plain.run(before, seed)
    expected = list(map(plain.step, after))
    for given in (None, reseed):
        session = context.session()
        last = session.run(before, seed)[-1]
        over = session.tracker.finished.copy()
        try:
            record = session.reset(given, mask)
        except REFUSALS as error:
            if session.mode is AutoresetMode.DISABLED:  # there is no other way to go on
                raise
            raise Inapplicable(f"reset_mask is refused: {error}") from error
        what = "after a masked reset" + (f" with seed {given}" if given is not None else "")
        others, chosen = session.repeat_over_rows(~mask), session.repeat_over_rows(mask)
        finding = difference([record], [last], others & ~session.repeat_over_rows(over), "obs")
        if finding is not None:
            yield replace(finding, got=f"returned by a masked reset, of a replica not named: {finding.got}", step=5)
        got = list(map(session.step, after))
        yield from differing(f"a replica not named, {what}", got, expected, others)
        same = all(session.trajectory(got, r) == session.trajectory(expected, r) for r in np.flatnonzero(mask).tolist())
        if same and context.random:  # else a replica may have been where a reset takes it
            yield Finding(f"{what} the named replicas go on as if there had been none", "new episodes")
        if given is not None:
            fresh = context.session().run(after, given)
            yield from differing(f"a named replica, {what}", [record, *got], fresh, chosen)


class StepRecord(NamedTuple):
    """A step: its outputs, those before it, and what the tracker said of it. (replicas,) or (replicas, rows_per_env)."""

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
    """Ends, limits, final observations and resets are what the declared autoreset mode and ``max_steps`` say.

    Where a replica is several rows, one for each agent, a row may end early: it is then silent (reward 0, flags False)
    and flagged once more when its replica ends.
    """
    session, limit, seed = context.session(), context.max_steps, context.seeds[1]
    if session.mode is None:
        declared = session.env.metadata.get("autoreset_mode")
        yield Finding(f"metadata['autoreset_mode'] is {declared!r}", "a gymnasium.vector.AutoresetMode")
        return
    steps = max(context.steps, min(2 * limit + 3, LONGEST)) if limit else context.steps
    actions = context.actions(seed, steps)
    step_records: list[StepRecord] = []
    records = [session.reset(seed)]
    for step, action in enumerate(actions, 1):
        records.append(session.step(action))
        tracker, flags = session.tracker, [records[-1].values(name) for name in ("terminations", "truncations")]
        flagged = (flags[0].astype(np.bool_) | flags[1].astype(np.bool_)).reshape(tracker.shape)
        seen = tracker.age.copy(), tracker.resetting, tracker.finished.copy(), tracker.before, flagged
        step_records.append(StepRecord(step, records[-1], records[-2], *seen))
        yield from _flags_and_rewards(step_records[-1], limit)
    yield from _limit(context, step_records)
    yield from _last_observations(context, session, step_records)
    if not any(step_record.finished.any() for step_record in step_records):
        context.notes.append(f"no episode ended in {steps} steps: neither ends nor autoreset were seen")
    elif session.mode is AutoresetMode.NEXT_STEP:
        yield from _ignored_actions(context, step_records, actions, records, seed)
    elif session.mode is AutoresetMode.DISABLED:
        yield from _step_after_end(context, actions, seed)


def _flags_and_rewards(step_record: StepRecord, limit: int | None) -> Findings:
    shape = step_record.before.shape
    truncated = step_record.record.values("truncations").astype(np.bool_).reshape(shape)
    loud = step_record.flagged | (step_record.record.values("rewards").reshape(shape) != 0)
    resetting, finished = step_record.resetting[:, None], step_record.finished[:, None]
    age = np.broadcast_to(step_record.age[:, None], shape)
    silent = "reward 0 and flags False"
    broken = [
        ("a reward or a flag in the step_record that resets", silent, resetting & loud),
        ("a reward or a flag of a row that has ended", silent, step_record.before & ~resetting & ~finished & loud),
        ("no flag, though all rows of its replica have ended", "every row flagged", finished & ~step_record.flagged),
    ]
    if limit:
        early, late = truncated & ~resetting & (age != limit), ~resetting & ~finished & (age == limit)
        broken += [
            ("truncated", f"truncations at step {limit} only", early),
            ("going on", f"its end at step {limit} at the latest", late),
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
    truncations = (
        step_record.record.values("truncations").reshape(step_record.before.shape)[chosen]
        for step_record, chosen in at_limit
    )
    # One that happens to terminate in its last step may say so; that all do means that they are called the wrong name.
    if reached >= SOME and not any(rows.any() for rows in truncations):
        yield Finding(f"{reached} episodes reached step {limit}, and none was truncated", "truncations True")


def _last_observations(context: CheckContext, session: Session, step_records: Sequence[StepRecord]) -> Findings:
    """An end has two observations, the episode's last and the next one's first, each in its place."""
    mode = session.mode
    final, starts = {
        AutoresetMode.SAME_STEP: ("info.final_obs", "obs"),
        AutoresetMode.NEXT_STEP: ("obs", "obs"),
        AutoresetMode.DISABLED: ("obs", "after_reset.obs"),
    }[mode or AutoresetMode.NEXT_STEP]
    ends, same = np.zeros((2, session.rows), np.int64)
    cut = stale = moving = ordinary = 0
    for step_record in step_records:
        leaf = step_record.record.leaves.get("info.final_obs")
        finished = session.repeat_over_rows(step_record.finished)
        if mode is AutoresetMode.SAME_STEP:
            nested = [step_record.record.leaves[name] for name in step_record.record.named("info.final_obs")]
            marked = next((leaf.mask for leaf in nested if leaf.mask is not None), np.zeros(session.rows, np.bool_))
            # A row that ends before its replica may bring its last observation in either place.
            wrong = (marked != finished) & ~(step_record.flagged.reshape(-1) & ~finished)
            if wrong.any():
                row = int(wrong.argmax())
                got = f"info['_final_obs'] is {marked[row]}" if nested else "info has no final_obs"
                yield Finding(got, f"final_obs where an episode ends: {finished[row]}", row, step_record.step)
            finished &= marked
        elif leaf is not None:
            yield Finding(f"info has final_obs, though the mode is {mode}", "no final_obs", step=step_record.step)
        resets = session.repeat_over_rows(step_record.resetting)
        last_record = step_record.previous if mode is AutoresetMode.NEXT_STEP else step_record.record
        gone = step_record.before.reshape(-1)
        ended_now = (resets if mode is AutoresetMode.NEXT_STEP else finished) & ~gone
        for row in np.flatnonzero(ended_now).tolist():
            last = last_record.row(final, row)
            ends[row] += 1
            same[row] += last == step_record.record.row(starts, row)
            if mode is AutoresetMode.SAME_STEP and step_record.record.values("truncations")[row]:
                cut += 1
                stale += last == step_record.previous.row("obs", row)
        for row in np.flatnonzero(~finished & ~resets & ~gone).tolist():
            ordinary += 1
            moving += step_record.record.row("obs", row) != step_record.previous.row("obs", row)
    if 2 * moving <= ordinary:
        context.notes.append("observations rarely change: last and first ones are not told apart")
        return
    for row in np.flatnonzero((ends >= SOME) & (same == ends)).tolist():
        got = f"at all {ends[row]} ends the last observation is the next episode's first"
        yield Finding(got, "the one that ended it", row)
    # A step that terminates an episode may change nothing that is seen; one that a limit cuts off is like any other.
    if cut >= SOME and stale == cut:
        yield Finding(f"at all {cut} truncations final_obs is the observation of the step before", "the one after it")


def _ignored_actions(
    context: CheckContext,
    step_records: Sequence[StepRecord],
    actions: Sequence[RowActions],
    expected: Sequence[Record],
    seed: int,
) -> Findings:
    session, others = context.session(), context.actions(seed + 500, len(actions))
    ignored = [np.flatnonzero(session.repeat_over_rows(step_record.resetting)).tolist() for step_record in step_records]
    mixed = [mixed_actions(one, two, rows) for one, two, rows in zip(actions, others, ignored, strict=True)]
    yield from differing("other actions in the step_records that reset", session.run(mixed, seed), expected)


def _step_after_end(context: CheckContext, actions: Sequence[RowActions], seed: int) -> Findings:
    """Without autoreset a step of an ended replica is refused, or leaves it as it is."""
    session = context.session()
    records = session.run(actions[:0], seed)
    session.mode = session.tracker.mode = None  # this session resets nothing by itself
    for action in actions:
        records.append(session.step(action))
        if session.tracker.finished.any():
            break
    row = int(session.repeat_over_rows(session.tracker.finished).argmax())
    try:
        after = session.step(action)
    except context.refusals:
        return
    except RuntimeError:
        return
    if after.values("rewards")[row] != 0 or after.row("obs", row) not in (records[-1].row("obs", row), NOTHING):
        yield Finding("an ended replica goes on without a reset", "a refusal, or no change", row, len(records))
