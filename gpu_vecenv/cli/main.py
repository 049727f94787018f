"""The command line ``gpu-vecenv``: parses the arguments with tyro and runs the command."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro
from gymnasium.error import Error as GymnasiumError

from gpu_vecenv._version import __version__
from gpu_vecenv.cli.bench import Bench
from gpu_vecenv.cli.check import Check
from gpu_vecenv.cli.crossplay import Crossplay
from gpu_vecenv.cli.doctor import Doctor
from gpu_vecenv.cli.evaluate import Evaluate
from gpu_vecenv.cli.exploit import Exploit
from gpu_vecenv.cli.export import Export
from gpu_vecenv.cli.game_files import GameFileNeededError
from gpu_vecenv.cli.list import List
from gpu_vecenv.cli.new import New
from gpu_vecenv.cli.options import PROGRAM, Command
from gpu_vecenv.cli.plot import Plot
from gpu_vecenv.cli.replay import Replay
from gpu_vecenv.cli.show import Show
from gpu_vecenv.cli.train import Train
from gpu_vecenv.cli.tune import Tune
from gpu_vecenv.cli.web import Web
from gpu_vecenv.errors import (
    CompilerError,
    ConfigError,
    DeviceUnavailableError,
    ExportError,
    KernelCompileError,
    NonFiniteError,
    RankLostError,
    nearest,
)
from gpu_vecenv.escapes import printable_lines

# Wrong arguments, missing software or hardware: one line and exit code 2 instead of a traceback.
EXPECTED = (
    ValueError,
    TypeError,
    GymnasiumError,
    DeviceUnavailableError,
    CompilerError,
    KernelCompileError,
    OSError,
    NonFiniteError,
    RankLostError,
    ExportError,
)
COMMANDS: dict[str, Any] = {
    "list": List,
    "show": Show,
    "new": New,
    "check": Check,
    "train": Train,
    "evaluate": Evaluate,
    "exploit": Exploit,
    "crossplay": Crossplay,
    "plot": Plot,
    "export": Export,
    "replay": Replay,
    "web": Web,
    "bench": Bench,
    "tune": Tune,
    "doctor": Doctor,
}
DESCRIPTION = f"""\
gpu_vecenv {__version__}: multi-agent environments and PPO on the GPU, or on the CPU from the same kernels.

GAME is the name of a game, or a Python file that declares one: my_game.py, or my_game.py:MyGame if it declares several.
The file is imported. The game's configuration becomes options: {PROGRAM} train tag_gridworld --help"""


def subcommands(arguments: Sequence[str]) -> Any:
    """The union of all commands for tyro; the command of ``arguments`` has the options of the game they name."""
    chosen, rest = arguments[0], arguments[1:]
    options = []
    for name, command in COMMANDS.items():
        configured, default = command, tyro.MISSING_NONPROP
        if issubclass(command, Command):
            configured, default = command.for_arguments(rest if name == chosen else ())
        summary = None if name == chosen else command.__doc__.partition("\n")[0]
        options.append(Annotated[configured, tyro.conf.subcommand(name, default=default, description=summary)])
    return Union[tuple(options)]  # noqa: UP007  # built at run time


def parse(arguments: Sequence[str]) -> Any:
    """The command, with its options as fields.

    Raises:
        ConfigError: The command or game is unknown, or a value is out of range.
        SystemExit: Help has been printed, or tyro's own message about an option that is unknown or cannot be parsed.
    """
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise ConfigError(f"unknown command {arguments[0]!r}; {nearest(arguments[0], COMMANDS)}; see {PROGRAM} --help")
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                subcommands(arguments),
                args=arguments,
                prog=PROGRAM,
                description=DESCRIPTION,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        cause = stop.__context__  # of a ValueError in __post_init__ tyro makes an exit
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        sys.stderr.write(printable_lines(message.getvalue()))
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 1 if a check fails, 2 for wrong arguments or missing requirements."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words == ["--version"]:
        print(__version__)
        return 0
    try:
        return parse(words)() or 0
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPECTED as error:
        remedy = f": {_with_game(words, error.file)}" if isinstance(error, GameFileNeededError) else ""
        print(printable_lines(f"{PROGRAM}: error: {error}{remedy}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _with_game(words: Sequence[str], file: str) -> str:
    """The command line with the file of the game: that of train is its first argument."""
    command = [words[0], file, *words[1:]] if words[0] == "train" else [*words, "--game", file]
    return shlex.join([PROGRAM, *command])
