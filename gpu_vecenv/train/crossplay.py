"""Cross-play: episodes of each pairing of several runs' policies, as a matrix of mean returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int, validate_seed
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.train.evaluation import Evaluator, RolePolicies, RolePolicy
from gpu_vecenv.train.exploitability import standard_error
from gpu_vecenv.train.fixed_policy import RANDOM, FixedPolicy
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.role_view import agents_of, check_names, sides_of_game

# Policies of all or some agents, or None for random actions of all.
Entry: TypeAlias = GamePolicy | Mapping[str, RolePolicy] | None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Mean returns of a role or a side, over episodes and its agents: [row][column].

    Attributes:
        mean: The means.
        standard_error: Of each, over episodes.
    """

    mean: list[list[float]]
    standard_error: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class SelfAndCrossPlay:
    """Mean returns of a role or a side where one entry is on both sides, and where they are of different runs.

    Standard errors are over runs, by the jackknife, which leaves out all entries of a run at a time: they have the
    randomness of training in them. None: with less than three runs there are none.

    Attributes:
        runs: Of the entries that play on both sides, see ``runs`` of ``crossplay``.
        self_play: Mean of the diagonal.
        self_play_standard_error: Of that mean.
        cross_play: Mean of the pairings of different runs.
        cross_play_standard_error: Of that mean.
        gap: ``self_play`` - ``cross_play``.
        gap_standard_error: Of that difference.
    """

    runs: int
    self_play: float
    self_play_standard_error: float | None
    cross_play: float
    cross_play_standard_error: float | None
    gap: float
    gap_standard_error: float | None


@dataclass(frozen=True, kw_only=True)
class CrossPlay:
    """What ``crossplay`` found.

    Attributes:
        rows: Names of what played the agents of ``sides[0]``.
        columns: Names of what played the agents of ``sides[1]``.
        sides: The two groups of agents, names of roles or agents joined by "+".
        returns: Role -> its mean returns. Where agents of one role are on both sides, also each of ``sides`` -> the
            mean returns of its agents, row's and column's. In a zero-sum game of one role the role's own mean is 0.
        self_and_cross_play: The same names -> means of the diagonal and of pairings of different runs, over entries
            that are rows and columns, without random and still ones; empty if those are of less than two runs.
        episodes: Of each pairing.
        returns_of_sides: Of the agents of each side, means over them in each episode, (rows, columns, episodes)
            float64. Episodes of all pairings have the same random numbers.
    """

    rows: list[str]
    columns: list[str]
    sides: tuple[str, str]
    returns: dict[str, Matrix]
    self_and_cross_play: dict[str, SelfAndCrossPlay]
    episodes: int
    returns_of_sides: tuple[torch.Tensor, torch.Tensor]

    def as_dict(self) -> dict[str, Any]:
        """All but ``returns_of_sides``, for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "returns_of_sides"}
        for name in ("returns", "self_and_cross_play"):
            found[name] = {key: asdict(value) for key, value in found[name].items()}
        return {**found, "sides": list(self.sides)}


def crossplay(
    env: VecEnv,
    policies: Mapping[str, Entry],
    *,
    roles: Sequence[str] = (),
    runs: Mapping[str, str] | None = None,
    episodes: int = 1000,
    greedy: bool = False,
    seed: int = 1,
    on_progress: OnProgress = no_progress,
) -> CrossPlay:
    """Play episodes of each pairing: some agents by the policies of one run, all others by those of another.

    Args:
        env: The game; at most as many environments play. It is not stepped.
        policies: Name -> policies of a run; or role or agent -> its actor, as for ``evaluate``; or None for random
            actions. Those with actors for all ``roles`` are rows, those with actors for all other agents columns.
        roles: Roles or agents that the row plays. Empty: the first role, or the first agent of a game with one role.
        runs: Name in ``policies`` -> any name of the run that it is of. Entries of one run, such as members of
            populations that trained together, are not independent: ``self_and_cross_play`` leaves their pairings out
            of cross-play, and its standard errors are over runs. Those without one are each of a run of their own.
        episodes: Of each pairing, at least 2; all have the same random numbers.
        greedy: Policies take the most likely action instead of sampling.
        seed: Seed of the environments and of the actions.
        on_progress: Called with the fraction that is done and a text.

    Raises:
        TypeError: An argument has the wrong type.
        ConfigError: There is nothing for a row or a column, policies are of another game or device, do not fit its
            agents or lack a function that a checkpoint does not have, ``runs`` has an unknown name, or ``roles`` has an
            unknown name, one twice, or all agents.
        ValueError, NonFiniteError, EnvContractError: As for ``evaluate``.
    """
    check_kind("env", env, VecEnv, "a VecEnv (of a view: view.vec_env)")
    check_kind("policies", policies, Mapping, "a mapping, name -> a GamePolicy, a mapping of actors, or None")
    check_kind("on_progress", on_progress, Callable, "a function of a fraction and a text")
    check_kind("runs", runs, Mapping, "a mapping, name in policies -> name of its run", optional=True)
    run_of = dict(runs or {})
    for name, run in run_of.items():
        check_kind(f"runs[{name!r}]", run, str, "the name of a run")
    if unknown := [name for name in run_of if name not in policies]:
        raise ConfigError(f"runs has {unknown[0]!r}; expected some of {list(policies)}, the names in policies")
    check_flag("greedy", greedy)
    episodes = validate_int("episodes", episodes, 2)
    validate_seed(seed)
    game = env.game
    sides = sides_of(game, roles)
    first, second = rows_and_columns(env, policies, roles)
    pairs = [(row, column) for row in first for column in second]
    for row, column in pairs:
        RolePolicies(env, {**first[row], **second[column]}, greedy)  # raises before any is played
    rounds = -(-episodes // env.num_envs)
    played = list[dict[str, torch.Tensor]]()
    with contextlib.closing(Evaluator(env, -(-episodes // rounds))) as evaluator:
        for index, (row, column) in enumerate(pairs):
            progress = part(on_progress, index, len(pairs), f"{row} and {column}")
            own = {**first[row], **second[column]}
            metrics = evaluator.of_each_episode(own, episodes, greedy=greedy, seed=seed, on_progress=progress)
            kept = {f"return_{role}": metrics[f"return_{role}"] for role in game.layout.present_roles}
            for number, names in enumerate((first[row], second[column])):
                kept[f"side_{number}"] = _mean_over_agents(game, metrics, list(names))
            played.append(kept)

    def cells(name: str) -> torch.Tensor:
        return torch.stack([metrics[name].cpu() for metrics in played]).view(len(first), len(second), episodes)

    side_names, of_sides = ("+".join(sides[0]), "+".join(sides[1])), (cells("side_0"), cells("side_1"))
    returns = {role: _matrix(cells(f"return_{role}")) for role in game.layout.present_roles}
    if shared_roles(game, sides):
        returns |= {name: _matrix(returns_of_side) for name, returns_of_side in zip(side_names, of_sides, strict=True)}
    both = [name for name in first if name in second and not all(map(_is_word, (first[name] | second[name]).values()))]
    where = [[list(names).index(name) for name in both] for names in (first, second)]
    own_runs = [(run_of[name], None) if name in run_of else (None, name) for name in both]
    return CrossPlay(
        rows=list(first),
        columns=list(second),
        sides=side_names,
        returns=returns,
        self_and_cross_play={
            name: self_and_cross_play(torch.tensor(matrix.mean, dtype=torch.float64)[where[0]][:, where[1]], own_runs)
            for name, matrix in returns.items()
            if len(set(own_runs)) > 1
        },
        episodes=episodes,
        returns_of_sides=of_sides,
    )


def sides_of(game: Env, roles: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the agents of a row, and of all others, which a column plays; see ``crossplay``."""
    layout = game.layout
    check_names(game, roles)
    present = list(layout.present_roles)
    own = tuple(roles) or sides_of_game(game)[:1]
    taken = set(agents_of(game, own))
    others = list[str]()
    for role in present:
        of_role = agents_of(game, [role])
        left = [layout.agent_names[agent] for agent in of_role if agent not in taken]
        others += [role] if len(left) == len(of_role) else left
    if not taken or not others:
        raise ConfigError(
            f"roles is {list(own)}, which leaves agents for one side alone; expected some of {present}, or of "
            f"their agents, such as {layout.agent_names[0]!r}, and others that are left"
        )
    return own, tuple(others)


def shared_roles(game: Env, sides: tuple[Sequence[str], Sequence[str]]) -> set[str]:
    """The roles that have agents on both sides."""
    row, column = ({game.layout.agent_roles[agent] for agent in agents_of(game, side)} for side in sides)
    return row & column


def actors_of_side(game: Env, actors: Mapping[str, RolePolicy], names: Sequence[str]) -> dict[str, RolePolicy] | None:
    """Actors of the agents that ``names`` stand for, and of no others; None if some have none."""
    wanted, found = set(agents_of(game, names)), dict[str, RolePolicy]()
    for name, actor in actors.items():
        own = agents_of(game, name.split("+"))
        if wanted.issuperset(own):
            found[name] = actor
        else:
            found |= {game.layout.agent_names[agent]: actor for agent in own if agent in wanted}
    covered = [agent for name in found for agent in agents_of(game, name.split("+"))]
    return found if set(covered) == wanted else None


def rows_and_columns(
    env: VecEnv, policies: Mapping[str, Entry], roles: Sequence[str] = ()
) -> tuple[dict[str, dict[str, RolePolicy]], dict[str, dict[str, RolePolicy]]]:
    """Name -> actors of the row's side, and of the column's, of the entries that have all of them.

    Arguments as of ``crossplay``.

    Raises:
        TypeError: ``policies`` has something else.
        ConfigError: There is nothing for a row or a column, an entry is neither, is of another game or device or has an
            unknown name, or its checkpoint lacks a function that played one of its sides in training.
    """
    game, sides = env.game, sides_of(env.game, roles)
    actors = {name: _actors(env, name, entry) for name, entry in policies.items()}
    first, second = (
        {name: own for name, all_own in actors.items() if (own := actors_of_side(game, all_own, side)) is not None}
        for side in sides
    )
    if unused := [name for name in actors if name not in first and name not in second]:
        raise ConfigError(
            f"policies[{unused[0]!r}] has actors for neither side; expected all of {sides[0]} or {sides[1]}"
        )
    for side, found in zip(sides, (first, second), strict=True):
        if not found:
            raise ConfigError(f"policies has none for all of {side}; expected at least one, such as None")
        for name, own in found.items():
            _check_known(name, own, actors[name])
    return first, second


def _check_known(name: str, own: Mapping[str, RolePolicy], actors: Mapping[str, RolePolicy]) -> None:
    """Raise ConfigError if those of an entry's actors that play a side have a function that a checkpoint lacks."""
    lacking = [of for of, actor in own.items() if isinstance(actor, FixedPolicy) and not actor.can_act]
    if not lacking:
        return
    others = "+".join(of for of, actor in actors.items() if not isinstance(actor, FixedPolicy) or actor.can_act)
    alone = f"{others} of the run alone, which is {others}={name} on the command line, and " if others else ""
    raise ConfigError(
        f"policies[{name!r}]: {lacking[0]} was played by a function in training, which the checkpoint does not have; "
        f"expected {alone}what plays {lacking[0]} now as an entry of its own, such as {lacking[0]}=file.py:function "
        f"or {lacking[0]}={RANDOM}"
    )


def self_and_cross_play(means: torch.Tensor, run_of: Sequence[Hashable]) -> SelfAndCrossPlay:
    """Of entries that play on both sides.

    Args:
        means: Mean returns, (entries, entries).
        run_of: The run of each entry; there are at least two.
    """
    names = list(dict.fromkeys(run_of))
    numbers, runs = torch.tensor([names.index(run) for run in run_of]), len(names)
    different = numbers[:, None] != numbers

    def estimates(kept: torch.Tensor) -> torch.Tensor:
        own = means[kept][:, kept]
        diagonal, cross = own.diagonal().mean(), own[different[kept][:, kept]].mean()
        return torch.stack([diagonal, cross, diagonal - cross])

    whole, errors = estimates(numbers >= 0).tolist(), [None, None, None]
    if runs > 2:
        left = torch.stack([estimates(numbers != out) for out in range(runs)])
        errors = ((left - left.mean(0)).square().sum(0) * (runs - 1) / runs).sqrt().tolist()
    return SelfAndCrossPlay(
        runs=runs,
        self_play=whole[0],
        self_play_standard_error=errors[0],
        cross_play=whole[1],
        cross_play_standard_error=errors[1],
        gap=whole[2],
        gap_standard_error=errors[2],
    )


def check_ratings() -> None:
    """Raise ConfigError unless ratings can be computed."""
    try:
        import openskill.models  # noqa: F401
    except ImportError:
        raise ConfigError('ratings need openskill: pip install "gpu_vecenv[ratings]"') from None


def ratings(found: CrossPlay) -> dict[str, dict[str, tuple[float, float]]]:
    """Ratings of rows and of columns by openskill: side -> name -> mean and standard deviation of its skill.

    On each side the entries compete with each other: an episode against one opponent is a match, in which they are
    ranked by their returns (Plackett-Luce model; Weng and Lin, "A Bayesian approximation method for online ranking",
    2011). A side with one entry has none. A rating is one number: where A beats B, B beats C and C beats A, it hides
    what the matrix shows.

    Raises:
        ConfigError: openskill is not installed.
    """
    check_ratings()
    from openskill.models import PlackettLuce

    model = PlackettLuce(tau=0.0)  # policies do not change between matches: standard deviations only fall
    sides = dict[str, dict[str, tuple[float, float]]]()
    of_rows, of_columns = found.returns_of_sides
    for side, names, returns in (
        (found.sides[0], found.rows, of_rows.permute(2, 1, 0)),  # (episodes, opponents, entries)
        (found.sides[1], found.columns, of_columns.permute(2, 0, 1)),
    ):
        players = [model.rating() for _ in names]
        for match in returns.flatten(0, 1).tolist() if len(names) > 1 else ():
            order = sorted(set(match), reverse=True)
            ranks = [float(order.index(value)) for value in match]
            players = [player for (player,) in model.rate([[player] for player in players], ranks=ranks)]
        rated = zip(names, players, strict=True) if len(names) > 1 else ()
        sides[side] = {name: (player.mu, player.sigma) for name, player in rated}
    return sides


def _actors(env: VecEnv, name: str, entry: Entry) -> Mapping[str, RolePolicy]:
    check_kind("a name in policies", name, str, "a name for a row and a column")
    if entry is None:
        return dict.fromkeys(env.game.layout.present_roles)
    if isinstance(entry, GamePolicy):
        if entry.game.name() != env.game.name() or entry.device != env.device:
            raise ConfigError(
                f"policies[{name!r}] is of {entry.game.name()} on {entry.device}; expected {env.game.name()} on "
                f"{env.device}, as env"
            )
        return entry.policies
    check_kind(f"policies[{name!r}]", entry, Mapping, "a GamePolicy, a mapping of actors, or None")
    for key in entry:
        check_kind(f"a name in policies[{name!r}]", key, str, f"one of {list(env.game.layout.roles)}, or an agent")
    agents_of(env.game, [part for key in entry for part in key.split("+")])  # raises for unknown ones
    return entry


def _is_word(actor: RolePolicy) -> bool:
    """Whether it is "random" or "still", which no run has learned."""
    return actor is None or isinstance(actor, str)


def _mean_over_agents(game: Env, metrics: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    """Of each episode, of the agents of these actors."""
    counts = {name: len(agents_of(game, name.split("+"))) for name in names}
    total = torch.stack([metrics[f"return_{name}"] * count for name, count in counts.items()]).sum(0)
    return total / sum(counts.values())


def _matrix(returns: torch.Tensor) -> Matrix:
    errors = [[standard_error(episodes) for episodes in row] for row in returns]
    return Matrix(mean=returns.mean(-1).tolist(), standard_error=errors)
