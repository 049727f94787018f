"""Checks K01 to K09: seeds, random streams, independence of environments, resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, check, differing, mixed_actions
from gpu_vecenv.check.records import Finding, Record, difference
from gpu_vecenv.check.session import REFUSALS, Session

EPISODES = 6  # compared per environment
LONGEST = 5000  # steps that a check may run until episodes end
CROWD = 257  # environments: more than a byte counts
FEW = 15  # steps of so many
VARIED = 8  # with this many distinct starts among 16, at least 3 of 6 must be distinct


@check("K01", "same seed and actions, same trajectory")
def same_seed(context: CheckContext) -> Findings:
    """Two instances are bitwise equal, also while a third one runs; so is one instance that is seeded again.

    An integer of NumPy is refused as a seed, or gives the trajectory of the same int.
    """
    for seed in dict.fromkeys((*context.seeds[:2], 0)):
        actions = context.actions(seed)
        first, twin, other = context.session(), context.session(), context.session()
        expected = first.run(actions, seed)
        other.reset(seed + 1000)
        got = [twin.reset(seed)]
        for step in actions:
            other.step(step)
            got.append(twin.step(step))
        for finding in differing(f"a second instance, seed {seed}", got, expected):
            context.reproducible &= seed not in context.seeds
            yield finding
        yield from differing(f"the same instance, seed {seed} given again", first.run(actions, seed), expected)
    yield from _given_again_at_moments(context)
    yield from _other_forms_of_seeds(context)


def _given_again_at_moments(context: CheckContext) -> Findings:
    """Resets with the seed after the first step of an episode, and right after an end."""
    seed, session = context.seeds[0], context.session()
    actions = context.actions(seed)
    expected = context.session().run(actions, seed)
    session.run(actions[:1], seed)
    yield from differing(f"seed {seed} given again after one step", session.run(actions, seed), expected)
    if session.run_until_end(actions, seed):
        yield from differing(f"seed {seed} given again right after an end", session.run(actions, seed), expected)


def _other_forms_of_seeds(context: CheckContext) -> Findings:
    """An integer of NumPy, empty options, and a list with a seed for each environment, unless these are refused."""
    seed = context.seeds[0] % 2**63
    actions = context.actions(seed)
    expected = context.session().run(actions, seed)
    for what, given, options in (("seed np.int64", np.int64(seed), None), ("empty options and seed ", seed, {})):
        session = context.session()
        with suppress(*context.refusals):
            record = session.reset(given, options=options)
            yield from differing(f"{what}({seed})", [record, *map(session.step, actions)], expected)
    session = context.session()
    if session.rows == session.num_envs > 1:
        yield from _list_of_seeds(context, session)


def _list_of_seeds(context: CheckContext, session: Session) -> Findings:
    """A list of seeds is refused, or seeds each environment by its own."""
    seeds = [context.seeds[0] + 10 * env_index for env_index in range(session.num_envs)]
    actions = context.actions(context.seeds[0])
    try:
        record = session.reset(seeds)
    except context.refusals:
        return
    expected = [record, *map(session.step, actions)]
    yield from differing("the same list of seeds", context.session().run(actions, seeds), expected)
    other = context.session().run(actions, [*seeds[:-1], seeds[-1] + 1000])
    last = np.arange(session.num_envs) == session.num_envs - 1
    yield from differing("an environment with the same seed in a list", other, expected, ~last)
    if context.random and session.trajectory(other, len(last) - 1) == session.trajectory(expected, len(last) - 1):
        got = f"seeds {seeds[-1]} and {seeds[-1] + 1000} at the end of a list give the same trajectory"
        yield Finding(got, "different trajectories", len(last) - 1)
    try:
        context.session().reset(seeds[:-1])
    except context.refusals:
        return
    yield Finding(f"{len(seeds) - 1} seeds for {len(seeds)} environments: accepted", "an error")


@check("K02", "different seeds, different trajectories")
def other_seed(context: CheckContext) -> Findings:
    """With equal actions an environment's trajectories differ between seeds, adjacent or 2**32 apart.

    0 and 1 are compared, and neighbours that are the same number in single precision.
    """
    context.require_randomness()
    first, session = context.seeds[0], context.session()
    actions = context.same_actions_everywhere(context.actions(first), session)
    trajectories = dict(context.trajectories)
    groups = [*context.seeds, first + 2**32], [0, 1], [2**24, 2**24 + 1]
    for seed in sorted({seed for group in groups for seed in group} - set(context.seeds)):
        try:
            records = session.run(actions, seed)
        except REFUSALS:
            context.notes.append(f"seed {seed} is refused and was not compared")
        else:
            trajectories |= {(seed, own): session.trajectory(records, own) for own in range(session.num_envs)}
    for env_index, group in product(range(session.num_envs), groups):
        seen: dict[bytes, int] = {}
        for seed in group:
            if (seed, env_index) not in trajectories:
                continue
            earlier = seen.setdefault(trajectories[seed, env_index], seed)
            if earlier != seed:
                yield Finding(
                    f"seeds {earlier} and {seed} give the same trajectory",
                    "different trajectories",
                    env_index * session.rows_per_env,
                )


@check("K03", "environments have different trajectories")
def environments_differ(context: CheckContext) -> Findings:
    """With one seed and equal actions no two environments have the same trajectory."""
    context.require_randomness()
    yield from _repeated(context, lambda one, two: one[0] == two[0])
    session = context.session(context.MANY_NUM_ENVS)
    actions = context.same_actions_everywhere(context.actions(context.seeds[0]), session)
    pairs: list[set[tuple[int, int]]] = []
    for seed in context.seeds[:2]:  # an accidental repetition does not recur with another seed
        records, first = session.run(actions, seed), dict[bytes, int]()
        of_all = [session.trajectory(records, own) for own in range(session.num_envs)]
        for own, trajectory in enumerate(of_all):
            first.setdefault(trajectory, own)
        pairs.append({(first[of_all[own]], own) for own in range(context.SMALL_NUM_ENVS, session.num_envs)})
    for one, two in sorted(set.intersection(*pairs)):
        if one != two:
            got = f"of {session.num_envs} environments, env {two} repeats env {one}"
            yield Finding(got, "different trajectories", two * session.rows_per_env)


@check("K04", "random streams are independent")
def streams_differ(context: CheckContext) -> Findings:
    """No environment repeats another one under another seed, as it would with streams seeded by seed + env_index."""
    context.require_randomness()
    yield from _repeated(context, lambda one, two: one[0] != two[0] and one[1] != two[1])


def _repeated(context: CheckContext, compared: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Findings:
    rows_per_env = context.session().rows_per_env
    pairs = list(context.trajectories.items())
    for index, (key, trajectory) in enumerate(pairs):
        for other, earlier in pairs[:index]:
            if trajectory == earlier and compared(key, other):
                what = "(seed {}, env {}) repeats (seed {}, env {})".format(*key, *other)
                yield Finding(what, "different trajectories", key[1] * rows_per_env)


@check("K05", "trajectories do not depend on num_envs")
def prefix(context: CheckContext) -> Findings:
    """Environments of a vector environment are bitwise equal to the first ones of a larger one."""
    for seed in context.seeds[:2]:
        actions, session = context.actions(seed), context.session(context.MANY_NUM_ENVS)
        expected = session.run(actions, seed)
        for num_envs in (1, context.SMALL_NUM_ENVS, context.LARGE_NUM_ENVS):
            session = context.session(num_envs)
            yield from _same_first(session, session.run(actions, seed), context.MANY_NUM_ENVS, expected, seed)
    few = actions[:FEW]
    session = context.session(context.MANY_NUM_ENVS)
    if session.has_processes:
        context.notes.append(f"environments run in processes: more than {session.num_envs} were not made")
        return
    crowd = context.session(CROWD)
    padded = [list(step) * (1 + CROWD // session.num_envs) for step in few]
    yield from _same_first(session, session.run(few, seed), CROWD, crowd.run(padded, seed), seed)


def _same_first(
    session: Session, got: Sequence[Record], others: int, expected: Sequence[Record], seed: int
) -> Findings:
    what = f"{session.num_envs} environments, not {others}, seed {seed}"
    yield from differing(what, got, expected, np.ones(min(session.rows, expected[0].rows), np.bool_))


@check("K06", "environments are independent of each other")
def isolation(context: CheckContext) -> Findings:
    """Other actions in one environment change no bit of the others."""
    seed = context.seeds[1]
    base, other = context.actions(seed), context.actions(seed + 500)
    expected = context.session().run(base, seed)
    inert = True
    for env_index in range(context.SMALL_NUM_ENVS):
        session = context.session()
        own = range(session.rows)[session.rows_of(env_index)]
        got = session.run([mixed_actions(one, two, own) for one, two in zip(base, other, strict=True)], seed)
        chosen = np.arange(context.SMALL_NUM_ENVS) != env_index
        yield from differing(f"with other actions in env {env_index}", got, expected, session.repeat_over_rows(chosen))
        inert &= session.trajectory(got, env_index) == session.trajectory(expected, env_index)
    if inert:
        context.notes.append("no environment's trajectory depends on its own actions")


@check("K07", "reset() without a seed continues the random stream")
def unseeded_reset(context: CheckContext) -> Findings:
    """reset() after reset(seed=…) does not repeat it, but is itself reproducible."""
    seed = context.seeds[0]
    session, twin = context.session(), context.session()
    actions = context.same_actions_everywhere(context.actions(seed), session)
    first, again = session.run(actions, seed), session.run(actions)
    twin.run(actions, seed)
    yield from differing("a second instance, reset() after the same steps", twin.run(actions), again)
    if not context.random:
        context.notes.append("nothing in it is random: whether reset() repeats an episode was not checked")
    elif all(session.trajectory(first, r) == session.trajectory(again, r) for r in range(session.num_envs)):
        yield Finding("reset() repeats the episodes of reset(seed=…) in every environment", "other episodes")
    else:
        yield from _alike_without_a_seed(context, session, again)


def _alike_without_a_seed(context: CheckContext, session: Session, again: Sequence[Record]) -> Findings:
    """Environments that are alike after reset() without a seed, or new instances that are."""
    env_indices = range(session.num_envs)
    alone = {session.trajectory(again, r) for r in env_indices}
    if len(alone) == 1 < len({context.trajectories.get((context.seeds[0], r)) for r in env_indices}):
        yield Finding("reset() without a seed gives all environments the same trajectory", "different ones")
    actions = context.same_actions_everywhere(context.actions(context.seeds[0]), session)
    new = [other.run(actions) for other in (context.session(), context.session())]
    if all(session.trajectory(new[0], r) == session.trajectory(new[1], r) for r in env_indices):
        yield Finding("two new instances, reset() without a seed, have the same trajectories", "different ones")


@check("K08", "autoreset begins new episodes")
def episodes_differ(context: CheckContext) -> Findings:
    """Consecutive episodes with equal actions differ; so do their first observations if starts are random."""
    context.require_randomness()
    session = context.session()
    longest = min(LONGEST, 10 * context.steps if not context.max_steps else (EPISODES + 1) * (context.max_steps + 1))
    starts, episodes = _episodes(session, context, longest, context.seeds[0])
    if min(map(len, episodes)) < EPISODES:
        raise Inapplicable(f"some environment ended fewer than {EPISODES} episodes in {longest} steps")
    varied = len(context.starts) >= VARIED
    if varied:
        another = context.session()
        others, _ = _episodes(another, context, longest, context.seeds[1])
        yield from _shared_starts(context, {context.seeds[0]: starts, context.seeds[1]: others})
    for name, trajectories in (("first observations", starts), ("episodes", episodes)):
        kinds = [len(set(own[:EPISODES])) for own in trajectories]
        if varied:
            for env_index, count in enumerate(kinds):
                if count < 3:
                    got = f"{count} different {name} in {EPISODES} episodes"
                    yield Finding(got, "3 or more", env_index * session.rows_per_env)
        elif max(kinds) == 1 and (name == "episodes" or len(context.starts) > 1):
            yield Finding(f"every environment repeats its {name}", "different ones")


def _shared_starts(context: CheckContext, starts: dict[int, list[list[bytes]]]) -> Findings:
    """Environments whose later episodes start like another's, of this seed or the next, or like those after them."""
    every = {(seed, r): own for seed, of_seed in starts.items() for r, own in enumerate(of_seed)}
    for (one, own), (two, other) in product(every.items(), every.items()):
        for shift in (0, 1):
            if one == two or (shift == 0 and (one < two or own[0] == other[0])):  # equal from the first on: K03, K04
                continue
            compared = list(zip(own[1 + shift :], other[1:EPISODES], strict=False))
            if len(compared) >= EPISODES - 2 and all(a == b for a, b in compared) and len(set(compared)) > 2:
                got = "episodes from {} on of (seed {}, env {}) start like those from 2 on of (seed {}, env {})"
                yield Finding(got.format(2 + shift, *one, *two), "other starts", one[1] * context.rows_per_env)


def _episodes(
    session: Session, context: CheckContext, longest: int, seed: int
) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Per environment, the starts and trajectories of its episodes; actions depend on the step of the episode only."""
    env_indices = range(session.num_envs)
    script = context.same_actions_everywhere(context.actions(context.seeds[0]), session)
    first = session.reset(seed)
    starts = [[first.bits(first.named("obs"), session.rows_of(r))] for r in env_indices]
    episodes: list[list[bytes]] = [[] for _ in env_indices]
    trajectory = [own[0] for own in starts]
    for _ in range(longest):
        tracker = session.tracker
        age = np.where(tracker.finished, 0, tracker.age)
        ages = session.repeat_over_rows(age)
        record = session.step([script[age % len(script)][row] for row, age in enumerate(ages)])
        begins = tracker.resetting if session.mode is AutoresetMode.NEXT_STEP else tracker.finished
        last = record.named("rewards", "terminations", "truncations")
        for env_index in env_indices:
            rows = session.rows_of(env_index)
            if not tracker.resetting[env_index]:
                at_once = begins[env_index] and session.mode is AutoresetMode.SAME_STEP
                trajectory[env_index] += record.bits(last if at_once else [*last, *record.named("obs")], rows)
            if tracker.finished[env_index]:
                episodes[env_index].append(trajectory[env_index])
            if begins[env_index]:
                trajectory[env_index] = record.bits(record.named("after_reset.obs") or record.named("obs"), rows)
                starts[env_index].append(trajectory[env_index])
        if min(map(len, episodes)) >= EPISODES:
            break
    return starts, episodes


@check("K09", "a masked reset affects only the environments in its mask")
def masked_reset(context: CheckContext) -> Findings:
    """options["reset_mask"] resets (with a seed: reseeds) these environments and changes no bit of the others."""
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
            if session.mode is AutoresetMode.DISABLED:  # the mode needs masked resets
                raise
            raise Inapplicable(f"reset_mask is refused: {error}") from error
        what = "after a masked reset" + (f" with seed {given}" if given is not None else "")
        others, chosen = session.repeat_over_rows(~mask), session.repeat_over_rows(mask)
        finding = difference([record], [last], others & ~session.repeat_over_rows(over), "obs")
        if finding is not None:
            yield replace(
                finding, got=f"a masked reset returned for an environment outside the mask: {finding.got}", step=5
            )
        got = list(map(session.step, after))
        yield from differing(f"an environment outside the mask, {what}", got, expected, others)
        same = all(session.trajectory(got, r) == session.trajectory(expected, r) for r in np.flatnonzero(mask).tolist())
        if same and context.random:  # else the reset state may equal the state before
            yield Finding(f"{what} the environments in the mask continue their episodes", "new episodes")
        if given is not None:
            fresh = context.session().run(after, given)
            yield from differing(f"an environment in the mask, {what}", [record, *got], fresh, chosen)
        session = context.session()
        session.run(before, seed)
        with suppress(*REFUSALS):
            session.reset(given, np.zeros_like(mask))
        what = "after a reset with a mask that is False everywhere" + (f", seed {given}" if given is not None else "")
        yield from differing(what, list(map(session.step, after)), expected)
    yield from _masks_at_moments(context)


def _masks_at_moments(context: CheckContext) -> Findings:
    """A mask of many environments, a mask of all, one right after an end, and a reset of all after one of some."""
    seed, reseed = context.seeds[0], context.seeds[3]
    actions = context.actions(reseed, max(FEW, context.max_steps or 0))
    session = context.session(context.MANY_NUM_ENVS)
    fresh, mask = session.run(actions, reseed), np.arange(session.num_envs) % 3 == 1
    names = fresh[0].named("obs")
    session.run(actions[:FEW], seed)
    masked = session.reset(None, mask)
    alike = len({masked.bits(names, session.rows_of(r)) for r in np.flatnonzero(mask).tolist()}) == 1
    if alike and len(context.starts) >= VARIED:
        yield Finding("a masked reset starts all environments in the mask alike", "different starts")
    yield from differing("a reset of all environments after a masked one", session.run(actions, reseed), fresh)
    got = [session.reset(reseed, np.ones_like(mask)), *map(session.step, actions)]
    yield from differing("a reset with a mask that is True everywhere", got, fresh)
    if session.mode is not AutoresetMode.DISABLED and session.run_until_end(context.actions(seed), seed):
        chosen = session.tracker.finished.copy()
        got = [session.reset(reseed, chosen), *map(session.step, actions)]
        what = "an environment in the mask of a reset right after its end"
        yield from differing(what, got, fresh, session.repeat_over_rows(chosen))
