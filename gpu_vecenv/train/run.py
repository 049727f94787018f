"""Training runs in folders, as ``gpu-vecenv train`` does them: one, or several at a time that differ in the seed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from gpu_vecenv.declare.env import HOW_TO_DRAW, Env
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.envs.registry import game_argument
from gpu_vecenv.errors import ConfigError, NonFiniteError, counted
from gpu_vecenv.escapes import printable
from gpu_vecenv.progress import OnProgress, ProgressDisplay, line_interval, no_progress, part
from gpu_vecenv.train.checkpoint import BEST, CHECKPOINTS
from gpu_vecenv.train.default_networks import policies_with_own_networks
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.evaluation_curves import EVALUATION_FILE, EVALUATIONS_FILE
from gpu_vecenv.train.evaluation_sizes import EPISODES
from gpu_vecenv.train.evaluation_tables import Results, evaluation_table, seeds_table, summary_of_seeds
from gpu_vecenv.train.fixed_policy import FUNCTION, kinds_of
from gpu_vecenv.train.host_kernels import HostKernels
from gpu_vecenv.train.logger import rate_text
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.plots import METRICS_FILE, plot_runs
from gpu_vecenv.train.populations import without_members
from gpu_vecenv.train.run_folder import (
    CURVE_FILE,
    SEEDS_FILE,
    SETTINGS,
    Run,
    RunConfig,
    by_command,
    check_free,
    how_to_resume,
    locked,
    resume_command,
    seed_folder,
    write_json,
)
from gpu_vecenv.train.trainer import Trainer

__all__ = ["RunConfig", "run", "run_seeds"]

NOTE = "mean and worst return of an episode"
LISTED = 8  # names of policies, or roles, in a line


def run(
    trainer: Trainer,
    folder: Path,
    config: RunConfig | None = None,
    *,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    after_row: Callable[[], None] | None = None,
) -> int:
    """Train to the end, evaluate, and write learning curve, metrics, checkpoints and evaluation to ``folder``.

    Under torchrun every process calls it; rank 0 writes all files but the checkpoints of other ranks. SIGTERM and
    SIGINT stop it at the next row of metrics, with a checkpoint. One process at a time trains in a folder.

    Args:
        trainer: A new trainer; with ``resume`` the newest checkpoint of the folder is loaded into it.
        folder: The run folder; it must not have a run unless ``resume``.
        config: Output options.
        resume: Continue the run in ``folder``.
        settings: Written to ``settings.json``; None: it stays as it is.
        after_row: Called between iterations, after each row of metrics; it must not change the trainer.

    Returns:
        0, or 128 plus the number of the signal that stopped it.

    Raises:
        ConfigError: The folder already has a run, or one of more env-steps than ``total_steps``; another process trains
            in it; ``best_metric`` is not one of the run's metrics; or no evaluation of a new run is against any of the
            ``eval_opponents``.
        CheckpointCorruptError: No checkpoint to resume from is usable.
        FileNotFoundError: There is no checkpoint to resume from.
        NonFiniteError: A loss or gradient became NaN or infinite.
    """
    folder, console = Path(folder), _console(trainer.world)
    one = Run(trainer, folder, config or RunConfig())  # this and the next two raise before anything is written
    if not resume:
        one.selection.opponents.check_used()
    line_interval()
    with locked(folder, trainer.world, create=not resume), contextlib.closing(one), _resumable(console, folder):
        one.begin(resume=resume, settings=settings)
        _print_sizes(console, [one], folder)
        with ProgressDisplay("train", console, show_end=True) as on_progress, one.logging(on_progress):
            stopped = _train([one], ParallelTrainers([trainer]), after_row=after_row)
        if one.error is not None:
            raise one.error
        if stopped:
            return _stopped(console, stopped, str(one.checkpoint), folder)
        if trainer.world.rank == 0:
            _write_results(one, console)
        return 0


def run_seeds(
    trainers: Sequence[Trainer],
    folder: Path,
    config: RunConfig | None = None,
    *,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    after_row: Callable[[], None] | None = None,
) -> int:
    """Train several trainers that differ in the seed at the same time, each in a run folder of its own.

    ``folder`` has a folder seed-<seed> for each, with what ``run`` writes, bit-identical but for times; ``run`` may
    resume each alone. Beside them are the seeds, ``seeds.json``, a learning curve of all, and the evaluation of all
    with mean and worst. A trainer whose loss or gradient becomes NaN or infinite ends there; the others are
    trained to their end.

    Args:
        trainers: New trainers on environments of their own, in one process; with ``resume`` the newest checkpoint of
            each run that has one is loaded.
        folder: The folder of the run folders.
        config: Output options, of each run.
        resume: Continue the runs in ``folder``.
        settings: Written to ``settings.json`` in each folder; None: it stays as it is.
        after_row: As for ``run``, after the rows of all seeds.

    Returns:
        0, or 128 plus the number of the signal that stopped it.

    Raises:
        TypeError, ValueError, ConfigError: No trainers, of several processes or devices, two with the same seed, or
            ``wandb``, which logs one run of a process; and as for ``run``.
        CheckpointCorruptError, FileNotFoundError: As for ``run``.
        NonFiniteError: At the end, naming each seed that did not reach it.
    """
    config, folder = config or RunConfig(), Path(folder)
    together = ParallelTrainers(trainers)
    seeds = [trainer.seed for trainer in trainers]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"the seeds are {seeds}; expected each once: trainers with one seed are identical")
    check_log(config, len(seeds))
    console, world = _console(trainers[0].world), trainers[0].world
    runs = [Run(trainer, seed_folder(folder, trainer.seed), config) for trainer in trainers]
    if not resume:
        runs[0].selection.opponents.check_used()
    line_interval()
    with contextlib.ExitStack() as held:
        held.enter_context(locked(folder, world, create=not resume))
        if not resume:
            check_free(folder)
        held.enter_context(_resumable(console, folder))
        for one in runs:
            held.enter_context(locked(one.folder, world, create=not resume))
            held.enter_context(contextlib.closing(one))
        if not resume:
            write_json(folder / SEEDS_FILE, {"seeds": seeds})
        for one in runs:
            # A seed without a checkpoint failed, or was stopped before its first one.
            one.begin(resume=resume and one.checkpoints.begun(), settings=settings)
        _print_sizes(console, runs, folder)
        with ProgressDisplay("train", console, show_end=True) as on_progress, contextlib.ExitStack() as logs:
            for one in runs:
                logs.enter_context(one.logging(no_progress))
            stopped = _train(runs, together, on_progress, after_row)
        complete = [one for one in runs if one.error is None]
        failed = [f"seed {one.trainer.seed}: {one.error}" for one in runs if one.error is not None]
        if stopped:
            for line in failed:
                _print_line(console, line)
            return _stopped(console, stopped, f"checkpoints of {counted(len(complete), 'seed')} in {folder}", folder)
        if complete:
            _write_results_of_seeds(complete, folder, console)
        if failed:
            raise NonFiniteError("; ".join(failed))
        return 0


def check_log(config: RunConfig, runs: int) -> None:
    """Raise ConfigError if so many runs of one process cannot be logged."""
    if config.wandb is not None and runs > 1:
        raise ConfigError(f"wandb is {config.wandb!r}, but it logs one run of a process, not {runs}; leave it out")


def _train(
    runs: Sequence[Run],
    together: ParallelTrainers,
    on_progress: OnProgress | None = None,
    after_row: Callable[[], None] | None = None,
) -> int:
    """Train, log and save until all have ended or a signal stops them: the exit code then, else 0."""
    world, config = runs[0].trainer.world, runs[0].config
    before = [one.seconds for one in runs]
    when = "after this iteration" if config.log_interval == 1 else f"after at most {config.log_interval} iterations"
    with _stop_signal(when if world.rank == 0 else None) as stop_signal:
        start = saved = time.perf_counter()
        stopped, save_due = world.all_agree(stop_signal() != 0, False)
        while (active := [one for one in runs if one.active]) and not stopped:
            results = together.train_interval([one.trainer for one in active], config.log_interval)
            for one, seconds in zip(runs, before, strict=True):
                if one in active:
                    one.seconds = seconds + time.perf_counter() - start
            for one, result in zip(active, results, strict=True):
                if isinstance(result, NonFiniteError):
                    one.error = result
                else:
                    one.record(result)
            if on_progress is not None:
                on_progress(*_progress(active, results))
            if after_row is not None:
                after_row()
            since_save = time.perf_counter() - saved
            stopped, save_due = world.all_agree(stop_signal() != 0, since_save >= config.checkpoint_seconds)
            for one in active:
                if one.error is not None or stopped:
                    continue
                if not one.active:
                    one.save(compare=True)
                elif save_due:
                    one.save(compare=one.selection.due())
            if save_due and not stopped:
                saved = time.perf_counter()
        for one in runs:
            if one.error is None and not one.saved:
                one.save(compare=not one.active or (save_due and one.selection.due()))
    # After the handlers are gone: a signal that came before that, however late, has stopped the run.
    if not stopped and stop_signal() == 0:
        return 0
    return 128 + stop_signal() if stop_signal() else 1  # 1: another process was stopped


def _progress(active: Sequence[Run], results: Sequence[Mapping[str, Any] | NonFiniteError]) -> tuple[float, str]:
    """Of several runs: the fraction that is done, and a text with mean and worst of each return."""
    slowest = min((one.trainer for one in active), key=lambda trainer: trainer.iteration)
    found = [result for result in results if not isinstance(result, NonFiniteError)]
    rate = sum(metrics["agent_steps_per_s"] for metrics in found)
    returns = []
    for name in (name for name in without_members(found[0] if found else ()) if name.startswith("return_")):
        values = [metrics[name] for metrics in found if math.isfinite(metrics[name])]
        if values:
            role = name.removeprefix("return_")
            returns.append(f"{role} {statistics.fmean(values):.2f} (worst {min(values):.2f})")
    shown = f"return: {' '.join(returns)}" if returns else "no returns yet: first episodes are running"
    iteration, count = slowest.iteration, slowest.num_iterations
    seeds = counted(len(found), "seed")
    return iteration / count, f"iteration {iteration} of {count}  {rate_text(rate)}  {seeds}  {shown}"


@contextlib.contextmanager
def _stop_signal(when: str | None) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the received stop signal, or 0. A second signal acts as usual.

    The first one prints at once what will happen; ``when`` says when, and is None where another process prints it.
    """
    received = [0]
    if threading.current_thread() is not threading.main_thread():  # only the main thread can install handlers
        yield lambda: 0
        return

    def handle(number: int, frame: FrameType | None) -> None:
        received[0] = number
        signal.signal(number, before[number])
        if when is not None:
            name = signal.Signals(number).name
            again = "Ctrl-C again stops" if number == signal.SIGINT else f"another {name} stops"
            text = f"\n{name}: stops {when} and saves a checkpoint; {again} at once, without one\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())  # Python's streams refuse a print within another, which this may be

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield lambda: received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(console: Console, code: int, saved: str, folder: Path) -> int:
    """Print what stopped the training and how to resume it; its exit code."""
    name = signal.Signals(code - 128).name if code > 128 else "another process"
    _print_line(console, f"{name}: saved {saved}")
    _print_line(console, f"resume with: {how_to_resume(folder)}")
    return code


def _how_to_extend(folder: Path, total_steps: int) -> str:
    if by_command(folder):
        return f"{resume_command(folder)} --total-steps {2 * total_steps}"
    return f"a trainer with total_steps={2 * total_steps}, and resume=True"


@contextlib.contextmanager
def _resumable(console: Console, folder: Path) -> Iterator[None]:
    """If Ctrl-C ends the block, also while it evaluates, print how to resume from the last checkpoint."""
    try:
        yield
    except KeyboardInterrupt:
        if any(folder.glob(f"{CHECKPOINTS}/*")) or any(folder.glob(f"seed-*/{CHECKPOINTS}/*")):
            _print_line(console, f"resume from the last checkpoint with: {how_to_resume(folder)}")
        raise


def _print_evaluations(console: Console, one: Run, seeds: int = 1) -> None:
    """What the evaluations after training will play, before they begin."""
    pairings, episodes = one.pairings()
    matches, times = len(pairings) - 2, f"{counted(seeds, 'seed')} x " * (seeds > 1)
    against = f", {matches} against fixed opponents" * (matches > 0)
    few = f" (after a longer training {EPISODES:,} each)" if _few(one, episodes) else ""
    number = f"{times}{len(pairings)} x {counted(episodes, 'episode')}"
    first, *_, last = pairings
    _print_line(console, f"evaluating {number}{few}: {first}{against}, {last}")


def _few(one: Run, episodes: int) -> bool:
    """Whether the evaluations after training have fewer episodes than after a longer one."""
    return one.config.episodes is None and episodes < EPISODES


def _write_results(one: Run, console: Console) -> None:
    _print_evaluations(console, one)
    with ProgressDisplay("evaluate", console) as on_progress:
        results, drawn = one.write_results(on_progress)
    console.print(evaluation_table(one.trainer.env.game, results, NOTE))
    chosen = one.selection.state
    best = f"of iteration {chosen.best_iteration}: {one.folder / CHECKPOINTS / BEST}"
    _print_files(
        console,
        one.folder,
        drawn,
        {
            "checkpoint": str(one.checkpoint),
            "best checkpoint": "none" if chosen.best is None else best,
            "evaluation": str(one.folder / EVALUATION_FILE),
            "evaluations": str(one.folder / EVALUATIONS_FILE) if one.selection.results else "none in training",
            "metrics": str(one.folder / METRICS_FILE),
        },
        to_watch=one,
    )


def _write_results_of_seeds(runs: Sequence[Run], folder: Path, console: Console) -> None:
    results: dict[int, Results] = {}
    _print_evaluations(console, runs[0], len(runs))
    with ProgressDisplay("evaluate", console) as on_progress:
        for index, one in enumerate(runs):
            seed = one.trainer.seed
            results[seed], _ = one.write_results(part(on_progress, index, len(runs), f"seed {seed}"))
    game = runs[0].trainer.env.game
    summary = summary_of_seeds(game, list(results.values()))
    write_json(folder / EVALUATION_FILE, {"seeds": {str(seed): found for seed, found in results.items()}} | summary)
    drawn = plot_runs([one.folder for one in runs], folder / CURVE_FILE, x="both")
    console.print(seeds_table(game, results, NOTE))
    files = {"evaluation": str(folder / EVALUATION_FILE), "runs": " ".join(str(one.folder) for one in runs)}
    _print_files(console, folder, drawn, files, to_watch=runs[0])


def _print_files(console: Console, folder: Path, drawn: bool, files: Mapping[str, str], to_watch: Run) -> None:
    curve = str(folder / CURVE_FILE) if drawn else 'not drawn: matplotlib is missing (pip install "gpu_vecenv[train]")'
    lines = {"learning curve": curve, **files}
    if (scripts := _frozen_scripts(to_watch)) is not None and _can_be_played_again(to_watch.trainer):
        opponents = ["--opponents", *scripts] if scripts else []  # checkpoints have no code
        if _few(to_watch, to_watch.pairings()[1]):
            lines["more episodes"] = _command_of_run(to_watch, "evaluate", "--episodes", str(EPISODES), *opponents)
        drawable = type(to_watch.trainer.env.game).draw is not Env.draw
        lines["to watch it"] = _command_of_run(to_watch, "replay record", *opponents) if drawable else HOW_TO_DRAW
    for label, value in lines.items():
        _print_line(console, f"{label:15} {value}")


def _can_be_played_again(trainer: Trainer) -> bool:
    """Whether commands can play a run's checkpoints as it was trained: they have neither modules nor initial states."""
    return not trainer.env.build.initial_fields and not policies_with_own_networks(trainer.policies.values())


def _frozen_scripts(one: Run) -> list[str] | None:
    """The scripts that play frozen roles, as options name them; None where functions of Python do."""
    if FUNCTION not in kinds_of(one.trainer.policies).values():
        return []
    if not (one.folder / SETTINGS).is_file():
        return None
    found: list[str] = json.loads((one.folder / SETTINGS).read_text(encoding="utf-8"))["frozen_scripts"]
    return found


def _command_of_run(one: Run, command: str, *options: str) -> str:
    """A command line for a run, with the file of its game unless its settings name it."""
    source = f"{one.folder}{':0' if one.trainer.populations else ''}"
    argument = game_argument(type(one.trainer.env.game))
    if argument is not None and not (one.folder / SETTINGS).is_file():
        options = (*options, "--game", argument)
    return f"gpu-vecenv {command} {shlex.join([source, *options])}"


def _console(world: World) -> Console:
    return Console(quiet=world.rank > 0)


def _roles_text(layout: GameLayout) -> str:
    """As in "role: agent" and "roles: 4 tagger, 1 runner"."""
    names = layout.present_roles
    if len(names) == 1:
        return f"role: {names[0]}"
    return (
        f"{len(names)} roles"
        if len(names) > LISTED
        else f"roles: {', '.join(f'{layout.roles[name]} {name}' for name in names)}"
    )


def _print_sizes(console: Console, runs: Sequence[Run], folder: Path) -> None:
    """Sizes, device and folder, and on a GPU what computes each policy."""
    trainer = min((one.trainer for one in runs), key=lambda trainer: trainer.iteration)
    env, processes = trainer.env, trainer.world.size
    seeds = f", seeds {', '.join(str(one.trainer.seed) for one in runs)}" if len(runs) > 1 else ""
    left = (trainer.num_iterations - trainer.iteration) * trainer.env_steps_per_iteration
    lines = (
        repr(env.game),
        f"{counted(env.num_envs * processes, 'environment')} x {counted(env.num_agents, 'agent')} "
        f"({_roles_text(env.layout)}) on {env.device}"
        f"{f' and {processes - 1} more' * (processes > 1)}{seeds}, run folder {folder}",
        f"iterations {trainer.iteration + 1} to {trainer.num_iterations} of {counted(trainer.config.num_steps, 'step')}"
        f": {counted(left, 'env-step')} (a step of one environment), "
        f"{counted(left * env.num_agents, 'agent-step')} (of one agent)"
        if left
        else f"all iterations are done; to train twice as long: {_how_to_extend(folder, trainer.config.total_steps)}",
    )
    for line in lines:
        console.print(printable(line), highlight=False, markup=False)
    if left and not console.is_interactive:
        _print_line(console, f"a line of progress follows every {line_interval():g} s, from the first iteration on")
    for line in runs[0].left_out_opponents():
        _print_line(console, line)
    if env.device.type == "cuda":
        for how, names in names_by_computation(trainer).items():
            shown = ", ".join(names) if len(names) <= LISTED else f"{len(names)} policies, {names[0]} to {names[-1]},"
            _print_line(console, f"gradients and forward passes of {shown} by {how}")
        reason = trainer.rollout_reason
        how = "one launch for all steps" if reason is None else f"several launches a step ({reason})"
        _print_line(console, f"rollouts by {how}")
        if processes > 1 and trainer.graphs:
            _print_line(console, f"iterations by {graphs_of(trainer)}")


def graphs_of(trainer: Trainer) -> str:
    """What an iteration of several processes is on a GPU, and why it is not one CUDA graph."""
    if trainer.by_kernels:
        return "one CUDA graph, with the collectives of all processes"
    reason = trainer.collectives_reason or "gradients by torch"
    return f"several CUDA graphs, collectives between them ({reason})"


def names_by_computation(trainer: Trainer) -> dict[str, list[str]]:
    """What computes policies, see ``computed_by`` -> their names, in the order of the agents."""
    found: dict[str, list[str]] = {}
    for name in trainer.policies:
        found.setdefault(computed_by(trainer, name), []).append(name)
    return found


def computed_by(trainer: Trainer, policy: str) -> str:
    """What computes a policy of a trainer, and why nothing faster does."""
    if reason := trainer.torch_reasons[policy]:
        states = trainer.states.get(policy)
        if states is None:
            return f"torch ({reason})"
        if states.torch_reason is not None:
            return f"torch ({reason}: {states.torch_reason})"
        why = states.stepwise_reason
        return f"torch ({reason}), its cells by kernels{'' if why is None else f' step by step ({why})'}"
    optimizer = trainer.configs[policy].optimizer
    by_kernel = optimizer in ("adam", "radam") or policy not in trainer.learners
    steps = "" if by_kernel else f", steps by torch (optimizer {optimizer!r})"
    if isinstance(trainer.kernels[policy], HostKernels):
        return f"one kernel each, by vector instructions{steps}"
    reason = trainer.unfused_reasons[policy]
    return f"{'one kernel each' if reason is None else f'kernels layer by layer ({reason})'}{steps}"


def _print_line(console: Console, line: str) -> None:
    console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
