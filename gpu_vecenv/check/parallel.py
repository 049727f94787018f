"""The checks that differ for a PettingZoo ParallelEnv."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import batch_space

from gpu_vecenv.check.agents_as_rows import OUTPUTS, AgentsAsEnvs, ParallelContext
from gpu_vecenv.check.context import Findings, Inapplicable, differing
from gpu_vecenv.check.episodes import SEVERAL, episode_contract
from gpu_vecenv.check.isolation import isolated
from gpu_vecenv.check.outputs import kind_of, outside
from gpu_vecenv.check.records import Finding, Record, canonical, host, show
from gpu_vecenv.check.refusals import bad_values, refused_actions

ONE = "a ParallelEnv is one environment: there are no others to compare it with"
PARALLEL: dict[str, Callable[[Any], Findings] | str] = {
    **dict.fromkeys(("K03", "K04", "K05", "K06"), ONE),
    "K09": "a ParallelEnv is one environment: it has no masked reset",
    "K20": "a ParallelEnv has no autoreset modes",
    "K21": "a ParallelEnv has no interface to its state; check the vector environment",
    "K22": "a step of a ParallelEnv returns Python numbers, which a CUDA graph cannot",
    "K28": "infos of a ParallelEnv have no statistics and no final_info",
    "K24": "a ParallelEnv has no interface to its state; check the vector environment",
}


def _override(name: str) -> Callable[[Callable[[Any], Findings]], Callable[[Any], Findings]]:
    def enter(rule: Callable[[Any], Findings]) -> Callable[[Any], Findings]:
        PARALLEL[name] = rule
        return rule

    return enter


def _steps(context: ParallelContext) -> Iterator[tuple[int, AgentsAsEnvs, list[Any], Record]]:
    """Yields (step, environment, agents before the step, record) over consecutive episodes."""
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


@_override("K10")
def agents_come_and_go(context: ParallelContext) -> Findings:
    """Dictionaries contain the agents before the step; an agent that ends leaves and does not return."""
    ended: set[Any] = set()
    for step, rows, before, _ in _steps(context):
        yield from _counts(rows, step)
        now, names = list(rows.env.agents), OUTPUTS if step else ("observations", "infos")
        if not step:
            ended, before = set(), now
            if not now:
                yield Finding("agents is empty after reset", "some of possible_agents", step=0)
        for index, (name, given) in enumerate(zip(names, rows.outputs, strict=True)):
            if not isinstance(given, Mapping):
                yield Finding(f"{name} are a {type(given).__name__}", "a dictionary of agents", step=step)
                return
            wrong = [agent for agent in before if agent not in given]
            # Infos may have other keys, such as "common", but none of an absent agent.
            wrong += [key for key in given if key not in before and (index < len(names) - 1 or key in rows.names)]
            if wrong:
                got = f"{name} of {show(list(given))}"
                yield Finding(got, f"the agents before the step, {before}", step=step)
        yield from _orders(names, rows.outputs, step)
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
    yield from _lagging_state(context)
    yield from episode_contract(context)


def _orders(names: Sequence[str], outputs: Sequence[Mapping[Any, Any]], step: int) -> Findings:
    """The dictionaries of one step list their agents in one order, so that their ``values()`` belong together."""
    first = list(outputs[0])
    for name, given in zip(names[1:], outputs[1:], strict=True):
        order = [agent for agent in given if agent in outputs[0]]
        if order != [agent for agent in first if agent in given]:
            yield Finding(f"{name} of {show(order)}", f"the order of the observations, {show(first)}", step=step)


def _lagging_state(context: ParallelContext) -> Findings:
    """``state()`` of the step before: at no first step does it change, though observations do and it does later on."""
    if not context.has_state:
        return
    first, others, previous, begins = list[bool](), list[bool](), (b"", b""), False
    for step, rows, before, _ in _steps(context):
        if rows.env.agents:  # there may be no state without agents
            seen = {agent: value for agent, value in rows.outputs[0].items() if agent in (before or rows.env.agents)}
            now = canonical(rows.env.state()), canonical(seen)
            if step and (not begins or now[1] != previous[1]):
                (first if begins else others).append(now[0] != previous[0])
            previous = now
        begins = not step
    if len(first) >= SEVERAL and not any(first) and 10 * sum(others) > 9 * len(others):
        got = f"state() after all {len(first)} first steps of episodes is that of the reset"
        yield Finding(got, "another one, as the observations are others")


def _counts(rows: AgentsAsEnvs, step: int) -> Findings:
    env = rows.env
    if list(env.possible_agents) != rows.names:
        yield Finding(f"possible_agents has become {env.possible_agents}", f"{rows.names}, as before", step=step)
    for name, wanted in (("num_agents", len(env.agents)), ("max_num_agents", len(rows.names))):
        if getattr(env, name) != wanted:
            yield Finding(f"{name} is {getattr(env, name)}", f"{wanted}, as in agents {env.agents}", step=step)


@_override("K11")
def outputs_in_spaces(context: ParallelContext) -> Findings:
    """Each agent's outputs are of the declared type, finite, and constant over steps; so is ``state()``."""
    session: Any = context.session()
    env = session.env.env
    for row, name in enumerate(context.agents):
        for what in ("observation_space", "action_space"):
            if getattr(env, what)(name) is not getattr(env, what)(name):
                yield Finding(f"{what}({name!r}) returns another object each time", "the same object", row)
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


@_override("K14")
@isolated
def bad_agents_and_actions(context: ParallelContext) -> Findings:
    """A bad action or agent raises one of ``context.refusals`` and changes nothing."""
    actions = context.actions(context.seeds[1], 4)
    session: Any = context.session()
    session.reset(context.seeds[1])
    _, infos = session.env.outputs
    good = session.batch(actions[0])
    acting = [name for name in good if infos.get(name, {}).get("acting", True)]
    yield from refused_actions(context, actions, list(_bad_dictionaries(good, acting or list(good), context)))
    yield from _other_orders(context)


def _other_orders(context: ParallelContext) -> Findings:
    """Steps with the same actions in another order, or as Python's numbers, unless that is refused."""
    seed = context.seeds[1]
    actions = context.actions(seed)
    expected = context.session().run(actions, seed)
    others: dict[str, Callable[[dict[Any, Any]], dict[Any, Any]]] = {
        "in another order": lambda batch: dict(reversed(batch.items())),
        "as Python's numbers": lambda batch: {
            name: action.item() if isinstance(action, np.integer) else action for name, action in batch.items()
        },
    }
    for name, changed in others.items():
        if not context.attempts(f"steps with actions {name}"):
            continue
        session: Any = context.session()
        got = [session.reset(seed)]
        for step in actions:
            batch = session.batch(step)
            try:
                got.append(session.raw_step(changed(batch)))
            except context.refusals:
                got.append(session.raw_step(batch))
        yield from differing(f"with actions {name}", got, expected)


def _bad_dictionaries(
    good: dict[Any, Any], acting: Sequence[Any], context: ParallelContext
) -> Iterator[tuple[str, Any]]:
    """``acting``: agents whose action is not ignored."""
    first, last = acting[0], acting[-1]
    yield "None", None
    yield "a string", "north"
    yield "no actions", {}
    yield f"no action of {last}", {name: action for name, action in good.items() if name != last}
    yield "an action of an unknown agent", {**good, "no such agent": good[first]}
    for name in dict.fromkeys((first, last)):
        space = context.spaces[context.agents.index(name)]
        yield f"None for {name}", {**good, name: None}
        yield f"a string for {name}", {**good, name: "north"}
        array = np.asarray(good[name])
        yield f"an additional axis for {name}", {**good, name: np.stack([array, array])}
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


@_override("K26")
def agents_that_left(context: ParallelContext) -> Findings:
    """Agents that left get no outputs; an action for one is refused or changes nothing."""
    session: Any = context.session()
    seed = context.seeds[1]
    if session.rows_per_env == 1:
        raise Inapplicable("there is only one agent")
    base, other = context.actions(seed), context.actions(seed + 500)
    expected, gone = [session.reset(seed)], []
    for step, actions in enumerate(base, 1):
        gone.append([name for name in context.agents if name not in session.env.acting])
        expected.append(session.step(actions))
        rewards, observations = expected[-1].values("rewards"), expected[-1].raw["obs"]
        for row in map(context.agents.index, gone[-1]):
            if observations[row] is not None or rewards[row] != 0:
                text = f"an agent that has left observes {show(observations[row])}, reward {rewards[row]}"
                yield Finding(text, "no outputs for it", row, step)
    if not any(gone):
        raise Inapplicable(f"no agent left before the others in {context.steps} steps; try more steps")
    session = context.session()
    got = [session.reset(seed)]
    for actions, others, left in zip(base, other, gone, strict=True):
        batch = session.batch(actions)
        try:
            got.append(session.raw_step({**batch, **{name: others[context.agents.index(name)] for name in left}}))
        except context.refusals:
            got.append(session.raw_step(batch))
    yield from differing("with actions of agents that have left", got, expected)
