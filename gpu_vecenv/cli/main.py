"""The command line ``gpu-vecenv``: parses the arguments with tyro and runs the command."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Sequence
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
    UnknownGameError,
    nearest,
    similar,
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
    "doctor": Doctor,
    "list": List,
    "train": Train,
    "evaluate": Evaluate,
    "plot": Plot,
    "replay": Replay,
    "web": Web,
    "new": New,
    "check": Check,
    "show": Show,
    "exploit": Exploit,
    "crossplay": Crossplay,
    "export": Export,
    "tune": Tune,
    "bench": Bench,
}
# Lines of tyro's boxes, whose borders are spaces where the terminal has no others: rules, and commands that help.
RULE = re.compile("│? +[─-]+ *│?")
FOOTER = re.compile(rf". *(For full helptext, (run|see)\b.*|(in )?{PROGRAM} .*--help) +.")
UNKNOWN, SIMILAR = "Unrecognized options", re.compile("similar to|Perhaps you meant")  # in tyro's messages
EMPTY_DEFAULT = re.compile(r"\(default:([\s│]*)\)")  # of a list without items
OF_PYTHON = {  # what tyro's messages have of Python -> the same in plain words
    r"typing\.Literal\[(.*?)\]:": r"\1:",
    r"<class '(\w+)'>": r"\1",
    r"invalid literal for int\(\) with base 10: ('[\d.]+[eE].*?')": r"expected an integer such as 10_000, not \1",
    r"invalid literal for int\(\) with base 10: ('.*?')": r"expected an integer, not \1",
    r"could not convert string to float: ('.*?')": r"expected a number, not \1",
}
ABOUT = "Environments of many agents, and PPO for them, on the GPU or the CPU."
HELP = f"""\
usage: {PROGRAM} COMMAND …

{ABOUT}

{{commands}}

GAME is a name or a Python file: {PROGRAM} train my_game.py
{PROGRAM} COMMAND [GAME] --help prints the options, with those of the game."""


def all_commands() -> Any:
    """The union of all commands for tyro, which prints completions of it."""
    options = []
    for name, command in COMMANDS.items():
        configured, default = command, tyro.MISSING_NONPROP
        if issubclass(command, Command):
            configured, default = command.for_arguments(())
        options.append(
            Annotated[configured, tyro.conf.subcommand(name, default=default, description=summary_of(command))]
        )
    return Union[tuple(options)]  # noqa: UP007  # built at run time


def summary_of(command: Any) -> str:
    """What a command is for: the first line of its help."""
    return str(command.__doc__).partition("\n")[0]


def parse(arguments: Sequence[str]) -> Any:
    """The command, with its options as fields.

    Raises:
        ConfigError: The command or game is unknown, or a value is out of range.
        SystemExit: Help has been printed, or tyro's own message about an option that is unknown or cannot be parsed.
    """
    if (name := arguments[0]).startswith("--tyro-"):
        return tyro.cli(
            all_commands(), args=arguments, prog=PROGRAM, description=ABOUT, config=(tyro.conf.OmitArgPrefixes,)
        )
    if name.startswith("-"):
        raise ConfigError(f"{name!r} is before any command; expected a command first; see {PROGRAM} --help")
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; {nearest(name, COMMANDS)}; see {PROGRAM} --help")
    command, default = COMMANDS[name], tyro.MISSING_NONPROP
    if issubclass(command, Command):
        command, default = command.for_arguments(arguments[1:])
    message, shown = io.StringIO(), _Output()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(shown):
            return tyro.cli(
                command,
                args=arguments[1:],
                default=default,
                prog=f"{PROGRAM} {name}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as stop:
        cause = stop.__context__  # of a ValueError in __post_init__ tyro makes an exit
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        sys.stdout.write(EMPTY_DEFAULT.sub(lambda found: f"{' ' * 9}{found[1]} ", shown.getvalue()))
        if message.getvalue():
            names = option_names(command if default is tyro.MISSING_NONPROP else default)
            sys.stderr.write(printable_lines(plain_error(message.getvalue(), arguments, names)))
        raise


class _Output(io.StringIO):
    """Text in place of the standard output, which tyro formats as for that."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the standard output."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether the standard output is a terminal."""
        return self._stream.isatty()


def option_names(command: Any) -> set[str]:
    """Names of the fields of a command, its class or an instance, and of the dataclasses among its values."""
    names: set[str] = set()
    for name in getattr(command, "__dataclass_fields__", ()):
        value = getattr(command, name, None)
        names |= option_names(value) if dataclasses.is_dataclass(value) else {name}
    return names


def plain_error(box: str, arguments: Sequence[str], names: Collection[str]) -> str:
    """Tyro's message, a box, without names of Python's types, and with the command that prints the game's options.

    After it stand those of the options' ``names`` that are similar to unknown ones, where the box has none.
    """
    lines, hints = [], []
    if UNKNOWN in box and not SIMILAR.search(box):
        for word in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            name = word[2:].replace("-", "_")
            if name.removeprefix("no_") not in names and (near := similar(name, names, cutoff=0.6)):
                hints.append(f"{word}: nearest: {', '.join('--' + option.replace('_', '-') for option in near)}")
    for line in box.splitlines():
        if "<class 'NoneType'>" in line:
            continue
        shown = line
        for pattern, replacement in OF_PYTHON.items():
            shown = re.sub(pattern, replacement, shown)
        if FOOTER.fullmatch(shown):
            continue
        if shown != line:
            shown = f"{shown[:-1]}{' ' * (len(line) - len(shown))}{shown[-1]}"
        lines.append(shown)
    if len(lines) > 2 and RULE.fullmatch(lines[-2]):  # above the footer
        del lines[-2]
    return "\n".join([*lines, *hints, f"Help: {_help_command(arguments)}\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 1 if a check fails, 2 for wrong arguments or missing requirements."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words == ["--version"]:
        print(__version__)
        return 0
    if words[0] in ("--help", "-h"):
        print(HELP.format(commands="\n".join(f"  {name:10} {summary_of(kind)}" for name, kind in COMMANDS.items())))
        return 0
    _take_interrupts()
    try:
        return parse(words)() or 0
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPECTED as error:
        print(printable_lines(f"{PROGRAM}: error: {error}{remedy(error, words)}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _take_interrupts() -> None:
    """SIGINT ends commands where it is ignored too, as in the background of a shell's script."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def remedy(error: Exception, words: Sequence[str]) -> str:
    """The end of an error's message: the command that mends it or shows what is allowed, unless the message has one."""
    if isinstance(error, GameFileNeededError):  # that of train is its first argument
        given = [words[0], error.file, *words[1:]] if words[0] == "train" else [*words, "--game", error.file]
        return f": {shlex.join([PROGRAM, *given])}"
    if PROGRAM in str(error) or "pip install" in str(error):
        return ""
    if isinstance(error, UnknownGameError):
        if "--game " in str(error):
            return ""
        return f". To see the games: {PROGRAM} list"
    if isinstance(error, DeviceUnavailableError | CompilerError):
        return f". To see what is missing: {PROGRAM} doctor"
    if type(error) in (ConfigError, ValueError, TypeError):
        return f". Help: {_help_command(words)}"
    return ""


def _help_command(words: Sequence[str]) -> str:
    """The command that prints the options of the command, and those of its game or of a run that it resumes."""
    for option, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = option.partition("=")
        if words[0] == "train" and name == "--resume" and (run := value or following):
            return shlex.join([PROGRAM, "train", "--resume", run, "--help"])
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    return shlex.join([PROGRAM, *named[: 3 if words[0] == "replay" else 2], "--help"])
