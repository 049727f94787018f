"""Throughput of training on two GPUs, by that of one: an iteration as one CUDA graph, and in stages.

    python3 tests/gpu/two_gpus.py RESULTS.json

Starts two processes by torchrun. The same environments, policies and options are trained by the first process alone,
by both with the all-reduces in the one CUDA graph of an iteration, and by both in stages, collectives between graphs.
All ways in turn, five blocks of iterations each, whose medians are the rows; each iteration reads its metrics. In the
end weights of both ways, and of both processes, are compared. A ratio below the goal is in the row; nothing fails. Two
minutes where kernels were compiled before.

"rows" has the rows of one process and of two in turn, "in_stages" those of two in stages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_vecenv import VecEnv
from gpu_vecenv.bench.games import compared_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance, synchronize
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

# Game, environments of each process, steps and units of both layers; iterations of a block.
CONFIGURATIONS = (
    ("cartpole", 16_384, 32, 64, 150),
    ("tag_continuous", 2000, 25, 64, 8),
    ("tag_gridworld", 2000, 100, 32, 100),
)
WARM_UP, BLOCKS, GOAL = 5, 5, 1.9  # iterations; blocks; env-steps per second of two processes by those of one


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


def row_of(trainer: Trainer, processes: int, seconds: list[float], sizes: tuple[str, int, int, int]) -> dict[str, Any]:
    """Medians of the blocks."""
    (name, num_envs, num_steps, units), each = sizes, statistics.median(seconds)
    env_steps = num_steps * num_envs * processes
    return {
        "processes": processes,
        "game": name,
        "num_envs": num_envs,  # of each
        "num_agents": trainer.env.num_agents,
        "num_steps": num_steps,
        "units": [units, units],
        "update": "4 epochs of 4 minibatches",
        "precision": "tf32",
        "is_one_graph": trainer._graphed_iteration.graph is not None,
        "iteration_ms": round(each * 1e3, 3),
        "blocks_ms": [round(block * 1e3, 3) for block in seconds],
        "env_steps_per_s": round(env_steps / each),
        "agent_steps_per_s": round(env_steps * trainer.env.num_agents / each),
    }


def measure(file: Path) -> None:
    """As a process of torchrun; the first one writes the results."""
    torch.cuda.set_device(own_device())
    sizes = [configuration[:4] for configuration in CONFIGURATIONS]
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
        results: dict[str, Any] = {**provenance(resolve_device(own_device())), "rows": [], "in_stages": []}
        for k, (own, configuration) in enumerate(zip(sizes, CONFIGURATIONS, strict=True)):
            seconds: list[list[float]] = [[], [], []]
            for _ in range(BLOCKS):
                for way, trainer in enumerate((alone[k], whole[k], stages[k])):
                    world.barrier()
                    if way > 0 or world.rank == 0:
                        seconds[way].append(timed(trainer, configuration[4]))
            equal = agree(world, [whole[k], stages[k]])
            if world.rank > 0:
                continue
            rows = [
                row_of(trainer, processes, own_seconds, own)
                for trainer, processes, own_seconds in zip(
                    (alone[k], whole[k], stages[k]), (1, 2, 2), seconds, strict=True
                )
            ]
            for row in rows[1:]:
                row["ratio"] = round(row["env_steps_per_s"] / rows[0]["env_steps_per_s"], 3)
            rows[1] |= {"goal": GOAL, "reached": rows[1]["ratio"] >= GOAL}
            rows[1] |= {"collectives_reason": reasons[k], "weights_are_equal": equal}
            results["rows"] += rows[:2]
            results["in_stages"].append(rows[2])
            for row in rows:
                print(json.dumps(row), flush=True)
        if world.rank == 0:
            results["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            results["nccl_variables"] = {key: x for key, x in sorted(os.environ.items()) if key.startswith("NCCL_")}
            file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
    else:
        root = str(Path(__file__).resolve().parents[2])  # the package, which torchrun's processes import
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        two = ["--standalone", "--nproc-per-node=2", __file__, sys.argv[1]]
        command = [sys.executable, "-m", "torch.distributed.run", *two]
        sys.exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode)
