"""A script that plays pursuit: each pursuer goes to a free cell beside an evader that is nearly surrounded.

    python examples/pursuit_surround.py

The file prints how often the script and random moves catch all evaders, and how long that takes.
"""

from collections.abc import Callable
from functools import cache

import torch
import tyro

from gpu_vecenv import Env, configure, evaluate, make

Actor = Callable[[torch.Tensor], torch.Tensor]

MOVES = ((-1, 0), (1, 0), (0, 1), (0, -1), (0, 0))  # columns and rows of the five actions
# How much farther a pursuer goes to an evader beside which one cell fewer is left to take, and to one that one pursuer
# more is near.
CELLS_PER_MISSING, CELLS_PER_HELPER = 1.5, 1.0
FAR = 1e6


def beside(cells: torch.Tensor, outside: float) -> torch.Tensor:
    """What is on the four cells beside each cell of images (…, rows, columns), in front of the others' axes."""
    padded = torch.nn.functional.pad(cells, (1, 1, 1, 1), value=outside)
    rows, columns = cells.shape[-2:]
    return torch.stack(
        [padded[..., 1 + down : 1 + down + rows, 1 + right : 1 + right + columns] for right, down in MOVES[:4]]
    )


def surround(game: Env) -> Actor:
    """A script for the pursuers: observations (num_envs, count, rows, columns, 3) -> actions (num_envs, count) int32.

    A pursuer's move follows from what it sees; a generator of the script's own decides between equally good moves, so
    that those on one cell part, and makes the moves of those who see no evader.
    """
    (size, _, _) = game.layout.observation.shape
    middle = (size - 1) // 2

    @cache
    def generator_on(device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(1)

    def act(obs: torch.Tensor) -> torch.Tensor:
        wall, pursuers, evaders = obs.unbind(-1)
        others = pursuers.clone()
        others[..., middle, middle] -= 1
        free = (wall == 0) & (others == 0)
        # Of each evader the cells beside it that nobody has taken, and the other pursuers within two rows and columns.
        missing = beside(free.float(), 0).sum(0)
        helpers = 25 * torch.nn.functional.avg_pool2d(others, 5, 1, 2)
        worth = CELLS_PER_MISSING * missing - CELLS_PER_HELPER * helpers
        # A free cell costs what the best evader beside it does, any other cell as many more as it is away by the floor.
        best = beside(torch.where(evaders > 0, worth, FAR), FAR).amin(0)
        cost = torch.where(free, best, FAR)
        for _ in range(2 * size):
            nearer = torch.minimum(cost, beside(cost, FAR).amin(0) + 1)
            cost = torch.where(wall == 0, nearer, FAR)
        costs = torch.stack([cost[..., middle + down, middle + right] for right, down in MOVES], -1)
        costs = torch.where(costs.amin(-1, keepdim=True) > FAR / 2, 0, costs)  # no evader is in sight
        draws = torch.rand(costs.shape, generator=generator_on(obs.device), device=obs.device)
        return (costs + 0.5 * draws).argmin(-1).to(torch.int32)

    return act


def main(
    episodes: int = 100, num_envs: int = 100, max_steps: int = 500, device: str | None = None, seed: int = 1
) -> None:
    """Play episodes by the script and by random moves.

    Args:
        episodes: Of each of both.
        num_envs: Number of environments.
        max_steps: Of an episode.
        device: cpu, cuda or cuda:1; by default cuda if usable, else cpu.
        seed: Of starts, evaders and random actions.
    """
    game = configure("pursuit", max_steps=max_steps)
    for name, actor in (("script", surround(game)), ("random moves", None)):
        results = evaluate(make(game, num_envs, device), {"pursuer": actor}, episodes, seed=seed)
        print(
            f"{name}: all caught in {results['terminated_fraction']:.0%} of the episodes, mean length "
            f"{results['episode_length']:.0f}, return {results['return_pursuer']:.1f}"
        )


if __name__ == "__main__":
    tyro.cli(main)
