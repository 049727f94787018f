"""Cleanup: apples grow only while players clean the river, from where none of them can be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from gpu_vecenv.declare.drawing import Circle, Line, Shape
from gpu_vecenv.declare.env import Field, i32, param, u8
from gpu_vecenv.envs.commons import CHANNELS, RIVER, Commons, square
from gpu_vecenv.errors import ConfigError

LayoutName = Literal["clean_up", "small"]
# "clean_up" is the map of Melting Pot's clean_up.
LAYOUTS: Mapping[str, str] = MappingProxyType(
    {
        "clean_up": """
            WWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
            WHFFFHFFHFHFHFHFHFHFHHFHFFFHFW
            WHFHFHFFHFHFHFHFHFHFHHFHFFFHFW
            WHFFHFFHHFHFHFHFHFHFHHFHFFFHFW
            WHFHFHFFHFHFHFHFHFHFHHFHFFFHFW
            WHFFFFFFHFHFHFHFHFHFHHFHFFFHFW
            W               RFHHHHHH     W
            W   P    P          RRR      W
            W     P     P   P   RR   P   W
            W             P   P RR       W
            W   P    P          RR    P  W
            W               P   RR P     W
            W     P           P RR       W
            W           P       RR  P    W
            W  P             P  RR       W
            W A A A A A A A A A RR  A A AW
            WAAAAAAAAAAAAAAAAAAA  AAAAAAAW
            WAAAAAAAAAAAAAAAAAAAAAAAAAAAAW
            WAAAAAAAAAAAAAAAAAAAAAAAAAAAAW
            WAAAAAAAAAAAAAAAAAAAAAAAAAAAAW
            WWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
        """,
        "small": """
            WWWWWWWWWWWWW
            WFFHFHFHFHFFW
            WHFHFFHFFHFHW
            W     RR    W
            W P P RR P PW
            W  P  RR  P W
            W P   RR   PW
            WAAAA    AAAW
            WAAAAAAAAAAAW
            WWWWWWWWWWWWW
        """,
    }
)
WATER_COLOUR, DIRT_COLOUR = (92, 164, 204), (120, 132, 58)


@dataclass(frozen=True, kw_only=True)
class Cleanup(Commons):
    """Players clean a river, so that apples grow, which all can eat. Rules and defaults of Melting Pot's clean_up."""

    layout_name: LayoutName = "clean_up"  # the map
    zap_cooldown: int = param(10, low=1, high=10_000)  # steps after a zap in which a player cannot zap
    zapped_steps: int = param(50, low=0, high=10_000)  # steps that a hit player misses before that of its return
    clean_cooldown: int = param(2, low=0, high=10_000)  # steps after cleaning in which a player cannot clean
    max_apple_growth_rate: float = param(0.05, low=0, high=1)  # probability per step that an apple grows, at most
    threshold_depletion: float = param(0.4, low=0, high=1)  # share of the river that is dirty from which none grows
    threshold_restoration: float = param(0.0, low=0, high=1)  # share down to which the probability rises
    dirt_spawn_probability: float = param(0.5, low=0, high=1)  # per step, that another cell of the river gets dirty
    dirt_spawn_delay: int = param(50, low=0)  # steps at the start in which none does

    state = (
        *Commons.state,
        Field("clean_wait", i32, ("num_agents",)),  # steps until the player can clean
        Field("cleaned", i32, ("num_agents",)),  # cells that the player has cleaned in this episode
        Field("dirt", u8, ("height", "width")),  # 1: dirty
        Field("river", i32, ("num_river_cells", 2), shared=True),  # cells that can be dirty
    )
    tiles = " WARHF"  # F is dirty at the start
    num_actions = 9  # the last one cleans
    num_channels = CHANNELS + 3
    layouts = LAYOUTS
    num_river_cells = property(lambda self: len(self.ground.river))

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {**super().arrays(), "river": self.ground.river}

    def validate(self) -> None:
        super().validate()
        if not len(self.ground.river):
            raise ConfigError("Cleanup.grid has no H and no F, cells of the river that can be dirty; expected one")
        if self.threshold_restoration >= self.threshold_depletion:
            raise ConfigError(
                f"Cleanup.threshold_restoration is {self.threshold_restoration}; expected less than "
                f"threshold_depletion, {self.threshold_depletion}"
            )

    def draw_cell(
        self, state: Mapping[str, np.ndarray[Any, Any]], row: int, column: int, x: float, y: float
    ) -> Iterator[Shape]:
        if state["terrain"][row, column] < RIVER:
            yield from super().draw_cell(state, row, column, x, y)
            return
        yield square(x, y, 0.5, 0.5, WATER_COLOUR)
        if state["dirt"][row, column]:
            for dx, dy, radius in ((-0.18, 0.1, 0.24), (0.16, -0.12, 0.26), (0.2, 0.24, 0.13)):
                yield Circle(x + dx, y + dy, radius, DIRT_COLOUR)
        else:
            yield Line([(x - 0.25, y), (x - 0.08, y + 0.1), (x + 0.08, y), (x + 0.25, y + 0.1)], 0.05, (170, 214, 236))
