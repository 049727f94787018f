"""Tianshou: each agent of each environment is one row of its BaseVectorEnv.

Tianshou works in NumPy, so each step costs one copy of the outputs to pinned memory and one synchronisation. Its
collectors reset done rows after each step. The autoreset mode is fixed to "same_step": done rows have already been
reset, ``step`` returns their final observations and ``reset(env_id)`` the first ones, so that agents of an environment
may end at different steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import checked_vector_env, requires_extra, split_config
from gpu_vecenv.errors import refuse_counterparts

with requires_extra("tianshou"):
    from tianshou.data import Batch
    from tianshou.env import BaseVectorEnv


class TianshouVectorEnv(BaseVectorEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of environment ``e``.

    Rows that ``collect(n_episode=…)`` omits are not stepped: the state of their environments is restored after the
    step. An active agent of a stepped environment cannot be omitted (ValueError): use an ``n_episode`` that is a
    multiple of the number of agents and, if agents leave early, at most the number of rows. With ``n_step`` the zeros
    until the end of the environment count as an episode of such an agent.

    In games that mask actions, observations are a Batch of "obs" and "mask", (rows, num_logits) bool; in done rows
    "mask" is that of the next episode. ``collect(random=True)`` ignores masks. Infos are empty, because Tianshou
    converts them row by row.

    Raises:
        TypeError, ValueError, UnsupportedGameError: As ``checked_vector_env``; wrappers, which would see steps of
            omitted rows, are not supported.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        self.env = checked_vector_env(env, "Tianshou", output="numpy", masks=True, wrapped=False)
        self.env_num, self.is_async, self.is_closed = env.num_envs, False, False
        self._infos = np.array([{} for _ in range(env.num_envs)])
        self._now = Batch(ended=np.zeros(env.num_envs, bool), active=np.ones(env.num_envs, bool))

    def reset(self, env_id: Any = None, **kwargs: Any) -> Any:
        """First observations of new episodes, (rows, …), and infos; ``kwargs`` may have a "seed", one for all rows.

        Rows that ended in the last step have been reset already, unless there is a seed; the others are reset now.
        ValueError, and nothing has changed, if that is only a part of an environment's rows.
        """
        rows, named = self._named(env_id)
        resets = self._rows_of_envs(named & ~(self._now.ended & (kwargs.get("seed") is None)))
        if (resets & ~named).any():
            raise ValueError(
                "reset: env_id has a row whose episode has not ended; expected all rows of its environment"
            )
        if resets.any():
            obs, info = self.env.reset(**kwargs, options=None if resets.all() else {"reset_mask": resets})
            self._now = _batch(obs, info, self._now.ended)
        self._now.ended[rows] = False
        return self._now.obs[rows], self._infos[rows]

    def step(self, action: Any, id: Any = None) -> Any:
        """One step: observations (final ones in done rows), rewards, terminations, truncations (rows,) and infos.

        ValueError, and nothing has changed, if ``id`` omits an active agent of a stepped environment.
        """
        rows, named = self._named(id)
        stepped, vec_env, last = self._rows_of_envs(named), self.env.vec_env, self._now
        if (stepped & last.active & ~named).any():
            raise ValueError(
                "step: id omits an active agent of an environment; expected all of them. Use an n_episode "
                "that is a multiple "
                f"of the {self.env.num_agents} agents and, if agents leave early, at most {self.env_num}; or use n_step"
            )
        actions, before = self._actions(action, rows), None if stepped.all() else vec_env.state_dict()
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        self._now = _batch(obs, info, terminations | truncations)
        if before is not None:
            env_mask = stepped[:: self.env.num_agents]
            for name, tensor in vec_env.state_dict().items():
                before[name][env_mask] = tensor[env_mask]
            vec_env.load_state_dict(before)
            self._now[~stepped] = last[~stepped]
        outputs, ended = self._now.obs[rows], self._now.ended[rows]  # copies: callers may modify them
        getattr(outputs, "obs", outputs)[ended] = info["final_obs"][rows[ended]]
        return outputs, rewards[rows], terminations[rows], truncations[rows], self._infos[rows]

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """The environment's attribute, the same for every row; spaces are those of a row, with masks that of "obs"."""
        name = f"single_{key}" if key in ("action_space", "observation_space") else key
        return [getattr(self.env, name)] * len(self._named(id)[0])

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set the environment's attribute; one environment serves all rows, so ``id`` must be None."""
        if id is not None:
            raise ValueError(f"set_env_attr: id is {id}; one environment serves all rows: expected None")
        setattr(self.env, key, value)

    def seed(self, seed: Any = None) -> Any:
        """Start new episodes in all rows from one seed, or one for each environment; returns that of each row."""
        self.reset(seed=seed)
        seeds = np.broadcast_to(np.array(seed, object), self.env.vec_env.num_envs)
        return [[own] for own in seeds for _ in range(self.env.num_agents)]

    def render(self, **kwargs: Any) -> Any:
        """One frame per row, drawn on access; None for each without a ``render_mode``."""
        return self.env.render() or [None] * self.env_num

    def close(self) -> None:
        """Free all memory."""
        self.env.close()
        self.is_closed = True

    def _named(self, id: Any) -> tuple[Any, Any]:
        """The rows of ``id`` in order, and their mask among all rows."""
        self._assert_is_not_closed()
        rows = np.atleast_1d(np.arange(self.env_num)[slice(None) if id is None else id])
        times = np.bincount(rows, minlength=self.env_num)
        if times.max() > 1:
            raise ValueError(f"id is {id}; expected each row at most once")
        return rows, times > 0

    def _rows_of_envs(self, rows: Any) -> Any:
        """Mask of all rows of the environments that have a row in the mask ``rows``."""
        return rows.reshape(-1, self.env.num_agents).any(1).repeat(self.env.num_agents)

    def _actions(self, action: Any, rows: Any) -> Any:
        """Actions of all rows; valid ones for the omitted rows."""
        space = self.env.single_action_space
        kind, shape = np.float32 if isinstance(space, Box) else np.int64, (len(rows), *(space.shape or ()))
        given = np.asarray(action)
        if given.shape != shape:
            raise ValueError(f"step: actions have shape {given.shape}; expected {shape}, nothing is broadcast")
        if len(rows) == self.env_num:
            return given[np.argsort(rows)]
        actions = self.env.sample_actions().cpu().numpy().astype(np.result_type(given, kind))
        actions[rows] = given
        return actions


def _batch(obs: Any, info: Any, ended: Any) -> Any:
    mask = info.get("action_mask")
    return Batch(obs=obs if mask is None else Batch(obs=obs, mask=mask), active=info["active"], ended=ended)


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> TianshouVectorEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    game, config = split_config(game, config, output="numpy")
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: GymnasiumVectorEnv) -> TianshouVectorEnv:
    """A Gymnasium view with ``output="numpy"`` as Tianshou's BaseVectorEnv."""
    return TianshouVectorEnv(env)
