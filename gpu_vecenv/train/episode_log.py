"""EpisodeLog: means over the latest episodes of all environments, for the logs of trainers."""

from __future__ import annotations

import torch

from gpu_vecenv.engine.vec_env import VecEnv


class EpisodeLog:
    """Means over the latest episodes of each environment. No device synchronisation.

    These are the episodes that ended between the last two calls between which any did in that environment: each
    environment counts in every mean. Means over whatever has just ended would be biased as long as episodes begin
    together: first the short ones end, later all long ones at once. There are no means until every environment has
    ended an episode.

    Args:
        vec_env: The environment, whose ``episode_statistics`` are read.

    Raises:
        TypeError: ``vec_env`` is no VecEnv.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        if not isinstance(vec_env, VecEnv):
            raise TypeError(f"vec_env is a {type(vec_env).__name__}; expected a VecEnv (of a view: view.vec_env)")
        self._vec_env = vec_env
        self._agents = {
            role: where for role, where in vec_env.game.layout.role_slices.items() if where.stop > where.start
        }
        self.names = (*(f"return_{role}" for role in self._agents), "length", "terminated")
        self._before, self._clears = self._sums(), vec_env.clears
        self._first = vec_env.data["engine_episode"][:, 0].clamp(min=0)
        self.latest = torch.zeros_like(self._before)

    def means(self) -> dict[str, torch.Tensor]:
        """Mean return of an agent of each role, length in steps, and fraction of episodes that were not truncated.

        Each is a float64 tensor () on the device: NaN until every environment has ended an episode, and unchanged if no
        episode has ended since the last call or since ``clear_episode_statistics``. After ``load_state_dict`` with an
        older state the count starts at the next call.
        """
        self.update()
        *totals, episodes = torch.where(self.in_first_episode().any(), torch.nan, self.latest.sum(0)).unbind()
        return {name: total / episodes for name, total in zip(self.names, totals, strict=True)}

    def update(self) -> torch.Tensor:
        """Take in the episodes that have ended since the last call; the number of them, () float64.

        ``latest`` then has the sums over the latest episodes of each environment, (num_envs, len(names) + 1) float64: a
        column for each of ``names``, then their number.
        """
        self.begin_update()
        return self.add_ended()

    def begin_update(self) -> None:
        """What of ``update`` is no work of the device: after ``clear_episode_statistics`` sums begin at 0."""
        if self._clears != self._vec_env.clears:
            self._before.zero_()
            self._clears = self._vec_env.clears

    def add_ended(self) -> torch.Tensor:
        """The rest of ``update``, which may be part of a CUDA graph."""
        sums = self._sums()
        new = sums - self._before
        self._before.copy_(sums)
        self.latest.copy_(torch.where(new[:, -1:] > 0, new, self.latest))
        return new[:, -1].sum()

    def in_first_episode(self) -> torch.Tensor:
        """The environments whose first episode since the log was made has not ended, (num_envs,) bool."""
        return (self._vec_env.data["engine_episode"][:, 0] <= self._first) & self._vec_env.active.any(1)

    def _sums(self) -> torch.Tensor:
        """Sums over all completed episodes of each environment, with the columns of ``latest``."""
        statistics = self._vec_env.episode_statistics()
        columns = [statistics["returns"][:, where].mean(1, dtype=torch.float64) for where in self._agents.values()]
        columns += [statistics[name].double() for name in ("lengths", "terminations", "episodes")]
        return torch.stack(columns, 1)
