"""Checks K19, K20, K22 and K23: bitwise equality with a reference, other modes, a CUDA graph, other variants."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, Make, check, differing
from gpu_vecenv.check.outputs import parts_of
from gpu_vecenv.check.records import Bools, Finding, Record, show
from gpu_vecenv.check.session import OUTPUTS, Session

STRIDE = 31  # offset between the actions of consecutive episodes


@check("K19", "outputs are bitwise equal to a reference")
def same_as_reference(context: CheckContext) -> Findings:
    """Everything that the reference returns, ``info`` included, is bitwise equal."""
    oracle = context.options.oracle
    if oracle is None:
        raise Inapplicable("there is no reference; give oracle=make, which makes reference environments")
    yield from _same_runs(context, oracle, "differs from the reference", whole=False)


@check("K23", "variants are bitwise equal")
def same_in_variants(context: CheckContext) -> Findings:
    """Another device, thread order, launch shape or output type changes no bit."""
    if not context.options.variants:
        raise Inapplicable("there are no variants; give variants={name: make}")
    for name, make in context.options.variants.items():
        yield from _same_runs(context, make, f"differs from variants[{name!r}]", whole=True)


def _same_runs(context: CheckContext, make: Make, what: str, whole: bool) -> Findings:
    """Differences from the environments of ``make``; unless ``whole``, infos that only one side has are ignored."""
    for seed in context.seeds[:2]:
        actions = context.actions(seed)
        session, other = context.session(context.LARGE_NUM_ENVS), context.session(context.LARGE_NUM_ENVS, make)
        if (session.rows, session.mode) != (other.rows, other.mode):
            yield Finding(f"{what}: {session.rows} rows, {session.mode}", f"{other.rows} rows, {other.mode}")
            return
        got, expected = session.run(actions, seed), other.run(actions, seed)
        if not whole:
            got = [_within(*pair) for pair in zip(got, expected, strict=True)]
        yield from differing(f"{what}, seed {seed}", got, expected)


def _within(record: Record, reference: Record) -> Record:
    """The record without infos that the reference does not have."""
    smaller = copy.copy(record)
    common = {name for name in record.leaves if name in reference.leaves or not name.startswith("info.")}
    smaller.leaves = {name: leaf for name, leaf in record.leaves.items() if name in common}
    return smaller


class Transition(NamedTuple):
    """One transition of one row: part -> bytes, and part -> (record, name of the output)."""

    step: int
    bits: dict[str, list[bytes]]
    sources: dict[str, tuple[Record, str]]

    def text(self, part: str, row: int) -> str:
        """A part's value for a message."""
        record, name = self.sources[part]
        leaf = record.leaves.get(name)
        return f"{part} = {'other values' if leaf is None else show(leaf.values[row])}"


@check("K20", "autoreset modes give the same transitions")
def same_transitions(context: CheckContext) -> Findings:
    """With equal actions a row has the same observations, rewards, flags and final observations in all modes."""
    modes = context.options.modes or {}
    if len(modes) < 2:
        raise Inapplicable('there are no other modes; give modes={"same_step": make, "next_step": make, …}')
    first: tuple[AutoresetMode, list[list[Transition]]] | None = None
    for mode, make in modes.items():
        session = context.session(make=make)
        if session.mode is not mode:
            yield Finding(f"modes[{mode.name.lower()!r}] makes environments that declare {session.mode}", str(mode))
            return
        trajectories, ends = _transitions(session, context)
        if not ends:
            context.notes.append(f"{mode}: no episode ended in {context.steps} steps; ends were not compared")
        if first is None:
            first = mode, trajectories
            continue
        for row, (own, others) in enumerate(zip(trajectories, first[1], strict=True)):
            yield from _first_difference(row, own, others, f"{mode} differs from {first[0]}")


def _first_difference(row: int, got: Sequence[Transition], expected: Sequence[Transition], what: str) -> Findings:
    for number, (new, old) in enumerate(zip(got, expected, strict=False)):  # next_step mode has additional reset steps
        for part, bits in new.bits.items():
            if bits != old.bits[part]:
                text = f"{what}: transition {number}: {new.text(part, row)}"
                yield Finding(text, old.text(part, row), row, new.step)
                return


def _transitions(session: Session, context: CheckContext) -> tuple[list[list[Transition]], int]:
    """Transitions per row, and how many episodes ended; actions depend on the episode's number and step only."""
    script = context.actions(context.seeds[0])
    trajectories: list[list[Transition]] = [[] for _ in range(session.rows)]
    number = np.zeros(session.num_envs, np.int64)
    last = session.reset(context.seeds[0])
    for step in range(1, context.steps + 1):
        tracker = session.tracker
        ages = session.repeat_over_rows(np.where(tracker.finished, 0, tracker.age) + STRIDE * number)
        began = session.repeat_over_rows(tracker.finished) & (session.mode is AutoresetMode.DISABLED)
        record = session.step([script[age % len(script)][row] for row, age in enumerate(ages.tolist())])
        idle = session.repeat_over_rows(tracker.resetting) | tracker.before.reshape(-1)
        marked = _marked(record, session)
        for row in np.flatnonzero(~idle).tolist():
            sources = {name: (record, name) for name in OUTPUTS[1:4]}
            sources["obs"] = last, "after_reset.obs" if began[row] else "obs"
            sources["next obs"] = record, "info.final_obs" if marked[row] else "obs"
            bits = {part: source.row(name, row) for part, (source, name) in sources.items()}
            trajectories[row].append(Transition(step, bits, sources))
        number += tracker.finished
        last = record
    return trajectories, int(number.sum())


def _marked(record: Record, session: Session) -> Bools:
    """Rows whose final observation is in ``final_obs``."""
    if session.mode is AutoresetMode.SAME_STEP:
        for name in record.named("info.final_obs"):
            mask = record.leaves[name].mask
            if mask is not None:
                return mask
    return np.zeros(session.rows, np.bool_)


@check("K22", "a step replayed as a CUDA graph is bitwise equal")
def same_in_a_graph(context: CheckContext) -> Findings:
    """A captured step that is replayed with other actions gives the same outputs as calling it."""
    if context.options.graph is None:
        raise Inapplicable("give graph=make, which makes environments whose step may be captured as a CUDA graph")
    if context.device is None or context.device.type != "cuda":
        raise Inapplicable("outputs are not CUDA tensors; a graph needs an environment on a CUDA device")
    seed = context.seeds[0]
    actions = context.actions(seed)
    eager, session = context.session(make=context.options.graph), context.session(make=context.options.graph)
    expected = eager.run(actions, seed)
    session.run(actions[:2], seed)  # one-time initialisation must not be captured
    first = session.reset(seed)
    static_actions = session.batch(actions[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = session.env.step(static_actions)
    got = [first]
    for step in actions:
        for (_, part), (_, new) in zip(parts_of(static_actions), parts_of(session.batch(step)), strict=True):
            part.copy_(new)
        graph.replay()
        got.append(Record(dict(zip(OUTPUTS, outputs, strict=True)), session.rows, session.left_out))
        session.track(got[-1])
    yield from differing("a replayed graph", got, expected)
