"""An environment under test: steps it in any autoreset mode and tracks its episodes independently."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium.error
import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from gpu_vecenv.check.records import Array, Bools, Record, Tree

RowActions = Sequence[Tree]  # one action for each row
OUTPUTS = ("obs", "rewards", "terminations", "truncations", "info")
SEEN = (*OUTPUTS[:4], "after_reset.obs")  # what an agent sees, in every mode
# Accepted as refusals: builtin errors for wrong arguments, Gymnasium's errors, and the assertions of its spaces.
# RuntimeError is what torch raises for shapes and dtypes.
REFUSALS = (
    *(TypeError, ValueError, RuntimeError, AssertionError),
    *(gymnasium.error.Error, gymnasium.error.ClosedEnvironmentError),  # which is no Error
)


class EpisodeTracker:
    """Counts the steps of each environment's episode, from the flags alone.

    An environment has ``rows_per_env`` rows, one for each agent. Its episode ends when all of its rows have ended.
    """

    def __init__(self, mode: AutoresetMode | None, num_envs: int, rows_per_env: int):
        self.mode, self.shape = mode, (num_envs, rows_per_env)
        self.age = np.zeros(num_envs, np.int64)
        self.finished = np.zeros(num_envs, np.bool_)  # ended with the last step
        self.resetting = np.zeros(num_envs, np.bool_)  # the last step was the reset that follows in NEXT_STEP
        self.ended = np.zeros(self.shape, np.bool_)  # rows that have ended in this episode
        self.before = self.ended  # the same, before the last step

    def restart(self, env_mask: Bools) -> None:
        """Record a call of reset."""
        self.age[env_mask], self.ended[env_mask], self.finished[env_mask] = 0, False, False

    def advance(self, terminations: Array, truncations: Array) -> None:
        """Update from the flags of one step."""
        self.age[self.finished], self.ended[self.finished] = 0, False
        self.resetting = self.finished & (self.mode is AutoresetMode.NEXT_STEP)
        self.age += ~self.resetting
        self.before = self.ended.copy()
        flags = (terminations.astype(np.bool_) | truncations.astype(np.bool_)).reshape(self.shape)
        self.ended |= flags & ~self.resetting[:, None]
        self.finished = self.ended.all(1) & ~self.resetting


class Session:
    """A vector environment under test and its episode tracker; in disabled mode it resets by mask."""

    def __init__(self, env: VectorEnv[Any, Any, Any], num_envs: int, device: torch.device | None):
        self.env, self.num_envs, self.device = env, num_envs, device
        self.mode = declared_mode(env)
        self.rows: int = env.num_envs
        self.rows_per_env = self.rows // num_envs
        self.tracker = EpisodeTracker(self.mode, num_envs, self.rows_per_env)
        self.allowed: Bools | None = None  # info["action_mask"] of each row, if there is one
        self.left_out: Collection[str] = ()  # infos that are not compared
        self.resets_ended = True  # in disabled mode: whether ``step`` resets what has ended

    @property
    def has_processes(self) -> bool:
        """Whether environments run in processes of their own, of which a computer bears few."""
        return len(multiprocessing.active_children()) >= self.num_envs > 1

    @property
    def under_test(self) -> Any:
        """The object that the caller's ``make`` returned."""
        return self.env

    def rows_of(self, env_index: int) -> slice:
        """The rows of an environment."""
        return slice(env_index * self.rows_per_env, (env_index + 1) * self.rows_per_env)

    def repeat_over_rows(self, values: Array) -> Array:
        """(num_envs,) values -> (rows,) values."""
        return np.repeat(values, self.rows_per_env)

    def reset(self, seed: Any = None, mask: Bools | None = None, options: dict[str, Any] | None = None) -> Record:
        """Reset all environments, or those where ``mask`` (num_envs,) is True."""
        rows = None if mask is None else self.repeat_over_rows(mask)
        record = self._reset(rows, seed, options)
        self.tracker.restart(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        return record

    def batch(self, actions: RowActions) -> Tree:
        """The first ``rows`` actions, batched in new memory as the action space declares."""
        allowed = self.allowed
        if allowed is not None:
            actions = [
                apply_action_mask(self.env.single_action_space, *pair) for pair in zip(actions, allowed, strict=False)
            ]
        space = self.env.single_action_space
        empty: Any = create_empty_array(space, n=self.rows, fn=np.zeros)
        return self.send(concatenate(space, actions[: self.rows], empty))

    def send(self, tree: Tree) -> Tree:
        """Convert NumPy arrays to torch tensors on the environment's device if its outputs are tensors."""
        if isinstance(tree, Mapping):
            return {key: self.send(value) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(self.send, tree))
        numeric = isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc"
        return torch.as_tensor(tree, device=self.device) if self.device is not None and numeric else tree

    def step(self, actions: RowActions) -> Record:
        """One step; ``after_reset`` of the record belongs to environments that were reset by mask."""
        return self.raw_step(self.batch(actions))

    def raw_step(self, batch: Tree) -> Record:
        """One step with batched actions."""
        outputs = self.env.step(batch)
        record = Record(dict(zip(OUTPUTS, outputs, strict=True)), self.rows, self.left_out)
        self.track(record)
        return record

    def track(self, record: Record) -> None:
        """Update the tracker from a step's outputs; in disabled mode reset the environments that ended."""
        flags = record.values("terminations"), record.values("truncations")
        for name, flag in zip(OUTPUTS[2:4], flags, strict=True):
            if flag.shape != (self.rows,):
                raise ValueError(f"{name} have shape {flag.shape}; expected ({self.rows},)")
        self.tracker.advance(*flags)
        self._update_action_mask(record, None)
        finished = self.tracker.finished
        if self.mode is AutoresetMode.DISABLED and self.resets_ended and finished.any():
            rows = self.repeat_over_rows(finished)
            record.add(self._reset(rows), "after_reset", rows)

    def run(self, actions: Sequence[RowActions], seed: Any = None) -> list[Record]:
        """Reset, then one step for each of these actions."""
        return [self.reset(seed), *map(self.step, actions)]

    def run_until_end(self, actions: Sequence[RowActions], seed: int) -> bool:
        """Reset, and step until an environment has ended, which is then not reset; False if none ends."""
        self.reset(seed)
        self.resets_ended = False
        ended = any(self.step(row_actions) and self.tracker.finished.any() for row_actions in actions)
        self.resets_ended = True
        return ended

    def tracking_state(self) -> tuple[EpisodeTracker, Bools | None]:
        """A copy of the tracker's state and action masks, for ``restore_tracking``."""
        return deepcopy(self.tracker), None if self.allowed is None else self.allowed.copy()

    def restore_tracking(self, saved: tuple[EpisodeTracker, Bools | None]) -> None:
        """Restore ``tracking_state()``, after the environment's own state was restored."""
        self.tracker, self.allowed = deepcopy(saved[0]), None if saved[1] is None else saved[1].copy()

    def trajectory(self, records: Sequence[Record], env_index: int) -> bytes:
        """Digest of all observations, rewards and flags of one environment."""
        digest = hashlib.blake2b()
        for record in records:
            digest.update(record.bits(record.named(*SEEN), self.rows_of(env_index)))
        return digest.digest()

    def _reset(self, rows: Bools | None, seed: Any = None, options: dict[str, Any] | None = None) -> Record:
        obs, info = self.env.reset(seed=seed, options=options if rows is None else {"reset_mask": rows.copy()})
        self.device = device_of(obs)
        record = Record({"obs": obs, "info": info}, self.rows, self.left_out)
        self._update_action_mask(record, rows)
        return record

    def _update_action_mask(self, record: Record, rows: Bools | None) -> None:
        leaf = record.leaves.get("info.action_mask")
        if leaf is not None and leaf.values.ndim == 2 and len(leaf.values) == self.rows:
            new = leaf.values.astype(np.bool_)
            old = self.allowed
            self.allowed = new if rows is None or old is None else np.where(rows[:, None], new, old)


def device_of(obs: Tree) -> torch.device | None:
    """The device of torch tensors; None for NumPy arrays."""
    while isinstance(obs, Mapping | tuple):
        obs = next(iter(obs.values() if isinstance(obs, Mapping) else obs))
    return obs.device if isinstance(obs, torch.Tensor) else None


def declared_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """The autoreset mode in the environment's metadata; None if it is missing or invalid."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        return None


def apply_action_mask(space: Any, action: Tree, allowed: Bools) -> Tree:
    """Replace choices that the mask forbids by allowed ones, deterministically."""
    if not isinstance(space, Discrete | MultiDiscrete):
        return action
    # Lists, because NumPy keeps the memory of many small arrays for later ones, which looks like a leak.
    sizes = np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
    if sum(sizes) != len(allowed):
        return action
    values = np.array(action)
    chosen, starts, end = values.ravel().tolist(), np.ravel(space.start).tolist(), 0
    for head, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        choices = [choice for choice, valid in enumerate(allowed[end : end + size]) if valid]
        end += size
        if choices and chosen[head] - start not in choices:
            chosen[head] = choices[chosen[head] % len(choices)] + start
    return np.array(chosen, values.dtype).reshape(values.shape)[()]
