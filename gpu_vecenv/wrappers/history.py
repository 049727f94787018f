"""Wrappers whose observations depend on the last observations of the episode: frame stack, delay, maximum.

Gymnasium has them for single environments, SuperSuit for PettingZoo's. Here they work on all rows at once, with the
guarantees of ``gpu_vecenv.wrappers``. The history of a row restarts with the first observation of an episode: at a
reset of the row; in SAME_STEP mode at the step that ends the episode (``final_obs`` still belongs to the old history);
in NEXT_STEP mode one step later. An inactive row that waits for the end of its environment has no history: every
observation counts as a first one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.utils import create_zero_array
from torch import Tensor

from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.wrappers.base import EpisodeWrapper, Step, TensorEnv, expand_to

Array = np.ndarray[Any, Any]


class HistoryWrapper(EpisodeWrapper):
    """Base of the wrappers whose observations depend on the last ``size`` observations of the episode.

    Args:
        env: An environment whose observation space is a Box.
        size: Length of the history, at least 1.
        padding_type: What fills the history at the start of an episode, see ``FrameStackObservation``.
    """

    def __init__(self, env: TensorEnv, size: int, padding_type: str | Array = "reset") -> None:
        super().__init__(env)
        space = self._box("observation", env.single_observation_space)
        if isinstance(padding_type, np.ndarray) and space.contains(padding_type):
            self._constants = [torch.from_numpy(padding_type.copy())]
        elif isinstance(padding_type, str) and padding_type == "zero":
            self._constants = [torch.from_numpy(create_zero_array(space))]
        elif not isinstance(padding_type, str) or padding_type != "reset":
            raise ValueError(
                f"{type(self).__name__}: padding_type is {padding_type!r}; "
                f'expected "reset", "zero" or an array of {space}'
            )
        self._size = size
        self._history: Tensor | None = None  # (num_envs, size, *shape), oldest first; replaced, never modified in place

    def select(self, history: Tensor) -> Tensor:
        """Compute the observations from a history, in fresh memory."""
        raise NotImplementedError

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        if self._history is None:
            self._history = obs.unsqueeze(1).expand(-1, self._size, *obs.shape[1:])
        renewed = torch.cat(
            [self._history[:, :-1], obs.unsqueeze(1)], 1
        )  # the state of the other rows may have been modified
        self._history = torch.where(expand_to(rows, self._history), self._pushed(rows, obs), renewed)
        return self.select(self._history)

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        begins = ~had_transition  # without a transition the observation starts a new history
        if "final_obs" in info:
            info = {**info, "final_obs": self.select(self._pushed(begins, info["final_obs"]))}
        if self._mode is AutoresetMode.SAME_STEP:
            begins = begins | terminations | truncations
        self._history = self._pushed(begins, obs)
        return self.select(self._history), rewards, terminations, truncations, info

    def _pushed(self, begins: Tensor, obs: Tensor) -> Tensor:
        """The history with ``obs`` appended; rows in ``begins`` are padded before it."""
        assert self._history is not None, "_on_reset sets it"
        newest = obs.unsqueeze(1)
        padding = self._constants[0] if self._constants else newest
        older = self._history[:, 1:]
        return torch.cat([torch.where(expand_to(begins, older), padding, older), newest], 1)


class FrameStackObservation(HistoryWrapper):
    """Stack the last observations of the episode, oldest first: (num_envs, stack_size, *shape).

    Wrap it in ``FlattenObservation`` for a network that takes vectors.

    Args:
        env: An environment whose observation space is a Box.
        stack_size: Number of observations, at least 1.
        padding_type: What precedes the first observation: "reset" repeats it, "zero" means zeros (clipped to the
            bounds of the Box), an array of the observation space is used itself.

    Raises:
        TypeError, ValueError: The space or an argument is wrong.
    """

    def __init__(self, env: TensorEnv, stack_size: int, *, padding_type: str | Array = "reset") -> None:
        super().__init__(env, validate_int("stack_size", stack_size, 1), padding_type)
        self.stack_size = self._size
        self.single_observation_space = batch_space(env.single_observation_space, self.stack_size)

    def select(self, history: Tensor) -> Tensor:
        """The whole history."""
        return history.clone()


class DelayObservation(HistoryWrapper):
    """Delay observations by ``delay`` steps; zeros (clipped to the bounds of the Box) before.

    ``final_obs`` is delayed as well.

    Args:
        env: An environment whose observation space is a Box.
        delay: Number of steps, at least 0.

    Raises:
        TypeError, ValueError: The space or the delay is wrong.
    """

    def __init__(self, env: TensorEnv, delay: int) -> None:
        self.delay = validate_int("delay", delay, 0)
        super().__init__(env, self.delay + 1, "zero")

    def select(self, history: Tensor) -> Tensor:
        """The oldest observation."""
        return history[:, 0].clone()


class MaxObservation(HistoryWrapper):
    """Elementwise maximum of the last observations of the episode, as SuperSuit's ``max_observation_v0``.

    Args:
        env: An environment whose observation space is a Box.
        memory: Number of observations, at least 1.

    Raises:
        TypeError, ValueError: The space or the memory is wrong.
    """

    def __init__(self, env: TensorEnv, memory: int) -> None:
        super().__init__(env, validate_int("memory", memory, 1))

    def select(self, history: Tensor) -> Tensor:
        """The elementwise maximum."""
        return history.amax(1)
