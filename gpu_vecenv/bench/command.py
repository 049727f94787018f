"""Throughput of games, of training and of interfaces, on the machine it runs on: ``python -m gpu_vecenv.bench --help``.

What is measured lies in modules of this folder: ``games``, ``training``, ``interfaces``, ``against``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
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
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.timing import provenance
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import CapacityError, ConfigError
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.ppo import PPOConfig

SUITE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("tag_gridworld", 2000, {}),
    ("tag_gridworld", 100_000, {}),
    ("tag_gridworld", 1_000_000, {}),
    ("tag_continuous", 100, {}),
    ("tag_continuous", 2000, {}),
    ("tag_continuous", 2000, {"num_taggers": 100, "num_runners": 900}),
    ("cartpole", 100_000, {}),
    ("cartpole", 1_000_000, {}),
    ("acrobot", 100_000, {}),
    ("pendulum", 100_000, {}),
    ("simple_spread", 100_000, {}),
    ("simple_tag", 100_000, {}),
)
NUM_ENVS = {"games": 2000, "training": 2000, "replicas": 100_000, "agents": 100, "baseline": 2000}
# What else may be given with each kind of measurement, beside what goes with all of them.
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
LABELS = {"games": "steps of games"}  # what messages call it


@dataclass(frozen=True)
class BenchConfig:
    """Measure steps of games: fixed random actions ("step"), their draw from logits ("sampling"), both ("sample_and_step").

    Or --sweep: the same over numbers of replicas or agents. Or --training: rollouts and updates end to end, under
    torchrun by all processes together. Or --interface: what a step costs through interfaces and adapters, the host's work
    included, beside the machine's. Or --baseline: other libraries' steps in the same run.

    On a terminal a table is printed; else one JSON line per row, and at last one with device, commit and versions.
    """

    game: str | None = None  # a game's name; without it a fixed suite is run
    num_envs: int | None = None  # replicas; by default 2000, in sweeps up to 100000 of them, or 100 with more agents
    config: str = "{}"  # the game's configuration as JSON (with --game)
    rollout: bool = False  # also steps with policies into the trainer's storage ("rollout")
    sweep: bench_sweep.Sweep | None = None  # sizes: replicas 1, 3, 10, 32 … num_envs; agents 5, 10, 20, 50 … 1000
    plot: Path | None = None  # a picture of the sweep, .png or .svg
    training: bool = False  # trained end to end: --game with its preset, by default WarpDrive's configurations
    num_steps: int | None = None  # steps of a rollout (with --game --training, or --rollout); by default the preset's
    hidden_sizes: tuple[int, ...] | None = None  # units of the policies' hidden layers (likewise)
    num_epochs: int | None = None  # passes over a rollout (with --game --training)
    num_minibatches: int | None = None  # of each pass (with --game --training)
    precision: tuple[Precision, ...] = ("float32",)  # of matrix products (with --training): float32, tf32, bfloat16
    interface: tuple[str, ...] = ()  # gymnasium, or adapters: sb3, torchrl, … ; measured on games of their own
    baseline: bench_baselines.Baseline | None = (
        None  # Gymnasium's vectorised CartPole, or a loop over MPE2's simple_tag
    )
    device: str | None = None  # cpu, cuda, cuda:1; by default cuda if usable
    driver: str | None = None  # pycuda or cuda_core (CUDA only)
    threads_per_env: int | None = None  # lanes per replica (CUDA only)
    compare: Path | None = None  # an earlier --json; tells the ratios, now / then, of env-steps per second
    table: bool = False  # print a table even where standard output is no terminal
    json: Path | None = None  # where to write the rows as well


def run(config: BenchConfig) -> dict[str, Any]:
    """Measure, print each row, and return what was measured.

    Raises:
        ConfigError: Options do not go together, or one of them is wrong; nothing has been measured.
    """
    kind = _kind(config)
    _check(config, kind)
    earlier = bench_compare.read(config.compare) if config.compare else None
    with (
        process_group(config.device)
        if kind == "training"
        else contextlib.nullcontext((World(), config.device)) as place
    ):
        world, own = place
        device = resolve_device(own)
        results: dict[str, Any] = provenance(device)
        measured = _measured(config, kind, device, results)
        as_table, rows = config.table or sys.stdout.isatty(), []
        with bench_table.printing(as_table) if world.rank == 0 else contextlib.nullcontext(lambda row: None) as report:
            for row in measured:
                if earlier:
                    row["ratios"] = earlier.ratios(row)
                rows.append(row)
                report(row)
    if config.sweep:
        results["linear_up_to"] = bench_sweep.linearity(config.sweep, rows)
        if config.plot:
            bench_sweep.draw(config.sweep, rows, results["device"], config.plot)
    if earlier:
        found = sum(row["ratios"] is not None for row in rows)
        results["compared"] = {"file": str(config.compare), "rows": found, "then_now": earlier.differences(results)}
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
        raise ConfigError(f"{' and '.join(chosen)} are different measurements; expected one of them")
    return chosen[0] if chosen else "games"


def _check(config: BenchConfig, kind: str) -> None:
    """Refuse what would be passed over, and what would fail once all has been measured."""
    for name, known in (("sweep", bench_sweep.Sweep), ("baseline", bench_baselines.Baseline)):
        if (value := getattr(config, name)) is not None and value not in get_args(known):
            raise ConfigError(f"{name} is {value!r}; expected {' or '.join(map(repr, get_args(known)))}")
    given = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    for name in given:
        if name not in OPTIONS_OF[kind] | COMMON_OPTIONS | {kind}:
            takers = ", ".join(LABELS.get(other, other) for other in OPTIONS_OF if name in OPTIONS_OF[other])
            raise ConfigError(f"{name} does not go with {LABELS.get(kind, kind)}; it goes with {takers}")
    of_one = OPTIONS_OF[kind] - {"precision"} if kind == "training" else {"num_envs", "config", "plot"}
    lonely = [name for name in given if name in of_one]
    if config.game is None and kind != "baseline" and (lonely or kind == "sweep"):
        raise ConfigError(f"got {', '.join(lonely) or 'sweep'} without a game; expected game as well")
    if kind == "games" and not config.rollout and (lonely := [name for name in given if name in PPO_OPTIONS]):
        raise ConfigError(f"got {', '.join(lonely)} without rollouts; expected rollout or training as well")
    if config.num_envs is not None:
        validate_int("num_envs", config.num_envs, 1)
    if config.plot:
        bench_sweep.check_picture(config.plot)
    bench_interfaces.check_known(config.interface)
    for name in ("json", "plot"):
        path = getattr(config, name)
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ConfigError(f"{name} is {path}; expected a file in a folder that exists")


def _measured(
    config: BenchConfig, kind: str, device: torch.device, results: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows, measured one by one; what they have in common is written into ``results``."""
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
        sizes = _sizes(config)
        learnt = [_ppo(config, game) if config.rollout else None for game, _ in sizes]
        bandwidth = bench_games.copy_bandwidth(device)
        results["copy_bytes_per_s"] = round(bandwidth)
        machine = device, config.driver, config.threads_per_env
        for (game, num_envs), ppo in zip(sizes, learnt, strict=True):
            try:
                row = bench_games.measure(game, num_envs, bandwidth, *machine)
            except CapacityError as error:
                if kind != "sweep" or (game, num_envs) == sizes[0]:
                    raise
                results["stopped"] = str(error)  # what is smaller has been measured
                return
            if ppo:
                row |= bench_games.measure_rollout(game, num_envs, ppo, *machine)
            yield row


def _sizes(config: BenchConfig) -> list[tuple[Env, int]]:
    """Games and replicas of the rows, all of them checked before the first is measured."""
    if config.game is None:
        return [(configure(name, **settings), num_envs) for name, num_envs, settings in SUITE]
    game, num_envs = _game(config), config.num_envs or NUM_ENVS[config.sweep or "games"]
    if config.sweep == "replicas":
        return [(game, size) for size in bench_sweep.replicas(num_envs)]
    if config.sweep == "agents":
        return [(bench_sweep.with_agents(game, size), num_envs) for size in bench_sweep.AGENTS]
    return [(game, num_envs)]


def _game(config: BenchConfig) -> Env:
    settings = json.loads(config.config)
    if not isinstance(settings, dict):
        raise ConfigError(f"config is {config.config!r}; expected a JSON object")
    assert config.game is not None
    return configure(config.game, **settings)


def _ppo(config: BenchConfig, game: Env) -> PPOConfig:
    """The game's preset, changed by what was given."""
    preset = {key: value for key, value in game.preset.items() if key not in ("num_envs", "precision")}
    given = {key: getattr(config, key) for key in PPO_OPTIONS if getattr(config, key) is not None}
    return PPOConfig(**{**preset, **given, "total_steps": 10**12})
