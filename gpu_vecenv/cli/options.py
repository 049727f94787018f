"""Options of the command line: dataclasses, whose fields are what may be given."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import tyro

from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAME_FILE, GAMES, find_game, load_game
from gpu_vecenv.errors import ConfigError, UnknownGameError
from gpu_vecenv.train.game_policy import GamePolicy, load_policy

PROGRAM = "gpu-vecenv"
RULE = re.compile(r"[\s╭╮╰╯─+-]*")  # a line of a box that has no words


def refuse_arguments(command: str, arguments: Sequence[str]) -> None:
    """Refuse further arguments."""
    if arguments:
        raise ConfigError(f"{command} takes no arguments; got {' '.join(arguments)}")


def parse_game(command: str, arguments: Sequence[str]) -> tuple[type[Env], Sequence[str]]:
    """The game that comes first, and the rest."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"{command} needs a game's name first: {', '.join(sorted(GAMES))}; see {PROGRAM} {command} GAME --help"
        )
    find = load_game if GAME_FILE.fullmatch(arguments[0]) else find_game
    return find(arguments[0]), arguments[1:]


def load_run_policy(command: str, run: str, *, game: str | None, best: bool, device: str | None) -> GamePolicy:
    """What a run has learned; ``game`` is the file that declares its game, if it is no bundled one."""
    if game is not None:
        parse_game(command, [game])  # it registers what the file declares
    where = resolve_device(device)
    try:
        return load_policy(run, best=best, device=where)
    except UnknownGameError as error:
        raise ConfigError(f"{str(error).split('. ')[0]}. Give the file that declares it: --game my_game.py") from error


def merge_dataclasses(name: str, **defaults: Any) -> Any:
    """A dataclass of dataclasses, given by their classes or by default instances; their options stand side by side."""
    fields, seen = [], dict[str, str]()
    for part, default in defaults.items():
        kind = default if isinstance(default, type) else type(default)
        make = default if isinstance(default, type) else functools.partial(dataclasses.replace, default)
        for field in dataclasses.fields(kind):
            if other := seen.get(field.name):
                raise ConfigError(f"{kind.__name__}.{field.name} has the name of an option of {other}; rename it")
            seen[field.name] = kind.__name__
        fields.append((part, kind, dataclasses.field(default_factory=make)))
    return dataclasses.make_dataclass(name, fields)


def parse(kind: Any, program: str, arguments: Sequence[str]) -> Any:
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
