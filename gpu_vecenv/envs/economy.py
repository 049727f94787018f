"""Economy: workers gather, trade and build, a planner taxes them. The AI Economist's gather-trade-build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Discrete, Space

from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.env import Field, f32, i32, param, u8
from gpu_vecenv.envs.settlement import QUADRANT, draw_settlement, land_of, ranked_skills, ranked_starts
from gpu_vecenv.envs.society import Society
from gpu_vecenv.errors import ConfigError

Distribution = Literal["none", "pareto", "lognormal"]
DISTRIBUTIONS = "none", "pareto", "lognormal"


@dataclass(frozen=True, kw_only=True)
class Economy(Society):
    """The rules of ai-economist 1.7.1's gather-trade-build; defaults are those of its tutorial's phase 2."""

    grid: str | None = None  # rows of the map: . empty, @ water, S and W where stone and wood grow; None: "quadrant"
    max_steps: int = param(1000, low=1)  # steps until the episode is truncated
    fixed_four_skill_and_loc: bool = True  # workers start in four corners, with skills by rank, in a random order
    build_skill_dist: Distribution = "pareto"  # of what a house pays, relative to ``payment``; not with the former
    payment: float = param(10.0, low=0)  # coin for a house
    payment_max_skill_multiplier: float = param(3.0, low=1)  # of ``payment``, what a worker gets at most
    gather_skill_dist: Distribution = "pareto"  # of the probability to gather two units at once
    build_labor: float = param(10.0, low=0)  # labor of building a house
    move_labor: float = param(1.0, low=0)  # labor of a move
    collect_labor: float = param(1.0, low=0)  # labor of taking what has grown on a source
    resource_regen_prob: float = param(0.01, low=0, high=1)  # that an empty source grows a unit in a step
    mobile_agent_observation_range: int = param(5, low=0, high=100)  # cells to each side that a worker sees

    state = (
        Field("loc", i32, ("num_workers", 2)),  # row, column; row 0 is the upper one
        Field(
            "tile", u8, ("height", "width")
        ),  # of a source: 1 if a unit is there; else 1 + the owner of a house, or 0
        Field("build_payment", f32, ("num_workers",)),  # coin for a house
        Field("bonus_gather_prob", f32, ("num_workers",)),  # that a worker gathers two units at once
        *Society.state,
        Field("terrain", u8, ("height", "width"), shared=True),  # 0 empty, 1 water, 2, 3 source of stone, wood
        Field("source", i32, ("num_sources", 2), shared=True),  # row, column
        Field("start", i32, ("num_workers", 2), shared=True),  # of the worker of that rank: row, column
        Field("ranked_skill", f32, ("num_workers",), shared=True),  # what a house pays it, relative to ``payment``
        *Society.saez_state,
    )
    derived = (*Society.derived, "num_land", "view", "build_distribution", "gather_distribution")
    render_fps = 10

    land = property(lambda self: land_of(self.grid or QUADRANT))
    height = property(lambda self: self.land.terrain.shape[0])
    width = property(lambda self: self.land.terrain.shape[1])
    num_land = property(lambda self: int((self.land.terrain != 1).sum()))
    num_sources = property(lambda self: len(self.land.sources))
    view = property(lambda self: 2 * self.mobile_agent_observation_range + 1)
    build_distribution = property(lambda self: DISTRIBUTIONS.index(self.build_skill_dist))
    gather_distribution = property(lambda self: DISTRIBUTIONS.index(self.gather_skill_dist))

    @property
    def action_space(self) -> Mapping[str, Space[Any]]:
        return {"worker": Discrete(2 + self.num_orders + 4), "planner": self.planner_space}

    @property
    def obs_dim(self) -> Mapping[str, int]:
        own = 8 + self.num_orders + 9 * self.view**2
        return {"worker": self.num_observed + own, "planner": self.num_observed + 6 * self.num_workers}

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {
            **super().arrays(),
            "terrain": self.land.terrain,
            "source": self.land.sources,
            "start": ranked_starts(self.num_workers, self.height, self.width),
            "ranked_skill": ranked_skills(self.num_workers, self.payment_max_skill_multiplier),
        }

    def validate(self) -> None:
        terrain, starts = self.land.terrain, ranked_starts(self.num_workers, self.height, self.width)
        inside = (starts >= 0).all() and (starts < terrain.shape).all()
        apart = len({*map(tuple, starts.tolist())}) == self.num_workers
        if self.fixed_four_skill_and_loc and not (inside and apart and (terrain[tuple(starts.T)] != 1).all()):
            raise ConfigError(
                f"Economy: {self.num_workers} workers do not start in the corners of a map of {self.height} x "
                f"{self.width} cells; expected cells for a quarter of them in each, four in a row, and no water there, "
                "or fixed_four_skill_and_loc = False"
            )
        if not self.num_sources or self.num_workers > self.num_land:
            raise ConfigError(
                f"Economy: {self.num_workers} workers, {self.num_land} cells of land, {self.num_sources} sources; "
                "expected at least one source, and as many cells as workers"
            )

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        return draw_settlement(state)
