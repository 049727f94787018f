"""``gpu-vecenv replay``: record episodes as files, verify them, show them in a browser, print their metadata."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, Union

import tyro
from rich.console import Console

from gpu_vecenv.cli.actors import players_of_run
from gpu_vecenv.cli.game_files import keep_game_file_of_replays, load_game_of_replay, report_unchecked
from gpu_vecenv.cli.options import (
    PROGRAM,
    Command,
    DeviceOptions,
    GameName,
    GameT,
    NoGame,
    Run,
    check_option_names,
    check_same_game,
    game_class,
    load_run_policy,
    names_run,
    with_parameter,
)
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import game_argument
from gpu_vecenv.errors import ConfigError, ReplayMismatchError, UnknownGameError, counted
from gpu_vecenv.escapes import printable, printable_lines
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.progress import ProgressDisplay
from gpu_vecenv.tables import FittedTable
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.watch.player import page
from gpu_vecenv.watch.replay import Replay as Recording
from gpu_vecenv.watch.replay import film, format_return, is_stale, record, verify

SUFFIX = ".replay"
Files = tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")]]
CommandT = TypeVar("CommandT")


@dataclass(frozen=True, kw_only=True)
class Replay(Command, Generic[CommandT]):
    """Record episodes in small files; verify and show them."""

    command: CommandT

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the subcommands of replay."""
        record_type: Any = Record[NoGame]
        if len(arguments) > 1 and arguments[0] == "record" and not arguments[1].startswith("-"):
            record_type = Record.of_source(arguments[1])
        commands = {"record": record_type, "play": Play, "html": Html, "show": Show}
        union: Any = Union[  # noqa: UP007  # built at run time
            tuple(Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items())
        ]
        return with_parameter(cls, union), tyro.MISSING_NONPROP

    def __call__(self) -> int | None:
        """Run the subcommand."""
        return self.command()  # type: ignore[operator, no-any-return]


@dataclass(frozen=True, kw_only=True)
class RecordOptions(DeviceOptions):
    """How many episodes to record, and where to."""

    episodes: int = param(1, low=1)  # number of episodes; episode i is that of environment i
    seed: int = param(0, low=0)  # seed of the random streams
    out: Path = Path("replays")  # folder of the files, <game>-<seed>-<environment>.replay

    def __post_init__(self) -> None:
        check_fields(self)

    def save(self, env: VecEnv, role_policies: dict[str, RolePolicy], greedy: bool) -> None:
        """Record the episodes and write one file for each."""
        check_output("out", self.out, folder=True)
        how: dict[str, Any] = {"episodes": self.episodes, "seed": self.seed, "greedy": greedy}
        with ProgressDisplay("record") as on_progress:
            recordings = record(env, role_policies, on_progress=on_progress, **how)
        files = {self.out / f"{r.game}-{r.seed}-{r.env_index}{SUFFIX}": r for r in recordings}
        contents = {path: recording.to_bytes() for path, recording in files.items()}
        if others := [path for path, content in contents.items() if path.exists() and path.read_bytes() != content]:
            raise ConfigError(f"{others[0]} exists with other contents; choose another --out or --seed, or remove it")
        for path, recording in files.items():
            replace_file(path, contents[path])
            size = len(contents[path])
            what = f"{counted(recording.num_steps, 'step')}, return {_returns(recording)}, {size:,} bytes"
            print(printable(f"wrote {path}: {what}"))
        only = set(self.out.glob(f"*{SUFFIX}")) == set(files)  # others may be of games that are not known here
        words = list(map(str, [self.out] if only else files))
        if argument := game_argument(type(env.game)):
            keep_game_file_of_replays(argument, env.game, recordings)
        for what, command in (("to watch, as a page", "html"), ("to compare a run with them", "play")):
            print(printable(f"{what}: {shlex.join([PROGRAM, 'replay', command, *words])}"))


@dataclass(frozen=True, kw_only=True)
class Record(RecordOptions, Generic[GameT]):
    """Record episodes of a run's policies, or of a random policy in a game, each in a small file.

    The source is the folder of a run or one of its checkpoints, or the name or file of a game.
    """

    source: GameName  # a game, or the folder of a run
    game: GameT

    @staticmethod
    def of_source(source: str) -> Any:
        """The command for a game, with its configuration, or for a run."""
        if names_run(source):
            return RecordRun
        try:
            game = game_class(source)
        except UnknownGameError as error:
            raise UnknownGameError(f"{error}. Nor is there a run at {source}") from error
        check_option_names(Record, game)
        return with_parameter(Record, game)

    def __call__(self) -> None:
        """Record."""
        game: Env = self.game  # type: ignore[assignment]
        report_unchecked(self.source, game)
        env = VecEnv(game, 1, resolve_device(self.device), driver=self.driver)
        self.save(env, dict.fromkeys(game.layout.roles), greedy=False)


@dataclass(frozen=True, kw_only=True)
class RecordRun(RecordOptions):
    """Record episodes of a run's policies, each in a small file."""

    run: Run  # folder of the run, or one of its checkpoints
    greedy: bool = False  # take the most likely action instead of a sample
    best: bool = False  # the best checkpoint instead of the newest
    # what plays roles or agents in place of the run's policies, as of evaluate: tagger=random, player_1=runs/other or
    # runner=file.py:function; none: its policies play all
    opponents: tuple[str, ...] = ()
    game: str | None = None  # file that declares the game; None: the run's, unless it has changed

    def __call__(self) -> None:
        """Record."""
        loaded = load_run_policy(self.run, game=self.game, best=self.best, device=self.device)
        role_policies = players_of_run(loaded, "opponents", self.opponents, best=self.best)
        env = VecEnv(loaded.game, 1, loaded.device, driver=self.driver, arrays=loaded.shared)
        self.save(env, role_policies, self.greedy)
        print(f"the policies are those of iteration {loaded.iteration}")


@dataclass(frozen=True, kw_only=True)
class PlayOptions(DeviceOptions):
    """Which replays to play, and where."""

    files: Files  # replays, or folders of replays, at least one
    game: str | None = None  # file that declares the game; None: that of the recording, unless it has changed

    def load(self) -> dict[Path, Recording]:
        """The replays by file, after their game is registered.

        Raises:
            ConfigError: A game is given, of which none of them is.
        """
        recordings = load_replays(self.files)
        if self.game is not None:
            given, games = game_class(self.game), {one.game: path for path, one in recordings.items()}
            if given.name() not in games:
                name, path = next(iter(games.items()))
                check_same_game(given, f"--game {self.game}", name, str(path))
        for recording in recordings.values():
            load_game_of_replay(recording)
        return recordings


@dataclass(frozen=True, kw_only=True)
class Play(PlayOptions):
    """Play replays again and compare them bitwise with the recording; exit code 1 if one differs."""

    def __call__(self) -> int:
        """Print the comparison."""
        table = FittedTable("file", *("game", "steps", "digest", "result", "return"), left=["game", "return", "result"])
        mismatches = []
        for path, recording in shown("play", self.load()):
            result = "identical"
            try:
                verify(recording, self.device, driver=self.driver)
                if is_stale(recording):
                    result = "identical, although the game's source has changed"
            except ReplayMismatchError as error:
                mismatches.append(printable_lines(f"{path}: {error}"))
                result = "DIFFERENT"
            cells = (recording.game, recording.num_steps, recording.digest, result, _returns(recording))
            table.add_row(str(path), *map(str, cells))
        Console().print(table)
        for line in mismatches:
            print(f"{PROGRAM}: {line}", file=sys.stderr)
        return int(bool(mismatches))


@dataclass(frozen=True, kw_only=True)
class Html(PlayOptions):
    """Write a page that shows replays in a browser, side by side."""

    out: Path = Path("replays.html")  # the page, one file without external resources
    title: str | None = None  # title of the page; None: the names of the games

    def __call__(self) -> None:
        """Write the page."""
        check_output("out", self.out)
        recordings = self.load()
        films = []
        for path, recording in shown("html", recordings):
            title = printable("/".join(path.with_suffix("").parts[-2:]))  # with the folder: trained/..., untrained/...
            films.append(film(recording, self.device, driver=self.driver, title=title))
        games = ", ".join(dict.fromkeys(recording.game for recording in recordings.values()))
        content = page(films, self.title or f"Replays of {games}").encode()
        replace_file(self.out, content)
        what = f"{counted(len(films), 'episode')}, {len(content):,} bytes; open it in a browser"
        print(printable(f"wrote {self.out}: {what}"))


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Print the metadata of replays."""

    files: Files  # replays, or folders of replays, at least one

    def __call__(self) -> None:
        """Print it."""
        for path, recording in load_replays(self.files).items():
            print(printable(f"{path}: {path.stat().st_size:,} bytes"))
            for name, value in recording.header().items():
                entries = value.items() if name in ("config", "returns", "shared", "actions") else ()
                print(printable(f"  {name}" + ("" if entries else f" = {value}")))
                for key, entry in entries:
                    print(printable(f"    {key} = {entry}"))


def load_replays(files: Sequence[Path]) -> dict[Path, Recording]:
    """The replays in these files and folders."""
    if not files:
        raise ConfigError(
            f"replay needs at least one file, like replays/tag_gridworld-0-0{SUFFIX}, or folder. To record one: "
            f"{PROGRAM} replay record tag_gridworld"
        )
    paths: list[Path] = []
    for name in files:
        found = sorted(name.glob(f"*{SUFFIX}")) if name.is_dir() else [name]
        if not found:
            raise FileNotFoundError(f"no *{SUFFIX} in the folder {name}")
        paths += found
    return {path: Recording.load(path) for path in paths}


def shown(label: str, recordings: Mapping[Path, Recording]) -> Iterator[tuple[Path, Recording]]:
    """Each replay with its file, while the progress through them is shown."""
    with ProgressDisplay(label) as on_progress:
        for index, (path, recording) in enumerate(recordings.items()):
            on_progress(index / len(recordings), str(path))
            yield path, recording
        on_progress(1.0, f"{len(recordings):,} replays")


def _returns(recording: Recording) -> str:
    return ", ".join(f"{role} {format_return(value)}" for role, value in recording.returns.items())
