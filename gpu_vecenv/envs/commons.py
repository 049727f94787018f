"""Base of the games of a commons: maps, parameters, state, pictures. Their device code shares commons.cuh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.drawing import BLACK, IDENTITIES, WHITE, Circle, Colour, Drawing, Line, Polygon, Shape, blend
from gpu_vecenv.declare.env import Env, Field, i32, param, u8
from gpu_vecenv.declare.text_layout import parse_text_layout
from gpu_vecenv.errors import ConfigError

WALL, ORCHARD, RIVER = 1, 2, 3  # of a terrain; 0 is floor; from RIVER + 1 on it can be dirty
SPAWN_TILES = "PQ"  # where players appear; as many as there are Q start there, and never come back there
CHANNELS = 9  # of an observation, but for those of one game
AHEAD = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)], float)  # north, east, south, west; y upwards


class Ground(NamedTuple):
    """A map as arrays."""

    terrain: npt.NDArray[np.uint8]  # (height, width)
    spawn: npt.NDArray[np.int32]  # (num_spawns, 2): column and row; first those where the first players start
    num_first_spawns: int
    river: npt.NDArray[np.int32]  # (num_river_cells, 2): column and row of cells that can be dirty


@lru_cache(maxsize=64)
def ground_of(what: str, text: str, tiles: str) -> Ground:
    """The arrays of a map, which are not to be written to.

    Args:
        what: Whose text it is, for errors.
        text: Rows of characters.
        tiles: The characters of terrain, by number; besides there are ``SPAWN_TILES``.

    Raises:
        ConfigError: It is no rectangle, has an unknown character, no place for apples, or a gap in its border.
    """
    cells = parse_text_layout(what, text, tiles + SPAWN_TILES)
    terrain = np.where(cells >= len(tiles), np.uint8(0), cells)
    inside = np.zeros(terrain.shape, bool)
    inside[1:-1, 1:-1] = True
    if gaps := np.argwhere((terrain != WALL) & ~inside).tolist():
        raise ConfigError(
            f"{what}: row {gaps[0][0]}, column {gaps[0][1]}, on its border, is no W; expected W all around"
        )
    if not (terrain == ORCHARD).any():
        raise ConfigError(f"{what} has no A, a place where apples grow; expected at least one")
    always, first = (np.argwhere(cells == len(tiles) + k)[:, ::-1] for k in (0, 1))
    spawn = np.concatenate([first, always]).astype(np.int32)
    river = np.argwhere(terrain > RIVER)[:, ::-1].astype(np.int32)
    for array in (terrain, spawn, river):
        array.flags.writeable = False
    return Ground(terrain, spawn, len(first), river)


@dataclass(frozen=True, kw_only=True)
class Commons(Env):
    """Players on a grid eat apples and zap each other out. Abstract: a subclass has maps, and says what grows when."""

    grid: str | None = None  # rows of a map of one's own, which takes the place of layout_name
    num_agents: int = param(7, low=1, high=4096)  # players
    max_steps: int = param(1000, low=1)  # steps until the episode is truncated
    apple_reward: float = 1.0  # to a player for each apple that it eats
    zap_reward: float = 0.0  # to a player for each other one that its beam hits
    zapped_penalty: float = 0.0  # subtracted from a player for each beam that hits it
    common_reward: Literal["none", "mean", "sum"] = "none"  # what each player receives in place of its own reward
    zap_cooldown: int = param(2, low=1, high=10_000)  # steps after a zap in which a player cannot zap
    zapped_steps: int = param(4, low=0, high=10_000)  # steps that a hit player misses before that of its return
    beam_length: int = param(3, low=1, high=64)  # cells ahead that a beam reaches
    beam_radius: int = param(1, low=0, high=64)  # cells to either side
    view_ahead: int = param(9, low=0, high=64)  # rows that a player sees in front of itself
    view_behind: int = param(1, low=0, high=64)  # rows behind it
    view_side: int = param(5, low=0, high=64)  # columns to either side

    state: ClassVar[tuple[Field, ...]] = (
        Field("position", i32, ("num_agents", 2)),  # column, row; row 0 is the upper one
        Field("orientation", i32, ("num_agents",)),  # 0 north (up), 1 east, 2 south, 3 west
        Field("zap_wait", i32, ("num_agents",)),  # steps until the player can zap
        Field("respawn_in", i32, ("num_agents",)),  # steps until the player is back; 0: it is not out
        Field("eaten", i32, ("num_agents",)),  # apples in this episode
        Field("eaten_at", i32, ("num_agents",)),  # sum of the steps at which the player ate them, the first being 1
        Field("steps_out", i32, ("num_agents",)),  # steps of this episode that the player has missed
        Field("apple", u8, ("height", "width")),  # 1: there is one
        Field("beam", u8, ("height", "width")),  # of the last step; bit 0: for zapping, bit 1: for cleaning
        Field("terrain", u8, ("height", "width"), shared=True),  # 0 floor, 1 wall, 2 with apples, 3 … the river
        Field("spawn", i32, ("num_spawns", 2), shared=True),  # where players appear, Q of the map first
    )
    derived = ("num_first_spawns", "num_channels", "common_weight")
    takes_turns = True  # those that are out do not act
    noop = 0
    render_fps = 8
    # Of SocialJax's IPPO with a CNN, with rollouts of 128 steps in place of 1000, and minibatches of the same size.
    preset = MappingProxyType(
        {
            "network": "cnn",
            "num_envs": 256,
            "total_steps": 100_000_000,
            "num_steps": 128,
            "num_epochs": 2,
            "num_minibatches": 64,
            "activation": "relu",
            "learning_rate": 5e-4,
        }
    )
    tiles: ClassVar[str] = " WA"  # characters of the terrain, by number
    layouts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    num_actions: ClassVar[int] = 8  # nothing, forward, backward, left, right, turn left, turn right, zap
    num_channels: ClassVar[int] = CHANNELS

    @property
    def ground(self) -> Ground:
        """The map."""
        text = self.grid or self.layouts[getattr(self, "layout_name")]  # noqa: B009
        return ground_of(f"{type(self).__name__}.grid", text, self.tiles)

    height = property(lambda self: self.ground.terrain.shape[0])
    width = property(lambda self: self.ground.terrain.shape[1])
    num_spawns = property(lambda self: len(self.ground.spawn))
    num_first_spawns = property(lambda self: self.ground.num_first_spawns)
    common_weight = property(lambda self: {"none": 0.0, "mean": 1 / self.num_agents, "sum": 1.0}[self.common_reward])

    @property
    def roles(self) -> Mapping[str, int]:
        return {"player": self.num_agents}

    @property
    def observation_space(self) -> Box:
        shape = (self.view_ahead + 1 + self.view_behind, 2 * self.view_side + 1, self.num_channels)
        return Box(0, 255, shape, np.uint8)

    @property
    def obs_dtype(self) -> np.dtype[Any]:
        return u8

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.num_actions)

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"terrain": self.ground.terrain, "spawn": self.ground.spawn}

    def validate(self) -> None:
        ground = self.ground  # raises
        always = len(ground.spawn) - ground.num_first_spawns
        if always < self.num_agents:
            raise ConfigError(
                f"{type(self).__name__}.grid has {always} P, places where players come back; expected at least "
                f"num_agents = {self.num_agents}"
            )

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        height, width = self.height, self.width
        shapes: list[Shape] = [square(width / 2, height / 2, width / 2, height / 2, FLOOR_COLOUR)]
        for row, column in np.argwhere(state["terrain"] > 0).tolist():
            shapes += self.draw_cell(state, row, column, column + 0.5, height - row - 0.5)
        for row, column in np.argwhere(state["beam"] > 0).tolist():
            colour = BEAM_COLOURS[int(state["beam"][row, column]) - 1]
            shapes.append(square(column + 0.5, height - row - 0.5, 0.42, 0.42, colour))
        for row, column in np.argwhere(state["apple"] > 0).tolist():
            shapes += _apple(column + 0.5, height - row - 0.5)
        most = max(10, int(state["eaten"].max()))
        for i in range(self.num_agents):
            colour = IDENTITIES[i % len(IDENTITIES)]
            out = state["respawn_in"][i] > 0
            if not out:
                shapes += _player(state, i, height, colour)
            # Below the map a bar for each player: apples that it has eaten, pale while it is out.
            y = -(i + 0.8) * STRIP / self.num_agents
            shown = blend(colour, WHITE, 0.7) if out else colour
            thick = min(0.5, 0.7 * STRIP / self.num_agents)
            shapes.append(Circle(0.5, y, thick / 2, shown, i if out else None))
            if eaten := int(state["eaten"][i]):
                shapes.append(Line([(1.2, y), (1.2 + (width - 1.6) * eaten / most, y)], 0.6 * thick, shown))
        margin = 0.02 * max(width, height)
        return Drawing((-margin, width + margin, -STRIP - margin, height + margin), shapes)

    def draw_cell(
        self, state: Mapping[str, np.ndarray[Any, Any]], row: int, column: int, x: float, y: float
    ) -> Iterator[Shape]:
        """A cell that is not floor, around (x, y)."""
        if state["terrain"][row, column] == WALL:
            yield square(x, y, 0.5, 0.5, WALL_COLOUR)
            yield square(x, y + 0.06, 0.46, 0.38, blend(WALL_COLOUR, WHITE, 0.25))
        else:
            yield square(x, y, 0.5, 0.5, ORCHARD_COLOUR)
            for dx in (-0.22, 0.0, 0.22):
                blade = [(x + dx, y - 0.3), (x + dx, y - 0.12)]
                yield Line(blade, 0.05, blend(ORCHARD_COLOUR, BLACK, 0.18))


STRIP = 3.0  # height of the bars below the map, in cells
FLOOR_COLOUR, WALL_COLOUR, ORCHARD_COLOUR = (233, 222, 196), (104, 104, 112), (176, 206, 118)
BEAM_COLOURS = ((250, 226, 90), (120, 220, 240), (190, 224, 160))  # for zapping, for cleaning, of both


def square(x: float, y: float, half_width: float, half_height: float, colour: Colour) -> Polygon:
    """A rectangle around (x, y)."""
    corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    return Polygon([(x + half_width * a, y + half_height * b) for a, b in corners], colour)


def _apple(x: float, y: float) -> Iterator[Shape]:
    yield Line([(x, y + 0.1), (x + 0.06, y + 0.32)], 0.07, (96, 66, 44))
    yield Polygon([(x + 0.06, y + 0.24), (x + 0.3, y + 0.38), (x + 0.22, y + 0.2)], (74, 150, 66))
    yield Circle(x, y - 0.06, 0.29, (208, 52, 48))
    yield Circle(x - 0.1, y + 0.03, 0.07, (240, 140, 130))


def _player(state: Mapping[str, np.ndarray[Any, Any]], i: int, height: int, colour: Colour) -> Iterator[Shape]:
    column, row = state["position"][i].tolist()
    x, y, ahead = column + 0.5, height - row - 0.5, AHEAD[int(state["orientation"][i])]
    aside = ahead[::-1] * (1, -1)
    tip, base = np.array([x, y]) + 0.5 * ahead, np.array([x, y]) + 0.1 * ahead
    yield Polygon(np.stack([tip, base + 0.3 * aside, base - 0.3 * aside]), blend(colour, BLACK, 0.45))
    yield Circle(x, y, 0.37, blend(colour, BLACK, 0.45))
    yield Circle(x, y, 0.32, colour, i)
    for side in (-0.13, 0.13):  # eyes
        eye = np.array([x, y]) + 0.14 * ahead + side * aside
        yield Circle(eye[0], eye[1], 0.07, WHITE)


def social_metrics(state: Mapping[str, Any], steps: int) -> dict[str, npt.NDArray[np.float64]]:
    """Measures of a society, from the state at the end of its episode.

    They are those of Perolat et al., "A multi-agent reinforcement learning model of common-pool resource
    appropriation", 2017, of apples instead of rewards, so that they do not depend on how these are shared.

    Args:
        state: Fields ``eaten``, ``eaten_at``, ``steps_out``, (…, num_agents), as NumPy arrays.
        steps: Of the episode so far.

    Returns:
        (…) float64 each. ``utility``: apples per step, of all players. ``equality``: 1 minus the Gini coefficient of
        their apples; NaN if nobody has eaten. ``sustainability``: mean over players of the mean step at which they
        ate; players that ate nothing are left out, NaN if nobody has. ``peace``: mean number of players that are in the
        game.

    Example:
        ``social_metrics({name: tensor.cpu().numpy() for name, tensor in env.state.items()}, 1000)["utility"]``
    """
    eaten, eaten_at, out = (np.asarray(state[name], np.float64) for name in ("eaten", "eaten_at", "steps_out"))
    total, players = eaten.sum(-1), eaten.shape[-1]
    differences = np.abs(eaten[..., :, None] - eaten[..., None, :]).sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "utility": total / steps,
            "equality": 1 - differences / (2 * players * total),
            "sustainability": np.where(eaten > 0, eaten_at / eaten, 0).sum(-1) / (eaten > 0).sum(-1),
            "peace": players - out.sum(-1) / steps,
        }
