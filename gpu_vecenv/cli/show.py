"""``gpu-vecenv show``: the C++ code generated for a game, or the configuration of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Generic

import tyro

from gpu_vecenv.cli.options import Command, GameCommand, GameName, GameT, Run, names_run
from gpu_vecenv.compile.codegen import generate_header
from gpu_vecenv.compile.randomized_source import parameter_functions
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.escapes import printable_lines
from gpu_vecenv.train.game_policy import read_run, run_and_member
from gpu_vecenv.train.stored_config import readable_config, stored_configs, with_defaults


@dataclass(frozen=True, kw_only=True)
class Show(GameCommand, Generic[GameT]):
    """Print the C++ code generated for a game, or a run's configuration.

    Of a run, its folder or one of its checkpoints, it prints game, sizes and hyper-parameters as JSON.
    """

    game_name: GameName  # a name, or a file that declares it; or a run
    game: GameT

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the options of the game that is named first; ShowRun for a run."""
        if arguments and names_run(arguments[0]):
            return ShowRun, tyro.MISSING_NONPROP
        return super().for_arguments(arguments)

    def __call__(self) -> None:
        """Print the header."""
        layout: GameLayout = self.game.layout  # type: ignore[attr-defined]
        print(generate_header(layout) + (parameter_functions(layout) if layout.randomized else ""), end="")


@dataclass(frozen=True, kw_only=True)
class ShowRun(Command):
    """Print a run's configuration: game, sizes and hyper-parameters, as JSON."""

    run: Run  # folder of the run, or one of its checkpoints
    best: bool = False  # the best checkpoint instead of the newest

    def __call__(self) -> None:
        """Print it."""
        path, _, manifest = read_run(run_and_member(self.run)[0], self.best)
        manifest = with_defaults(manifest, str(path))
        stored_configs(manifest, str(path))  # raises if the file is damaged
        print(printable_lines(dumps(readable_config(manifest), indent=1)))
