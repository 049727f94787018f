"""The commands of replays: replay record, play, html, show."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gpu_vecenv.cli.options import PROGRAM, load_run_policy, merge_dataclasses, parse, parse_game
from gpu_vecenv.compile.codegen import printable
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAME_FILE, GAMES
from gpu_vecenv.errors import ConfigError, ReplayMismatchError, UnknownGameError, nearest
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.watch.player import page
from gpu_vecenv.watch.replay import Replay, film, format_return, is_stale, record, verify

SUFFIX = ".replay"
HELP = f"""\
usage: {PROGRAM} replay record GAME|RUN [options]
       {PROGRAM} replay play FILE... [options]
       {PROGRAM} replay html FILE... [options]
       {PROGRAM} replay show FILE...

  record  keep episodes of a run's policies, or of random actions in a game, as small files
  play    play them again and compare every bit, on this machine's GPU or CPU; 1 if one differs
  html    write a page that shows them in a browser, side by side
  show    print what a file says of itself

FILE may be a folder: all *{SUFFIX} in it. {PROGRAM} replay record tag_gridworld --help tells the options, and so on.
"""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """How many episodes to keep, and where."""

    episodes: int = param(1, low=1)  # each in a replica of its own, 0, 1, ...
    seed: int = param(0, low=0)  # of the random streams
    out: Path = Path("replays")  # folder of the files, <game>-<seed>-<replica>.replay
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RecordRunConfig(RecordConfig):
    """How many episodes of a run's policies to keep, and where."""

    greedy: bool = False  # the likeliest action instead of a draw
    best: bool = False  # the best checkpoint instead of the newest
    game: str | None = None  # the file that declares it, if it is no bundled game


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """Where to play replays."""

    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works
    game: str | None = None  # the file that declares it, if it is no bundled game

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class HtmlConfig(PlayConfig):
    """Where to play replays, and the page."""

    out: Path = Path("replays.html")  # the page, one file that loads nothing
    title: str | None = None  # of the page; by default the games' names


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """What files say of themselves needs no options."""


def replay(arguments: Sequence[str]) -> int | None:
    """Record, play, show replays."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise ConfigError(f"unknown command {f'replay {verb}'!r}; {nearest(verb, VERBS)}; see {PROGRAM} replay --help")
    return VERBS[verb](rest)


def _record(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in ("-h", "--help"):
        parse(RecordRunConfig, f"{PROGRAM} replay record RUN", arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"replay record needs a game or a run first: {PROGRAM} replay record runs/my_run")
    source, program = arguments[0], f"{PROGRAM} replay record {arguments[0]}"
    config: RecordConfig
    if GAME_FILE.fullmatch(source) or source in GAMES or not Path(source).exists():
        try:
            kind, rest = parse_game("replay record", arguments)
        except UnknownGameError as error:
            raise ConfigError(f"{error}. Nor is there a run at {source}") from error
        parsed = parse(merge_dataclasses("Record", record=RecordConfig, game=kind), program, rest)
        game: Env = parsed.game
        config, greedy, device = parsed.record, False, resolve_device(parsed.record.device)
        role_policies: dict[str, RolePolicy] = dict.fromkeys(game.layout.roles)
    else:
        given: RecordRunConfig = parse(RecordRunConfig, program, arguments[1:])
        loaded = load_run_policy("replay", source, game=given.game, best=given.best, device=given.device)
        config, greedy, device = given, given.greedy, loaded.device
        game, role_policies = loaded.game, dict(loaded.policies)
    env = VecEnv(game, 1, device, driver=config.driver)
    made = record(env, role_policies, episodes=config.episodes, seed=config.seed, greedy=greedy)
    files = {config.out / f"{own.game}-{own.seed}-{own.env_index}{SUFFIX}": own for own in made}
    contents = {path: own.to_bytes() for path, own in files.items()}
    if others := [path for path, content in contents.items() if path.exists() and path.read_bytes() != content]:
        raise ConfigError(
            f"{others[0]} is there already and is another one; choose another --out, --seed, or remove it"
        )
    for path, own in files.items():
        replace_file(path, contents[path])
        print(f"wrote {path}: {own.num_steps} steps, {_returns(own)}, {len(contents[path]):,} bytes")
    print(f"to watch: {PROGRAM} replay html {shlex.quote(str(config.out))}")


def _play(arguments: Sequence[str]) -> int:
    config: PlayConfig
    files, config = _files("play", PlayConfig, arguments)
    _known(config.game)
    table = Table(*(Column(name, overflow="fold") for name in ("file", "game", "steps", "return of all agents")))
    table.add_column("digest", no_wrap=True)
    table.add_column("bits")
    differing = []
    for path, own in files.items():
        bits = "same"
        try:
            verify(own, config.device, driver=config.driver)
            if is_stale(own):
                bits = "same, though the rules' text has changed"
        except ReplayMismatchError as error:
            differing.append(f"{printable(str(path))}: {error}")
            bits = "OTHERS"
        cells = [path, own.game, own.num_steps, _returns(own), own.digest, bits]
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    Console().print(table)
    for line in differing:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return int(bool(differing))


def _html(arguments: Sequence[str]) -> None:
    config: HtmlConfig
    files, config = _files("html", HtmlConfig, arguments)
    _known(config.game)
    titles = ["/".join(path.with_suffix("").parts[-2:]) for path in files]  # the folder tells trained from untrained
    films = [
        film(own, config.device, driver=config.driver, title=printable(t))
        for t, own in zip(titles, files.values(), strict=True)
    ]
    games = ", ".join(dict.fromkeys(own.game for own in files.values()))
    content = page(films, config.title or f"Replays of {games}").encode()
    replace_file(config.out, content)
    print(f"wrote {config.out}: {len(films)} episodes, {len(content):,} bytes; open it in a browser")


def _show(arguments: Sequence[str]) -> None:
    files, _ = _files("show", ShowConfig, arguments)
    for path, own in files.items():
        print(f"{printable(str(path))}: {path.stat().st_size:,} bytes")
        for name, value in own.header().items():
            lines = value.items() if name in ("config", "returns", "shared", "actions") else ()
            print(f"  {name}" + ("" if lines else f" = {value}"))
            for key, entry in lines:
                print(f"    {key} = {entry}")


def _files(verb: str, kind: type, arguments: Sequence[str]) -> tuple[dict[Path, Replay], Any]:
    """The replays that come first, by file, and the options after them."""
    options = [place for place, argument in enumerate(arguments) if argument.startswith("-")]
    end = options[0] if options else len(arguments)
    config = parse(kind, f"{PROGRAM} replay {verb} FILE...", arguments[end:])
    if end == 0:
        raise ConfigError(f"replay {verb} needs files first: {PROGRAM} replay {verb} replays/tag_gridworld-0-0{SUFFIX}")
    paths: list[Path] = []
    for name in map(Path, arguments[:end]):
        found = sorted(name.glob(f"*{SUFFIX}")) if name.is_dir() else [name]
        if not found:
            raise FileNotFoundError(f"no *{SUFFIX} in the folder {name}")
        paths += found
    return {path: Replay.load(path) for path in paths}, config


def _known(file: str | None) -> None:
    """Register what a game's file declares."""
    if file is not None:
        parse_game("replay", [file])


def _returns(own: Replay) -> str:
    return ", ".join(f"{role} {format_return(value)}" for role, value in own.returns.items())


VERBS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "record": _record,
    "play": _play,
    "html": _html,
    "show": _show,
}
