"""``gpu-vecenv list``: the registered games."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_vecenv.cli.options import Command
from gpu_vecenv.envs.registry import GAMES, game_summary
from gpu_vecenv.escapes import printable


@dataclass(frozen=True)
class List(Command):
    """List the games, with their roles and one line each."""

    def __call__(self) -> None:
        """Print the table."""
        table = Table("game", "roles", "description")
        for name, game in sorted(GAMES.items()):
            roles = ", ".join(f"{role}: {count}" for role, count in game().roles.items())
            cells = name, roles, game_summary(game)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        Console().print(table)
