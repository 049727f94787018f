"""The environment under test: driven in any autoreset mode, with a tracker of its own; and the table of checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium.error
import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from gpu_vecenv.check.records import Array, Bools, Finding, Record, Tree, difference

Make = Callable[[int], Any]  # number of replicas -> VectorEnv
RowActions = Sequence[Tree]  # one action for each row
OUTPUTS = ("obs", "rewards", "terminations", "truncations", "info")
SEEN = (*OUTPUTS[:4], "after_reset.obs")  # what an agent sees, in every mode
Findings = Iterator[Finding]
Rule = Callable[["CheckContext"], Findings]
# What a refusal may be: the builtins that say so, Gymnasium's errors, and the assertions of its spaces.
REFUSALS = (TypeError, ValueError, gymnasium.error.Error, AssertionError)


class Inapplicable(Exception):
    """A check has nothing to check here; the message says why."""


@dataclass(frozen=True)
class CheckOptions:
    """What some checks need beside the environment; the arguments of ``check_vector_env`` of the same names."""

    oracle: Make | None = None
    modes: Mapping[AutoresetMode, Make] | None = None
    variants: Mapping[str, Make] | None = None
    graph: Make | None = None
    permutable_agents: Any = None
    state_of: Callable[[Any], Any] | None = None


NO_OPTIONS = CheckOptions()


class Check(NamedTuple):
    """One check: what it is called, and the function that yields what it finds, or why there is nothing to find."""

    id: str
    title: str
    rule: Rule | str


CHECKS: dict[str, Check] = {}


def check(name: str, title: str) -> Callable[[Rule], Rule]:
    """Enter a function into ``CHECKS``."""

    def enter(rule: Rule) -> Rule:
        CHECKS[name] = Check(name, title, rule)
        return rule

    return enter


def differing(what: str, got: Sequence[Record], expected: Sequence[Record], chosen: Bools | None = None) -> Findings:
    """What ``difference`` finds, introduced."""
    finding = difference(got, expected, chosen)
    if finding is not None:
        yield replace(finding, got=f"{what}: {finding.got}")


class EpisodeTracker:
    """An independent count of each replica's steps in its episode, kept from the flags alone.

    A replica is a rows_per_env of rows, one for each agent. Its episode ends when all of its rows have ended.
    """

    def __init__(self, mode: AutoresetMode | None, replicas: int, rows_per_env: int):
        self.mode, self.shape = mode, (replicas, rows_per_env)
        self.age = np.zeros(replicas, np.int64)
        self.finished = np.zeros(replicas, np.bool_)  # ended with the last step
        self.resetting = np.zeros(replicas, np.bool_)  # the last step was the reset that follows in NEXT_STEP
        self.ended = np.zeros(self.shape, np.bool_)  # rows that have ended in this episode
        self.before = self.ended  # the same, before the last step

    def restart(self, replicas: Bools) -> None:
        """New episodes by hand."""
        self.age[replicas], self.ended[replicas], self.finished[replicas] = 0, False, False

    def advance(self, terminations: Array, truncations: Array) -> None:
        """Count one step by its flags."""
        self.age[self.finished], self.ended[self.finished] = 0, False
        self.resetting = self.finished & (self.mode is AutoresetMode.NEXT_STEP)
        self.age += ~self.resetting
        self.before = self.ended.copy()
        flags = (terminations.astype(np.bool_) | truncations.astype(np.bool_)).reshape(self.shape)
        self.ended |= flags & ~self.resetting[:, None]
        self.finished = self.ended.all(1) & ~self.resetting


class Session:
    """One environment under test, with its tracker. Ended replicas are reset by mask where the mode asks for that."""

    def __init__(self, env: VectorEnv[Any, Any, Any], replicas: int, device: torch.device | None):
        self.env, self.replicas, self.device = env, replicas, device
        self.mode = declared_mode(env)
        self.rows: int = env.num_envs
        self.rows_per_env = self.rows // replicas
        self.tracker = EpisodeTracker(self.mode, replicas, self.rows_per_env)
        self.allowed: Bools | None = None  # choices of each row, where info has a mask of them

    @property
    def under_test(self) -> Any:
        """What the caller's ``make`` gave."""
        return self.env

    def rows_of(self, replica: int) -> slice:
        """A replica's rows."""
        return slice(replica * self.rows_per_env, (replica + 1) * self.rows_per_env)

    def repeat_over_rows(self, replicas: Array) -> Array:
        """A value for each replica, as one for each row."""
        return np.repeat(replicas, self.rows_per_env)

    def reset(self, seed: int | None = None, mask: Bools | None = None) -> Record:
        """Reset all replicas, or those where ``mask`` (replicas,) is True."""
        rows = None if mask is None else self.repeat_over_rows(mask)
        record = self._reset(rows, seed)
        self.tracker.restart(np.ones(self.replicas, np.bool_) if mask is None else mask)
        return record

    def batch(self, actions: RowActions) -> Tree:
        """The first ``rows`` actions as the environment takes them, fresh memory."""
        allowed = self.allowed
        if allowed is not None:
            actions = [
                apply_action_mask(self.env.single_action_space, *pair) for pair in zip(actions, allowed, strict=False)
            ]
        space = self.env.single_action_space
        empty: Any = create_empty_array(space, n=self.rows, fn=np.zeros)
        return self.send(concatenate(space, actions[: self.rows], empty))

    def send(self, tree: Tree) -> Tree:
        """NumPy arrays as the environment wants them: torch tensors on its device where it returns such."""
        if isinstance(tree, Mapping):
            return {key: self.send(value) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(self.send, tree))
        numeric = isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc"
        return torch.as_tensor(tree, device=self.device) if self.device is not None and numeric else tree

    def step(self, actions: RowActions) -> Record:
        """One step; the record has ``after_reset.obs`` and ``after_reset.info`` where replicas were reset by mask."""
        return self.raw_step(self.batch(actions))

    def raw_step(self, batch: Tree) -> Record:
        """One step with actions as the environment takes them."""
        outputs = self.env.step(batch)
        record = Record(dict(zip(OUTPUTS, outputs, strict=True)), self.rows)
        self.track(record)
        return record

    def track(self, record: Record) -> None:
        """Take note of what a step returned, and reset what has to be reset by mask."""
        flags = record.values("terminations"), record.values("truncations")
        for name, flag in zip(OUTPUTS[2:4], flags, strict=True):
            if flag.shape != (self.rows,):
                raise ValueError(f"{name} have shape {flag.shape}; expected ({self.rows},)")
        self.tracker.advance(*flags)
        self._see_action_mask(record, None)
        finished = self.tracker.finished
        if self.mode is AutoresetMode.DISABLED and finished.any():
            rows = self.repeat_over_rows(finished)
            record.add(self._reset(rows), "after_reset", rows)

    def run(self, actions: Sequence[RowActions], seed: int | None = None) -> list[Record]:
        """A reset and a step for each of these actions."""
        return [self.reset(seed), *map(self.step, actions)]

    def tracking_state(self) -> tuple[EpisodeTracker, Bools | None]:
        """What the session knows of the episodes under way, copied; ``restore_tracking`` takes it back."""
        return deepcopy(self.tracker), None if self.allowed is None else self.allowed.copy()

    def restore_tracking(self, known: tuple[EpisodeTracker, Bools | None]) -> None:
        """Know what ``tracking_state`` gave: the environment is back where it was then."""
        self.tracker, self.allowed = deepcopy(known[0]), None if known[1] is None else known[1].copy()

    def trajectory(self, records: Sequence[Record], replica: int) -> bytes:
        """A digest of all that one replica's agents saw."""
        digest = hashlib.blake2b()
        for record in records:
            digest.update(record.bits(record.named(*SEEN), self.rows_of(replica)))
        return digest.digest()

    def _reset(self, rows: Bools | None, seed: int | None = None) -> Record:
        obs, info = self.env.reset(seed=seed, options=None if rows is None else {"reset_mask": rows.copy()})
        self.device = device_of(obs)
        record = Record({"obs": obs, "info": info}, self.rows)
        self._see_action_mask(record, rows)
        return record

    def _see_action_mask(self, record: Record, rows: Bools | None) -> None:
        leaf = record.leaves.get("info.action_mask")
        if leaf is not None and leaf.values.ndim == 2 and len(leaf.values) == self.rows:
            new = leaf.values.astype(np.bool_)
            old = self.allowed
            self.allowed = new if rows is None or old is None else np.where(rows[:, None], new, old)


class CheckContext:
    """Makes the environments that a check needs, and actions for them; closes them after each check."""

    SMALL_NUM_ENVS, LARGE_NUM_ENVS = 4, 7  # replicas; 7 is no multiple of anything
    refusals: tuple[type[Exception], ...] = REFUSALS
    masked = True  # whether reset knows the option reset_mask

    def __init__(self, make: Make, seed: int, steps: int, max_steps: int | None, options: CheckOptions = NO_OPTIONS):
        self.make, self.steps, self.max_steps, self.options = make, steps, max_steps, options
        self.seeds = [seed, seed + 1, seed + 2, seed + 3]
        self.notes: list[str] = []
        self._open = ExitStack()
        self.device: torch.device | None = None
        with self._open:
            self._inspect()

    def _inspect(self) -> None:
        session = self.session(self.LARGE_NUM_ENVS)
        self.rows_per_env, self.name = session.rows_per_env, str(session.env)
        self.action_space = deepcopy(session.env.action_space)
        self.max_steps = self.max_steps or getattr(session.env.spec, "max_episode_steps", None)
        session.reset(self.seeds[0])
        self.device = session.device

    def session(self, replicas: int | None = None, make: Make | None = None) -> Session:
        """A new environment. The first replicas of a larger one are to behave like those of a smaller one.

        Args:
            replicas: How many; None makes a few.
            make: Another maker than the one under test.
        """
        session = self.make_unmanaged(self.SMALL_NUM_ENVS if replicas is None else replicas, make)
        self._open.callback(session.env.close)
        return session

    def make_unmanaged(self, replicas: int, make: Make | None = None) -> Session:
        """A new environment that the caller closes."""
        env = (make or self.make)(replicas)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"make({replicas}) gave a {type(env).__name__}; expected a gymnasium.vector.VectorEnv")
        if env.num_envs < replicas or env.num_envs % replicas:
            env.close()
            raise ValueError(f"make({replicas}) gave num_envs = {env.num_envs}; expected as many rows for each replica")
        return Session(env, replicas, self.device)

    def close(self) -> None:
        """Close what has been opened."""
        self._open.close()

    def actions(self, salt: int, steps: int | None = None) -> list[RowActions]:
        """For each step a valid random action for each row of the larger environment."""
        self.action_space.seed(salt)
        samples = (self.action_space.sample() for _ in range(steps or self.steps))
        return [list(iterate(self.action_space, sample)) for sample in samples]

    def same_actions_everywhere(self, actions: Sequence[RowActions], session: Session) -> list[RowActions]:
        """The same actions, all replicas doing what the first one does."""
        return [[step[row % session.rows_per_env] for row in range(session.rows)] for step in actions]

    @cached_property
    def trajectories(self) -> dict[tuple[int, int], bytes]:
        """(seed, replica) -> digest of what it saw, all replicas having acted alike."""
        return {key: trajectory for key, (trajectory, _) in self._equal_runs.items()}

    @cached_property
    def starts(self) -> set[bytes]:
        """The different first observations of all these."""
        return {start for _, start in self._equal_runs.values()}

    @property
    def random(self) -> bool:
        """Whether seeds, replicas or episodes make any difference."""
        return len(set(self.trajectories.values())) > 1 or self._another_episode_differs

    def require_randomness(self) -> None:
        """Raise Inapplicable where the environment shows none."""
        if not self.random:
            raise Inapplicable(
                f"{len(self.trajectories)} pairs of seed and replica saw the same: nothing in it is random"
            )

    @cached_property
    def _another_episode_differs(self) -> bool:
        session = self.session()
        actions = self.same_actions_everywhere(self.actions(self.seeds[0]), session)
        first, again = session.run(actions, self.seeds[0]), session.run(actions)
        return any(session.trajectory(first, r) != session.trajectory(again, r) for r in range(session.replicas))

    @cached_property
    def _equal_runs(self) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        runs = {}
        for seed in self.seeds:
            session = self.session()
            records = session.run(self.same_actions_everywhere(self.actions(self.seeds[0]), session), seed)
            for replica in range(session.replicas):
                runs[seed, replica] = session.trajectory(records, replica), session.trajectory(records[:1], replica)
        return runs


def device_of(obs: Tree) -> torch.device | None:
    """Where tensors lie; None where there are none, but NumPy arrays."""
    while isinstance(obs, Mapping | tuple):
        obs = next(iter(obs.values() if isinstance(obs, Mapping) else obs))
    return obs.device if isinstance(obs, torch.Tensor) else None


def declared_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """The autoreset mode in the environment's metadata, None where there is none."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        return None


def apply_action_mask(space: Any, action: Tree, allowed: Bools) -> Tree:
    """The action, or where info["action_mask"] forbids a choice another one, picked by the action itself."""
    if not isinstance(space, Discrete | MultiDiscrete):
        return action
    sizes = np.reshape(space.n if isinstance(space, Discrete) else space.nvec, -1)
    if sizes.sum() != len(allowed):
        return action
    values, starts, end = np.array(action).reshape(-1), np.reshape(space.start, -1), 0
    for head, size in enumerate(sizes):
        choices = np.flatnonzero(allowed[end : end + size])
        end += size
        if len(choices) and values[head] - starts[head] not in choices:
            values[head] = choices[int(values[head]) % len(choices)] + starts[head]
    return values.reshape(np.shape(action))[()]
