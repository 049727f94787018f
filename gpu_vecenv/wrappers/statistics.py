"""Wrappers that add to or reformat ``info``: episode statistics, and one dict per row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.running_statistics import EpisodeRingBuffer
from gpu_vecenv.wrappers.base import EpisodeWrapper, Info, Options, Step, TensorEnv, TensorWrapper


class RecordEpisodeStatistics(EpisodeWrapper):
    """Return, length and time of every episode in ``info["episode"]``, and of the last episodes in queues.

    ``info["episode"]`` has "r" (num_envs,) float64, the undiscounted return, "l" int64, the steps, and "t" float64, the
    seconds measured on the host; all 0 where ``info["_episode"]`` (num_envs,) bool is False. Unlike Gymnasium's, it is
    present at every step: whether an episode ended is not read on the host.

    Args:
        env: The environment.
        buffer_length: Length of the queues, an int >= 1.
        stats_key: Key in ``info`` instead of "episode".

    Attributes:
        episode_returns: (num_envs,) float64, of the running episodes; 0 after their end.
        episode_lengths: (num_envs,) int64, of the running episodes.
        episode_start_times: (num_envs,) float64, of ``time.perf_counter``.
    """

    def __init__(self, env: TensorEnv, buffer_length: int = 100, stats_key: str = "episode") -> None:
        check_kind("stats_key", stats_key, str, "a str")
        super().__init__(env)
        self._finished_episodes, self._key = (
            EpisodeRingBuffer(validate_int("buffer_length", buffer_length, 1, 2**31 - 1), 3),
            stats_key,
        )
        self.episode_start_times, self.episode_returns = torch.zeros((2, self.num_envs), dtype=torch.float64)
        self.episode_lengths = torch.zeros(self.num_envs, dtype=torch.int64)

    # These four synchronise with the device: for logging, not for every step.
    @property
    def episode_count(self) -> int:
        """Number of completed episodes."""
        return self._finished_episodes.count()

    @property
    def return_queue(self) -> deque[float]:
        """Returns of the last ``buffer_length`` episodes, oldest first; a copy."""
        return deque(self._finished_episodes.read()[0], self._finished_episodes.size)

    @property
    def length_queue(self) -> deque[int]:
        """Lengths of the same episodes."""
        return deque(map(int, self._finished_episodes.read()[1]), self._finished_episodes.size)

    @property
    def time_queue(self) -> deque[float]:
        """Times of the same episodes, in seconds."""
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
            raise ValueError(f"RecordEpisodeStatistics: info already has {self._key!r}; choose another stats_key")
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

    Unlike Gymnasium's, the list is a ``Sequence`` that creates the dict of a row on access. The first access copies the
    masks ("_key") to the host. Values stay on their device.
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
    """One dict per row, created on access from a dict of arrays, tensors and nested dicts.

    Raises:
        TypeError, ValueError: A value is of another type, or does not have one entry per row.
    """

    def __init__(self, infos: Info, num_envs: int) -> None:
        self._num_envs = num_envs
        self._values = {key: self._checked(key, value) for key, value in infos.items() if key[:1] != "_"}
        self._mask_arrays = {key: self._checked(key, infos[f"_{key}"]) for key in self._values if f"_{key}" in infos}

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
        return {key: mask.tolist() for key, mask in self._mask_arrays.items()}

    def __len__(self) -> int:
        return self._num_envs

    def __getitem__(self, row: Any) -> Any:
        selected = range(self._num_envs)[row]
        if isinstance(selected, range):
            return [self[index] for index in selected]
        masks = self._masks
        return {key: value[selected] for key, value in self._values.items() if key not in masks or masks[key][selected]}
