"""EpisodeLog: means over recently finished episodes, for the logs of trainers."""

from __future__ import annotations

import torch

from gpu_vecenv.engine.vec_env import VecEnv


def in_first_episode(env: VecEnv) -> torch.Tensor:
    """The environments whose first episode since they were seeded has not ended, (num_envs,) bool.

    As long as there are any, episodes that have ended are mostly short ones, and means over them are biased.
    """
    return (env.data["engine_episode"][:, 0] == 0) & env.active.any(1)


class EpisodeLog:
    """Means over the episodes finished since the last call of ``means()``. No device synchronisation.

    There are none until every environment has ended its first episode, since short ones end first; the first means are
    those of all episodes since the log was made.

    Args:
        vec_env: The environment, whose ``episode_statistics`` are read.

    Raises:
        TypeError: ``vec_env`` is no VecEnv.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        if not isinstance(vec_env, VecEnv):
            raise TypeError(f"vec_env is a {type(vec_env).__name__}; expected a VecEnv (of a view: view.vec_env)")
        self._vec_env = vec_env
        roles = {role: count for role, count in vec_env.game.layout.roles.items() if count}
        self._counts = list(roles.values())
        self.names = (*(f"return_{role}" for role in roles), "length", "terminated")
        self._means = torch.full((len(self.names),), torch.nan, dtype=torch.float64, device=vec_env.device)
        self._before, self._clears = self._sums(), vec_env.clears

    def means(self) -> dict[str, torch.Tensor]:
        """Mean return of an agent of each role, length in steps, and fraction of episodes that were not truncated.

        Each is a float64 tensor () on the device: NaN until every environment has ended its first episode, and
        unchanged if no episode has ended since the last call or since ``clear_episode_statistics``. After
        ``load_state_dict`` with an older state the count starts at the next call.
        """
        sums = self._sums()
        if self._clears != self._vec_env.clears:
            self._before, self._clears = torch.zeros_like(sums), self._vec_env.clears
        new, pending = sums - self._before, in_first_episode(self._vec_env).any()
        self._means = torch.where((new[-1] > 0) & ~pending, new[:-1] / new[-1], self._means)
        self._before = torch.where((new[-1] >= 0) & pending, self._before, sums)
        return dict(zip(self.names, self._means.unbind(), strict=True))

    def _sums(self) -> torch.Tensor:
        statistics = self._vec_env.episode_statistics()
        by_role = statistics["returns"].sum(0, dtype=torch.float64).split(self._counts)
        counts = [statistics[name].sum() for name in ("lengths", "terminations", "episodes")]
        return torch.stack([*(returns.mean() for returns in by_role), *counts])
