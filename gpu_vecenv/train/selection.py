"""Evaluations during training, of each trained role against fixed opponents, and the best checkpoint by them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import Evaluator
from gpu_vecenv.train.fixed_opponents import FixedOpponents, Match
from gpu_vecenv.train.role_view import sides_with_returns
from gpu_vecenv.train.trainer import Trainer

SEED = 2  # of all scores, so that they differ by the policies alone; other evaluations have 1 unless another is given


@dataclass
class SelectionState:
    """What a selection depends on beside the policies; saved with each checkpoint."""

    best: float | None = None  # largest score so far
    best_iteration: int | None = None
    training_episodes: float = 0.0  # that ended since the last score


class MatchResult(NamedTuple):
    """Episodes of a role against a fixed opponent; returns are means over the role's agents."""

    role: str
    opponent: str
    mean_return: float
    worst_return: float  # of an episode
    standard_error: float  # of the mean return; NaN of one episode
    episodes: int
    episode_length: float
    terminated_fraction: float


class Selection:
    """Compares the policies of a trainer, as they are now, to those that it has seen before; training does not change.

    Each trained role plays ``episodes`` episodes against each of its fixed opponents. The score is the mean of the
    metric over a role's opponents, and of these means over the roles; where all others are frozen, over these and
    scripts, see ``FixedOpponents.is_scored``. With torch.distributed each process plays a share
    of the episodes; all processes call the methods.

    Attributes:
        episodes: Of each match.
        results: Of the last evaluation.

    Args:
        trainer: The trainer.
        metric: "return_<role>", "episode_length", "terminated_fraction" or "state_<field>" of the game's
            ``state_metrics``; None: of each trained role its own return. In a zero-sum game of one role it is
            "return_<agent>", see ``FixedOpponents``. The return of a trained role is that of the episodes in which it
            is the one that plays.
        episodes: Number of episodes of each match, rounded up to a multiple of the processes; 0: no evaluations.
        interval: Training episodes between two scores, per episode of a score: 10 makes a score cost about a tenth of
            the steps of training, without their updates.
        opponents: The fixed opponents; None: those of ``FixedOpponents(trainer)``.

    Raises:
        ConfigError: There is no such metric.
    """

    def __init__(
        self,
        trainer: Trainer,
        metric: str | None,
        episodes: int,
        interval: int,
        opponents: FixedOpponents | None = None,
    ) -> None:
        self.opponents = FixedOpponents(trainer) if opponents is None else opponents
        sides = sides_with_returns(trainer.env.game)
        known = [*(f"return_{side}" for side in sides), "episode_length", "terminated_fraction"]
        known += [f"state_{name}" for name in trainer.env.game.state_metrics]
        if metric is not None and metric not in known:
            raise ConfigError(f"best_metric is {metric!r}; expected one of {', '.join(known)}")
        self._metric, self._trainer = metric, trainer
        self._share = -(-episodes // trainer.world.size)
        self.episodes = self._share * trainer.world.size
        self._num_episodes = self.episodes * len(self.opponents.matches)
        self._interval = interval
        self._evaluator: Evaluator | None = None  # made for the first score
        self.state = SelectionState()
        self.results: list[MatchResult] = []

    def due(self) -> bool:
        """Whether enough training episodes have ended since the last score."""
        return self.state.training_episodes >= self._interval * self._num_episodes

    def is_best(self) -> bool:
        """Score the policies; whether the score is larger than all before. False without episodes or trained roles."""
        if not self._num_episodes:
            return False
        score, state = self._score(), self.state
        state.training_episodes = 0.0
        if not math.isfinite(score) or (state.best is not None and score <= state.best):
            return False
        state.best, state.best_iteration = score, self._trainer.iteration
        return True

    def _score(self) -> float:
        """Play all matches, keep their results, and return the score, which is the same in all processes."""
        scores = dict[str, list[float]]()
        self.results = []
        own_metrics = {match.role: f"return_{match.role}" for match in self.opponents.matches}
        for match in self.opponents.matches:
            played, own = self._played(match), own_metrics[match.role]
            means = {name: float(values.sum()) / len(values) for name, values in played.items()}
            returns = played[own]
            spread = float(returns.var()) if len(returns) > 1 else math.nan
            self.results.append(
                MatchResult(
                    *match,
                    means[own],
                    float(returns.min()),
                    math.sqrt(spread / len(returns)),
                    len(returns),
                    means["episode_length"],
                    means["terminated_fraction"],
                )
            )
            # The return of a role that is trained counts where it is the one that plays.
            counts = self._metric not in own_metrics.values() or self._metric == own
            if counts and self.opponents.is_scored(match):
                scores.setdefault(match.role, []).append(means[self._metric or own])
        return fmean(map(fmean, scores.values()))

    def _played(self, match: Match) -> dict[str, torch.Tensor]:
        """Metric -> (episodes of all processes,) float64."""
        world = self._trainer.world
        if self._evaluator is None:
            self._evaluator = Evaluator(self._trainer.env, self._share, world.rank * self._share)
        actors = self.opponents.role_policies(match)
        played = self._evaluator.of_each_episode(actors, self._share, seed=SEED)
        of_all = {}
        for name, values in played.items():
            rows = values.new_zeros((world.size, self._share))
            rows[world.rank] = values
            world.all_reduce_sum(rows)  # of one value and zeros: exact
            of_all[name] = rows.flatten()
        return of_all

    def close(self) -> None:
        """Release the memory of the environment in which the episodes are played."""
        if self._evaluator is not None:
            self._evaluator.close()
