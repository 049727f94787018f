"""What opponents cost: iterations of presets without and with them, those of a game in turn.

    python3 tests/gpu/opponents_speed.py RESULTS.json

Medians and quartiles of ten blocks of iterations, once all snapshots are there; `ratio` is that of blocks measured one
after the other, to those without opponents.
"""

from __future__ import annotations

from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments, blocks_in_turn, milliseconds, ratios

from gpu_vecenv import OpponentsConfig, PPOConfig, Trainer, VecEnv, configure

GAMES, ITERATIONS = ("tag_continuous", "connect_four"), 5
SNAPSHOTS, SNAPSHOT_INTERVAL = 8, 5
WAYS: dict[str, tuple[tuple[str, ...], float]] = {  # members, share of the environments
    "none": ((), 0.0),
    "snapshots": (("snapshots",), 0.25),
    "snapshots and random": (("snapshots", "random"), 0.5),
}
QUICK: dict[str, Any] = {"num_envs": 32, "num_steps": 2, "num_minibatches": 1, "hidden_sizes": (8,)}


def trainer_of(
    name: str, members: tuple[str, ...], share: float, changes: dict[str, Any], device: torch.device
) -> Trainer:
    """With the game's preset, changed by ``changes``."""
    game = configure(name)
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
    for game in GAMES:
        if sum(row["game"] == game for row in measurements.rows) < len(WAYS):
            measure(game, changes, given.quick, given.device, measurements)


def measure(game: str, changes: dict[str, Any], quick: bool, device: torch.device, measurements: Measurements) -> None:
    """The rows of a game."""
    trainers = {name: trainer_of(game, *way, changes, device) for name, way in WAYS.items()}
    for trainer in trainers.values():
        for _ in range(2 if quick else SNAPSHOTS * SNAPSHOT_INTERVAL):
            trainer.train_iteration()
    iterations, repeats = (1, 2) if quick else (ITERATIONS, REPEATS)
    calls = {name: trainer.train_iteration for name, trainer in trainers.items()}
    times = blocks_in_turn(calls, iterations, device, repeats)
    for name, (_, share) in WAYS.items():
        key = {"game": game, "num_envs": trainers[name].env.num_envs, "opponents": name, "share": share}
        found = {**milliseconds("ms", times[name]), **ratios("ratio", times[name], times["none"])}
        measurements.measure(key, lambda: found)  # noqa: B023
    for trainer in trainers.values():
        trainer.close()
        trainer.env.close()


if __name__ == "__main__":
    main()
