"""PufferLib: a native PufferEnv whose agents are the agents of all environments, one per row.

PufferLib's buffers are NumPy arrays, so each step copies the outputs into them once and synchronises once. Its
environments reset within ``step`` and have no final observations: the autoreset mode is fixed to "same_step".

PufferLib's learner ends an episode at ``terminals`` alone, so ``terminals`` marks the last step of every episode,
terminated or truncated, as in PufferLib's own environments; ``truncations`` marks those that were truncated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import checked_vector_env, requires_extra
from gpu_vecenv.errors import refuse_counterparts

with requires_extra("pufferlib"):
    from pufferlib import PufferEnv


class GamePufferEnv(PufferEnv):
    """Agent ``e * num_agents + a`` of PufferLib is agent ``a`` of environment ``e``.

    ``masks`` is False in the rows of an agent that left early: from the step after its last one until its environment
    resets. Such rows are zeros, and terminal once more when the environment ends.

    Args:
        env: A Gymnasium view in "same_step" mode with ``output="torch"``, also inside wrappers.
        buf: PufferLib's arrays (rows, …), which ``reset`` and ``step`` overwrite; None allocates them, in pinned memory
            if the environments are on a GPU.
        seed: For a first ``reset`` without a seed of its own.

    Raises:
        TypeError, ValueError: ``env`` is another env, output or autoreset mode.
        UnsupportedGameError: The game masks actions, or its roles have different action sizes.
    """

    def __init__(self, env: GymnasiumVectorEnv, buf: dict[str, Any] | None = None, seed: int | None = None) -> None:
        self.env = checked_vector_env(env, "PufferLib")
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.num_agents = self.agents_per_batch = env.num_envs
        self.render_mode, self.metadata, self._seed = env.render_mode, env.metadata, seed
        super().__init__(buf)
        self._device = env.unwrapped.device
        if buf is None and self._device.type == "cuda":
            for name in ("observations", "rewards", "terminals", "truncations"):
                setattr(self, name, torch.from_numpy(getattr(self, name)).pin_memory().numpy())
        # Agents whose action counted in the last step, and whose next action counts.
        self._acted, self._active = np.ones(self.num_agents, bool), np.ones(self.num_agents, bool)
        self._returns, self._lengths = np.zeros(self.num_agents), np.zeros(self.num_agents, np.int64)

    def reset(self, seed: int | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Start new episodes.

        Args:
            seed: One for all environments; None takes the constructor's at the first reset, and continues later.

        Returns:
            ``observations`` and an empty list.

        Raises:
            InvalidSeedError: ``seed`` is not an int in [0, 2**64 - 1]; nothing has changed.
        """
        obs, info = self.env.reset(seed=self._seed if seed is None else seed)
        self._seed = None
        self._copy((self.observations, obs), (self._active, info["active"]))
        self.masks[:] = self._active
        for array in (self.rewards, self.terminals, self.truncations, self._returns, self._lengths):
            array[:] = 0
        return self.observations, []

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """One step.

        Args:
            actions: (rows[, heads]), as ``GymnasiumVectorEnv.step`` takes them.

        Returns:
            ``observations``, ``rewards``, ``terminals`` and ``truncations``, which the next step overwrites, and infos:
            [{"episode_return": list, "episode_length": list}] of the agents whose episode ended, or []. Episodes that a
            fault ended, whose last reward is NaN, are left out.

        Raises:
            TypeError, ValueError: Actions have a wrong dtype or shape; nothing has changed.
            ResetNeededError: Before ``reset``.
        """
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        self._acted[:] = self._active
        self._copy(
            (self.observations, obs),
            (self.rewards, rewards),
            (self.terminals, terminations),
            (self.truncations, truncations),
            (self._active, info["active"]),
        )
        self.terminals |= self.truncations
        np.logical_or(self._acted, self._active, out=self.masks)
        self._returns += self.rewards
        self._lengths += 1
        infos = []
        if self.terminals.any():
            ended = self.terminals & self._acted & ~np.isnan(self._returns)
            if ended.any():
                lists = {"episode_return": self._returns[ended], "episode_length": self._lengths[ended]}
                infos = [{name: values.tolist() for name, values in lists.items()}]
            self._returns[self.terminals] = self._lengths[self.terminals] = 0
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def render(self) -> Any:
        """The frame of the first environment with ``render_mode="rgb_array"``, else None."""
        frames = self.env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Free all memory."""
        self.env.close()

    def _copy(self, *pairs: tuple[Any, torch.Tensor]) -> None:
        """Copy each tensor into its array, then synchronise once."""
        for array, tensor in pairs:
            torch.from_numpy(array).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@refuse_counterparts
def make(
    game: Any, num_envs: int, device: Any = None, *, buf: Any = None, seed: int | None = None, **config: Any
) -> GamePufferEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``.

    An environment creator of PufferLib: ``pufferlib.vector.make(make, env_args=["cartpole", 4096])``. PufferLib sets
    ``buf`` and ``seed`` when it makes several, in one process (``backend="Serial"``) or in one each
    ("Multiprocessing", which forks: CPU only).
    """
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config), buf, seed)


def wrap(env: GymnasiumVectorEnv, buf: Any = None, seed: int | None = None) -> GamePufferEnv:
    """A Gymnasium view with ``output="torch"`` as PufferLib's PufferEnv."""
    return GamePufferEnv(env, buf, seed)
