"""Evaluations at the end of training, of each trained role against fixed opponents, and their tables."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rich.console import Group
from rich.text import Text

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import counted
from gpu_vecenv.escapes import printable
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.tables import FittedTable
from gpu_vecenv.train.evaluation import Evaluator, RolePolicy
from gpu_vecenv.train.evaluation_curves import ALL_RANDOM
from gpu_vecenv.train.evaluation_sizes import num_envs_for
from gpu_vecenv.train.fixed_opponents import FixedOpponents
from gpu_vecenv.train.role_view import agents_of, sides_with_returns
from gpu_vecenv.train.seed_statistics import bootstrap_interval
from gpu_vecenv.train.trainer import Trainer

ALL_TRAINED = "all trained"
SOME_TRAINED = "trained with "  # begins the name where agents are frozen, which follow
MOST_NAMES = 4  # of frozen roles and agents
SEED_STATISTICS = {"IQM": "interquartile_mean", "IQM, low": "interval_low", "IQM, high": "interval_high"}
Results: TypeAlias = Mapping[str, Mapping[str, float]]  # pairing -> what ``evaluate`` returns


def pairings_of(trainer: Trainer, opponents: FixedOpponents) -> dict[str, Mapping[str, RolePolicy]]:
    """Name -> actors: all roles random, each match against a fixed opponent, and all roles as they act in training."""
    pairings: dict[str, Mapping[str, RolePolicy]] = {
        ALL_RANDOM: trainer.role_policies(list(trainer.env.game.layout.roles))
    }
    pairings |= {match.name: opponents.role_policies(match) for match in opponents.matches if opponents.replaces(match)}
    pairings[name_as_in_training(trainer)] = trainer.role_policies()
    return pairings


def name_as_in_training(trainer: Trainer) -> str:
    """Names the pairing of a trainer's policies as they are: "all trained", or as "trained with runner frozen"."""
    game, frozen = trainer.env.game, list[str]()
    learning = {agent for learner in trainer.learners.values() for agent in learner.policy.view.agent_numbers}
    for role in game.layout.present_roles:
        own = agents_of(game, [role])
        names = [game.layout.agent_names[agent] for agent in own if agent not in learning]
        frozen += [role] if len(names) == len(own) else names
    if not frozen:
        return ALL_TRAINED
    more = f" and {len(frozen) - MOST_NAMES} more" if len(frozen) > MOST_NAMES else ""
    return f"{SOME_TRAINED}{'+'.join(frozen[:MOST_NAMES])}{more} frozen"


def results_as_in_training(results: Results) -> Mapping[str, float]:
    """What ``evaluate`` returned of that pairing; empty where it was not played."""
    found = (result for name, result in results.items() if name == ALL_TRAINED or name.startswith(SOME_TRAINED))
    return next(found, {})


def evaluations(
    trainer: Trainer,
    pairings: Mapping[str, Mapping[str, RolePolicy]],
    episodes: int,
    on_progress: OnProgress = no_progress,
) -> dict[str, dict[str, float]]:
    """What ``evaluate`` returns of each pairing; all are played in one copy of the trainer's environment."""
    with contextlib.closing(Evaluator(trainer.env, num_envs_for(trainer.env, episodes))) as evaluator:
        return {
            name: evaluator(actors, episodes, on_progress=part(on_progress, index, len(pairings), name))
            for index, (name, actors) in enumerate(pairings.items())
        }


def evaluation_table(game: Env, results: Results, note: str = "") -> Group:
    """Results of ``evaluate`` as a table, a row each; ``note`` follows the number of episodes in its title."""
    table = _table(game)
    for name, metrics in results.items():
        table.add_row(name, *_cells(game, metrics))
    return Group(_title(game, results, note), table)


def table_of_agents(game: Env, metrics: Mapping[str, float]) -> FittedTable | None:
    """The returns of agents, of what ``evaluate`` returns, that ``evaluation_table`` lacks; None: there are none."""
    shown, start = {*game.layout.roles, *sides_with_returns(game)}, "return_"
    names = [key.removeprefix(start) for key in metrics if key.startswith(start)]
    table = FittedTable("agents", "mean", "worst")
    for name in (others := [name for name in names if name not in shown]):
        table.add_row(name, f"{metrics[f'return_{name}']:.2f}", f"{metrics[f'worst_return_{name}']:.2f}")
    return table if others else None


def summary_of_seeds(game: Env, results: Sequence[Results]) -> dict[str, dict[str, dict[str, float]]]:
    """Pairing -> statistic -> metric -> value, over runs that differ in the seed.

    "mean" is of all metrics; "worst", the lowest, "interquartile_mean" and the bounds of its 95 % interval, see
    ``bootstrap_interval``, "interval_low" and "interval_high", are of returns. Those of numbers that are not finite are
    left out.
    """
    summary = {}
    for name, first in results[0].items():
        of_all = {metric: [result[name][metric] for result in results] for metric in first}
        lowest = _names_of_returns(game)
        returns = [f"return_{name}" for name in sides_with_returns(game)]
        intervals = {
            metric: bootstrap_interval(of_all[metric]) for metric in returns if all(map(math.isfinite, of_all[metric]))
        }
        summary[name] = {
            "mean": {metric: statistics.fmean(values) for metric, values in of_all.items()},
            "worst": {metric: min(of_all[metric]) for metric in lowest},
            "interquartile_mean": {metric: interval.value for metric, interval in intervals.items()},
            "interval_low": {metric: interval.low for metric, interval in intervals.items()},
            "interval_high": {metric: interval.high for metric, interval in intervals.items()},
        }
    return summary


def seeds_table(game: Env, results: Mapping[int, Results], note: str = "") -> Group:
    """Results by seed below each pairing, with mean, worst and interquartile mean with its 95 % interval.

    Where all roles act randomly, all seeds are the same: a row for all.
    """
    table = _table(game)
    for name, summary in summary_of_seeds(game, list(results.values())).items():
        means = _cells(game, summary["mean"])
        if name == ALL_RANDOM:
            table.add_row(name, *means)
            continue
        table.add_row(name)
        for seed, result in results.items():
            table.add_row(f"  seed {seed}", *_cells(game, result[name]))
        table.add_row("  mean", *means)
        table.add_row("  worst", "", "", *_returns(game, summary["worst"]))
        for statistic_label, statistic in SEED_STATISTICS.items():
            table.add_row(f"  {statistic_label}", "", "", *_returns(game, summary[statistic]))
    return Group(_title(game, next(iter(results.values())), note), table)


def _title(game: Env, results: Results, note: str) -> Text:
    """Above a table, and not part of it: as wide as the console, however narrow the table is."""
    first = next(iter(results.values()))
    title = f"{game.name()}: {counted(first['episodes'], 'episode')}{' each' if len(results) > 1 else ''}"
    if len(results) == 1 and "distinct_episodes" in first:
        title += f", {counted(first['distinct_episodes'], 'distinct episode')}"
    title += note and f"; {note}"
    if game.termination_label != Env.termination_label:
        title += f"; {Env.termination_label}: {game.termination_label}"
    return Text(printable(title))


def _table(game: Env) -> FittedTable:
    """A table without rows: the names of the policies, then the columns of ``_cells``."""
    return FittedTable("policies", Env.termination_label, "steps", *_headings(game), *game.state_metrics)


def _cells(game: Env, metrics: Mapping[str, float]) -> list[str]:
    own = [f"{metrics[f'state_{name}']:.2f}" for name in game.state_metrics]
    return [f"{metrics['terminated_fraction']:.1%}", f"{metrics['episode_length']:.1f}", *_returns(game, metrics), *own]


def _headings(game: Env) -> list[str]:
    """Of ``_returns``."""
    return [f"{name}, {start}" for name in sides_with_returns(game) for start in ("mean", "worst")]


def _returns(game: Env, metrics: Mapping[str, float]) -> list[str]:
    """Of each role or agent the mean return and the lowest of an episode; empty where there is none."""
    return [f"{metrics[name]:.2f}" if name in metrics else "" for name in _names_of_returns(game)]


def _names_of_returns(game: Env) -> list[str]:
    return [f"{start}_{name}" for name in sides_with_returns(game) for start in ("return", "worst_return")]
