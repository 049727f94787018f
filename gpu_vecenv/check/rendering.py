"""Check K27: render() changes nothing, and returns the frames of the current state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_vecenv.check.context import CheckContext, Findings, Inapplicable, check, differing, mixed_actions
from gpu_vecenv.check.records import Finding, canonical, host
from gpu_vecenv.check.session import RowActions, Session

HISTORY = "_list"  # suffix of render modes that return all frames since the last call
RENDERED = 25  # steps, since many environments render slowly


@check("K27", "render changes nothing and shows the current state")
def rendering(context: CheckContext) -> Findings:
    """render() draws no random numbers; its frames depend on the state only, frame i on environment i only."""
    session, seed = context.session(), context.seeds[0]
    mode, modes = (getattr(session.under_test, "render_mode", None), session.under_test.metadata.get("render_modes"))
    if mode == "human":
        raise Inapplicable("render_mode is 'human'; make environments with render_mode='rgb_array'")
    if mode is not None and mode not in (modes or ()):
        yield Finding(f"render_mode is {mode!r}", f"one of metadata['render_modes'] = {modes}")
    actions = context.actions(seed, min(context.steps, RENDERED))
    expected, got, frames = context.session().run(actions, seed), [session.reset(seed)], [_frames(session, mode)]
    for step in actions:
        got.append(session.step(step))
        frames.append(_frames(session, mode))
    yield from differing("with render() after every step", got, expected)
    if mode is None:
        context.notes.append("render_mode is None: frames were not checked")
    elif not mode.endswith(HISTORY):
        yield from _current(context, actions, mode, frames)
        yield from _one_of_each(context, actions, mode, frames)


def _frames(session: Session, mode: str | None) -> Any:
    """What render() returns; without a render mode it may refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return session.under_test.render()
        except Exception:
            if mode is not None:
                raise
            return None


def _current(context: CheckContext, actions: Sequence[RowActions], mode: str, frames: Sequence[Any]) -> Findings:
    """A first call of render() after several steps gives the frame that a call after every step gives."""
    for count in (len(actions) // 2, len(actions)):
        session = context.session()
        session.run(actions[:count], context.seeds[0])
        first, again = _frames(session, mode), _frames(session, mode)
        if canonical(first) != canonical(again):
            yield Finding("a second call of render() gives another frame", "the same one", step=count)
        if canonical(first) != canonical(frames[count]):
            yield Finding("the frame depends on earlier calls of render()", "the current state", step=count)


def _one_of_each(context: CheckContext, actions: Sequence[RowActions], mode: str, frames: Sequence[Any]) -> Findings:
    """With other actions in one environment the frames of the others stay the same; all frames have one shape."""
    num_envs = context.SMALL_NUM_ENVS
    if not isinstance(frames[0], list | tuple | np.ndarray) or len(frames[0]) != num_envs or num_envs == 1:
        return
    for step, shown in enumerate(frames):
        kinds = {(host(frame).shape, host(frame).dtype) for frame in shown}
        if mode == "rgb_array" and any(len(shape) != 3 or shape[2] != 3 or dtype != np.uint8 for shape, dtype in kinds):
            yield Finding(f"frames are {kinds}", "(height, width, 3) uint8", step=step)
            return
    other = context.actions(context.seeds[0] + 500, len(actions))
    for env_index in range(num_envs):
        session = context.session()
        own = range(session.rows)[session.rows_of(env_index)]
        session.run([mixed_actions(*pair, own) for pair in zip(actions, other, strict=True)], context.seeds[0])
        for frame_index, (new, old) in enumerate(zip(_frames(session, mode), frames[-1], strict=True)):
            if frame_index != env_index and canonical(new) != canonical(old):
                got = f"frame {frame_index} changes with the actions of env {env_index}"
                yield Finding(got, "frames of their own environments", own[0], len(actions))
