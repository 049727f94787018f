"""What the commands share: the game named on the command line, device and driver, policies of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro
from tyro.conf import Positional

from gpu_vecenv.cli.game_files import load_game_of_run, load_own_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAME_FILE, GAMES, find_game
from gpu_vecenv.errors import ConfigError, UnknownGameError
from gpu_vecenv.train.game_policy import GamePolicy, load_policy, read_run, run_and_member
from gpu_vecenv.train.run_folder import SETTINGS, resume_command, run_folders

PROGRAM = "gpu-vecenv"
GameName = Positional[Annotated[str, tyro.conf.arg(metavar="GAME")]]
OptionalGameName = Positional[Annotated[str | None, tyro.conf.arg(metavar="GAME")]]
Run = Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
OptionsT = TypeVar("OptionsT")
GameT = TypeVar("GameT")  # the class of a game, whose fields become options; NoGame before one is named


class Command:
    """A command: a dataclass whose fields are its options; calling an instance runs it and returns the exit code."""

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """The type that tyro parses the arguments into, and its default instance, or tyro.MISSING_NONPROP."""
        return cls, tyro.MISSING_NONPROP

    def __call__(self) -> int | None:
        """Run the command; None means exit code 0."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Command):
    """Where environments run."""

    device: str | None = None  # cpu, cuda or cuda:1; None: cuda if usable, else cpu
    # pycuda or cuda_core, which launch CUDA kernels with equal results: choose one where the other fails;
    # None: the first that works
    driver: str | None = None


@dataclass(frozen=True)
class NoGame:
    """Stands for the game's configuration in the help of a command without a game."""

    message: ClassVar[str] = (
        "no game is given; expected it before all options, as in: gpu-vecenv train tag_gridworld --seed 3"
    )

    def __post_init__(self) -> None:
        raise ConfigError(self.message)


def with_parameter(generic: Any, *parameters: type) -> Any:
    """``generic[parameters]``, for types that are chosen at run time."""
    return generic[parameters]


def named_game(arguments: Sequence[str]) -> type[Env] | None:
    """The game that the first argument names, a registered one or a file's; None if there is no such argument."""
    if not arguments or arguments[0].startswith("-"):
        return None
    return game_class(arguments[0])


def game_class(name: str) -> type[Env]:
    """The registered game of that name, or the one declared in a file, which is imported and registered."""
    if GAME_FILE.fullmatch(name):
        return load_own_game(name)
    if name not in GAMES and any((run / SETTINGS).is_file() for run in run_folders(Path(name))):
        raise ConfigError(
            f"{name} is a run; expected a game, by its name or file. To continue the run: {resume_command(Path(name))}"
        )
    return find_game(name, "Your own games are files: my_game.py")


def names_run(source: str) -> bool:
    """Whether an argument that may be a game or a run is the path of a run."""
    return not GAME_FILE.fullmatch(source) and source not in GAMES and run_and_member(source)[0].exists()


def parsed_options(kind: type[OptionsT], arguments: Sequence[str]) -> tuple[OptionsT, list[str]] | None:
    """Those of the arguments that are options of a class, and the others; None if one of its options is wrong."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(kind, args=arguments, add_help=False, return_unknown_args=True)
    return None


def check_option_names(command: type, *parts: type) -> None:
    """Raise ConfigError if two of these dataclasses, whose options stand side by side, share a field name."""
    owners: dict[str, str] = {}
    for part in (command, *parts):
        for field in dataclasses.fields(part):
            if owner := owners.get(field.name):
                raise ConfigError(f"{part.__name__}.{field.name} has the name of an option of {owner}; rename it")
            owners[field.name] = part.__name__


class GameCommand(Command):
    """A command whose first argument is a game: generic in the class of the game, whose fields are options too."""

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the options of the game that is named first."""
        kind = named_game(arguments)
        if kind is not None:
            check_option_names(cls, kind)
        return with_parameter(cls, kind or NoGame), tyro.MISSING_NONPROP


def check_same_game(given: type[Env], argument: str, name: str, what: str) -> None:
    """Refuse a game beside a run, or replays, of another one.

    Args:
        given: The game.
        argument: What named it on the command line.
        name: The name of the other game.
        what: The run or the replays.

    Raises:
        ConfigError: The games differ.
    """
    if given.name() != name:
        raise ConfigError(
            f"{what} is of {name}, and {argument} is {given.name()}; expected the file that declares {name}; leave it "
            f"out if {name} is a bundled game or its file has not moved"
        )


def load_run_policy(run: Path, *, game: str | None, best: bool, device: str | None) -> GamePolicy:
    """The policies of a run; ``game`` is the file that declares its game, by default that of the run's settings.

    Raises:
        ConfigError: ``game`` is another game than the run's; and as of ``load_policy``.
    """
    given = None if game is None else game_class(game)
    if given is None:
        load_game_of_run(run)
    what = f"--game {game}"
    try:
        policy = load_policy(run, best=best, device=resolve_device(device))
    except UnknownGameError as error:
        if given is not None:
            check_same_game(given, what, read_run(run_and_member(run)[0], best)[2]["game"], str(run))
        raise ConfigError(f"{str(error).split('. ')[0]}. Give the file that declares it: --game my_game.py") from error
    if given is not None:
        check_same_game(given, what, policy.game.name(), str(run))
    return policy
