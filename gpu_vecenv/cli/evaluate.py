"""``gpu-vecenv evaluate``: returns and episode lengths of trained policies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_vecenv.cli.actors import players_of_run
from gpu_vecenv.cli.options import PROGRAM, DeviceOptions, Run, load_run_policy
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.progress import ProgressDisplay
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.evaluation_tables import evaluation_table, table_of_agents
from gpu_vecenv.train.role_view import sides_of_game


@dataclass(frozen=True, kw_only=True)
class Evaluate(DeviceOptions):
    """Play episodes with the policies of a run; print mean returns."""

    run: Run  # folder of the run, or one of its checkpoints
    episodes: int = param(1000, low=1)  # number of episodes
    greedy: bool = False  # take the most likely action instead of a sample
    best: bool = False  # the best checkpoint instead of the newest
    # what plays roles or agents in place of the run's policies: tagger=random, tagger=still, player_1=runs/other or
    # runner=file.py:function, or without ROLE= all roles; none: its policies play all
    opponents: tuple[str, ...] = ()
    num_envs: int = param(1000, low=1)  # environments that are stepped at a time
    seed: int = 1  # seed of the random streams
    json: bool = False  # print JSON instead of a table
    out: Path | None = None  # file that receives the result as JSON; None: no file
    game: str | None = None  # file that declares the game; None: the run's, unless it has changed

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self) -> None:
        """Print the result."""
        if self.out is not None:
            check_output("out", self.out)
        loaded = load_run_policy(self.run, game=self.game, best=self.best, device=self.device)
        role_policies = players_of_run(loaded, "opponents", self.opponents, best=self.best)
        if {*map(id, role_policies.values())}.isdisjoint(map(id, loaded.policies.values())):
            self._report_no_policy(sides_of_game(loaded.game))
        env = VecEnv(
            loaded.game, min(self.num_envs, self.episodes), loaded.device, driver=self.driver, arrays=loaded.shared
        )
        how: dict[str, Any] = {"greedy": self.greedy, "seed": self.seed}
        with ProgressDisplay("evaluate") as on_progress:
            results = evaluate(env, role_policies, self.episodes, on_progress=on_progress, **how)
        which = {"run": str(self.run), "best": self.best, "iteration": loaded.iteration, "opponents": self.opponents}
        text = dumps({"game": loaded.game.name(), **which, **how, **results}, indent=1)
        if self.json:
            print(text)
        else:
            iteration = f"policies of iteration {loaded.iteration}"
            note = "; ".join([iteration, *["most likely actions"] * self.greedy, *self.opponents])
            console = Console()
            console.print(evaluation_table(loaded.game, {str(self.run): results}, note))
            if (table := table_of_agents(loaded.game, results)) is not None:
                console.print(table)
        if self.out is not None:
            replace_file(self.out, f"{text}\n".encode())

    def _report_no_policy(self, sides: Sequence[str]) -> None:
        """Print to the standard error that opponents play all agents."""
        some = f"; to replace some of them name a role or an agent, such as {sides[-1]}=random" * (len(sides) > 1)
        text = (
            f"no policy of {self.run} plays: --opponents {' '.join(self.opponents)} replaces those of all agents{some}"
        )
        print(printable(f"{PROGRAM}: {text}"), file=sys.stderr)
