"""Check K28: infos of ended episodes, final_info and statistics, agree with what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, check
from gpu_vecenv.check.records import Array, Bools, Finding, Record, canonical, host
from gpu_vecenv.check.session import Session

# Relative to the sum of absolute rewards: the error of a sum in single precision of up to 1e4 rewards, 1e4 * 2**-24.
TOLERANCE = 1e-3
MANY = 20  # the least number of ends from which "all of them" is concluded
STATISTICS = "info.episode", "info.final_info.episode"
AT_ENDS = {"episode", "final_info", "final_obs"}  # infos of environments that ended with the step


@check("K28", "infos of ended episodes agree with what was seen")
def infos_at_ends(context: CheckContext) -> Findings:
    """``episode`` has returns and lengths as seen, where episodes end; ``final_info`` is that of the last step."""
    session = context.session(context.MANY_NUM_ENVS)
    limit = context.max_steps or 0
    previous = session.reset(context.seeds[1])
    returns, sizes = np.zeros((2, session.rows))
    found, ends = False, 0
    last_infos = _LastInfos()
    for step, actions in enumerate(context.actions(context.seeds[1], min(max(context.steps, 2 * limit + 3), 5000)), 1):
        before = session.repeat_over_rows(session.tracker.finished)
        record, tracker = session.step(actions), session.tracker
        finished, rewards = session.repeat_over_rows(tracker.finished), record.values("rewards").astype(np.float64)
        returns, sizes = np.where(before, 0, returns) + rewards, np.where(before, 0, sizes) + abs(rewards)
        ends += int(tracker.finished.sum())
        yield from _masks(record, session, finished, step)
        for name in STATISTICS:
            found |= bool(record.named(name))
            for finding in _statistics(record, name, session, finished, returns, sizes):
                yield Finding(finding.got, finding.expected, finding.row, step)
        if session.mode is AutoresetMode.SAME_STEP:
            found |= bool(record.named("info.final_info"))
            yield from last_infos.missing(record, finished, step)
            last_infos.compare(record, previous, finished)
        previous = record
    yield from last_infos.stale()
    if not found:
        raise Inapplicable(f"no infos of ended episodes, episode or final_info, at {ends} ends")


def _masks(record: Record, session: Session, finished: Bools, step: int) -> Findings:
    """Masks of infos of ended episodes, each by itself: one within ``final_info`` may be hidden by the mask of that."""
    ending = finished
    if session.rows_per_env > 1:  # a row may end before its environment
        terminated, truncated = (record.values(flag).astype(np.bool_) for flag in ("terminations", "truncations"))
        ending = finished | terminated | truncated
    for name, mask in _masks_at_ends("info", record.raw["info"]):
        if mask.shape == ending.shape and (mask & ~ending).any():
            row = int((mask & ~ending).argmax())
            yield Finding(f"{name} is True", "True only where an episode ends", row, step)


def _masks_at_ends(name: str, infos: Mapping[Any, Any]) -> Iterator[tuple[str, Bools]]:
    for key, value in infos.items():
        if key in AT_ENDS and f"_{key}" in infos:
            yield f"{name}._{key}", host(infos[f"_{key}"]).astype(np.bool_)
        if isinstance(value, Mapping):
            yield from _masks_at_ends(f"{name}.{key}", value)


def _statistics(record: Record, name: str, session: Session, finished: Bools, returns: Array, sizes: Array) -> Findings:
    for part in ("r", "l"):
        leaf = record.leaves.get(f"{name}.{part}")
        if leaf is None or not record.by_row(leaf) or leaf.values.ndim > 1:
            continue
        values = leaf.values.astype(np.float64)
        shown = finished if leaf.mask is None else leaf.mask
        if session.rows_per_env == 1 and (shown != finished).any():
            row = int((shown != finished).argmax())
            yield Finding(f"{name}.{part} {'is' if shown[row] else 'is not'} there", "where an episode ends", row)
        ages = session.repeat_over_rows(session.tracker.age)
        wrong = abs(values - returns) > TOLERANCE * sizes if part == "r" else values != ages
        wrong &= shown & (finished if part == "r" or session.rows_per_env == 1 else False)
        if wrong.any():
            row = int(wrong.argmax())
            seen = f"the sum of its rewards, {returns[row]}" if part == "r" else f"its length, {ages[row]}"
            yield Finding(f"{name}.{part} = {values[row]}", seen, row)


class _LastInfos:
    """Per info in ``final_info``: at how many ends it changed, equals the step before, and equals the next start."""

    def __init__(self) -> None:
        self.ends: dict[str, list[bool]] = {}
        self.starts: dict[str, list[bool]] = {}
        self.moving: dict[str, list[bool]] = {}
        self.seen = False

    def missing(self, record: Record, finished: Bools, step: int) -> Findings:
        """``final_info`` where no episode ends, or none where one does though there was one at an earlier end."""
        masks = [
            leaf.mask for name in record.named("info.final_info") if (leaf := record.leaves[name]).mask is not None
        ]
        self.seen |= bool(masks)
        shown = np.logical_or.reduce(masks) if masks else np.zeros_like(finished)
        wrong = (shown & ~finished) | (finished & ~shown & self.seen)
        if len(record.raw["info"]) and wrong.any():
            row = int(wrong.argmax())
            yield Finding(f"final_info {'is' if shown[row] else 'is not'} there", "where an episode ends", row, step)

    def compare(self, record: Record, previous: Record, finished: Bools) -> None:
        """Add one step."""
        for name, leaf in record.leaves.items():
            if not name.startswith("info.") or not record.by_row(leaf):
                continue
            last = name.startswith("info.final_info.")
            own = "info." + name.removeprefix("info.final_info." if last else "info.")
            before, now = previous.leaves.get(own), record.leaves.get(own)
            if before is None or now is None or len(before.values) != len(leaf.values):
                continue
            for row in np.flatnonzero(finished if last else ~finished).tolist():
                value, earlier, next_start = (canonical(part.values[row]) for part in (leaf, before, now))
                if last:
                    self.ends.setdefault(name, []).append(value == earlier)
                    self.starts.setdefault(name, []).append(value == next_start)
                else:
                    self.moving.setdefault(name, []).append(value != earlier)

    def stale(self) -> Findings:
        """Infos that change in most steps, but at no end."""
        for kept, what in ((self.ends, "the step before"), (self.starts, "the next episode's start")):
            for name, same in kept.items():
                moving = self.moving.get("info." + name.removeprefix("info.final_info."), [])
                if len(same) >= MANY and all(same) and 2 * sum(moving) > len(moving):
                    yield Finding(f"at all {len(same)} ends {name} is that of {what}", "that of the last step")
