"""pursuit: pursuers surround evaders that walk at random around a building. PettingZoo's SISL game."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLUE, GOLD, PALE, RED, WHITE, Circle, Colour, Drawing, Line, Polygon, blend
from gpu_vecenv.declare.env import Env, Field, FixedArgument, boolean, i32, param, u8

BUILDING = (0.3, 0.2)  # shares of the map, by x and by y, that are open on each side of the building
FLOOR, DARK = (246, 246, 246), (86, 86, 86)  # colours


@dataclass(frozen=True, kw_only=True)
class Pursuit(Env):
    """Pursuers surround evaders on a grid. Rules and defaults of PettingZoo's pursuit_v5, those of pursuit_v4."""

    num_pursuers: int = param(8, low=1, high=255)  # agents
    num_evaders: int = param(30, low=1, high=255)  # which no agent controls
    x_size: int = param(16, low=2, high=1024)  # columns of the map
    y_size: int = param(16, low=2, high=1024)  # rows of the map
    max_steps: int = param(500, low=1)  # steps until the episode is truncated
    obs_range: int = param(7, low=1, high=255)  # rows and columns that a pursuer sees, itself in the middle
    surround: bool = True  # an evader is caught when all cells beside it are taken; False: by those on its own cell
    n_catch: int = param(2, low=1)  # with surround=False: pursuers on an evader's cell that catch it
    freeze_evaders: bool = False  # True: evaders stay where they are
    shared_reward: bool = True  # True: all pursuers have the mean of their rewards
    tag_reward: float = 0.01  # for each evader beside a pursuer
    catch_reward: float = 5.0  # to each pursuer that takes part in catching an evader
    urgency_reward: float = -0.1  # to every pursuer in each step
    constraint_window: float = param(1.0, low=0, high=1)  # share of the map's width and height in which all start

    state = (
        Field("pursuer_position", i32, ("num_pursuers", 2)),  # x, y; row 0 is the upper one
        Field("evader_position", i32, ("num_evaders", 2)),  # of one that was caught, where that was
        Field("caught", boolean, ("num_evaders",)),  # evaders that are gone
        Field("pursuers", u8, ("y_size", "x_size")),  # how many are in each cell, for a central critic
        Field("evaders", u8, ("y_size", "x_size")),  # likewise
        Field("wall", u8, ("y_size", "x_size"), shared=True),  # 1: the building
    )
    critic_state = ("pursuers", "evaders")
    state_metrics = ("caught",)
    action_space = Discrete(5)  # x - 1, x + 1, y + 1, y - 1, stay
    noop = 4
    termination_label = "every evader was caught"
    render_fps = 10
    # Of short runs on a CPU: small minibatches, and actor and critic on one trunk, learn in the fewest env-steps.
    preset = MappingProxyType(
        {
            "num_envs": 128,
            "total_steps": 5_000_000,
            "num_steps": 64,
            "num_minibatches": 64,
            "learning_rate": 5e-4,
            "final_entropy_coefficient": 0.0,
            "hidden_sizes": (128, 128),
            "normalize_returns": True,
        }
    )
    reference_arguments = MappingProxyType(
        {
            **Env.reference_arguments,
            "n_pursuers": "num_pursuers",
            "n_evaders": "num_evaders",
            **{
                f"{side}_controller": FixedArgument(None, "evaders walk at random, agents control the pursuers")
                for side in ("evader", "pursuer")
            },
        }
    )
    version = 5

    @property
    def roles(self) -> Mapping[str, int]:
        return {"pursuer": self.num_pursuers}

    @property
    def observation_space(self) -> Box:
        most = max(self.num_pursuers, self.num_evaders)
        return Box(0, most, (self.obs_range, self.obs_range, 3), np.float32)  # walls, pursuers, evaders

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        across, along = (
            np.array([margin < k / size < 1.0 - margin for k in range(size)])
            for size, margin in zip((self.x_size, self.y_size), BUILDING, strict=True)
        )
        return {"wall": np.outer(along, across).astype(np.uint8)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        width, height, wall = self.x_size, self.y_size, state["wall"]
        reach, seen = (self.obs_range - 1) // 2, np.zeros(wall.shape, int)
        for x, y in state["pursuer_position"]:  # how many pursuers see each cell
            seen[max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1] += 1
        shades = np.where(wall > 0, -1, np.minimum(seen, 4))
        shapes: list[Circle | Line | Polygon] = [_box(0, 0, width, height, WHITE)]
        floor, building = list[Polygon](), list[Polygon]()
        for row, column, end in _runs(shades):
            colour = DARK if (shade := int(shades[row, column])) < 0 else blend(FLOOR, GOLD, 0.12 * shade)
            part = _box(column, height - row - 1, end, height - row, colour)
            (building if shade < 0 else floor).append(part)
        ends = [((k, 0), (k, height)) for k in range(1, width)] + [((0, k), (width, k)) for k in range(1, height)]
        lines = ends if max(width, height) <= 64 else []  # more would hide the agents
        shapes += [*floor, *(Line(pair, 0.03, WHITE) for pair in lines), *building]
        there = np.flatnonzero(~state["caught"])
        places = _spread(np.concatenate([state["pursuer_position"], state["evader_position"][there]]), height)
        for x, y in places[self.num_pursuers :]:
            shapes += [Circle(x, y, 0.27, blend(BLUE, DARK, 0.4)), Circle(x, y, 0.22, BLUE)]
        for i, (x, y) in enumerate(places[: self.num_pursuers]):
            shapes += [Circle(x, y, 0.4, blend(RED, DARK, 0.5)), Circle(x, y, 0.34, RED, i), Circle(x, y, 0.13, WHITE)]
        # A tally below the map: evaders that are left, then those that were caught.
        pitch = width / max(self.num_evaders, width)
        for k in range(self.num_evaders):
            shapes.append(Circle((k + 0.5) * pitch, -0.8, 0.27 * pitch, BLUE if k < len(there) else PALE))
        return Drawing((-0.3, width + 0.3, -1.3, height + 0.3), shapes)


def _box(left: float, bottom: float, right: float, top: float, colour: Colour) -> Polygon:
    return Polygon([(left, bottom), (right, bottom), (right, top), (left, top)], colour)


def _runs(shades: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, int]]:
    """Row, first column and end of each run of equal shades."""
    for row, line in enumerate(shades):
        edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        yield from ((row, start, end) for start, end in itertools.pairwise(edges))


def _spread(positions: np.ndarray[Any, Any], height: int) -> list[tuple[float, float]]:
    """Where to draw those in these cells: several in one cell around its centre."""
    cells = [tuple(cell) for cell in positions.tolist()]
    found, before = [], dict[Any, int]()
    for x, y in cells:
        count = cells.count((x, y))
        k = before[x, y] = before.get((x, y), -1) + 1
        angle, away = 2 * np.pi * (k / count + 1 / 8), 0.24 if count > 1 else 0.0
        found.append((x + 0.5 + away * np.cos(angle), height - y - 0.5 + away * np.sin(angle)))
    return found
