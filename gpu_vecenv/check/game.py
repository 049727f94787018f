"""``check_game``: a game's rules in debug builds, its interfaces, and bitwise equality between ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from gpu_vecenv.check import Report, check_parallel_env, check_vector_env
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.check.game_report import GameReport
from gpu_vecenv.check.game_runs import LONGEST, Cause, first_difference, first_fault, game_limit, ways
from gpu_vecenv.check.isolated import ProcessEnded, run_isolated
from gpu_vecenv.check.sanitize import sanitizer_finding
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import MODES, validate_int
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CompilerError, ConfigError, DeviceFaultError, EnvContractError, KernelCompileError
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv
from gpu_vecenv.views.pettingzoo_env import ParallelEnv

__all__ = ["GameReport", "check_game"]
PROBED_ENVS = 16  # environments of the debug builds
CALL_SECONDS = 60.0  # after which a call of these builds, in a process of its own, is an endless loop
CPU = torch.device("cpu")


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
    sanitize: bool = False,
    call_seconds: float = CALL_SECONDS,
    on_progress: OnProgress = no_progress,
) -> GameReport:
    """Check a game, from its rules to its interfaces, up to the first check that fails.

    First its rules, on the CPU in a process of its own, where a crash or an endless loop is a finding: indices within
    their arrays, state and observations that are written (runs in memory with other contents must be equal), finite
    numbers, episodes that end. Then, on the device, whether its bits depend on how it is run, and ``check_vector_env``
    in each autoreset mode.

    A game of several agents is checked with ``check_parallel_env`` as well; with that alone if some role has a Box that
    another does not have, since Gymnasium's interface has one action space for all.

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
        sanitize: First play it on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer, which need a compiler
            that has them, and a game whose module other processes can import.
        call_seconds: Time limit of a call in a debug build.
        on_progress: Called with the fraction that is done and a text.

    Raises:
        ConfigError, TypeError, ValueError: An argument is wrong.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's source fails.
    """
    num_envs, steps = validate_int("num_envs", num_envs, 2), validate_int("steps", steps, 10)
    seed = validate_int("seed", seed, 0)
    if isinstance(call_seconds, bool) or not isinstance(call_seconds, int | float) or not call_seconds > 0:
        raise ConfigError(f"call_seconds is {call_seconds!r}; expected a number of seconds > 0")
    torch_device = resolve_device(device)
    report = GameReport(game)
    VecEnv(game, num_envs, torch_device, driver=driver).close()  # what does not compile is no finding
    modes = tuple(autoreset_modes)
    stages: list[Callable[[OnProgress], None]] = [
        *(
            [partial(_check_sanitized, report, min(num_envs, PROBED_ENVS), steps, seed, call_seconds)]
            if sanitize
            else []
        ),
        partial(_check_rules, report, torch_device, driver, min(num_envs, PROBED_ENVS), steps, seed, call_seconds),
        partial(_check_ways, report, torch_device, driver, num_envs, steps, seed),
        *(partial(_check_mode, report, mode, torch_device, driver, steps, seed) for mode in modes),
    ]
    if parallel and game.layout.num_agents > 1:
        stages.append(partial(_check_parallel, report, torch_device, driver, steps, seed))
    for index, stage in enumerate(stages):
        stage(part(on_progress, index, len(stages)))
        if report.failures:
            break
    on_progress(1.0, game.name())
    return report


def _check_sanitized(
    report: GameReport, num_envs: int, steps: int, seed: int, call_seconds: float, on_progress: OnProgress
) -> None:
    """G00, on the CPU."""
    on_progress(0.0, "sanitizers")
    if not report.game.layout.host:
        report.add("G00", "skipped", ["the sanitizers are those of the host, and the game has host = False"])
        return
    found = sanitizer_finding(report.game, num_envs, steps, seed, call_seconds)
    report.add("G00", "failed" if found else "passed", [found] if found else [])


def _check_rules(
    report: GameReport,
    device: torch.device,
    driver: str | None,
    num_envs: int,
    steps: int,
    seed: int,
    call_seconds: float,
    on_progress: OnProgress,
) -> None:
    """G01 to G04: on the CPU in a process of its own, then on the GPU."""
    game, cause, skipped = report.game, None, list[str]()
    places = list(dict.fromkeys([CPU, device] if game.layout.host else [device]))
    on_progress(0.0, "rules")
    for where in places:
        run = partial(first_fault, game, where, driver if where == device else None, num_envs, steps, seed)
        try:
            cause = run_isolated(run, call_seconds) if where == CPU else run(lambda call: None)
        except ProcessEnded as error:
            cause = Cause("G01", f"{error}; sanitize=True, or --sanitize, names file and line")
        except DeviceFaultError as error:
            cause = Cause("G01", str(error))
        except (KernelCompileError, CompilerError) as error:  # no host compiler, or a use that only pointers allow
            skipped.append(f"on {where}: {str(error).splitlines()[0]}")
        if cause is not None:
            break
    for check in ("G01", "G02", "G03", "G04"):
        if cause is not None and check == cause.check:
            report.add(check, "failed", [cause.text])
            return
        if len(skipped) == len(places):
            report.add(check, "skipped", skipped)
        elif check == "G04" and not 0 < (game_limit(game) or 0) <= LONGEST:
            report.add(check, "skipped", [f"the game has no max_steps, or more than {LONGEST:,}"])
        else:
            report.add(check, lines=skipped)


def _check_ways(
    report: GameReport,
    device: torch.device,
    driver: str | None,
    num_envs: int,
    steps: int,
    seed: int,
    on_progress: OnProgress,
) -> None:
    """G05: digests of trajectories must be equal; where they are not, the first difference."""
    game = report.game

    def made(num_envs: int, device: torch.device, **how: Any) -> VecEnv:
        return VecEnv(game, num_envs, device, **{"driver": driver if device.type == "cuda" else None, **how})

    def digests(**how: Any) -> torch.Tensor:
        env = made(**how)
        try:
            return trajectory_digest(env, seed, steps).words.cpu()
        finally:
            env.close()

    same: dict[str, Any] = {"num_envs": num_envs, "device": device}
    expected, run = digests(**same), list[str]()
    others = list(ways(num_envs, device))
    for index, (way, how) in enumerate(others):
        on_progress(index / len(others), f"bitwise equality: {way}")
        if index > 0 and not game.layout.host:
            report.add(
                "G05", lines=[f"{run[0]}; a game with host = False is not bit-reproducible in other ways to run"]
            )
            return
        try:
            got = digests(**how)
        except EnvContractError as error:
            report.add("G05", "failed", [f"{way}: {error}"])
            return
        except KernelCompileError:
            if not how.get("guards"):
                raise
            continue  # G01 says why
        if not got.equal(expected[: len(got)]):
            difference = first_difference(made(**same), made(**how), steps, seed)
            report.add("G05", "failed", [f"{way}: {difference}: {HINTS[_kind(how)]}"])
            return
        run.append(way)
    report.add("G05", lines=[", ".join(run)])


HINTS = {
    "order": "a group_sync() is missing, two threads write to one address, or a float sum runs over threads",
    "number": "an environment reads or writes what belongs to another",
}


def _kind(how: dict[str, Any]) -> str:
    return "order" if {"thread_order", "threads_per_env", "driver"} & how.keys() else "number"


def _check_mode(
    report: GameReport,
    mode: str,
    device: torch.device,
    driver: str | None,
    steps: int,
    seed: int,
    on_progress: OnProgress,
) -> None:
    """The checks of a vector environment in one autoreset mode."""
    game = report.game
    if game.layout.action.mixed:
        reason = "Gymnasium's interface has one action space, but those of the roles differ"
        report.add_interface(mode, Report(mode, skipped=dict.fromkeys(CHECKS, reason)))
        return

    def maker(mode: str, **how: Any) -> Callable[[int], GymnasiumVectorEnv]:
        how = {"device": device, "driver": driver, "validate": "sync", **how}
        return lambda num_envs: GymnasiumVectorEnv(game, num_envs, autoreset_mode=mode, **how)

    variants: dict[str, dict[str, Any]] = {"NumPy output": {"output": "numpy"}}
    if device.type != "cpu" and game.layout.host:
        variants["on the CPU"] = {"device": "cpu", "driver": None}
    found: Report = check_vector_env(
        maker(mode),
        modes={other: maker(other) for other in MODES},
        variants={name: maker(mode, **how) for name, how in variants.items()},
        graph=maker(mode, validate="async"),  # "sync" reads values on the host, which cannot be captured
        state_of=lambda env: env.vec_env,
        seed=seed,
        steps=steps,
        max_steps=game_limit(game),
        on_progress=lambda fraction, text: on_progress(fraction, f"{mode}: {text}"),
    )
    report.add_interface(mode, found)


def _check_parallel(
    report: GameReport, device: torch.device, driver: str | None, steps: int, seed: int, on_progress: OnProgress
) -> None:
    """The checks of a PettingZoo ParallelEnv."""
    game = report.game
    found = check_parallel_env(
        lambda: ParallelEnv(game, device, driver=driver),
        seed=seed,
        steps=steps,
        max_steps=game_limit(game),
        on_progress=lambda fraction, text: on_progress(fraction, f"parallel: {text}"),
    )
    report.add_interface("parallel", found)
