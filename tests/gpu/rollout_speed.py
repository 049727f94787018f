"""Rollouts with default networks, by several launches a step and by one launch with each shape of a block's tile.

    python3 tests/gpu/rollout_speed.py RESULTS.json [large]

A row has microseconds of a rollout as CUDA graphs, medians of ten runs, with quartiles under `<name>_quartiles`;
`chosen` is the tile that a trainer takes. With `large` the rows are those of games whose environments are stepped by
groups of several warps, with the tiles that have enough threads at work.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from measurements import Measurements, arguments

from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import captured, run_seconds, spread
from gpu_vecenv.train.fused_rollout import fused_rollout, rollout_program
from gpu_vecenv.train.perceptron import Perceptron, perceptron_of
from gpu_vecenv.train.policy_specs import PolicySpec, policy_of_spec, resolve_specs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.rollout_tiles import RolloutTile, rollout_tiles
from gpu_vecenv.train.trainer import Trainer

SEPARATE = {"shared_trunk": False, "num_steps": 32, "hidden_sizes": (64, 64)}
TF32 = {**SEPARATE, "precision": "tf32"}
# Game, environments, PPO's configuration.
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("cartpole", 512, TF32),
    ("cartpole", 4096, TF32),
    ("cartpole", 16_384, TF32),
    ("cartpole", 16_384, SEPARATE),
    ("cartpole", 16_384, {**TF32, "shared_trunk": True}),
    ("cartpole", 131_072, TF32),
    ("pendulum", 4096, TF32),
    ("simple_spread", 512, TF32),
    ("simple_spread", 4096, TF32),
    ("tag_gridworld", 4096, TF32),
    ("simple_adversary", 4096, TF32),
)

TAG = {"num_steps": 25, "precision": "tf32"}
A2C = {"num_steps": 5, "hidden_sizes": (32, 32)}
# The same, and the game's configuration and the policies' roles.
LARGE: tuple[tuple[str, int, dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
    ("tag_continuous", 2000, TAG, {}, ("tagger", "runner")),
    ("tag_continuous", 2000, TAG, {}, ("tagger+runner",)),
    ("tag_gridworld", 2000, A2C, {"num_taggers": 999, "full_observation": False}, ("tagger", "runner")),
)
FEWER_REGISTERS = 96, 80
ENOUGH_THREADS = 384  # of a multiprocessor, in groups
PROCESSES, MOST_TILES = 14, 16  # that compile side by side; of a row


def tiles_of(env: VecEnv, networks: list[Perceptron]) -> list[RolloutTile]:
    """The tiles that are measured; of groups of several warps those with enough threads at work."""
    backend = env.functions.backend
    cores = backend.tensor_cores
    assert cores is not None
    tiles = rollout_tiles(env.layout, networks, backend.default_threads_per_env(env.num_agents))
    if tiles[0].groups:  # where fewer registers leave more threads
        fewer = [(tile, replace(tile, most_registers=most)) for most in FEWER_REGISTERS for tile in tiles]
        tiles += [other for tile, other in fewer if other.blocks(cores) > tile.blocks(cores)]
    threads = [tile.blocks(cores) * tile.envs * tile.threads_per_env for tile in tiles]
    enough = min(max(threads), ENOUGH_THREADS) if tiles[0].groups else 1
    return [tile for tile, own in zip(tiles, threads, strict=True) if own >= enough]


def compile_tile(
    game: str, num_envs: int, config: dict[str, Any], values: dict[str, Any], roles: tuple[str, ...], k: int
) -> bool:
    """Compile the program of the k-th tile, for the cache; False if there is none."""
    env = VecEnv(compared_game(game, **values), num_envs, resolve_device("cuda"), autoreset_mode="next_step")
    settings, obs = PPOConfig(**config), torch.zeros(1, env.num_agents, env.layout.obs_size, device=env.device)
    specs = resolve_specs(env.game, settings, {name: PolicySpec() for name in roles} or None)
    policies = [policy_of_spec(name, spec, settings, env.game, obs) for name, spec in specs.items()]
    tiles = tiles_of(env, [perceptron_of(policy, obs, settings.precision) for policy in policies])
    if k < len(tiles):
        rollout_program(env, tiles[k])
    return k < len(tiles)


def compile_ahead() -> None:
    """Compile the programs of all tiles of LARGE side by side."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for compiled in [pool.submit(compile_tile, *row, k) for k in range(MOST_TILES) for row in LARGE]:
            compiled.result()


@torch.no_grad()
def measured(
    game: str, num_envs: int, config: dict[str, Any], values: dict[str, Any] | None = None, roles: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Microseconds of a rollout by each way."""
    device, policies = resolve_device("cuda"), {name: PolicySpec() for name in roles} or None
    env = VecEnv(compared_game(game, **(values or {})), num_envs, device)
    trainer = Trainer(env, PPOConfig(total_steps=10**12, **config), policies=policies, graphs=False)
    data, env, passes = trainer.rollout, trainer.env, trainer._forward_passes
    kernels = {name: own.kernels for name, own in zip(trainer.policies, passes, strict=True)}
    networks = [own.perceptron for own in kernels.values() if own is not None]
    row: dict[str, Any] = {"policies": list(trainer.policies)}

    def launches() -> None:
        data.collect(passes, trainer.sampler, trainer._parameters)
        for forward in passes:
            forward.finish()

    def microseconds(name: str, collect: Any) -> dict[str, Any]:
        return spread(name, [1e6 * run for run in run_seconds(captured(collect, device), device)], 1)

    with trainer.training_stream():
        row |= microseconds("several launches a step", launches)
        row["chosen"] = trainer.rollout_reason if trainer._fused_rollout is None else str(trainer._fused_rollout.tile)
        for tile in tiles_of(env, networks):
            fused, reason = fused_rollout(data, trainer.sampler, trainer.unfused_reasons, kernels, tile)
            row |= {str(tile): reason} if fused is None else microseconds(str(tile), fused)
    trainer.close()
    return row


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__, rows=("small", "large"))
    measurements = Measurements(given)
    if given.rows == "large":
        compile_ahead()
    for game, num_envs, config, *rest in LARGE if given.rows == "large" else ROWS:
        key = {"game": game, "num_envs": num_envs, **config, **(rest[0] if rest else {}), "roles": rest[1:]}
        measurements.measure(key, lambda: measured(game, num_envs, config, *rest))  # noqa: B023


if __name__ == "__main__":
    main()
