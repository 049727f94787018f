"""Runs of presets in parts that can be taken up again, each seed bit-identical to one that was not interrupted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import Figures, Settings

from gpu_vecenv import Env, PPOConfig, Trainer, VecEnv, configure
from gpu_vecenv.cli.train import preset_defaults
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.crossplay import crossplay
from gpu_vecenv.train.curriculum import preset_curriculum
from gpu_vecenv.train.evaluation import RolePolicy, evaluate
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.role_view import sides_with_returns

EVAL_SEED = 1_000_000  # evaluations of training seed s have EVAL_SEED + s, so that no two seeds share their luck
PresetName = Literal["fast", "sample-efficient"]
AlgorithmName = Literal["ppo", "mappo", "pqn", "pqn-vdn"]
# Name of the row -> game and its configuration.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "tag_continuous": ("tag_continuous", {"egocentric": False}),
    "tag_continuous-v1": ("tag_continuous", {}),
    "tag_continuous-small": ("tag_continuous", {"num_taggers": 4, "num_runners": 8, "max_steps": 200}),
    "skirmish": ("skirmish", {}),
    "connect_four": ("connect_four", {}),
    "simple_tag": ("simple_tag", {}),
    "simple_adversary": ("simple_adversary", {}),
    "simple_spread": ("simple_spread", {}),
    "overcooked": ("overcooked", {}),
    "overcooked-advantages": ("overcooked", {"layout_name": "asymmetric_advantages"}),
    "overcooked-ring": ("overcooked", {"layout_name": "coordination_ring"}),
    "overcooked-forced": ("overcooked", {"layout_name": "forced_coordination"}),
    "overcooked-circuit": ("overcooked", {"layout_name": "counter_circuit_o_1order"}),
    "harvest": ("harvest", {}),
    "cleanup": ("cleanup", {}),
    "economy": ("economy", {}),
    "pursuit": ("pursuit", {}),
    "warehouse": ("warehouse", {"num_agents": 4, "reward_type": "global"}),
    "tag_gridworld-random_start": ("tag_gridworld", {"random_start": True}),
    "tag_gridworld": ("tag_gridworld", {}),
    "acrobot": ("acrobot", {}),
    "continuous_mountain_car": ("continuous_mountain_car", {}),
    "mountain_car": ("mountain_car", {}),
    "pendulum": ("pendulum", {}),
    "cartpole": ("cartpole", {}),
}


class Unfinished(Exception):
    """The time of this call is over."""


def checked_rows(names: str, preset: PresetName) -> dict[str, tuple[Env, dict[str, Any]]]:
    """Games and presets of some of ROWS; SystemExit for an unknown one, or one without such a preset."""
    wanted = names.split(",")
    if unknown := sorted(set(wanted) - set(ROWS)):
        raise SystemExit(f"unknown games {unknown}; expected some of {', '.join(ROWS)}")
    games = {row: configure(ROWS[row][0], **ROWS[row][1]) for row in wanted}
    presets = {row: preset_of(game, preset) for row, game in games.items()}
    if without := [row for row in wanted if not presets[row]]:
        raise SystemExit(f"no {preset} preset in {', '.join(without)}; leave them out of --games")
    return {row: (games[row], presets[row]) for row in wanted}


def preset_of(game: Env, preset: PresetName) -> dict[str, Any]:
    """The hyper-parameters of a game's preset and its num_envs; empty where it has none."""
    return dict(game.own_preset if preset == "fast" else game.sample_efficient_preset)


def changes_of(total_steps: int | None, learner: str) -> dict[str, Any]:
    """The hyper-parameters that differ from the preset's: those of ``learner``, JSON, and ``total_steps`` if given."""
    changes: dict[str, Any] = json.loads(learner)
    return changes if total_steps is None else {**changes, "total_steps": total_steps}


def make_trainer(
    game: Env,
    learner: Mapping[str, Any],
    seed: int,
    device: torch.device,
    algorithm: AlgorithmName = "ppo",
    opponents_json: str | None = None,
) -> Trainer:
    """As the command line makes it; for another algorithm than "ppo", of ``learner`` total_steps alone counts.

    ``opponents_json`` has fields of OpponentsConfig, or is "null" for none; by default they are the preset's.
    """
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in learner.items()}
    num_envs, opponents = values.pop("num_envs"), None
    config: LearnerConfig
    if algorithm == "ppo":
        config = PPOConfig(**values)
        if opponents_json is None:
            opponents = preset_opponents(game, num_envs)
        elif (fields := json.loads(opponents_json)) is not None:
            opponents = OpponentsConfig(**fields)
    else:
        preset = ("ppo", "mappo") if algorithm == "mappo" else (algorithm, "fast")
        num_envs, defaults = preset_defaults(type(game), *preset)
        config = replace(defaults, total_steps=values["total_steps"])
    env = VecEnv(game, num_envs, device, autoreset_mode="next_step")
    return Trainer(env, config, seed=seed, opponents=opponents, curriculum=preset_curriculum(game))


def returns_against(
    env: VecEnv,
    own: Mapping[str, RolePolicy],
    others: Mapping[str, RolePolicy] | None,
    episodes: int,
    greedy: bool = False,
    seed: int = EVAL_SEED,
) -> dict[str, float]:
    """Mean return of each role in ``own``, role -> actor, with opponents from ``others``; those it lacks act at random.

    In a zero-sum game of one role, where its mean is 0, that of a side against the others, each side in turn.
    """
    if sides_with_returns(env.game) != tuple(env.game.layout.roles):
        entries = {"own": own, "others": others}
        played = crossplay(env, entries, episodes=episodes, greedy=greedy, seed=seed)
        first, second = (played.returns[side].mean for side in played.sides)
        return dict.fromkeys(own, (first[0][1] + second[1][0]) / 2)
    found = {}
    for role in own:
        actors = {name: own[role] if name == role else (others or {}).get(name) for name in env.game.layout.roles}
        result = evaluate(env, actors, episodes, greedy=greedy, seed=seed)
        found[role] = result[f"return_{role}"]
    return found


def returns_of(
    trainer: Trainer, episodes: int, greedy: bool = False, others: Mapping[str, RolePolicy] | None = None
) -> dict[str, float]:
    """Those of a trainer's policies, with an evaluation seed of its own."""
    return returns_against(trainer.env, trainer.role_policies(), others, episodes, greedy, EVAL_SEED + trainer.seed)


class Group:
    """Runs that are trained at the same time, with the checkpoints and curves they had when the last call ended.

    Args:
        trainers: Name of a run -> its trainer, new; closed at the end of the ``with`` statement.
        figures: Its "unfinished" has the curves and seconds of runs that are not complete.
        settings: How runs are measured.
        point: What an evaluation during training measures, numbers by name; None: the returns of each trained role.
    """

    def __init__(
        self,
        trainers: Mapping[str, Trainer],
        figures: Figures,
        settings: Settings,
        point: Callable[[Trainer], Mapping[str, float | None]] | None = None,
    ) -> None:
        self.trainers, self.figures, self.settings = dict(trainers), figures, settings
        self._point = point or (lambda trainer: returns_of(trainer, settings.curve_episodes))
        self.together = ParallelTrainers(list(trainers.values()))
        self.kept: dict[str, dict[str, Any]] = {}
        unfinished = figures.contents.setdefault("unfinished", {})
        for name, trainer in trainers.items():
            if self.checkpoint(name).is_file():
                trainer.load(self.checkpoint(name))
            self.kept[name] = unfinished.setdefault(name, {"curve": [], "seconds": 0.0, "error": ""})

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for trainer in self.trainers.values():
                stack.callback(trainer.env.close)
                stack.callback(trainer.close)

    def checkpoint(self, name: str) -> Path:
        """The file of a run's trainer."""
        return self.figures.path.parent / "policies" / f"{name}.safetensors"

    def train(self, deadline: float) -> None:
        """Train all to their ends or to losses that are not finite, with an evaluation after equal parts.

        Raises:
            Unfinished: The deadline has passed, and after at least one part more is left; what was trained is kept.
        """
        while running := [name for name, kept in self.kept.items() if not kept["error"] and self._left(name)]:
            left = max(map(self._left, running))
            self._train_to(self.settings.points + 1 - left, [name for name in running if self._left(name) == left])
            if time.perf_counter() >= deadline and any(self._left(n) for n in running if not self.kept[n]["error"]):
                raise Unfinished

    def _left(self, name: str) -> int:
        """Points of a run's curve that it does not have yet."""
        return self.settings.points - len(self.kept[name]["curve"])

    def _train_to(self, point: int, names: Sequence[str]) -> None:
        """Train runs to a point of their curves."""
        target = point * self.trainers[names[0]].num_iterations // self.settings.points  # the same for all
        behind = [name for name in names if self.trainers[name].iteration < target]
        started = time.perf_counter()
        results = self.together.train_interval([self.trainers[name] for name in behind], max(1, target))
        spent = time.perf_counter() - started
        for name, result in zip(behind, results, strict=True):
            self.kept[name]["seconds"] += spent
            if isinstance(result, NonFiniteError):
                self.kept[name]["error"] = str(result)
        for name in names:
            trainer, kept = self.trainers[name], self.kept[name]
            if not kept["error"]:
                env_steps = trainer.iteration * trainer.env_steps_per_iteration
                kept["curve"].append([env_steps, self._point(trainer)])
                self.checkpoint(name).parent.mkdir(parents=True, exist_ok=True)
                trainer.save(self.checkpoint(name))
        self.figures.save()

    def complete(self, name: str, row: str, seed: int, result: Mapping[str, Any]) -> None:
        """Keep a run that is trained, with what was measured of it."""
        trainer, kept = self.trainers[name], self.figures.contents["unfinished"].pop(name)
        env_steps = trainer.iteration * trainer.env_steps_per_iteration
        self.figures.add(row, seed, {"env_steps": env_steps, "at_once": len(self.trainers), **kept, **result})
