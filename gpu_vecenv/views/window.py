"""A pygame window that shows images."""

from __future__ import annotations

from typing import Any

import gymnasium.error
import numpy as np


class Window:
    """Opens at the first image and limits the frame rate; there may be several windows.

    With the environment variable ``SDL_VIDEODRIVER=dummy`` no window is shown; behaviour is otherwise identical.

    Attributes:
        closed: Whether ``close`` or the user has closed it. It stays closed: ``show`` then returns at once, so that the
            caller's loop continues at full speed.

    Args:
        title: Title of the window.
        fps: Frames per second; ``show`` waits accordingly.

    Raises:
        gymnasium.error.DependencyNotInstalled: pygame-ce is missing.
    """

    def __init__(self, title: str, fps: float) -> None:
        try:
            from pygame import Window as _  # noqa: F401  pygame-ce has it, pygame does not
        except ImportError as error:
            raise gymnasium.error.DependencyNotInstalled(
                f'a window needs pygame-ce ({error}): pip install "gpu_vecenv[render]", and uninstall pygame'
            ) from error
        self.title, self.fps = title, fps
        self.closed = False
        self._window: Any = None
        self._clock: Any = None

    def show(self, image: np.ndarray[Any, Any]) -> None:
        """Show an image, (height, width, 3) uint8, after waiting for its time."""
        import pygame

        if self.closed:
            return
        if self._window is not None and not pygame.display.get_init():  # pygame.quit() destroyed all windows
            self.closed, self._window = True, None
            return
        size = image.shape[1], image.shape[0]
        if self._window is None:
            self._window, self._clock = pygame.Window(self.title, size), pygame.time.Clock()
        if self._window.size != size:
            self._window.size = size
        # Unread events would overflow the queue; key events are left to the caller.
        for event in pygame.event.get(exclude=(pygame.KEYDOWN, pygame.KEYUP)):
            if event.type == pygame.WINDOWCLOSE and event.window is self._window:
                self.close()
                return
            if event.type == pygame.WINDOWCLOSE:  # of another window
                pygame.event.post(event)
        self._clock.tick(self.fps)
        pygame.surfarray.blit_array(self._window.get_surface(), image.swapaxes(0, 1))
        self._window.flip()

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        self.closed = True
        if self._window is not None:
            self._window.destroy()
            self._window = None
