"""Choice of threads_per_env and threads_per_block by measurement. It affects speed only; results are bitwise equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
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
from gpu_vecenv.progress import OnProgress, no_progress

STEPS = 20  # timed together in one captured graph
BLOCKS = (64, 128, 256)  # threads_per_block tried for groups that share a block
MIN_SPEEDUP = 0.03  # minimum gain over the default, as a fraction of its time; smaller ones may be noise


@dataclass(frozen=True)
class Candidate:
    """A group shape and its measurement.

    ``seconds`` is the time of one step; None if it could not be run, for the reason in ``problem``.
    """

    shape: GroupShape
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Tuning:
    """The measurements, and the ``shape`` stored in the file ``path``, which may be the default."""

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
    on_progress: OnProgress = no_progress,
) -> Tuning:
    """Measure group shapes around the default and store the fastest for environments created later.

    Each is timed on steps with random actions in a captured graph. Another shape than the default is chosen if it saves
    at least 3% of the default's time. The result is stored beside the compiled kernels, for this version of the
    library, this game and configuration, this GPU and roughly this number of environments; an existing result is
    replaced. ``VecEnv`` uses it if neither ``threads_per_env`` nor ``threads_per_block`` is given. Results of
    environments do not depend on it.

    Args:
        game: A registered name, an Env class, or an Env.
        num_envs: Number of environments, at least 1.
        device: "cuda", "cuda:1"; None takes cuda if usable.
        driver: "pycuda" or "cuda_core"; None takes the first that works.
        on_progress: Called before each measurement with the fraction that is done and what is measured.

    Raises:
        DeviceUnavailableError: The device is the host, where there is nothing to tune, or cannot be used.
        TypeError, ValueError, ConfigError: An argument is wrong.
        CapacityError: The environments do not fit in memory.
        CompilerError, KernelCompileError, DeviceFaultError: The default does not compile or run.
        OSError: The result cannot be written.
    """
    game, num_envs = configure(game), validate_int("num_envs", num_envs, 1)
    backend = FunctionManager(device, driver).backend
    if backend.processor_name is None:
        raise DeviceUnavailableError(
            f'tune: the device is {backend.device}, where one thread runs an environment; expected a GPU, device="cuda"'
        )
    default = GroupShape.of(backend.default_threads_per_env(game.layout.num_agents))
    found: dict[GroupShape, Candidate] = {}
    shapes = candidate_shapes(default)
    for index, shape in enumerate(shapes):
        on_progress(index / (len(shapes) + 1), str(shape))
        try:
            found[shape] = Candidate(shape, _step_seconds(game, num_envs, backend.device, driver, shape))
        except (KernelCompileError, DeviceFaultError) as error:  # too many registers, too much shared memory
            if shape == default or backend.fault is not None:
                raise
            found[shape] = Candidate(shape, None, str(error))
    # Measured again: the GPU's clocks may have been low during the first measurement.
    on_progress(len(shapes) / (len(shapes) + 1), f"{default} again")
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
    on_progress(1.0, str(chosen))
    return Tuning(chosen, found[default], tuple(found.values()), path)


def candidate_shapes(default: GroupShape) -> list[GroupShape]:
    """The default, and groups of a quarter, half and twice its threads, each with the block sizes that it may have."""
    wanted = [default.threads_per_env, *(default.threads_per_env * part // 4 for part in (1, 2, 8))]
    sizes = dict.fromkeys(next((size for size in GROUP_SIZES if size >= least), 0) for least in wanted if least > 0)
    blocks = {size: BLOCKS if size in GROUP_SIZES_WITHIN_WARP else (size,) for size in sizes if size}
    shapes = [GroupShape(size, block) for size in blocks for block in blocks[size]]
    return [default, *(shape for shape in shapes if shape != default)]


def choose(candidates: Iterable[Candidate], default: GroupShape) -> GroupShape:
    """The fastest if it saves enough time, else the default, which must be among the candidates."""
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
                for action in actions:  # replays visit other states, with other action masks
                    env.step(env.sample_actions() if game.layout.masks_actions else action, out=buffers)

            return seconds(captured(steps, device), device) / STEPS
    finally:
        env.close()
