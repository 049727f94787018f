"""Prioritised level replay: episodes begin in the initial states from which there is most to learn.

Jiang, Grefenstette and Rocktäschel, "Prioritized level replay", ICML 2021. A level is a row of the environment's
``initial_states``. Its score is taken anew whenever an episode of it ends; levels are then drawn by the rank of their
score, and the more often the longer their score was not taken.

The engine draws a row of a table with equal probabilities. During a rollout the table has each level as often as its
probability says, otherwise all equally often: evaluations are of all levels. Which row an episode drew follows from the
environment's random stream and the number of the episode.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from gpu_vecenv.declare.config import with_known_options
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.opponent_kernels import uniform_numbers
from gpu_vecenv.train.rollout_storage import Rollout

Score = Literal["magnitude", "positive"]

MIN_ROWS = 1024  # of the table: the least share of a level in it is one row
LOW = 2**32 - 1
SEED_OFFSET = 0x6C6576656C73  # other numbers than opponents draw with the same seed
RESET_DRAW = 1 << 28, LOW  # counter words of the draw of an initial state, see step.cuh and rng.cuh


@with_known_options
@dataclass(frozen=True, kw_only=True)
class LevelReplay:
    """How initial states are drawn, by "Prioritized level replay" (Jiang et al., 2021); the defaults are the paper's.

    Args:
        score: Of an agent's step: the "magnitude" of its generalised advantage (the paper's L1 value loss), or its
            "positive" part, 0 where it is negative (the positive value loss of Jiang et al., "Replay-guided adversarial
            environment design", 2021). The score of a level is the mean over all steps of its episodes that ended in
            the last rollout in which one did.
        temperature: beta > 0: the level of rank r, 1 that of the largest score, has a weight of (1 / r)^(1 / beta).
        staleness: rho in [0, 1]: the share of draws in proportion to the iterations since a level's score was taken.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        ``Trainer(env, curriculum=Curriculum(levels=LevelReplay(temperature=0.3)))``
    """

    score: Score = "magnitude"
    temperature: float = 0.1
    staleness: float = 0.1

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigError(f"score is {self.score!r}; expected one of {', '.join(map(repr, get_args(Score)))}")
        if type(self.temperature) not in (int, float) or not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature!r}; expected a finite number > 0")
        if type(self.staleness) not in (int, float) or not 0 <= self.staleness <= 1:
            raise ConfigError(f"staleness is {self.staleness!r}; expected a number in [0, 1]")

    def description(self) -> dict[str, Any]:
        """JSON values that tell configurations apart."""
        return dataclasses.asdict(self)


def with_table(env: VecEnv) -> VecEnv:
    """An environment like this one, in "next_step" mode, whose table of initial states has room for probabilities.

    Raises:
        ConfigError: The environment has no ``initial_states``.
    """
    if not env.build.initial_fields:
        raise ConfigError(
            "curriculum: levels replays initial states, of which the environment has none; expected an environment "
            "made with initial_states="
        )
    tables = {name: env.data[f"initial_{name}"] for name in env.build.initial_fields}
    copies = -(-MIN_ROWS // len(next(iter(tables.values()))))
    tiled = {name: table.cpu().numpy().repeat(copies, 0) for name, table in tables.items()}
    return env.like(autoreset_mode="next_step", agents_as_envs=False, initial_states=tiled)


def level_probabilities(
    scores: torch.Tensor, scored: torch.Tensor, clock: torch.Tensor, temperature: float, staleness: float
) -> torch.Tensor:
    """The probability of each of L levels, (L,) float64.

    Levels without a score have 1 / L each. The others share the rest as (1 - staleness) P_S + staleness P_C of the
    paper's equations 1 to 3: P_S by rank, P_C by the time since the score; equal if all are of the present time.

    Args:
        scores: (L,) float64.
        scored: (L,) int64, when each score was taken; -1: never.
        clock: () int64, the present time.
        temperature: beta.
        staleness: rho.
    """
    seen = scored >= 0
    order = torch.where(seen, scores, -torch.inf).argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1, device=order.device)
    by_rank = torch.where(seen, ranks.double() ** (-1 / temperature), 0)
    age = torch.where(seen, clock - scored, 0)
    age = torch.where(age.sum() > 0, age, seen.long()).double()
    of_seen = (1 - staleness) * by_rank / by_rank.sum().clamp(min=1) + staleness * age / age.sum().clamp(min=1)
    return torch.where(seen, of_seen * seen.sum(), 1) / len(scores)


def rows_of_levels(probabilities: torch.Tensor, offset: torch.Tensor, rows: int) -> torch.Tensor:
    """The level of each row of a table, (rows,) int64, ascending.

    Systematic sampling: a level has rows x probability rows, rounded up or down, and exactly so many in expectation
    over ``offset``, () float64 uniform in (0, 1).
    """
    ends = (probabilities * 2**40).round().long().cumsum(0)  # of integers, whose sums do not depend on their order
    points = (torch.arange(rows, device=ends.device) + offset) * (ends[-1].double() / rows)
    return torch.searchsorted(ends, torch.minimum(points.long(), ends[-1] - 1), right=True)


def drawn_rows(keys: torch.Tensor, episodes: torch.Tensor, rows: int) -> torch.Tensor:
    """The row of the table of initial states that the engine draws at the beginning of an episode, int64.

    Args:
        keys: (E, 2) int32, "engine_key".
        episodes: (…, E) int64, as counted by "engine_episode".
        rows: Rows of the table.
    """
    key0, key1 = (keys.long() & LOW).unbind(1)
    first, item = RESET_DRAW
    # Philox4x32-10, as in rng.cuh; products wrap as those of 64 bits without a sign.
    c0, c1, c2, c3 = (torch.full_like(episodes, word) for word in (first, item, 0, 0))
    c3 = episodes & LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ key0, b & LOW, (a >> 32 & LOW) ^ c3 ^ key1, a & LOW
        key0, key1 = key0 + 0x9E3779B9 & LOW, key1 + 0xBB67AE85 & LOW
    return c1 * rows + (c0 * rows >> 32) >> 32


class Levels:
    """The levels of one trainer: their scores, and the table that the next episodes draw from.

    No method reads the device, and all may be part of a CUDA graph.

    Attributes:
        level: (E,) int64, what each environment plays.
        scores: (L,) float64.
        scored: (L,) int64, the number of rollouts before the one that gave the score; -1: none has yet.

    Args:
        config: The configuration.
        rollout: Of an environment of ``with_table``.
        num_levels: L, the rows of ``initial_states`` that the caller's environment was made with.
        seed: Of the trainer.
    """

    def __init__(self, config: LevelReplay, rollout: Rollout, num_levels: int, seed: int) -> None:
        self.config, self._rollout, self._seed = config, rollout, (seed + SEED_OFFSET) % 2**64
        env, device = rollout.env, rollout.env.device
        self._tables = [env.data[f"initial_{name}"] for name in env.build.initial_fields]
        self._rows = len(self._tables[0])
        copies = self._rows // num_levels
        self._levels = [table[::copies].clone() for table in self._tables]
        self._equal = torch.arange(self._rows, device=device) // copies
        self._of_row = self._equal.clone()  # the level of each row of the table
        self.scores = torch.zeros(num_levels, dtype=torch.float64, device=device)
        self.scored = torch.full((num_levels,), -1, device=device)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)
        self.level = torch.zeros(env.num_envs, dtype=torch.int64, device=device)
        self._episode = torch.full_like(self.level, -1)  # of ``level``
        # Of the steps of the running episode in earlier rollouts.
        self._sum = torch.zeros(env.num_envs, dtype=torch.float64, device=device)
        self._count = torch.zeros_like(self.level)
        self._offset = torch.zeros((), dtype=torch.float64, device=device)

    def probabilities(self) -> torch.Tensor:
        """With which the next rollout draws each level, (L,) float64."""
        config = self.config
        return level_probabilities(self.scores, self.scored, self._clock, config.temperature, config.staleness)

    def state(self) -> dict[str, torch.Tensor]:
        """What the next iterations depend on: live tensors by name."""
        return {
            "scores": self.scores,
            "scored": self.scored,
            "clock": self._clock,
            "level": self.level,
            "episode": self._episode,
            "sum": self._sum,
            "count": self._count,
        }

    def restored(self) -> None:
        """The state was written by a load, after an iteration."""
        self._write(self._equal)

    def begin_rollout(self) -> None:
        """Write the table for the episodes of this rollout."""
        self._follow()
        uniform_numbers(self._seed, self._clock, self._offset)
        self._write(rows_of_levels(self.probabilities(), self._offset, self._rows))

    def end_rollout(self) -> None:
        """Score the levels whose episodes ended, by the rollout's advantages."""
        data, num_steps = self._rollout, len(self._rollout.rewards)
        plays = data.active.any(2)  # (T + 1, E); a step without an active agent is that of a reset
        later = (~plays[:-1]).flip(0).cumsum(0).flip(0) - (~plays[:-1]).long()  # resets after the step
        episodes = self._env_episode() - later  # (T, E)
        levels = self._level_of(episodes)
        for kept in (self._sum, self._count):
            kept.masked_fill_(episodes[0] != self._episode, 0)  # of an episode that was reset before its end
        ends = plays[:-1] & ~plays[1:]
        complete = ends.flip(0).cumsum(0).flip(0) > 0  # steps of episodes that end in this rollout
        counted = data.learned[:-1] if data.acting is None else data.learned[:-1] & data.acting[:-1]
        values = data.advantages.abs() if self.config.score == "magnitude" else data.advantages.clamp(min=0)
        values = torch.where(counted, values, 0).double().sum(2)
        counts = counted.sum(2)
        # Sums of integers do not depend on their order. No sum of values reaches 2^61 in these units.
        largest = torch.maximum(values.amax(), self._sum.amax())
        bits = 60 - math.ceil(math.log2((num_steps + 1) * len(self.level)))
        unit = torch.exp2((bits - largest.frexp().exponent).double().clamp(max=900))
        values, carried = (values * unit).round().long(), (self._sum * unit).round().long()
        sums, steps = (torch.zeros_like(self.scored) for _ in range(2))
        for into, of_step, of_env in ((sums, values, carried), (steps, counts, self._count)):
            into.index_add_(0, levels.flatten(), torch.where(complete, of_step, 0).flatten())
            into.index_add_(0, levels[0], torch.where(complete[0], of_env, 0))
        found = steps > 0
        self.scores.copy_(torch.where(found, sums.double() / unit / steps.clamp(min=1), self.scores))
        self.scored.copy_(torch.where(found, self._clock, self.scored))
        for kept, of_step, of_env in ((self._sum, values, carried), (self._count, counts, self._count)):
            goes_on = torch.where(complete, 0, of_step).sum(0) + torch.where(complete[0], 0, of_env)
            kept.copy_(goes_on / unit if kept is self._sum else goes_on)
        self._clock += 1
        self._follow()
        self._write(self._equal)

    def _env_episode(self) -> torch.Tensor:
        return self._rollout.env.data["engine_episode"][:, 0]

    def _level_of(self, episodes: torch.Tensor) -> torch.Tensor:
        """What episodes (…, E) play: the one that ``level`` is of, or later ones, which drew from the present table."""
        rows = drawn_rows(self._rollout.env.data["engine_key"], episodes, self._rows)
        return torch.where(episodes == self._episode, self.level, self._of_row[rows])

    def _follow(self) -> None:
        """Find what environments play, before the table changes."""
        episode = self._env_episode()
        self.level.copy_(self._level_of(episode))
        self._episode.copy_(episode)

    def _write(self, of_row: torch.Tensor) -> None:
        self._of_row.copy_(of_row)
        for table, levels in zip(self._tables, self._levels, strict=True):
            torch.index_select(levels, 0, of_row, out=table)
