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
import datetime
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.peers.jaxmarl import recurrent
from benchmarks.side import versions
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
    parser.add_argument("side", choices=("gpu_vecenv", "jaxmarl"))
    parser.add_argument("--algorithm", choices=get_args(Algorithm), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--env-steps", type=int, default=2_000_000, help="of each seed")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--published", help="folder with the scripts that the peer publishes outside of PyPI")
    parser.add_argument("--json", type=Path, required=True, help="file to which the row is added")
    given = parser.parse_args(arguments)
    ours = given.side == "gpu_vecenv"
    if not ours and given.published is None:
        parser.error("--published is missing; expected the folder of the peer's scripts")
    workload = workload_of(given.algorithm, given.num_envs, given.env_steps)
    if workload.updates < 1:
        parser.error(f"--env-steps is {given.env_steps}; expected at least those of a rollout, --num-envs x its steps")
    request = Request(workload, given.device, "tf32" if given.device == "cuda" else "float32", given.published)
    side = importlib.import_module("benchmarks.ours" if ours else f"benchmarks.peers.{given.side}")
    start = time.perf_counter()
    returns, facts = side.learn(request, given.seeds)
    row: dict[str, Any] = {
        "side": given.side,
        **workload.row(),
        "env_steps": workload.env_steps,
        "returns": [round(x, 4) for x in returns],
        "seconds": round(time.perf_counter() - start, 1),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "versions": versions(side.PEER.packages),
        **facts,
    }
    rows = json.loads(given.json.read_text(encoding="utf-8"))["rows"] if given.json.exists() else []
    given.json.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
