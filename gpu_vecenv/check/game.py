"""``check_game``: conformance checks on all views of one game, and bitwise equality between ways to run it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from gpu_vecenv.check import WIDTH, ConformanceError, Report, check_parallel_env, check_vector_env
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import MODES, validate_int
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import EnvContractError
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv
from gpu_vecenv.views.pettingzoo_env import ParallelEnv

if TYPE_CHECKING:
    from rich.console import Group


@dataclass
class GameReport:
    """Results of ``check_game``; ``str(report)`` and rich render them as tables.

    Args:
        game: The game.
        reports: Autoreset mode -> report of ``check_vector_env``; "parallel" -> report of ``check_parallel_env``.
        equal: Ways to run that are bitwise equal to the default one.
        differing: Way to run -> the environments that differ, or the error.
        skipped: Way to run -> why it was not run.
    """

    game: Env
    reports: dict[str, Report] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[Any]:
        """All failures, of all views and ways to run."""
        found: list[Any] = [failure for report in self.reports.values() for failure in report.failures]
        return found + [f"{way}: {reason}" for way, reason in self.differing.items()]

    def raise_for_failures(self) -> None:
        """Raise ConformanceError, with the report as its message, if there are failures."""
        if self.failures:
            raise ConformanceError(f"\n{self}")

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("way to run", "trajectories", title=f"{self.game.name()}: bitwise equality", title_justify="left")
        for way in self.equal:
            table.add_row(way, Text("equal", "green"))
        for way, reason in self.differing.items():
            table.add_row(way, Text(reason, "red"))
        for way, reason in self.skipped.items():
            table.add_row(way, Text(f"skipped: {reason}", "dim"))
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
    on_progress: OnProgress = no_progress,
) -> GameReport:
    """Check a game: ``check_vector_env`` in each autoreset mode, and that its bits do not depend on how it is run.

    A game of several agents is checked with ``check_parallel_env`` as well.

    On the CPU every range is also iterated backwards and shuffled, since GPU threads have no order; on a GPU the game
    is also run with other numbers of threads per environment, and on the CPU. On both, half of the environments alone
    must be bitwise equal to the same ones among all, and nothing may be written between environments.

    Args:
        game: The configured game. If it has ``max_steps``, an int, episodes must end there.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.
        num_envs: Environments whose trajectories are compared, at least 2.
        steps: Length of most runs, at least 10. Violations that occur later are not found.
        seed: First seed.
        autoreset_modes: Modes in which ``check_vector_env`` runs.
        parallel: Whether a game of several agents is also checked as a PettingZoo ParallelEnv.
        on_progress: Called with the fraction that is done and a text.

    Raises:
        ConfigError, TypeError, ValueError: An argument is wrong.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's source fails.
    """
    num_envs = validate_int("num_envs", num_envs, 2)
    torch_device = resolve_device(device)
    limit = getattr(game, "max_steps", None)
    report = GameReport(game)
    run: dict[str, Any] = {"seed": seed, "steps": steps, "max_steps": limit if type(limit) is int else None}

    def maker(mode: str, **how: Any) -> Callable[[int], GymnasiumVectorEnv]:
        how = {"device": torch_device, "driver": driver, "validate": "sync", **how}
        return lambda num_envs: GymnasiumVectorEnv(game, num_envs, autoreset_mode=mode, **how)

    variants: dict[str, dict[str, Any]] = {"NumPy output": {"output": "numpy"}}
    if torch_device.type != "cpu" and game.layout.host:
        variants["on the CPU"] = {"device": "cpu", "driver": None}
    autoreset_modes = tuple(autoreset_modes)
    parallel = parallel and game.layout.num_agents > 1
    parts = len(autoreset_modes) + parallel + 1
    for index, mode in enumerate(autoreset_modes):
        found = check_vector_env(
            maker(mode),
            modes={other: maker(other) for other in MODES},
            variants={name: maker(mode, **how) for name, how in variants.items()},
            graph=maker(mode, validate="async"),  # "sync" reads values on the host, which cannot be captured
            state_of=lambda env: env.vec_env,
            on_progress=part(on_progress, index, parts, mode),
            **run,
        )
        report.reports[mode] = replace(found, name=f"{game.name()}, {mode}")
    if parallel:
        on_part = part(on_progress, parts - 2, parts, "parallel")
        found = check_parallel_env(lambda: ParallelEnv(game, torch_device, driver=driver), on_progress=on_part, **run)
        report.reports["parallel"] = replace(found, name=f"{game.name()}, parallel")

    def digests(num_envs: int, device: torch.device, **how: Any) -> torch.Tensor:
        env = VecEnv(game, num_envs, device, driver=driver if device.type == "cuda" else None, **how)
        try:
            return trajectory_digest(env, seed, steps).words.cpu()
        finally:
            env.close()

    expected = digests(num_envs, torch_device)
    few = max(1, num_envs // 2)
    ways = [
        (f"{few} of {num_envs} environments", {"num_envs": few, "device": torch_device}),
        *_ways(num_envs, torch_device),
    ]
    for index, (way, how) in enumerate(ways):
        part(on_progress, parts - 1, parts, "bitwise equality")(index / len(ways), way)
        if way != ways[0][0] and not game.layout.host:
            report.skipped[way] = "a game with host = False is not bit-reproducible across ways to run"
            continue
        try:
            got = digests(**how)
        except EnvContractError as error:
            report.differing[way] = str(error)
            continue
        changed = (got != expected[: len(got)]).nonzero()[:, 0].tolist()
        if changed:
            indices = f"environments {', '.join(map(str, changed[:8]))}{' …' * (len(changed) > 8)}"
            report.differing[way] = f"differs from the default in {indices}"
        else:
            report.equal.append(way)
    on_progress(1.0, game.name())
    return report


def _ways(num_envs: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to run a game that must not change a bit."""
    same = {"num_envs": num_envs, "device": device}
    yield "guard bands between environments", {**same, "guards": True}
    if device.type == "cpu":
        yield "ranges backwards", {**same, "thread_order": 1}
        yield "ranges shuffled", {**same, "thread_order": 2}
        return
    yield "blocks backwards", {**same, "thread_order": 1}
    for threads_per_env in (1, 32, 64):
        yield f"{threads_per_env} threads per environment", {**same, "threads_per_env": threads_per_env}
    yield "on the CPU", {**same, "device": torch.device("cpu")}
