"""A PettingZoo ParallelEnv under test: rows, one for each possible agent, that the checks of vector envs can drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from pettingzoo import ParallelEnv

from gpu_vecenv.check.context import (
    REFUSALS,
    CheckContext,
    Findings,
    Inapplicable,
    Make,
    RowActions,
    Session,
    apply_action_mask,
    differing,
)
from gpu_vecenv.check.episodes import episode_contract
from gpu_vecenv.check.interface import bad_values, kind_of, outside, refused_actions
from gpu_vecenv.check.records import Array, Bools, Finding, Record, Tree, host, show

OUTPUTS = ("observations", "rewards", "terminations", "truncations", "infos")
STARTS = 16  # as many as a vector env of four replicas shows under four seeds
NOT_THERE = (AttributeError, NotImplementedError)  # what asking for a state raises where there is none
Outputs = tuple[dict[Any, Any], ...]


class AgentsAsEnvs(VectorEnv[Any, Any, Any]):
    """A ParallelEnv with the methods of a vector env of one replica, in disabled mode.

    Row i is agent ``possible_agents[i]``. Actions and infos are dictionaries still; ``obs`` is an array of objects,
    None for an agent that is not there. At the end, absent agents are flagged as rows of a replica are.
    """

    def __init__(self, env: ParallelEnv[Any, Any, Any]) -> None:
        self.env = env
        self.names = list(env.possible_agents)
        self.num_envs = len(self.names)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.acting = list(self.names)  # before the first reset nobody knows better
        self.outputs: Outputs = ()  # of the last call, as they came

    @property
    def unwrapped(self) -> Any:
        """The innermost environment."""
        return self.env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the option reset_mask, which can but mean the only replica, is not passed on."""
        observations, infos = self.env.reset() if seed is None else self.env.reset(seed=seed)
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
        """Close the ParallelEnv, each time."""
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
    """A ParallelEnv under test: actions are dictionaries of those agents that are there."""

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
        """The actions of the agents that are there, fresh memory."""
        rows = self.env
        return {
            name: apply_action_mask(rows.env.action_space(name), deepcopy(action), allowed)
            if (allowed := self._masks.get(name)) is not None
            else deepcopy(action)
            for name, action in zip(rows.names, actions, strict=True)
            if name in rows.acting
        }

    def raw_step(self, batch: Tree) -> Record:
        """One step; the record has ``state``, if there is one, too."""
        record = self.step_without_reset(batch)
        self.track(record)
        return record

    def step_without_reset(self, batch: Tree) -> Record:
        """One step alone: no reset follows."""
        return self._record(dict(zip(("obs", *OUTPUTS[1:4], "info"), self.env.step(batch), strict=True)))

    def tracking_state(self) -> tuple[Any, Any]:
        """What the session knows of the episode under way, copied."""
        return deepcopy(self.tracker), (dict(self._masks), list(self.env.acting))

    def restore_tracking(self, known: tuple[Any, Any]) -> None:
        """Know what ``tracking_state`` gave."""
        self.tracker, (self._masks, self.env.acting) = deepcopy(known[0]), deepcopy(known[1])

    def _reset(self, rows: Bools | None, seed: int | None = None) -> Record:
        obs, info = self.env.reset(seed=seed)
        return self._record({"obs": obs, "info": info})

    def _record(self, raw: dict[str, Any]) -> Record:
        if self.has_state and self.env.acting:
            raw["state"] = self.env.env.state()
        self._masks = dict(self._found_masks(raw))
        raw["given"] = dict(zip(OUTPUTS[1:4], self.env.outputs[1:4], strict=False)) if "rewards" in raw else {}
        return Record(raw, self.rows)

    def _found_masks(self, raw: Mapping[str, Any]) -> Iterator[tuple[Any, Bools]]:
        for row, name in enumerate(self.env.names):
            for source in (raw["obs"][row], raw["info"].get(name)):
                mask = source.get("action_mask") if isinstance(source, Mapping) else None
                if mask is not None:
                    parts = [host(part).reshape(-1) for part in (mask if isinstance(mask, tuple) else (mask,))]
                    yield name, np.concatenate(parts).astype(np.bool_)


def as_vector_env(make: Callable[[], Any]) -> Make:
    """What makes such rows of what ``make`` gives.

    Raises:
        TypeError, ValueError: When it is called: there is no ParallelEnv, or one that does not name its agents.
    """

    def made(_: int) -> AgentsAsEnvs:
        env = make()
        if not isinstance(env, ParallelEnv):
            raise TypeError(f"make() gave a {type(env).__name__}; expected a pettingzoo.ParallelEnv")
        if not list(getattr(env, "possible_agents", ())):
            raise ValueError("make() gave a ParallelEnv without possible_agents; expected all agents' names in it")
        return AgentsAsEnvs(env)

    return made


class ParallelContext(CheckContext):
    """Makes ParallelEnvs, and actions for their agents."""

    SMALL_NUM_ENVS = LARGE_NUM_ENVS = 1
    refusals = (*REFUSALS, KeyError, AttributeError)  # PettingZoo's: of missing agents, and of calls out of order
    masked = has_state = False
    state_error = ""

    def _inspect(self) -> None:
        session: Any = self.session()
        rows = session.env
        self.rows_per_env, self.name, self.agents = session.rows_per_env, str(rows), list(rows.names)
        self.spaces = [deepcopy(rows.env.action_space(name)) for name in self.agents]
        session.reset(self.seeds[0])
        try:
            rows.env.state()
            self.has_state = True
        except NOT_THERE:
            pass
        except Exception as error:  # whatever the environment raises: K11 tells it
            self.state_error = f"state(): {type(error).__name__}: {error}"

    def make_unmanaged(self, replicas: int, make: Make | None = None) -> Session:
        """A new environment that the caller closes."""
        return AgentSession((make or self.make)(replicas), self.has_state)

    @cached_property
    def starts(self) -> set[bytes]:
        """The different first observations under some seeds."""
        session = self.session()
        return {session.trajectory([session.reset(self.seeds[0] + more)], 0) for more in range(STARTS)}

    def actions(self, salt: int, steps: int | None = None) -> list[RowActions]:
        """For each step a valid random action for each possible agent."""
        for place, space in enumerate(self.spaces):
            space.seed(salt + place)
        return [[space.sample() for space in self.spaces] for _ in range(steps or self.steps)]


# ---------------------------------------------------------------------- what is another promise here

ONE = "a ParallelEnv is one replica: there are no others to compare it with"
PARALLEL: dict[str, Callable[[Any], Findings] | str] = {
    **dict.fromkeys(("K03", "K04", "K05", "K06"), ONE),
    "K09": "a ParallelEnv is one replica: nothing but the whole is reset",
    "K20": "a ParallelEnv has no autoreset and so no modes of it",
    "K21": "a ParallelEnv has no interface to its state; check the vector env that it is a view of",
    "K22": "a step of a ParallelEnv gives Python numbers, which no CUDA graph can",
    "K24": "a ParallelEnv has no interface to its state; check the vector env that it is a view of",
}


def _here(name: str) -> Callable[[Callable[[Any], Findings]], Callable[[Any], Findings]]:
    def enter(rule: Callable[[Any], Findings]) -> Callable[[Any], Findings]:
        PARALLEL[name] = rule
        return rule

    return enter


def _steps(context: ParallelContext) -> Iterator[tuple[int, AgentsAsEnvs, list[Any], Record]]:
    """Step, environment, the agents that were there before it, and what came; in episodes one after the other."""
    session: Any = context.session()
    record = session.reset(context.seeds[1])
    yield 0, session.env, [], record
    for step, actions in enumerate(context.actions(context.seeds[1]), 1):
        before = list(session.env.acting)
        record = session.step_without_reset(session.batch(actions))
        yield step, session.env, before, record
        session.track(record)
        if session.tracker.finished.any():
            yield 0, session.env, [], record


@_here("K10")
def agents_come_and_go(context: ParallelContext) -> Findings:
    """Dictionaries have the agents that were there before the step; who ends leaves, and does not come back."""
    ended: set[Any] = set()
    for step, rows, before, _ in _steps(context):
        now, names = list(rows.env.agents), OUTPUTS if step else ("observations", "infos")
        if not step:
            ended, before = set(), now
            if not now:
                yield Finding("reset leaves no agents", "agents", step=0)
        for place, (name, given) in enumerate(zip(names, rows.outputs, strict=True)):
            if not isinstance(given, Mapping):
                yield Finding(f"{name} are a {type(given).__name__}", "a dictionary of agents", step=step)
                return
            wrong = [agent for agent in before if agent not in given]
            # Infos may have other keys, "common" say, but none of an agent that is not there.
            wrong += [key for key in given if key not in before and (place < len(names) - 1 or key in rows.names)]
            if wrong:
                got = f"{name} of {show(list(given))}"
                yield Finding(got, f"of the agents that were there, {before}", step=step)
        if step:
            flags = rows.outputs[2:4]
            ended |= {agent for agent in before if any(flag.get(agent, False) for flag in flags)}
            left = [agent for agent in before if agent not in ended]
            if [agent for agent in left if agent not in now] or ended & set(now):
                yield Finding(f"agents = {now}", f"{left}: those whose flags are False", step=step)
        if set(now) - set(rows.names):
            yield Finding(f"agents = {now}", f"some of possible_agents = {rows.names}", step=step)
        if len(set(now)) < len(now):
            yield Finding(f"agents = {now}", "each agent once", step=step)
    yield from episode_contract(context)


@_here("K11")
def outputs_in_spaces(context: ParallelContext) -> Findings:
    """Each agent's outputs are of the kind declared for it, finite, and the same in every step; so is ``state()``."""
    session: Any = context.session()
    env = session.env.env
    for row, name in enumerate(context.agents):
        for what in ("observation_space", "action_space"):
            if getattr(env, what)(name) is not getattr(env, what)(name):
                yield Finding(f"{what}({name!r}) is another object each time", "the same one", row)
    if context.state_error:
        yield Finding(context.state_error, "a state, or NotImplementedError")
    session.env.close()
    kinds: dict[tuple[str, Any], str] = {}
    for step, rows, _, record in _steps(context):
        for row, name in enumerate(rows.names):
            obs = record.raw["obs"][row]
            if obs is not None:
                found = outside(rows.env.observation_space(name), obs)
                yield from (Finding(f"observation{text}", wanted, row, step) for text, wanted, _ in found)
            for title, given in zip(OUTPUTS[1:4], rows.outputs[1:4] if step else (), strict=False):
                if name not in given:
                    continue
                value, array = given[name], host(given[name])
                wanted = "iuf" if title == "rewards" else "b"
                if array.shape not in ((), (1,)) or array.dtype.kind not in wanted:
                    kind = "one number" if title == "rewards" else "one bool"
                    yield Finding(f"{title} are {kind_of(value)} {show(value)}", kind, row, step)
                elif not np.isfinite(array).all():
                    yield Finding(f"{title} = {show(value)}", "a finite number", row, step)
                kind = kinds.setdefault((title, name), kind_of(value))
                if kind_of(value) != kind:
                    yield Finding(f"{title} are {kind_of(value)}", f"{kind}, as before", row, step)
        space = getattr(rows.env, "state_space", None)
        if space is not None and "state" in record.raw:
            found = outside(space, record.raw["state"])
            yield from (Finding(f"state(){text}", wanted, None, step) for text, wanted, _ in found)


@_here("K14")
def bad_agents_and_actions(context: ParallelContext) -> Findings:
    """A bad action or agent raises TypeError, ValueError, AssertionError, KeyError or a kin, and changes nothing."""
    actions = context.actions(context.seeds[1], 4)
    session = context.session()
    session.reset(context.seeds[1])
    yield from refused_actions(context, actions, list(_bad_dictionaries(session.batch(actions[0]), context)))


def _bad_dictionaries(good: dict[Any, Any], context: ParallelContext) -> Iterator[tuple[str, Any]]:
    first, last = next(iter(good)), next(reversed(good))
    yield "None", None
    yield "a word", "north"
    yield "no actions", {}
    yield f"no action of {last}", {name: action for name, action in good.items() if name != last}
    yield "an action of nobody", {**good, "nobody at all": good[first]}
    for name in dict.fromkeys((first, last)):
        space = context.spaces[context.agents.index(name)]
        yield f"None for {name}", {**good, name: None}
        yield f"a word for {name}", {**good, name: "north"}
        array = np.asarray(good[name])
        yield f"one more axis for {name}", {**good, name: np.stack([array, array])}
        if array.dtype == object or not isinstance(batched := batch_space(space, 1), Box | MultiDiscrete | MultiBinary):
            context.notes.append(f"action space {type(space).__name__} of {name}: values were not tried")
            continue
        values = dict(bad_values(batched, array[None], 0))
        if array.dtype.kind != "f":
            values |= {"0.5": 0.5, "NaN": np.nan}
        for text, value in values.items():
            bad = array.astype(np.float64) if isinstance(value, float) and array.dtype.kind != "f" else array.copy()
            bad.reshape(-1)[0] = value
            yield f"{text} for {name}", {**good, name: bad if bad.ndim else bad[()]}


@_here("K26")
def silent_leavers(context: ParallelContext) -> Findings:
    """Who has left gets nothing, and an action given for it is refused or changes nothing for anybody."""
    session: Any = context.session()
    seed = context.seeds[1]
    if session.rows_per_env == 1:
        raise Inapplicable("there is one agent, and nobody to go on without it")
    base, other = context.actions(seed), context.actions(seed + 500)
    expected, gone = [session.reset(seed)], []
    for step, actions in enumerate(base, 1):
        gone.append([name for name in context.agents if name not in session.env.acting])
        expected.append(session.step(actions))
        rewards, observations = expected[-1].values("rewards"), expected[-1].raw["obs"]
        for row in map(context.agents.index, gone[-1]):
            if observations[row] is not None or rewards[row] != 0:
                text = f"an agent that has left observes {show(observations[row])}, reward {rewards[row]}"
                yield Finding(text, "nothing for it", row, step)
    if not any(gone):
        raise Inapplicable(f"no agent left before the others in {context.steps} steps; more steps may show one")
    session = context.session()
    got = [session.reset(seed)]
    for actions, others, left in zip(base, other, gone, strict=True):
        batch = session.batch(actions)
        try:
            got.append(session.raw_step({**batch, **{name: others[context.agents.index(name)] for name in left}}))
        except context.refusals:
            got.append(session.raw_step(batch))
    yield from differing("with actions of agents that have left", got, expected)
