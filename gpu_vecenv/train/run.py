"""A training run in a folder, as ``gpu-vecenv train`` does it: metrics, checkpoints, learning curve, evaluation."""

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
from rich.text import Text

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError, counted
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import replace_file
from gpu_vecenv.progress import OnProgress, ProgressDisplay, line_interval, no_progress, part
from gpu_vecenv.train.checkpoint import BEST, CHECKPOINTS, CheckpointFolder
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.logger import RunLog
from gpu_vecenv.train.plots import METRICS_FILE, plot_runs
from gpu_vecenv.train.selection import Selection, SelectionState
from gpu_vecenv.train.trainer import Trainer

CURVE_FILE, EVALUATION_FILE = "learning_curve.png", "evaluation.json"
SETTINGS = "settings.json"  # what the command line was given that is neither the game's nor the policies'
LOCK_FILE = ".lock"  # locked by the process that trains in the folder; the file itself stays and means nothing


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Output options of a run."""

    episodes: int = param(1000, low=1)  # of each evaluation after training
    checkpoint_seconds: float = param(60.0, low=0)  # time between checkpoints; 0 saves one after each iteration
    keep: int = param(3, low=1)  # checkpoints to keep, besides the best
    best_metric: str | None = None  # the best checkpoint has its largest mean; default: returns of the trained roles
    best_episodes: int = param(100, low=0)  # of an evaluation that compares checkpoints, per trained role; 0: no best
    best_interval: int = param(10, low=0)  # training episodes between these evaluations, per episode of one
    wandb: str | None = None  # Weights & Biases project to log to
    digests: bool = False  # log a digest of all weights each iteration, to compare runs bitwise

    def __post_init__(self) -> None:
        check_fields(self)


def run(
    trainer: Trainer,
    folder: Path,
    config: RunConfig | None = None,
    *,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Train to the end, evaluate, and write learning curve, metrics, checkpoints and evaluation to ``folder``.

    Under torchrun every process calls it; rank 0 writes all files but the checkpoints of other ranks. SIGTERM and
    SIGINT stop it after the current iteration, with a checkpoint. One process at a time trains in a folder.

    Args:
        trainer: A new trainer; with ``resume`` the newest checkpoint of the folder is loaded into it.
        folder: The run folder; it must not have a run unless ``resume``.
        config: Output options.
        resume: Continue the run in ``folder``.
        settings: Written to ``settings.json`` at the start of a new run.

    Returns:
        0, or 128 plus the number of the signal that stopped it.

    Raises:
        ConfigError: The folder already has a run, another process trains in it, or ``best_metric`` is not one of the
            run's metrics.
        CheckpointCorruptError: No checkpoint to resume from is usable.
        FileNotFoundError: There is no checkpoint to resume from.
    """
    config, folder = config or RunConfig(), Path(folder)
    selection = make_selection(trainer, config)  # these raise before anything is written
    line_interval()
    with _locked(folder, trainer.world, create=not resume), contextlib.closing(selection):
        return _run(trainer, folder, config, selection, resume, settings)


def _run(
    trainer: Trainer,
    folder: Path,
    config: RunConfig,
    selection: Selection,
    resume: bool,
    settings: Mapping[str, Any] | None,
) -> int:
    world, console = trainer.world, Console(quiet=trainer.world.rank > 0)
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep=config.keep, rank=world.rank, world_size=world.size)
    seconds = 0.0  # of training, including the time before a resume
    if resume:
        tensors, manifest = checkpoints.load()
        trainer.load_state(tensors, manifest, str(folder))
        progress = manifest.get("progress", {})
        seconds, selection.state = progress.get("seconds", 0.0), SelectionState(**progress.get("selection", {}))
    elif checkpoints.begun():
        raise ConfigError(f"{folder} already has a run; use another folder, or resume it: --resume {folder}")
    elif settings is not None and world.rank == 0:
        replace_file(folder / SETTINGS, json.dumps(settings, indent=1).encode())
    world.barrier()
    checkpoints.clean()
    env = trainer.env
    console.print(
        f"{printable(repr(env.game))}\n{counted(env.num_envs * world.size, 'environment')} x "
        f"{counted(env.num_agents, 'agent')} on {env.device}"
        f"{f' and {world.size - 1} more' * (world.size > 1)}, iterations {trainer.iteration} to "
        f"{trainer.num_iterations} of {counted(trainer.config.num_steps, 'step')}, run folder {printable(str(folder))}",
        highlight=False,
        markup=False,
    )
    if env.device.type == "cuda":
        for name, reason in trainer.torch_reasons.items():
            how = "one kernel" if reason is None else f"torch ({reason})"
            _print_line(console, f"gradients and forward passes of {name} by {how}")
        reason = trainer.rollout_reason
        how = "one launch for all steps" if reason is None else f"several launches a step ({reason})"
        _print_line(console, f"rollouts by {how}")

    def save(compare: bool) -> Path:
        best = compare and selection.is_best()
        tensors, manifest = trainer.state()
        manifest["progress"] = {"seconds": seconds, "selection": vars(selection.state)}
        path = checkpoints.save(trainer.iteration, tensors, manifest, best=best)
        world.barrier()
        return path

    with _stop_signal() as stop_signal, _log(trainer, folder, config, console) as log:
        start, saved = time.perf_counter() - seconds, time.perf_counter()
        stopped, save_due = world.all_agree(stop_signal() != 0, False)
        while trainer.iteration < trainer.num_iterations and not stopped:
            metrics: dict[str, Any] = trainer.train_iteration()
            seconds = time.perf_counter() - start
            selection.state.training_episodes += metrics["episodes"]
            if config.digests:
                metrics["weights"] = weights_digest(trainer)
            log({"iteration": metrics.pop("iteration"), "seconds": seconds, **metrics})
            since_save = time.perf_counter() - saved
            stopped, save_due = world.all_agree(stop_signal() != 0, since_save >= config.checkpoint_seconds)
            if save_due and not stopped and trainer.iteration < trainer.num_iterations:
                save(selection.due())
                saved = time.perf_counter()
        path = save(trainer.iteration >= trainer.num_iterations or (save_due and selection.due()))
        stopped = stopped or stop_signal() != 0
    if stopped:
        name = signal.Signals(stop_signal()).name if stop_signal() else "another process"
        _print_line(console, f"{name}: saved {path}")
        _print_line(console, f"resume with: gpu-vecenv train --resume {shlex.quote(str(folder))}")
        return 128 + stop_signal() if stop_signal() else 1
    if world.rank == 0:
        _write_results(trainer, folder, path, config.episodes, selection.state, console)
    return 0


def make_selection(trainer: Trainer, config: RunConfig) -> Selection:
    """What selects the best checkpoint of a run. Raises ConfigError if ``best_metric`` is not one of its metrics."""
    return Selection(trainer, config.best_metric, config.best_episodes, config.best_interval)


@contextlib.contextmanager
def _locked(folder: Path, world: World, create: bool) -> Iterator[None]:
    """Hold the lock of a run folder, which the system releases when the process ends; rank 0 does it for all."""
    from filelock import FileLock, Timeout  # importing it writes to the temporary folder

    with contextlib.ExitStack() as held:
        refused = False
        if world.rank == 0 and (create or folder.is_dir()):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(FileLock(folder / LOCK_FILE, timeout=0))
            except Timeout:
                refused = True
        if world.all_agree(refused, False)[0]:
            raise ConfigError(
                f"another process trains in {folder}: it holds {folder / LOCK_FILE}; wait until it has ended, stop it "
                "with SIGTERM, or use another folder"
            )
        yield


def weights_digest(trainer: Trainer) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all weights. Synchronises with the device."""
    digest = hashlib.sha256()
    for policy in trainer.policies.values():
        for tensor in policy.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _log(
    trainer: Trainer, folder: Path, config: RunConfig, console: Console
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Logger of rank 0; no-op on other ranks."""
    if trainer.world.rank > 0:
        yield lambda metrics: None
        return
    with (
        ProgressDisplay("train", console) as on_progress,
        RunLog(folder, trainer.num_iterations, on_progress, done=trainer.iteration, wandb=config.wandb) as log,
    ):
        yield log


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the received stop signal, or 0. A second signal acts as usual."""
    received = [0]
    if threading.current_thread() is not threading.main_thread():  # only the main thread can install handlers
        yield lambda: 0
        return

    def handle(number: int, frame: FrameType | None) -> None:
        received[0] = number
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_results(
    trainer: Trainer, folder: Path, checkpoint: Path, episodes: int, chosen: SelectionState, console: Console
) -> None:
    with ProgressDisplay("evaluate", console) as on_progress:
        results = evaluations(trainer, episodes, on_progress)
    replace_file(folder / EVALUATION_FILE, (json.dumps(results, indent=1) + "\n").encode())
    console.print(evaluation_table(trainer.env.game, results, "other roles act randomly"))
    drawn = plot_runs([folder], folder / CURVE_FILE)
    curve = str(folder / CURVE_FILE) if drawn else 'not drawn: matplotlib is missing (pip install "gpu_vecenv[train]")'
    best = "none" if chosen.best is None else f"of iteration {chosen.best_iteration}: {folder / CHECKPOINTS / BEST}"
    for label, value in (
        ("learning curve", curve),
        ("checkpoint", str(checkpoint)),
        ("best checkpoint", best),
        ("evaluation", str(folder / EVALUATION_FILE)),
        ("metrics", str(folder / METRICS_FILE)),
        ("to watch it", f"gpu-vecenv replay record {shlex.quote(str(folder))}"),
    ):
        _print_line(console, f"{label:15} {value}")


def _print_line(console: Console, line: str) -> None:
    console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def evaluations(trainer: Trainer, episodes: int, on_progress: OnProgress = no_progress) -> dict[str, dict[str, float]]:
    """Evaluations with all roles random, with each single role trained, and with all roles trained."""
    roles = list(trainer.env.game.layout.roles)
    pairings: dict[str, Sequence[str]] = {"all random": roles}
    if len(roles) > 1:
        for role in roles:
            others = [other for other in roles if other != role]
            pairings[f"{role} trained"] = others
    pairings["all trained"] = []
    return {
        name: trainer.evaluate(episodes, random_roles=random, on_progress=part(on_progress, index, len(pairings), name))
        for index, (name, random) in enumerate(pairings.items())
    }


def evaluation_table(game: Env, results: Mapping[str, Mapping[str, float]], note: str = "") -> Table:
    """Results of ``evaluate`` as a table, a row each; ``note`` follows the number of episodes in its title."""
    episodes = next(iter(results.values()))["episodes"]
    title = f"{game.name()}: {counted(episodes, 'episode')}{' each' if len(results) > 1 else ''}{note and f'; {note}'}"
    table = Table(title=Text(printable(title)))
    table.add_column("policies", no_wrap=True)
    for heading in (game.termination_label, "steps", *(f"return, {role}" for role in game.layout.roles)):
        table.add_column(Text(printable(heading)), justify="right")
    for name, metrics in results.items():
        returns = [f"{metrics[f'return_{role}']:.2f}" for role in game.layout.roles]
        table.add_row(
            Text(printable(name)), f"{metrics['terminated_fraction']:.1%}", f"{metrics['episode_length']:.1f}", *returns
        )
    return table
