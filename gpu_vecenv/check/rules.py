"""The checks on seeds, replicas and episodes, K01 to K10: one function for each promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.subject import REFUSALS, Findings, Inapplicable, RowActions, Session, Subject, check, differing
from gpu_vecenv.check.trace import Array, Bools, Finding, Record, canonical, difference, host

EPISODES = 6  # of each replica, to see whether they differ
LONGEST = 5000  # steps that a check may take to see episodes end
SOME = 3  # ends from which on "all of them" is no coincidence
NOTHING = [canonical(host(None))]  # the observation of an agent that is not there
VARIED = 8  # different starts among 16 from which on three of six are expected to differ


@check("K01", "same seed and actions, same course")
def same_seed(subject: Subject) -> Findings:
    """Two instances agree in every bit, whatever else runs beside them; so does one that is seeded once more."""
    for seed in subject.seeds[:2]:
        actions = subject.actions(seed)
        first, twin, other = subject.session(), subject.session(), subject.session()
        expected = first.run(actions, seed)
        other.reset(seed + 1000)
        got = [twin.reset(seed)]
        for step in actions:
            other.step(step)
            got.append(twin.step(step))
        yield from differing(f"a second instance, seed {seed}", got, expected)
        yield from differing(f"the same instance, seed {seed} given again", first.run(actions, seed), expected)


@check("K02", "another seed, another course")
def other_seed(subject: Subject) -> Findings:
    """Under equal actions no replica sees the same under two seeds, be they neighbours or far apart."""
    subject.need_randomness()
    first, session = subject.seeds[0], subject.session()
    far = first + 2**32
    actions = subject.like_the_first(subject.actions(first), session)
    courses = dict(subject.courses)
    try:
        records = session.run(actions, far)
    except REFUSALS:
        subject.notes.append(f"seed {far} is refused, and so not compared")
    else:
        courses |= {(far, replica): session.course(records, replica) for replica in range(session.replicas)}
    for replica in range(session.replicas):
        seeds = sorted(seed for seed, own in courses if own == replica)
        seen: dict[bytes, int] = {}
        for seed in seeds:
            earlier = seen.setdefault(courses[seed, replica], seed)
            if earlier != seed:
                yield Finding(f"seeds {earlier} and {seed} give the same", "different courses", replica * session.block)


@check("K03", "replicas differ")
def replicas_differ(subject: Subject) -> Findings:
    """Under one seed and equal actions no two replicas see the same."""
    subject.need_randomness()
    yield from _repeated(subject, lambda one, two: one[0] == two[0])


@check("K04", "no stream is used twice")
def streams_differ(subject: Subject) -> Findings:
    """No replica repeats what another one saw under another seed (as seed + replica makes them do)."""
    subject.need_randomness()
    yield from _repeated(subject, lambda one, two: one[0] != two[0] and one[1] != two[1])


def _repeated(subject: Subject, compared: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Findings:
    block = subject.session().block
    pairs = list(subject.courses.items())
    for place, (key, course) in enumerate(pairs):
        for other, earlier in pairs[:place]:
            if course == earlier and compared(key, other):
                what = "(seed {}, replica {}) repeats (seed {}, replica {})".format(*key, *other)
                yield Finding(what, "different courses", key[1] * block)


@check("K05", "the number of replicas changes nothing")
def prefix(subject: Subject) -> Findings:
    """The replicas of a small environment are, bit by bit, the first ones of a larger environment."""
    for seed in subject.seeds[:2]:
        actions = subject.actions(seed)
        small, large = subject.session(), subject.session(subject.MORE)
        what = f"{large.replicas} replicas, not {small.replicas}, seed {seed}"
        every = np.ones(small.rows, np.bool_)
        yield from differing(what, large.run(actions, seed), small.run(actions, seed), every)


@check("K06", "replicas do not touch each other")
def isolation(subject: Subject) -> Findings:
    """Other actions of one replica leave all the others' bits as they are."""
    seed = subject.seeds[1]
    base, other = subject.actions(seed), subject.actions(seed + 500)
    expected = subject.session().run(base, seed)
    inert = True
    for replica in range(subject.FEW):
        session = subject.session()
        own = range(session.rows)[session.rows_of(replica)]
        got = session.run([mixed_actions(one, two, own) for one, two in zip(base, other, strict=True)], seed)
        chosen = np.arange(subject.FEW) != replica
        yield from differing(f"replica {replica} acts otherwise", got, expected, session.over_rows(chosen))
        inert &= session.course(got, replica) == session.course(expected, replica)
    if inert:
        subject.notes.append("no replica's course depends on its own actions")


def mixed_actions(base: RowActions, other: RowActions, rows: Sequence[int]) -> RowActions:
    """Other actions for these rows."""
    return [other[row] if row in rows else action for row, action in enumerate(base)]


@check("K07", "a reset without a seed goes on")
def unseeded_reset(subject: Subject) -> Findings:
    """reset() after reset(seed=…) is no repetition of it, yet is itself repeatable."""
    seed = subject.seeds[0]
    actions = subject.actions(seed)
    session, twin = subject.session(), subject.session()
    first, again = session.run(actions, seed), session.run(actions)
    twin.run(actions, seed)
    yield from differing("a second instance, reset() after the same steps", twin.run(actions), again)
    if not subject.random:
        subject.notes.append("nothing in it is random: whether reset() repeats an episode cannot be seen")
    elif all(session.course(first, r) == session.course(again, r) for r in range(session.replicas)):
        yield Finding("reset() repeats what reset(seed=…) began, in every replica", "other episodes")


@check("K08", "autoreset begins new episodes")
def episodes_differ(subject: Subject) -> Findings:
    """Six episodes in a row of one replica, acted alike, differ; so do their first observations, where starts vary."""
    subject.need_randomness()
    session = subject.session()
    longest = min(LONGEST, 10 * subject.steps if not subject.max_steps else (EPISODES + 1) * (subject.max_steps + 1))
    starts, episodes = _episodes(session, subject, longest)
    if min(map(len, episodes)) < EPISODES:
        raise Inapplicable(f"some replica ends fewer than {EPISODES} episodes in {longest} steps")
    varied = len(subject.starts) >= VARIED
    for name, courses in (("first observations", starts), ("episodes", episodes)):
        kinds = [len(set(own[:EPISODES])) for own in courses]
        if varied:
            for replica, count in enumerate(kinds):
                if count < 3:
                    got = f"{count} different {name} in {EPISODES} episodes"
                    yield Finding(got, "3 or more", replica * session.block)
        elif max(kinds) == 1 and (name == "episodes" or len(subject.starts) > 1):
            yield Finding(f"every replica repeats its {name}", "different ones")


def _episodes(session: Session, subject: Subject, longest: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Of each replica the starts and the courses of its episodes; the action depends on the episode's age alone."""
    seed, replicas = subject.seeds[0], range(session.replicas)
    script = subject.like_the_first(subject.actions(seed), session)
    first = session.reset(seed)
    starts = [[first.bits(first.named("obs"), session.rows_of(r))] for r in replicas]
    episodes: list[list[bytes]] = [[] for _ in replicas]
    course = [own[0] for own in starts]
    for _ in range(longest):
        clock = session.clock
        age = np.where(clock.finished, 0, clock.age)
        ages = session.over_rows(age)
        record = session.step([script[age % len(script)][row] for row, age in enumerate(ages)])
        begins = clock.resetting if session.mode is AutoresetMode.NEXT_STEP else clock.finished
        last = record.named("rewards", "terminations", "truncations")
        for replica in replicas:
            rows = session.rows_of(replica)
            if not clock.resetting[replica]:
                at_once = begins[replica] and session.mode is AutoresetMode.SAME_STEP
                course[replica] += record.bits(last if at_once else [*last, *record.named("obs")], rows)
            if clock.finished[replica]:
                episodes[replica].append(course[replica])
            if begins[replica]:
                course[replica] = record.bits(record.named("after_reset.obs") or record.named("obs"), rows)
                starts[replica].append(course[replica])
        if min(map(len, episodes)) >= EPISODES:
            break
    return starts, episodes


@check("K09", "a masked reset touches what it names")
def masked_reset(subject: Subject) -> Findings:
    """options["reset_mask"] resets these replicas, with a seed reseeds these, and leaves all others' bits alone."""
    mask = np.arange(subject.FEW) % 2 == 0
    seed, reseed = subject.seeds[0], subject.seeds[3]
    before, after = subject.actions(seed, 5), subject.actions(reseed)
    plain = subject.session()
    plain.run(before, seed)
    expected = list(map(plain.step, after))
    for given in (None, reseed):
        session = subject.session()
        last = session.run(before, seed)[-1]
        over = session.clock.finished.copy()
        try:
            record = session.reset(given, mask)
        except REFUSALS as error:
            if session.mode is AutoresetMode.DISABLED:  # there is no other way to go on
                raise
            raise Inapplicable(f"reset_mask is refused: {error}") from error
        what = "after a masked reset" + (f" with seed {given}" if given is not None else "")
        others, chosen = session.over_rows(~mask), session.over_rows(mask)
        finding = difference([record], [last], others & ~session.over_rows(over), "obs")
        if finding is not None:
            yield replace(finding, got=f"returned by a masked reset, of a replica not named: {finding.got}", step=5)
        got = list(map(session.step, after))
        yield from differing(f"a replica not named, {what}", got, expected, others)
        same = all(session.course(got, r) == session.course(expected, r) for r in np.flatnonzero(mask).tolist())
        if same and subject.random:  # else a replica may have been where a reset takes it
            yield Finding(f"{what} the named replicas go on as if there had been none", "new episodes")
        if given is not None:
            fresh = subject.session().run(after, given)
            yield from differing(f"a named replica, {what}", [record, *got], fresh, chosen)


class Tick(NamedTuple):
    """A step: its outputs, those before it, and what the clock said of it. (replicas,) or (replicas, block)."""

    step: int
    record: Record
    previous: Record
    age: Array
    resetting: Bools
    finished: Bools
    before: Bools
    flagged: Bools


@check("K10", "episodes end as declared")
def episode_contract(subject: Subject) -> Findings:
    """Ends, limits, final observations and resets are what the declared autoreset mode and ``max_steps`` say.

    Where a replica is several rows, one for each agent, a row may end early: it is then silent (reward 0, flags False)
    and flagged once more when its replica ends.
    """
    session, limit, seed = subject.session(), subject.max_steps, subject.seeds[1]
    if session.mode is None:
        declared = session.env.metadata.get("autoreset_mode")
        yield Finding(f"metadata['autoreset_mode'] is {declared!r}", "a gymnasium.vector.AutoresetMode")
        return
    steps = max(subject.steps, min(2 * limit + 3, LONGEST)) if limit else subject.steps
    actions = subject.actions(seed, steps)
    ticks: list[Tick] = []
    records = [session.reset(seed)]
    for step, action in enumerate(actions, 1):
        records.append(session.step(action))
        clock, flags = session.clock, [records[-1].values(name) for name in ("terminations", "truncations")]
        flagged = (flags[0].astype(np.bool_) | flags[1].astype(np.bool_)).reshape(clock.shape)
        seen = clock.age.copy(), clock.resetting, clock.finished.copy(), clock.before, flagged
        ticks.append(Tick(step, records[-1], records[-2], *seen))
        yield from _flags_and_rewards(ticks[-1], limit)
    yield from _limit(subject, ticks)
    yield from _last_observations(subject, session, ticks)
    if not any(tick.finished.any() for tick in ticks):
        subject.notes.append(f"no episode ended in {steps} steps: neither ends nor autoreset were seen")
    elif session.mode is AutoresetMode.NEXT_STEP:
        yield from _ignored_actions(subject, ticks, actions, records, seed)
    elif session.mode is AutoresetMode.DISABLED:
        yield from _step_after_end(subject, actions, seed)


def _flags_and_rewards(tick: Tick, limit: int | None) -> Findings:
    shape = tick.before.shape
    truncated = tick.record.values("truncations").astype(np.bool_).reshape(shape)
    loud = tick.flagged | (tick.record.values("rewards").reshape(shape) != 0)
    resetting, finished = tick.resetting[:, None], tick.finished[:, None]
    age = np.broadcast_to(tick.age[:, None], shape)
    silent = "reward 0 and flags False"
    broken = [
        ("a reward or a flag in the tick that resets", silent, resetting & loud),
        ("a reward or a flag of a row that has ended", silent, tick.before & ~resetting & ~finished & loud),
        ("no flag, though all rows of its replica have ended", "every row flagged", finished & ~tick.flagged),
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
            yield Finding(f"{got} (step {age.reshape(-1)[row]} of the episode)", expected, row, tick.step)


def _limit(subject: Subject, ticks: Sequence[Tick]) -> Findings:
    limit = subject.max_steps
    if not limit:
        subject.notes.append("max_steps is unknown: limits are not checked")
        return
    at_limit = [(tick, tick.finished & (tick.age == limit)) for tick in ticks]
    reached = sum(int(chosen.sum()) for _, chosen in at_limit)
    if not reached:
        subject.notes.append(f"no episode reached max_steps = {limit}")
    truncations = (tick.record.values("truncations").reshape(tick.before.shape)[chosen] for tick, chosen in at_limit)
    # One that happens to terminate in its last step may say so; that all do means that they are called the wrong name.
    if reached >= SOME and not any(rows.any() for rows in truncations):
        yield Finding(f"{reached} episodes reached step {limit}, and none was truncated", "truncations True")


def _last_observations(subject: Subject, session: Session, ticks: Sequence[Tick]) -> Findings:
    """An end has two observations, the episode's last and the next one's first, each in its place."""
    mode = session.mode
    final, starts = {
        AutoresetMode.SAME_STEP: ("info.final_obs", "obs"),
        AutoresetMode.NEXT_STEP: ("obs", "obs"),
        AutoresetMode.DISABLED: ("obs", "after_reset.obs"),
    }[mode or AutoresetMode.NEXT_STEP]
    ends, same = np.zeros((2, session.rows), np.int64)
    cut = stale = moving = ordinary = 0
    for tick in ticks:
        leaf = tick.record.leaves.get("info.final_obs")
        finished = session.over_rows(tick.finished)
        if mode is AutoresetMode.SAME_STEP:
            nested = [tick.record.leaves[name] for name in tick.record.named("info.final_obs")]
            marked = next((leaf.mask for leaf in nested if leaf.mask is not None), np.zeros(session.rows, np.bool_))
            # A row that ends before its replica may bring its last observation in either place.
            wrong = (marked != finished) & ~(tick.flagged.reshape(-1) & ~finished)
            if wrong.any():
                row = int(wrong.argmax())
                got = f"info['_final_obs'] is {marked[row]}" if nested else "info has no final_obs"
                yield Finding(got, f"final_obs where an episode ends: {finished[row]}", row, tick.step)
            finished &= marked
        elif leaf is not None:
            yield Finding(f"info has final_obs, though the mode is {mode}", "no final_obs", step=tick.step)
        resets = session.over_rows(tick.resetting)
        last_record = tick.previous if mode is AutoresetMode.NEXT_STEP else tick.record
        gone = tick.before.reshape(-1)
        ended_now = (resets if mode is AutoresetMode.NEXT_STEP else finished) & ~gone
        for row in np.flatnonzero(ended_now).tolist():
            last = last_record.row(final, row)
            ends[row] += 1
            same[row] += last == tick.record.row(starts, row)
            if mode is AutoresetMode.SAME_STEP and tick.record.values("truncations")[row]:
                cut += 1
                stale += last == tick.previous.row("obs", row)
        for row in np.flatnonzero(~finished & ~resets & ~gone).tolist():
            ordinary += 1
            moving += tick.record.row("obs", row) != tick.previous.row("obs", row)
    if 2 * moving <= ordinary:
        subject.notes.append("observations rarely change: last and first ones are not told apart")
        return
    for row in np.flatnonzero((ends >= SOME) & (same == ends)).tolist():
        got = f"at all {ends[row]} ends the last observation is the next episode's first"
        yield Finding(got, "the one that ended it", row)
    # A step that terminates an episode may change nothing that is seen; one that a limit cuts off is like any other.
    if cut >= SOME and stale == cut:
        yield Finding(f"at all {cut} truncations final_obs is the observation of the step before", "the one after it")


def _ignored_actions(
    subject: Subject, ticks: Sequence[Tick], actions: Sequence[RowActions], expected: Sequence[Record], seed: int
) -> Findings:
    session, others = subject.session(), subject.actions(seed + 500, len(actions))
    ignored = [np.flatnonzero(session.over_rows(tick.resetting)).tolist() for tick in ticks]
    mixed = [mixed_actions(one, two, rows) for one, two, rows in zip(actions, others, ignored, strict=True)]
    yield from differing("other actions in the ticks that reset", session.run(mixed, seed), expected)


def _step_after_end(subject: Subject, actions: Sequence[RowActions], seed: int) -> Findings:
    """Without autoreset a step of an ended replica is refused, or leaves it as it is."""
    session = subject.session()
    records = session.run(actions[:0], seed)
    session.mode = session.clock.mode = None  # this session resets nothing by itself
    for action in actions:
        records.append(session.step(action))
        if session.clock.finished.any():
            break
    row = int(session.over_rows(session.clock.finished).argmax())
    try:
        after = session.step(action)
    except subject.refusals:
        return
    except RuntimeError:
        return
    if after.values("rewards")[row] != 0 or after.row("obs", row) not in (records[-1].row("obs", row), NOTHING):
        yield Finding("an ended replica goes on without a reset", "a refusal, or no change", row, len(records))
