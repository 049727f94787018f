"""Wrappers that transform rewards: clipping and normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.error import InvalidBound
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpu_vecenv.declare.arguments import check_number
from gpu_vecenv.engine.running_statistics import RunningMeanStd
from gpu_vecenv.wrappers.base import RunningWrapper, Step, TensorEnv, TensorWrapper


class ClipReward(TensorWrapper):
    """Clip rewards to ``[min_reward, max_reward]``, numbers or None. InvalidBound if both are None."""

    def __init__(self, env: TensorEnv, min_reward: float | None = None, max_reward: float | None = None) -> None:
        super().__init__(env)
        for name, bound in (("min_reward", min_reward), ("max_reward", max_reward)):
            if bound is not None:
                check_number(name, bound, lambda _: True, "a number or None")
        self.min_reward, self.max_reward = (None if r is None else float(r) for r in (min_reward, max_reward))
        low = -np.inf if self.min_reward is None else self.min_reward
        high = np.inf if self.max_reward is None else self.max_reward
        if (min_reward is None and max_reward is None) or not low <= high:
            raise InvalidBound(
                f"min_reward is {min_reward}, max_reward {max_reward}; expected at least one, and min_reward "
                "<= max_reward"
            )

    def step(self, actions: Tensor) -> Step:
        """Step the environment and clip its rewards."""
        obs, rewards, terminations, truncations, info = super().step(actions)
        return obs, rewards.clamp(self.min_reward, self.max_reward), terminations, truncations, info


class NormalizeReward(RunningWrapper):
    """Divide rewards by the running standard deviation of the discounted returns.

    As in Gymnasium, a return restarts at the end of an episode in SAME_STEP mode, and in the other modes continues from
    the last reward, or the truncated return, until ``reset``. Unlike in Gymnasium, a partial reset keeps the returns of
    the other rows.

    Args:
        env: The environment.
        gamma: Discount per step, in [0, 1], else InvalidBound.
        epsilon: Added to the variance; positive, else InvalidBound.

    Attributes:
        return_rms: The ``RunningMeanStd`` of the returns, (); its ``state_dict`` excludes the state of the rows.
        accumulated_reward: (num_envs,) float64, the discounted returns.
        update_running_mean: False freezes the statistics, for example during evaluation.
    """

    _statistics, _kept = "return_rms", ("_active", "accumulated_reward")

    def __init__(self, env: TensorEnv, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(env, epsilon)
        check_number("gamma", gamma, lambda x: 0 <= x <= 1, "a number in [0, 1]", InvalidBound)
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
