"""EpisodeLog: means over the latest episodes of all environments, for the logs of trainers."""

from __future__ import annotations

import torch

from gpu_vecenv.compile.function_manager import Launch
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train.iteration_kernels import OTHER_SUMS, episode_metrics_launch


class EpisodeLog:
    """Means over the latest episodes of each environment. No device synchronisation.

    These are the episodes that ended between the last two calls between which any did in that environment: each
    environment counts in every mean. Means over whatever has just ended would be biased as long as episodes begin
    together: first the short ones end, later all long ones at once. There are no means until every environment has
    ended an episode that counts.

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
        device, columns = vec_env.device, len(self.names) + 1
        self._before = torch.zeros((vec_env.num_envs, columns), dtype=torch.float64, device=device)
        self.latest, self._clears = torch.zeros_like(self._before), vec_env.clears
        self._sums = torch.zeros(self.num_sums, dtype=torch.float64, device=device)
        self._bounds = torch.tensor([*(where.start for where in self._agents.values()), vec_env.layout.num_agents])
        self._bounds = self._bounds.to(device)
        self._launch = self.launch_into(self._sums, clears=False)
        self.take_in(self._launch)  # what ended before does not count
        self.latest.zero_()

    @property
    def num_sums(self) -> int:
        """Numbers that a launch writes."""
        return len(self.names) + 1 + OTHER_SUMS + 1

    def launch_into(self, sums: torch.Tensor, *, clears: bool) -> Launch:
        """What ``take_in`` launches, see ``episode_metrics_launch``; ``sums`` is (num_sums,) float64."""
        given = {"bounds": self._bounds, "before": self._before, "latest": self.latest}
        return episode_metrics_launch(self._vec_env, **given, sums=sums, clears=clears)

    def skip_current(self, mask: torch.Tensor) -> None:
        """Do not count the episodes that are running where ``mask`` (num_envs,) bool is True."""
        self.latest[:, -1].masked_fill_(mask, -1.0)

    def take_in(self, launch: Launch) -> None:
        """The work of ``update`` on the device, which may be part of a CUDA graph."""
        self._vec_env.launch(launch, "episode_statistics")

    def means(self) -> dict[str, torch.Tensor]:
        """Mean return of an agent of each role, length in steps, and fraction of episodes that were not truncated.

        Each is a float64 tensor () on the device: NaN until every environment has ended an episode, and unchanged if no
        episode has ended since the last call or since ``clear_episode_statistics``. After ``load_state_dict`` with an
        older state the count starts at the next call.
        """
        self.update()
        columns = len(self.names) + 1
        *totals, episodes = torch.where(self._sums[columns + 1] > 0, torch.nan, self._sums[:columns]).unbind()
        return {name: total / episodes for name, total in zip(self.names, totals, strict=True)}

    def update(self) -> torch.Tensor:
        """Take in the episodes that have ended since the last call; the number of them, () float64.

        ``latest`` then has the sums over the latest episodes of each environment, (num_envs, len(names) + 1) float64: a
        column for each of ``names``, then their number, or -1 where the episode that is running does not count.
        """
        self.begin_update()
        self.take_in(self._launch)
        return self._sums[len(self.names) + 1].clone()

    def begin_update(self) -> None:
        """The host's part of ``update``: after ``clear_episode_statistics`` sums begin at 0."""
        if self._clears != self._vec_env.clears:
            self._before.zero_()
            self._clears = self._vec_env.clears

    def cleared(self) -> None:
        """Count what a launch with ``clears`` does as a ``clear_episode_statistics``, which this log has followed."""
        self._vec_env.clears += 1
        self._clears = self._vec_env.clears
