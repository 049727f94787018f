"""Society: what workers own and trade, how they are taxed, and what that is worth. The base of economy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.spaces import MultiDiscrete

from gpu_vecenv.declare.env import Env, Field, FixedArgument, f32, i32, param, u8

US_FEDERAL = 0.1, 0.12, 0.22, 0.24, 0.32, 0.35, 0.37  # marginal rates of single filers in 2018
CUTOFFS = 0, 9700, 39475, 84200, 160725, 204100, 510300  # where their brackets begin, US dollars
ONLY_US_FEDERAL = FixedArgument("us-federal", "the brackets are those of the US federal income tax")

# Of the AI Economist's tutorials/rllib/phase2/config.yaml, of its workers, without convolutions and LSTM.
RUN = {"num_envs": 30, "total_steps": 50_000_000, "num_steps": 200, "num_epochs": 1, "num_minibatches": 4}
LEARNING = {
    "learning_rate": 3e-4,
    "final_learning_rate": None,
    "gamma": 0.998,
    "gae_lambda": 0.98,
    "entropy_coefficient": 0.025,
    "clip": 0.3,
}
NETWORK = {"hidden_sizes": (128, 128), "shared_trunk": False, "max_grad_norm": 10.0, "value_coefficient": 0.05}


@dataclass(frozen=True, kw_only=True)
class Society(Env):
    """Workers with coin, a double auction of two resources, taxes by period and bracket, and a planner.

    The rules and defaults are those of ai-economist 1.7.1, where the resources are stone and wood. The device code is
    in ``cuda/games/double_auction.cuh`` and ``taxation.cuh``.
    """

    num_workers: int = param(4, low=2, high=255)  # all agents but the planner
    starting_agent_coin: float = param(0.0, low=0)  # coin that a worker starts with
    max_bid_ask: int = param(10, low=1, high=254)  # the highest price
    max_num_orders: int = param(5, low=1, high=255)  # a worker's open bids and asks for one resource
    order_duration: int = param(50, low=1, high=254)  # steps for which an order stays open
    order_labor: float = param(0.25, low=0)  # labor of a bid or an ask
    tax_model: Literal["planner", "free_market", "us_federal", "saez"] = "planner"  # who sets the marginal rates
    period: int = param(100, low=1)  # steps from one tax day to the next
    num_rates: int = param(21, low=2, high=1001)  # that the planner chooses from, evenly spaced from 0 to 1
    tax_limit: float = param(1.0, low=0, high=1)  # the highest rate that is allowed
    usd_scaling: float = param(1000.0, low=1e-6)  # US dollars for a coin
    saez_buffer_size: int = param(500, low=1, high=2**20)  # latest incomes that Saez's formula is applied to
    saez_fixed_elas: float | None = param(None, low=0)  # elasticity of income in it; None: estimated from these incomes
    pareto_weight_type: Literal["inverse_income", "uniform"] = "inverse_income"  # social welfare weights in it
    isoelastic_eta: float = param(0.23, low=0, high=1)  # how fast the utility of coin diminishes
    energy_cost: float = param(0.21, low=0)  # of a unit of labor, in utility
    # social welfare, whose increase is the planner's reward
    planner_reward_type: Literal[
        "coin_eq_times_productivity", "inv_income_weighted_coin_endowments", "inv_income_weighted_utility"
    ] = "coin_eq_times_productivity"
    mixing_weight_gini_vs_coin: float = param(0.0, low=0, high=1)  # of productivity alone, in the first of these

    state: ClassVar[tuple[Field, ...]] = (
        Field("inventory", i32, ("num_workers", 2)),  # stone, wood
        Field("coin", f32, ("num_workers",)),  # without that in escrow
        Field("labor", f32, ("num_workers",)),  # in this episode
        Field("orders", u8, ("num_workers", 2, "max_num_orders", 3)),  # for stone, wood: 1 bid, 2 ask; price; steps
        Field("price_history", f32, (2, "num_prices")),  # trades at each price, those of old steps less
        Field("rates", f32, ("num_brackets",)),  # marginal tax rates
        Field("last_coin", f32, ("num_workers",)),  # with that in escrow, after the latest tax day
        Field("last_income", f32, ("num_workers",)),  # of the latest tax period
        Field("last_marginal_rate", f32, ("num_workers",)),  # of that income
        Field("utility", f32, ("num_agents",)),  # of the planner: social welfare
        Field("productivity", f32),  # coin of all workers
        Field("equality", f32),  # 1 - Gini coefficient * workers / (workers - 1)
        Field("bracket_cutoffs", f32, ("num_brackets",), shared=True),  # coin
        Field("schedule", f32, ("num_brackets",), shared=True),  # rates that no planner sets
    )
    saez_state: ClassVar[tuple[Field, ...]] = (  # with tax_model="saez"; kept from episode to episode
        Field(
            "saez_buffer", f32, ("saez_buffer_size", 2), when="saez_taxes"
        ),  # income, marginal rate: the latest ones, as a ring
        Field("saez_count", i32, when="saez_taxes"),  # of them; once it is full between its size and twice that
        Field("elasticity", f32, when="saez_taxes"),  # of income with respect to 1 - marginal rate, estimated
        Field("average_rates", f32, ("num_brackets",), when="saez_taxes"),  # of Saez's formula
    )
    derived: ClassVar[tuple[str, ...]] = (
        *("num_rates", "planner_taxes", "saez_taxes", "fixed_elasticity", "uniform_weights"),
        *("welfare_of_equality", "welfare_of_utility"),
    )
    takes_turns = True  # the planner acts in the first step of each tax period
    masks_actions = True
    noop = 0
    state_metrics = ("productivity", "equality")
    preset = MappingProxyType({**RUN, **LEARNING, **NETWORK})
    num_brackets: ClassVar[int] = len(CUTOFFS)
    reference_arguments = MappingProxyType(
        {**Env.reference_arguments, "n_agents": "num_workers", "episode_length": "max_steps"}
        | {"rate_max": "tax_limit", "bracket_spacing": ONLY_US_FEDERAL}
    )

    roles = property(lambda self: {"worker": self.num_workers, "planner": 1})
    num_prices = property(lambda self: self.max_bid_ask + 1)
    planner_taxes = property(lambda self: self.tax_model == "planner")
    saez_taxes = property(lambda self: self.tax_model == "saez")
    fixed_elasticity = property(lambda self: -1.0 if self.saez_fixed_elas is None else self.saez_fixed_elas)
    uniform_weights = property(lambda self: self.pareto_weight_type == "uniform")
    welfare_of_equality = property(lambda self: self.planner_reward_type == "coin_eq_times_productivity")
    welfare_of_utility = property(lambda self: self.planner_reward_type == "inv_income_weighted_utility")

    @property
    def num_orders(self) -> int:
        """A worker's choices: bids and asks for stone, then for wood, at each price."""
        return 4 * (self.max_bid_ask + 1)

    @property
    def planner_space(self) -> MultiDiscrete:
        """Of each bracket: leave the rate as it is, or one of ``num_rates``."""
        return MultiDiscrete([self.num_rates + 1] * self.num_brackets)

    @property
    def num_observed(self) -> int:
        """Numbers that workers and planner observe: market and taxes, without what a worker has to itself."""
        return self.num_orders + self.num_orders // 2 + self.num_brackets + self.num_workers + 6

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        rates = US_FEDERAL if self.tax_model == "us_federal" else (0.0,) * self.num_brackets
        cutoffs = np.array(CUTOFFS) / self.usd_scaling
        return {"bracket_cutoffs": cutoffs.astype(np.float32), "schedule": np.array(rates, np.float32)}
