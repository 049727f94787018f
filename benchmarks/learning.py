"""What an algorithm learns here and by a peer's published script, over many seeds at equal numbers of steps.

    python -m benchmarks.learning gpu_vecenv --algorithm ppo_rnn --device cuda --json RESULTS.json
    python -m benchmarks.learning jaxmarl --algorithm ppo_rnn --device cuda --json RESULTS.json --published FOLDER

Each command runs in the interpreter that has the side's libraries, and adds a row to the file. A score is the mean
return of an agent over the last episode of every environment, played by the policy that is trained, with its
exploration. Both sides have the same networks, numbers of steps, epochs and minibatches; see ``ours.py`` for what else
they share and where they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import get_args

from benchmarks.one_side import add_options, add_row, check_options, module_of, precision_of
from benchmarks.peers.jaxmarl import recurrent
from benchmarks.workload import Algorithm, Request, Workload

SEEDS = 10


def workload_of(algorithm: Algorithm, num_envs: int, env_steps: int) -> Workload:
    """Training of simple_spread, with so many env-steps or the next fewer that whole rollouts make."""
    rows = [Workload("training", "simple_spread", num_envs, 128, updates=1), *recurrent(num_envs, 1)]
    (row,) = (row for row in rows if row.algorithm == algorithm)
    return dataclasses.replace(row, updates=env_steps // row.env_steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--algorithm", choices=get_args(Algorithm), required=True)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--env-steps", type=int, default=2_000_000, help="of each seed")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args(arguments)
    check_options(parser, given)
    workload = workload_of(given.algorithm, given.num_envs, given.env_steps)
    if workload.updates < 1:
        parser.error(f"--env-steps is {given.env_steps}; expected at least those of a rollout, --num-envs x its steps")
    request = Request(workload, given.device, precision_of(given.device), given.published)
    module = module_of(given.side)
    start = time.perf_counter()
    returns, facts = module.learn(request, given.seeds)
    found = {
        "env_steps": workload.env_steps,
        "returns": [round(x, 4) for x in returns],
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(add_row(given, workload, module, found, facts)))


if __name__ == "__main__":
    main(sys.argv[1:])
