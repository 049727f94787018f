"""Tag on a grid: taggers corner one runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.env import Env, Field, i32, param


@dataclass(frozen=True, kw_only=True)
class TagGridworld(Env):
    """Taggers chase the one runner, the last agent, over integer cells; being caught ends the episode for all."""

    num_taggers: int = param(4, low=1)  # agents that chase the runner
    grid: int = param(20, low=1, high=32767)  # cells per side, minus one
    max_steps: int = param(100, low=1)  # ticks until the episode is truncated
    wall_penalty: float = 0.1  # taken from an agent that walks into a wall
    tagger_reward: float = 10.0  # given to every tagger on a tag
    runner_penalty: float = 5.0  # taken from the runner on a tag
    step_cost: float = 0.01  # taken from taggers, given to the runner, on a tick without a tag
    full_observation: bool = True  # False: each agent sees itself and one opponent
    random_start: bool = False  # True: all cells uniform; False: taggers in the middle, runner at (0, 0)

    state = (
        Field("cell", i32, ("num_agents", 2)),  # column, row, in [0, grid]
    )
    terminated_means = "the runner was caught"

    @property
    def roles(self) -> Mapping[str, int]:
        return {"tagger": self.num_taggers, "runner": 1}

    @property
    def obs_dim(self) -> int:
        return 4 * self.num_agents + 1 if self.full_observation else 6

    @property
    def action_space(self) -> Discrete:
        return Discrete(5)  # stay, column + 1, column - 1, row + 1, row - 1
