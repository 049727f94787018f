"""Scripted robots for the game warehouse, to compare trained policies with: they bring shelves and put them back.

``fetch(game)`` is called with the observations of all robots, (num_envs, n, numbers) float32, and returns actions,
(num_envs, n) int32. They share what they see, which has to be the whole warehouse: ``sensor_range`` at least its larger
side less one. A robot that is in another's way for long may act at random, from a generator that begins anew with the
script. Everything is computed on the host: this is a yardstick, not a fast player.
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
import tyro

from gpu_vecenv import configure, evaluate, make
from gpu_vecenv.envs.warehouse import Warehouse

Cell = tuple[int, int]  # column, row
FORWARD, LEFT, RIGHT, TOGGLE_LOAD = 1, 2, 3, 4
AHEAD = ((0, -1), (0, 1), (-1, 0), (1, 0))  # up, down, left, right
CLOCKWISE = (0, 3, 1, 2)


class Fetch:
    """The robots of each environment, one after the other: what a robot is after, no other goes for."""

    def __init__(self, game: Warehouse):
        farthest = max(game.width, game.height) - 1
        if game.sensor_range < farthest:
            raise ValueError(f"sensor_range is {game.sensor_range}; expected at least {farthest}, to see everything")
        self.game, self.random = game, np.random.default_rng(0)
        self.storage = {(int(x), int(y)) for y, x in np.argwhere(game.plan.tiles == 1)}
        self.goals = {(int(x), int(y)) for x, y in game.plan.goals}

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, n) int32."""
        actions = [self._acts(rows) for rows in obs.cpu().numpy()]
        return torch.tensor(actions, dtype=torch.int32, device=obs.device)

    def _acts(self, rows: np.ndarray) -> list[int]:
        game, reach = self.game, self.game.sensor_range
        scale = (game.width - 1, game.height - 1) if game.normalised_coordinates else (1, 1)
        cells: list[Cell] = [(round(float(x * scale[0])), round(float(y * scale[1]))) for x, y in rows[:, :2]]
        seen = rows[0, 8:].reshape(game.sensors, game.sensors, 7)[:, :, 5:]
        shelves = {
            (int(x) - reach + cells[0][0], int(y) - reach + cells[0][1]): bool(seen[y, x, 1])
            for y, x in np.argwhere(seen[..., 0])
        }
        loaded = {cell for cell, row in zip(cells, rows, strict=True) if row[2]}
        taken: set[Cell] = set()
        actions = []
        for cell, row in zip(cells, rows, strict=True):
            if not row[2]:
                targets = {place for place, requested in shelves.items() if requested and place not in loaded | taken}
                closed: set[Cell] = set()
            else:
                targets = self.goals if shelves.get(cell) else self.storage - shelves.keys() - taken
                if not shelves.get(cell) and cell in self.storage:
                    targets = {cell}
                closed = shelves.keys() - {cell}
            # Round the others, or else, if nothing else leads there, behind them.
            way = self._way(cell, targets, closed | (set(cells) - {cell})) or self._way(cell, targets, closed - loaded)
            if not way or self.random.random() < 1 / 16:
                actions.append(int(self.random.integers(4)))
                continue
            taken.add(way[-1])
            actions.append(self._action(way, int(row[3:7].argmax())))
        return actions

    def _way(self, start: Cell, targets: Iterable[Cell], closed: set[Cell]) -> list[Cell]:
        """The cells of a shortest way to one of the targets, or nothing."""
        targets, before = set(targets), {start: start}
        queue = deque([start])
        while queue:
            cell = queue.popleft()
            if cell in targets:
                way = [cell]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            for dx, dy in AHEAD:
                other = (cell[0] + dx, cell[1] + dy)
                inside = 0 <= other[0] < self.game.width and 0 <= other[1] < self.game.height
                if inside and other not in closed and other not in before:
                    before[other] = cell
                    queue.append(other)
        return []

    @staticmethod
    def _action(way: list[Cell], direction: int) -> int:
        if len(way) == 1:
            return TOGGLE_LOAD
        step = (way[1][0] - way[0][0], way[1][1] - way[0][1])
        turns = (CLOCKWISE.index(AHEAD.index(step)) - CLOCKWISE.index(direction)) % 4
        return (FORWARD, RIGHT, RIGHT, LEFT)[turns]


def fetch(game: Warehouse) -> Callable[[torch.Tensor], torch.Tensor]:
    """Robots that fetch what is requested: observations (num_envs, n, numbers) -> actions (num_envs, n) int32.

    Raises:
        ValueError: A robot does not see the whole warehouse.
    """
    return Fetch(game)


def main(size: str = "tiny", num_agents: int = 4, max_steps: int = 500, episodes: int = 4, seed: int = 0) -> None:
    """Print how many shelves the robots of an episode deliver."""
    game = configure("warehouse", size=size, num_agents=num_agents, max_steps=max_steps)
    game = configure(game, sensor_range=max(game.width, game.height) - 1, reward_type="global")
    env = make(game, num_envs=episodes)
    result = evaluate(env, {"robot": fetch(game)}, episodes=episodes, seed=seed)
    print(f"{size}, {num_agents} robots: {result['return_robot']:.1f} deliveries an episode")


if __name__ == "__main__":
    tyro.cli(main)
