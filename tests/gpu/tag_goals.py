"""Train both games of tag with several seeds and compare what was learnt with the scripts and with random play.

usage: python tests/gpu/tag_goals.py FOLDER [--device cuda] [--rows tag_gridworld,tag_continuous] [--max-seconds 480]
           [--seeds 8] [--first-seed 1000] [--at-once 4] [--config JSON] [--learner JSON] [--policies JSON]
           [--opponents JSON]

It works for --max-seconds, keeps what it has in FOLDER and exits with 3 if more is left: the same command continues,
training bit-identically. At the end it exits with 0 if every seed has reached every goal, else with 1.

FOLDER/tag_goals.json has of each run its training time and of each pairing the share of episodes in which the taggers
won, which is when everybody was tagged, steps and returns. FOLDER/checkpoints has the policies. Another game, network
or hyper-parameter than that of the preset is --config '{"num_taggers": 5}', --learner '{"network": "mlp"}', and those
of single roles are --policies '{"runner": {"population": 16}}', as of `gpu-vecenv train`; in another FOLDER. Of
populations the first members play. Opponents other than the preset's are --opponents '{"sampling": "uniform"}', and
none are --opponents null.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tag_baselines import flee, play, pursuit

from gpu_vecenv import Env, PolicySpec, PPOConfig, Trainer, VecEnv, configure, load_policy
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.parallel_trainers import ParallelTrainers

UNFINISHED = 3  # exit code
TAGGERS, RUNNERS = ("trained", "pursuit", "random"), ("trained", "flee", "random")
TAGGED_ALL = "tagged_all"  # share of episodes in which everybody was tagged
Pairing = tuple[str, str]  # who plays the taggers, who the runners
Found = Mapping[Pairing, Mapping[str, float]]  # metrics of the pairings of a seed and of the scripts


@dataclass(frozen=True)
class Goal:
    """What every seed has to reach: a number of one pairing, against that of another or against a bound.

    Attributes:
        what: In words.
        pairing: That of the trained policies.
        metric: Which of its numbers.
        bound: Another pairing of the same seed or of scripts, or a number.
        strict: More than the bound, unless that is the share of all episodes.
    """

    what: str
    pairing: Pairing
    metric: str
    bound: Pairing | float
    strict: bool = True

    def margin(self, found: Found) -> float:
        """By how much a seed is above the bound."""
        return found[self.pairing][self.metric] - self.limit(found)

    def limit(self, found: Found) -> float:
        """The bound, as a number."""
        return self.bound if isinstance(self.bound, float) else found[self.bound][self.metric]

    def reached(self, found: Found) -> bool:
        """Whether a seed has reached it."""
        margin, all_episodes = self.margin(found), self.metric == TAGGED_ALL and self.limit(found) == 1
        return margin > 0 or (margin == 0 and (not self.strict or all_episodes))


def at_least(opponent: str, share: float) -> Goal:
    """Trained taggers win this share of episodes against an opponent."""
    what = f"trained taggers win at least {share:.0%} against {opponent}"
    return Goal(what, ("trained", opponent), TAGGED_ALL, share, strict=False)


def more_often(opponent: str) -> Goal:
    """Trained taggers win more often than the script does."""
    what = f"trained taggers win more often than pursuit against {opponent}"
    return Goal(what, ("trained", opponent), TAGGED_ALL, ("pursuit", opponent))


BETTER_RUNNERS = Goal(
    "trained runners have a higher return than flee against pursuit",
    ("pursuit", "trained"),
    "return_runner",
    ("pursuit", "flee"),
)


@dataclass(frozen=True)
class Row:
    """A game, how it is trained, and what has to come of it."""

    game: str
    config: Mapping[str, Any]
    learner: Mapping[str, Any]  # beside the preset
    seeds: int
    episodes: int  # of each pairing
    goals: Sequence[Goal]
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # role -> what its policy has beside that


CONTINUOUS_GOALS = (*map(more_often, RUNNERS), BETTER_RUNNERS)
ROWS = {
    # As `make train`.
    "tag_gridworld": Row(
        "tag_gridworld",
        {},
        {"total_steps": 2_000_000},
        16,
        1000,
        (at_least("random", 0.97), at_least("flee", 0.85)),
        {"runner": {"population": 16, "num_minibatches": 4}},
    ),
    "tag_continuous": Row("tag_continuous", {}, {}, 8, 200, CONTINUOUS_GOALS),
    # Of the picture.
    "tag_continuous-5": Row("tag_continuous", {"num_taggers": 5}, {}, 8, 200, CONTINUOUS_GOALS),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and for how long."""

    device: str | None = None  # cpu or cuda; by default cuda if usable
    rows: str = "tag_gridworld,tag_continuous"
    seeds: int | None = None  # of each row; by default 16 and 8
    first_seed: int = 0  # the others follow: those of trials are not those of reported results
    at_once: int = 1  # seeds that are trained at the same time; their training times are those of all together
    max_seconds: float = 480.0  # of this call; it ends between two iterations, or two pairings, after that
    episodes: int | None = None  # of each pairing; by default 1000 and 200
    eval_envs: int = 200  # environments of an evaluation, at most
    config: str = "{}"  # JSON: parameters of the game
    learner: str = "{}"  # JSON: hyper-parameters beside those of the preset, and num_envs
    opponents: str = "{}"  # JSON: what those of the preset, if it has any, have beside it; null: none
    policies: str | None = None  # JSON: role -> hyper-parameters and population of its policy; by default the row's

    def seeds_of(self, row: Row) -> range:
        """The seeds of a row."""
        return range(self.first_seed, self.first_seed + (row.seeds if self.seeds is None else self.seeds))

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the results: the same in every call with a folder."""
        return {name: value for name, value in asdict(self).items() if name not in ("rows", "max_seconds", "device")}


class Unfinished(Exception):
    """The time of this call is over."""


@dataclass
class Results:
    """What FOLDER/tag_goals.json, or of other goals the file of their name, has; written at every change."""

    folder: Path
    contents: dict[str, Any]
    deadline: float = field(default=math.inf)
    name: str = "tag_goals"

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Name of a run -> its results."""
        found: dict[str, dict[str, Any]] = self.contents["runs"]
        return found

    def checkpoint(self, run: str) -> Path:
        """The file with its trainer."""
        return self.folder / "checkpoints" / f"{run}.safetensors"

    def save(self) -> None:
        """Write the file."""
        replace_file(self.folder / f"{self.name}.json", (json.dumps(self.contents, indent=1) + "\n").encode())

    def check_time(self) -> None:
        """Raise Unfinished after the deadline."""
        if time.perf_counter() >= self.deadline:
            raise Unfinished


def opened(folder: Path, options: Options, origin: Mapping[str, Any], name: str = "tag_goals") -> Results:
    """The results so far; SystemExit where they are of other settings."""
    path = folder / f"{name}.json"
    contents: dict[str, Any] = {"settings": options.settings, "runs": {}, "scripts": {}, "parts": []}
    if path.is_file():
        contents = json.loads(path.read_text())
        if contents["settings"] != options.settings:
            raise SystemExit(f"{path} is of {contents['settings']}, not {options.settings}; expected another folder")
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    contents["parts"].append(dict(origin))
    return Results(folder, contents, time.perf_counter() + options.max_seconds, name)


def make_trainer(row: Row, seed: int, device: torch.device, options: Options) -> Trainer:
    """As the command line makes it, with the preset of the version that is played."""
    game = configure(row.game, **{**row.config, **json.loads(options.config)})
    preset = {**game.own_preset, **row.learner, **json.loads(options.learner)}
    env = VecEnv(game, preset.pop("num_envs"), device, autoreset_mode="next_step")
    if "hidden_sizes" in preset:
        preset["hidden_sizes"] = tuple(preset["hidden_sizes"])
    config = PPOConfig(**preset)
    policies = row.policies if options.policies is None else json.loads(options.policies)
    specs = {role: spec_of(config, policies.get(role, {})) for role in game.layout.present_roles}
    changes = json.loads(options.opponents)
    opponents = None if changes is None else preset_opponents(game, env.num_envs)
    if opponents is not None:
        opponents = replace(opponents, **changes)
    return Trainer(env, config, seed=seed, policies=specs, opponents=opponents)


def spec_of(config: PPOConfig, changes: Mapping[str, Any]) -> PolicySpec:
    """The policy of a role."""
    values = dict(changes)
    return PolicySpec(population=values.pop("population", 1), config=replace(config, **values))


def train(row: Row, names: Mapping[str, int], device: torch.device, options: Options, results: Results) -> None:
    """Train runs, name -> seed, at the same time, from their checkpoints if they have any.

    Raises:
        Unfinished: The deadline came first; the checkpoints are written.
    """
    trainers = {name: make_trainer(row, seed, device, options) for name, seed in names.items()}
    for name, trainer in trainers.items():
        kept = results.runs.setdefault(name, {"seed": names[name], "seconds": 0.0, "complete": False, "error": ""})
        if results.checkpoint(name).is_file():
            trainer.load(results.checkpoint(name))
        kept["num_envs"], kept["game"] = trainer.env.num_envs, repr(trainer.env.game)
        kept["learner"] = asdict(trainer.config)
    together, started = ParallelTrainers(list(trainers.values())), time.perf_counter()
    running = dict(trainers)
    try:
        while running := {n: t for n, t in running.items() if t.iteration < t.num_iterations}:
            for name, result in zip(list(running), together.train_interval(list(running.values())), strict=True):
                if isinstance(result, NonFiniteError):
                    results.runs[name]["error"] = str(result)
                    del running[name]
            if any(t.iteration < t.num_iterations for t in running.values()):
                results.check_time()
    finally:
        spent = time.perf_counter() - started
        for name, trainer in trainers.items():
            kept = results.runs[name]
            kept["seconds"] += spent
            kept["env_steps"] = trainer.iteration * trainer.env_steps_per_iteration
            kept["complete"] = bool(kept["error"]) or trainer.iteration >= trainer.num_iterations
            if not kept["error"]:
                trainer.save(results.checkpoint(name))
            trainer.close()
            trainer.env.close()
        results.save()


def played(game: Env, pairing: Pairing, policies: Mapping[str, Any], row: Row, options: Options) -> dict[str, float]:
    """Let two play against each other."""
    taggers = {"trained": policies.get("tagger"), "pursuit": pursuit(game), "random": None}[pairing[0]]
    runners = {"trained": policies.get("runner"), "flee": flee(game), "random": None}[pairing[1]]
    episodes = row.episodes if options.episodes is None else options.episodes
    actors = {"tagger": taggers, "runner": runners}
    found = play(game, actors, min(episodes, options.eval_envs), 1, options.device, episodes)
    return {TAGGED_ALL: found.pop("terminated_fraction"), **found}


def evaluate_row(row: Row, name: str, runs: Sequence[str], options: Options, results: Results) -> None:
    """All pairings that are not yet there, those of two scripts once. Raises Unfinished after the deadline."""
    trained = [pairing for pairing in itertools.product(TAGGERS, RUNNERS) if "trained" in pairing]
    scripts = [pairing for pairing in itertools.product(TAGGERS, RUNNERS) if "trained" not in pairing]
    game = configure(row.game, **{**row.config, **json.loads(options.config)})
    todo: list[tuple[dict[str, Any], Mapping[str, Any], Sequence[Pairing]]] = []
    todo.append((results.contents["scripts"].setdefault(name, {}), {}, scripts))
    for run in runs:
        if not results.runs[run]["error"]:
            policy = load_policy(results.checkpoint(run), member=0, device=resolve_device(options.device))
            pairings = results.runs[run].setdefault("pairings", {})
            todo.append((pairings, {role: policy[role] for role in ("tagger", "runner")}, trained))
    for found, policies, pairings in todo:
        for pairing in pairings:
            if (key := " - ".join(pairing)) not in found:
                found[key] = played(game, pairing, policies, row, options)
                results.save()
                results.check_time()


def summary(row: Row, name: str, runs: Sequence[str], results: Results) -> Iterator[tuple[str, bool]]:
    """A line for each pairing of scripts, seed and goal, and whether it is as it should be."""
    scripts = results.contents["scripts"][name]
    for key, found in scripts.items():
        yield f"{name}, {key}: {describe(found)}", True
    by_run: dict[str, dict[Pairing, Mapping[str, float]]] = {}
    for run in runs:
        kept = results.runs[run]
        if kept["error"]:
            yield f"{run}: {kept['error']}", False
            continue
        for key, found in kept["pairings"].items():
            yield f"{run}, {key}: {describe(found)}", True
        yield f"{run}: {kept['env_steps']:,} env-steps in {kept['seconds']:.0f} s", True
        by_run[run] = {}
        for key, found in (scripts | kept["pairings"]).items():
            taggers, runners = key.split(" - ")
            by_run[run][taggers, runners] = found
    for goal in row.goals if by_run else ():
        worst = min(by_run, key=lambda run: goal.margin(by_run[run]))
        reached = sum(map(goal.reached, by_run.values()))
        where = f"the worst is {worst}, {goal.margin(by_run[worst]):+.3f} from the bound"
        yield f"{name}, {goal.what}: {reached} of {len(runs)} seeds; {where}", reached == len(runs)


def describe(found: Mapping[str, float]) -> str:
    """One pairing's results."""
    returns = ", ".join(f"{role} {found[f'return_{role}']:.2f}" for role in ("tagger", "runner"))
    return f"all tagged {found[TAGGED_ALL]:.1%}, {found['episode_length']:.0f} steps, returns {returns}"


def main(folder: Path, options: Options) -> int:
    """Train, evaluate, print; the exit code."""
    rows = {name: ROWS[name] for name in options.rows.split(",") if name in ROWS}
    if unknown := sorted(set(options.rows.split(",")) - set(ROWS)):
        raise SystemExit(f"unknown rows {unknown}; expected some of {', '.join(ROWS)}")
    device = resolve_device(options.device)
    results = opened(folder, options, provenance(device))
    seeds = {name: options.seeds_of(row) for name, row in rows.items()}
    runs = {name: [f"{name}-seed{seed}" for seed in seeds[name]] for name in rows}
    reached = True
    try:
        for name, row in rows.items():
            left = [seed for seed in seeds[name] if not results.runs.get(f"{name}-seed{seed}", {}).get("complete")]
            for first in range(0, len(left), options.at_once):
                group = {f"{name}-seed{seed}": seed for seed in left[first : first + options.at_once]}
                train(row, group, device, options, results)
            evaluate_row(row, name, runs[name], options, results)
            for line, good in summary(row, name, runs[name], results):
                print(line, flush=True)
                reached &= good
    except Unfinished:
        done = sum(run["complete"] for run in results.runs.values())
        print(f"{done} of {sum(map(len, runs.values()))} runs are trained; the same command continues", flush=True)
        return UNFINISHED
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
