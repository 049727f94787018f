"""The command line, a shell around the Python interface: ``gpu-vecenv list | show | train | bench | doctor``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from gymnasium.error import Error as GymnasiumError
from rich.console import Console
from rich.table import Table

from gpu_vecenv import bench, doctor
from gpu_vecenv._version import __version__
from gpu_vecenv.device import resolve_device
from gpu_vecenv.env import Env, check_fields, param
from gpu_vecenv.errors import (
    CompilerError,
    ConfigError,
    DeviceUnavailableError,
    KernelCompileError,
    NonFiniteError,
    nearest,
)
from gpu_vecenv.ppo import PPOConfig, Trainer, fitting_num_envs
from gpu_vecenv.prologue import prologue
from gpu_vecenv.registry import GAMES, find_game
from gpu_vecenv.run import run
from gpu_vecenv.vec_env import VecEnv

PROGRAM = "gpu-vecenv"
# What wrong arguments or an incomplete machine raise: one line and exit code 2, no traceback.
EXPECTED = (
    ValueError,
    TypeError,
    GymnasiumError,
    DeviceUnavailableError,
    CompilerError,
    KernelCompileError,
    OSError,
    NonFiniteError,
)
RULE = re.compile(r"[\s╭╮╰╯─+-]*")  # a line of a box that has no words
AUTO_NUM_ENVS = {"cuda": 2000, "cpu": 512}  # what "auto" asks for; it takes fewer where memory is short
HELP = f"""\
gpu_vecenv {__version__}: multi-agent environments and PPO on the GPU, or on the CPU from the same kernels.

usage: {PROGRAM} COMMAND [options]

  list                    the games, with one line each
  show GAME [options]     the device text generated from a game's declaration
  train GAME [options]    train a policy; leaves curve, checkpoint and evaluation in a run folder
  bench [options]         measure steps per second against the memory bandwidth
  doctor                  what this machine has: torch, GPU, compilers, drivers; and what to do

Every option of a game is its configuration: {PROGRAM} train tag_gridworld --help
For example:

  {PROGRAM} train tag_gridworld --total-steps 2000000 --num-taggers 6
  {PROGRAM} train tag_continuous --num-envs 2000 --device cuda --num-neighbors all
"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how to run."""

    num_envs: int | Literal["auto"] = "auto"  # replicas; "auto" takes what suits the device and fits its memory
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works
    seed: int = 0  # of the environment, the weights and the minibatches
    out: Path | None = None  # run folder; by default runs/<game>-<date>-<time>
    episodes: int = param(1000, low=1)  # of each evaluation

    def __post_init__(self) -> None:
        check_fields(self)


def list_games(arguments: Sequence[str]) -> None:
    """Print the games."""
    _no_more("list", arguments)
    table = Table("game", "roles", "what it is")
    for name, game in sorted(GAMES.items()):
        roles = ", ".join(f"{count} {role}{'s' * (count != 1)}" for role, count in game().roles.items())
        table.add_row(name, roles, (game.__doc__ or "").strip().splitlines()[0])
    Console().print(table)


def show(arguments: Sequence[str]) -> None:
    """Print a game's generated prologue."""
    game, rest = _game("show", arguments)
    print(prologue(_parse(game, f"{PROGRAM} show {game.name()}", rest)), end="")


def train(arguments: Sequence[str]) -> None:
    """Train a game."""
    game, rest = _game("train", arguments)
    parts: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default_factory=kind))
        for name, kind in (("run", RunConfig), ("ppo", PPOConfig), ("game", game))
    ]
    parsed = _parse(dataclasses.make_dataclass("Train", parts), f"{PROGRAM} train {game.name()}", rest)
    settings: RunConfig = parsed.run
    device = resolve_device(settings.device)

    def make(num_envs: int) -> VecEnv:
        return VecEnv(parsed.game, num_envs, device, autoreset_mode="next_step", driver=settings.driver)

    num_envs = settings.num_envs
    if num_envs == "auto":
        num_envs = fitting_num_envs(make, parsed.ppo.num_steps, AUTO_NUM_ENVS[device.type])
    folder = settings.out or Path("runs", f"{game.name()}-{time.strftime('%Y%m%d-%H%M%S')}")
    trainer = Trainer(make(num_envs), parsed.ppo, seed=settings.seed)
    run(trainer, folder, episodes=settings.episodes)


def run_doctor(arguments: Sequence[str]) -> None:
    """Print what was found."""
    _no_more("doctor", arguments)
    sys.exit(doctor.main([]))


def run_bench(arguments: Sequence[str]) -> None:
    """Measure."""
    bench.run(_parse(bench.BenchConfig, f"{PROGRAM} bench", arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_games,
    "show": show,
    "train": train,
    "bench": run_bench,
    "doctor": run_doctor,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 2 for wrong arguments or a machine that lacks something."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command in ("train", "show") and rest in (["-h"], ["--help"]):
        print(f"usage: {PROGRAM} {command} GAME [options]\n\ngames: {', '.join(sorted(GAMES))}")
        print(f"{PROGRAM} {command} GAME --help tells all options, the game's own configuration among them")
        return 0
    try:
        if command not in COMMANDS:
            raise ConfigError(f"unknown command {command!r}; {nearest(command, COMMANDS)}; see {PROGRAM} --help")
        COMMANDS[command](rest)
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPECTED as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _no_more(command: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise ConfigError(f"{command} takes no arguments; got {' '.join(arguments)}")


def _game(command: str, arguments: Sequence[str]) -> tuple[type[Env], Sequence[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"{command} needs a game's name first: {', '.join(sorted(GAMES))}; see {PROGRAM} {command} GAME --help"
        )
    return find_game(arguments[0]), arguments[1:]


def _parse(kind: Any, program: str, arguments: Sequence[str]) -> Any:
    """The dataclass from its options. tyro explains an error in a box; here it becomes one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, args=list(arguments), prog=program, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip().strip("│|").strip() for line in box.getvalue().splitlines()[1:]]  # the first is a title
        blocks = [list(block) for rule, block in itertools.groupby(lines, RULE.fullmatch) if not rule]
        message = " ".join(blocks[0])
        near = [line.split()[0] for line in lines if line.startswith("--") and not RULE.fullmatch(line)]
        hint = f"; nearest: {', '.join(near[:3])}" if message.startswith("Unrecognized") and near else ""
        raise ConfigError(f"{message}{hint}; see {program} --help") from None


if __name__ == "__main__":
    sys.exit(main())
