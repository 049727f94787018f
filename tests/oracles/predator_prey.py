"""Oracle of examples/own_env/predator_prey for one environment, written from its rules alone, random numbers included.

Everything but rewards and observations is an integer. Rewards are float32, each operation rounded: meals times
meal_reward, then minus starving_penalty. Order of a step: all who live move; the lowest-numbered living predator in a
living prey's cell eats it; predators lose one step of energy and gain their meals; who has none left starves; prey
that wait come nearer to their birth, those eaten in this step begin to wait.
"""

import numpy as np

from oracles.philox import ONES, philox

F = np.float32
MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
RESET, STEP = 0, 1  # streams


class PredatorPreyOracle:
    """One environment of ``game``, with index ``env_index``, after a reset with ``seed``."""

    def __init__(self, game, seed, env_index):
        self.game = game
        self.key = philox([env_index & ONES, env_index >> 32, 0, 0], [seed & ONES, seed >> 32])[:2]
        self.episode = -1
        self.begin()

    def begin(self):
        """A new episode."""
        game, self.elapsed_steps = self.game, 0
        self.episode += 1
        self.active = np.ones(game.num_agents, bool)
        self.alive = np.ones(game.num_agents, bool)
        self.cell = np.array([self.anywhere(RESET, i) for i in range(game.num_agents)], np.int32)
        self.energy = np.full(game.num_predators, game.hunger, np.int32)
        self.unborn = np.zeros(game.num_prey, np.int32)

    def anywhere(self, stream, agent):
        """A cell drawn for an agent."""
        cell = []
        for axis in range(2):
            word = philox([stream << 29 | 1 << 28 | axis, agent, self.elapsed_steps, self.episode], self.key)
            cell.append((word[1] << 32 | word[0]) * self.game.grid >> 64)
        return cell

    def step(self, actions):
        """Play one step; (rewards, terminations, truncations)."""
        game, hunters = self.game, range(self.game.num_predators)
        self.elapsed_steps += 1
        rewards = np.zeros(game.num_agents, F)
        terminations = np.zeros(game.num_agents, bool)
        self.cell[self.alive] = (self.cell + MOVES[actions])[self.alive] % game.grid

        meals, eaten = [0] * game.num_predators, []
        for prey in range(game.num_predators, game.num_agents):
            there = [j for j in hunters if self.alive[j] and (self.cell[j] == self.cell[prey]).all()]
            if self.alive[prey] and there:
                meals[there[0]] += 1
                eaten.append(prey)
        for j in hunters:
            if not self.alive[j]:
                continue
            self.energy[j] = min(self.energy[j] - 1 + meals[j] * game.meal, game.hunger)
            rewards[j] = F(meals[j]) * F(game.meal_reward)
            if self.energy[j] <= 0:
                rewards[j] -= F(game.starving_penalty)
                self.alive[j], terminations[j] = False, True
        for k in range(game.num_prey):
            prey = game.num_predators + k
            if prey in eaten:
                self.alive[prey], self.unborn[k] = False, game.rebirth
                rewards[prey] = F(0) - F(game.eaten_penalty)
                terminations[prey] = game.rebirth == 0
            elif self.alive[prey]:
                rewards[prey] = F(game.living_reward)
            elif self.unborn[k] > 0:
                self.unborn[k] -= 1
                if self.unborn[k] == 0:
                    self.alive[prey], self.cell[prey] = True, self.anywhere(STEP, prey)

        nobody_hunts = not self.alive[: game.num_predators].any()
        nobody_flees = not (self.alive[game.num_predators :] | (self.unborn > 0)).any()
        terminations |= nobody_hunts or nobody_flees
        terminations &= self.active
        truncations = self.active & ~terminations & (self.elapsed_steps >= game.max_steps)
        rewards[~self.active] = 0
        self.active = self.active & ~terminations & ~truncations
        return rewards, terminations, truncations

    def observe(self):
        """(num_agents, 2 * view + 1) float32; the last number of a prey is padding."""
        game, sight = self.game, self.game.sight
        obs = np.zeros((game.num_agents, 2 * game.view + 1), F)
        predator = np.arange(game.num_agents) < game.num_predators
        for i in np.flatnonzero(self.alive):
            others = np.flatnonzero(self.alive & (np.arange(game.num_agents) != i))
            offset = (self.cell[others] - self.cell[i] + sight) % game.grid
            near = (offset <= 2 * sight).all(1)
            place = offset[:, 0] * (2 * sight + 1) + offset[:, 1] + np.where(predator[others], 0, game.view)
            np.add.at(obs[i], place[near], F(1))
            if predator[i]:
                obs[i, -1] = F(self.energy[i]) / F(game.hunger)
        return obs
