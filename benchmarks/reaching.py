"""How long training takes from nothing to a score, with imports and compilation: here and by a peer's published script.

    python -m benchmarks.reaching gpu_vecenv --game overcooked --device cuda --json RESULTS.json
    python -m benchmarks.reaching jaxmarl --game overcooked --device cuda --json RESULTS.json --published FOLDER

Each command runs in the interpreter that has the side's libraries, and adds a row to the file: the seconds from the
start of this module, before a library is imported, to each goal, and the curve. Scores are those of the policy that is
trained, with its exploration: of overcooked the mean return of an episode without shaped rewards, of skirmish the share
of battles won, by MAPPO or, with --algorithm pqn_vdn_rnn, by PQN-VDN. Here they are of the last episode of every
environment; a published script logs the mean of that over the steps of an update, or of the episodes that ended in it.
Sizes, networks, and hyper-parameters with their schedules are those of the published configuration on both sides.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402 - the clock runs before
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402

from benchmarks.one_side import add_options, add_row, check_options, module_of, precision_of  # noqa: E402
from benchmarks.peers.jaxmarl import KITCHEN, battles, encoded  # noqa: E402
from benchmarks.workload import Request  # noqa: E402

TRAININGS = (  # of the published configurations; a game's first one is the default
    replace(encoded(64, 256, 5_000_000 // (64 * 256)), config=KITCHEN),
    battles(128, 10_000_000 // (128 * 128)),
    battles(128, 10_000_000 // (128 * 128), "pqn_vdn_rnn"),
)
GOALS = {"overcooked": (20.0, 100.0, 150.0, 180.0, 200.0), "skirmish": (0.1, 0.25, 0.5, 0.75, 0.9)}


@dataclass
class Curve:
    """Scores of updates as they come."""

    goals: Sequence[float]
    points: list[tuple[float, int, float]] = field(default_factory=list)  # seconds, env-steps, score
    reached: dict[str, tuple[float, int]] = field(default_factory=dict)  # goal -> seconds, env-steps

    def add(self, env_steps: int, score: float) -> bool:
        """Take in a score; True once all goals have been reached. NaN, of no episode, is left out."""
        seconds = round(time.perf_counter() - START, 2)
        if not math.isnan(score):
            self.points.append((seconds, env_steps, round(score, 4)))
            for goal in self.goals:
                if score >= goal:
                    self.reached.setdefault(str(goal), (seconds, env_steps))
        return len(self.reached) == len(self.goals)

    def thinned(self, count: int = 100) -> list[tuple[float, int, float]]:
        """About so many points, the first and the last among them."""
        every = max(1, len(self.points) // count)
        return [*self.points[:-1:every], *self.points[-1:]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train until all goals are reached, the published number of steps is over, or --max-seconds are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reaching", description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--game", choices=GOALS, required=True)
    parser.add_argument("--algorithm", choices=sorted({each.algorithm for each in TRAININGS}), help="default: PPO's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goals", type=float, nargs="+", help="scores; default: some of the game")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--verbose", action="store_true", help="print every score")
    parser.add_argument(
        "--updates", type=int, help="fewer than the published configuration makes; rates then fall faster"
    )
    parser.add_argument("--num-envs", type=int, help="others than the published configuration has")
    parser.add_argument("--num-steps", type=int, help="of a rollout, others than the published configuration has")
    given = parser.parse_args(arguments)
    check_options(parser, given)
    changes = {key: getattr(given, key) for key in ("updates", "num_envs", "num_steps") if getattr(given, key)}
    own = {each.algorithm: each for each in TRAININGS if each.game == given.game}
    if given.algorithm not in (None, *own):
        parser.error(f"--algorithm is {given.algorithm}; expected, of {given.game}, {' or '.join(own)}")
    workload = replace(own[given.algorithm or next(iter(own))], **changes)
    request = Request(workload, given.device, precision_of(given.device), given.published)
    curve = Curve(given.goals or GOALS[given.game])
    module = module_of(given.side)

    def log(env_steps: int, score: float) -> bool:
        done = curve.add(env_steps, score)
        if given.verbose:
            print(f"{time.perf_counter() - START:.1f} s, {env_steps} env-steps: {score:.4f}", flush=True)
        return done or time.perf_counter() - START > given.max_seconds

    facts = module.watch(request, given.seed, log)
    found = {
        "seed": given.seed,
        "precision": request.precision,
        "seconds": round(time.perf_counter() - START, 1),
        "reached": {goal: {"seconds": at, "env_steps": steps} for goal, (at, steps) in curve.reached.items()},
        "curve": curve.thinned(),
    }
    row = add_row(given, workload, module, found, facts)
    print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # a compiled training goes on until its last step
