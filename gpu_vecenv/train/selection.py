"""Selection of the best checkpoint: scores of the trained roles in episodes against fixed opponents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import Evaluator
from gpu_vecenv.train.role_view import role_of
from gpu_vecenv.train.trainer import Trainer

SEED = 2  # of all scores, so that they differ by the policies alone; other evaluations have 1 unless another is given


@dataclass
class SelectionState:
    """What a selection depends on beside the policies; saved with each checkpoint."""

    best: float | None = None  # largest score so far
    best_iteration: int | None = None
    training_episodes: float = 0.0  # that ended since the last score


class Selection:
    """Compares the policies of a trainer, as they are now, to those that it has seen before; training does not change.

    Each trained role plays alone: the others that are trained act randomly, frozen ones by their policies. The score is
    the mean of the metric over the trained roles. With torch.distributed each process plays a share of the episodes;
    all processes call the methods.

    Args:
        trainer: The trainer.
        metric: "return_<role>", "episode_length" or "terminated_fraction"; None: of each trained role its own return.
            The return of a trained role is that of the episodes in which it is the one that plays.
        episodes: Number of episodes for each trained role, rounded up to a multiple of the processes; 0: no scores.
        interval: Training episodes between two scores, per episode of a score: 10 makes a score cost about a tenth of
            the steps of training, without their updates.

    Raises:
        ConfigError: There is no such metric.
    """

    def __init__(self, trainer: Trainer, metric: str | None, episodes: int, interval: int) -> None:
        game = trainer.env.game
        names = [name for learner in trainer.learners.values() for name in learner.policy.view.names]
        # Of each role the roles and agents that are trained.
        self._trained = {role: [n for n in names if role_of(game, n) == role] for role in game.layout.roles}
        own = {role: f"return_{role}" for role, trained in self._trained.items() if trained}
        known = [*(f"return_{role}" for role in game.layout.roles), "episode_length", "terminated_fraction"]
        if metric is not None and metric not in known:
            raise ConfigError(f"best_metric is {metric!r}; expected one of {', '.join(known)}")
        of_one = {metric} & {*own.values()}
        self._metrics = {role: metric or name for role, name in own.items() if not of_one or name in of_one}
        self._trainer = trainer
        self._share = -(-episodes // trainer.world.size)
        self._num_episodes = self._share * trainer.world.size * len(self._metrics)
        self._interval = interval
        self._evaluator: Evaluator | None = None  # made for the first score
        self.state = SelectionState()

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
        trainer = self._trainer
        if self._evaluator is None:
            self._evaluator = Evaluator(trainer.env, self._share, trainer.world.rank * self._share)
        scores = []
        for role, metric in self._metrics.items():
            others = [name for other, trained in self._trained.items() if other != role for name in trained]
            scores.append(self._evaluator(trainer.role_policies(others), self._share, seed=SEED)[metric])
        score = torch.tensor(scores, dtype=torch.float64, device=trainer.env.device).mean()
        trainer.world.all_reduce_mean(score)
        return float(score)

    def close(self) -> None:
        """Release the memory of the environment in which the episodes are played."""
        if self._evaluator is not None:
            self._evaluator.close()
