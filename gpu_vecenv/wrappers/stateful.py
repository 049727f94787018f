"""Wrappers that remember what a row has seen or done: frames, delays, maxima, sticky actions.

Gymnasium has them for single environments, SuperSuit for PettingZoo's; here they are for all rows at once, and the
rules of ``gpu_vecenv.wrappers`` hold. A row's memory begins anew with the first observation of its episode: at a reset
of the row, in SAME_STEP mode where the row ends (``final_obs`` still belongs to the old memory), in the others at the
step after that. A row that waits for its replica's end has none: every observation is its first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.error import InvalidBound, InvalidProbability
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.utils import create_zero_array
from torch import Tensor

from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import UnsupportedGameError
from gpu_vecenv.wrappers.base import ActionWrapper, EpisodeWrapper, Info, Options, Step, TensorEnv

Array = np.ndarray[Any, Any]


class WindowWrapper(EpisodeWrapper):
    """Base of the wrappers whose observations are a function of the latest ``size`` ones of a row's episode.

    Args:
        env: An environment whose observation space is a Box.
        size: Observations in the window, at least 1.
        padding_type: What stands there before the episode has had as many, see ``FrameStackObservation``.
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
        self._window: Tensor | None = None  # (num_envs, size, *shape), oldest first; replaced, never written to

    def windowed(self, window: Tensor) -> Tensor:
        """Observations from a window, in memory of their own."""
        raise NotImplementedError

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        if self._window is None:
            self._window = obs.unsqueeze(1).expand(-1, self._size, *obs.shape[1:])
        renewed = torch.cat([self._window[:, :-1], obs.unsqueeze(1)], 1)  # rows that go on may have been written to
        self._window = torch.where(_expand_to(rows, self._window), self._pushed(rows, obs), renewed)
        return self.windowed(self._window)

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        begins = ~had_transition  # without a transition, what is seen continues nothing
        if "final_obs" in info:
            info = {**info, "final_obs": self.windowed(self._pushed(begins, info["final_obs"]))}
        if self._mode is AutoresetMode.SAME_STEP:
            begins = begins | terminations | truncations
        self._window = self._pushed(begins, obs)
        return self.windowed(self._window), rewards, terminations, truncations, info

    def _pushed(self, begins: Tensor, obs: Tensor) -> Tensor:
        """The window with these observations at its end, and padding before them in the rows that begin."""
        assert self._window is not None, "_on_reset sets it"
        newest = obs.unsqueeze(1)
        padding = self._constants[0] if self._constants else newest
        older = self._window[:, 1:]
        return torch.cat([torch.where(_expand_to(begins, older), padding, older), newest], 1)


def _expand_to(rows: Tensor, tensor: Tensor) -> Tensor:
    """(num_envs,) with as many axes as the tensor."""
    return rows.view(-1, *[1] * (tensor.ndim - 1))


class FrameStackObservation(WindowWrapper):
    """The latest observations of the episode, oldest first, (num_envs, stack_size, *shape).

    For a network that takes vectors, put ``FlattenObservation`` around it.

    Args:
        env: An environment whose observation space is a Box.
        stack_size: How many.
        padding_type: Before there are as many: "reset" repeats the episode's first, "zero" has zeros (moved into the
            bounds of the Box), an array of the observation space stands there itself.

    Raises:
        TypeError, ValueError: The space or an argument is wrong.
    """

    def __init__(self, env: TensorEnv, stack_size: int, *, padding_type: str | Array = "reset") -> None:
        super().__init__(env, validate_int("stack_size", stack_size, 1), padding_type)
        self.stack_size = self._size
        self.single_observation_space = batch_space(env.single_observation_space, self.stack_size)

    def windowed(self, window: Tensor) -> Tensor:
        """All of it."""
        return window.clone()


class DelayObservation(WindowWrapper):
    """Observations of ``delay`` steps ago, zeros (moved into the bounds of the Box) where the episode is younger.

    ``final_obs`` is delayed as well: it is what the agent saw last.

    Args:
        env: An environment whose observation space is a Box.
        delay: Steps, at least 0.

    Raises:
        TypeError, ValueError: The space or the delay is wrong.
    """

    def __init__(self, env: TensorEnv, delay: int) -> None:
        self.delay = validate_int("delay", delay, 0)
        super().__init__(env, self.delay + 1, "zero")

    def windowed(self, window: Tensor) -> Tensor:
        """The oldest."""
        return window[:, 0].clone()


class MaxObservation(WindowWrapper):
    """Element by element the highest of the episode's latest observations: SuperSuit's ``max_observation_v0``.

    Args:
        env: An environment whose observation space is a Box.
        memory: How many, at least 1.

    Raises:
        TypeError, ValueError: The space or the memory is wrong.
    """

    def __init__(self, env: TensorEnv, memory: int) -> None:
        super().__init__(env, validate_int("memory", memory, 1))

    def windowed(self, window: Tensor) -> Tensor:
        """The highest."""
        return window.amax(1)


class StickyAction(ActionWrapper, EpisodeWrapper):
    """With some probability a row's last action is taken once more in place of the new one, for one step or several.

    Each row decides for itself; the first action of an episode is never replaced. The random numbers come from a
    generator on the environment's device, begun anew by every ``reset`` with a seed, also of some rows only. The same
    seed gives the same numbers on the same kind of device.

    Args:
        env: The environment.
        repeat_action_probability: In [0, 1), else InvalidProbability.
        repeat_action_duration: For how many steps, or from how many to how many, drawn for every series.

    Raises:
        TypeError, ValueError, InvalidBound: The duration is wrong.
    """

    def __init__(
        self,
        env: TensorEnv,
        repeat_action_probability: float,
        repeat_action_duration: int | tuple[int, int] = 1,
    ) -> None:
        super().__init__(env)
        if getattr(getattr(env.unwrapped, "game", None), "masks_actions", False):
            raise UnsupportedGameError("StickyAction: the game masks actions, a repeated one may not be allowed now")
        if not 0 <= repeat_action_probability < 1:
            raise InvalidProbability(
                f"repeat_action_probability is {repeat_action_probability}; expected a number in [0, 1)"
            )
        given = repeat_action_duration if isinstance(repeat_action_duration, tuple) else (repeat_action_duration,) * 2
        if len(given) != 2:
            raise ValueError(f"repeat_action_duration is {given}; expected an int or two")
        low, high = (validate_int("repeat_action_duration", steps, 1) for steps in given)
        if low > high:
            raise InvalidBound(f"repeat_action_duration is {given}; expected the lower number first")
        self.repeat_action_probability, self.repeat_action_duration_range = repeat_action_probability, (low, high)
        self._generator: torch.Generator | None = None
        self._last: Tensor | None = None  # what the environment was given
        self._playing = torch.zeros(self.num_envs, dtype=torch.bool)  # whose last action was of the running episode
        self._left = torch.zeros(self.num_envs, dtype=torch.int64)  # steps for which it will be repeated

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment, and the random numbers if there is a seed."""
        obs, info = super().reset(seed=seed, options=options)
        if self._generator is None:
            self._generator = torch.Generator(obs.device)
            self._generator.seed()
        if seed is not None:
            # Not the seed itself: a policy whose own generator has it would draw the very same numbers.
            self._generator.manual_seed(int(np.random.SeedSequence((seed, 1)).generate_state(1, np.uint64)[0]))
        return obs, info

    def actions(self, actions: Tensor) -> Tensor:
        """Last ones where they stick."""
        assert self._generator is not None, "reset sets it"
        low, high = self.repeat_action_duration_range
        drawn = torch.rand(self.num_envs, generator=self._generator, device=actions.device)
        steps = torch.full_like(self._left, low)
        if low < high:
            steps.random_(low, high + 1, generator=self._generator)
        series = steps * (self._playing & (drawn < self.repeat_action_probability))
        left = torch.where(self._left > 0, self._left, series)
        last = actions if self._last is None else self._last
        self._taken = torch.where(_expand_to(left > 0, actions), last, actions), (left - 1).clamp(min=0)
        return self._taken[0]

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        self._playing = self._playing.to(obs.device) & ~rows
        self._left = self._left.to(obs.device).masked_fill(rows, 0)
        return obs

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        self._playing = had_transition & ~(terminations | truncations)
        self._last, left = self._taken  # now that the environment has not refused it
        self._left = left * self._playing
        return obs, rewards, terminations, truncations, info
