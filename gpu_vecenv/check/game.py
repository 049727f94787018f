"""``check_game``: a game's rules in debug builds, its interfaces, and bitwise equality between ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_vecenv.check import Failure, Report, check_parallel_env, check_vector_env, chosen_checks
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.check.game_runs import LONGEST, Cause, GameRun, first_difference, first_fault, first_race, ways
from gpu_vecenv.check.isolation import ProcessEnded, run_isolated
from gpu_vecenv.check.report import GAME_CHECKS
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

CALL_SECONDS = 60.0  # after which a call of these builds, in a process of its own, is an endless loop
CPU = torch.device("cpu")
RULES = {"G01", "G02", "G03", "G04"}  # of one run, which checks them all
Stage = Callable[[GameRun, OnProgress], Report]


def check_game(
    game: Env,
    *,
    device: str | torch.device | None = None,
    driver: str | None = None,
    checks: Iterable[str] | None = None,
    num_envs: int = 100,
    steps: int = 300,
    max_steps: int | None = None,
    seed: int = 17,
    autoreset_modes: Iterable[str] = tuple(MODES),
    parallel: bool = True,
    sanitize: bool = False,
    call_seconds: float = CALL_SECONDS,
    on_progress: OnProgress = no_progress,
) -> Report:
    """Check a game, from its rules to its interfaces, up to the first check that fails.

    First its rules, on the CPU in a process of its own, where a crash or an endless loop is a finding: indices within
    their arrays, state and observations that are written (runs in memory with other contents must be equal), finite
    numbers, episodes that end. Then, on the device, whether its bits depend on how it is run, and ``check_vector_env``
    in each autoreset mode.

    A game of several agents is checked with ``check_parallel_env`` as well; with that alone if some role has a Box that
    another does not have, since Gymnasium's interface has one action space for all.

    Then, on the CPU too, whether threads of a group would race on a GPU: each index of a loop counts as a thread, and
    no other may read or write what one has written until the next ``group_sync()``.

    On the CPU every range is also iterated backwards and shuffled, since GPU threads have no order; on a GPU the game
    is also run with other numbers of threads per environment, and on the CPU. On both, half of the environments alone
    must be bitwise equal to the same ones among all, and nothing may be written between environments.

    Args:
        game: The configured game.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.
        checks: Checks to run, of "G00" … "G06" and "K01" … "K28"; None runs all but "G00". "G01" to "G04" are one run:
            each of them stands for all four.
        num_envs: Environments whose trajectories are compared, at least 2.
        steps: Length of most runs, at least 10. Violations that occur later are not found.
        max_steps: Step at which episodes are truncated; None takes the game's own ``max_steps``, if it has one. If
            neither is given, limits are not checked.
        seed: First seed.
        autoreset_modes: Modes in which ``check_vector_env`` runs.
        parallel: Whether a game of several agents is also checked as a PettingZoo ParallelEnv.
        sanitize: Also run "G00": first play it on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer, which
            need a compiler that has them, and a game whose module other processes can import.
        call_seconds: Time limit of a call in a debug build.
        on_progress: Called with the fraction that is done and a text.

    Returns:
        The report; a note names what was not run after the first failure.

    Raises:
        ConfigError, TypeError, ValueError: An argument is wrong.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's source fails.
    """
    num_envs, steps = validate_int("num_envs", num_envs, 2), validate_int("steps", steps, 10)
    seed = validate_int("seed", seed, 0)
    limit = getattr(game, "max_steps", None) if max_steps is None else validate_int("max_steps", max_steps, 1)
    if isinstance(call_seconds, bool) or not isinstance(call_seconds, int | float) or not call_seconds > 0:
        raise ConfigError(f"call_seconds is {call_seconds!r}; expected a number of seconds > 0")
    chosen = {*chosen_checks(checks, [*GAME_CHECKS, *CHECKS])}
    chosen -= {"G00"} if checks is None else set()
    chosen |= {"G00"} if sanitize else set()
    chosen |= RULES if chosen & RULES else set()
    run = GameRun(
        game=game,
        device=resolve_device(device),
        driver=driver,
        num_envs=num_envs,
        steps=steps,
        max_steps=limit if type(limit) is int and limit > 0 else None,
        seed=seed,
        call_seconds=call_seconds,
        checks=frozenset(chosen),
    )
    stages = _stages(run, tuple(autoreset_modes), parallel)
    report = Report(game.name())
    VecEnv(game, num_envs, run.device, driver=driver).close()  # what does not compile is no finding
    for index, (name, stage) in enumerate(stages.items()):
        report.merge(stage(run, part(on_progress, index, len(stages))))
        if report.failures:
            if later := list(stages)[index + 1 :]:
                report.notes.setdefault(report.failed[-1], []).append(f"not run after {name}: {', '.join(later)}")
            break
    on_progress(1.0, game.name())
    return report


def _stages(run: GameRun, modes: Iterable[str], parallel: bool) -> dict[str, Stage]:
    """Name -> what runs some of the chosen checks, in the order in which they run."""
    stages: dict[str, Stage] = {}
    if "G00" in run.checks:
        stages["sanitizers"] = _sanitizers
    if run.checks >= RULES:
        stages["rules"] = _rules
    if "G06" in run.checks:
        stages["races"] = _races
    if "G05" in run.checks:
        stages["bitwise equality"] = _ways_to_run
    if run.checks.intersection(CHECKS):
        stages.update({mode: partial(_autoreset_mode, mode) for mode in modes})
        if parallel and run.game.layout.num_agents > 1:
            stages["parallel"] = _parallel
    return stages


def _failed(run: GameRun, check: str, text: str) -> Report:
    return Report(run.game.name(), failures=[Failure(check, GAME_CHECKS[check], text)])


def _sanitizers(run: GameRun, on_progress: OnProgress) -> Report:
    """G00, on the CPU."""
    on_progress(0.0, "sanitizers")
    if not run.game.layout.host:
        reason = "the sanitizers are those of the host, and the game has host = False"
        return Report(run.game.name(), skipped={"G00": reason})
    found = sanitizer_finding(run.game, run.probed_envs, run.steps, run.seed, run.call_seconds)
    return _failed(run, "G00", found) if found else Report(run.game.name(), passed=["G00"])


def _rules(run: GameRun, on_progress: OnProgress) -> Report:
    """G01 to G04: on the CPU in a process of its own, then on the GPU."""
    report, cause, left_out = Report(run.game.name()), None, list[str]()
    devices = list(dict.fromkeys([CPU, run.device] if run.game.layout.host else [run.device]))
    on_progress(0.0, "rules")
    for device in devices:
        play = partial(first_fault, run, device)
        try:
            cause = run_isolated(play, run.call_seconds) if device == CPU else play(lambda call: None)
        except ProcessEnded as error:
            cause = Cause("G01", f"{error}; sanitize=True, or --sanitize, names file and line")
        except DeviceFaultError as error:
            cause = Cause("G01", str(error))
        except (KernelCompileError, CompilerError) as error:  # no host compiler, or a use that only pointers allow
            left_out.append(f"on {device}: {str(error).splitlines()[0]}")
        if cause is not None:
            break
    for check in sorted(RULES):
        if cause is not None and check == cause.check:
            report.merge(_failed(run, *cause))
            break
        if len(left_out) == len(devices):
            report.skipped[check] = "; ".join(left_out)
        elif check == "G04" and (run.max_steps is None or run.max_steps > LONGEST):
            report.skipped[check] = f"the game has no max_steps, or more than {LONGEST:,}"
        else:
            report.passed.append(check)
            if left_out:
                report.notes[check] = left_out
    return report


def _races(run: GameRun, on_progress: OnProgress) -> Report:
    """G06, on the CPU in a process of its own."""
    on_progress(0.0, "races")
    name = run.game.name()
    if not run.game.layout.host:
        return Report(name, skipped={"G06": "races are searched for on the CPU, and the game has host = False"})
    try:
        cause = run_isolated(partial(first_race, run), run.call_seconds)
    except ProcessEnded as error:
        cause = Cause("G01", f"{error}; sanitize=True, or --sanitize, names file and line")
    except (KernelCompileError, CompilerError, ConfigError) as error:
        return Report(name, skipped={"G06": str(error).splitlines()[0]})
    return Report(name, passed=["G06"]) if cause is None else _failed(run, *cause)


def _ways_to_run(run: GameRun, on_progress: OnProgress) -> Report:
    """G05: digests of trajectories must be equal; where they are not, the first difference."""
    game = run.game

    def made(num_envs: int, device: torch.device, **how: Any) -> VecEnv:
        return VecEnv(game, num_envs, device, **{"driver": run.driver if device.type == "cuda" else None, **how})

    def digests(**how: Any) -> torch.Tensor:
        env = made(**how)
        try:
            return trajectory_digest(env, run.seed, run.steps).words.cpu()
        finally:
            env.close()

    def passed(note: str) -> Report:
        return Report(game.name(), passed=["G05"], notes={"G05": [note]})

    same: dict[str, Any] = {"num_envs": run.num_envs, "device": run.device}
    expected, equal = digests(**same), list[str]()
    others = list(ways(run.num_envs, run.device))
    for index, (way, how) in enumerate(others):
        on_progress(index / len(others), f"bitwise equality: {way}")
        if index > 0 and not game.layout.host:
            return passed(f"{equal[0]}; a game with host = False is not bit-reproducible in other ways to run")
        try:
            got = digests(**how)
        except EnvContractError as error:
            return _failed(run, "G05", f"{way}: {error}")
        except KernelCompileError:
            if not how.get("guards"):
                raise
            continue  # G01 says why
        if not got.equal(expected[: len(got)]):
            difference = first_difference(made(**same), made(**how), run.steps, run.seed)
            return _failed(run, "G05", f"{way}: {difference}: {HINTS[_kind(how)]}")
        equal.append(way)
    return passed(", ".join(equal))


HINTS = {
    "order": "a group_sync() is missing, two threads write to one address, or a float sum runs over threads",
    "number": "an environment reads or writes what belongs to another",
}


def _kind(how: dict[str, Any]) -> str:
    return "order" if {"thread_order", "threads_per_env", "driver"} & how.keys() else "number"


def _autoreset_mode(mode: str, run: GameRun, on_progress: OnProgress) -> Report:
    """The checks of a vector environment in one autoreset mode."""
    game, device, checks = run.game, run.device, run.checks.intersection(CHECKS)
    if game.layout.action.mixed:
        reason = "Gymnasium's interface has one action space, but those of the roles differ"
        return Report(mode, skipped=dict.fromkeys(checks, reason))

    def maker(mode: str, **how: Any) -> Callable[[int], GymnasiumVectorEnv]:
        how = {"device": device, "driver": run.driver, "validate": "sync", **how}
        return lambda num_envs: GymnasiumVectorEnv(game, num_envs, autoreset_mode=mode, **how)

    variants: dict[str, dict[str, Any]] = {"NumPy output": {"output": "numpy"}}
    if device.type != "cpu" and game.layout.host:
        variants["on the CPU"] = {"device": "cpu", "driver": None}
    return _of_interface(
        mode,
        check_vector_env(
            maker(mode),
            checks=checks,
            modes={other: maker(other) for other in MODES},
            variants={name: maker(mode, **how) for name, how in variants.items()},
            graph=maker(mode, validate="async"),  # "sync" reads values on the host, which cannot be captured
            state_of=lambda env: env.vec_env,
            seed=run.seed,
            steps=run.steps,
            max_steps=run.max_steps,
            on_progress=lambda fraction, text: on_progress(fraction, f"{mode}: {text}"),
        ),
    )


def _parallel(run: GameRun, on_progress: OnProgress) -> Report:
    """The checks of a PettingZoo ParallelEnv."""
    return _of_interface(
        "parallel",
        check_parallel_env(
            lambda: ParallelEnv(run.game, run.device, driver=run.driver),
            checks=run.checks.intersection(CHECKS),
            seed=run.seed,
            steps=run.steps,
            max_steps=run.max_steps,
            on_progress=lambda fraction, text: on_progress(fraction, f"parallel: {text}"),
        ),
    )


def _of_interface(name: str, report: Report) -> Report:
    return replace(report, failures=[replace(failure, interface=name) for failure in report.failures])
