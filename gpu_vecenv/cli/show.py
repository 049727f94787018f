"""``gpu-vecenv show``: the C++ code generated for a game."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import tyro

from gpu_vecenv.cli.options import Command, GameName, GameT, NoGame, named_game, with_parameter
from gpu_vecenv.compile.codegen import generate_header
from gpu_vecenv.compile.randomized_source import parameter_functions
from gpu_vecenv.declare.layout import GameLayout


@dataclass(frozen=True, kw_only=True)
class Show(Command, Generic[GameT]):
    """Print the C++ code that is generated for a game."""

    game_name: GameName  # a name, or a file that declares it
    game: GameT

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the options of the game that is named first."""
        return with_parameter(cls, named_game(arguments) or NoGame), tyro.MISSING_NONPROP

    def __call__(self) -> None:
        """Print the header."""
        layout: GameLayout = self.game.layout  # type: ignore[attr-defined]
        print(generate_header(layout) + (parameter_functions(layout) if layout.randomized else ""), end="")
