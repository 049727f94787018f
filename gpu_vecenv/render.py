"""Frames of replicas: a game's drawing as pixels, by pygame, without a window or a display."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, overload

import gymnasium.error
import numpy as np

from gpu_vecenv.drawing import Circle, Drawing, Line, Polygon
from gpu_vecenv.env import Env
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.vec_env import VecEnv

SAMPLES = 4  # per pixel and axis; a power of two, so that the mean of equal colours is that colour
# pygame walks along what lies outside the picture too; from here on places are drawn nearer than they are.
FARTHEST = 1e6


def render_metadata(game: Env) -> dict[str, Any]:
    """The entries of Gymnasium's metadata: ``render_modes``, empty for a game without ``draw``, and ``render_fps``."""
    drawn = type(game).draw is not Env.draw
    return {"render_modes": ["rgb_array"] if drawn else [], "render_fps": game.render_fps}


def checked_render_mode(game: Env, mode: str | None) -> str | None:
    """The render mode, if the game has it and frames can be drawn here.

    Raises:
        gymnasium.error.UnsupportedMode: It has not; the message names its modes.
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    if mode is None:
        return None
    name, modes = type(game).__name__, render_metadata(game)["render_modes"]
    if not modes:
        raise gymnasium.error.UnsupportedMode(
            f"render_mode is {mode!r}, but {name} is not drawn; expected None. A game is drawn once it has the method "
            "draw(self, state) -> gpu_vecenv.drawing.Drawing, see gpu_vecenv.Env.draw"
        )
    if mode not in modes:
        raise gymnasium.error.UnsupportedMode(
            f"render_mode is {mode!r}; {name} has {', '.join(map(repr, modes))}, expected that or None"
        )
    _pygame()
    return mode


class Frames(Sequence[np.ndarray[Any, Any]]):
    """Pictures of all replicas, each drawn when it is looked at: (height, width, 3) uint8, fresh memory.

    A frame shows its replica at the moment of looking, not at that of making this sequence. In "same_step" mode a
    replica that has just ended is seen at its new start, in the other modes at its end.

    Looking copies the state of that one replica to the host, and waits for the device.

    Args:
        vec_env: The replicas.
        copies: Agents that share their replica's frame: frame i is that of replica i // copies.

    Raises:
        IndexError: There is no such frame.
        ResetNeededError, ClosedEnvError: On looking, before the first reset or after ``close``.
        EnvDefinitionError: On looking, the game's ``draw`` returns no Drawing, or one that cannot be drawn.
        gymnasium.error.DependencyNotInstalled: On looking, pygame is missing.
    """

    def __init__(self, vec_env: VecEnv, copies: int = 1) -> None:
        self.vec_env, self.copies = vec_env, copies

    def __len__(self) -> int:
        return self.vec_env.num_envs * self.copies

    @overload
    def __getitem__(self, place: int) -> np.ndarray[Any, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[np.ndarray[Any, Any]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        try:
            chosen = range(len(self))[place]
        except IndexError:
            raise IndexError(f"frame {place} of {len(self)}") from None
        if isinstance(chosen, range):
            return [self._frame(i) for i in chosen]
        return self._frame(chosen)

    def _frame(self, place: int) -> np.ndarray[Any, Any]:
        self.vec_env.check_ready("render")
        game = self.vec_env.game
        drawing = game.draw(replica_state(self.vec_env, place // self.copies))
        if not isinstance(drawing, Drawing):
            raise EnvDefinitionError(f"{type(game).__name__}.draw returned {drawing!r}; expected a Drawing")
        return rasterise(drawing)


def replica_state(vec_env: VecEnv, replica: int) -> dict[str, np.ndarray[Any, Any]]:
    """What ``Env.draw`` is given of one replica, copied to the host."""
    tensors = {"time": vec_env.time[replica], "active": vec_env.active[replica]}
    for field in vec_env.game.state:
        tensor = vec_env.state[field.name]
        tensors[field.name] = tensor if field.shared else tensor[replica]
    return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}


def rasterise(drawing: Drawing) -> np.ndarray[Any, Any]:
    """A drawing as pixels, (height, width, 3) uint8, smooth at the edges.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    pygame = _pygame()
    canvas = pygame.Surface((drawing.width * SAMPLES, drawing.height * SAMPLES), depth=32)
    canvas.fill(drawing.background)

    def places(points: Any) -> np.ndarray[Any, Any]:
        return (drawing.pixels(points) * SAMPLES).clip(-FARTHEST, FARTHEST)

    def half(width: float) -> float:  # of a disc or line, which is at least a pixel wide: none vanishes
        return min(max(width * drawing.scale, 1), FARTHEST) / 2 * SAMPLES

    for shape in drawing.shapes:
        if isinstance(shape, Circle):
            pygame.draw.circle(canvas, shape.colour, places((shape.x, shape.y)), half(2 * shape.radius))
        elif isinstance(shape, Line):
            for start, end in itertools.pairwise(places(shape.points)):
                pygame.draw.polygon(canvas, shape.colour, _stroke(start, end, half(shape.width)))
        elif isinstance(shape, Polygon):
            pygame.draw.polygon(canvas, shape.colour, places(shape.points))
    smooth = pygame.transform.smoothscale(canvas, (drawing.width, drawing.height))
    return np.ascontiguousarray(pygame.surfarray.array3d(smooth).swapaxes(0, 1))


def _stroke(start: np.ndarray[Any, Any], end: np.ndarray[Any, Any], radius: float) -> np.ndarray[Any, Any]:
    """The outline of a straight line with round ends, (32, 2)."""
    along = np.arctan2(*(end - start)[::-1])
    arc = along + np.linspace(np.pi / 2, 3 * np.pi / 2, 16)
    back = radius * np.stack([np.cos(arc), np.sin(arc)], 1)
    return np.concatenate([start + back, end - back])


def _pygame() -> ModuleType:
    try:
        import pygame
    except ImportError as error:
        raise gymnasium.error.DependencyNotInstalled(
            f'frames need pygame ({error}): pip install "gpu_vecenv[render]"'
        ) from error
    return pygame
