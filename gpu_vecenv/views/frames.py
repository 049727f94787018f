"""Rendering: drawings rasterised by pygame, tiled frames, videos, and the viewer of render_mode="human"."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, overload

import gymnasium.error
import numpy as np
import torch

from gpu_vecenv.declare.config import finite_float
from gpu_vecenv.declare.drawing import BLACK, Circle, Drawing, Line, Polygon
from gpu_vecenv.declare.env import HOW_TO_DRAW, Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.views.window import Window

SAMPLES = 4  # per pixel and axis; a power of two, so that the mean of equal colours is exact
# Positions are clipped to this: pygame's time grows with what lies outside the image.
FARTHEST = 1e6
HALF_CIRCLE = np.exp(1j * np.linspace(np.pi / 2, 3 * np.pi / 2, 16))
GAP = 4  # pixels between tiles
MAX_SHOWN_ENVS = 16  # environments in a window by default
LARGEST_WINDOW = 1200, 800  # pixels (width, height) of several tiled frames
Image = np.ndarray[Any, Any]  # (height, width, 3) uint8


def render_metadata(game: Env) -> dict[str, Any]:
    """Entries of Gymnasium's metadata: ``render_modes``, empty for a game without ``draw``, and ``render_fps``."""
    drawn = type(game).draw is not Env.draw
    return {"render_modes": ["human", "rgb_array"] if drawn else [], "render_fps": game.render_fps}


def checked_render_mode(game: Env, mode: str | None) -> str | None:
    """The render mode, if the game supports it and pygame is installed.

    Raises:
        gymnasium.error.UnsupportedMode: The game does not support it; the message lists its modes.
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    if mode is None:
        return None
    name, modes = type(game).__name__, render_metadata(game)["render_modes"]
    if not modes:
        raise gymnasium.error.UnsupportedMode(
            f"render_mode is {mode!r}, but {name} has no method draw; expected None, or {HOW_TO_DRAW}"
        )
    if not isinstance(mode, str) or mode not in modes:
        raise gymnasium.error.UnsupportedMode(
            f"render_mode is {mode!r}; {name} has {', '.join(map(repr, modes))}, expected one of them or None"
        )
    _pygame()
    return mode


class Frames(Sequence[Image]):
    """Frames of all environments, each drawn on access: (height, width, 3) uint8, fresh memory.

    A frame shows the state at the time of construction, which copies it on the device. In "same_step" mode an
    environment that has just ended is shown after its reset, in the other modes at its end.

    An access copies the state of one environment to the host and synchronises with the device.

    Args:
        vec_env: The environments.
        copies: Number of rows that share a frame: frame i is that of environment i // copies.
        scale: Factor of the game's width and height: 0.25 draws 16 environments in the time of one.

    Raises:
        ConfigError: ``scale`` is not a positive number.
        IndexError: There is no such frame.
        ResetNeededError, ClosedEnvError: Before the first reset, after ``close``.
        EnvDefinitionError: On access, the game's ``draw`` returns no Drawing, or one that cannot be drawn.
        gymnasium.error.DependencyNotInstalled: On access, pygame is missing.
    """

    def __init__(self, vec_env: VecEnv, copies: int = 1, scale: float = 1.0) -> None:
        if (factor := finite_float(scale)) is None or factor <= 0:
            raise ConfigError(f"scale is {scale!r:.80}; expected a number above 0")
        copies = validate_int("copies", copies, 1)
        if not isinstance(vec_env, VecEnv):
            raise TypeError(f"vec_env is a {type(vec_env).__name__}; expected a VecEnv (of a view: view.vec_env)")
        vec_env.check_ready("render")
        self.game, self.num_envs, self.copies, self.scale = vec_env.game, vec_env.num_envs, copies, factor
        self._state = {name: tensor.clone() for name, tensor in drawn_state(vec_env).items()}

    def __len__(self) -> int:
        return self.num_envs * self.copies

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image]: ...
    def __getitem__(self, index: int | slice) -> Any:
        try:
            indices = range(len(self))[index]
        except IndexError:
            raise IndexError(f"frame {index} of {len(self)} frames") from None
        if isinstance(indices, range):
            return [self._frame(i) for i in indices]
        return self._frame(indices)

    def _frame(self, index: int) -> Image:
        state = state_of_env(self.game, self._state, index // self.copies)
        return rasterise(scaled(drawing_of(self.game, state), self.scale))


class Viewer:
    """The window of ``render_mode="human"``: some environments side by side.

    Args:
        vec_env: All environments.
        env_indices: Those shown, in this order, row by row; None: the first ones, at most 16.

    Raises:
        TypeError, ConfigError: There are no such environments.
        gymnasium.error.DependencyNotInstalled: pygame-ce is missing.
    """

    def __init__(self, vec_env: VecEnv, env_indices: int | Sequence[int] | None = None) -> None:
        self.vec_env = vec_env
        self.env_indices = checked_env_indices(vec_env.num_envs, env_indices)
        self.window = Window(type(vec_env.game).__name__, vec_env.game.render_fps)

    def draw(self) -> None:
        """Show the current state, and wait according to the frame rate."""
        if self.window.closed:
            return
        drawings = [env_drawing(self.vec_env, env_index) for env_index in self.env_indices]
        columns = columns_of(len(drawings))
        rows, scale = -(-len(drawings) // columns), 1.0
        if len(drawings) > 1:
            width, height = LARGEST_WINDOW
            inner_width, inner_height = width - (columns - 1) * GAP, height - (rows - 1) * GAP
            scale = min(scale, inner_width / (columns * drawings[0].width), inner_height / (rows * drawings[0].height))
        self.window.show(tiled([rasterise(scaled(drawing, scale)) for drawing in drawings], columns))

    def close(self) -> None:
        """Close the window."""
        self.window.close()


def viewer_of(
    vec_env: VecEnv, render_mode: str | None, env_indices: int | Sequence[int] | None = None
) -> Viewer | None:
    """The viewer of a view in "human" mode, else None."""
    checked = checked_env_indices(vec_env.num_envs, env_indices)
    return Viewer(vec_env, checked) if render_mode == "human" else None


def checked_env_indices(num_envs: int, env_indices: int | Sequence[int] | None) -> list[int]:
    """The environments to show.

    Raises:
        TypeError, ConfigError: There are no such environments.
    """
    if env_indices is None:
        return list(range(min(num_envs, MAX_SHOWN_ENVS)))
    indices = list(env_indices) if isinstance(env_indices, Sequence | np.ndarray) else [env_indices]
    for env_index in indices:
        if isinstance(env_index, bool) or not isinstance(env_index, int | np.integer):
            raise TypeError(f"render_env_indices has {env_index!r} ({type(env_index).__name__}); expected ints")
        if not 0 <= env_index < num_envs:
            raise ConfigError(
                f"render_env_indices has {env_index}; expected 0 … {num_envs - 1} (num_envs is {num_envs})"
            )
    if not indices:
        raise ConfigError("render_env_indices is empty; expected at least one environment")
    return [int(env_index) for env_index in indices]


def columns_of(count: int) -> int:
    """Columns of a grid for ``count`` tiles with as many rows as columns, or one fewer."""
    return math.isqrt(count - 1) + 1


def tiled(frames: Sequence[Image] | Image, columns: int | None = None) -> Image:
    """One image of several frames, row by row, with dark lines between them; empty tiles are dark.

    Args:
        frames: Each (h, w, 3) uint8: a sequence such as ``Frames``, or an array (n, h, w, 3).
        columns: None chooses as many as rows, or one more.

    Returns:
        (rows * (h + 4) - 4, columns * (w + 4) - 4, 3) uint8: frame i lies at row (i // columns) * (h + 4) and column
        (i % columns) * (w + 4).

    Raises:
        ConfigError: There is no frame, ``columns`` is not a positive int, or the frames differ in size.
    """
    frames = [np.asarray(frame) for frame in frames]
    if not frames:
        raise ConfigError("frames is empty; expected at least one frame")
    columns = columns_of(len(frames)) if columns is None else columns
    if type(columns) is not int or columns < 1:
        raise ConfigError(f"columns is {columns!r}; expected a positive int")
    for frame in frames:
        _check_same_size(frame, frames[0])
    height, width, _ = frames[0].shape
    rows = -(-len(frames) // columns)
    image = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), BLACK, np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        image[top : top + height, left : left + width] = frame
    return image


def env_drawing(vec_env: VecEnv, env_index: int) -> Drawing:
    """The drawing of one environment.

    Raises:
        ResetNeededError, ClosedEnvError: Before the first reset, after ``close``.
        EnvDefinitionError: ``draw`` returns no Drawing, or one that cannot be drawn.
    """
    vec_env.check_ready("render")
    return drawing_of(vec_env.game, state_on_host(vec_env, env_index))


def drawing_of(game: Env, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
    """The drawing of a state; EnvDefinitionError if ``draw`` returns something else."""
    drawing = game.with_drawn_values(state).draw(state)
    if not isinstance(drawing, Drawing):
        raise EnvDefinitionError(f"{type(game).__name__}.draw returned {drawing!r}; expected a Drawing")
    return drawing


def drawn_state(vec_env: VecEnv) -> dict[str, torch.Tensor]:
    """All that ``Env.draw`` gets, of all environments; live tensors."""
    return {"elapsed_steps": vec_env.elapsed_steps, "active": vec_env.active, **vec_env.state}


def state_of_env(game: Env, state: Mapping[str, torch.Tensor], env_index: int) -> dict[str, np.ndarray[Any, Any]]:
    """The ``state`` argument of ``Env.draw`` for one environment, copied to the host."""
    shared = {field.name for field in game.layout.fields if field.shared}
    own = {name: tensor if name in shared else tensor[env_index] for name, tensor in state.items()}
    return {name: tensor.cpu().numpy().copy() for name, tensor in own.items()}


def state_on_host(vec_env: VecEnv, env_index: int) -> dict[str, np.ndarray[Any, Any]]:
    """The ``state`` argument of ``Env.draw`` for one environment now, copied to the host."""
    return state_of_env(vec_env.game, drawn_state(vec_env), env_index)


def scaled(drawing: Drawing, scale: float) -> Drawing:
    """The drawing with its width and height in pixels scaled."""
    if scale == 1:
        return drawing
    width, height = (max(1, round(size * scale)) for size in (drawing.width, drawing.height))
    return dataclasses.replace(drawing, width=width, height=height)


def rasterise(drawing: Drawing) -> Image:
    """A drawing as an image, (height, width, 3) uint8, antialiased.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    pygame = _pygame()
    canvas = pygame.Surface((drawing.width * SAMPLES, drawing.height * SAMPLES), depth=32)
    canvas.fill(drawing.background)

    def positions(points: Any) -> np.ndarray[Any, Any]:
        return (drawing.pixels(points) * SAMPLES).clip(-FARTHEST, FARTHEST)

    def half(width: float) -> float:  # circles and lines are at least a pixel wide
        return min(max(width * drawing.scale, 1), FARTHEST) / 2 * SAMPLES

    for shape in drawing.shapes:
        if isinstance(shape, Circle):
            pygame.draw.circle(canvas, shape.colour, positions((shape.x, shape.y)), half(2 * shape.radius))
        elif isinstance(shape, Line):
            for start, end in itertools.pairwise(positions(shape.points)):
                pygame.draw.polygon(canvas, shape.colour, _stroke(start, end, half(shape.width)))
        elif isinstance(shape, Polygon):
            pygame.draw.polygon(canvas, shape.colour, positions(shape.points))
    smooth = pygame.transform.smoothscale(canvas, (drawing.width, drawing.height))
    pixels = np.frombuffer(pygame.image.tobytes(smooth, "RGB"), np.uint8)  # faster than surfarray, which transposes
    return pixels.reshape(drawing.height, drawing.width, 3).copy()


def png(image: Image) -> bytes:
    """An image, (height, width, 3) uint8, as a PNG file.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    pygame, file = _pygame(), io.BytesIO()
    height, width, _ = image.shape
    pygame.image.save(pygame.image.frombytes(image.tobytes(), (width, height), "RGB"), file, ".png")
    return file.getvalue()


def _stroke(start: np.ndarray[Any, Any], end: np.ndarray[Any, Any], radius: float) -> np.ndarray[Any, Any]:
    """The outline (32, 2) of a line segment with round caps."""
    along = complex(*(end - start))
    back = radius * HALF_CIRCLE * (along / abs(along) if along else 1)
    outline = np.concatenate([complex(*start) + back, complex(*end) - back])
    return np.stack([outline.real, outline.imag], 1)


def _pygame() -> ModuleType:
    try:
        import pygame
    except ImportError as error:
        raise gymnasium.error.DependencyNotInstalled(
            f'frames need pygame ({error}): pip install "gpu_vecenv[render]"'
        ) from error
    return pygame


def write_video(frames: Iterable[Image], path: str | Path, fps: float) -> None:
    """Write a video, ``.mp4`` (H.264) or ``.gif``; an existing file is replaced.

    Frames are consumed one by one, so a generator need not hold all of them in memory.

    Args:
        frames: Each (height, width, 3) uint8 of equal size; in an ``.mp4`` odd sizes are padded to even ones.
        path: In an existing folder.
        fps: Frames per second, as ``env.metadata["render_fps"]``; a ``.gif`` stores durations in hundredths of a
        second.

    Raises:
        ConfigError: The suffix is another, ``fps`` is not a positive number, or frames are missing or differ in size.
        FileNotFoundError: There is no such folder.
        gymnasium.error.DependencyNotInstalled: imageio or its ffmpeg is missing.
    """
    path = Path(path)
    if path.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"path is {str(path)!r}; expected the suffix .mp4 or .gif")
    if not isinstance(fps, int | float) or not fps > 0 or not math.isfinite(fps):
        raise ConfigError(f"fps is {fps!r:.80}; expected a number above 0")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    # quality: 0 … 10; the default 5 blurs thin lines
    mp4 = {"fps": fps, "codec": "libx264", "pixelformat": "yuv420p", "macro_block_size": 2, "quality": 8}
    gif = {"duration": 1000 / fps, "loop": 0}  # ms; 0: loop forever
    shown = iter(frames)
    first = next(shown, None)
    if first is None:
        raise ConfigError("frames is empty; expected at least one frame")
    _check_same_size(first, first)
    try:
        import imageio

        writer: Any = imageio.get_writer(path, **(gif if path.suffix == ".gif" else {"format": "FFMPEG", **mp4}))
    except ImportError as error:
        raise gymnasium.error.DependencyNotInstalled(
            f'videos need imageio and its ffmpeg ({error}): pip install "gpu_vecenv[render]"'
        ) from error
    with writer:
        for frame in itertools.chain([first], shown):
            _check_same_size(frame, first)
            odd = [(0, size % 2) for size in frame.shape[:2]] if path.suffix == ".mp4" else [(0, 0), (0, 0)]
            writer.append_data(np.pad(frame, [*odd, (0, 0)], mode="edge"))


def _check_same_size(frame: Image, first: Image) -> None:
    if frame.shape != first.shape or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise ConfigError(
            f"frames have {frame.shape} {frame.dtype} beside {first.shape} {first.dtype}; expected (height, width, 3) "
            "uint8 of equal size"
        )
