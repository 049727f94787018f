"""Warehouse: robots carry requested shelves to goals and put them back. RWARE's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.env import Env, Field, FixedArgument, boolean, i32, param, u8
from gpu_vecenv.envs.shelves import SIZES, Floor, SizeName, draw_floor, floor_of, layout_text
from gpu_vecenv.errors import ConfigError

REQUESTS = {"easy": 2.0, "normal": 1.0, "hard": 0.5}  # requested shelves for each agent
NO_MESSAGES = FixedArgument(0, "agents send no messages")
# Network, entropy bonus and gradient norm of EPyMARL's src/config/algs/ippo.yaml and default.yaml, without the GRU. Its
# targets are sums of 5 rewards, as far as advantages with this gae_lambda look ahead on average; it standardises
# rewards, and leaves advantages as they are. Sizes and rate are of sweeps: docs/results/warehouse-sweep.json.
RUN = {"num_envs": 64, "total_steps": 10_000_000, "num_steps": 128, "num_minibatches": 16, "num_epochs": 2}
LEARNING = {"learning_rate": 5e-4, "final_learning_rate": None, "gae_lambda": 0.8, "entropy_coefficient": 0.001}
SCALES = {"max_grad_norm": 10.0, "normalize_returns": True, "normalize_advantages": False}
NETWORK = {"hidden_sizes": (128, 128), "activation": "relu", "shared_trunk": False, "agent_ids": True}


@dataclass(frozen=True, kw_only=True)
class Warehouse(Env):
    """Robots bring requested shelves to workstations. Rules and defaults of RWARE 2.0.0's rware-tiny-2ag-v2.

    Observations are the flattened ones.
    """

    num_agents: int = param(2, low=1)  # robots
    size: SizeName = "tiny"  # of the warehouse: rows and columns of groups of shelves
    difficulty: Literal["easy", "normal", "hard"] = "normal"  # requested shelves for each agent: 2, 1, 0.5
    request_queue_size: int | None = param(None, low=1)  # requested shelves at any time, in place of difficulty
    shelf_rows: int | None = param(None, low=1)  # groups of shelves below each other, in place of the size's
    shelf_columns: int | None = param(None, low=1)  # groups of shelves beside each other, odd, in place of the size's
    column_height: int = param(8, low=1)  # shelves below each other in a group
    grid: str | None = None  # rows of a warehouse of one's own, which takes the place of all sizes
    reward_type: Literal["individual", "global", "two_stage"] = "individual"  # who is rewarded for what
    max_steps: int = param(500, low=1)  # steps until the episode is truncated
    max_inactivity_steps: int = param(0, low=0)  # steps without a delivery that terminate the episode; 0: none do
    sensor_range: int = param(1, low=1, high=100)  # cells to each side that an agent sees
    normalised_coordinates: bool = False  # True: an agent's own place is in [0, 1]

    state = (
        Field("position", i32, ("num_agents", 2)),  # column, row; row 0 is the upper one
        Field("direction", i32, ("num_agents",)),  # 0 up, 1 down, 2 left, 3 right
        Field("carrying", boolean, ("num_agents",)),  # the shelf of the cell
        Field("has_delivered", boolean, ("num_agents",)),  # the shelf that it carries; with reward_type "two_stage"
        Field("shelf", u8, ("height", "width")),  # 0 none, 1 a shelf, 2 one that is requested; also those carried
        Field("inactive_steps", i32),  # since the last delivery
        Field("deliveries", i32),  # in this episode
        Field("floor", u8, ("height", "width"), shared=True),  # 0 corridor, 1 storage, 2 goal
        Field("goal", i32, ("num_goals", 2), shared=True),  # column, row
    )
    derived = ("num_shelves", "num_requests", "sensors", "is_global", "is_two_stage")
    action_space = Discrete(5)  # noop, forward, left, right, toggle load
    noop = 0
    termination_label = "nothing was delivered for too long"
    render_fps = 8
    preset = MappingProxyType({**RUN, **LEARNING, **SCALES, **NETWORK})
    reference_arguments = MappingProxyType(
        {**Env.reference_arguments, "n_agents": "num_agents", "layout": "grid", "msg_bits": NO_MESSAGES}
    )

    @property
    def plan(self) -> Floor:
        """The map."""
        rows, columns = SIZES[self.size]
        text = self.grid or layout_text(self.shelf_rows or rows, self.shelf_columns or columns, self.column_height)
        return floor_of(text)

    roles = property(lambda self: {"robot": self.num_agents})
    height = property(lambda self: self.plan.tiles.shape[0])
    width = property(lambda self: self.plan.tiles.shape[1])
    num_goals = property(lambda self: len(self.plan.goals))
    num_shelves = property(lambda self: self.plan.num_shelves)
    num_requests = property(lambda self: self.request_queue_size or int(self.num_agents * REQUESTS[self.difficulty]))
    sensors = property(lambda self: 2 * self.sensor_range + 1)  # in a row
    is_global = property(lambda self: self.reward_type == "global")
    is_two_stage = property(lambda self: self.reward_type == "two_stage")

    @property
    def observation_space(self) -> Box:
        high = np.ones(8 + 7 * self.sensors**2, np.float32)
        if not self.normalised_coordinates:
            high[:2] = self.width - 1, self.height - 1
        return Box(np.zeros_like(high), high)

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"floor": self.plan.tiles, "goal": self.plan.goals}

    def validate(self) -> None:
        if self.shelf_columns is not None and self.shelf_columns % 2 == 0:
            raise ConfigError(f"Warehouse.shelf_columns is {self.shelf_columns}; expected an odd number")
        cells, shelves = self.plan.tiles.size, self.num_shelves
        for what, count, most in (("robots", self.num_agents, cells), ("requests", self.num_requests, shelves - 1)):
            if not 1 <= count <= most:
                sizes = f"{cells} cells and {shelves} shelves"
                raise ConfigError(f"Warehouse: {count} {what} with {sizes}; expected 1 … {most}")

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        return draw_floor(state)
