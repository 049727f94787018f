"""Frames of replicas: a game's drawing as pixels, by pygame; tiles of several, films, and what a window shows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, overload

import gymnasium.error
import numpy as np

from gpu_vecenv.declare.drawing import BLACK, Circle, Drawing, Line, Polygon
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.views.window import Window

SAMPLES = 4  # per pixel and axis; a power of two, so that the mean of equal colours is that colour
# pygame walks along what lies outside the picture too; from here on positions are drawn nearer than they are.
FARTHEST = 1e6
HALF_CIRCLE = np.exp(1j * np.linspace(np.pi / 2, 3 * np.pi / 2, 16))
GAP = 4  # pixels between tiles
MAX_SHOWN_ENVS = 16  # replicas in a window, where none are chosen
LARGEST_WINDOW = 1200, 800  # pixels, across and down, of several frames
Picture = np.ndarray[Any, Any]  # (height, width, 3) uint8


def render_metadata(game: Env) -> dict[str, Any]:
    """The entries of Gymnasium's metadata: ``render_modes``, empty for a game without ``draw``, and ``render_fps``."""
    drawn = type(game).draw is not Env.draw
    return {"render_modes": ["human", "rgb_array"] if drawn else [], "render_fps": game.render_fps}


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
            "draw(self, state) -> gpu_vecenv.declare.drawing.Drawing, see gpu_vecenv.Env.draw"
        )
    if mode not in modes:
        raise gymnasium.error.UnsupportedMode(
            f"render_mode is {mode!r}; {name} has {', '.join(map(repr, modes))}, expected one of them or None"
        )
    _pygame()
    return mode


class Frames(Sequence[Picture]):
    """Pictures of all replicas, each drawn when it is looked at: (height, width, 3) uint8, fresh memory.

    A frame shows its replica at the moment of looking, not at that of making this sequence. In "same_step" mode a
    replica that has just ended is seen at its new start, in the other modes at its end.

    Looking copies the state of that one replica to the host, and waits for the device.

    Args:
        vec_env: The replicas.
        copies: Agents that share their replica's frame: frame i is that of replica i // copies.
        scale: Of the game's own width and height: 0.25 draws 16 replicas in the time of one.

    Raises:
        ConfigError: ``scale`` is no number above 0.
        IndexError: There is no such frame.
        ResetNeededError, ClosedEnvError: On looking, before the first reset or after ``close``.
        EnvDefinitionError: On looking, the game's ``draw`` returns no Drawing, or one that cannot be drawn.
        gymnasium.error.DependencyNotInstalled: On looking, pygame is missing.
    """

    def __init__(self, vec_env: VecEnv, copies: int = 1, scale: float = 1.0) -> None:
        if not scale > 0 or not math.isfinite(scale):
            raise ConfigError(f"scale is {scale}; expected a number above 0")
        self.vec_env, self.copies, self.scale = vec_env, copies, scale

    def __len__(self) -> int:
        return self.vec_env.num_envs * self.copies

    @overload
    def __getitem__(self, place: int) -> Picture: ...
    @overload
    def __getitem__(self, place: slice) -> list[Picture]: ...
    def __getitem__(self, place: int | slice) -> Any:
        try:
            chosen = range(len(self))[place]
        except IndexError:
            raise IndexError(f"frame {place} of {len(self)}") from None
        if isinstance(chosen, range):
            return [self._frame(i) for i in chosen]
        return self._frame(chosen)

    def _frame(self, place: int) -> Picture:
        return rasterise(scaled(env_drawing(self.vec_env, place // self.copies), self.scale))


class Viewer:
    """What ``render_mode="human"`` shows: some replicas side by side in a window.

    Args:
        vec_env: All replicas.
        replicas: Which are seen, in this order, row by row; None: the first ones, at most 16.

    Raises:
        TypeError, ConfigError: There are no such replicas.
        gymnasium.error.DependencyNotInstalled: pygame-ce is missing.
    """

    def __init__(self, vec_env: VecEnv, replicas: int | Sequence[int] | None = None) -> None:
        self.vec_env = vec_env
        self.replicas = checked_env_indices(vec_env.num_envs, replicas)
        self.window = Window(type(vec_env.game).__name__, vec_env.game.render_fps)

    def draw(self) -> None:
        """Show them as they are now, and wait until it is time for the next picture."""
        if self.window.closed:
            return
        drawings = [env_drawing(self.vec_env, replica) for replica in self.replicas]
        columns = columns_of(len(drawings))
        rows, scale = -(-len(drawings) // columns), 1.0
        if len(drawings) > 1:
            across, down = LARGEST_WINDOW
            scale = min(scale, across / (columns * drawings[0].width), down / (rows * drawings[0].height))
        self.window.show(tiled([rasterise(scaled(drawing, scale)) for drawing in drawings], columns))

    def close(self) -> None:
        """Close the window."""
        self.window.close()


def viewer_of(vec_env: VecEnv, render_mode: str | None, replicas: int | Sequence[int] | None = None) -> Viewer | None:
    """What a view draws into at ``reset`` and ``step``: nothing but in "human" mode."""
    return Viewer(vec_env, replicas) if render_mode == "human" else None


def checked_env_indices(num_envs: int, replicas: int | Sequence[int] | None) -> list[int]:
    """The replicas that are seen.

    Raises:
        TypeError, ConfigError: There are no such replicas.
    """
    if replicas is None:
        return list(range(min(num_envs, MAX_SHOWN_ENVS)))
    given = list(replicas) if isinstance(replicas, Iterable) else [replicas]
    for replica in given:
        if isinstance(replica, bool) or not isinstance(replica, int | np.integer):
            raise TypeError(f"render_env_indices has {replica!r} ({type(replica).__name__}); expected ints")
        if not 0 <= replica < num_envs:
            raise ConfigError(
                f"render_env_indices has {replica}; expected 0 … {num_envs - 1}, as num_envs is {num_envs}"
            )
    if not given:
        raise ConfigError("render_env_indices is empty; expected at least one replica")
    return [int(replica) for replica in given]


def columns_of(count: int) -> int:
    """Columns of a grid for so many tiles that has as many rows, or one fewer."""
    return math.isqrt(count - 1) + 1


def tiled(frames: Sequence[Picture] | Picture, columns: int | None = None) -> Picture:
    """One picture of several frames, row by row, with dark lines between them; positions without a frame are dark.

    Args:
        frames: Each (h, w, 3) uint8: ``Frames``, some of them, or an array (n, h, w, 3).
        columns: None: as many as rows, or one more.

    Returns:
        (rows * (h + 4) - 4, columns * (w + 4) - 4, 3) uint8: frame i lies at row (i // columns) * (h + 4) and column
        (i % columns) * (w + 4).

    Raises:
        ConfigError: There is no frame, ``columns`` is no positive int, or the frames differ in size.
    """
    frames = [np.asarray(frame) for frame in frames]
    if not frames:
        raise ConfigError("frames is empty; expected at least one frame")
    columns = columns_of(len(frames)) if columns is None else columns
    if type(columns) is not int or columns < 1:
        raise ConfigError(f"columns is {columns!r}; expected a positive int")
    for frame in frames:
        _check_alike(frame, frames[0])
    height, width, _ = frames[0].shape
    rows = -(-len(frames) // columns)
    picture = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), BLACK, np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        picture[top : top + height, left : left + width] = frame
    return picture


def env_drawing(vec_env: VecEnv, replica: int) -> Drawing:
    """What the game draws of one replica.

    Raises:
        ResetNeededError, ClosedEnvError: Before the first reset, after ``close``.
        EnvDefinitionError: ``draw`` returns no Drawing, or one that cannot be drawn.
    """
    vec_env.check_ready("render")
    drawing = vec_env.game.draw(state_on_host(vec_env, replica))
    if not isinstance(drawing, Drawing):
        raise EnvDefinitionError(f"{type(vec_env.game).__name__}.draw returned {drawing!r}; expected a Drawing")
    return drawing


def state_on_host(vec_env: VecEnv, replica: int) -> dict[str, np.ndarray[Any, Any]]:
    """What ``Env.draw`` is given of one replica, copied to the host."""
    tensors = {"elapsed_steps": vec_env.elapsed_steps[replica], "active": vec_env.active[replica]}
    for field in vec_env.game.layout.fields:
        tensor = vec_env.state[field.name]
        tensors[field.name] = tensor if field.shared else tensor[replica]
    return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}


def scaled(drawing: Drawing, scale: float) -> Drawing:
    """The same picture in other pixels."""
    if scale == 1:
        return drawing
    width, height = (max(1, round(size * scale)) for size in (drawing.width, drawing.height))
    return dataclasses.replace(drawing, width=width, height=height)


def rasterise(drawing: Drawing) -> Picture:
    """A drawing as pixels, (height, width, 3) uint8, smooth at the edges.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame is missing.
    """
    pygame = _pygame()
    canvas = pygame.Surface((drawing.width * SAMPLES, drawing.height * SAMPLES), depth=32)
    canvas.fill(drawing.background)

    def positions(points: Any) -> np.ndarray[Any, Any]:
        return (drawing.pixels(points) * SAMPLES).clip(-FARTHEST, FARTHEST)

    def half(width: float) -> float:  # of a disc or line, which is at least a pixel wide: none vanishes
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
    pixels = np.frombuffer(pygame.image.tobytes(smooth, "RGB"), np.uint8)  # faster than surfarray, which turns axes
    return pixels.reshape(drawing.height, drawing.width, 3).copy()


def _stroke(start: np.ndarray[Any, Any], end: np.ndarray[Any, Any], radius: float) -> np.ndarray[Any, Any]:
    """The outline of a straight line with round ends, (32, 2)."""
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


def write_video(frames: Iterable[Picture], path: str | Path, fps: float) -> None:
    """Write a film, ``.mp4`` (H.264, which browsers play) or ``.gif``, replacing a file that is there.

    Frames are taken one by one as they are written, so a generator needs no memory for all of them.

    Args:
        frames: Each (height, width, 3) uint8, all alike; in an ``.mp4`` an odd size is rounded up to an even one.
        path: In a folder that exists.
        fps: Frames a second, as ``env.metadata["render_fps"]``; a ``.gif`` counts hundredths of a second.

    Raises:
        ConfigError: The path ends otherwise, ``fps`` is no number above 0, or there are no frames or differing ones.
        FileNotFoundError: There is no such folder.
        gymnasium.error.DependencyNotInstalled: imageio or its ffmpeg is missing.
    """
    path = Path(path)
    if path.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"the path of a film is {str(path)!r}; expected one that ends in .mp4 or .gif")
    if not fps > 0 or not math.isfinite(fps):
        raise ConfigError(f"fps is {fps}; expected a number above 0")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    # quality: of 0 … 10; at the usual 5 thin lines are blurred
    mp4 = {"fps": fps, "codec": "libx264", "pixelformat": "yuv420p", "macro_block_size": 2, "quality": 8}
    gif = {"duration": 1000 / fps, "loop": 0}  # ms; again and again
    shown = iter(frames)
    first = next(shown, None)
    if first is None:
        raise ConfigError("frames is empty; expected at least one frame")
    _check_alike(first, first)
    try:
        import imageio

        film: Any = imageio.get_writer(path, **(gif if path.suffix == ".gif" else {"format": "FFMPEG", **mp4}))
    except ImportError as error:
        raise gymnasium.error.DependencyNotInstalled(
            f'films need imageio and its ffmpeg ({error}): pip install "gpu_vecenv[render]"'
        ) from error
    with film:
        for frame in itertools.chain([first], shown):
            _check_alike(frame, first)
            odd = [(0, size % 2) for size in frame.shape[:2]] if path.suffix == ".mp4" else [(0, 0), (0, 0)]
            film.append_data(np.pad(frame, [*odd, (0, 0)], mode="edge"))


def _check_alike(frame: Picture, first: Picture) -> None:
    if frame.shape != first.shape or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise ConfigError(
            f"frames have {frame.shape} {frame.dtype} beside {first.shape} {first.dtype}; expected (height, width, 3) "
            "uint8, all alike"
        )
