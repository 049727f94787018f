"""Lanes per replica and threads per threads_per_block, chosen by measurement; what is chosen changes speed only, never a bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_vecenv.compile.backends import GROUP_SIZES, GROUP_SIZES_WITHIN_WARP, GroupShape
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.timing import captured, seconds
from gpu_vecenv.engine.tuning_cache import tuning_path
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import Game, configure
from gpu_vecenv.errors import DeviceFaultError, DeviceUnavailableError, KernelCompileError
from gpu_vecenv.files import replace_file

STEPS = 20  # timed together, in one captured graph
BLOCKS = (64, 128, 256)  # threads, tried for group_sizes that share a threads_per_block
MIN_SPEEDUP = 0.03  # of the default's time: what another choose must save, so that noise does not choose


@dataclass(frozen=True)
class Candidate:
    """A threads_per_env and a threads_per_block, as measured.

    ``seconds`` is the time of one step; None where it could not be run, for the reason that ``problem`` tells.
    """

    shape: GroupShape
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Tuning:
    """What was measured, and what is kept in the file ``path``: ``shape``, which may be the ``default``."""

    shape: GroupShape
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
    """Measure group_sizes and blocks around the default, and keep the fastest for environments made later.

    Each is timed on steps with random actions in a captured graph; what another choose saves must be at least 3% of the
    default's time. The choose is kept in a file beside the compiled kernels, for this version of the library, this
    game with this configuration, this GPU and about as many replicas. ``VecEnv`` with neither ``threads_per_env`` nor ``threads_per_block``
    takes it from there. Bits never depend on it. A choose that was kept before is measured anew and replaced.

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
        OSError: The choose cannot be written.
    """
    game, num_envs = configure(game), validate_int("num_envs", num_envs, 1)
    backend = FunctionManager(device, driver).backend
    if backend.processor_name is None:
        raise DeviceUnavailableError(
            f"tune: the device is {backend.device}, where one thread runs a replica and there are no group_sizes to choose; "
            'expected a GPU: device="cuda" on a machine that has one'
        )
    default = GroupShape.of(backend.default_threads_per_env(game.layout.num_agents))
    found: dict[GroupShape, Candidate] = {}
    for shape in candidate_shapes(default):
        try:
            found[shape] = Candidate(shape, _step_seconds(game, num_envs, backend.device, driver, shape))
        except (KernelCompileError, DeviceFaultError) as error:  # too many registers, too much shared memory
            if shape == default or backend.fault is not None:
                raise
            found[shape] = Candidate(shape, None, str(error))
        if on_candidate is not None:
            on_candidate(found[shape])
    # It was the first: perhaps the GPU's clocks were still low then.
    again = _step_seconds(game, num_envs, backend.device, driver, default)
    found[default] = Candidate(default, min(again, found[default].seconds or again))
    chosen, path = choose(found.values(), default), tuning_path(game, num_envs, backend.processor_name)
    record = {
        "threads_per_env": chosen.threads_per_env,
        "threads_per_block": chosen.threads_per_block,
        "game": repr(game),
        "num_envs": num_envs,
        "device": backend.processor_name,
        "measured": [
            {
                "threads_per_env": c.shape.threads_per_env,
                "threads_per_block": c.shape.threads_per_block,
                "seconds": c.seconds,
                "problem": c.problem,
            }
            for c in found.values()
        ],
    }
    replace_file(path, json.dumps(record, indent=1).encode())
    return Tuning(chosen, found[default], tuple(found.values()), path)


def candidate_shapes(default: GroupShape) -> list[GroupShape]:
    """The default, and group_sizes of a quarter, a half and the double of its lanes, with the blocks that they may have."""
    wanted = [default.threads_per_env, *(default.threads_per_env * part // 4 for part in (1, 2, 8))]
    group_sizes = dict.fromkeys(
        next((threads_per_env for threads_per_env in GROUP_SIZES if threads_per_env >= lanes), 0)
        for lanes in wanted
        if lanes > 0
    )
    blocks = {
        threads_per_env: BLOCKS if threads_per_env in GROUP_SIZES_WITHIN_WARP else (threads_per_env,)
        for threads_per_env in group_sizes
        if threads_per_env
    }
    shapes = [
        GroupShape(threads_per_env, threads_per_block)
        for threads_per_env in blocks
        for threads_per_block in blocks[threads_per_env]
    ]
    return [default, *(shape for shape in shapes if shape != default)]


def choose(candidates: Iterable[Candidate], default: GroupShape) -> GroupShape:
    """The fastest, if it saves enough of the default's time; else the default, which must be among the candidates."""
    times = {one.shape: one.seconds for one in candidates if one.seconds is not None}
    fastest = min(times, key=lambda shape: times[shape])
    return fastest if times[fastest] <= (1 - MIN_SPEEDUP) * times[default] else default


def _step_seconds(game: Env, num_envs: int, device: torch.device, driver: str | None, shape: GroupShape) -> float:
    """Time of one step with random actions."""
    env = VecEnv(
        game,
        num_envs,
        device,
        driver=driver,
        threads_per_env=shape.threads_per_env,
        threads_per_block=shape.threads_per_block,
    )
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            buffers, actions = env.step_buffers(), []
            env.reset(seed=1, out=buffers)
            for _ in range(STEPS):
                actions.append(env.sample_actions())
                env.step(actions[-1], out=buffers)

            def steps() -> None:
                for action in actions:  # in other states others are forbidden
                    env.step(env.sample_actions() if game.layout.masks_actions else action, out=buffers)

            return seconds(captured(steps, device), device) / STEPS
    finally:
        env.close()
