"""Overcooked: two players cook onion soups in a small kitchen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.env import Env, Field, f32, i32, param, u8
from gpu_vecenv.envs.kitchen import LAYOUTS, Kitchen, LayoutName, draw_kitchen, kitchen_of


@dataclass(frozen=True, kw_only=True)
class Overcooked(Env):
    """Two players put onions into pots, wait for the soup, and serve it in dishes: overcooked_ai's old dynamics."""

    layout_name: LayoutName = "cramped_room"  # the kitchen
    grid: str | None = None  # rows of a kitchen of one's own, which takes the place of layout_name
    max_steps: int = param(400, low=1)  # steps until the episode is truncated
    cook_time: int = param(20, low=1, high=255)  # steps from the third onion to the soup
    delivery_reward: float = 20.0  # to both players for each soup that one of them serves
    placement_in_pot_reward: float = 3.0  # shaped, to a player that puts an onion into a pot
    dish_pickup_reward: float = 3.0  # shaped, to a player that takes a dish that is needed
    soup_pickup_reward: float = 5.0  # shaped, to a player that fills a dish with soup
    shaping: float = param(1.0, low=0)  # weight of the shaped rewards, until shaping_weight is changed
    random_start_positions: bool = False  # True: players start on any two cells of the floor
    random_object_probability: float = param(0.0, low=0, high=1)  # that a pot or a player has something at the start

    state = (
        Field("position", i32, ("num_agents", 2)),  # column, row; row 0 is the upper one
        Field("orientation", i32, ("num_agents",)),  # 0 north (up), 1 south, 2 east, 3 west
        Field("held", i32, ("num_agents",)),  # 0 nothing, 1 an onion, 2 a dish, 3 a soup
        Field("item", u8, ("height", "width")),  # on a counter as held; in a pot the number of onions
        Field("cooking_tick", u8, ("height", "width")),  # steps that the soup of a pot has cooked
        Field("sparse_return", f32),  # rewards for deliveries in this episode, without the shaped ones
        Field(
            "terrain", u8, ("height", "width"), shared=True
        ),  # 0 floor, 1 counter, 2 pot, 3 onions, 4 dishes, 5 serving
        Field("start", i32, ("num_agents", 2), shared=True),  # positions at the start
        Field("shaping_weight", f32, shared=True),  # weight of the shaped rewards
    )
    derived = ("num_channels", "num_floor")
    roles = MappingProxyType({"player": 2})
    action_space = Discrete(6)  # north, south, east, west, stay, interact
    num_channels = 26
    obs_staging_bytes = 48 << 10
    state_metrics = ("sparse_return",)
    noop = 4
    render_fps = 6
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 5_000_000,
            "num_steps": 64,
            "num_minibatches": 16,
            "activation": "relu",
            "learning_rate": 1e-3,
        }
    )
    # The shaped rewards fade within 2.5 million of the preset's steps.
    preset_schedules = MappingProxyType({"shared": MappingProxyType({"shaping_weight": ((0, 1.0), (0.5, 0.0))})})
    reference_arguments = MappingProxyType({**Env.reference_arguments, "horizon": "max_steps"})

    @property
    def kitchen(self) -> Kitchen:
        """The map."""
        return kitchen_of(self.grid or LAYOUTS[self.layout_name])

    @property
    def height(self) -> int:
        """Rows of the kitchen."""
        return len(self.kitchen.terrain)

    @property
    def width(self) -> int:
        """Columns of the kitchen."""
        return len(self.kitchen.terrain[0])

    @property
    def num_floor(self) -> int:
        """Cells of the floor."""
        return self.kitchen.num_floor

    @property
    def observation_space(self) -> Box:
        high = np.ones((self.height, self.width, self.num_channels), np.float32)
        high[..., 16:20], high[..., 20] = 3, self.cook_time  # onions, tomatoes; steps
        return Box(np.zeros_like(high), high)

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        weight = np.asarray(self.shaping, np.float32)
        return {"terrain": self.kitchen.terrain, "start": self.kitchen.start, "shaping_weight": weight}

    def validate(self) -> None:
        kitchen_of(self.grid or LAYOUTS[self.layout_name])  # raises

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        return draw_kitchen(state, self.cook_time)
