"""What opponents cost: iterations of the preset of tag_continuous without and with them, all in turn.

    python3 tests/gpu/opponents_speed.py RESULTS.json

Medians and quartiles of ten blocks of iterations, once all snapshots are there; `ratio` is that of blocks measured one
after the other, to those without opponents.
"""

from __future__ import annotations

from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments, blocks_in_turn, milliseconds, ratios

from gpu_vecenv import OpponentsConfig, PPOConfig, Trainer, VecEnv, configure

GAME, ITERATIONS = "tag_continuous", 5
SNAPSHOTS, SNAPSHOT_INTERVAL = 8, 5
WAYS: dict[str, tuple[tuple[str, ...], float]] = {  # members, share of the environments
    "none": ((), 0.0),
    "snapshots": (("snapshots",), 0.25),
    "snapshots and random": (("snapshots", "random"), 0.5),
}
QUICK: dict[str, Any] = {"num_envs": 32, "num_steps": 2, "num_minibatches": 1, "hidden_sizes": (8,)}


def trainer_of(members: tuple[str, ...], share: float, changes: dict[str, Any], device: torch.device) -> Trainer:
    """With the preset, changed by ``changes``."""
    game = configure(GAME)
    preset = {**game.own_preset, **changes}
    num_envs = preset.pop("num_envs")
    config = PPOConfig(**{**preset, "total_steps": 10**12})
    opponents = None
    if members:
        kept = {"num_snapshots": SNAPSHOTS, "snapshot_interval": SNAPSHOT_INTERVAL}
        opponents = OpponentsConfig(members=members, share=share, **kept)
    return Trainer(VecEnv(game, num_envs, device, autoreset_mode="next_step"), config, opponents=opponents)


def main() -> None:
    """Measure all ways, unless the file has them."""
    given = arguments(__doc__)
    changes = QUICK if given.quick else {}
    measurements = Measurements(given, num_snapshots=SNAPSHOTS)
    if len(measurements.rows) == len(WAYS):
        return
    trainers = {name: trainer_of(*way, changes, given.device) for name, way in WAYS.items()}
    for trainer in trainers.values():
        for _ in range(2 if given.quick else SNAPSHOTS * SNAPSHOT_INTERVAL):
            trainer.train_iteration()
    iterations, repeats = (1, 2) if given.quick else (ITERATIONS, REPEATS)
    calls = {name: trainer.train_iteration for name, trainer in trainers.items()}
    times = blocks_in_turn(calls, iterations, given.device, repeats)
    for name, (_, share) in WAYS.items():
        key = {"game": GAME, "num_envs": trainers[name].env.num_envs, "opponents": name, "share": share}
        found = {**milliseconds("ms", times[name]), **ratios("ratio", times[name], times["none"])}
        measurements.measure(key, lambda: found)  # noqa: B023
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    main()
