"""A training run in a folder: metrics, checkpoints, curve, evaluation. What ``gpu-vecenv train`` does, callable."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.checkpoint import CheckpointFolder
from gpu_vecenv.train.logger import METRICS_FILE, RunLog
from gpu_vecenv.train.plots import plot_runs
from gpu_vecenv.train.trainer import Trainer

CURVE_FILE, EVALUATION_FILE, CHECKPOINTS = "learning_curve.png", "evaluation.json", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run leaves behind."""

    episodes: int = param(1000, low=1)  # of each evaluation at the end
    checkpoint_seconds: float = param(60.0, low=0)  # between checkpoints; 0 writes one after each iteration
    keep: int = param(3, low=1)  # checkpoints kept, besides the best
    best_metric: str | None = None  # metric whose largest mean between checkpoints is the best; by default a return
    wandb: str | None = None  # project of Weights & Biases to log to as well
    digests: bool = False  # log a fingerprint of all weights with each iteration, to compare runs bit by bit

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class Progress:
    """What a run knows beside the trainer's state; saved with each checkpoint."""

    seconds: float = 0.0  # of training, all sittings together
    best: float | None = None  # of the metric that decides
    total: float = 0.0  # of that metric since the last checkpoint, weighted by episodes
    episodes: float = 0.0


def run(trainer: Trainer, folder: Path, config: RunConfig | None = None, *, resume: bool = False) -> int:
    """Train to the end, evaluate, and leave curve, metrics, checkpoints and evaluation in ``folder``.

    Under torchrun every process calls it; the first one writes. SIGTERM and SIGINT end it after the iteration at hand,
    with a checkpoint.

    Args:
        trainer: As it was made: with ``resume`` it takes up the newest checkpoint of the folder.
        folder: Of the run; a new one, or with ``resume`` an old one.
        config: What to leave behind.
        resume: Go on.

    Returns:
        0, or 128 plus the number of the signal that ended it.

    Raises:
        ConfigError: The folder already holds a run, or ``best_metric`` is no metric of this one.
        CheckpointCorruptError, FileNotFoundError: There is nothing to go on from.
    """
    config, world, console = config or RunConfig(), trainer.world, Console(quiet=trainer.world.rank > 0)
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep=config.keep, rank=world.rank, world_size=world.size)
    decisive = best_metric_name(trainer, config)
    progress = Progress()
    if resume:
        tensors, manifest = checkpoints.load()
        trainer.load_state(tensors, manifest, str(folder))
        progress = Progress(**manifest.get("progress", {}))
    elif checkpoints.begun():
        raise ConfigError(f"{folder} already holds a run; take another folder, or go on with: --resume {folder}")
    world.barrier()
    checkpoints.clean()
    env = trainer.env
    console.print(
        f"{env.game!r}\n{env.num_envs * world.size} replicas x {env.num_agents} agents on {env.device}"
        f"{f' and {world.size - 1} more' * (world.size > 1)}, iterations {trainer.iteration} to "
        f"{trainer.num_iterations} of {trainer.config.num_steps} steps, run folder {folder}",
        highlight=False,
    )

    def save() -> Path:
        score = progress.total / progress.episodes if progress.episodes else None
        is_best = score is not None and (progress.best is None or score > progress.best)
        if is_best:
            progress.best = score
        progress.total = progress.episodes = 0.0
        tensors, manifest = trainer.state()
        path = checkpoints.save(trainer.iteration, tensors, {**manifest, "progress": vars(progress)}, best=is_best)
        world.barrier()
        return path

    with _stop_signal() as stopped, _log(trainer, folder, config, console) as log:
        start, saved = time.perf_counter() - progress.seconds, time.perf_counter()
        ended, due = world.all_agree(stopped() != 0, False)
        while trainer.iteration < trainer.num_iterations and not ended:
            metrics: dict[str, Any] = trainer.train_iteration()
            progress.seconds = time.perf_counter() - start
            progress.total += metrics[decisive] * metrics["episodes"]
            progress.episodes += metrics["episodes"]
            if config.digests:
                metrics["weights"] = weights_digest(trainer)
            log({"iteration": metrics.pop("iteration"), "seconds": progress.seconds, **metrics})
            ended, due = world.all_agree(stopped() != 0, time.perf_counter() - saved >= config.checkpoint_seconds)
            if due and not ended and trainer.iteration < trainer.num_iterations:
                save()
                saved = time.perf_counter()
        path = save()
        ended = ended or stopped() != 0
    if ended:
        name = signal.Signals(stopped()).name if stopped() else "another process"
        console.print(f"{name}: saved {path}", highlight=False, soft_wrap=True)
        console.print(f"go on with: gpu-vecenv train --resume {folder}", highlight=False, soft_wrap=True)
        return 128 + stopped() if stopped() else 1
    if world.rank == 0:
        _write_results(trainer, folder, path, config.episodes, console)
    return 0


def weights_digest(trainer: Trainer) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all weights. Waits for the device."""
    digest = hashlib.sha256()
    for policy in trainer.policies.values():
        for tensor in policy.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def best_metric_name(trainer: Trainer, config: RunConfig) -> str:
    """The metric that tells which checkpoint is the best."""
    roles = [role for learner in trainer.learners.values() for role in learner.policy.view.roles]
    known = [*(f"return_{role}" for role in trainer.env.game.layout.roles), "episode_length", "terminated_fraction"]
    if config.best_metric is None:
        return f"return_{roles[0]}" if roles else known[0]
    if config.best_metric not in known:
        raise ConfigError(f"best_metric is {config.best_metric!r}; expected one of {', '.join(known)}")
    return config.best_metric


@contextlib.contextmanager
def _log(
    trainer: Trainer, folder: Path, config: RunConfig, console: Console
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """The first process' log; the others write nothing."""
    if trainer.world.rank > 0:
        yield lambda metrics: None
        return
    with RunLog(folder, trainer.num_iterations, console, done=trainer.iteration, wandb=config.wandb) as log:
        yield log


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], int]]:
    """Tells the number of the signal that asked to stop, 0 if none did. A second one acts as it always does."""
    received = [0]
    if threading.current_thread() is not threading.main_thread():  # only the main one may handle signals
        yield lambda: 0
        return

    def note(number: int, frame: FrameType | None) -> None:
        received[0] = number
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_results(trainer: Trainer, folder: Path, checkpoint: Path, episodes: int, console: Console) -> None:
    results = evaluations(trainer, episodes)
    (folder / EVALUATION_FILE).write_text(json.dumps(results, indent=1) + "\n")
    console.print(evaluation_table(trainer, results))
    drawn = plot_runs([folder], folder / CURVE_FILE)
    curve = str(folder / CURVE_FILE) if drawn else 'not drawn: matplotlib is missing (pip install "gpu_vecenv[train]")'
    for what, where in (
        ("learning curve", curve),
        ("checkpoint", str(checkpoint)),
        ("evaluation", str(folder / EVALUATION_FILE)),
        ("metrics", str(folder / METRICS_FILE)),
        ("to watch it", f"gpu-vecenv replay record {shlex.quote(str(folder))}"),
    ):
        console.print(f"{what:15} {where}", highlight=False, soft_wrap=True)


def evaluations(trainer: Trainer, episodes: int) -> dict[str, dict[str, float]]:
    """Every pairing of trained and random roles that tells something: all random, one role trained, all trained."""
    roles = list(trainer.env.game.layout.roles)
    pairings: dict[str, Sequence[str]] = {"all random": roles}
    if len(roles) > 1:
        for role in roles:
            others = [other for other in roles if other != role]
            pairings[f"{role} trained"] = others
    pairings["all trained"] = []
    return {name: trainer.evaluate(episodes, random_roles=random) for name, random in pairings.items()}


def evaluation_table(trainer: Trainer, results: Mapping[str, Mapping[str, float]]) -> Table:
    """The results side by side."""
    game, episodes = trainer.env.game, next(iter(results.values()))["episodes"]
    table = Table(title=f"{game.name()}: {episodes:.0f} episodes each; who is not named as trained acts at random")
    table.add_column("policies", no_wrap=True)
    for heading in (game.termination_label, "steps", *(f"return, {role}" for role in game.layout.roles)):
        table.add_column(heading, justify="right")
    for name, metrics in results.items():
        returns = [f"{metrics[f'return_{role}']:.2f}" for role in game.layout.roles]
        table.add_row(name, f"{metrics['terminated_fraction']:.1%}", f"{metrics['episode_length']:.1f}", *returns)
    return table
