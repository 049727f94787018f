"""The ledger: digests recorded on a GPU, to check on any machine that the CPU is bitwise equal.

    python tests/ledger.py record [--agent-steps N]   # on a GPU: one row for each version of a game and autoreset mode
    python tests/ledger.py record --games harvest cleanup   # the rows of these again, or for the first time
    python tests/ledger.py replay [--agent-steps N]   # anywhere: every row again, on the CPU
    python tests/ledger.py replay --webassembly       # as WebAssembly, in Node.js

A row has digests after 2 million agent-steps and, in "same_step" mode, after N (by default 100 million). ``replay``
compares all digests up to N agent-steps (by default 2 million) and exits with 1 if one differs. A row whose device code
has changed since is marked as stale: its digests may still be equal, if the change affects no bit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import receipts
import torch
from support.node import module_json, run_node

import gpu_vecenv
from gpu_vecenv.engine.digest import Digest, source_sha256
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.engine.vec_env import MODES, VecEnv
from gpu_vecenv.envs.registry import GAMES, versions

LEDGER = Path(__file__).resolve().parent.parent / "docs" / "reliability" / "ledger.jsonl"
SHORT, LONG = 2_000_000, 100_000_000
STEPS = 250  # until the first digest; num_envs is chosen so that these are 2 million agent-steps
STATE_EVERY = 10  # steps between digests of all state; outputs are added in every step
WEBASSEMBLY = "WebAssembly"
RESET_EVERY = 20  # steps between masked resets in disabled mode
SEED = 2**63 + 6
# Shorter limits where episodes rarely terminate with random actions.
CONFIGS: dict[str, dict[str, Any]] = {
    "tag_continuous": {"max_steps": 60},
    "mountain_car": {"max_steps": 100},
    "continuous_mountain_car": {"max_steps": 100},
    "acrobot": {"max_steps": 100},
    "pursuit": {"max_steps": 100},
    **{name: {"max_steps": 200} for name in ("harvest", "cleanup")},
    "economy": {"max_steps": 200, "period": 40, "fixed_four_skill_and_loc": False},
}
ALSO = {"economy": {"tax_model": "saez"}}  # a second configuration, of code that the first one has not
SOURCES = (
    "gpu_vecenv/compile/codegen.py",
    "gpu_vecenv/compile/engine_kernels.py",
    "gpu_vecenv/declare/layout.py",
    "gpu_vecenv/engine/launches.py",
    "gpu_vecenv/engine/vec_env.py",
    "gpu_vecenv/envs/*.py",
)
Row = dict[str, Any]


def rows_to_record(agent_steps: int) -> Iterator[Row]:
    """The rows to record, without digests."""
    played = [(name, version) for name, game in GAMES.items() for version in versions(game).values()]
    for name, changes in [*played, *ALSO.items()]:
        config = {**CONFIGS.get(name, {}), **changes}
        num_envs = -(-SHORT // (STEPS * gpu_vecenv.configure(name, **config).num_agents))
        for mode in MODES:
            marks = {STEPS, STEPS * max(1, agent_steps // SHORT)} if mode == "same_step" else {STEPS}
            yield {"game": name, "config": config, "autoreset_mode": mode, "num_envs": num_envs, "seed": SEED} | {
                "digests": {str(steps): None for steps in sorted(marks)}
            }


def digests(row: Mapping[str, Any], device: str, marks: Sequence[int]) -> dict[str, str]:
    """Steps -> digest of a row's trajectory on a device, or of its WebAssembly in Node.js."""
    game = gpu_vecenv.configure(row["game"], **row["config"])
    if device == WEBASSEMBLY:
        job = {**row, "seed": str(row["seed"]), "marks": marks, "reset_every": RESET_EVERY, "state_every": STATE_EVERY}
        found: dict[str, str] = run_node("trajectory.js", {**job, **module_json(game)}, "engine.js")
        return found
    env = VecEnv(game, row["num_envs"], device, autoreset_mode=row["autoreset_mode"])
    digest, buffers, by_steps = Digest(env.functions, env.num_envs), env.step_buffers(), dict[str, str]()
    digest.add_reset(*env.reset(seed=row["seed"]))
    for step in range(1, max(marks, default=0) + 1):
        actions = env.sample_actions()
        digest.add_step(actions, env.step(actions, out=buffers))
        if env.autoreset_mode == "disabled" and step % RESET_EVERY == 0:
            env.reset(mask=~env.active.any(1), out=buffers)  # the mask stays on the device
        if step % STATE_EVERY == 0:
            digest.add_state(env)
        if step in marks:
            by_steps[str(step)] = digest.hex()
    env.close()
    return by_steps


def read(path: Path = LEDGER) -> list[Row]:
    """All rows; none if there is no ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(device: str, agent_steps: int, path: Path = LEDGER, games: Sequence[str] = ()) -> list[Row]:
    """Record all rows on a device and overwrite the ledger; or those of ``games``, beside the others that it has."""
    origin, order = provenance(torch.device(device)), list(GAMES)
    rows = [row for row in read(path) if games and row["game"] not in games]
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows_to_record(agent_steps):
        if games and row["game"] not in games:
            continue
        found = digests(row, device, [int(steps) for steps in row["digests"]])
        game = gpu_vecenv.configure(row["game"], **row["config"])
        rows.append({**row, "digests": found, "sources": source_sha256(game), **origin})
        rows.sort(key=lambda one: order.index(one["game"]))
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        print(f"{row['game']} {row['autoreset_mode']}: {found}", flush=True)
    return rows


def replay(row: Row, agent_steps: int, device: str = "cpu") -> tuple[int, list[str]]:
    """Number of agent-steps replayed on the CPU, or as WebAssembly, and the differences."""
    game = gpu_vecenv.configure(row["game"], **row["config"])
    per_step = row["num_envs"] * game.num_agents
    marks = [int(steps) for steps in row["digests"] if int(steps) * per_step <= agent_steps * 1.01]  # rounded up
    found = digests(row, device, marks)
    where = "on the CPU" if device == "cpu" else f"as {device}"
    differing = [
        f"{row['game']}, {row['autoreset_mode']}, {steps} steps: {digest} {where}, {row['digests'][steps]} on "
        f"{row['device']}"
        for steps, digest in found.items()
        if digest != row["digests"][steps]
    ]
    return max(marks, default=0) * per_step, differing


def is_stale(row: Row) -> bool:
    """Whether the device code has changed since the recording."""
    return row["sources"] != source_sha256(gpu_vecenv.configure(row["game"], **row["config"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "replay"])
    parser.add_argument("--device", default="cuda", help="device to record on; replay always runs on the CPU")
    parser.add_argument(
        "--agent-steps", type=lambda text: int(float(text)), help="length of the longest run of each game"
    )
    parser.add_argument("--games", nargs="+", choices=list(GAMES), default=[], help="record: the rows of these alone")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--receipt", action="store_true", help="replay: write a receipt")
    parser.add_argument("--webassembly", action="store_true", help="replay: in Node.js instead of on the CPU")
    given = parser.parse_args(arguments)
    if given.webassembly and (given.command == "record" or given.receipt):
        parser.error("--webassembly replays, and writes no receipt")
    if given.command == "record":
        record(given.device, given.agent_steps or LONG, given.ledger, given.games)
        return 0
    rows, failed, done, wanted = read(given.ledger), 0, dict[str, int](), given.agent_steps or SHORT
    compared = 0
    for row in rows:
        steps, differing = replay(row, wanted, WEBASSEMBLY if given.webassembly else "cpu")
        failed += bool(differing)
        compared += steps > 0
        label = f"{row['game']} {row['autoreset_mode']}: {steps:,} agent-steps"
        print(*(differing or [f"{label}, equal to {row['device']}"]), "(stale)" * is_stale(row), flush=True)
        done[row["game"]] = done.get(row["game"], 0) + steps
    stale = sum(map(is_stale, rows))
    print(f"{len(rows)} rows, {failed} differ, {stale} stale")
    if compared < len(rows):
        print(f"{len(rows) - compared} rows have no digest within {wanted:,} agent-steps; expected at least {SHORT:,}")
        return 1
    if given.receipt and stale:
        print("no receipt is written, as a GPU ran other device code; record the ledger again on a GPU")
        return 1
    if given.receipt and rows and not failed:
        receipts.write(
            "parity",
            what="Trajectories of every game in every autoreset mode have the same digests on a GPU and on the CPU.",
            command=f"python tests/ledger.py record; python tests/ledger.py replay --agent-steps {wanted}",
            metrics={"rows": len(rows), "agent_steps": done},
            planted={"another seed": replay({**rows[0], "seed": SEED + 1}, SHORT)[1][0]},
            python=SOURCES,
            device=rows[0]["device"],
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
