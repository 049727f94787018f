"""Checks K17 and K18: global random state is not touched, and close() releases all resources."""

from __future__ import annotations

import gc
import os
import random
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from gpu_vecenv.check.context import CheckContext, Findings, check, differing
from gpu_vecenv.check.records import Finding, canonical

CYCLES, MEASUREMENTS = 10, 5  # environments made and closed between two measurements; measurements
# Allowed growth per cycle. Python's free lists and caches grow by some hundred bytes at first; an environment that is
# not released is more than a kilobyte. Resident memory changes by whole arenas of the allocator, so only a leak of many
# pages is significant.
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
    """The environment neither reads nor writes the global generators of ``random``, NumPy and torch."""
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
    """Name -> its state and the function that restores it."""
    states: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "random": (random.getstate(), random.setstate),
        "numpy.random": (np.random.get_state(), np.random.set_state),
        "torch": (torch.get_rng_state(), torch.set_rng_state),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state_all(), torch.cuda.set_rng_state_all
    return states


@check("K18", "close releases all resources")
def nothing_is_left(context: CheckContext) -> Findings:
    """Making, stepping and closing environments repeatedly leaves no memory, threads or files behind."""
    actions = context.actions(context.seeds[0], 3)

    def cycle() -> weakref.ref[Any]:
        session = context.make_unmanaged(context.SMALL_NUM_ENVS)
        session.run(actions, context.seeds[0])
        session.env.close()
        return weakref.ref(session.env.unwrapped)

    tracing, frozen = tracemalloc.is_tracing(), gc.get_freeze_count()
    tracemalloc.start()
    cycle()  # one-time initialisation
    gc.collect()
    if not frozen:
        gc.freeze()  # existing objects need not be traversed in each collection
    try:
        measured = []
        for _ in range(MEASUREMENTS):
            left = [cycle() for _ in range(CYCLES)]
            gc.collect()
            measured.append(_in_use())
    finally:
        if not frozen:
            gc.unfreeze()
        if not tracing:
            tracemalloc.stop()
    alive = sum(ref() is not None for ref in left)
    if alive:
        yield Finding(f"{alive} of {CYCLES} closed environments are still referenced", "none")
    for name, allowed in ALLOWED_GROWTH.items():
        # One-time allocations grow once; a leak grows between all measurements.
        grown = min(new[name] - old[name] for old, new in pairwise(measured)) / CYCLES
        if grown > allowed:
            yield Finding(f"{grown:,.0f} {name} more for each environment made and closed", f"{allowed} at most")


def _in_use() -> dict[str, int]:
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
