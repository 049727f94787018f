"""Torch twins of Gymnasium's vector wrappers: observations, actions, rewards and episode statistics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.error import InvalidBound
from gymnasium.logger import warn
from gymnasium.spaces import Box, flatten_space
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.running_statistics import EpisodeRingBuffer, RunningMeanStd
from gpu_vecenv.wrappers.base import (
    ActionWrapper,
    Bound,
    EpisodeWrapper,
    Info,
    ObservationWrapper,
    Options,
    RunningWrapper,
    Step,
    TensorEnv,
    TensorWrapper,
)


class TransformObservation(ObservationWrapper):
    """Observations through a function of one's own; Gymnasium's refuses SAME_STEP mode.

    Args:
        env: The environment.
        func: Maps (num_envs, *shape) to (num_envs, *new shape). Rows of ``final_obs`` outside the mask hold anything.
        observation_space: Of all rows; None: follows from the other.
        single_observation_space: Of one row; None: the environment's.
    """

    def __init__(
        self,
        env: TensorEnv,
        func: Callable[[Tensor], Tensor],
        observation_space: Space[Any] | None = None,
        single_observation_space: Space[Any] | None = None,
    ) -> None:
        super().__init__(env)
        self.func = func
        if single_observation_space is not None:
            self.single_observation_space = single_observation_space
        if observation_space is not None:
            expected = self.observation_space
            self.observation_space = observation_space
            if observation_space != expected:
                warn(f"TransformObservation: observation_space is {observation_space}; expected {expected}")

    def observations(self, observations: Tensor) -> Tensor:
        """``func`` of them."""
        return self.func(observations)


class ReshapeObservation(ObservationWrapper):
    """Observations of another shape: views, where torch can give them.

    Args:
        env: An environment whose observation space is a Box.
        shape: Of one row, positive ints with the same product.

    Raises:
        TypeError, ValueError: The space or the shape is wrong.
    """

    def __init__(self, env: TensorEnv, shape: tuple[int, ...]) -> None:
        super().__init__(env)
        name = type(self).__name__
        if not isinstance(shape, tuple) or not all(isinstance(n, int | np.integer) for n in shape):
            raise TypeError(f"{name}: shape is {shape!r}; expected a tuple of ints")
        box = self._box("observation", env.single_observation_space)
        if any(n < 1 for n in shape) or np.prod(shape) != box.low.size:
            raise ValueError(f"{name}: shape is {shape}; expected positive ints whose product is {box.low.size}")
        self.shape = shape
        low, high = box.low.reshape(shape), box.high.reshape(shape)
        self.single_observation_space = Box(low, high, shape, box.dtype.type)

    def observations(self, observations: Tensor) -> Tensor:
        """(num_envs, *shape)."""
        return observations.reshape(len(observations), *self.shape)


class FlattenObservation(ObservationWrapper):
    """Observations (num_envs, n), a row's elements in C order. Box spaces only, else TypeError."""

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        self.single_observation_space = flatten_space(self._box("observation", env.single_observation_space))

    def observations(self, observations: Tensor) -> Tensor:
        """(num_envs, n)."""
        return observations.reshape(len(observations), -1)


class RescaleObservation(ObservationWrapper):
    """Observations moved affinely from the bounds of their Box to ``[min_obs, max_obs]``.

    Args:
        env: An environment whose observation space is a Box of floats; of integers, Gymnasium's makes zeros.
        min_obs: A number, or an array of a row's shape; infinite where the Box is, and only there.
        max_obs: Likewise.

    Raises:
        TypeError, ValueError: The space or a bound is wrong.
    """

    def __init__(self, env: TensorEnv, min_obs: Bound, max_obs: Bound) -> None:
        super().__init__(env)
        self.single_observation_space = self._affine("observation", env.single_observation_space, min_obs, max_obs)

    def observations(self, observations: Tensor) -> Tensor:
        """Moved."""
        scale, offset = self._constants
        return scale * observations + offset


class DtypeObservation(ObservationWrapper):
    """Observations of another dtype, NumPy's or torch's, that both have. Box spaces only. Else TypeError."""

    def __init__(self, env: TensorEnv, dtype: Any) -> None:
        super().__init__(env)
        box = self._box("observation", env.single_observation_space)
        self.dtype = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
        self._torch_dtype = torch.from_numpy(np.empty(0, self.dtype)).dtype
        self.single_observation_space = Box(box.low, box.high, box.shape, self.dtype.type)

    def observations(self, observations: Tensor) -> Tensor:
        """Converted."""
        return observations.to(self._torch_dtype)


class ClipAction(ActionWrapper):
    """Actions of any size, clipped to the environment's Box; TypeError if it has none."""

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        box = self._box("action", env.single_action_space)
        self._constants = [torch.tensor(box.low), torch.tensor(box.high)]
        self.single_action_space = Box(-np.inf, np.inf, box.shape, box.dtype.type)

    def actions(self, actions: Tensor) -> Tensor:
        """Clipped."""
        return actions.clamp(*self._constants)


class RescaleAction(ActionWrapper):
    """Actions in ``[min_action, max_action]``, moved affinely to the bounds of the environment's Box.

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
        """Moved. What fits still fits: in Gymnasium's, rounding may carry it out of the environment's Box."""
        scale, offset, least, most, low, high = self._constants
        moved = (actions - offset) / scale
        return torch.where((actions >= least) & (actions <= most), moved.clamp(low, high), moved)


class ClipReward(TensorWrapper):
    """Rewards clipped to ``[min_reward, max_reward]``, numbers or None; not both None, else InvalidBound."""

    def __init__(self, env: TensorEnv, min_reward: float | None = None, max_reward: float | None = None) -> None:
        super().__init__(env)
        self.min_reward, self.max_reward = (None if r is None else float(r) for r in (min_reward, max_reward))
        low = -np.inf if self.min_reward is None else self.min_reward
        high = np.inf if self.max_reward is None else self.max_reward
        if (min_reward is None and max_reward is None) or not low <= high:
            raise InvalidBound(
                f"rewards in [{min_reward}, {max_reward}]: expected a bound, and min_reward <= max_reward"
            )

    def step(self, actions: Tensor) -> Step:
        """Step the environment and clip its rewards."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        return obs, rewards.clamp(self.min_reward, self.max_reward), terminations, truncations, info


class NormalizeObservation(RunningWrapper):
    """Observations minus their running mean, divided by their running standard deviation, float32.

    Gymnasium's works in NEXT_STEP mode only, and with float32 statistics. Here every observation counts once, whatever
    the mode: those of ``obs`` in rows that are or were active, those of ``final_obs`` where its mask says so, and at a
    partial reset those of the rows that were reset.

    Args:
        env: An environment whose observation space is a Box.
        epsilon: Added to the variance; positive, else InvalidBound.

    Attributes:
        obs_rms: The ``RunningMeanStd``, (*shape); its own ``state_dict`` knows nothing of rows.
        update_running_mean: False leaves the statistics as they are, for instance for an evaluation.
    """

    _statistics = "obs_rms"

    def __init__(self, env: TensorEnv, epsilon: float = 1e-8) -> None:
        super().__init__(env, epsilon)
        box = self._box("observation", env.single_observation_space)
        self.single_observation_space = Box(-np.inf, np.inf, box.shape, np.float32)
        self.obs_rms = RunningMeanStd(shape=box.shape)

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        self.obs_rms.to(obs.device)
        if self.update_running_mean:
            self.obs_rms.update(obs, rows)
        return self._normalized(obs)

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        final = info.get("final_obs")
        if self.update_running_mean:
            self.obs_rms.update(obs, had_transition | self._active)
            if final is not None:
                self.obs_rms.update(final, had_transition & info["_final_obs"])
        if final is not None:
            info = {**info, "final_obs": self._normalized(final)}
        return self._normalized(obs), rewards, terminations, truncations, info

    def _normalized(self, obs: Tensor) -> Tensor:
        return ((obs - self.obs_rms.mean.float()) / self.obs_rms.std(self.epsilon).float()).float()


class NormalizeReward(RunningWrapper):
    """Rewards divided by the running standard deviation of the discounted returns.

    As in Gymnasium, a return begins anew at the end of an episode in SAME_STEP mode, while in the other two it goes on
    from the last reward, or the truncated return, until ``reset``. Unlike there, a partial reset leaves the returns of
    the other rows alone.

    Args:
        env: The environment.
        gamma: Discount per step, in [0, 1], else InvalidBound.
        epsilon: Added to the variance; positive, else InvalidBound.

    Attributes:
        return_rms: The ``RunningMeanStd`` of the returns, (); its own ``state_dict`` knows nothing of rows.
        accumulated_reward: (num_envs,) float64, the returns.
        update_running_mean: False leaves the statistics as they are, for instance for an evaluation.
    """

    _statistics, _kept = "return_rms", ("_active", "accumulated_reward")

    def __init__(self, env: TensorEnv, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(env, epsilon)
        if not 0 <= gamma <= 1:
            raise InvalidBound(f"gamma is {gamma}; expected a number in [0, 1]")
        self.gamma, self.return_rms = gamma, RunningMeanStd()
        self.accumulated_reward = torch.zeros(self.num_envs, dtype=torch.float64)

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        self.return_rms.to(obs.device)
        self.accumulated_reward = self.accumulated_reward.to(obs.device).masked_fill(rows, 0)
        return obs

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        returns = self.accumulated_reward * self.gamma * ~terminations + rewards
        returns = torch.where(had_transition, returns, self.accumulated_reward)
        if self.update_running_mean:
            self.return_rms.update(returns, had_transition)
        if self._mode is AutoresetMode.SAME_STEP:
            returns = returns.masked_fill(terminations | truncations, 0)
        self.accumulated_reward = returns
        scaled = rewards / self.return_rms.std(self.epsilon).to(rewards.dtype)
        return obs, scaled, terminations, truncations, info


class RecordEpisodeStatistics(EpisodeWrapper):
    """Return, length and time of every episode, in ``info["episode"]`` and of the latest ones in queues.

    ``info["episode"]`` has "r" (num_envs,) float64, the undiscounted return, "l" int64, the steps, and "t" float64, the
    seconds between the host's calls; 0 where ``info["_episode"]`` (num_envs,) bool is False. Unlike Gymnasium's, it is
    there at every step, since only the device knows whether an episode has ended.

    Args:
        env: The environment.
        buffer_length: Episodes in the queues, an int >= 1.
        stats_key: Another word for "episode".

    Attributes:
        episode_returns: (num_envs,) float64, of the running episodes; 0 once they have ended.
        episode_lengths: (num_envs,) int64, likewise.
        episode_start_times: (num_envs,) float64, of ``time.perf_counter``.
    """

    def __init__(self, env: TensorEnv, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__(env)
        self._finished_episodes, self._key = (
            EpisodeRingBuffer(validate_int("buffer_length", buffer_length, 1), 3),
            stats_key,
        )
        self.episode_start_times, self.episode_returns = torch.zeros((2, self.num_envs), dtype=torch.float64)
        self.episode_lengths = torch.zeros(self.num_envs, dtype=torch.int64)

    # These four wait for the device: they are for the log, not for every step.
    @property
    def episode_count(self) -> int:
        """Episodes that have ended."""
        return self._finished_episodes.count()

    @property
    def return_queue(self) -> deque[float]:
        """Returns of the latest ``buffer_length`` episodes, oldest first; a copy."""
        return deque(self._finished_episodes.read()[0], self._finished_episodes.size)

    @property
    def length_queue(self) -> deque[int]:
        """Their lengths."""
        return deque(map(int, self._finished_episodes.read()[1]), self._finished_episodes.size)

    @property
    def time_queue(self) -> deque[float]:
        """Their seconds."""
        return deque(self._finished_episodes.read()[2], self._finished_episodes.size)

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        self._finished_episodes.to(obs.device)
        self._restart(rows, self.episode_returns.to(obs.device), self.episode_lengths.to(obs.device))
        return obs

    def _restart(self, rows: Tensor, returns: Tensor, lengths: Tensor) -> None:
        self.episode_returns, self.episode_lengths = returns.masked_fill(rows, 0), lengths.masked_fill(rows, 0)
        started = self.episode_start_times.to(rows.device)
        self.episode_start_times = started.masked_fill(rows, time.perf_counter())

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        obs, rewards, terminations, truncations, info = step
        if self._key in info or f"_{self._key}" in info:
            raise ValueError(f"RecordEpisodeStatistics: info has {self._key!r} already; choose another stats_key")
        ended = (terminations | truncations) & had_transition
        returns, lengths = self.episode_returns + rewards, self.episode_lengths + 1
        times = (time.perf_counter() - self.episode_start_times).round(decimals=6)
        self._finished_episodes.add(ended, torch.stack([returns, lengths, times], 1))
        metrics = {"r": returns, "l": lengths, "t": times}
        episode = {name: metric.masked_fill(~ended, 0) for name, metric in metrics.items()}
        self._restart(ended | ~had_transition, returns, lengths)
        return obs, rewards, terminations, truncations, {**info, self._key: episode, f"_{self._key}": ended}


class DictInfoToList(TensorWrapper):
    """``info`` as one dict per row. It must be the outermost wrapper.

    Unlike Gymnasium's, the list is a ``Sequence`` that makes a row's dict when it is asked for. What a row has stands
    in masks on the device, so the first question waits for it, once for each mask. Values stay where they are.
    """

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Any]:
        """Reset the environment; ``info`` is a ``RowInfos``."""
        obs, info = super().reset(seed=seed, options=options)
        return obs, RowInfos(info, self.num_envs)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        """Step the environment; ``info`` is a ``RowInfos``."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        return obs, rewards, terminations, truncations, RowInfos(info, self.num_envs)


class RowInfos(Sequence[dict[str, Any]]):
    """The dicts of all rows, made on demand from a dict of arrays, tensors and such dicts.

    Raises:
        TypeError, ValueError: A value is neither, or has not one entry per row.
    """

    def __init__(self, infos: Info, num_envs: int) -> None:
        self._num_envs = num_envs
        self._values = {key: self._checked(key, value) for key, value in infos.items() if key[:1] != "_"}
        self._given = {key: self._checked(key, infos[f"_{key}"]) for key in self._values if f"_{key}" in infos}

    def _checked(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return RowInfos(value, self._num_envs)
        if not isinstance(value, np.ndarray | Tensor):
            raise TypeError(f"info[{key!r}] is a {type(value).__name__}; expected a tensor, an array or a dict")
        if value.shape[:1] != (self._num_envs,):
            raise ValueError(f"info[{key!r}] has shape {tuple(value.shape)}; expected ({self._num_envs}, …)")
        return value

    @cached_property
    def _masks(self) -> dict[str, list[bool]]:
        return {key: mask.tolist() for key, mask in self._given.items()}

    def __len__(self) -> int:
        return self._num_envs

    def __getitem__(self, row: Any) -> Any:
        places = range(self._num_envs)[row]
        if isinstance(places, range):
            return [self[place] for place in places]
        masks = self._masks
        return {key: value[places] for key, value in self._values.items() if key not in masks or masks[key][places]}
