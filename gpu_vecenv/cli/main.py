"""The command line, a shell around the Python interface: ``gpu-vecenv list | show | new | check | train | …``."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import pettingzoo
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AutoresetMode, VectorEnv
from rich.console import Console
from rich.table import Table

from gpu_vecenv._version import __version__
from gpu_vecenv.bench import command as bench
from gpu_vecenv.check import Report, check_parallel_env, check_vector_env
from gpu_vecenv.check.game import check_game
from gpu_vecenv.cli import doctor
from gpu_vecenv.cli.new import new_game
from gpu_vecenv.cli.options import PROGRAM, merge_dataclasses, parse, parse_game, refuse_arguments
from gpu_vecenv.cli.replay import replay
from gpu_vecenv.cli.train import evaluate, plot, train
from gpu_vecenv.compile.codegen import generate_header
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.engine.tuning import tune
from gpu_vecenv.engine.vec_env import MODES
from gpu_vecenv.envs.registry import GAME_FILE, GAMES, configure, load_game
from gpu_vecenv.errors import (
    CompilerError,
    ConfigError,
    DeviceUnavailableError,
    KernelCompileError,
    NonFiniteError,
    RankLostError,
    nearest,
)

# What wrong arguments or an incomplete machine raise: one line and exit code 2, no traceback.
EXPECTED = (
    ValueError,
    TypeError,
    GymnasiumError,
    DeviceUnavailableError,
    CompilerError,
    KernelCompileError,
    OSError,
    NonFiniteError,
    RankLostError,
)
GAME_COMMANDS = ("show", "check", "train")  # those whose first argument is a game
GYMNASIUM_ID = re.compile(r"/|-v\d+$")
HELP = f"""\
gpu_vecenv {__version__}: multi-agent environments and PPO on the GPU, or on the CPU from the same kernels.

usage: {PROGRAM} COMMAND [options]

  list                    the games, with one line each
  show GAME [options]     the device code generated from a game's declaration
  new NAME [options]      write a small game of your own, with its test, to be changed
  check GAME [options]    check what a game, or any environment of Gymnasium or PettingZoo, promises
  train GAME [options]    train a policy for each role; leaves curve, checkpoints and evaluation in a run folder
  train --resume RUN      go on with a run that was interrupted, as if it had not been
  evaluate RUN [options]  play episodes with a run's policies
  plot RUN... [options]   draw the curves of runs
  replay record GAME|RUN  keep episodes as small files, whose bits are the same wherever they are played again
  replay html FILE...     write a page that shows them in a browser; replay play and replay show check and tell them
  bench [options]         measure steps per second against the memory bandwidth
  tune GAME --num-envs N  measure which lanes per replica and threads per block suit this GPU, and keep the choice
  doctor                  what this machine has: torch, GPU, compilers, drivers; and what to do

GAME is a name, or the path of a Python file that declares one: my_game.py, or my_game.py:MyGame where it has several.
That file is run. Every option of a game is its configuration: {PROGRAM} train tag_gridworld --help
For example:

  {PROGRAM} new my_game
  {PROGRAM} check CartPole-v1
  {PROGRAM} check sisl/pursuit_v5 --parallel
  {PROGRAM} train tag_gridworld --total-steps 2000000 --num-taggers 6
  {PROGRAM} train tag_continuous --num-envs 2000 --device cuda --num-neighbors all
"""


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """Write the declaration, the rules and the test of a small game, to be changed."""

    folder: Path = Path()  # where to; it is made if need be, and no file in it is overwritten


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check."""

    steps: int = param(300, low=10)  # steps of most runs; what happens later stays unseen
    seed: int = param(17, low=0)  # the first of the seeds

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class CheckIdConfig(CheckConfig):
    """What to check, and how it is made."""

    config: str = "{}"  # further arguments of gymnasium.make_vec, or of pettingzoo.make, as JSON
    parallel: bool = False  # the id is one of PettingZoo's parallel environments


@dataclass(frozen=True, kw_only=True)
class CheckGameConfig(CheckConfig):
    """What to check, and where."""

    num_envs: int = param(100, low=2)  # replicas whose bits are compared however the game is run
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works
    parallel: bool = True  # check a game of several agents as PettingZoo's ParallelEnv, too


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Measure which lanes per replica (threads_per_env) and threads per block are the fastest on this GPU, and keep the choice.

    Environments of this game with this configuration take it from then on. No bit depends on it.
    """

    num_envs: int  # replicas; the choice holds for about as many
    config: tuple[str, ...] = ()  # the game's configuration: grid=30 num_taggers=6
    device: str | None = None  # cuda or cuda:1; by default cuda
    driver: str | None = None  # pycuda or cuda_core; by default the first that works


def list_games(arguments: Sequence[str]) -> None:
    """Print the games."""
    refuse_arguments("list", arguments)
    table = Table("game", "roles", "what it is")
    for name, game in sorted(GAMES.items()):
        roles = ", ".join(f"{count} {role}{'s' * (count != 1)}" for role, count in game().roles.items())
        table.add_row(name, roles, (game.__doc__ or "").strip().splitlines()[0])
    Console().print(table)


def show(arguments: Sequence[str]) -> None:
    """Print a game's generated header."""
    game, rest = parse_game("show", arguments)
    print(generate_header(parse(game, f"{PROGRAM} show {arguments[0]}", rest).layout), end="")


def new(arguments: Sequence[str]) -> None:
    """Write a game of one's own."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise ConfigError(f"new needs a name first, {PROGRAM} new my_game; see {PROGRAM} new --help")
    helps = arguments[0].startswith("-")
    config = parse(NewConfig, f"{PROGRAM} new NAME", arguments if helps else arguments[1:])
    declaration, rules, test = new_game(arguments[0], config.folder)
    print(f"wrote {declaration}, {rules} and {test}; now")
    print(f"  edit {rules}, the rules, and {declaration}, what is declared")
    print(f"  {PROGRAM} check {shlex.quote(str(declaration))}")
    print(f"  {PROGRAM} train {shlex.quote(str(declaration))} --total-steps 400000")


def check(arguments: Sequence[str]) -> int:
    """Check a game in all its views, or a registered environment of Gymnasium or PettingZoo; 1 if it fails."""
    if arguments and not GAME_FILE.fullmatch(arguments[0]) and GYMNASIUM_ID.search(arguments[0]):
        settings = parse(CheckIdConfig, f"{PROGRAM} check {arguments[0]}", arguments[1:])
        config = json.loads(settings.config)
        if not isinstance(config, dict):
            raise ConfigError(f"config is {settings.config!r}; expected a JSON object")
        report = _check_id(arguments[0], settings, config)
        Console().print(report)
        return int(bool(report.failures))
    game, rest = parse_game("check", arguments)
    parsed = parse(
        merge_dataclasses("Check", check=CheckGameConfig, game=game), f"{PROGRAM} check {arguments[0]}", rest
    )
    found = check_game(parsed.game, **vars(parsed.check))
    Console().print(found)
    return int(bool(found.failures))


def _check_id(name: str, settings: CheckIdConfig, config: dict[str, Any]) -> Report:
    if settings.parallel:
        try:
            pettingzoo.make("parallel", name, **config).close()  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever an environment raises that lacks something
            raise ConfigError(f"pettingzoo.make: {type(error).__name__}: {error}") from error
        return check_parallel_env(
            lambda: pettingzoo.make("parallel", name, **config), steps=settings.steps, seed=settings.seed
        )
    further: dict[str, Any] = {}

    def maker(**changes: Any) -> Callable[[int], VectorEnv[Any, Any, Any]]:
        return lambda num_envs: gymnasium.make_vec(name, num_envs=num_envs, **{**config, **changes})

    if name.startswith("gpu_vecenv/"):  # by default bad actions are marked on the device, where no error is raised
        config.setdefault("validate", "sync")
        further["modes"] = {mode: maker(autoreset_mode=mode) for mode in MODES}
        further["state_of"] = lambda env: env.unwrapped.vec_env
    elif config.get("vectorization_mode") in ("sync", "async"):  # Gymnasium's own vector envs know all modes
        known = config.get("vector_kwargs", {})
        further["modes"] = {m: maker(vector_kwargs={**known, "autoreset_mode": m}) for m in AutoresetMode}
    return check_vector_env(maker(), steps=settings.steps, seed=settings.seed, **further)


def run_doctor(arguments: Sequence[str]) -> None:
    """Print what was found."""
    refuse_arguments("doctor", arguments)
    sys.exit(doctor.main([]))


def run_bench(arguments: Sequence[str]) -> None:
    """Measure."""
    config = parse(bench.BenchConfig, f"{PROGRAM} bench", arguments)
    if config.game is not None and GAME_FILE.fullmatch(config.game):
        config = dataclasses.replace(config, game=load_game(config.game).name())
    bench.run(config)


def run_tune(arguments: Sequence[str]) -> None:
    """Choose threads_per_env and block."""
    if arguments and arguments[0] in ("-h", "--help"):
        parse(TuneConfig, f"{PROGRAM} tune GAME", arguments)
    kind, rest = parse_game("tune", arguments)
    settings = parse(TuneConfig, f"{PROGRAM} tune {arguments[0]}", rest)
    game = configure(kind, **dict(map(_setting, settings.config)))
    with Console(stderr=True).status("measuring the default") as status:
        found = tune(
            game,
            settings.num_envs,
            settings.device,
            driver=settings.driver,
            on_candidate=lambda one: status.update(
                f"threads_per_env {one.shape.threads_per_env}, block {one.shape.threads_per_block} measured"
            ),
        )
    table = Table("threads_per_env", "threads_per_block", "µs a step", "ratio to default")
    for one in sorted(found.candidates, key=lambda one: one.seconds or float("inf")):
        metrics = ("-", "-")
        if one.seconds is not None and found.default.seconds is not None:
            metrics = (f"{one.seconds * 1e6:,.2f}", f"{one.seconds / found.default.seconds:.3f}")
        words = " (default)" * (one.shape == found.default.shape) + " (kept)" * (one.shape == found.shape)
        table.add_row(str(one.shape.threads_per_env), str(one.shape.threads_per_block), metrics[0], metrics[1] + words)
    Console().print(table)
    for one in found.candidates:
        if one.problem is not None:
            print(
                f"skipped threads_per_env {one.shape.threads_per_env}, block {one.shape.threads_per_block}: {' '.join(one.problem.split()):.300}"
            )
    print(f"kept for {game.name()} with about {settings.num_envs:,} replicas: {found.shape}, in")
    print(f"  {found.path}")


def _setting(text: str) -> tuple[str, Any]:
    """key=value; the value is JSON, or else itself."""
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"config: {text!r}; expected key=value, as in --config grid=30 num_taggers=6")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "list": list_games,
    "show": show,
    "new": new,
    "check": check,
    "train": train,
    "evaluate": evaluate,
    "plot": plot,
    "replay": replay,
    "bench": run_bench,
    "tune": run_tune,
    "doctor": run_doctor,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0; 1 where ``check`` finds a failure; 2 for wrong arguments or a machine that lacks something.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command in GAME_COMMANDS and rest in (["-h"], ["--help"]):
        print(f"usage: {PROGRAM} {command} GAME [options]\n\ngames: {', '.join(sorted(GAMES))}")
        print(f"{PROGRAM} {command} GAME --help tells all options, the game's own configuration among them")
        return 0
    try:
        if command not in COMMANDS:
            raise ConfigError(f"unknown command {command!r}; {nearest(command, COMMANDS)}; see {PROGRAM} --help")
        return COMMANDS[command](rest) or 0
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPECTED as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0
