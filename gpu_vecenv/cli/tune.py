"""``gpu-vecenv tune``: the fastest launch configuration of a game on this GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from rich.console import Console

from gpu_vecenv.cli.options import DeviceOptions, GameCommand, GameName, GameT
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.tuning import Tuning, sampling_name, tune
from gpu_vecenv.escapes import printable
from gpu_vecenv.progress import ProgressDisplay
from gpu_vecenv.tables import FittedTable


@dataclass(frozen=True, kw_only=True)
class Tune(GameCommand, DeviceOptions, Generic[GameT]):
    """Find the fastest launch configuration of a game on this GPU.

    That is threads_per_env, threads_per_block and fuse_sampling. It is stored: environments of this game with this
    configuration use it from then on. Results of the game do not depend on it.
    """

    game_name: GameName  # a name, or a file that declares it
    num_envs: int  # environments; the result is used for similar numbers of them
    game: GameT

    def __call__(self) -> None:
        """Measure, print all candidates and store the fastest."""
        game: Env = self.game  # type: ignore[assignment]
        with ProgressDisplay("tune") as on_progress:
            tuning = tune(game, self.num_envs, self.device, driver=self.driver, on_progress=on_progress)
        Console().print(_table(tuning))
        for candidate in (*tuning.candidates, *tuning.sampling):
            if candidate.problem is not None:
                problem = " ".join(candidate.problem.split())
                print(printable(f"skipped {candidate}: {problem:.300}"))
        chosen = f"{tuning.shape}, {sampling_name(tuning.fuse_sampling)}"
        print(f"stored for {game.name()} with about {self.num_envs:,} environments: {chosen}, in")
        print(printable(f"  {tuning.path}"))


def _table(tuning: Tuning) -> FittedTable:
    headings = ("threads_per_block", "of a step", "µs per step", "ratio to default")
    table = FittedTable("threads_per_env", *headings, left=["of a step", "ratio to default"])
    for candidates, stored in ((tuning.candidates, None), (tuning.sampling, tuning.fuse_sampling)):
        default = candidates[0]
        for candidate in sorted(candidates, key=lambda c: c.seconds or float("inf")):
            duration, ratio = "-", "-"
            if candidate.seconds is not None and default.seconds is not None:
                duration = f"{candidate.seconds * 1e6:,.2f}"
                ratio = f"{candidate.seconds / default.seconds:.3f}"
            shape, fused = candidate.shape, candidate.fuse_sampling
            ratio += " (default)" * (candidate == default)
            ratio += " (stored)" * (shape == tuning.shape and fused == stored)
            what = "actions given" if fused is None else sampling_name(fused)
            table.add_row(str(shape.threads_per_env), str(shape.threads_per_block), what, duration, ratio)
        table.add_row("")
    return table
