"""Throughput of examples/mappo_rnn.py beside that of the trainer with networks of the same size.

    python3 tests/gpu/own_algorithm_speed.py RESULTS.json [cpu]

simple_spread, with equal numbers of steps, sequences, epochs and minibatches. Three ways in turn, medians of blocks of
iterations: the example; the trainer with network="gru"; the
trainer with the example's networks as a module of the user's. The critics of the latter two see an agent's own
observation and have a row for each agent, that of the example one for each environment. The goal is half of the
trainer's throughput. Where it is missed the row says so; nothing fails.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance

NUM_ENVS = {"cuda": (64, 512, 4096), "cpu": (64,)}
BLOCKS, ITERATIONS = {"cuda": 7, "cpu": 5}, {"cuda": 20, "cpu": 2}
SIZES = {"num_steps": 30, "sequence_length": 10, "num_epochs": 5, "num_minibatches": 4}
UNITS, GOAL = 64, 0.5
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


def rows_of(num_envs: int, device: torch.device) -> list[dict[str, Any]]:
    """For each way milliseconds of an iteration and env-steps per second, and the example's part of the trainer's."""
    ways, times = ways_of(num_envs, device), dict[str, list[float]]()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for iterate in ways.values():
        for _ in range(3):
            iterate()
    for _ in range(BLOCKS[device.type]):
        for name, iterate in ways.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(ITERATIONS[device.type]):
                iterate()
            synchronize()
            times.setdefault(name, []).append((time.perf_counter() - start) / ITERATIONS[device.type])
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = []
    for name, median in medians.items():
        steps_per_s = round(num_envs * SIZES["num_steps"] / median)
        rows.append({"name": name, "num_envs": num_envs, "ms": round(1e3 * median, 3), "env_steps_per_s": steps_per_s})
        if name != "example":
            ratio = round(median / medians["example"], 3)
            rows[-1] |= {"example_by_this": ratio, "goal": GOAL, "reached": ratio >= GOAL}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(file: Path, device: torch.device) -> None:
    """Measure all rows and write them."""
    if device.type == "cuda":  # graphs cannot be captured on the default stream
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)
    rows = [row for num_envs in NUM_ENVS[device.type] for row in rows_of(num_envs, device)]
    config = {"game": "simple_spread", "units": UNITS, **SIZES}
    file.write_text(json.dumps({**provenance(device), "config": config, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), resolve_device((*sys.argv[2:], "cuda")[0]))
