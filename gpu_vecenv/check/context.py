"""The table of checks, and the context that makes environments and actions for a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from gpu_vecenv.check.records import Bools, Finding, Record, arrays, difference, differing_infos, show
from gpu_vecenv.check.session import OUTPUTS, REFUSALS, RowActions, Session

Make = Callable[[int], Any]  # number of environments -> VectorEnv
Findings = Iterator[Finding]
LONGEST = 5000  # steps that are run in search of infos that vary
Rule = Callable[["CheckContext"], Findings]


class Inapplicable(Exception):
    """The check does not apply to this environment; the message says why."""


@dataclass(frozen=True)
class CheckOptions:
    """Optional inputs of some checks: the arguments of ``check_vector_env`` of the same names."""

    oracle: Make | None = None
    modes: Mapping[AutoresetMode, Make] | None = None
    variants: Mapping[str, Make] | None = None
    graph: Make | None = None
    permutable_agents: Any = None
    state_of: Callable[[Any], Any] | None = None


NO_OPTIONS = CheckOptions()


class Check(NamedTuple):
    """One check: a function that yields findings, or the reason why it does not apply."""

    id: str
    title: str
    rule: Rule | str


CHECKS: dict[str, Check] = {}


def check(name: str, title: str) -> Callable[[Rule], Rule]:
    """Register a function in ``CHECKS``."""

    def enter(rule: Rule) -> Rule:
        CHECKS[name] = Check(name, title, rule)
        return rule

    return enter


def differing(what: str, got: Sequence[Record], expected: Sequence[Record], chosen: Bools | None = None) -> Findings:
    """The finding of ``difference``, if there is one, prefixed with ``what``."""
    finding = difference(got, expected, chosen)
    if finding is not None:
        yield replace(finding, got=f"{what}: {finding.got}")


def mixed_actions(base: RowActions, other: RowActions, rows: Sequence[int]) -> RowActions:
    """``base`` with the actions of ``other`` in these rows."""
    return [other[row] if row in rows else action for row, action in enumerate(base)]


def _layout(space: Any) -> Any:
    """The nesting and the shapes of a space."""
    if isinstance(space, Dict):
        return {key: _layout(inner) for key, inner in space.spaces.items()}
    return tuple(map(_layout, space.spaces)) if isinstance(space, Tuple) else space.shape


def error_text(error: Exception) -> str:
    """An error of the environment, and where it was raised."""
    where = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"


class CheckContext:
    """Makes environments and actions for a check, and closes the environments afterwards."""

    SMALL_NUM_ENVS, LARGE_NUM_ENVS = 4, 7  # 7: a prime, so that no block or vector width divides it
    MANY_NUM_ENVS = 33  # one more than a warp
    WARM_UP_EPISODES = 120  # until queues of 100 episodes, as in Gymnasium's RecordEpisodeStatistics, are full
    EPISODES = 80  # between two measurements of memory
    refusals: tuple[type[Exception], ...] = REFUSALS
    masked = True  # whether reset takes the option reset_mask

    def __init__(self, make: Make, seed: int, steps: int, max_steps: int | None, options: CheckOptions = NO_OPTIONS):
        self.make, self.steps, self.max_steps, self.options = make, steps, max_steps, options
        self.seeds = [seed, seed + 1, seed + 2, seed + 3]
        self.notes: list[str] = []
        self._open = ExitStack()
        self.device: torch.device | None = None
        self.left_out: frozenset[str] = frozenset()
        self.reproducible = True  # until two identical runs differ
        self.avoided: set[str] = set()  # attempts that would end the process
        self.report_attempt: Callable[[str], None] = lambda _: None
        with self._open:
            self._inspect()

    def _inspect(self) -> None:
        session = self.session(self.LARGE_NUM_ENVS)
        self.rows_per_env, self.name = session.rows_per_env, str(session.env)
        single: Space[Any] = getattr(session.env, "single_action_space", Space())
        self.action_space = batch_space(single, self.MANY_NUM_ENVS * self.rows_per_env)
        self.max_steps = self.max_steps or getattr(session.env.spec, "max_episode_steps", None)

    def attempts(self, name: str) -> bool:
        """Announce a call that may end the process; False if it is known to."""
        if name not in self.avoided:
            self.report_attempt(name)
        return name not in self.avoided

    def session(self, num_envs: int | None = None, make: Make | None = None) -> Session:
        """Make a vector environment; it is closed after the check.

        Args:
            num_envs: Number of environments; None makes ``SMALL_NUM_ENVS``.
            make: Used instead of the ``make`` under test.
        """
        session = self.make_unmanaged(self.SMALL_NUM_ENVS if num_envs is None else num_envs, make)
        session.left_out = self.left_out
        self._open.callback(session.env.close)
        return session

    def make_unmanaged(self, num_envs: int, make: Make | None = None) -> Session:
        """Make a vector environment that the caller closes."""
        env = (make or self.make)(num_envs)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"make({num_envs}) returned a {type(env).__name__}; expected a gymnasium.vector.VectorEnv")
        if env.num_envs < num_envs or env.num_envs % num_envs:
            env.close()
            raise ValueError(
                f"make({num_envs}) returned num_envs = {env.num_envs}; expected a multiple of {num_envs}: "
                "equally many rows for each environment"
            )
        return Session(env, num_envs, self.device)

    def preflight(self) -> Findings:
        """The first obstacle to all other checks; without one, ``left_out`` and its note."""
        try:
            obstacle = next(self.obstacles(), None)
        except Exception as error:  # any error of the environment
            obstacle = Finding(error_text(error), "no error in the first calls")
        if obstacle is not None:
            yield obstacle
            return
        with suppress(Exception):  # an error of the environment: the checks report it
            self._find_varying_infos()
        if self.left_out:
            names = ", ".join(sorted(name.removeprefix("info.") for name in self.left_out))
            self.notes.append(f"not compared, since they differ between two identical runs: infos {names}")

    def obstacles(self) -> Findings:
        """What makes all other checks meaningless: spaces that are no batch, infos that are no dictionary, no mode."""
        session = self.session()
        env, rows = session.env, session.rows
        if session.mode is None:
            declared = env.metadata.get("autoreset_mode")
            yield Finding(f"metadata['autoreset_mode'] is {declared!r}", "a gymnasium.vector.AutoresetMode")
        for name in ("observation_space", "action_space"):
            space, single = (getattr(env, key, None) for key in (name, f"single_{name}"))
            if not isinstance(space, Space) or not isinstance(single, Space):
                yield Finding(f"{name} is {space}, single_{name} is {single}", "two spaces of Gymnasium")
            elif _layout(space) != _layout(batched := batch_space(single, rows)):
                yield Finding(f"{name} is {space}", f"single_{name} batched for {rows} rows: {batched}")
        session.reset(self.seeds[0])
        self.device = session.device
        actions = session.batch(self.actions(self.seeds[0], 1)[0])  # allowed after that reset, as after this one
        for name, outputs in (("reset", env.reset(seed=self.seeds[0])), ("step", env.step(actions))):
            if not isinstance(outputs, tuple) or len(outputs) != (2 if name == "reset" else 5):
                yield Finding(f"{name} returns {show(outputs)}", "(obs, info)" if name == "reset" else str(OUTPUTS))
            if not isinstance(outputs[-1], Mapping):
                yield Finding(f"info of {name} is a {type(outputs[-1]).__name__}", "a dictionary")
            for what, tree in zip(OUTPUTS, outputs[:-1], strict=False):
                for part in arrays(tree):
                    wanted = (rows,) if what == "obs" else part.shape[:1]
                    if part.shape[:1] != (rows,) or (what != "obs" and part.shape != wanted):
                        yield Finding(f"{what} of {name} have shape {part.shape}", f"{rows} rows")

    def _find_varying_infos(self) -> None:
        """Find infos that differ between two identical runs, such as wall-clock times.

        Once another output differs the search ends: infos may differ as a consequence.
        """
        steps = max(self.steps, min((self.max_steps or 0) + 1, LONGEST))
        actions, sessions = self.actions(self.seeds[0], steps), [self.session(self.LARGE_NUM_ENVS) for _ in range(2)]
        for step in (None, *actions):
            one, other = (s.reset(self.seeds[0]) if step is None else s.step(step) for s in sessions)
            found = differing_infos(one, other)
            if found is None:
                break
            self.left_out |= found

    def close(self) -> None:
        """Close all environments that ``session`` made."""
        self._open.close()

    def actions(self, salt: int, steps: int | None = None) -> list[RowActions]:
        """Per step, a valid random action for each row of ``MANY_NUM_ENVS`` environments."""
        self.action_space.seed(salt)
        samples = (self.action_space.sample() for _ in range(steps or self.steps))
        return [list(iterate(self.action_space, sample)) for sample in samples]

    def sample_spaces(self, session: Session) -> None:
        """Draw from all spaces of an environment."""
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            getattr(session.env, name).sample()

    def same_actions_everywhere(self, actions: Sequence[RowActions], session: Session) -> list[RowActions]:
        """The actions with those of the first environment copied to all environments."""
        return [[step[row % session.rows_per_env] for row in range(session.rows)] for step in actions]

    @cached_property
    def trajectories(self) -> dict[tuple[int, int], bytes]:
        """(seed, env_index) -> digest of its trajectory; all environments take equal actions."""
        return {key: trajectory for key, (trajectory, _) in self._equal_runs.items()}

    @cached_property
    def starts(self) -> set[bytes]:
        """The distinct first observations of these trajectories."""
        return {start for _, start in self._equal_runs.values()}

    @property
    def random(self) -> bool:
        """Whether trajectories depend on the seed, the environment or the episode."""
        return len(set(self.trajectories.values())) > 1 or self._another_episode_differs

    def require_randomness(self) -> None:
        """Raise Inapplicable if the environment is deterministic."""
        if not self.random:
            raise Inapplicable(
                f"{len(self.trajectories)} pairs of seed and environment have the same trajectory: nothing in "
                "it is random"
            )

    @cached_property
    def _another_episode_differs(self) -> bool:
        session = self.session()
        actions = self.same_actions_everywhere(self.actions(self.seeds[0]), session)
        first, again = session.run(actions, self.seeds[0]), session.run(actions)
        return any(session.trajectory(first, r) != session.trajectory(again, r) for r in range(session.num_envs))

    @cached_property
    def _equal_runs(self) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        runs = {}
        for seed in self.seeds:
            session = self.session()
            records = session.run(self.same_actions_everywhere(self.actions(self.seeds[0]), session), seed)
            for env_index in range(session.num_envs):
                runs[seed, env_index] = (
                    session.trajectory(records, env_index),
                    session.trajectory(records[:1], env_index),
                )
        return runs


PREFLIGHT = Check("K00", "the interface can be checked", CheckContext.preflight)  # before all others
