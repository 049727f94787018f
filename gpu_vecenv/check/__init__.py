"""Conformance checkers: ``check_vector_env`` for Gymnasium's vector envs, ``check_parallel_env`` for PettingZoo's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gymnasium.vector import AutoresetMode

import gpu_vecenv.check.episodes
import gpu_vecenv.check.equivalence
import gpu_vecenv.check.infos
import gpu_vecenv.check.outputs
import gpu_vecenv.check.refusals
import gpu_vecenv.check.rendering
import gpu_vecenv.check.seeds
import gpu_vecenv.check.side_effects
import gpu_vecenv.check.state  # noqa: F401
from gpu_vecenv.check.agents_as_rows import ParallelContext, as_vector_env
from gpu_vecenv.check.context import (
    CHECKS,
    PREFLIGHT,
    Check,
    CheckContext,
    CheckOptions,
    Inapplicable,
    Make,
    error_text,
)
from gpu_vecenv.check.parallel import PARALLEL
from gpu_vecenv.check.records import Finding
from gpu_vecenv.check.report import MAX_FINDINGS, ConformanceError, Failure, Report
from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.errors import ConfigError, nearest
from gpu_vecenv.progress import OnProgress, no_progress

__all__ = ["ConformanceError", "Failure", "Report", "check_parallel_env", "check_vector_env", "chosen_checks"]

# Checks that need no two equal runs; K17 finds out whether global random numbers are the reason for different ones.
MAKER = "a function that makes environments"
OF_VECTOR_ENVS = 'check_vector_env(lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs))'
OF_PARALLEL_ENVS = 'check_parallel_env(lambda: gpu_vecenv.parallel_env("tag_gridworld"))'
ALWAYS = {"K01", "K02", "K03", "K04", "K08", "K10", "K11", "K15", "K17", "K18", "K28"}


def check_vector_env(
    make: Make,
    *,
    checks: Iterable[str] | None = None,
    seed: int = 17,
    steps: int = 300,
    max_steps: int | None = None,
    oracle: Make | None = None,
    modes: Mapping[Any, Make] | None = None,
    variants: Mapping[str, Make] | None = None,
    graph: Make | None = None,
    permutable_agents: Sequence[Sequence[int]] | bool | None = None,
    state_of: Callable[[Any], Any] | None = None,
    on_progress: OnProgress = no_progress,
) -> Report:
    """Check that a vector environment implements its interface: seeding, independence, episodes, values, errors.

    The checks make vector environments of 1, 4, 7, 33 and 257 environments, step them with random valid actions and
    compare their outputs bitwise: NumPy or torch, CPU or CUDA, in any autoreset mode. Actions that
    ``info["action_mask"]`` forbids are replaced by allowed ones.

    An environment may have n rows, one for each agent: then ``num_envs`` is n times the argument of ``make``, and the
    rows of an environment are adjacent. A row may end before its environment: its rewards are then 0 and its flags
    False, until it is flagged again when the environment ends.

    First the interface itself: spaces and outputs must be batched, infos dictionaries, and the autoreset mode known.
    Otherwise the report is this one failure, "K00", and nothing else is run. If two identical runs differ, checks that
    compare runs are skipped. K14 to K16, the wrong calls, run in a process of their own, which they may end. Infos that
    differ between two identical runs, such as wall-clock times, are named in a note of "K00" and not compared.

    K01 to K18 and K27 need only ``make``, K28 infos of ended episodes. The others are skipped unless their argument
    below is given; the report says which.

    Args:
        make: Number of environments -> a new ``gymnasium.vector.VectorEnv``.
        checks: Checks to run, of "K01" … "K28"; None runs all.
        seed: First seed; the following ones are used as well.
        steps: Length of most runs. Violations that occur later are not found.
        max_steps: Step at which episodes are truncated; None takes it from ``env.spec``. If neither is given, limits
            are not checked.
        oracle: Makes a reference vector environment whose outputs must be bitwise equal (K19). Infos that the reference
            does not have are not compared.
        modes: Autoreset mode, a member of Gymnasium's AutoresetMode or "same_step", "next_step", "disabled" -> function
            that makes the environment in that mode; all must give the same transitions (K20).
        variants: Name -> function that makes the environment differently, such as on another device or with another
            output type; all must be bitwise equal (K23).
        graph: Makes environments whose step can be captured as a CUDA graph (K22): outputs are CUDA tensors, and a step
            reads nothing on the host.
        permutable_agents: Groups of rows of an environment that its rules treat equally, ``[[0, 1, 2], [3, 4]]``, or
            True for all rows (K24); None takes ``env.metadata["permutable_agents"]``. Needs writable state.
        state_of: Environment -> the object with its state; None takes ``env.unwrapped``. Its ``state_dict()`` and
            ``load_state_dict(…)`` are used by K21, K24 and K25, and its ``state``, a mapping of writable arrays with
            rows for each environment, by K21 and K24.
        on_progress: Called before each check with the fraction that is done and a text.

    Returns:
        The report. An error raised by the environment is a failure in it.

    Raises:
        ConfigError: An unknown check or mode, or a number out of range.
        TypeError, ValueError: ``make`` is no function, or returns no vector environment, or one of another size.

    Example:
        >>> def make(n):
        ...     return gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=n, output="numpy")
        >>> report = gpu_vecenv.check_vector_env(make, checks=["K01"], steps=10)
        >>> report.passed, report.failures
        (['K01'], [])
    """
    check_kind("make", make, Callable, f"{MAKER}: {OF_VECTOR_ENVS}")
    chosen = chosen_checks(checks, CHECKS)
    _check_numbers(seed, steps, max_steps)
    _check_arguments({"oracle": oracle, "graph": graph, "state_of": state_of}, {"modes": modes, "variants": variants})
    by_mode = None if modes is None else {_mode(mode): own for mode, own in modes.items()}
    options = CheckOptions(oracle, by_mode, variants, graph, permutable_agents, state_of)
    context = CheckContext(make, seed, steps, max_steps, options)
    return _report(context, [CHECKS[name] for name in chosen], on_progress)


def check_parallel_env(
    make: Callable[[], Any],
    *,
    checks: Iterable[str] | None = None,
    seed: int = 17,
    steps: int = 300,
    max_steps: int | None = None,
    oracle: Callable[[], Any] | None = None,
    variants: Mapping[str, Callable[[], Any]] | None = None,
    state_of: Callable[[Any], Any] | None = None,
    on_progress: OnProgress = no_progress,
) -> Report:
    """Check that a PettingZoo ParallelEnv implements its interface, as ``check_vector_env`` does for vector envs.

    Its agents are the rows of one environment, in the order of ``possible_agents``. Checks that compare environments
    are skipped; those of episodes also check ``agents`` and the keys of all dictionaries, those of values each agent's
    own spaces and ``state()``, those of errors missing, unknown and departed agents. Actions that ``"action_mask"`` in
    an agent's observation or info forbids are replaced by allowed ones. KeyError and AttributeError also count as
    refusals: PettingZoo's environments raise them for unknown agents and calls out of order.

    Args:
        make: Takes no argument and returns a new ``pettingzoo.ParallelEnv`` with ``possible_agents``.
        checks: Checks to run, of "K01" … "K28"; None runs all.
        seed: First seed; the following ones are used as well.
        steps: Length of most runs. Violations that occur later are not found.
        max_steps: Step at which episodes are truncated; None leaves limits unchecked.
        oracle: Makes a reference ParallelEnv whose outputs must be bitwise equal (K19).
        variants: Name -> function that makes the environment differently; outputs must be bitwise equal (K23).
        state_of: Environment -> the object with ``state_dict()`` and ``load_state_dict(…)`` (K25); None takes
            ``env.unwrapped``.
        on_progress: Called before each check with the fraction that is done and a text.

    Returns:
        The report. An error raised by the environment is a failure in it.

    Raises:
        ConfigError: An unknown check, or a number out of range.
        TypeError, ValueError: ``make`` is no function, or returns no ParallelEnv, or one without ``possible_agents``.
    """
    check_kind("make", make, Callable, f"{MAKER}: {OF_PARALLEL_ENVS}")
    chosen = chosen_checks(checks, CHECKS)
    _check_numbers(seed, steps, max_steps)
    _check_arguments({"oracle": oracle, "state_of": state_of}, {"variants": variants})
    reference = None if oracle is None else as_vector_env(oracle)
    others = {name: as_vector_env(other) for name, other in (variants or {}).items()}
    options = CheckOptions(oracle=reference, variants=others, state_of=state_of)
    context = ParallelContext(as_vector_env(make), seed, steps, max_steps, options)
    rules = {name: PARALLEL.get(name, CHECKS[name].rule) for name in chosen}
    own = [Check(name, CHECKS[name].title, rule) for name, rule in rules.items()]
    return _report(context, own, on_progress, context.agents)


def chosen_checks(checks: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """The names in ``checks`` in order, or all known ones for None.

    Raises:
        TypeError: ``checks`` is no collection of names.
        ConfigError: A name is not among the known ones.
    """
    if checks is not None and (isinstance(checks, str | bytes | Mapping) or not isinstance(checks, Iterable)):
        raise TypeError(f'checks is {checks!r:.80}; expected names of checks, such as ["K01"], or None')
    known = sorted(known)
    chosen = known if checks is None else list(checks)
    for name in chosen:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"checks: unknown check {name!r:.80}; {nearest(str(name), known)}")
    return sorted(chosen)


def _check_numbers(seed: int, steps: int, max_steps: int | None) -> None:
    for key, value, least in (("seed", seed, 0), ("steps", steps, 10), ("max_steps", max_steps, 1)):
        if (value is not None or key != "max_steps") and (type(value) is not int or value < least):
            raise ConfigError(f"{key} is {value!r:.80}; expected an int >= {least}")


def _check_arguments(functions: Mapping[str, Any], mappings: Mapping[str, Any]) -> None:
    """TypeError unless each argument is None, or a function, or a mapping to functions."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a function or None")
    for name, value in mappings.items():
        if value is not None and not (isinstance(value, Mapping) and all(map(callable, value.values()))):
            raise TypeError(f"{name} is {value!r:.80}; expected a mapping, name -> function, or None")


def _mode(mode: Any) -> AutoresetMode:
    known = {member.name.lower(): member for member in AutoresetMode}
    if isinstance(mode, AutoresetMode):
        return mode
    if mode not in known:
        raise ConfigError(f"modes: unknown autoreset mode {mode!r}; {nearest(str(mode), known)}")
    return known[mode]


def _report(
    context: CheckContext, checks: Sequence[Check], on_progress: OnProgress, agents: Sequence[Any] | None = None
) -> Report:
    report = Report(context.name)
    on_progress(0.0, PREFLIGHT.title)
    _run(PREFLIGHT, context, report)
    if not report.failures:
        report.passed.remove(PREFLIGHT.id)  # listed only if it fails or has a note
        for index, check in enumerate(checks):
            on_progress(index / len(checks), f"{check.id} {check.title}")
            _run(check, context, report)
    on_progress(1.0, f"{len(checks)} checks")
    if agents is not None:
        report.failures = [
            f if f.row is None else replace(f, env_index=None, agent=agents[f.row]) for f in report.failures
        ]
    return report


def _run(check: Check, context: CheckContext, report: Report) -> None:
    context.notes = []
    findings: list[Finding] = []
    try:
        if not context.reproducible and check.id not in ALWAYS:
            raise Inapplicable("two identical runs differ, see K01: nothing can be compared")
        if isinstance(check.rule, str):
            raise Inapplicable(check.rule)
        for finding in islice(check.rule(context), MAX_FINDINGS):
            findings.append(finding)
    except Inapplicable as reason:
        if not findings:
            report.skipped[check.id] = str(reason)
    except Exception as error:  # any error of the environment
        earlier = next((f.check for f in report.failures if f.got == error_text(error)), None)
        if earlier is None or findings:
            findings.append(Finding(error_text(error), "no error"))
        else:
            report.skipped[check.id] = f"stopped by the error of {earlier}: {error_text(error)}"
    try:
        context.close()
    except Exception as error:
        findings.append(Finding(f"close: {error_text(error)}", "no error"))
    for finding in findings:
        env_index = None if finding.row is None else finding.row // context.rows_per_env
        report.failures.append(
            Failure(check.id, check.title, finding.got, finding.expected, env_index, finding.row, finding.step)
        )
    if not findings and check.id not in report.skipped:
        report.passed.append(check.id)
    if context.notes:
        report.notes[check.id] = context.notes
