"""Stable-Baselines3: each agent of each environment is one row of its VecEnv.

SB3 stores rollouts in NumPy, so each step copies the outputs to pinned memory, synchronises once, and copies actions to
the device. Its VecEnv resets in the same step and reads the final observation from the info of a done row: the
autoreset mode is fixed to "same_step".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import checked_vector_env, requires_extra, split_config
from gpu_vecenv.errors import ConfigError, InvalidActionError, refuse_counterparts

with requires_extra("sb3"):
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv

ELSEWHERE = {"seed": "call env.seed(…) before env.reset(), or give it to the algorithm, PPO(…, seed=…)"}
FRAMES = 16  # environments that get_images returns at most; SB3 tiles all of them


class SB3VecEnv(VecEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of environment ``e``.

    The info of a done row has "terminal_observation", "TimeLimit.truncated" and, if its agent was active,
    "episode" with return "r", length "l" and seconds "t": VecMonitor is not needed; it would also count the zeros
    between the early end of an agent and that of its environment.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="numpy"``.
        UnsupportedGameError: Roles have different action sizes.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        # masks: unsupported in SB3 itself, but used by MaskablePPO of sb3-contrib.
        self.env = checked_vector_env(env, "Stable-Baselines3", output="numpy", masks=True, wrapped=False)
        self.metadata = env.metadata
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._clear_statistics()

    def __repr__(self) -> str:
        return f"SB3VecEnv({self.env!r})"

    def _clear_statistics(self) -> None:
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self._active, self._start = np.ones(self.num_envs, bool), time.time()

    def reset(self) -> Any:
        """Start new episodes with the seed set by ``seed`` and the options set by ``set_options``, which count once.

        Returns:
            Observations, (rows, …).

        Raises:
            ValueError, ConfigError: The rows have different options, or the environment does not take them; they are
                forgotten all the same, nothing else has changed.
        """
        options, *others = self._options
        self._reset_options()
        if any(other != options for other in others):
            raise ValueError("reset: options differ among the rows; expected the same for all, one dict")
        if "reset_mask" in options:
            raise ConfigError("reset: options have 'reset_mask', but Stable-Baselines3 resets all rows; leave it out")
        obs, _ = self.env.reset(seed=self._seeds[0], options=options or None)
        self.reset_infos = self._empty_infos()
        self._reset_seeds()
        self._clear_statistics()
        return obs

    def step_async(self, actions: Any) -> None:
        """Store the actions for ``step_wait``."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> Any:
        """Observations, rewards, dones (rows,) and infos."""
        try:
            obs, rewards, terminations, truncations, info = self.env.step(self._actions)
        except InvalidActionError as error:
            if not self.env.game.layout.masks_actions:
                raise
            hint = "sb3-contrib's MaskablePPO reads the masks of this game, SB3's own algorithms do not"
            raise InvalidActionError(f"{error}. {hint}") from None
        dones = terminations | truncations
        active, returns, lengths = self._active, self._returns + rewards, self._lengths + 1
        self._active, seconds = info["active"], round(time.time() - self._start, 6)
        self._returns, self._lengths = np.where(dones, 0, returns), np.where(dones, 0, lengths)
        infos, rows = self._empty_infos(), np.flatnonzero(dones)
        arrays = (truncations & ~terminations, active, returns, lengths)
        columns = [rows.tolist(), info["final_obs"][rows], *(array[rows].tolist() for array in arrays)]
        for row, final, truncated, was_active, total, length in zip(*columns, strict=True):
            infos[row] = {"terminal_observation": final, "TimeLimit.truncated": truncated}
            if was_active:
                infos[row]["episode"] = {"r": total, "l": length, "t": seconds}
        return obs, rewards, dones, infos

    def _empty_infos(self) -> list[dict[str, Any]]:
        return [{} for _ in range(self.num_envs)]  # not shared: wrappers write into them

    def close(self) -> None:
        """Free all memory."""
        self.env.close()

    @property
    def action_masks(self) -> Callable[[], Any]:
        """Method, only of games that mask actions: valid choices, (rows, num_logits) bool, for MaskablePPO."""
        method: Callable[[], Any] = self.env.action_masks
        return method

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The environment's attribute, the same for every row."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set the environment's attribute; one environment serves all rows, so ``indices`` must be None."""
        if indices is not None:
            raise ValueError(f"set_attr: indices are {indices}; one environment serves all rows: expected None")
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call the environment's method once; its result for every row; "action_masks" is split by row."""
        result, rows = getattr(self.env, method_name)(*args, **kwargs), self._get_indices(indices)
        return [result[row] if method_name == "action_masks" else result for row in rows]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """True for SB3's Monitor, whose "episode" the infos contain, else False; for every row."""
        return [wrapper_class is Monitor] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[Any]:
        """Frames of the first environments."""
        frames = self.env.render()
        return [] if frames is None else frames[: FRAMES * self.env.num_agents : self.env.num_agents]


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> SB3VecEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    game, config = split_config(game, config, ELSEWHERE, output="numpy")
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: GymnasiumVectorEnv) -> SB3VecEnv:
    """A Gymnasium view with ``output="numpy"`` as SB3's VecEnv."""
    return SB3VecEnv(env)
