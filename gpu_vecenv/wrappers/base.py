"""Base classes of the wrappers: device, active rows, observation and action hooks, running statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium.wrappers.vector
import numpy as np
import torch
from gymnasium import Space
from gymnasium.error import InvalidBound
from gymnasium.logger import warn
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.utils import rescale_box
from torch import Tensor

from gpu_vecenv.declare.arguments import check_number
from gpu_vecenv.engine.data_manager import tensor_of
from gpu_vecenv.engine.running_statistics import RunningMeanStd, checked_state_dict
from gpu_vecenv.errors import ResetNeededError

Info = dict[str, Any]
Options = dict[str, Any] | None
Step = tuple[Tensor, Tensor, Tensor, Tensor, Info]
TensorEnv = VectorEnv[Tensor, Tensor, Tensor]
Bound = float | np.ndarray[Any, Any]
if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Tensor, Tensor, Tensor, Tensor, Tensor]
else:
    _Wrapper = VectorWrapper  # not generic in Gymnasium 1.1


class TensorWrapper(_Wrapper):
    """Base of all wrappers: takes the device from the first observations; raises if they are not tensors."""

    _constants: Sequence[Tensor] = ()

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        self._device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Device of the observations; before the first ``reset``, the ``device`` attribute of the environment."""
        base: Any = self.env
        return self._device or torch.device(base.device)

    # Lazy: batched spaces hold bounds for every row.
    @cached_property
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        """Batched observation space, of all rows."""
        own = self._single_observation_space
        return self.env.observation_space if own is None else batch_space(own, self.num_envs)

    @cached_property
    def action_space(self) -> Space[Any]:  # type: ignore[override]
        """Batched action space, of all rows."""
        own = self._single_action_space
        return self.env.action_space if own is None else batch_space(own, self.num_envs)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment; ``options`` are passed on unchanged.

        Raises:
            TypeError: Its observations are not a tensor, or its ``info`` is not a dict.
        """
        obs, info = self.env.reset(seed=seed, options=options)
        name = type(self).__name__
        if not isinstance(obs, Tensor):
            modules = (gymnasium.wrappers.vector, gymnasium.wrappers)
            namesake = next((f"{module.__name__}.{name}" for module in modules if hasattr(module, name)), None)
            advice = f". For environments that return NumPy arrays use {namesake}" if namesake else ""
            raise TypeError(
                f"{name}: reset returned observations of type {type(obs).__name__}; expected a torch tensor{advice}"
            )
        if not isinstance(info, dict):
            raise TypeError(
                f"{name}: reset returned an info of type {type(info).__name__}; expected a dict. "
                "DictInfoToList must be the outermost wrapper"
            )
        self._device = obs.device
        self._constants = [tensor.to(obs.device) for tensor in self._constants]
        return obs, info

    def step(self, actions: Tensor) -> Step:
        """Step the environment.

        Raises:
            ResetNeededError: Before ``reset``.
        """
        if self._device is None:
            raise ResetNeededError(f"{type(self).__name__}: step before reset: call reset() first")
        return self.env.step(actions)

    def _box(self, what: str, space: Space[Any]) -> Box:
        if not isinstance(space, Box):
            raise TypeError(f"{type(self).__name__}: the {what} space is {space}; expected a Box")
        return space

    def _affine(self, what: str, space: Space[Any], low: Bound, high: Bound) -> Box:
        """The Box with new bounds; ``_constants`` become scale and offset of the map scale * x + offset to it."""
        box = self._box(what, space)
        if not np.issubdtype(box.dtype, np.floating):
            raise TypeError(
                f"{type(self).__name__}: the {what} space is {box}; expected a float dtype, because rescaled values "
                "are not integers (DtypeObservation(env, np.float32) converts observations)"
            )
        rescaled, forward, _ = rescale_box(box, low, high)  # type: ignore[arg-type]
        bounded = np.isfinite(rescaled.low) & np.isfinite(rescaled.high)
        ones = np.ones(box.shape, np.longdouble)
        span = np.subtract(box.high, box.low, out=ones, where=bounded, dtype=np.longdouble)
        new_span = np.subtract(high, low, out=np.ones(box.shape), where=bounded)
        scale, offset = (new_span / span).astype(box.dtype), forward(np.zeros(box.shape, box.dtype))
        self._constants = [torch.from_numpy(scale), torch.from_numpy(offset)]
        return rescaled


class ObservationWrapper(TensorWrapper):
    """Base of the wrappers that map each observation to another, without state."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment and transform the observations."""
        obs, info = super().reset(seed=seed, options=options)
        return self.observations(obs), info

    def step(self, actions: Tensor) -> Step:
        """Step the environment and transform the observations, ``info["final_obs"]`` too."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        if "final_obs" in info:
            info = {**info, "final_obs": self.observations(info["final_obs"])}
        return self.observations(obs), rewards, terminations, truncations, info

    def observations(self, observations: Tensor) -> Tensor:
        """Transform observations (num_envs, *shape)."""
        raise NotImplementedError


class ActionWrapper(TensorWrapper):
    """Base of the wrappers that transform actions."""

    def step(self, actions: Tensor) -> Step:
        """Step the environment with the transformed actions.

        Raises:
            TypeError, ValueError: ``actions`` are not a tensor of the expected shape and device; nothing has changed.
        """
        shape, name = (self.num_envs, *(self.single_action_space.shape or ())), type(self).__name__
        if not isinstance(actions, Tensor):
            raise TypeError(f"{name}: actions are a {type(actions).__name__}; expected a torch tensor")
        if actions.shape != shape or (self._device and actions.device != self._device):
            raise ValueError(
                f"{name}: actions are {tuple(actions.shape)} on {actions.device}; expected {shape} on {self._device}"
            )
        return super().step(self.actions(actions) if self._device else actions)

    def actions(self, actions: Tensor) -> Tensor:
        """Transform actions (num_envs, *shape)."""
        raise NotImplementedError


class EpisodeWrapper(TensorWrapper):
    """Base of the wrappers that depend on which rows had a transition.

    ``_active`` (num_envs,) bool marks the rows whose next action counts: ``info["active"]`` if the environment has it,
    else derived from the flags. Rows with ``info["fault"]`` had no transition.
    """

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        if "autoreset_mode" not in env.metadata:
            warn(f"{type(self).__name__}: metadata of {env} has no autoreset_mode; NEXT_STEP is assumed")
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if not isinstance(self._mode, AutoresetMode):
            raise TypeError(f'metadata["autoreset_mode"] is {self._mode!r}; expected a gymnasium.vector.AutoresetMode')
        self._active = torch.ones(self.num_envs, dtype=torch.bool)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment and the statistics of running episodes, where ``options["reset_mask"]`` is True.

        Raises:
            TypeError, ValueError: The mask is not (num_envs,) bool, torch or NumPy; nothing has changed.
        """
        mask = self._mask(options)  # first: some environments remove it from the options
        obs, info = super().reset(seed=seed, options=options)
        rows = torch.ones(self.num_envs, dtype=torch.bool, device=obs.device) if mask is None else mask.to(obs.device)
        self._active = self._active_after(info, self._active.to(obs.device) | rows)
        return self._on_reset(rows, obs), info

    def step(self, actions: Tensor) -> Step:
        """Step the environment and update from the rows that had a transition."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        if obs.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: cannot be captured in a CUDA graph, whose replays would not update its state; "
                "capture the environment without this wrapper"
            )
        before, done = self._active, terminations | truncations
        if self._mode is AutoresetMode.SAME_STEP:
            after = torch.ones_like(done)
        else:
            after = ~done & (before | (self._mode is AutoresetMode.NEXT_STEP))
        self._active = self._active_after(info, after)
        had_transition = before & ~info["fault"] if isinstance(info.get("fault"), Tensor) else before
        return self._on_step(had_transition, obs, rewards, terminations, truncations, info)

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        """New episodes start in ``rows`` (num_envs,) bool; returns the observations that ``reset`` returns."""
        raise NotImplementedError

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        """Process a step with transitions in the rows ``had_transition`` (num_envs,) bool; returns its outputs."""
        raise NotImplementedError

    def _active_after(self, info: Info, otherwise: Tensor) -> Tensor:
        active = info.get("active")
        if isinstance(active, Tensor) and active.dtype == torch.bool and active.shape == (self.num_envs,):
            return active.clone()  # the environment may reuse its tensor
        return otherwise

    def _mask(self, options: Options) -> Tensor | None:
        mask, name = (options or {}).get("reset_mask"), type(self).__name__
        if mask is None:
            return None
        if not isinstance(mask, np.ndarray | Tensor) or mask.dtype not in (torch.bool, np.bool_):
            raise TypeError(
                f"{name}: reset_mask is {getattr(mask, 'dtype', type(mask).__name__)}; expected bool, torch or NumPy"
            )
        if mask.shape != (self.num_envs,):
            raise ValueError(f"{name}: reset_mask has shape {tuple(mask.shape)}; expected ({self.num_envs},)")
        return tensor_of(f"{name}: reset_mask", mask)


class RunningWrapper(EpisodeWrapper):
    """Base of the wrappers that normalise with a ``RunningMeanStd``, the attribute named by ``_statistics``."""

    _statistics: str
    _kept: tuple[str, ...] = ("_active",)

    def __init__(self, env: TensorEnv, epsilon: float) -> None:
        super().__init__(env)
        check_number("epsilon", epsilon, lambda x: 0 < x < math.inf, "a positive number", InvalidBound)
        self.epsilon, self.update_running_mean = epsilon, True

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all state that the next step depends on: "mean", "var", "count", and the state of each row."""
        statistics: RunningMeanStd = getattr(self, self._statistics)
        return statistics.state_dict() | {name.lstrip("_"): getattr(self, name).clone() for name in self._kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``. Call it after ``reset``, which clears the state of all rows.

        Raises:
            ValueError: A name, shape or dtype differs, also for another number of rows; nothing has changed. To restore
                the statistics alone, call ``load_state_dict`` of the ``RunningMeanStd``.
        """
        loaded = checked_state_dict(state, self.state_dict())
        for name in self._kept:
            setattr(self, name, loaded.pop(name.lstrip("_")))
        getattr(self, self._statistics).load_state_dict(loaded)


def expand_to(rows: Tensor, tensor: Tensor) -> Tensor:
    """View (num_envs,) with trailing axes of length 1, to broadcast with ``tensor``."""
    return rows.view(-1, *[1] * (tensor.ndim - 1))
