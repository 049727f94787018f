"""A window that shows pictures one after the other, by pygame."""

from __future__ import annotations

from typing import Any

import gymnasium.error
import numpy as np


class Window:
    """Opens at the first picture, and shows no more of them a second than it is told; there may be several.

    With ``SDL_VIDEODRIVER=dummy`` in the environment nothing of it is seen, and all else is the same.

    Attributes:
        closed: By ``close``, or by whoever looks at it, with a click. It stays closed, and further pictures are ignored
            at once, so that a loop which is watched goes on at its own speed.

    Args:
        title: What stands above it.
        fps: Pictures a second; ``show`` waits for the time of its own.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame-ce is missing.
    """

    def __init__(self, title: str, fps: float) -> None:
        try:
            from pygame import Window as _  # noqa: F401  not in pygame, whose fork pygame-ce has windows
        except ImportError as error:
            raise gymnasium.error.DependencyNotInstalled(
                f'a window needs pygame-ce ({error}): pip install "gpu_vecenv[render]", and uninstall pygame'
            ) from error
        self.title, self.fps = title, fps
        self.closed = False
        self._window: Any = None
        self._clock: Any = None

    def show(self, picture: np.ndarray[Any, Any]) -> None:
        """Show a picture, (height, width, 3) uint8, and wait until it is time for it."""
        import pygame

        if self.closed:
            return
        if self._window is not None and not pygame.display.get_init():  # whoever quit pygame took all windows along
            self.closed, self._window = True, None
            return
        size = picture.shape[1], picture.shape[0]
        if self._window is None:
            self._window, self._clock = pygame.Window(self.title, size), pygame.time.Clock()
        if self._window.size != size:
            self._window.size = size
        # What is not asked for fills a queue and is then lost; keys are left to who else may want them.
        for event in pygame.event.get(exclude=(pygame.KEYDOWN, pygame.KEYUP)):
            if event.type == pygame.WINDOWCLOSE and event.window is self._window:
                self.close()
                return
            if event.type == pygame.WINDOWCLOSE:  # another window's
                pygame.event.post(event)
        self._clock.tick(self.fps)
        pygame.surfarray.blit_array(self._window.get_surface(), picture.swapaxes(0, 1))
        self._window.flip()

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        self.closed = True
        if self._window is not None:
            self._window.destroy()
            self._window = None
