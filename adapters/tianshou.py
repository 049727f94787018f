"""Tianshou: every agent of every replica is one row of its BaseVectorEnv.

Tianshou works in NumPy, so each step costs one copy of the outputs to pinned memory and one synchronisation. Its
collectors reset rows that are done after each step. This adapter fixes "same_step": those began anew in the step that
ended them, ``step`` returns their last observations and ``reset(env_id)`` the first ones, so that agents of one replica
may end at different steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import checked_vector_env, requires_extra, split_config

with requires_extra("tianshou"):
    from tianshou.data import Batch
    from tianshou.env import BaseVectorEnv


class TianshouVectorEnv(BaseVectorEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of replica ``e``.

    Rows that ``collect(n_episode=…)`` leaves out stand still: their replicas are put back after the step. An agent that
    still plays cannot be left out of a replica that moves (ValueError): let ``n_episode`` be a multiple of the agents
    and, if some leave early, at most the rows. With ``n_step`` the rest until a replica's end counts as their episode.

    In games that mask actions, observations are a Batch of "obs" and "mask", (rows, num_logits) bool; where a row ends,
    "mask" is the next start's. ``collect(random=True)`` knows no masks. Box actions that Tianshou's scaling puts beyond
    a bound by rounding are put on it. Infos are empty, because Tianshou takes them apart row by row.

    Raises:
        TypeError, ValueError, UnsupportedGameError: As ``checked_vector_env``; a wrapper would see rows move that stand.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        self.env = checked_vector_env(env, "Tianshou", output="numpy", masks=True, wrapped=False)
        self.env_num, self.is_async, self.is_closed = env.num_envs, False, False
        self._infos = np.array([{} for _ in range(env.num_envs)])
        self._now = Batch(ended=np.zeros(env.num_envs, bool), active=np.ones(env.num_envs, bool))

    def reset(self, env_id: Any = None, **kwargs: Any) -> Any:
        """First observations of new episodes, (rows, …), and infos; ``kwargs`` may have a "seed", one for all rows.

        Rows that ended at their last step have begun already, unless there is a seed; the others begin now. ValueError,
        and nothing has changed, where only some of a replica's agents would.
        """
        rows, named = self._named(env_id)
        begin = self._replicas_of(named & ~(self._now.ended & (kwargs.get("seed") is None)))
        if (begin & ~named).any():
            raise ValueError("reset: env_id has a row whose episode goes on; expected all rows of its replica with it")
        if begin.any():
            obs, info = self.env.reset(**kwargs, options=None if begin.all() else {"reset_mask": begin})
            self._now = _batch(obs, info, self._now.ended)
        self._now.ended[rows] = False
        return self._now.obs[rows], self._infos[rows]

    def step(self, action: Any, id: Any = None) -> Any:
        """One step: observations, the last ones where rows end, rewards, terminations, truncations (rows,) and infos.

        ValueError, and nothing has changed, where ``id`` leaves out an agent that still plays in a replica that moves.
        """
        rows, named = self._named(id)
        moves, vec_env, last = self._replicas_of(named), self.env.vec_env, self._now
        if (moves & last.active & ~named).any():
            raise ValueError(
                "step: id has some agents of a replica only; expected all that play. Let n_episode be a multiple of "
                f"the {self.env.num_agents} agents and, if some leave early, at most {self.env_num}; or take n_step"
            )
        actions, before = self._actions(action, rows), None if moves.all() else vec_env.state_dict()
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        self._now = _batch(obs, info, terminations | truncations)
        if before is not None:
            replicas = moves[:: self.env.num_agents]
            for name, tensor in vec_env.state_dict().items():
                before[name][replicas] = tensor[replicas]
            vec_env.load_state_dict(before)
            self._now[~moves] = last[~moves]
        given, over = self._now.obs[rows], self._now.ended[rows]  # copies: who is given them may write to them
        getattr(given, "obs", given)[over] = info["final_obs"][rows[over]]
        return given, rewards[rows], terminations[rows], truncations[rows], self._infos[rows]

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """The environment's attribute, the same for every row; spaces are a row's, that of "obs" where masks are."""
        name = f"single_{key}" if key in ("action_space", "observation_space") else key
        return [getattr(self.env, name)] * len(self._named(id)[0])

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set the environment's attribute; one environment serves all rows, so ``id`` must be None."""
        if id is not None:
            raise ValueError(f"set_env_attr: id is {id}; one environment serves all rows: expected None")
        setattr(self.env, key, value)

    def seed(self, seed: Any = None) -> Any:
        """Begin new episodes, all rows from one seed (no list of them); returns it for each row."""
        self.reset(seed=seed)
        return [[seed]] * self.env_num

    def render(self, **kwargs: Any) -> Any:
        """One frame per row, drawn when it is looked at; None for each without a ``render_mode``."""
        return self.env.render() or [None] * self.env_num

    def close(self) -> None:
        """Let go of all memory."""
        self.env.close()
        self.is_closed = True

    def _named(self, id: Any) -> tuple[Any, Any]:
        """The rows in the order given, and which of all they are."""
        self._assert_is_not_closed()
        rows = np.atleast_1d(np.arange(self.env_num)[slice(None) if id is None else id])
        times = np.bincount(rows, minlength=self.env_num)
        if times.max() > 1:
            raise ValueError(f"ids are {id}; expected each row once")
        return rows, times > 0

    def _replicas_of(self, rows: Any) -> Any:
        """All rows of the replicas that some of ``rows`` belong to."""
        return rows.reshape(-1, self.env.num_agents).any(1).repeat(self.env.num_agents)

    def _actions(self, action: Any, rows: Any) -> Any:
        """Actions of all rows; valid ones where none are given."""
        space = self.env.single_action_space
        kind, shape = np.float32 if isinstance(space, Box) else np.int64, (len(rows), *(space.shape or ()))
        given = np.asarray(action).astype(kind, casting="same_kind")
        if given.shape != shape:
            raise ValueError(f"step: actions have shape {given.shape}; expected {shape}, nothing is broadcast")
        if isinstance(space, Box):
            near, slack = np.clip(given, space.low, space.high), 1e-6 * np.maximum(abs(space.low), abs(space.high))
            given = np.where(abs(given - near) <= slack, near, given)
        actions = given.copy() if len(rows) == self.env_num else self.env.sample_actions().cpu().numpy().astype(kind)
        actions[rows] = given
        return actions


def _batch(obs: Any, info: Any, ended: Any) -> Any:
    mask = info.get("action_mask")
    return Batch(obs=obs if mask is None else Batch(obs=obs, mask=mask), active=info["active"], ended=ended)


def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> TianshouVectorEnv:
    """``num_envs`` replicas of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    game, config = split_config(game, config, output="numpy")
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: GymnasiumVectorEnv) -> TianshouVectorEnv:
    """A Gymnasium view with ``output="numpy"`` as Tianshou's BaseVectorEnv."""
    return TianshouVectorEnv(env)
