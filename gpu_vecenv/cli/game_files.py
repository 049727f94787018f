"""The files of a game of one's own, of a run or of replays, and whether a command may run them unasked.

Settings of runs are data: what they name is run only if the same user began a run with these very files on this
machine, which a mark in the cache folder shows. Replays name no files; where the same user recorded such ones on this
machine, a file in the cache folder does. Else the command is refused until the file is given.

Another mark shows that ``check`` found no index out of bounds in such files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.codegen import own_files
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAME_FILE, GAMES, load_game
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.game_policy import run_and_member
from gpu_vecenv.train.run_folder import SETTINGS
from gpu_vecenv.watch.replay_file import Replay

KEY = "game_file"  # of the settings
_beside: dict[ModuleType, list[Path]] = {}  # module of a game -> the files that were imported beside it by then


class GameFileNeededError(ConfigError):
    """A command needs the file of a run's game; ``file`` is the one to give it."""

    def __init__(self, message: str, file: str):
        super().__init__(message)
        self.file = file


def load_own_game(file: str) -> type[Env]:
    """As ``load_game``; modules that are imported later, as of rewards and schedules, are none of the game's files."""
    game = load_game(file)
    module = sys.modules[game.__module__]
    if module not in _beside and module.__file__ is not None:
        _beside[module] = _modules_in(Path(module.__file__).resolve().parent)
    return game


def game_file_settings(argument: str, game: Env) -> dict[str, Any] | None:
    """What the settings of a run have of the game's file, which is marked as run by this user; None of a name.

    Args:
        argument: The game as the command line names it.
        game: The game, configured.

    Returns:
        "argument": the same with the file's whole path; "files": path -> SHA-256 of the file, of the modules beside it
        that it imports, and of the device code.
    """
    match = GAME_FILE.fullmatch(argument)
    if match is None:
        return None
    path = Path(match[1]).resolve()
    entry = {
        "argument": str(path) if match[2] is None else f"{path}:{match[2]}",
        "files": {str(file): _sha256(file) for file in _files(path, game)},
    }
    with contextlib.suppress(OSError):  # without a mark, commands need the file again
        replace_file(_mark(entry), b"")
    return entry


def mark_as_checked(argument: str, game: Env) -> None:
    """Mark the files of a game in which ``check`` found no index out of bounds; a game without a file needs no mark."""
    if (mark := _mark_of_check(argument, game)) is not None:
        with contextlib.suppress(OSError):  # without a mark, commands say that the files are not checked
            replace_file(mark, b"")


def report_unchecked(argument: str, game: Env) -> None:
    """Print to the standard error that the game's file has not been checked as it is now, unless it has."""
    mark = _mark_of_check(argument, game)
    if mark is not None and not mark.is_file():
        command = shlex.join(["gpu-vecenv", "check", argument, "--checks", "G01", "G06"])
        text = f"{argument} has not been checked as it is now; an index out of bounds would corrupt memory: {command}"
        print(printable(f"gpu-vecenv: {text}"), file=sys.stderr)


def folder_of_run(run: Path) -> Path | None:
    """The folder with the settings of a run, of one of its checkpoints, or of either with the number of a member."""
    path = run_and_member(run)[0]
    return next((one for one in (path, *path.parents[:2]) if (one / SETTINGS).is_file()), None)


def load_game_of_run(run: Path) -> None:
    """Import the file of a run's game, unless the game is registered or the run names no file.

    Args:
        run: The folder of a run, one of its checkpoints, or either with the number of a member.

    Raises:
        GameFileNeededError: No run was begun here with such files, or one has changed or is missing. Nothing was run.
        ConfigError: The settings are damaged.
    """
    folder = folder_of_run(run)
    found = None if folder is None else folder / SETTINGS
    try:
        settings: dict[str, Any] = {} if found is None else json.loads(found.read_text(encoding="utf-8"))
        name, entry = settings.get("game"), settings.get(KEY) or {}
        argument = str(entry["argument"]) if entry else None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{found} is damaged or of another version: {type(error).__name__}: {error}") from error
    if argument is None or name in GAMES:
        return
    if not _mark(entry).is_file():
        raise GameFileNeededError(
            f"{run} is a run of {name}, a game in {argument}; no run was begun here with this file. A game is code: "
            "read it, then give it",
            argument,
        )
    _load_unchanged(entry, f"{run} is a run of {name}")


def keep_game_file_of_replays(argument: str, game: Env, recordings: Iterable[Replay]) -> None:
    """Keep in the cache folder which file declares the game of these replays, for ``load_game_of_replay``.

    Args:
        argument: The game as the command line names it.
        game: The game, configured.
        recordings: New replays.
    """
    entry = game_file_settings(argument, game)
    with contextlib.suppress(OSError):  # commands need the file again
        for path in {_entry_of_replay(recording) for recording in recordings}:
            replace_file(path, json.dumps(entry).encode())


def load_game_of_replay(recording: Replay) -> None:
    """Import the file of a replay's game, unless the game is registered or no such replay was recorded here.

    Raises:
        GameFileNeededError: A file has changed since, or is missing. Nothing was run.
        ConfigError: The file in the cache folder is damaged.
    """
    path = _entry_of_replay(recording)
    if recording.game in GAMES or not path.is_file():
        return
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        _load_unchanged(entry, f"a replay is of {recording.game}")
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged; remove it: {type(error).__name__}: {error}") from error


def _load_unchanged(entry: dict[str, Any], what: str) -> None:
    """Import the file of a game, of which ``what`` is."""
    argument = str(entry["argument"])
    if missing := [file for file in entry["files"] if not Path(file).is_file()]:
        raise GameFileNeededError(
            f"{what}; {', '.join(missing)} is missing. Give the game's file where it is now", Path(argument).name
        )
    if changed := [file for file, digest in entry["files"].items() if _sha256(file) != digest]:
        raise GameFileNeededError(
            f"{what}; {', '.join(changed)} has changed since. To use it as it is now, give it", argument
        )
    load_own_game(argument)


def _files(path: Path, game: Env) -> list[Path]:
    """The file of a game, the modules beside it that it imports, and the device code."""
    beside = _beside.get(sys.modules[type(game).__module__])
    modules = _modules_in(path.parent) if beside is None else beside
    return sorted({path, *modules, *own_files(game.layout)})


def _modules_in(folder: Path) -> list[Path]:
    """The files of imported modules that are found because the folder is on ``sys.path``."""
    files = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] == "gpu_vecenv":
            continue
        path, stem = Path(file).resolve(), folder.joinpath(*name.split("."))
        if path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            files.append(path)
    return files


def _sha256(file: str | Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _entry_of_replay(recording: Replay) -> Path:
    """The file that says which file declares the game of replays with this name and these sources."""
    key = json.dumps([recording.game, recording.sources])
    return cache_dir() / "games" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _mark(entry: Any) -> Path:
    """The empty file that exists once a run was begun with these files, or once they were checked."""
    return cache_dir() / "games" / hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _mark_of_check(argument: str, game: Env) -> Path | None:
    """That of a game in files with these contents, wherever they are; None of one that has a name or lacks a file."""
    match = GAME_FILE.fullmatch(argument)
    if match is None:
        return None
    try:
        digests = [_sha256(file) for file in _files(Path(match[1]).resolve(), game)]
    except FileNotFoundError:  # making the environment says which
        return None
    return _mark({"checked": sorted(digests), "game": game.name()})
