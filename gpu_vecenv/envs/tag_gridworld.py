"""Tag on a grid: taggers corner one runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLUE, PALE, RED, Circle, Drawing, Line, discs
from gpu_vecenv.declare.env import Entities, Env, Field, Own, i32, param
from gpu_vecenv.declare.obs_parts import total_size


@dataclass(frozen=True, kw_only=True)
class TagGridworld(Env):
    """Taggers chase the one runner, the last agent, over integer cells; being caught ends the episode for all."""

    num_taggers: int = param(4, low=1)  # agents that chase the runner
    grid: int = param(20, low=1, high=32767)  # cells per side, minus one
    max_steps: int = param(100, low=1)  # steps until the episode is truncated
    wall_penalty: float = 0.1  # subtracted from an agent that moves into a wall
    tagger_reward: float = 10.0  # added to every tagger on a tag
    runner_penalty: float = 5.0  # subtracted from the runner on a tag
    step_cost: float = 0.01  # subtracted from taggers and added to the runner in a step without a tag
    full_observation: bool = True  # False: each agent observes itself and one opponent
    random_start: bool = False  # True: all cells uniform; False: taggers in the middle, runner at (0, 0)

    state = (
        Field("cell", i32, ("num_agents", 2)),  # column, row, in [0, grid]
    )
    termination_label = "the runner was caught"
    noop = 0
    render_fps = 10
    obs_staging_bytes = 200 << 10
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 8_000_000,
            "num_minibatches": 64,
            "learning_rate": 0.002,
            "final_entropy_coefficient": 0.0,
        }
    )

    @property
    def roles(self) -> Mapping[str, int]:
        return {"tagger": self.num_taggers, "runner": 1}

    @property
    def obs_parts(self) -> tuple[Own | Entities, ...]:
        if self.full_observation:
            return (Entities("agent", self.num_agents, 4, by_feature=True), Own("time", 1))
        return (Own("cell", 2), Own("opponent", 2), Own("role", 1), Own("time", 1))

    @property
    def observation_space(self) -> Box:
        return Box(0.0, 1.0, (total_size(self.obs_parts),), np.float32)

    @property
    def action_space(self) -> Discrete:
        return Discrete(5)  # stay, column + 1, column - 1, row + 1, row - 1

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        cells = self.grid + 1
        every = -(-cells // 50)  # more lines than that would hide the agents
        ends = [((k, 0), (k, cells)) for k in sorted({*range(0, cells, every), cells})]
        lines = [Line(pair, cells / 600, PALE) for a, b in ends for pair in ((a, b), (a[::-1], b[::-1]))]
        size = max(1.0, cells / 40)  # of an agent, in cells
        # Taggers that share a cell are drawn around its centre, so that all of them are visible.
        around = (np.arange(self.num_taggers) / self.num_taggers + 1 / 8) * 2 * np.pi
        middle = state["cell"] + 0.5
        x, y = middle[-1]
        in_cell = np.array([(state["cell"] == cell).all(1).sum() for cell in state["cell"][:-1]])
        aside = np.where(in_cell > 1, 0.25 * size, 0.0)
        taggers = middle[:-1] + np.stack([aside * np.cos(around), aside * np.sin(around)], 1)
        runner = Circle(x, y, 0.3 * size, BLUE, self.num_taggers)
        margin = cells / 100
        bounds = (-margin, cells + margin, -margin, cells + margin)
        return Drawing(bounds, [*lines, *discs(taggers, 0.24 * size, RED, range(self.num_taggers)), runner])
