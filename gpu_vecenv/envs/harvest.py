"""Harvest: apples grow back only where others are near, so that players can eat the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gpu_vecenv.declare.env import Field, param, u8
from gpu_vecenv.envs.commons import Commons

LayoutName = Literal["open", "small"]
# "open" is the map of Melting Pot's commons_harvest__open.
LAYOUTS: Mapping[str, str] = MappingProxyType(
    {
        "open": """
            WWWWWWWWWWWWWWWWWWWWWWWW
            WAAA    A      A    AAAW
            WAA    AAA    AAA    AAW
            WA    AAAAA  AAAAA    AW
            W      AAA    AAA      W
            W       A      A       W
            W  A                A  W
            W AAA  Q        Q  AAA W
            WAAAAA            AAAAAW
            W AAA              AAA W
            W  A                A  W
            W                      W
            W                      W
            W                      W
            W  PPPPPPPPPPPPPPPPPP  W
            W PPPPPPPPPPPPPPPPPPPP W
            WPPPPPPPPPPPPPPPPPPPPPPW
            WWWWWWWWWWWWWWWWWWWWWWWW
        """,
        "small": """
            WWWWWWWWWWWWW
            W   A   A   W
            W  AAA AAA  W
            W   A   A   W
            W           W
            W P P P P P W
            W  P P P P  W
            WWWWWWWWWWWWW
        """,
    }
)


@dataclass(frozen=True, kw_only=True)
class Harvest(Commons):
    """Players eat apples, which grow only near others. Rules and defaults of Melting Pot's commons_harvest__open."""

    layout_name: LayoutName = "open"  # the map
    regrowth_radius: int = param(2, low=1, high=8)  # how far away apples count, in a straight line
    regrowth_near_0: float = param(0.0, low=0, high=1)  # probability per step that an apple grows with none around it
    regrowth_near_1: float = param(0.0025, low=0, high=1)  # the same with one apple
    regrowth_near_2: float = param(0.005, low=0, high=1)  # with two
    regrowth_near_3: float = param(0.025, low=0, high=1)  # with three or more

    state = (
        *Commons.state,
        Field("near", u8, ("height", "width")),  # apples around a bare place, a step ago; 255: none grows in this step
    )
    layouts = LAYOUTS
