"""``gpu-vecenv web``: a page that plays a game in a browser, without a server."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from gpu_vecenv.cli.options import GameCommand, GameName, GameT, load_run_policy
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.watch.replay import Replay
from gpu_vecenv.watch.rerun import configured
from gpu_vecenv.web.page import game_page


@dataclass(frozen=True, kw_only=True)
class Web(GameCommand, Generic[GameT]):
    """Write a page that plays a game in a browser, without a server.

    It is one file, with the game's own source as WebAssembly.
    """

    game_name: GameName  # a name, or a file that declares it
    run: Path | None = None  # run, or one of its checkpoints, whose policies play in its configuration; None: none
    best: bool = False  # the best checkpoint instead of the newest
    replay: Path | None = None  # replay of this game, with which the page begins; None: none
    out: Path = Path("page")  # folder of the page; its index.html is self-contained
    title: str | None = None  # title of the page; None: the name of the game
    game: GameT

    def __call__(self) -> None:
        """Write the files."""
        check_output("out", self.out, folder=True)
        game: Env = self.game  # type: ignore[assignment]
        policy = replay = None
        if self.run is not None:
            policy = load_run_policy(self.run, game=None, best=self.best, device="cpu")
            game = self._configuration_of(policy.game, f"run {self.run}")
        elif self.best:
            raise ConfigError("best chooses a checkpoint of a run; give --run too")
        if self.replay is not None:
            replay = Replay.load(self.replay)
            if self.run is None:
                game = self._configuration_of(configured(replay, type(game)), f"replay {self.replay}")
        if game != self.game:
            print(printable(f"the game has the options of {self.run or self.replay}: {game!r}"))
        files = game_page(game, policy, title=self.title, replay=replay)
        for name, content in files.items():
            replace_file(self.out / name, content)
        size, parts = len(files["index.html"]), ", ".join(sorted(files.keys() - {"index.html"}))
        print(printable(f"wrote {self.out / 'index.html'}: {size:,} bytes; open it in a browser, or send it alone"))
        print(printable(f"{parts} are its parts, for pages of your own"))

    def _configuration_of(self, found: Env, source: str) -> Env:
        """That of a run or replay, unless other options are given; randomised parameters are those of the options."""
        given: Env = self.game  # type: ignore[assignment]
        if type(given) is not type(found):
            raise ConfigError(f"{source} is of {found.name()}; expected one of {given.name()}")
        options = dataclasses.replace(given, randomize=())
        if options not in (type(given)(), dataclasses.replace(found, randomize=())):
            raise ConfigError(f"{source} is of {found!r:.300}; expected these options, or none, beside it")
        return dataclasses.replace(found, randomize=given.randomize or found.randomize)
