"""``gpu-vecenv list``: the registered games."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_vecenv.cli.options import PROGRAM, Command
from gpu_vecenv.envs.registry import GAMES, game_summary
from gpu_vecenv.escapes import printable


@dataclass(frozen=True)
class List(Command):
    """List the games, with their roles and one line each."""

    def __call__(self) -> None:
        """Print the table."""
        table = Table("game, and its agents", "description", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name, game in sorted(GAMES.items()):
            roles = ", ".join(f"{role}: {count}" for role, count in game().roles.items())
            table.add_row(Text(f"{printable(name)}\n  {printable(roles)}"), Text(printable(game_summary(game))))
        Console().print(table)
        print(f"One of your own: {PROGRAM} new my_game")
