"""Lanes per replica and threads per block, chosen by measurement; what is chosen changes speed only, never a bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_vecenv.compile.backends import SMALL_TEAMS, TEAMS, TeamShape
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import count
from gpu_vecenv.engine.timing import captured, seconds
from gpu_vecenv.engine.tuning_cache import tuning_path
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import Game, configure
from gpu_vecenv.errors import DeviceFaultError, DeviceUnavailableError, KernelCompileError
from gpu_vecenv.files import replace_file

TICKS = 20  # timed together, in one captured graph
BLOCKS = (64, 128, 256)  # threads, tried for teams that share a block
GAIN = 0.03  # of the default's time: what another choice must save, so that noise does not choose


@dataclass(frozen=True)
class Candidate:
    """A team and a block, as measured.

    ``seconds`` is the time of one tick; None where it could not be run, for the reason that ``problem`` tells.
    """

    shape: TeamShape
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Tuning:
    """What was measured, and what is kept in the file ``path``: ``shape``, which may be the ``default``."""

    shape: TeamShape
    default: Candidate
    candidates: tuple[Candidate, ...]  # the default first
    path: Path


def tune(
    game: Game,
    num_envs: int,
    device: str | torch.device | None = None,
    *,
    driver: str | None = None,
    on_candidate: Callable[[Candidate], None] | None = None,
) -> Tuning:
    """Measure teams and blocks around the default, and keep the fastest for environments made later.

    Each is timed on ticks with random actions in a captured graph; what another choice saves must be at least 3% of the
    default's time. The choice is kept in a file beside the compiled kernels, for this version of the library, this
    game with this configuration, this GPU and about as many replicas. ``VecEnv`` with neither ``team`` nor ``block``
    takes it from there. Bits never depend on it. A choice that was kept before is measured anew and replaced.

    Args:
        game: A registered name, an Env class, or an Env.
        num_envs: Replicas, at least 1.
        device: "cuda", "cuda:1"; None takes cuda if usable.
        driver: "pycuda" or "cuda_core"; None takes the first that works.
        on_candidate: Called with each candidate once it has been measured, or could not be.

    Raises:
        DeviceUnavailableError: The device is the host, where there is nothing to choose, or cannot be used.
        TypeError, ValueError, ConfigError: An argument is wrong.
        CapacityError: The replicas do not fit in memory.
        CompilerError, KernelCompileError, DeviceFaultError: The default itself does not compile or run.
        OSError: The choice cannot be written.
    """
    game, num_envs = configure(game), count("num_envs", num_envs, 1)
    backend = FunctionManager(device, driver).backend
    if backend.hardware is None:
        raise DeviceUnavailableError(
            f"tune: the device is {backend.device}, where one thread runs a replica and there are no teams to choose; "
            'expected a GPU: device="cuda" on a machine that has one'
        )
    default = TeamShape.of(backend.team(game.num_agents))
    found: dict[TeamShape, Candidate] = {}
    for shape in neighbours(default):
        try:
            found[shape] = Candidate(shape, _tick_seconds(game, num_envs, backend.device, driver, shape))
        except (KernelCompileError, DeviceFaultError) as error:  # too many registers, too much shared memory
            if shape == default or backend.fault is not None:
                raise
            found[shape] = Candidate(shape, None, str(error))
        if on_candidate is not None:
            on_candidate(found[shape])
    # It was the first: perhaps the GPU's clocks were still low then.
    again = _tick_seconds(game, num_envs, backend.device, driver, default)
    found[default] = Candidate(default, min(again, found[default].seconds or again))
    chosen, path = choice(found.values(), default), tuning_path(game, num_envs, backend.hardware)
    record = {
        "team": chosen.team,
        "block": chosen.block,
        "game": repr(game),
        "num_envs": num_envs,
        "device": backend.hardware,
        "measured": [
            {"team": c.shape.team, "block": c.shape.block, "seconds": c.seconds, "problem": c.problem}
            for c in found.values()
        ],
    }
    replace_file(path, json.dumps(record, indent=1).encode())
    return Tuning(chosen, found[default], tuple(found.values()), path)


def neighbours(default: TeamShape) -> list[TeamShape]:
    """The default, and teams of a quarter, a half and the double of its lanes, with the blocks that they may have."""
    wanted = [default.team, *(default.team * part // 4 for part in (1, 2, 8))]
    teams = dict.fromkeys(next((team for team in TEAMS if team >= lanes), 0) for lanes in wanted if lanes > 0)
    blocks = {team: BLOCKS if team in SMALL_TEAMS else (team,) for team in teams if team}
    shapes = [TeamShape(team, block) for team in blocks for block in blocks[team]]
    return [default, *(shape for shape in shapes if shape != default)]


def choice(candidates: Iterable[Candidate], default: TeamShape) -> TeamShape:
    """The fastest, if it saves enough of the default's time; else the default, which must be among the candidates."""
    times = {one.shape: one.seconds for one in candidates if one.seconds is not None}
    fastest = min(times, key=lambda shape: times[shape])
    return fastest if times[fastest] <= (1 - GAIN) * times[default] else default


def _tick_seconds(game: Env, num_envs: int, device: torch.device, driver: str | None, shape: TeamShape) -> float:
    """Time of one tick with random actions."""
    env = VecEnv(game, num_envs, device, driver=driver, team=shape.team, block=shape.block)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            slab, actions = env.slab(), []
            env.reset(seed=1, out=slab)
            for _ in range(TICKS):
                actions.append(env.sample_actions())
                env.step(actions[-1], out=slab)

            def ticks() -> None:
                for action in actions:  # in other states others are forbidden
                    env.step(env.sample_actions() if game.masks_actions else action, out=slab)

            return seconds(captured(ticks, device), device) / TICKS
    finally:
        env.close()
