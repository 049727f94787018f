"""``python -m gpu_vecenv.bench`` and ``gpu-vecenv bench``: throughput of games, training and interfaces.

The measurements are in ``games``, ``training``, ``interfaces`` and ``baselines``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from gpu_vecenv.bench import baselines as bench_baselines
from gpu_vecenv.bench import compare as bench_compare
from gpu_vecenv.bench import games as bench_games
from gpu_vecenv.bench import interfaces as bench_interfaces
from gpu_vecenv.bench import sweep as bench_sweep
from gpu_vecenv.bench import table as bench_table
from gpu_vecenv.bench import training as bench_training
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.config import parse_json_object
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import GAME_FILE, configure, load_game
from gpu_vecenv.errors import CapacityError, ConfigError
from gpu_vecenv.progress import OnProgress, ProgressDisplay, no_progress
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.ppo import PPOConfig

MANY_TAGGERS = {"num_taggers": 999, "full_observation": False}
# By type of device: game, num_envs and configuration of each row without --game.
SUITES: dict[str, tuple[tuple[str, int, dict[str, Any]], ...]] = {
    "cuda": (
        ("tag_gridworld", 2000, {}),
        ("tag_gridworld", 100_000, {}),
        ("tag_gridworld", 1_000_000, {}),
        ("tag_gridworld", 2000, MANY_TAGGERS),
        ("tag_continuous", 100, {}),
        ("tag_continuous", 2000, {}),
        ("tag_continuous", 20_000, {}),
        ("tag_continuous", 2000, {"num_taggers": 100, "num_runners": 900}),
        ("tag_continuous", 100, {"num_taggers": 1000, "num_runners": 9000}),
        ("cartpole", 100_000, {}),
        ("cartpole", 1_000_000, {}),
        ("acrobot", 100_000, {}),
        ("pendulum", 100_000, {}),
        ("simple_spread", 100_000, {}),
        ("simple_tag", 100_000, {}),
        ("overcooked", 100_000, {}),
        ("pursuit", 100_000, {}),
        ("warehouse", 100_000, {}),
    ),
    "cpu": (
        ("tag_gridworld", 2000, {}),
        ("tag_continuous", 100, {}),
        ("cartpole", 10_000, {}),
        ("simple_spread", 1000, {}),
    ),
}
DRIVERS = {"pycuda": ("PyCUDA", "pycuda"), "cuda_core": ("cuda.core", "cuda-core")}  # name and package of each
NUM_ENVS = {"games": 2000, "training": 2000, "environments": 100_000, "agents": 100, "baseline": 2000}
# Options of each kind of measurement, besides COMMON_OPTIONS.
GAME_OPTIONS = {"game", "num_envs", "config"}
PPO_OPTIONS = {"num_steps", "hidden_sizes", "num_epochs", "num_minibatches"}
OPTIONS_OF = {
    "games": GAME_OPTIONS | {"driver", "threads_per_env", "rollout", "num_steps", "hidden_sizes"},
    "sweep": GAME_OPTIONS | {"driver", "threads_per_env", "plot"},
    "training": GAME_OPTIONS | PPO_OPTIONS | {"precision"},
    "interface": set(),
    "baseline": {"num_envs"},
}
COMMON_OPTIONS = {"device", "json", "table", "compare"}
LABELS = {"games": "steps of games"}  # names of kinds in messages


@dataclass(frozen=True)
class BenchConfig:
    """Measure games: steps with given actions ("step"), sampling from logits ("sampling"), both ("sample_and_step").

    With --sweep: the same for many numbers of environments or agents. With --training: rollouts and updates end to end,
    under torchrun on all processes together. With --interface: steps through interfaces and adapters, including the
    work of the host, and of VecEnv itself. With --baseline: steps of other libraries in the same run.

    Prints a table on a terminal, else one JSON line per row, and finally one with device, commit and versions.
    """

    game: str | None = None  # name of a game, or a file that declares it; None: a fixed suite
    num_envs: int | None = None  # environments; None: 2000, in sweeps up to 100000, with --sweep agents 100
    config: str = "{}"  # the game's configuration as JSON (with --game)
    rollout: bool = False  # also measure steps with policies and rollout storage ("rollout")
    sweep: bench_sweep.Sweep | None = None  # environments 1, 3, 10, 32 ... num_envs; or agents 5, 10, 20, 50 ... 1000
    plot: Path | None = None  # figure of the sweep, .png or .svg; None: none
    training: bool = False  # train --game with its preset, by default WarpDrive's configurations
    num_steps: int | None = None  # steps per rollout (with --game --training, or --rollout); None: preset
    hidden_sizes: tuple[int, ...] | None = None  # units of the policies' hidden layers (as num_steps); None: preset
    num_epochs: int | None = None  # passes over a rollout (with --game --training); None: preset
    num_minibatches: int | None = None  # minibatches per pass (with --game --training); None: preset
    precision: tuple[Precision, ...] = ("float32",)  # precision of matrix products (with --training)
    interface: tuple[str, ...] = ()  # gymnasium, batched, or adapters: sb3, torchrl, ...; with fixed games
    baseline: bench_baselines.Baseline | None = None  # Gymnasium's vectorised CartPole, or MPE2's simple_tag
    device: str | None = None  # cpu, cuda or cuda:1; None: cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); None: the first that works
    threads_per_env: int | None = None  # threads that run one environment (CUDA only); None: tuned, or the default
    compare: Path | None = None  # an earlier --json; adds the ratios, now / then, of env-steps per second; None: none
    table: bool = False  # print a table even if standard output is not a terminal
    json: Path | None = None  # file that also receives the rows; None: none


def run(config: BenchConfig) -> dict[str, Any]:
    """Measure, print each row, and return what was measured.

    Raises:
        ConfigError: Options cannot be combined, or one is wrong; nothing has been measured.
    """
    kind = _kind(config)
    _check(config, kind)
    earlier = bench_compare.read(config.compare) if config.compare else None
    with (
        process_group(config.device) if kind == "training" else contextlib.nullcontext((World(), config.device)) as (
            world,
            name,
        )
    ):
        device = resolve_device(name)
        results: dict[str, Any] = provenance(device)
        measured = _measured(config, kind, device, results)
        as_table, rows = config.table or sys.stdout.isatty(), []
        with contextlib.ExitStack() as displays:
            on_progress: OnProgress = no_progress
            report: Callable[[bench_table.Row], None] | None = None
            if world.rank == 0:
                if not sys.stdout.isatty():  # a terminal shows the rows as they come
                    on_progress = displays.enter_context(ProgressDisplay("bench"))
                report = displays.enter_context(bench_table.printing(as_table))
            for row in _reported(measured, _num_rows(config, kind, device), on_progress):
                if earlier:
                    row["ratios"] = earlier.ratios(row)
                rows.append(row)
                if report is not None:
                    report(row)
    if config.sweep:
        results["linear_up_to"] = bench_sweep.linearity(config.sweep, rows)
        if config.plot:
            bench_sweep.draw(config.sweep, rows, results["device"], config.plot)
    if earlier:
        compared = sum(row["ratios"] is not None for row in rows)
        results["compared"] = {"file": str(config.compare), "rows": compared, "then_now": earlier.differences(results)}
    if world.rank == 0:
        if as_table:
            bench_table.print_summary(results, config.sweep)
        else:
            print(json.dumps(results))
    results["rows"] = rows
    if world.rank == 0 and config.json:
        config.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _kind(config: BenchConfig) -> str:
    chosen = [name for name in OPTIONS_OF if name != "games" and getattr(config, name)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are different measurements; choose one")
    return chosen[0] if chosen else "games"


def _check(config: BenchConfig, kind: str) -> None:
    """Raise ConfigError for options that would be ignored, or would fail only after the measurement."""
    for name, known in (("sweep", bench_sweep.Sweep), ("baseline", bench_baselines.Baseline)):
        if (value := getattr(config, name)) is not None and value not in get_args(known):
            raise ConfigError(f"{name} is {value!r}; expected {' or '.join(map(repr, get_args(known)))}")
    given = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    for name in given:
        if name not in OPTIONS_OF[kind] | COMMON_OPTIONS | {kind}:
            kinds = ", ".join(LABELS.get(other, other) for other in OPTIONS_OF if name in OPTIONS_OF[other])
            raise ConfigError(f"{name} cannot be combined with {LABELS.get(kind, kind)}; it is an option of {kinds}")
    of_one = OPTIONS_OF[kind] - {"precision"} if kind == "training" else {"num_envs", "config", "plot"}
    needing_game = [name for name in given if name in of_one]
    if config.game is None and kind != "baseline" and (needing_game or kind == "sweep"):
        raise ConfigError(f"{', '.join(needing_game) or 'sweep'} needs a game: give game as well")
    of_policies = [name for name in given if name in PPO_OPTIONS]
    if kind == "games" and not config.rollout and of_policies:
        raise ConfigError(f"{', '.join(of_policies)} needs rollouts: give rollout or training as well")
    if config.num_envs is not None:
        validate_int("num_envs", config.num_envs, 1)
    if config.plot:
        bench_sweep.check_figure(config.plot)
    bench_interfaces.check_known(config.interface)
    for name in ("json", "plot"):
        path = getattr(config, name)
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ConfigError(f"{name} is {path}; expected a file in a folder that exists")


def _measured(
    config: BenchConfig, kind: str, device: torch.device, results: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure and yield the rows one by one; what they have in common is stored in ``results``."""
    if kind == "interface":
        for name in config.interface:
            yield from bench_interfaces.measure(name, device)
    elif kind == "baseline":
        assert config.baseline is not None
        yield from bench_baselines.measure(config.baseline, config.num_envs or NUM_ENVS[kind], device)
    elif kind == "training":
        results["processes"] = World.current().size
        if config.game is None:
            yield from bench_training.measure(device, config.precision)
        else:
            game, num_envs = _game(config), config.num_envs or NUM_ENVS[kind]
            yield from bench_training.measure_game(game, num_envs, _ppo(config, game), device, config.precision)
    else:
        sizes = _sizes(config, device)
        ppo_configs = [_ppo(config, game) if config.rollout else None for game, _ in sizes]
        bandwidth = bench_games.copy_bandwidth(device)
        results["copy_bytes_per_s"] = round(bandwidth)
        if driver := FunctionManager(device, config.driver).backend.driver_name:
            name, package = DRIVERS[driver]
            results["driver"] = f"{name} {importlib.metadata.version(package)}"
        execution = device, config.driver, config.threads_per_env
        for (game, num_envs), ppo in zip(sizes, ppo_configs, strict=True):
            try:
                row = bench_games.measure(game, num_envs, bandwidth, *execution)
            except CapacityError as error:
                if kind != "sweep" or (game, num_envs) == sizes[0]:
                    raise
                results["stopped"] = str(error)  # smaller sizes have been measured
                return
            if ppo:
                row |= bench_games.measure_rollout(game, num_envs, ppo, *execution)
            yield row


def _num_rows(config: BenchConfig, kind: str, device: torch.device) -> int:
    """The rows of ``_measured``, unless a size does not fit in memory."""
    if kind == "interface":
        return sum(bench_interfaces.num_rows(name) for name in config.interface)
    if kind == "training":
        return len(config.precision) if config.game else bench_training.num_rows(config.precision)
    return 1 if kind == "baseline" else len(_sizes(config, device))


def _reported(rows: Iterator[dict[str, Any]], count: int, on_progress: OnProgress) -> Iterator[dict[str, Any]]:
    """The rows, usually ``count``; each is reported before it is measured."""
    measured = 0
    on_progress(0.0, f"row 1 of {count}")
    for row in rows:
        yield row
        measured += 1
        if measured < count:
            on_progress(measured / count, f"row {measured + 1} of {count}")
    on_progress(1.0, f"{measured} rows")


def _sizes(config: BenchConfig, device: torch.device) -> list[tuple[Env, int]]:
    """Game and number of environments of each row, all checked before the first is measured."""
    if config.game is None:
        return [
            (bench_games.compared_game(name, **settings), num_envs) for name, num_envs, settings in SUITES[device.type]
        ]
    game, num_envs = _game(config), config.num_envs or NUM_ENVS[config.sweep or "games"]
    if config.sweep == "environments":
        return [(game, size) for size in bench_sweep.environment_counts(num_envs)]
    if config.sweep == "agents":
        return [(bench_sweep.with_agents(game, size), num_envs) for size in bench_sweep.AGENTS]
    return [(game, num_envs)]


def _game(config: BenchConfig) -> Env:
    settings = parse_json_object("config", config.config)
    assert config.game is not None
    kind = load_game(config.game) if GAME_FILE.fullmatch(config.game) else config.game
    return configure(kind, **settings)


def _ppo(config: BenchConfig, game: Env) -> PPOConfig:
    """The game's preset with the options that were given."""
    preset = {key: value for key, value in game.own_preset.items() if key not in ("num_envs", "precision")}
    given = {key: getattr(config, key) for key in PPO_OPTIONS if getattr(config, key) is not None}
    return PPOConfig(**{**preset, **given, "total_steps": 10**12})
