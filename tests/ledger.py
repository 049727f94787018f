"""The ledger: digests that a GPU has given, so that any machine can ask whether the host still gives the same bits.

    python tests/ledger.py record [--agent-steps N]   # on a GPU: one row for each game and autoreset mode
    python tests/ledger.py replay [--agent-steps N]   # anywhere: every row once more, on the host

A row has digests after 2 million agent-steps and, in "same_step" mode, after N (by default 100 million). ``replay``
goes as far as N allows (by default 2 million) and exits with 1 where a digest differs. A row whose device code has
changed since is told as stale: its digests may still be equal, and then the change has moved no bit.
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

import gpu_vecenv
from gpu_vecenv.engine.digest import Digest, source_sha256
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.engine.vec_env import MODES, VecEnv
from gpu_vecenv.envs.registry import GAMES

LEDGER = Path(__file__).resolve().parent.parent / "docs" / "reliability" / "ledger.jsonl"
SHORT, LONG = 2_000_000, 100_000_000
TICKS = 250  # to the first digest: replicas are so many that it comes after 2 million agent-steps
STATE_EVERY = 10  # ticks between two looks at all state; outputs are fed in every step
RESET_EVERY = 20  # ticks between two resets of what has ended, without autoreset
SEED = 2**63 + 6
# Beside the defaults: episodes that end by chance too seldom end by their limit.
CONFIGS: dict[str, dict[str, Any]] = {
    "tag_continuous": {"max_steps": 60},
    "mountain_car": {"max_steps": 100},
    "continuous_mountain_car": {"max_steps": 100},
    "acrobot": {"max_steps": 100},
}
SOURCES = (
    "gpu_vecenv/compile/codegen.py",
    "gpu_vecenv/engine/launches.py",
    "gpu_vecenv/engine/vec_env.py",
    "gpu_vecenv/envs/*.py",
)
Row = dict[str, Any]


def rows_to_record(agent_steps: int) -> Iterator[Row]:
    """What a GPU is to be asked, without its answers."""
    for name in GAMES:
        config = CONFIGS.get(name, {})
        num_envs = -(-SHORT // (TICKS * gpu_vecenv.configure(name, **config).num_agents))
        for mode in MODES:
            marks = {TICKS, TICKS * max(1, agent_steps // SHORT)} if mode == "same_step" else {TICKS}
            yield {"game": name, "config": config, "autoreset_mode": mode, "num_envs": num_envs, "seed": SEED} | {
                "digests": {str(ticks): None for ticks in sorted(marks)}
            }


def digests(row: Mapping[str, Any], device: str, marks: Sequence[int]) -> dict[str, str]:
    """Ticks -> digest, of a row's trajectory on a device."""
    game = gpu_vecenv.configure(row["game"], **row["config"])
    env = VecEnv(game, row["num_envs"], device, autoreset_mode=row["autoreset_mode"])
    digest, buffers, found = Digest(env.functions, env.num_envs), env.step_buffers(), dict[str, str]()
    digest.add_reset(*env.reset(seed=row["seed"]))
    for step in range(1, max(marks, default=0) + 1):
        actions = env.sample_actions()
        digest.add_step(actions, env.step(actions, out=buffers))
        if env.autoreset_mode == "disabled" and step % RESET_EVERY == 0:
            env.reset(mask=~env.active.any(1), out=buffers)  # on the device: nobody looks
        if step % STATE_EVERY == 0:
            digest.add_state(env)
        if step in marks:
            found[str(step)] = digest.hex()
    env.close()
    return found


def read(path: Path = LEDGER) -> list[Row]:
    """All rows; none where there is no ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(device: str, agent_steps: int, path: Path = LEDGER) -> list[Row]:
    """Ask the device, and write the ledger anew."""
    said = provenance(torch.device(device))
    rows = []
    for row in rows_to_record(agent_steps):
        answers = digests(row, device, [int(ticks) for ticks in row["digests"]])
        game = gpu_vecenv.configure(row["game"], **row["config"])
        rows.append({**row, "digests": answers, "sources": source_sha256(game), **said})
        print(f"{row['game']} {row['autoreset_mode']}: {answers}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def replay(row: Row, agent_steps: int) -> tuple[int, list[str]]:
    """Agent-steps that were replayed on the host, and what differs."""
    game = gpu_vecenv.configure(row["game"], **row["config"])
    per_tick = row["num_envs"] * game.num_agents
    marks = [int(ticks) for ticks in row["digests"] if int(ticks) * per_tick <= agent_steps * 1.01]  # rounded up
    found = digests(row, "cpu", marks)
    differing = [
        f"{row['game']}, {row['autoreset_mode']}, {ticks} ticks: {digest} on the host, {row['digests'][ticks]} on "
        f"{row['device']}"
        for ticks, digest in found.items()
        if digest != row["digests"][ticks]
    ]
    return max(marks, default=0) * per_tick, differing


def is_stale(row: Row) -> bool:
    """Whether the device code has changed since the GPU was asked."""
    return row["sources"] != source_sha256(gpu_vecenv.configure(row["game"], **row["config"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "replay"])
    parser.add_argument("--device", default="cuda", help="whom to ask; replay always asks the host")
    parser.add_argument("--agent-steps", type=lambda text: int(float(text)), help="of the longest run of each game")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--receipt", action="store_true", help="of a replay: write that the bits were the same")
    given = parser.parse_args(arguments)
    if given.command == "record":
        record(given.device, given.agent_steps or LONG, given.ledger)
        return 0
    rows, failed, done, wanted = read(given.ledger), 0, dict[str, int](), given.agent_steps or SHORT
    for row in rows:
        steps, differing = replay(row, wanted)
        failed += bool(differing)
        label = f"{row['game']} {row['autoreset_mode']}: {steps:,} agent-steps"
        print(*(differing or [f"{label}, the bits of {row['device']}"]), "(stale)" * is_stale(row), flush=True)
        done[row["game"]] = done.get(row["game"], 0) + steps
    print(f"{len(rows)} rows, {failed} differ, {sum(map(is_stale, rows))} stale")
    if given.receipt and rows and not failed:
        receipts.write(
            "parity",
            what="Trajectories of every game in every autoreset mode have the same digests on a GPU and on the host.",
            command=f"python tests/ledger.py record; python tests/ledger.py replay --agent-steps {wanted}",
            metrics={"rows": len(rows), "agent_steps": done},
            planted={"another seed": replay({**rows[0], "seed": SEED + 1}, SHORT)[1][0]},
            python=SOURCES,
            device=rows[0]["device"],
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
