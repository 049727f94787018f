"""Throughput of examples/mappo_rnn.py beside that of the trainer with networks of the same size.

    python3 tests/gpu/own_algorithm_speed.py RESULTS.json [--device cpu]

simple_spread, with equal numbers of steps, sequences, epochs and minibatches. Three ways in turn, medians and quartiles
of ten blocks of iterations: the example; the trainer with network="gru"; the trainer with the example's networks as a
module of the user's. The critics of the latter two see an agent's own observation and have a row for each agent, that
of the example one for each environment. `example_by_this` is the example's throughput by that of a way.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurements import REPEATS, Measurements, arguments, blocks_in_turn, milliseconds, ratios
from torch import nn

from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure
from gpu_vecenv.engine.timing import quartiles

NUM_ENVS, QUICK = {"cuda": (64, 512, 4096), "cpu": (64,)}, (4,)
ITERATIONS = {"cuda": 20, "cpu": 2}  # of a block
SIZES = {"num_steps": 30, "sequence_length": 10, "num_epochs": 5, "num_minibatches": 4}
UNITS = 64
OF_TRAINER = {"total_steps": 10**12, "shared_trunk": False, "activation": "relu", "hidden_sizes": (UNITS, UNITS)}

spec = importlib.util.spec_from_file_location("mappo_rnn", Path(__file__).parents[2] / "examples" / "mappo_rnn.py")
assert spec is not None and spec.loader is not None
example = importlib.util.module_from_spec(spec)
sys.modules["mappo_rnn"] = example
spec.loader.exec_module(example)


class Both(nn.Module):
    """The example's networks by the contract of the trainer."""

    recurrent_state_size = 2 * UNITS

    def __init__(self, env: VecEnv, inputs: int, parameters: int) -> None:
        super().__init__()
        self.actor = example.RecurrentNet(env, inputs, UNITS, parameters, 0.01)
        self.critic = example.RecurrentNet(env, inputs, UNITS, 1, 1.0)

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step."""
        first = torch.zeros((1, len(obs)), dtype=torch.bool, device=obs.device)
        of_actor, of_critic = state.chunk(2, -1)
        parameters, actors = self.actor(obs[None], of_actor, first)
        values, critics = self.critic(obs[None], of_critic, first)
        return parameters[0], values[0, :, 0], torch.cat([actors, critics], -1)


def ways_of(num_envs: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """What makes one iteration of each."""
    envs = [VecEnv(configure("simple_spread"), num_envs, device, autoreset_mode="next_step") for _ in range(3)]
    mappo = example.MAPPO(envs[0], example.Options(num_envs=num_envs, units=UNITS, **SIZES))
    graphs = device.type == "cuda"
    collect, update = example.Graphed(mappo.collect, graphs), example.Graphed(mappo.update, graphs)

    def iteration() -> None:
        collect()
        mappo.shuffle()
        update()

    network = Both(envs[2], mappo.data.obs.shape[-1], mappo.sampler.num_parameters)
    gru = Trainer(envs[1], PPOConfig(**OF_TRAINER, **SIZES, network="gru"))
    own = Trainer(envs[2], PPOConfig(**OF_TRAINER, **SIZES), policies={"agent": network})
    return {"example": iteration, "trainer": gru.launch_iteration, "trainer, own module": own.launch_iteration}


def rows_of(num_envs: int, device: torch.device, iterations: int, repeats: int) -> dict[str, dict[str, Any]]:
    """For each way milliseconds of an iteration and env-steps per second, and the example's part of the trainer's."""
    ways = ways_of(num_envs, device)
    for iterate in ways.values():
        for _ in range(3):
            iterate()
    times = blocks_in_turn(ways, iterations, device, repeats)
    rows = {}
    for name, seconds in times.items():
        steps_per_s = round(num_envs * SIZES["num_steps"] / quartiles(seconds)[1])
        rows[name] = {**milliseconds("ms", seconds), "env_steps_per_s": steps_per_s}
        if name != "example":
            rows[name] |= ratios("example_by_this", seconds, times["example"])
    return rows


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    device, kind = given.device, given.device.type
    if kind == "cuda":  # graphs cannot be captured on the default stream
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)
    measurements = Measurements(given, config={"game": "simple_spread", "units": UNITS, **SIZES})
    iterations, repeats = (1, 2) if given.quick else (ITERATIONS[kind], REPEATS)
    for num_envs in QUICK if given.quick else NUM_ENVS[kind]:
        if not any(row["num_envs"] == num_envs for row in measurements.rows):
            for name, row in rows_of(num_envs, device, iterations, repeats).items():
                measurements.measure({"name": name, "num_envs": num_envs}, lambda: row)  # noqa: B023


if __name__ == "__main__":
    main()
