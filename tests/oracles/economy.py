"""Oracle of tests/games/economy for many environments, written from its rules; initial states are given.

Places are integers; every operation on rates and rewards is rounded to float32. A step: the planner's rates, clipped to
their Box, hold at once; workers move, then work or rest at the new place; a clerk names the first worker's old place,
modulo 4. Worker j leaves after its step 4 + j, all others at the time limit.
"""

import numpy as np

F = np.float32


class EconomyOracle:
    """Environments of ``game``; ``begin`` sets the initial places of some."""

    def __init__(self, game, num_envs):
        self.game = game
        self.place = np.zeros((num_envs, game.num_workers), np.int64)
        self.rate = np.zeros((num_envs, game.num_rates), F)
        self.elapsed_steps = np.zeros(num_envs, np.int64)
        self.active = np.zeros((num_envs, game.num_agents), bool)

    def begin(self, envs, places):
        """New episodes of these environments, from these places."""
        self.place[envs], self.rate[envs], self.elapsed_steps[envs], self.active[envs] = places, 0, 0, True

    def step(self, actions):
        """(rewards, terminations, truncations) of all, (num_envs, num_agents); ``actions`` of the active count."""
        game, (num_envs, num_agents) = self.game, self.active.shape
        workers, planner = game.num_workers, game.num_workers
        self.elapsed_steps += 1
        last = self.elapsed_steps == game.max_steps
        rewards = np.zeros((num_envs, num_agents), F)
        terminations, truncations = np.zeros((2, num_envs, num_agents), bool)
        space = game.action_space["planner"]
        seen = self.place[:, 0] % 4
        self.rate = np.clip(actions[:, planner, : game.num_rates], space.low, space.high).astype(F)
        total = np.zeros(num_envs, F)
        for j in range(workers):
            live = self.active[:, j]
            self.place[live, j] += actions[live, j, 0].astype(int) - 1
            works = actions[:, j, 1] == 1
            income = np.where(live & works, self.place[:, j].astype(F) / F(game.length - 1), F(0))
            total += income
            rewards[:, j] = np.where(works, income * (F(1) - self.rate[:, 0]), F(0.125) * self.rate[:, -1])
            terminations[:, j] = self.elapsed_steps == 4 + j
            truncations[:, j] = last & ~terminations[:, j]
        tax = self.rate[:, 0] - F(0.25)
        total -= F(4) * tax * tax
        for subsidy in self.rate[:, 1:].T:
            total -= subsidy * subsidy
        rewards[:, planner] = total
        rewards[:, planner + 1 :] = actions[:, planner + 1 :, 0] == seen[:, None]
        truncations[:, planner:] = last[:, None]
        for outputs in (rewards, terminations, truncations):
            outputs[~self.active] = 0
        self.active &= ~(terminations | truncations)
        return rewards, terminations, truncations

    def observations(self):
        """(num_envs, num_agents, 3), padded with zeros."""
        game, workers = self.game, self.game.num_workers
        obs = np.zeros((*self.active.shape, 3), F)
        obs[:, :workers, 0] = self.place
        obs[:, :workers, 1] = self.rate[:, :1]
        obs[:, :workers, 2] = self.rate[:, -1:]
        obs[:, workers:, 0] = self.place[:, :1]
        obs[:, workers:, 1] = self.elapsed_steps[:, None]
        assert obs.shape[1] == game.num_agents
        return obs

    def action_masks(self):
        """(num_envs, num_agents, 6): of a worker's move, one more, its work; of a clerk's four choices."""
        game, masks = self.game, np.zeros((*self.active.shape, 6), bool)
        workers = game.num_workers
        for move in range(3):
            there = self.place + move - 1
            masks[:, :workers, move] = (there >= 0) & (there < game.length) | ~self.active[:, :workers]
        masks[:, :workers, 4] = True
        masks[:, :workers, 5] = (self.place > 0) | ~self.active[:, :workers]
        masks[:, workers + 1 :, :4] = True
        return masks
