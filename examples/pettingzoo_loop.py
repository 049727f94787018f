"""A research loop on PettingZoo's ParallelEnv: each tagger learns by itself, from its own rewards, by Q-learning.

Dictionaries of agents, only one line of gpu_vecenv: the one that makes the env. A tagger only observes on which side of
it the runner is: nine situations, five moves, a table of 45 numbers each. The runner moves at random.
"""

import numpy as np
import tyro
from pettingzoo import ParallelEnv

import gpu_vecenv

SITUATIONS, MOVES = 9, 5


def situation(obs: np.ndarray) -> int:
    """Where the runner is: to the left, in the same column, to the right; below, in the same row, above."""
    column, row = np.sign(obs[2:4] - obs[:2]).astype(int) + 1
    return 3 * column + row


def play(
    env: ParallelEnv, tables: dict[str, np.ndarray], rng: np.random.Generator, learn: float, explore: float
) -> int:
    """One episode; its steps. The tables change unless ``learn`` is 0."""
    observations, _ = env.reset()
    steps = 0
    while env.agents:
        seen = {agent: situation(obs) for agent, obs in observations.items()}
        actions = {}
        for agent in env.agents:
            greedy = agent in tables and rng.random() >= explore
            actions[agent] = tables[agent][seen[agent]].argmax() if greedy else env.action_space(agent).sample()
        observations, rewards, terminations, _, _ = env.step(actions)
        steps += 1
        for agent, table in tables.items():
            future = 0.0 if terminations[agent] else 0.95 * table[situation(observations[agent])].max()
            change = rewards[agent] + future - table[seen[agent], actions[agent]]
            table[seen[agent], actions[agent]] += learn * change
    return steps


def main(episodes: int = 100, num_taggers: int = 2, grid: int = 10, device: str | None = "cpu") -> None:
    """Learn, and compare with random actions.

    Args:
        episodes: To learn from; a quarter as many are played before and after.
        num_taggers: Agents that learn.
        grid: Cells per side, minus one.
        device: One environment is faster on the CPU.
    """
    config = {"num_taggers": num_taggers, "grid": grid, "random_start": True, "full_observation": False}
    env = gpu_vecenv.parallel_env("tag_gridworld", device, output="numpy", **config)
    rng = np.random.default_rng(1)
    env.reset(seed=1)
    for agent in env.possible_agents:
        env.action_space(agent).seed(1)
    tables = {agent: np.zeros((SITUATIONS, MOVES)) for agent in env.possible_agents if agent.startswith("tagger")}

    def steps(explore: float) -> float:
        return float(np.mean([play(env, tables, rng, learn=0.0, explore=explore) for _ in range(episodes // 4)]))

    at_random = steps(explore=1.0)
    for _ in range(episodes):
        play(env, tables, rng, learn=0.2, explore=0.2)
    learnt = steps(explore=0.05)
    print(
        f"steps until the runner is caught, or 100: at random {at_random:.0f}, after {episodes} episodes {learnt:.0f}"
    )


if __name__ == "__main__":
    tyro.cli(main)
