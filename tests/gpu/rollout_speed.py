"""Rollouts with default networks, by several launches a step and by one launch with each shape of a block's tile.

    python3 tests/gpu/rollout_speed.py RESULTS.json

A row has milliseconds of a rollout, medians, as CUDA graphs; `chosen` is the tile that a trainer takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv import VecEnv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import captured, provenance, seconds
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.fused_rollout import TILES, RolloutTile, fused_rollout
from gpu_vecenv.train.perceptron import PerceptronKernels
from gpu_vecenv.train.ppo import PPOConfig
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


@torch.no_grad()
def measured(game: str, num_envs: int, config: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a rollout by each way."""
    device = resolve_device("cuda")
    trainer = Trainer(VecEnv(configure(game), num_envs, device), PPOConfig(total_steps=10**12, **config), graphs=False)
    data, env, passes = trainer.rollout, trainer.env, trainer._forward_passes
    kernels = {name: own.kernels for name, own in zip(trainer.policies, passes, strict=True)}
    cores = env.functions.backend.tensor_cores
    assert cores is not None
    networks = tuple(own.perceptron for own in kernels.values() if isinstance(own, PerceptronKernels))
    row: dict[str, Any] = {"game": game, "num_envs": num_envs, **config}

    def launches() -> None:
        data.collect(passes, trainer.sampler, trainer._parameters)
        for forward in passes:
            forward(-1, only_values=True)

    with trainer.training_stream():
        row["several launches a step"] = 1e3 * seconds(captured(launches, device), device)
        for tile in (None, *TILES):
            if tile is not None and not RolloutTile(tile, env.layout, networks).blocks(cores):
                continue
            fused, reason = fused_rollout(data, trainer.sampler, trainer.unfused_reasons, kernels, tile)
            if fused is None:
                return row | {"reason": reason}
            if tile is None:
                row["chosen"] = str(fused.tile.tile)
            else:
                row[str(tile)] = 1e3 * seconds(captured(fused, device), device)
    trainer.close()
    return row


def main(file: Path) -> None:
    """Measure all rows and write them."""
    rows = []
    for game, num_envs, config in ROWS:
        rows.append(measured(game, num_envs, config))
        print(json.dumps(rows[-1]), flush=True)
    file.write_text(json.dumps({**provenance(resolve_device("cuda")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
