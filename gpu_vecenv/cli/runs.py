"""What new and resumed runs of ``gpu-vecenv train`` share: training, the page of ``--watch``, the hints at the end."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_vecenv.cli.curriculum import stored_curriculum
from gpu_vecenv.cli.game_files import KEY as GAME_FILE_KEY
from gpu_vecenv.cli.game_files import game_file_settings
from gpu_vecenv.compile.toolchain import find_webassembly_compiler, pip
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.importing import absolute
from gpu_vecenv.envs.registry import game_argument
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.run import run, run_seeds
from gpu_vecenv.train.run_folder import RunConfig, seed_folder
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.web.training_server import TrainingServer

RUN_FORMAT = 2  # of the settings, checkpoints and metrics in a run folder


def settings_of_sources(game_name: str | None, game: Env, reward: str | None, schedules: str | None) -> dict[str, Any]:
    """What the settings of a run have of the files that were given, which later commands import again; None: none."""
    return {
        GAME_FILE_KEY: None if game_name is None else game_file_settings(game_name, game),
        "reward": None if reward is None else absolute(reward),
        "curriculum": stored_curriculum(schedules),
    }


def check_watch(watch: bool, world: World) -> None:
    """Raise ConfigError if the page of a run of several processes is wanted."""
    if watch and world.size > 1:
        raise ConfigError(
            "--watch shows a run of one process; leave out --watch, or start one process without torchrun"
        )


def train_runs(
    trainers: Sequence[Trainer],
    folder: Path,
    config: RunConfig,
    *,
    of_seeds: bool,
    watch: bool,
    **how: Any,
) -> int:
    """Train a run, or those of several seeds, with these arguments of ``run``; then print how to play the first one.

    Args:
        trainers: One, or those of the seeds.
        folder: Of the run, or of the folders of the seeds.
        config: Output options.
        of_seeds: Whether each trainer has a run folder of its own.
        watch: Serve the page of the first one's run, until Ctrl-C.
        **how: ``resume`` or ``settings``.

    Returns:
        The exit code.
    """
    first = seed_folder(folder, trainers[0].seed) if of_seeds else folder
    with _watched(watch, trainers[0], first) as server:
        how["after_row"] = None if server is None else server.update
        code = run_seeds(trainers, folder, config, **how) if of_seeds else run(trainers[0], folder, config, **how)
        if code == 0:
            _print_how_to_play(trainers[0], first)
            _serve_on(server)
    return code


@contextlib.contextmanager
def _watched(watch: bool, trainer: Trainer, folder: Path) -> Iterator[TrainingServer | None]:
    """Serve the page of a run, if that is wanted."""
    if not watch:
        yield None
        return
    with TrainingServer(trainer, folder) as server:
        print(f"watch it in a browser of this computer: {server.url}", flush=True)
        yield server


def _print_how_to_play(trainer: Trainer, folder: Path) -> None:
    """The command that makes a page of the run, for games that have a picture and run in a browser."""
    kind = type(trainer.env.game)
    if trainer.world.rank == 0 and kind.draw is not Env.draw and kind.host:
        source = f"{folder}{':0' if trainer.populations else ''}"
        game = game_argument(kind) or kind.name()
        command = f"gpu-vecenv web {shlex.quote(game)} --run {shlex.quote(source)} --out page"
        print(f"{'to play it':15} {printable(command)}", flush=True)
        if find_webassembly_compiler() is None:
            print(f"{'':15} which needs ziglang: {pip('ziglang')}", flush=True)


def _serve_on(server: TrainingServer | None) -> None:
    """After training, until Ctrl-C."""
    if server is None:
        return
    with contextlib.suppress(KeyboardInterrupt):
        server.finish()
        print(f"the final policies play at {server.url}; Ctrl-C ends the server", flush=True)
        while True:  # a signal that another thread receives does not end a longer wait
            time.sleep(1)
