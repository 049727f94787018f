"""Checks K17 and K18: global random state is not touched, and no resource is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gpu_vecenv.check.context import CheckContext, Findings, check, differing
from gpu_vecenv.check.records import Finding, canonical
from gpu_vecenv.check.session import Session

CYCLES = 10  # environments made and closed between two measurements
REPETITIONS = 7  # of either
FEW, LONGEST = 15, 1500  # different steps, and the most that are run for these episodes
# Allowed growth per cycle, and between two measurements. Python's free lists and caches grow by some hundred bytes at
# first; an environment that is not released is more than a kilobyte. Resident memory changes by whole arenas of the
# allocator, so only a leak of many pages is significant.
ALLOWED_GROWTH = {
    "Python bytes": 1024,
    "tensor bytes": 0,
    "CUDA bytes": 0,
    "threads": 0,
    "files": 0,
    "resident bytes": 2**18,
}


@check("K17", "global random state is not used")
def global_random_state(context: CheckContext) -> Findings:
    """The environment neither reads nor writes the global generators of ``random``, NumPy and torch.

    Nor does it read those of its spaces: what a caller samples must not matter.
    """
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
    session = context.session()
    got = [session.reset(context.seeds[0])]
    for step in actions:
        context.sample_spaces(session)
        got.append(session.step(step))
    yield from differing("with samples drawn from its spaces between steps", got, trajectories[0])


def _global_states() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Name -> its state and the function that restores it."""
    states: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "random": (random.getstate(), random.setstate),
        "numpy.random": (np.random.get_state(), np.random.set_state),
        "torch": (torch.get_rng_state(), torch.set_rng_state),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state_all(), torch.cuda.set_rng_state_all
    return states


@check("K18", "no memory, thread or file is left behind")
def nothing_is_left(context: CheckContext) -> Findings:
    """Environments leave nothing behind when they are closed, and do not grow from episode to episode."""
    actions = context.actions(context.seeds[0], 3)

    def cycle() -> weakref.ref[Any]:
        session = context.make_unmanaged(context.SMALL_NUM_ENVS)
        session.run(actions, context.seeds[0])
        session.env.close()
        return weakref.ref(session.env.unwrapped)

    with _traced():
        cycle()  # one-time initialisation
        left: list[weakref.ref[Any]] = []

        def cycles() -> None:
            left[:] = [cycle() for _ in range(CYCLES)]

        for name, grown in _growth(cycles).items():
            what = f"{grown / CYCLES:,.0f} {name} more for each environment made and closed"
            if grown > CYCLES * ALLOWED_GROWTH[name]:
                yield Finding(what, f"{ALLOWED_GROWTH[name]} at most")
        alive = sum(ref() is not None for ref in left)
    if alive:
        yield Finding(f"{alive} of {CYCLES} closed environments are still referenced", "none")
    yield from _growth_over_episodes(context)


def _growth_over_episodes(context: CheckContext) -> Findings:
    """What an environment allocates in its episodes and resets it also releases."""
    actions = context.actions(context.seeds[0], FEW)

    def play(session: Session, episodes: int) -> bool:
        steps = itertools.islice(itertools.cycle(actions), LONGEST)
        session.reset(context.seeds[0])
        while episodes > 0 and (step := next(steps, None)) is not None:
            session.step(step)
            episodes -= int(session.tracker.finished.sum())
        return episodes <= 0

    with _traced():
        session = context.session(context.MANY_NUM_ENVS)
        if not play(session, context.WARM_UP_EPISODES):
            least = context.WARM_UP_EPISODES
            context.notes.append(f"fewer than {least} episodes in {LONGEST} steps: growth was not measured")
            return
        per_limit = max(1, context.EPISODES // 40)  # 26 bytes an episode: a number in a list needs 32
        for name, grown in _growth(lambda: play(session, context.EPISODES)).items():  # the same episodes each time
            allowed = per_limit * ALLOWED_GROWTH[name]
            if grown > allowed:
                yield Finding(f"{grown:,.0f} {name} more after every {context.EPISODES} episodes", f"{allowed} at most")


def _growth(repeated: Callable[[], Any]) -> dict[str, int]:
    """The least growth of all repetitions: caches grow until they are full, a leak grows always."""
    last, least = _in_use(), dict[str, int]()
    for _ in range(REPETITIONS):
        repeated()
        now = _in_use()
        least = {name: min(now[name] - last[name], least.get(name, now[name])) for name in now}
        if all(grown <= ALLOWED_GROWTH[name] for name, grown in least.items()):
            break
        last = now
    return least


@contextmanager
def _traced() -> Iterator[None]:
    """Count Python's allocations; objects that exist by now need not be traversed in each collection."""
    tracing, frozen = tracemalloc.is_tracing(), gc.get_freeze_count()
    tracemalloc.start()
    gc.collect()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if not tracing:
            tracemalloc.stop()


def _in_use() -> dict[str, int]:
    gc.collect()
    found = (value for value in gc.get_objects() if type(value) is torch.Tensor)
    dense = (
        value for value in found if value.layout is torch.strided and value.device.type != "meta"
    )  # tensors with storage
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
    """Resident set size; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
