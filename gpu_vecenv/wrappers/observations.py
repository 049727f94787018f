"""Wrappers that transform each observation: shape, range, dtype, normalisation, agent indicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.logger import warn
from gymnasium.spaces import Box, flatten_space
from torch import Tensor

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import known_dtype
from gpu_vecenv.engine.running_statistics import RunningMeanStd
from gpu_vecenv.views.agents import role_of_agents
from gpu_vecenv.wrappers.base import Bound, ObservationWrapper, RunningWrapper, Step, TensorEnv


class TransformObservation(ObservationWrapper):
    """Apply a function to the observations; Gymnasium's does not support SAME_STEP mode.

    Args:
        env: The environment.
        func: Maps (num_envs, *shape) to (num_envs, *new shape). Rows of ``final_obs`` outside its mask are unspecified.
        observation_space: Of all rows; None batches the single one.
        single_observation_space: Of one row; None keeps that of the environment.
    """

    def __init__(
        self,
        env: TensorEnv,
        func: Callable[[Tensor], Tensor],
        observation_space: Space[Any] | None = None,
        single_observation_space: Space[Any] | None = None,
    ) -> None:
        super().__init__(env)
        if not callable(func):
            raise TypeError(
                f"TransformObservation: func is a {type(func).__name__}; expected a function of observations"
            )
        for name, space in (
            ("observation_space", observation_space),
            ("single_observation_space", single_observation_space),
        ):
            check_kind(f"TransformObservation: {name}", space, Space, "a Space", optional=True)
        self.func = func
        if single_observation_space is not None:
            self.single_observation_space = single_observation_space
        if observation_space is not None:
            expected = self.observation_space
            self.observation_space = observation_space
            if observation_space != expected:
                warn(f"TransformObservation: observation_space is {observation_space}; expected {expected}")

    def observations(self, observations: Tensor) -> Tensor:
        """``func(observations)``."""
        return self.func(observations)


class ReshapeObservation(ObservationWrapper):
    """Reshape each observation; a view where torch can return one.

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
        """Reshaped to (num_envs, *shape)."""
        return observations.reshape(len(observations), *self.shape)


class FlattenObservation(ObservationWrapper):
    """Flatten each observation in C order to (num_envs, n). TypeError unless the space is a Box."""

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        self.single_observation_space = flatten_space(self._box("observation", env.single_observation_space))

    def observations(self, observations: Tensor) -> Tensor:
        """Flattened to (num_envs, n)."""
        return observations.reshape(len(observations), -1)


class RescaleObservation(ObservationWrapper):
    """Rescale observations affinely from the bounds of their Box to ``[min_obs, max_obs]``.

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
        """``scale * observations + offset``."""
        scale, offset = self._constants
        return scale * observations + offset


class DtypeObservation(ObservationWrapper):
    """Convert observations to a dtype of NumPy or torch. TypeError unless both have it and the space is a Box."""

    def __init__(self, env: TensorEnv, dtype: Any) -> None:
        super().__init__(env)
        box = self._box("observation", env.single_observation_space)
        own = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else known_dtype(dtype)
        if own is None or own.kind not in "biuf":
            raise TypeError(
                f"DtypeObservation: dtype is {dtype!r:.80}; expected a dtype of numbers, such as np.float32"
            )
        self.dtype, self._torch_dtype = own, torch.from_numpy(np.empty(0, own)).dtype
        self.single_observation_space = Box(box.low, box.high, box.shape, self.dtype.type)

    def observations(self, observations: Tensor) -> Tensor:
        """Converted to the dtype."""
        return observations.to(self._torch_dtype)


class NormalizeObservation(RunningWrapper):
    """Observations minus their running mean, divided by their running standard deviation, float32.

    Gymnasium's supports NEXT_STEP mode only and keeps float32 statistics. Here every observation counts once in each
    mode: ``obs`` in rows that are or were active, ``final_obs`` in the rows of its mask, and at a partial reset the
    rows that were reset.

    Args:
        env: An environment whose observation space is a Box.
        epsilon: Added to the variance; positive, else InvalidBound.

    Attributes:
        obs_rms: The ``RunningMeanStd``, (*shape); its ``state_dict`` excludes the state of the rows.
        update_running_mean: False freezes the statistics, for example during evaluation.
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


class AgentIndicator(ObservationWrapper):
    """Append a one-hot agent indicator to each observation, as SuperSuit's ``agent_indicator_v0`` does.

    A vector gets one more element, an image (height, width[, channels]) one more channel, for each agent in the order
    of ``game.layout.agent_names``, or for each role that has agents. That of the row's own agent holds the highest
    bound of the observation space if all bounds are finite, else 1; the others hold 0, also in rows of inactive agents.

    Args:
        env: A GymnasiumVectorEnv, or one inside vector wrappers, whose observation space is a Box of 1 to 3 axes.
        type_only: Indicate the role instead of the agent.

    Raises:
        TypeError, ValueError: The environment or its observation space is of another kind.
    """

    def __init__(self, env: TensorEnv, type_only: bool = False) -> None:
        super().__init__(env)
        inner: Any = env.unwrapped
        game = getattr(inner, "game", None)
        if not isinstance(game, Env) or self.num_envs % game.layout.num_agents:
            raise TypeError(
                f"AgentIndicator: env is a {type(inner).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv"
            )
        box = self._box("observation", env.single_observation_space)
        if not 1 <= len(box.shape) <= 3:
            raise ValueError(f"AgentIndicator: observations have shape {box.shape}; expected 1 to 3 axes")
        check_flag("AgentIndicator: type_only", type_only)
        roles = role_of_agents(game)
        labels = list(roles.values()) if type_only else list(roles)
        kinds = list(dict.fromkeys(labels))
        self._grid = () if len(box.shape) == 1 else box.shape[:2]
        own = (-1,) if len(box.shape) == 1 else (*self._grid, -1)
        value = box.high.max() if np.isfinite(box.high).all() else 1
        indicators = np.zeros((game.layout.num_agents, len(kinds)), box.dtype)
        indicators[range(game.layout.num_agents), [kinds.index(label) for label in labels]] = value
        self._constants = [torch.from_numpy(indicators).repeat(self.num_envs // game.layout.num_agents, 1)]
        zeros = np.zeros((*self._grid, len(kinds)), box.dtype)
        low, high = (
            np.concatenate([bound.reshape(own), indicator], -1)
            for bound, indicator in ((box.low, zeros), (box.high, zeros + value))
        )
        self.single_observation_space = Box(low, high, dtype=box.dtype.type)

    def observations(self, observations: Tensor) -> Tensor:
        """Observations with the indicator appended."""
        (indicators,), rows = self._constants, len(observations)
        if self._grid:
            indicators = indicators.view(rows, 1, 1, -1).expand(-1, *self._grid, -1)
            observations = observations.reshape(rows, *self._grid, -1)
        return torch.cat([observations, indicators], -1)
