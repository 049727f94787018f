"""``check_game``: the conformance checks on all views of one game, and equal bits however it is run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from gpu_vecenv.check import WIDTH, ConformanceError, Report, check_parallel_env, check_vector_env
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import MODES, VecEnv
from gpu_vecenv.errors import EnvContractError
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv
from gpu_vecenv.views.pettingzoo_env import ParallelEnv

if TYPE_CHECKING:
    from rich.console import Group


@dataclass
class GameReport:
    """What was found; ``str(report)`` and rich render it as tables.

    Args:
        game: The game.
        reports: Autoreset mode -> what ``check_vector_env`` found; "parallel" -> what ``check_parallel_env`` did.
        equal: Ways to run that gave the same bits.
        differing: Way to run -> which replicas it changed, or what went wrong.
        skipped: Way to run -> why it was not tried.
    """

    game: Env
    reports: dict[str, Report] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[Any]:
        """All that is wrong, of all views and all ways to run."""
        found: list[Any] = [failure for report in self.reports.values() for failure in report.failures]
        return found + [f"{way}: {which}" for way, which in self.differing.items()]

    def raise_for_failures(self) -> None:
        """Raise ConformanceError, with the report as its message, if there are failures."""
        if self.failures:
            raise ConformanceError(f"\n{self}")

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("way to run", "bits", title=f"{self.game.name()}: equal bits", title_justify="left")
        for way in self.equal:
            table.add_row(way, Text("equal", "green"))
        for way, which in self.differing.items():
            table.add_row(way, Text(which, "red"))
        for way, why in self.skipped.items():
            table.add_row(way, Text(f"skipped: {why}", "dim"))
        return Group(*self.reports.values(), table)

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return out.getvalue().rstrip()


def check_game(
    game: Env,
    *,
    device: str | torch.device | None = None,
    driver: str | None = None,
    num_envs: int = 100,
    steps: int = 300,
    seed: int = 17,
    autoreset_modes: Iterable[str] = tuple(MODES),
    parallel: bool = True,
) -> GameReport:
    """Check a game: ``check_vector_env`` in each autoreset mode, and that its bits do not depend on how it is run.

    A game of several agents goes through ``check_parallel_env`` as well.

    On the CPU every range is also visited backwards and shuffled, as the lanes of a GPU may; on a GPU the game is run
    by teams of other sizes, and on the CPU as well. In all cases a few replicas alone must do what they do among many,
    and nothing may be written between replicas.

    Args:
        game: The game and its configuration. Where it has ``max_steps``, an int, episodes must end there.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.
        num_envs: Replicas whose bits are compared, at least 2.
        steps: Ticks of most runs, at least 10. What happens later than that stays unseen.
        seed: The first of the seeds.
        autoreset_modes: Those in which ``check_vector_env`` runs.
        parallel: Whether a game of several agents is checked as PettingZoo's ParallelEnv, too.

    Raises:
        ConfigError, TypeError, ValueError: An argument is wrong.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's text fails.
    """
    num_envs = validate_int("num_envs", num_envs, 2)
    on = resolve_device(device)
    limit = getattr(game, "max_steps", None)
    report = GameReport(game)
    run: dict[str, Any] = {"seed": seed, "steps": steps, "max_steps": limit if type(limit) is int else None}

    def maker(mode: str, **how: Any) -> Callable[[int], GymnasiumVectorEnv]:
        how = {"device": on, "driver": driver, "validate": "sync", **how}
        return lambda replicas: GymnasiumVectorEnv(game, replicas, autoreset_mode=mode, **how)

    others: dict[str, dict[str, Any]] = {"arrays": {"output": "numpy"}}
    if on.type != "cpu" and game.layout.host:
        others["on the CPU"] = {"device": "cpu", "driver": None}
    for mode in autoreset_modes:
        found = check_vector_env(
            maker(mode),
            modes={other: maker(other) for other in MODES},
            variants={name: maker(mode, **how) for name, how in others.items()},
            graph=maker(mode, validate="async"),  # "sync" reads values on the host, which no graph can
            state_of=lambda env: env.vec_env,
            **run,
        )
        report.reports[mode] = replace(found, name=f"{game.name()}, {mode}")
    if parallel and game.layout.num_agents > 1:
        found = check_parallel_env(lambda: ParallelEnv(game, on, driver=driver), **run)
        report.reports["parallel"] = replace(found, name=f"{game.name()}, parallel")

    def words(replicas: int, where: torch.device, **how: Any) -> torch.Tensor:
        env = VecEnv(game, replicas, where, driver=driver if where.type == "cuda" else None, **how)
        try:
            return trajectory_digest(env, seed, steps).words.cpu()
        finally:
            env.close()

    expected = words(num_envs, on)
    few = max(1, num_envs // 2)
    ways = [(f"{few} of {num_envs} replicas", {"replicas": few, "where": on}), *_ways(game, num_envs, on)]
    for way, how in ways:
        if way != ways[0][0] and not game.layout.host:
            report.skipped[way] = "host = False promises no equal bits"
            continue
        try:
            got = words(**how)
        except EnvContractError as error:
            report.differing[way] = str(error)
            continue
        changed = (got != expected[: len(got)]).nonzero()[:, 0].tolist()
        if changed:
            which = f"replicas {', '.join(map(str, changed[:8]))}{' …' * (len(changed) > 8)}"
            report.differing[way] = f"other than usual: {which}"
        else:
            report.equal.append(way)
    return report


def _ways(game: Env, num_envs: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other ways to run the game that may not change a bit."""
    same = {"replicas": num_envs, "where": device}
    yield "guard bands between replicas", {**same, "guards": True}
    if device.type == "cpu":
        yield "ranges backwards", {**same, "thread_order": 1}
        yield "ranges shuffled", {**same, "thread_order": 2}
        return
    yield "blocks backwards", {**same, "thread_order": 1}
    for threads_per_env in (1, 32, 64):
        yield f"teams of {threads_per_env} lanes", {**same, "threads_per_env": threads_per_env}
    yield "on the CPU", {**same, "where": torch.device("cpu")}
