"""A PettingZoo ParallelEnv under test as a vector environment with one row per possible agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from pettingzoo import ParallelEnv

from gpu_vecenv.check.context import CheckContext, Findings, Make
from gpu_vecenv.check.records import Array, Bools, Finding, Record, Tree, host, show
from gpu_vecenv.check.session import REFUSALS, RowActions, Session, apply_action_mask

OUTPUTS = ("observations", "rewards", "terminations", "truncations", "infos")
STARTS = 16  # seeds; a vector env of 4 environments is reset with 4 seeds
NO_STATE = (AttributeError, NotImplementedError)  # raised by state() if the environment has none
Outputs = tuple[dict[Any, Any], ...]


class AgentsAsEnvs(VectorEnv[Any, Any, Any]):
    """A ParallelEnv with the methods of a VectorEnv of one environment, in disabled mode.

    Row i is agent ``possible_agents[i]``. Actions and infos remain dictionaries; ``obs`` is an array of objects, None
    for an absent agent. When the episode ends, absent agents are flagged again, as rows of a vector environment are.
    """

    def __init__(self, env: ParallelEnv[Any, Any, Any]) -> None:
        self.env = env
        self.names = list(env.possible_agents)
        self.num_envs = len(self.names)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.acting = list(self.names)  # until the first reset
        self.outputs: Outputs = ()  # of the last call, unchanged

    @property
    def unwrapped(self) -> Any:
        """The innermost environment."""
        return self.env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the option reset_mask is ignored: there is one environment."""
        further: dict[str, Any] = {} if options is None or "reset_mask" in options else {"options": options}
        observations, infos = self.env.reset(**further) if seed is None else self.env.reset(seed=seed, **further)
        self.outputs = observations, infos
        self.acting = list(self.env.agents)
        return self._rows(observations, object, None), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of the ParallelEnv."""
        before = self.acting
        self.outputs = self.env.step(actions)
        observations, rewards, terminations, truncations, infos = self.outputs
        self.acting = list(self.env.agents)
        ended = self._rows(terminations, np.bool_, False)
        if before and not self.acting:
            ended |= [name not in terminations for name in self.names]
        flags = ended, self._rows(truncations, np.bool_, False)
        return self._rows(observations, object, None), self._rows(rewards, np.float64, 0), *flags, infos

    def close(self, **kwargs: Any) -> None:
        """Close the ParallelEnv, also if it is closed already."""
        self.closed = True
        self.env.close()  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return str(self.env)

    def _rows(self, given: Mapping[Any, Any], dtype: Any, absent: Any) -> Array:
        rows = np.full(len(self.names), absent, dtype)
        for row, name in enumerate(self.names):
            if name in given:
                rows[row] = given[name] if dtype is object else host(given[name]).reshape(-1)[0]
        return rows


class AgentSession(Session):
    """A ParallelEnv under test: actions are dictionaries of the current agents."""

    env: Any  # AgentsAsEnvs

    def __init__(self, env: AgentsAsEnvs, has_state: bool) -> None:
        super().__init__(env, 1, None)
        self.has_state = has_state
        self._masks: dict[Any, Bools] = {}

    @property
    def under_test(self) -> Any:
        """The ParallelEnv."""
        return self.env.env

    def batch(self, actions: RowActions) -> dict[Any, Any]:
        """The actions of the current agents, in new memory."""
        rows = self.env
        return {
            name: apply_action_mask(rows.env.action_space(name), deepcopy(action), allowed)
            if (allowed := self._masks.get(name)) is not None
            else deepcopy(action)
            for name, action in zip(rows.names, actions, strict=True)
            if name in rows.acting
        }

    def raw_step(self, batch: Tree) -> Record:
        """One step; the record includes ``state`` if there is one."""
        record = self.step_without_reset(batch)
        self.track(record)
        return record

    def step_without_reset(self, batch: Tree) -> Record:
        """One step without the reset that may follow it."""
        return self._record(dict(zip(("obs", *OUTPUTS[1:4], "info"), self.env.step(batch), strict=True)))

    def tracking_state(self) -> tuple[Any, Any]:
        """A copy of the tracker, the action masks and the current agents."""
        return deepcopy(self.tracker), (dict(self._masks), list(self.env.acting))

    def restore_tracking(self, saved: tuple[Any, Any]) -> None:
        """Restore ``tracking_state()``."""
        self.tracker, (self._masks, self.env.acting) = deepcopy(saved[0]), deepcopy(saved[1])

    def _reset(self, rows: Bools | None, seed: Any = None, options: dict[str, Any] | None = None) -> Record:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._record({"obs": obs, "info": info})

    def _record(self, raw: dict[str, Any]) -> Record:
        if self.has_state and self.env.acting:
            raw["state"] = self.env.env.state()
        self._masks = dict(self._found_masks(raw))
        raw["given"] = dict(zip(OUTPUTS[1:4], self.env.outputs[1:4], strict=False)) if "rewards" in raw else {}
        return Record(raw, self.rows, self.left_out)

    def _found_masks(self, raw: Mapping[str, Any]) -> Iterator[tuple[Any, Bools]]:
        for row, name in enumerate(self.env.names):
            for source in (raw["obs"][row], raw["info"].get(name)):
                mask = source.get("action_mask") if isinstance(source, Mapping) else None
                if mask is not None:
                    parts = [host(part).reshape(-1) for part in (mask if isinstance(mask, tuple) else (mask,))]
                    yield name, np.concatenate(parts).astype(np.bool_)


def as_vector_env(make: Callable[[], Any]) -> Make:
    """Wrap ``make`` so that it returns AgentsAsEnvs.

    Raises:
        TypeError, ValueError: When called: ``make`` returned no ParallelEnv, or one without possible_agents.
    """

    def made(_: int) -> AgentsAsEnvs:
        env = make()
        if not isinstance(env, ParallelEnv):
            raise TypeError(f"make() returned a {type(env).__name__}; expected a pettingzoo.ParallelEnv")
        if not list(getattr(env, "possible_agents", ())):
            raise ValueError(
                "make() returned a ParallelEnv without possible_agents; expected the names of all agents in it"
            )
        return AgentsAsEnvs(env)

    return made


class ParallelContext(CheckContext):
    """Makes ParallelEnvs, and actions for their agents."""

    SMALL_NUM_ENVS = LARGE_NUM_ENVS = MANY_NUM_ENVS = 1
    WARM_UP_EPISODES = EPISODES = 10
    refusals = (*REFUSALS, KeyError, AttributeError)  # PettingZoo's, for missing agents and calls out of order
    masked = has_state = False
    state_error = ""

    def _inspect(self) -> None:
        session: Any = self.session()
        rows = session.env
        self.rows_per_env, self.name, self.agents = session.rows_per_env, str(rows), list(rows.names)
        self.spaces = [deepcopy(rows.env.action_space(name)) for name in self.agents]

    def make_unmanaged(self, num_envs: int, make: Make | None = None) -> Session:
        """Make an environment that the caller closes."""
        return AgentSession((make or self.make)(num_envs), self.has_state)

    def obstacles(self) -> Findings:
        """What reset and step return is no tuple of dictionaries; also finds out whether there is a state."""
        session: Any = self.session()
        env = session.env.env
        outputs = env.reset(seed=self.seeds[0])
        if not isinstance(outputs, tuple) or len(outputs) != 2 or not all(isinstance(o, Mapping) for o in outputs):
            yield Finding(f"reset returns {show(outputs)}", "two dictionaries, (observations, infos)")
        try:
            env.state()
            self.has_state = True
        except NO_STATE:
            pass
        except Exception as error:  # any error of the environment: K11 reports it
            self.state_error = f"state(): {type(error).__name__}: {error}"
        session.reset(self.seeds[0])
        with suppress(Exception):  # an error of the environment: the checks report it
            outputs = env.step(session.batch(self.actions(self.seeds[0], 1)[0]))
            if not isinstance(outputs, tuple) or len(outputs) != 5 or not all(isinstance(o, Mapping) for o in outputs):
                yield Finding(f"step returns {show(outputs)}", f"five dictionaries, {OUTPUTS}")

    @cached_property
    def starts(self) -> set[bytes]:
        """The distinct first observations of ``STARTS`` seeds."""
        session = self.session()
        return {session.trajectory([session.reset(self.seeds[0] + more)], 0) for more in range(STARTS)}

    def sample_spaces(self, session: Session) -> None:
        """Draw from all spaces of all agents."""
        for name in self.agents:
            session.under_test.observation_space(name).sample()
            session.under_test.action_space(name).sample()

    def actions(self, salt: int, steps: int | None = None) -> list[RowActions]:
        """Per step, a valid random action for each possible agent."""
        for index, space in enumerate(self.spaces):
            space.seed(salt + index)
        return [[space.sample() for space in self.spaces] for _ in range(steps or self.steps)]
