"""Economy: workers gather, trade and build, a planner taxes them. The AI Economist's gather-trade-build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space

from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.env import Env, Field, FixedArgument, f32, i32, param, u8
from gpu_vecenv.envs.settlement import QUADRANT, Land, draw_settlement, land_of, ranked_skills, ranked_starts
from gpu_vecenv.errors import ConfigError

Distribution = Literal["none", "pareto", "lognormal"]
DISTRIBUTIONS = "none", "pareto", "lognormal"
US_FEDERAL = 0.1, 0.12, 0.22, 0.24, 0.32, 0.35, 0.37  # marginal rates of single filers in 2018
CUTOFFS = 0, 9700, 39475, 84200, 160725, 204100, 510300  # where their brackets begin, US dollars
ONLY_US_FEDERAL = FixedArgument("us-federal", "the brackets are those of the US federal income tax")


@dataclass(frozen=True, kw_only=True)
class Economy(Env):
    """The rules of ai-economist 1.7.1's gather-trade-build; defaults are those of its tutorial's phase 2."""

    num_workers: int = param(4, low=2, high=255)
    grid: str = QUADRANT  # rows of the map: . empty, @ water, S and W where stone and wood grow
    max_steps: int = param(1000, low=1)  # steps until the episode is truncated
    fixed_four_skill_and_loc: bool = True  # workers start in four corners, with skills by rank, in a random order
    build_skill_dist: Distribution = "pareto"  # of what a house pays, relative to ``payment``; not with the former
    payment: float = param(10.0, low=0)  # coin for a house
    payment_max_skill_multiplier: float = param(3.0, low=1)  # of ``payment``, what a worker gets at most
    gather_skill_dist: Distribution = "pareto"  # of the probability to gather two units at once
    starting_agent_coin: float = param(0.0, low=0)
    build_labor: float = param(10.0, low=0)  # labor of building a house
    move_labor: float = param(1.0, low=0)
    collect_labor: float = param(1.0, low=0)
    order_labor: float = param(0.25, low=0)  # of a bid or an ask
    resource_regen_prob: float = param(0.01, low=0, high=1)  # that an empty source grows a unit in a step
    max_bid_ask: int = param(10, low=1, high=254)  # the highest price
    max_num_orders: int = param(5, low=1, high=255)  # a worker's open bids and asks for one resource
    order_duration: int = param(50, low=1, high=254)  # steps for which an order stays open
    tax_model: Literal["planner", "free_market", "us_federal"] = "planner"  # who sets the marginal rates
    period: int = param(100, low=1)  # steps from one tax day to the next
    num_rates: int = param(21, low=2, high=1001)  # that the planner chooses from, evenly spaced from 0 to 1
    tax_limit: float = param(1.0, low=0, high=1)  # the highest rate that is allowed
    usd_scaling: float = param(1000.0, low=1e-6)  # US dollars for a coin
    isoelastic_eta: float = param(0.23, low=0, high=1)  # how fast the utility of coin diminishes
    energy_cost: float = param(0.21, low=0)  # of a unit of labor, in utility
    planner_reward_type: Literal[
        "coin_eq_times_productivity", "inv_income_weighted_coin_endowments", "inv_income_weighted_utility"
    ] = "coin_eq_times_productivity"  # social welfare, whose increase is the planner's reward
    mixing_weight_gini_vs_coin: float = param(0.0, low=0, high=1)  # of productivity alone, in the first of these
    mobile_agent_observation_range: int = param(5, low=0, high=100)  # cells to each side that a worker sees

    state = (
        Field("loc", i32, ("num_workers", 2)),  # row, column; row 0 is the upper one
        Field("tile", u8, ("height", "width")),  # of a source: 1 if a unit is there; else 1 + the owner of a house, or 0
        Field("inventory", i32, ("num_workers", 2)),  # stone, wood
        Field("coin", f32, ("num_workers",)),  # without that in escrow
        Field("labor", f32, ("num_workers",)),  # in this episode
        Field("build_payment", f32, ("num_workers",)),  # coin for a house
        Field("bonus_gather_prob", f32, ("num_workers",)),  # that a worker gathers two units at once
        Field("orders", u8, ("num_workers", 2, "max_num_orders", 3)),  # for stone, wood: 1 bid, 2 ask; price; steps
        Field("price_history", f32, (2, "num_prices")),  # trades at each price, those of old steps less
        Field("rates", f32, ("num_brackets",)),  # marginal tax rates
        Field("last_coin", f32, ("num_workers",)),  # with that in escrow, after the latest tax day
        Field("last_income", f32, ("num_workers",)),  # of the latest tax period
        Field("last_marginal_rate", f32, ("num_workers",)),  # of that income
        Field("utility", f32, ("num_agents",)),  # of the planner: social welfare
        Field("productivity", f32),  # coin of all workers
        Field("equality", f32),  # 1 - Gini coefficient * workers / (workers - 1)
        Field("terrain", u8, ("height", "width"), shared=True),  # 0 empty, 1 water, 2, 3 source of stone, wood
        Field("source", i32, ("num_sources", 2), shared=True),  # row, column
        Field("start", i32, ("num_workers", 2), shared=True),  # of the worker of that rank: row, column
        Field("ranked_skill", f32, ("num_workers",), shared=True),  # what a house pays it, relative to ``payment``
        Field("bracket_cutoffs", f32, ("num_brackets",), shared=True),  # coin
        Field("schedule", f32, ("num_brackets",), shared=True),  # rates that no planner sets
    )
    derived = ("num_land", "num_rates", "view", "planner_taxes", "welfare_of_equality", "welfare_of_utility")
    derived += ("build_distribution", "gather_distribution")
    takes_turns = True  # the planner acts at the beginning of each tax period
    masks_actions = True
    noop = 0
    num_brackets: ClassVar[int] = len(CUTOFFS)
    render_fps = 10
    preset = MappingProxyType({"num_envs": 32})
    reference_arguments = MappingProxyType(
        {**Env.reference_arguments, "n_agents": "num_workers", "episode_length": "max_steps"}
        | {"rate_max": "tax_limit", "bracket_spacing": ONLY_US_FEDERAL}
    )

    roles = property(lambda self: {"worker": self.num_workers, "planner": 1})
    height = property(lambda self: self.land.terrain.shape[0])
    width = property(lambda self: self.land.terrain.shape[1])
    num_land = property(lambda self: int((self.land.terrain != 1).sum()))
    num_sources = property(lambda self: len(self.land.sources))
    num_prices = property(lambda self: self.max_bid_ask + 1)
    view = property(lambda self: 2 * self.mobile_agent_observation_range + 1)
    planner_taxes = property(lambda self: self.tax_model == "planner")
    welfare_of_equality = property(lambda self: self.planner_reward_type == "coin_eq_times_productivity")
    welfare_of_utility = property(lambda self: self.planner_reward_type == "inv_income_weighted_utility")
    build_distribution = property(lambda self: DISTRIBUTIONS.index(self.build_skill_dist))
    gather_distribution = property(lambda self: DISTRIBUTIONS.index(self.gather_skill_dist))

    @property
    def land(self) -> Land:
        """The map."""
        return land_of(self.grid)

    @property
    def action_space(self) -> Mapping[str, Space[Any]]:
        orders = 4 * self.num_prices  # nothing, build, bids and asks, four moves
        return {"worker": Discrete(6 + orders), "planner": MultiDiscrete([self.num_rates + 1] * self.num_brackets)}

    @property
    def obs_dim(self) -> Mapping[str, int]:
        common = 2 + 4 * self.num_prices + 2 * self.num_prices + self.num_brackets + self.num_workers + 4
        own = 8 + 4 * self.num_prices + 9 * self.view**2
        return {"worker": common + own, "planner": common + 6 * self.num_workers}

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        rates = US_FEDERAL if self.tax_model == "us_federal" else [0.0] * self.num_brackets
        return {
            "terrain": self.land.terrain,
            "source": self.land.sources,
            "start": ranked_starts(self.num_workers, self.height, self.width),
            "ranked_skill": ranked_skills(self.num_workers, self.payment_max_skill_multiplier),
            "bracket_cutoffs": (np.array(CUTOFFS) / self.usd_scaling).astype(np.float32),
            "schedule": np.array(rates, np.float32),
        }

    def validate(self) -> None:
        terrain, corners = self.land.terrain, ranked_starts(self.num_workers, self.height, self.width)
        inside = (corners >= 0).all() and (corners < terrain.shape).all()
        apart = len({*map(tuple, corners.tolist())}) == self.num_workers
        if self.fixed_four_skill_and_loc and not (inside and apart and (terrain[tuple(corners.T)] != 1).all()):
            raise ConfigError(
                f"Economy: {self.num_workers} workers do not start in the corners of a map of {self.height} x {self.width} "
                "cells; expected room for a quarter of them in each, four in a row, and no water there, or "
                "fixed_four_skill_and_loc = False"
            )
        if not self.land.sources.size or self.num_workers > self.num_land:
            raise ConfigError(
                f"Economy: {self.num_workers} workers, {self.num_land} cells of land, {self.num_sources} sources; "
                "expected at least one source, and as many cells as workers"
            )

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        return draw_settlement(state)
