"""``gpu-vecenv new``: write a small working game as a starting point for a new one."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gpu_vecenv.cli.options import PROGRAM, Command
from gpu_vecenv.cli.templates import DECLARATION, RULES, TEST
from gpu_vecenv.declare.field import FIELD_NAME
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output

# Names that the templates import, which the new class cannot have.
USED = {"Any", "Circle", "Discrete", "Drawing", "Env", "Field", "Line", "Mapping", "Rules", "VecEnv"}


@dataclass(frozen=True, kw_only=True)
class New(Command):
    """Write a small game that works, as the start of your own.

    Three files: the declaration, the device code and a test.
    """

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]  # name of the game, like my_game
    folder: Path = Path()  # folder of the files, created if missing; existing files are not overwritten

    def __call__(self) -> None:
        """Write them and print the next steps."""
        declaration, rules, test = (printable(str(path)) for path in new_game(self.name, self.folder))
        print(f"wrote {declaration}, {rules} and {test}. Next:")
        print(f"  edit {rules}, the rules, and {declaration}, the declaration")
        print(f"  {PROGRAM} check {shlex.quote(declaration)}")
        print(f"  {PROGRAM} train {shlex.quote(declaration)} --total-steps 400000")


def new_game(name: str, folder: Path = Path()) -> list[Path]:
    """Write ``<name>.py`` (the declaration), ``<name>.cu`` (the rules) and ``test_<name>.py`` into ``folder``.

    Returns:
        Their paths, in this order.

    Raises:
        ConfigError: The name is not an identifier, is a keyword, or is taken; or there can be no such folder.
        FileExistsError: One of the files exists. Nothing has been written.
        OSError: The folder cannot be created or written to.
    """
    if not FIELD_NAME.fullmatch(name):
        raise ConfigError(f"{name[:128]!r} cannot name a game; expected an identifier [a-z][a-z0-9_]*, like my_game")
    if keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)) or _class_name(name) in USED:
        raise ConfigError(f"{name!r} is a keyword of Python or used by the new files; choose another name")
    if name in GAMES:
        raise ConfigError(f"{name!r} is already the game {GAMES[name].__qualname__}; choose another name")
    if name in sys.stdlib_module_names or name in sys.modules:
        raise ConfigError(f"{name!r} is already a module, which {name}.py would hide; choose another name")
    templates = {f"{name}.py": DECLARATION, f"{name}.cu": RULES, f"test_{name}.py": TEST}
    check_output("folder", folder, folder=True)
    if existing := [file for file in templates if (folder / file).exists()]:
        raise FileExistsError(f"{folder / existing[0]} exists; choose another name or --folder")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for file, template in templates.items():
            with (folder / file).open("x", encoding="utf-8", newline="\n") as out:
                written.append(folder / file)
                out.write(template.substitute(name=name, kind=_class_name(name)))
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


def _class_name(name: str) -> str:
    """The class whose ``name()`` is this: MyGame for my_game, but Game_2d for game_2d."""
    parts = [part.capitalize() for part in name.split("_")]
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", "".join(parts)).lower()
    return "".join(parts) if snake_case == name else "_".join(parts)
