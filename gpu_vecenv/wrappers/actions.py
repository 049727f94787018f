"""Wrappers that transform actions: clipping, rescaling, sticky actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.error import InvalidBound, InvalidProbability
from gymnasium.spaces import Box
from torch import Tensor

from gpu_vecenv.declare.arguments import check_number
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import UnsupportedGameError
from gpu_vecenv.wrappers.base import (
    ActionWrapper,
    Bound,
    EpisodeWrapper,
    Info,
    Options,
    Step,
    TensorEnv,
    expand_to,
)


class ClipAction(ActionWrapper):
    """Clip actions to the bounds of the environment's Box. TypeError unless the action space is a Box."""

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        box = self._box("action", env.single_action_space)
        self._constants = [torch.tensor(box.low), torch.tensor(box.high)]
        self.single_action_space = Box(-np.inf, np.inf, box.shape, box.dtype.type)

    def actions(self, actions: Tensor) -> Tensor:
        """Clipped to the bounds."""
        return actions.clamp(*self._constants)


class RescaleAction(ActionWrapper):
    """Rescale actions affinely from ``[min_action, max_action]`` to the bounds of the environment's Box.

    Args:
        env: An environment whose action space is a Box of floats.
        min_action: A number, or an array of an action's shape.
        max_action: Likewise.

    Raises:
        TypeError, ValueError: The space or a bound is wrong.
        InvalidBound: A lower bound equals its upper bound.
    """

    def __init__(self, env: TensorEnv, min_action: Bound, max_action: Bound) -> None:
        super().__init__(env)
        box = self._affine("action", env.single_action_space, min_action, max_action)
        if np.any(box.low == box.high):
            raise InvalidBound(f"min_action is {min_action}, max_action {max_action}; expected min_action < max_action")
        inner = self._box("action", env.single_action_space)
        bounds = [torch.tensor(bound) for bound in (box.low, box.high, inner.low, inner.high)]
        self._constants = [*self._constants, *bounds]
        self.single_action_space = box

    def actions(self, actions: Tensor) -> Tensor:
        """Rescaled. Valid actions stay inside the Box; in Gymnasium's, rounding may put them outside."""
        scale, offset, min_action, max_action, low, high = self._constants
        rescaled = (actions - offset) / scale
        return torch.where((actions >= min_action) & (actions <= max_action), rescaled.clamp(low, high), rescaled)


class StickyAction(ActionWrapper, EpisodeWrapper):
    """With some probability repeat the row's last action instead of the new one, for one or several steps.

    Rows are independent; the first action of an episode is never replaced. The random numbers come from a generator on
    the device, which every ``reset`` with a seed restarts, partial resets included. Equal seeds give equal numbers on
    the same kind of device.

    Args:
        env: The environment.
        repeat_action_probability: In [0, 1), else InvalidProbability.
        repeat_action_duration: Number of steps of a repetition, or (lowest, highest) to draw it uniformly.

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
            raise UnsupportedGameError("StickyAction: the game masks actions, so a repeated action may be masked")
        name = "repeat_action_probability"
        check_number(name, repeat_action_probability, lambda x: 0 <= x < 1, "a number in [0, 1)", InvalidProbability)
        duration = (
            repeat_action_duration if isinstance(repeat_action_duration, tuple) else (repeat_action_duration,) * 2
        )
        if len(duration) != 2:
            raise ValueError(f"repeat_action_duration is {duration}; expected an int or a pair of ints")
        low, high = (validate_int("repeat_action_duration", steps, 1) for steps in duration)
        if low > high:
            raise InvalidBound(f"repeat_action_duration is {duration}; expected (lowest, highest)")
        self.repeat_action_probability, self.repeat_action_duration_range = repeat_action_probability, (low, high)
        self._generator: torch.Generator | None = None
        self._last: Tensor | None = None  # the last actions that the environment received
        # Rows whose last action belongs to the running episode, and the remaining steps of their repetition.
        self._repeatable = torch.zeros(self.num_envs, dtype=torch.bool)
        self._remaining = torch.zeros(self.num_envs, dtype=torch.int64)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment, and with a seed the random generator."""
        obs, info = super().reset(seed=seed, options=options)
        if self._generator is None:
            self._generator = torch.Generator(obs.device)
            self._generator.seed()
        if seed is not None:
            # Not the seed itself: a policy with a generator of the same seed would draw equal numbers.
            self._generator.manual_seed(int(np.random.SeedSequence((seed, 1)).generate_state(1, np.uint64)[0]))
        return obs, info

    def actions(self, actions: Tensor) -> Tensor:
        """The last actions in the rows of a repetition, else ``actions``."""
        assert self._generator is not None, "reset sets it"
        low, high = self.repeat_action_duration_range
        drawn = torch.rand(self.num_envs, generator=self._generator, device=actions.device)
        steps = torch.full_like(self._remaining, low)
        if low < high:
            steps.random_(low, high + 1, generator=self._generator)
        started = steps * (self._repeatable & (drawn < self.repeat_action_probability))
        remaining = torch.where(self._remaining > 0, self._remaining, started)
        last = actions if self._last is None else self._last
        self._pending = torch.where(expand_to(remaining > 0, actions), last, actions), (remaining - 1).clamp(min=0)
        return self._pending[0]

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        self._repeatable = self._repeatable.to(obs.device) & ~rows
        self._remaining = self._remaining.to(obs.device).masked_fill(rows, 0)
        return obs

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        self._repeatable = had_transition & ~(terminations | truncations)
        self._last, remaining = self._pending  # only after the environment accepted the actions
        self._remaining = remaining * self._repeatable
        return obs, rewards, terminations, truncations, info
