"""One launch of the gradients of default networks, with each shape of a block's tile: which one a GPU prefers.

    python3 tests/gpu/gradient_tiles.py [GAME …]

Prints a line for each: microseconds, a median; `*` is what a trainer takes. Data are random numbers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import captured
from gpu_vecenv.train.learner_kernels import LossSettings
from gpu_vecenv.train.perceptron import GRADIENT_TILES, PerceptronKernels, TileShape
from gpu_vecenv.train.ppo import PPOConfig, make_policy
from gpu_vecenv.train.rollout_storage import Rollout

# Game, environments, steps, samples of a minibatch, PPO's configuration, precisions.
ROWS: tuple[tuple[str, int, int, int, dict[str, Any], tuple[str, ...]], ...] = (
    ("cartpole", 16_384, 32, 131_072, {"shared_trunk": False}, ("float32", "tf32", "bfloat16")),
    ("tag_continuous", 2000, 25, 250_000, {}, ("tf32", "bfloat16")),
)
TILES = (
    *GRADIENT_TILES[:3],
    TileShape(64, 4, 1, tiles=3),
    TileShape(64, 4, 2),
    TileShape(64, 4, 2, tiles=2),
    TileShape(128, 8, 2),
)
RUNS, REPLAYS = 5, 20


def random_rollout(game: str, num_envs: int, num_steps: int) -> Rollout:
    """A rollout whose samples are all active."""
    data = Rollout(VecEnv(compared_game(game), num_envs, "cuda", autoreset_mode="next_step"), num_steps)
    for tensor in (data.obs, data.values, data.advantages, data.returns):
        tensor.normal_()
    data.active.fill_(True)
    data.log_probs.fill_(-1.0)
    data.draws.fill_(0)
    return data


def microseconds(graph: Callable[[], Any]) -> float:
    """Of one replay: the median of a few runs."""
    times = []
    for _ in range(RUNS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / REPLAYS)
    return statistics.median(times[1:])


@torch.no_grad()
def measure(data: Rollout, rows: int, config: PPOConfig) -> None:
    """Print a line for each tile of which a multiprocessor holds a block."""
    device, game = resolve_device("cuda"), data.env.game
    policy = make_policy(game, [list(game.layout.present_roles)[-1]], config, None, device)
    kernels = PerceptronKernels(policy, data, config.precision)
    cores, network = data.env.functions.backend.tensor_cores, kernels.perceptron
    assert cores is not None
    numbers = torch.arange(data.rewards.numel(), device=device).view(data.rewards.shape)
    numbers = numbers[:, :, policy.view.agents].flatten()
    indices = numbers[torch.randperm(len(numbers), device=device)[:rows]]
    moments = torch.tensor([rows, 0, rows, rows], dtype=torch.float64, device=device)
    clip, entropy_coefficient = torch.tensor([0.2, 0.01], device=device)
    tiles = [tile for tile in TILES if network.blocks(tile, cores, forward=False)]

    def launch_of(tile: TileShape) -> Any:
        return kernels.gradients(len(indices), LossSettings.of(config, clip, entropy_coefficient), tile)[0]

    with ThreadPoolExecutor(8) as compilers:
        launches = list(compilers.map(launch_of, tiles))
    for tile, launch in zip(tiles, launches, strict=True):
        graph = captured(lambda launch=launch: launch(indices=indices, moments=moments), device)
        blocks, size = network.blocks(tile, cores, forward=False), network.shared_bytes(tile, forward=False)
        chosen = "*" if tile == network.choose_tile(cores, forward=False) else " "
        shape = f"{tile.tiles} x {tile.rows} rows, {tile.row_warps} x {tile.column_warps} warps"
        row = f"{game.layout.name:15} {len(indices)} {config.precision:9} {microseconds(graph):8.1f} us"
        print(f"{row} {chosen} {shape}, {blocks} blocks of {size} B", flush=True)


def main(games: list[str]) -> None:
    """Measure all rows, or those of these games."""
    for game, num_envs, num_steps, rows, config, precisions in ROWS:
        if games and game not in games:
            continue
        data = random_rollout(game, num_envs, num_steps)
        for precision in precisions:
            measure(data, rows, PPOConfig(**config, precision=precision))
        data.env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
