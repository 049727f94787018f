"""ParallelTrainers: several trainers in one process, whose iterations run at the same time on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.trainer import Trainer


class ParallelTrainers:
    """Runs iterations of several trainers, each bit-identical to its iteration alone.

    Args:
        trainers: On one device, each on an environment of its own, of one process.

    Raises:
        TypeError, ConfigError: ``trainers`` are not that.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        for trainer in trainers:
            if not isinstance(trainer, Trainer):
                raise TypeError(f"trainers has a {type(trainer).__name__}; expected trainers")
        if not trainers:
            raise ConfigError("there are no trainers; expected at least one")
        devices = {trainer.env.device for trainer in trainers}
        if len(devices) > 1:
            raise ConfigError(f"the trainers are on {sorted(map(str, devices))}; expected one device")
        if len({id(trainer.env) for trainer in trainers}) < len(trainers):
            raise ConfigError("trainers share an environment; expected one environment for each")
        if len(trainers) > 1 and trainers[0].world.size > 1:
            raise ConfigError(
                f"{len(trainers)} trainers in each of {trainers[0].world.size} processes; expected one: train several "
                "seeds in one process"
            )

    def train_iteration(self, trainers: Sequence[Trainer]) -> list[dict[str, Any] | NonFiniteError]:
        """An iteration of each of these trainers; its metrics, or the error of a loss that is not finite.

        Raises:
            CapacityError: Not enough device memory.
        """
        results: list[dict[str, Any] | NonFiniteError] = []
        for trainer in trainers:
            try:
                results.append(dict(trainer.train_iteration()))
            except NonFiniteError as error:
                results.append(error)
        return results
