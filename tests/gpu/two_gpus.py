"""Throughput of training on two GPUs, by that of one: an iteration as one CUDA graph, and in stages.

    python3 tests/gpu/two_gpus.py RESULTS.json

Starts two processes by torchrun. The same environments, policies and options are trained by the first process alone,
by both with the all-reduces in the one CUDA graph of an iteration, and by both in stages, collectives between graphs.
All ways in turn, ten blocks of iterations each; each iteration reads its metrics. A row has medians and quartiles, and
the ratio to one process of blocks that were measured one after the other. In the end weights of both ways, and of both
processes, are compared. Rows that the file has are kept. Two minutes where kernels were compiled before.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from measurements import REPEATS, ROOT, Measurements, arguments, milliseconds, ratios

from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import quartiles, synchronize
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

# Game, environments of each process, steps and units of both layers; iterations of a block.
CONFIGURATIONS = (
    ("cartpole", 16_384, 32, 64, 150),
    ("tag_continuous", 2000, 25, 64, 8),
    ("tag_gridworld", 2000, 100, 32, 100),
)
WARM_UP = 5  # iterations
WAYS = {"one": 1, "two": 2, "two, in stages": 2}  # processes


def own_device() -> str:
    """The GPU of this process."""
    return f"cuda:{os.environ['LOCAL_RANK']}"


def trainer_of(name: str, num_envs: int, num_steps: int, units: int) -> Trainer:
    """With the game's preset and the given sizes, 4 epochs of 4 minibatches and TF32."""
    game = compared_game(name)
    given = {"num_steps": num_steps, "hidden_sizes": (units, units), "num_epochs": 4, "num_minibatches": 4}
    preset = {key: value for key, value in game.own_preset.items() if key != "num_envs"}
    config = PPOConfig(**{**preset, **given, "precision": "tf32", "total_steps": 10**12})
    first = int(os.environ["RANK"]) * num_envs if dist.is_initialized() else 0
    return Trainer(VecEnv(game, num_envs, own_device(), autoreset_mode="next_step", first_env_index=first), config)


def timed(trainer: Trainer, iterations: int) -> float:
    """Seconds of an iteration."""
    synchronize(trainer.env.device)
    start = time.perf_counter()
    for _ in range(iterations):
        trainer.train_iteration()
    return (time.perf_counter() - start) / iterations


def weights(trainer: Trainer) -> torch.Tensor:
    """Of all policies."""
    return torch.cat([p.detach().flatten() for policy in trainer.policies.values() for p in policy.parameters()])


def agree(world: World, both: list[Trainer]) -> bool:
    """Whether weights are bitwise equal in both ways and in all processes; both ways have as many iterations."""
    here = weights(both[0])
    first = here.clone()
    world.broadcast(first)
    is_equal = here.equal(first) and here.equal(weights(both[1]))
    return not world.all_agree(not is_equal, False)[0]


def row_of(trainer: Trainer, processes: int, seconds: list[float]) -> dict[str, Any]:
    """Medians and quartiles of the blocks."""
    env_steps = trainer.config.num_steps * trainer.env.num_envs * processes
    median = quartiles(seconds)[1]
    return {
        "is_one_graph": trainer._graphed_iteration.graph is not None,
        **milliseconds("iteration_ms", seconds),
        "env_steps_per_s": round(env_steps / median),
        "agent_steps_per_s": round(env_steps * trainer.env.num_agents / median),
    }


def key_of(way: str, name: str, num_envs: int, num_steps: int, units: int) -> dict[str, Any]:
    """What is measured; ``num_envs`` are those of each process."""
    return {
        "way": way,
        "processes": WAYS[way],
        "game": name,
        "num_envs": num_envs,
        "num_agents": compared_game(name).num_agents,
        "num_steps": num_steps,
        "units": [units, units],
        "update": "4 epochs of 4 minibatches",
        "precision": "tf32",
    }


def measure(given: argparse.Namespace) -> None:
    """As a process of torchrun; the first one writes the results."""
    torch.cuda.set_device(own_device())
    given.device = resolve_device(own_device())
    nccl = {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
    }
    measurements = Measurements(given, **nccl)
    measured = {(row["game"], row["num_envs"]) for row in measurements.rows}
    left = [configuration for configuration in CONFIGURATIONS if configuration[:2] not in measured]
    sizes = [configuration[:4] for configuration in left]
    alone = [trainer_of(*own) for own in sizes]  # made before there is a process group, each is of one process
    for trainer in alone:
        timed(trainer, WARM_UP)
    with process_group("cuda") as (world, _):
        whole, stages = ([trainer_of(*own) for own in sizes] for _ in range(2))
        reasons = [trainer.collectives_reason for trainer in whole]
        for trainer in stages:
            trainer.collectives_reason = "measured for comparison"
        for trainer in (*whole, *stages):
            timed(trainer, WARM_UP)
        for k, (*own, iterations) in enumerate(left):
            trainers = dict(zip(WAYS, (alone[k], whole[k], stages[k]), strict=True))
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(REPEATS):
                for way, trainer in trainers.items():
                    world.barrier()
                    if WAYS[way] == 2 or world.rank == 0:
                        seconds[way].append(timed(trainer, iterations))
            equal = agree(world, [whole[k], stages[k]])
            if world.rank > 0:
                continue
            for way, trainer in trainers.items():
                row = row_of(trainer, WAYS[way], seconds[way])
                if WAYS[way] == 2:
                    twice = [2 * one for one in seconds["one"]]  # as two processes step twice the environments
                    row |= ratios("ratio", twice, seconds[way])
                    row |= {"collectives_reason": reasons[k], "weights_are_equal": equal} if way == "two" else {}
                measurements.measure(key_of(way, *own), lambda: row)  # noqa: B023


if __name__ == "__main__":
    parsed = arguments(__doc__)
    if "RANK" in os.environ:
        measure(parsed)
    else:
        paths = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )  # torchrun's processes import it
        two = ["--standalone", "--nproc-per-node=2", __file__, str(parsed.file)]
        command = [sys.executable, "-m", "torch.distributed.run", *two]
        sys.exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode)
