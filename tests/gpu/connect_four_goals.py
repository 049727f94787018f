"""Train connect_four by self-play with several seeds and play what was learnt against random moves and a search.

usage: python tests/gpu/connect_four_goals.py FOLDER [--device cuda] [--max-seconds 480] [--seeds 8] [--at-once 4]
           [--episodes 1000] [--config JSON] [--learner JSON]

It works for --max-seconds, keeps what it has in FOLDER and exits with 3 if more is left: the same command continues,
training bit-identically. At the end it exits with 0 if every seed has reached every goal, else with 1.

The goals are of the likeliest actions: at least 99 % of games won against random moves, 80 % against a search of depth
5 (examples/connect_four_search.py), each side first player in half of the games, draws not counted as won. Sampled
actions are played too. Games are of the default rules, also where --config trains others, such as
'{"opening_moves": 4}'. FOLDER/connect_four_goals.json has wins, draws and games of each match.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from connect_four_search import match, search, trained
from tag_goals import UNFINISHED, Options, Results, Row, Unfinished, opened, train

from gpu_vecenv import load_policy
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance

ROW = Row("connect_four", {}, {}, 8, 1000, ())
OPPONENTS = {"random moves": 0.99, "a search of depth 5": 0.8}  # -> the share of games that greedy play has to win
DEPTH = 5


def evaluate(runs: Sequence[str], device: torch.device, options: Options, results: Results) -> None:
    """All matches that are not yet there. Raises Unfinished after the deadline."""
    for run in runs:
        if results.runs[run]["error"]:
            continue
        policy = load_policy(results.checkpoint(run), device=device)["player"]
        matches = results.runs[run].setdefault("matches", {})
        for kind in ("greedy", "sampled"):
            for name in OPPONENTS:
                if (key := f"{kind}, {name}") not in matches:
                    opponent = None if name == "random moves" else search(DEPTH, seed=1, device=device)
                    games = ROW.episodes if options.episodes is None else options.episodes
                    player = trained(policy, 1, greedy=kind == "greedy")
                    score = match(player, opponent, games, 1, device)
                    matches[key] = {"wins": score.wins, "draws": score.draws, "games": score.games}
                    results.save()
                    results.check_time()


def win_rate(found: Mapping[str, Sequence[int]]) -> float:
    """Share of the games of a match that the policy won."""
    return sum(found["wins"]) / sum(found["games"])


def summary(runs: Sequence[str], results: Results) -> Iterator[tuple[str, bool]]:
    """A line for each match and goal, and whether it is as it should be."""
    whole: dict[str, dict[str, Any]] = {}
    for run in runs:
        kept = results.runs[run]
        if kept["error"]:
            yield f"{run}: {kept['error']}", False
            continue
        whole[run] = kept["matches"]
        for key, found in kept["matches"].items():
            yield f"{run}, {key}: {win_rate(found):.1%} won, {sum(found['draws'])} of {sum(found['games'])} drawn", True
        yield f"{run}: {kept['env_steps']:,} env-steps in {kept['seconds']:.0f} s", True
    for name, goal in OPPONENTS.items() if whole else ():
        rates = {run: win_rate(matches[f"greedy, {name}"]) for run, matches in whole.items()}
        worst = min(rates, key=lambda run: rates[run])
        reached = sum(rate >= goal for rate in rates.values())
        told = f"wins at least {goal:.0%} against {name}: {reached} of {len(runs)} seeds"
        yield f"{told}; the worst is {worst}, {rates[worst]:.1%}", reached == len(runs)


def main(folder: Path, options: Options) -> int:
    """Train, evaluate, print; the exit code."""
    device = resolve_device(options.device)
    results = opened(folder, options, provenance(device), "connect_four_goals")
    names = {f"connect_four-seed{seed}": seed for seed in options.seeds_of(ROW)}
    try:
        left = [run for run in names if not results.runs.get(run, {}).get("complete")]
        for first in range(0, len(left), options.at_once):
            train(ROW, {run: names[run] for run in left[first : first + options.at_once]}, device, options, results)
        evaluate([*names], device, options, results)
    except Unfinished:
        done = sum(run["complete"] for run in results.runs.values())
        print(f"{done} of {len(names)} runs are trained; the same command continues", flush=True)
        return UNFINISHED
    lines = list(summary([*names], results))
    for line, _ in lines:
        print(line, flush=True)
    return 0 if all(good for _, good in lines) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
