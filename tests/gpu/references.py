"""Measure what random play and the scripts of examples/ return in the games whose learning curves docs/results.md has.

usage: python tests/gpu/references.py FILE.json [--games cartpole,pendulum] [--episodes 320]

It runs on the CPU. A role's return is that against opponents that act at random, as in the curves, and of overcooked
without shaped rewards, as at the end of its training. Games that the file has are not measured again.
tests/gpu/curves.py draws the numbers as horizontal lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from connect_four_search import search
from preset_runs import EVAL_SEED, ROWS, returns_against
from pursuit_surround import surround
from tag_baselines import flee, pursuit
from warehouse_robots import fetch

from gpu_vecenv import Env, VecEnv, configure
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.files import replace_file

DEVICE = torch.device("cpu")
GAMES = (
    "cartpole,acrobot,pendulum,mountain_car,continuous_mountain_car,simple_spread,simple_tag,simple_adversary,"
    "overcooked,overcooked-advantages,overcooked-ring,overcooked-forced,overcooked-circuit,pursuit,skirmish,"
    "tag_gridworld-random_start,warehouse,tag_continuous-v1,connect_four"
)


@dataclass(frozen=True)
class Script:
    """A script of examples/ that plays a role, for as many episodes at most, in the game with these parameters."""

    name: str
    actor: Callable[[Any], Any]
    episodes: int = 320
    config: tuple[tuple[str, Any], ...] = ()


TAG = {"tagger": Script("tag_baselines.py, pursuit", pursuit), "runner": Script("tag_baselines.py, flee", flee)}
SCRIPTS: dict[str, dict[str, Script]] = {  # row -> role -> its script
    "pursuit": {"pursuer": Script("pursuit_surround.py", surround)},
    "tag_gridworld-random_start": TAG,
    "tag_continuous-v1": TAG,
    "connect_four": {"player": Script("connect_four_search.py", lambda _: search())},
    # Its robots see the whole warehouse, and it plays on the host, slowly.
    "warehouse": {"robot": Script("warehouse_robots.py", fetch, 8, (("sensor_range", 10),))},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    games: str = GAMES  # rows of preset_runs.py
    episodes: int = 320  # of each measurement


def returns(game: Env, own: dict[str, Any], episodes: int) -> dict[str, float]:
    """Mean return of each role in ``own``, role -> actor, against opponents that act at random."""
    env = VecEnv(game, min(episodes, 64), DEVICE)
    try:
        return returns_against(env, own, None, episodes)
    finally:
        env.close()


def measured(row: str, episodes: int) -> dict[str, Any]:
    """Random play and the scripts of one row."""
    name, values = ROWS[row]
    game = configure(name, **values, **({"shaping": 0.0} if name == "overcooked" else {}))
    scripts = {}
    for role, script in SCRIPTS.get(row, {}).items():
        played, count = configure(game, **dict(script.config)), min(episodes, script.episodes)
        value = returns(played, {role: script.actor(played)}, count)[role]
        scripts[role] = {"script": script.name, **dict(script.config), "episodes": count, "return": value}
    return {
        "episodes": episodes,
        "random": returns(game, dict.fromkeys(game.layout.roles), episodes),
        "scripts": scripts,
    }


def main(path: Path, options: Options) -> None:
    """Measure what the file lacks."""
    torch.set_num_threads(1)
    contents: dict[str, Any] = {"parts": [], "rows": {}}
    if path.is_file():
        contents = json.loads(path.read_text(encoding="utf-8"))
    command = f"python tests/gpu/references.py FILE.json --games {options.games} --episodes {options.episodes}"
    for row in options.games.split(","):
        if row in contents["rows"]:
            continue
        part = {**provenance(DEVICE), "command": command, "seed": EVAL_SEED}
        if part not in contents["parts"]:
            contents["parts"].append(part)
        contents["rows"][row] = {"part": contents["parts"].index(part), **measured(row, options.episodes)}
        replace_file(path, (json.dumps(contents, indent=1) + "\n").encode())
        print(row, json.dumps(contents["rows"][row]), flush=True)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes))
