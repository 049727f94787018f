"""Evaluations at the end of training, of each pairing of trained and random roles, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import counted
from gpu_vecenv.escapes import printable
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.train.trainer import Trainer

ALL_RANDOM, ALL_TRAINED = "all random", "all trained"
Results: TypeAlias = Mapping[str, Mapping[str, float]]  # pairing -> what ``evaluate`` returns


def evaluations(trainer: Trainer, episodes: int, on_progress: OnProgress = no_progress) -> dict[str, dict[str, float]]:
    """Evaluations with all roles random, with each single role trained, and with all roles trained."""
    roles = list(trainer.env.game.layout.roles)
    pairings: dict[str, Sequence[str]] = {ALL_RANDOM: roles}
    if len(roles) > 1:
        for role in roles:
            others = [other for other in roles if other != role]
            pairings[f"{role} trained"] = others
    pairings[ALL_TRAINED] = []
    return {
        name: trainer.evaluate(episodes, random_roles=random, on_progress=part(on_progress, index, len(pairings), name))
        for index, (name, random) in enumerate(pairings.items())
    }


def evaluation_table(game: Env, results: Results, note: str = "") -> Table:
    """Results of ``evaluate`` as a table, a row each; ``note`` follows the number of episodes in its title."""
    table = _table(game, results, note, "policies")
    for name, metrics in results.items():
        table.add_row(Text(printable(name)), *_cells(game, metrics))
    return table


def mean_and_worst(game: Env, results: Sequence[Results]) -> dict[str, dict[str, dict[str, float]]]:
    """Pairing -> {"mean": all metrics, "worst": the lowest return of each role} over runs that differ in the seed."""
    summary = {}
    for name, first in results[0].items():
        of_all = {metric: [result[name][metric] for result in results] for metric in first}
        returns = [f"return_{role}" for role in game.layout.roles]
        summary[name] = {
            "mean": {metric: statistics.fmean(values) for metric, values in of_all.items()},
            "worst": {metric: min(of_all[metric]) for metric in returns},
        }
    return summary


def seeds_table(game: Env, results: Mapping[int, Results], note: str = "") -> Table:
    """Results by seed, with mean and worst. Where all roles act randomly, all seeds are the same: a row for all."""
    table = _table(game, next(iter(results.values())), note, "policies", "seed")
    for name, summary in mean_and_worst(game, list(results.values())).items():
        if name != ALL_RANDOM:
            for seed, result in results.items():
                table.add_row(Text(printable(name)), str(seed), *_cells(game, result[name]))
        table.add_row(Text(printable(name)), "mean", *_cells(game, summary["mean"]))
        if name != ALL_RANDOM:
            returns = [f"{value:.2f}" for value in summary["worst"].values()]
            table.add_row(Text(printable(name)), "worst", "", "", *returns)
        table.add_section()
    return table


def _table(game: Env, results: Results, note: str, *labels: str) -> Table:
    """A table without rows: columns of labels, then those of ``_cells``."""
    first = next(iter(results.values()))
    title = f"{game.name()}: {counted(first['episodes'], 'episode')}{' each' if len(results) > 1 else ''}"
    if len(results) == 1 and "distinct_episodes" in first:
        title += f", {counted(first['distinct_episodes'], 'distinct episode')}"
    title += note and f"; {note}"
    table = Table(title=Text(printable(title)))
    for label in labels:
        table.add_column(label, no_wrap=True)
    for heading in (game.termination_label, "steps", *(f"return, {role}" for role in game.layout.roles)):
        table.add_column(Text(printable(heading)), justify="right")
    return table


def _cells(game: Env, metrics: Mapping[str, float]) -> list[str]:
    returns = [f"{metrics[f'return_{role}']:.2f}" for role in game.layout.roles]
    return [f"{metrics['terminated_fraction']:.1%}", f"{metrics['episode_length']:.1f}", *returns]
