"""Run: one training run in its folder, with its lock, log, checkpoints, best checkpoint and evaluations."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError, NonFiniteError, counted
from gpu_vecenv.files import replace_file
from gpu_vecenv.progress import OnProgress, no_progress
from gpu_vecenv.train.checkpoint import CHECKPOINTS, CheckpointFolder, load_checkpoint
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.evaluation_curves import EVALUATION_FILE, EVALUATIONS_FILE, FROZEN
from gpu_vecenv.train.evaluation_log import EvaluationLog
from gpu_vecenv.train.evaluation_sizes import BEST_EPISODES, num_episodes
from gpu_vecenv.train.evaluation_tables import evaluations, pairings_of
from gpu_vecenv.train.fixed_opponents import INITIAL, KINDS, FixedOpponents, parsed_scripts
from gpu_vecenv.train.logger import RunLog
from gpu_vecenv.train.plots import CONFIG_FILE, plot_runs
from gpu_vecenv.train.selection import Selection, SelectionState
from gpu_vecenv.train.stored_config import readable_config
from gpu_vecenv.train.trainer import Trainer

CURVE_FILE = "learning_curve.png"
SETTINGS = "settings.json"  # what the command line was given that is neither the game's nor the policies'
SEEDS_FILE = "seeds.json"  # in the folder of several runs: their seeds
LOCK_FILE = ".lock"  # locked by the process that trains in the folder; the file itself stays and means nothing


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Output options of a run."""

    log_interval: int = param(1, low=1)  # iterations between rows of metrics, checkpoints and reactions to signals
    # episodes of each evaluation after training; None: 1000, fewer after a short training
    episodes: int | None = param(None, low=1)
    checkpoint_seconds: float = param(60.0, low=0)  # seconds between checkpoints; 0 saves one with each row of metrics
    keep: int = param(3, low=1)  # checkpoints to keep, besides the best
    # metric whose largest mean selects the best checkpoint; None: returns of the trained roles
    best_metric: str | None = None
    # episodes of each match in evaluations of checkpoints during training; 0: no evaluations and no best checkpoint;
    # None: 100, or as many as after training without ``episodes`` if those are fewer
    best_episodes: int | None = param(None, low=0)
    # least number of training episodes between two of these evaluations, as a multiple of the episodes of one match
    best_interval: int = param(10, low=0)
    eval_opponents: tuple[str, ...] = KINDS  # fixed opponents in evaluations: random, still, initial
    eval_scripts: tuple[str, ...] = ()  # further ones: role=file.py:function, which takes the game and returns an actor
    wandb: str | None = None  # Weights & Biases project to log to; None: none
    digests: bool = False  # log a digest of all weights with each row of metrics, to compare runs bitwise

    def __post_init__(self) -> None:
        check_fields(self)


class Run:
    """A trainer and the folder that its run leaves. Rank 0 writes all files but the checkpoints of other ranks.

    Attributes:
        seconds: Of training, including the time before a resume.
        checkpoint: The last one that this process saved.
        error: What ended the run before its last iteration.

    Args:
        trainer: A new trainer.
        folder: The run folder.
        config: Output options.

    Raises:
        ConfigError: ``best_metric`` is not one of the run's metrics, or there are no such opponents.
    """

    def __init__(self, trainer: Trainer, folder: Path, config: RunConfig) -> None:
        self.trainer, self.folder, self.config, world = trainer, folder, config, trainer.world
        self.selection = make_selection(trainer, config)
        rank_and_size = {"rank": world.rank, "world_size": world.size}
        self.checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep=config.keep, **rank_and_size)
        self.seconds = 0.0
        self.checkpoint: Path | None = None
        self.error: NonFiniteError | None = None
        self._log: RunLog | None = None
        self._on_progress: OnProgress = no_progress
        self._evaluations: EvaluationLog | None = None
        self._saved: int | None = None  # the iteration of the checkpoint

    @property
    def saved(self) -> bool:
        """Whether the checkpoint is of the latest iteration."""
        return self._saved == self.trainer.iteration

    @property
    def active(self) -> bool:
        """Whether there is an iteration to come."""
        return self.error is None and self.trainer.iteration < self.trainer.num_iterations

    def begin(self, *, resume: bool, settings: Mapping[str, Any] | None) -> None:
        """Load the newest checkpoint into the trainer, or of a new run write one; write the settings that are given.

        Raises:
            ConfigError: The folder already has a run, or one of more env-steps than the trainer's ``total_steps``.
            CheckpointCorruptError, FileNotFoundError: No checkpoint to resume from is usable, or there is none.
        """
        world = self.trainer.world
        if resume:
            tensors, manifest = self.checkpoints.load()
            seconds, selection = _progress(manifest, self.folder)
            check_end(self.trainer, manifest["iteration"], self.folder)
            self._load_initial()
            self.trainer.load_state(tensors, manifest, str(self.folder))
            self.seconds, self.selection.state = seconds, selection
        else:
            check_free(self.folder)
            if world.rank == 0:
                (self.folder / SEEDS_FILE).unlink(missing_ok=True)  # of runs that were stopped before any checkpoint
        if world.rank == 0:
            if settings is not None:
                replace_file(self.folder / SETTINGS, json.dumps(settings, indent=1).encode())
            write_json(self.folder / CONFIG_FILE, readable_config(self.trainer.state()[1]))
        world.barrier()
        self.checkpoints.clean()
        if not resume:
            self.save(compare=False)
        if world.rank == 0:
            self.checkpoints.keep_initial()
        world.barrier()
        if world.rank == 0:
            done = self.trainer.iteration if resume else None
            self._evaluations = EvaluationLog(self.folder / EVALUATIONS_FILE, done)

    def _load_initial(self) -> None:
        """Evaluate against the policies with which the run began."""
        if not self.selection.opponents.is_against(INITIAL):
            return
        try:
            path = self.checkpoints.initial()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f'{error}; to resume without it leave "initial" out of eval_opponents, which {self.folder / SETTINGS} '
                "has where the command line began the run"
            ) from None
        self.selection.opponents.load_initial(load_checkpoint(path)[0], str(path))

    @contextlib.contextmanager
    def logging(self, on_progress: OnProgress) -> Iterator[None]:
        """Open the log; only rank 0 has one."""
        trainer = self.trainer
        if trainer.world.rank > 0:
            yield
            return
        self._on_progress = on_progress
        done, wandb = trainer.iteration, self.config.wandb
        num_envs = trainer.env.num_envs * trainer.world.size
        with RunLog(self.folder, trainer.num_iterations, num_envs, on_progress, done=done, wandb=wandb) as self._log:
            yield

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Log the metrics since the last row, after ``seconds`` of training."""
        self.selection.state.training_episodes += metrics["episodes"]
        digest = {"weights": weights_digest(self.trainer)} if self.config.digests else {}
        if self._log is not None:
            self._log({"iteration": metrics["iteration"], "seconds": self.seconds, **metrics, **digest})

    def save(self, *, compare: bool) -> None:
        """Save a checkpoint; ``compare``: also as the best, if its score is larger than all before."""
        best = compare and self._evaluate()
        tensors, manifest = self.trainer.state()
        manifest["progress"] = {"seconds": self.seconds, "selection": vars(self.selection.state)}
        self.checkpoint = self.checkpoints.save(self.trainer.iteration, tensors, manifest, best=best)
        self._saved = self.trainer.iteration
        self.trainer.world.barrier()

    def _evaluate(self) -> bool:
        """Evaluate, and whether the score is larger than all before; rows are written before the checkpoint."""
        trainer, selection = self.trainer, self.selection
        if selection.episodes and (matches := len(selection.opponents.matches)):
            fraction = min(1.0, trainer.iteration / trainer.num_iterations)
            number = f"{matches} x {counted(selection.episodes, 'episode')}"
            self._on_progress(fraction, f"evaluating this checkpoint: {number}")
        best = selection.is_best()
        if self._evaluations is not None and self.selection.results:
            steps = trainer.iteration * trainer.env_steps_per_iteration
            self._evaluations(trainer.iteration, steps, self.seconds, self.selection.results)
        return best

    def left_out_opponents(self) -> list[str]:
        """A line for each kind of fixed opponents that no evaluation is against, where that is not the usual case."""
        opponents = self.selection.opponents
        if not opponents.is_against(FROZEN) and {*self.config.eval_opponents} == {*KINDS}:
            return []
        return [f"no evaluation is against {kind}: {reason}" for kind, reason in opponents.left_out.items()]

    def pairings(self) -> tuple[dict[str, Mapping[str, RolePolicy]], int]:
        """Who plays in the evaluations after training, by name, and how many episodes of each."""
        pairings = pairings_of(self.trainer, self.selection.opponents)
        return pairings, self.config.episodes or num_episodes(self.trainer, len(pairings))

    def write_results(self, on_progress: OnProgress) -> tuple[dict[str, dict[str, float]], bool]:
        """Evaluate, and write the evaluation and the learning curve; the evaluation, and whether there is a curve."""
        results = evaluations(self.trainer, *self.pairings(), on_progress)
        write_json(self.folder / EVALUATION_FILE, results)
        return results, plot_runs([self.folder], self.folder / CURVE_FILE, x="both")

    def close(self) -> None:
        """Release the memory of evaluations during training."""
        self.selection.close()


def check_end(trainer: Trainer, done: int, folder: Path) -> None:
    """Raise ConfigError if so many iterations, which a run has, are more than the trainer's ``total_steps`` make."""
    if done > trainer.num_iterations:
        raise ConfigError(
            f"total_steps is {trainer.config.total_steps:,}, but the run in {folder} has "
            f"{counted(done * trainer.env_steps_per_iteration, 'env-step')}; expected at least as many, or leave it out"
        )


def _progress(manifest: Mapping[str, Any], folder: Path) -> tuple[float, SelectionState]:
    """Seconds of training and state of the selection at a checkpoint; CheckpointCorruptError if they are damaged."""
    try:
        progress = manifest.get("progress", {})
        return float(progress.get("seconds", 0.0)), SelectionState(**progress.get("selection", {}))
    except (AttributeError, TypeError, ValueError) as error:
        expected = ", ".join(field.name for field in dataclasses.fields(SelectionState))
        raise CheckpointCorruptError(
            f"{folder}: 'progress' of its newest checkpoint is {manifest.get('progress')!r:.200}; expected 'seconds', "
            f"a number, and 'selection' with {expected}: {error}. Resume from an older one: remove the newest file "
            f"in {folder / CHECKPOINTS}"
        ) from error


def make_selection(trainer: Trainer, config: RunConfig) -> Selection:
    """What evaluates a run and selects its best checkpoint.

    Raises:
        ConfigError: ``best_metric`` is not one of the run's metrics, or there are no such opponents.
    """
    opponents = FixedOpponents(trainer, config.eval_opponents, parsed_scripts(config.eval_scripts))
    episodes = config.best_episodes
    if episodes is None:
        episodes = min(BEST_EPISODES, num_episodes(trainer, len(pairings_of(trainer, opponents))))
    return Selection(trainer, config.best_metric, episodes, config.best_interval, opponents)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by an object as JSON."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def seed_folder(folder: Path, seed: int) -> Path:
    """The run folder of one of several seeds."""
    return Path(folder) / f"seed-{seed}"


def read_seeds(folder: Path) -> list[int] | None:
    """The seeds of a folder of several runs; None if it is one run's. Raises ConfigError if the list is damaged."""
    path = folder / SEEDS_FILE
    if not path.is_file():
        return None
    try:
        seeds = json.loads(path.read_text(encoding="utf-8"))["seeds"]
        if not seeds or not all(type(seed) is int for seed in seeds):
            raise ValueError(f"seeds is {seeds!r:.80}; expected a list of ints")
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or of another version: {type(error).__name__}: {error}") from error
    return list(seeds)


def run_of_checkpoint(path: Path) -> Path:
    """The folder of a run for one of its checkpoints, or for its folder of them; any other path as it is."""
    for folder in (path, path.parent):
        if folder.absolute().name == CHECKPOINTS:
            return folder.parent if folder.name else folder.absolute().parent
    return path


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is one run's, else those of its seeds. Raises ConfigError as ``read_seeds``."""
    seeds = read_seeds(folder)
    return [folder] if seeds is None else [seed_folder(folder, seed) for seed in seeds]


def resume_command(folder: Path) -> str:
    """The command that resumes a run, or runs of several seeds."""
    return f"gpu-vecenv train --resume {shlex.quote(str(folder))}"


def by_command(folder: Path) -> bool:
    """Whether the command line began the run, or those of several seeds."""
    return any(folder.glob(SETTINGS)) or any(folder.glob(f"seed-*/{SETTINGS}"))


def how_to_resume(folder: Path) -> str:
    """How to resume a run, or runs of several seeds: by a command, or as Python began it."""
    return resume_command(folder) if by_command(folder) else "the same call and resume=True"


def check_free(folder: Path) -> None:
    """Raise ConfigError if the folder has a run, or runs of several seeds, with any checkpoint."""
    for one in (folder, *folder.glob("seed-*")):
        if CheckpointFolder(one / CHECKPOINTS).begun():
            raise ConfigError(f"{folder} already has a run; use another folder, or resume it: {how_to_resume(folder)}")


@contextlib.contextmanager
def locked(folder: Path, world: World, *, create: bool) -> Iterator[None]:
    """Hold the lock of a run folder, which the system releases when the process ends; rank 0 does it for all.

    Raises:
        ConfigError: Another process holds it.
    """
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
