"""rsl_rl: each agent of each environment is one row of its VecEnv, trained by one policy.

Observations, rewards and flags are the step buffers; nothing is copied and no step synchronises with the device
(rsl_rl itself does, for ``check_for_nan`` and its logger). Its VecEnv resets within ``step`` and reads time-outs from
the extras: the autoreset mode is fixed to "same_step".

rsl_rl's Gaussian policies are unbounded; ours clip, as its environments do. Its PPO bootstraps a time-out with the
value of the observation before the step and does not use ``final_obs``.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box

from gpu_vecenv import EpisodeLog, GymnasiumVectorEnv
from gpu_vecenv.adapters import checked_vector_env, requires_extra
from gpu_vecenv.errors import UnsupportedGameError, refuse_counterparts

with requires_extra("rsl-rl"):
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict

LOG_EVERY = 8  # steps between "log" entries: rollouts are rarely shorter, and each costs several launches


class RslRlVecEnv(VecEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of environment ``e``; ``num_envs`` counts rows, as rsl_rl does.

    The row of an agent that left early is zeros until its environment ends, and is done once more then; rsl_rl trains
    on such rows too. With ``step_dt`` 1 the weight of random network distillation is per step, as rewards are.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="torch"``.
        UnsupportedGameError: Actions are not a Box (rsl_rl has no categorical distribution), or masked.
    """

    step_dt = 1.0

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        self.env = checked_vector_env(env, "rsl_rl", kinds=(Box,))
        self.vec_env = env.unwrapped.vec_env  # env may be inside wrappers
        self.num_envs, self.device, self.cfg = env.num_envs, self.vec_env.device, self.vec_env.game
        box: Any = env.single_action_space
        self.num_actions = box.shape[0]
        self._episodes, self._num_steps = EpisodeLog(self.vec_env), 0
        self.reset()

    @property
    def unwrapped(self) -> RslRlVecEnv:
        """The environment itself."""
        return self

    @property
    def max_episode_length(self) -> int:
        """The game's ``max_steps``."""
        limit: int | None = getattr(self.cfg, "max_steps", None)
        if limit is None:
            raise UnsupportedGameError(
                f"{type(self.cfg).__name__} has no max_steps, which rsl_rl calls max_episode_length; "
                "call learn with init_at_random_ep_len=False"
            )
        return limit

    @property
    def episode_length_buf(self) -> torch.Tensor:
        """Steps since the reset of each row's environment, (rows,) int64, a copy.

        Assigning a tensor of this shape sets ``elapsed_steps`` on the device and updates the observations. Of the rows
        of an environment only the first value is used.
        """
        return self.vec_env.elapsed_steps.long().repeat_interleave(self.vec_env.num_agents)

    @episode_length_buf.setter
    def episode_length_buf(self, lengths: torch.Tensor) -> None:
        if lengths.shape != (self.num_envs,):
            raise ValueError(f"episode_length_buf: shape is {tuple(lengths.shape)}; expected ({self.num_envs},)")
        self.vec_env.elapsed_steps.copy_(lengths[:: self.vec_env.num_agents])
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._obs, _ = self.env.reset(options={"reset_mask": none})  # updates observations, through wrappers too

    def get_observations(self) -> TensorDict:
        """The current observations, group "policy": (rows, *shape)."""
        return TensorDict({"policy": self._obs}, batch_size=[self.num_envs], device=self.device)

    def reset(self, seed: int | None = None) -> tuple[TensorDict, dict[str, Any]]:
        """Start new episodes in all environments; rsl_rl does not call it. Use it to seed, or to evaluate.

        Raises:
            InvalidSeedError: ``seed`` is not an int in [0, 2**64 - 1].
        """
        self._obs, _ = self.env.reset(seed=seed)
        return self.get_observations(), {}

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One step.

        Args:
            actions: (rows, num_actions) float32 on the device.

        Returns:
            Observations, rewards (rows,) float32, dones (rows,) int64 and extras: "time_outs" (rows,) bool; and every
            eighth step "log", means over the episodes completed since the last one (or the previous means if there are
            none, NaN before the first): return of each role, length in steps, fraction terminated.
        """
        self._obs, rewards, terminations, truncations, _ = self.env.step(actions)
        extras: dict[str, Any] = {"time_outs": truncations & ~terminations}
        self._num_steps += 1
        if self._num_steps % LOG_EVERY == 0:
            extras["log"] = {f"Episode/{name}": mean for name, mean in self._episodes.means().items()}
        return self.get_observations(), rewards, (terminations | truncations).long(), extras

    def close(self) -> None:
        """Free all memory."""
        self.env.close()


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> RslRlVecEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **{"fill_final_obs": False, **config}))


def wrap(env: GymnasiumVectorEnv) -> RslRlVecEnv:
    """A Gymnasium view with ``output="torch"`` as rsl_rl's VecEnv; resets it."""
    return RslRlVecEnv(env)
