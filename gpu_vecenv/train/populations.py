"""Populations: several members of a policy in one run, each in its share of the environments.

Shapes: E environments; populations of K1, K2, … members divide them into a grid of K1 x K2 x … cells, contiguous ranges
of equal size. A cell has a member of each population, so that every combination of members plays at all times, and a
member has the environments of all cells in its row of the grid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.algorithms import algorithm_of
from gpu_vecenv.train.env_ranges import EnvRanges
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig

MEMBER_METRIC = re.compile(r"(.+)_p\d+")  # return_runner_p2 is one of return_runner, see ``member_name``


class Member(NamedTuple):
    """A policy of a trainer: the only one of its agents, or one of a population."""

    policy: str  # role, agent, or several joined by "+"
    number: int
    envs: EnvRanges


def populations_of(specs: Mapping[str, PolicySpec]) -> dict[str, int]:
    """Policy -> number of members, of those with several."""
    return {name: spec.population for name, spec in specs.items() if spec.population > 1}


def num_cells(specs: Mapping[str, PolicySpec]) -> int:
    """Combinations of members, each of which has a share of the environments."""
    return math.prod(spec.population for spec in specs.values())


def member_name(policy: str, number: int, population: int) -> str:
    """The name of a member in a trainer: "tagger", or "tagger_p0" in a population."""
    return policy if population == 1 else f"{policy}_p{number}"


def members_of_metric(metric: str, names: Iterable[str]) -> list[str]:
    """Of the names of metrics those of single members of the population that ``metric`` is of."""
    return [name for name in names if (match := MEMBER_METRIC.fullmatch(name)) and match[1] == metric]


def without_members(metrics: Iterable[str]) -> list[str]:
    """The names of metrics without those of single members of populations."""
    known = dict.fromkeys(metrics)
    return [name for name in known if not ((match := MEMBER_METRIC.fullmatch(name)) and match[1] in known)]


def members_of(specs: Mapping[str, PolicySpec], num_envs: int) -> dict[str, Member]:
    """Name -> member, of all policies, with the environments of each.

    Raises:
        ConfigError: The environments cannot be divided into equal cells, or a member has the name of another policy.
    """
    populations = populations_of(specs)
    cells = num_cells(specs)
    if num_envs % cells:
        sizes = " x ".join(map(str, populations.values()))
        raise ConfigError(
            f"num_envs is {num_envs}; expected a multiple of {sizes} = {cells}: the populations of "
            f"{', '.join(populations)} play in equal shares of the environments"
        )
    found, before = dict[str, Member](), 1
    for policy, spec in specs.items():
        count = spec.population
        before *= count
        size = num_envs // before
        for number in range(count):
            name = member_name(policy, number, count)
            if name in found or (count > 1 and name in specs):
                raise ConfigError(f"{name} is a member of the population of {policy} and a policy; rename the role")
            firsts = tuple(range(number * size, num_envs, count * size)) if count > 1 else (0,)
            found[name] = Member(policy, number, EnvRanges(firsts, size if count > 1 else num_envs))
    return found


def check_populations(
    specs: Mapping[str, PolicySpec], config: LearnerConfig, *, has_opponents: bool, num_processes: int
) -> None:
    """Raise ConfigError where populations meet what they do not support.

    Args:
        specs: Of the policies.
        config: Of those without one.
        has_opponents: Whether opponents play in some of the environments.
        num_processes: That train together.
    """
    populations = populations_of(specs)
    if not populations:
        return
    what = ", ".join(f"{name} has a population of {count}" for name, count in populations.items())
    if has_opponents:
        raise ConfigError(f"{what}, and opponents are given; expected populations or opponents, not both")
    if num_processes > 1:
        raise ConfigError(f"{what} with {num_processes} processes; expected one process")
    for name in populations:
        own = specs[name].config or config
        if not isinstance(own, PPOConfig):
            algorithm = algorithm_of(own).config.__name__
            raise ConfigError(f"{what} with a {algorithm}; expected a PPOConfig, as populations are of PPO")


def check_member(populations: Mapping[str, int], number: int) -> None:
    """Raise TypeError or ConfigError unless a population has a member of this number, or there are none and it is 0."""
    check_kind("member", number, int, "the number of a member of each population")
    most = max(populations.values(), default=1)
    if not 0 <= number < most:
        sizes = (
            ", ".join(f"{policy} has {count}" for policy, count in populations.items()) or "there are no populations"
        )
        raise ConfigError(f"member is {number}; expected 0 to {most - 1}: {sizes}")


def stored_populations(manifest: Mapping[str, Any], source: str) -> dict[str, int]:
    """Policy -> number of members, of the populations in a checkpoint.

    Raises:
        CheckpointCorruptError: They are no such dictionary.
    """
    found = manifest.get("populations") or {}
    if not isinstance(found, dict) or not all(type(count) is int and 1 < count < 10**6 for count in found.values()):
        raise CheckpointCorruptError(f"{source}: populations is {found!r:.80}; expected policies and their members")
    return found


def stored_members(populations: Mapping[str, int], names: Iterable[str], source: str) -> dict[str, list[str]]:
    """Policy -> names of its members in a checkpoint that has policies of these ``names``.

    Raises:
        CheckpointCorruptError: It lacks one.
    """
    names, found = list(names), dict[str, list[str]]()
    members = {policy: [member_name(policy, k, count) for k in range(count)] for policy, count in populations.items()}
    policies = {name: policy for policy, own in members.items() for name in own}
    if missing := policies.keys() - set(names):
        raise CheckpointCorruptError(f"{source} has populations {dict(populations)}, but lacks {min(missing)}")
    for name in names:
        policy = policies.get(name, name)
        found.setdefault(policy, members.get(policy, [name]))
    return found
