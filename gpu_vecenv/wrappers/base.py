"""Bases of the wrappers: they find the device, follow the episodes of the rows, and transform what passes."""

from __future__ import annotations

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
    """Base of all: finds the device at ``reset``, and refuses environments that return no tensors."""

    _constants: Sequence[Tensor] = ()

    def __init__(self, env: TensorEnv) -> None:
        super().__init__(env)
        self._device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where the environment returns its tensors; before the first ``reset``, what it says itself."""
        base: Any = self.env
        return self._device or torch.device(base.device)

    # Both hold bounds for every row, and are made when somebody asks.
    @cached_property
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        """Of all rows."""
        own = self._single_observation_space
        return self.env.observation_space if own is None else batch_space(own, self.num_envs)

    @cached_property
    def action_space(self) -> Space[Any]:  # type: ignore[override]
        """Of all rows."""
        own = self._single_action_space
        return self.env.action_space if own is None else batch_space(own, self.num_envs)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Reset the environment, which is given ``options`` as they are.

        Raises:
            TypeError: It returns no tensors, or its ``info`` is no dict.
        """
        obs, info = self.env.reset(seed=seed, options=options)
        name = type(self).__name__
        if not isinstance(obs, Tensor):
            places = (gymnasium.wrappers.vector, gymnasium.wrappers)
            theirs = next((f"{place.__name__}.{name}" for place in places if hasattr(place, name)), None)
            advice = f". For environments that return NumPy arrays there is {theirs}" if theirs else ""
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
        """Step the environment, or ResetNeededError."""
        if self._device is None:
            raise ResetNeededError(f"{type(self).__name__}: step before reset: call reset() first")
        return self.env.step(actions)

    def _box(self, what: str, space: Space[Any]) -> Box:
        if not isinstance(space, Box):
            raise TypeError(f"{type(self).__name__}: the {what} space is {space}; expected a Box")
        return space

    def _affine(self, what: str, space: Space[Any], low: Bound, high: Bound) -> Box:
        """The Box with other bounds; the map to it, scale * x + offset, becomes the constants."""
        box = self._box(what, space)
        if not np.issubdtype(box.dtype, np.floating):
            raise TypeError(
                f"{type(self).__name__}: the {what} space is {box}; expected floats, since integers cannot hold the "
                "scale (DtypeObservation(env, np.float32) converts observations)"
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
    """Base of the wrappers whose observations are a function of the environment's."""

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
        """What becomes of observations (num_envs, *shape)."""
        raise NotImplementedError


class ActionWrapper(TensorWrapper):
    """Base of the wrappers that give the environment a function of the actions."""

    def step(self, actions: Tensor) -> Step:
        """Step the environment with the transformed actions.

        Raises:
            TypeError, ValueError: ``actions`` are no tensor of the right shape and device; nothing has changed.
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
        """What the environment is given, (num_envs, n)."""
        raise NotImplementedError


class EpisodeWrapper(TensorWrapper):
    """Base of the wrappers that must know which rows have a transition.

    ``_active`` (num_envs,) bool: whose next action counts, by ``info["active"]`` where the environment gives it.
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
        mask = self._mask(options)  # before the environment sees it: some take it out of the options
        obs, info = super().reset(seed=seed, options=options)
        rows = torch.ones(self.num_envs, dtype=torch.bool, device=obs.device) if mask is None else mask.to(obs.device)
        self._active = self._active_after(info, self._active.to(obs.device) | rows)
        return self._on_reset(rows, obs), info

    def step(self, actions: Tensor) -> Step:
        """Step the environment and take the statistics of the rows that had a transition."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        if obs.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: a CUDA graph would replay what is remembered now, again and again; "
                "capture the environment without this wrapper"
            )
        before, done = self._active, terminations | truncations
        if self._mode is AutoresetMode.SAME_STEP:
            after = torch.ones_like(done)
        else:
            after = ~done & (before | (self._mode is AutoresetMode.NEXT_STEP))
        self._active = self._active_after(info, after)
        return self._on_step(before, obs, rewards, terminations, truncations, info)

    def _on_reset(self, rows: Tensor, obs: Tensor) -> Tensor:
        """New episodes in these rows, (num_envs,) bool; gives what ``reset`` returns as observations."""
        raise NotImplementedError

    def _on_step(self, had_transition: Tensor, *step: Any) -> Step:
        """A step, with a transition in the rows where ``had_transition`` (num_envs,) bool is True; gives what to return."""
        raise NotImplementedError

    def _active_after(self, info: Info, otherwise: Tensor) -> Tensor:
        active = info.get("active")
        if isinstance(active, Tensor) and active.dtype == torch.bool and active.shape == (self.num_envs,):
            return active.clone()  # the environment's own may be live
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
        return torch.as_tensor(mask)


class RunningWrapper(EpisodeWrapper):
    """Base of the wrappers that normalize by a ``RunningMeanStd``, which is their attribute ``_statistics``."""

    _statistics: str
    _kept: tuple[str, ...] = ("_active",)

    def __init__(self, env: TensorEnv, epsilon: float) -> None:
        super().__init__(env)
        if not epsilon > 0:
            raise InvalidBound(f"epsilon is {epsilon}; expected a positive number")
        self.epsilon, self.update_running_mean = epsilon, True

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that the next step depends on: "mean", "var", "count", and what is known of each row."""
        statistics: RunningMeanStd = getattr(self, self._statistics)
        return statistics.state_dict() | {name.lstrip("_"): getattr(self, name).clone() for name in self._kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a ``state_dict``, after ``reset``, which begins anew in all rows.

        Raises:
            ValueError: A name, shape or dtype is wrong; nothing has changed. Another number of rows is, too: to take
                the statistics alone there, use the ``RunningMeanStd``'s own ``load_state_dict``.
        """
        loaded = checked_state_dict(state, self.state_dict())
        for name in self._kept:
            setattr(self, name, loaded.pop(name.lstrip("_")))
        getattr(self, self._statistics).load_state_dict(loaded)
