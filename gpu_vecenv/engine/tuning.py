"""Choice of threads_per_env, threads_per_block and fuse_sampling by measurement; it affects speed only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv.compile.backends import GROUP_SIZES, GROUP_SIZES_WITHIN_WARP, GroupShape
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.engine.random_play import UniformParameters
from gpu_vecenv.engine.sampler import Sampler
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
    """A way to launch and its measurement.

    ``seconds`` is the time of one step, with given actions, or with ``fuse_sampling`` of one that draws them, by one
    kernel or two; None if it could not be run, for the reason in ``problem``.
    """

    shape: GroupShape
    seconds: float | None
    problem: str | None = None
    fuse_sampling: bool | None = None

    def __str__(self) -> str:
        return f"{self.shape}{'' if self.fuse_sampling is None else f', {sampling_name(self.fuse_sampling)}'}"


def sampling_name(fused: bool) -> str:
    """Whether sampling and step are fused, in words."""
    return f"sampling and step in {'one kernel' if fused else 'two kernels'}"


@dataclass(frozen=True)
class Tuning:
    """The measurements, and what is stored in the file ``path``, ``shape`` and ``fuse_sampling``: maybe the default."""

    shape: GroupShape
    default: Candidate
    candidates: tuple[Candidate, ...]  # the default first
    fuse_sampling: bool
    sampling: tuple[Candidate, ...]  # with ``shape``; the default first
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

    Each is timed on steps with random actions in a captured graph; then, with the chosen shape, steps that draw their
    actions (``Sampler.step``), by one kernel and by two. Another way than the default is chosen if it saves at least 3%
    of the default's time. The result is stored beside the compiled kernels, for this version of the library, this game
    and configuration, this GPU and roughly this number of environments; an existing result is replaced. ``VecEnv`` uses
    it if neither ``threads_per_env`` nor ``threads_per_block`` is given, and ``fuse_sampling`` of it unless that is
    given. Results of environments do not depend on it.

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
    default = GroupShape.of(backend.default_threads_per_env(game.layout.num_agents, game.layout.largest_array))
    shapes = candidate_shapes(default)
    done, count = 0, len(shapes) + 4  # the shapes, one and two kernels to sample and step, both defaults again

    def measured(candidates: Sequence[Candidate], times: Callable[[VecEnv], float]) -> tuple[Candidate, ...]:
        """The candidates with their times; the first is the default, which must run."""
        found = []
        # The default again: the GPU's clocks may have been low during the first measurement.
        for index, one in enumerate([*candidates, candidates[0]]):
            nonlocal done
            on_progress(done / count, f"{one}{' again' * (index == len(candidates))}")
            done += 1
            try:
                with _environment(game, num_envs, backend.device, driver, one) as env:
                    found.append(dataclasses.replace(one, seconds=times(env)))
            except (KernelCompileError, DeviceFaultError) as error:  # too many registers, too much shared memory
                if one == candidates[0] or backend.fault is not None:
                    raise
                found.append(dataclasses.replace(one, problem=str(error)))
        first, *others, again = found
        assert first.seconds is not None and again.seconds is not None
        return dataclasses.replace(first, seconds=min(first.seconds, again.seconds)), *others

    candidates = measured([Candidate(shape, None) for shape in shapes], _step_seconds)
    shape = choose(candidates).shape
    with _environment(game, num_envs, backend.device, driver, Candidate(shape, None)) as env:
        fused = env.fuse_sampling
    ways = [Candidate(shape, None, fuse_sampling=way) for way in (fused, not fused)]
    sampling = measured(ways, _sample_and_step_seconds)
    fuse_sampling = bool(choose(sampling).fuse_sampling)
    path = tuning_path(game, num_envs, backend.processor_name)
    record = {
        "threads_per_env": shape.threads_per_env,
        "threads_per_block": shape.threads_per_block,
        "fuse_sampling": fuse_sampling,
        "game": repr(game),
        "num_envs": num_envs,
        "device": backend.processor_name,
        "measured": [_record(one) for one in (*candidates, *sampling)],
    }
    replace_file(path, json.dumps(record, indent=1).encode())
    on_progress(1.0, str(Candidate(shape, None, fuse_sampling=fuse_sampling)))
    return Tuning(shape, candidates[0], candidates, fuse_sampling, sampling, path)


def candidate_shapes(default: GroupShape) -> list[GroupShape]:
    """The default, and groups of a quarter, half and twice its threads, each with the block sizes that it may have."""
    wanted = [default.threads_per_env, *(default.threads_per_env * part // 4 for part in (1, 2, 8))]
    sizes = dict.fromkeys(next((size for size in GROUP_SIZES if size >= least), 0) for least in wanted if least > 0)
    blocks = {size: BLOCKS if size in GROUP_SIZES_WITHIN_WARP else (size,) for size in sizes if size}
    shapes = [GroupShape(size, block) for size in blocks for block in blocks[size]]
    return [default, *(shape for shape in shapes if shape != default)]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest if it saves enough of the time of the default, which is the first; else the default."""
    default = candidates[0]
    assert default.seconds is not None
    times = {one: one.seconds for one in candidates if one.seconds is not None}
    fastest = min(times, key=lambda one: times[one])
    return fastest if times[fastest] <= (1 - MIN_SPEEDUP) * default.seconds else default


def _record(candidate: Candidate) -> dict[str, Any]:
    """A measurement in the file."""
    shape = candidate.shape
    return {
        "threads_per_env": shape.threads_per_env,
        "threads_per_block": shape.threads_per_block,
        "fuse_sampling": candidate.fuse_sampling,
        "seconds": candidate.seconds,
        "problem": candidate.problem,
    }


@contextlib.contextmanager
def _environment(
    game: Env, num_envs: int, device: torch.device, driver: str | None, way: Candidate
) -> Iterator[VecEnv]:
    """An environment that launches in this way."""
    env = VecEnv(
        game,
        num_envs,
        device,
        driver=driver,
        threads_per_env=way.shape.threads_per_env,
        threads_per_block=way.shape.threads_per_block,
        fuse_sampling=way.fuse_sampling,
    )
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield env
    finally:
        env.close()


def _step_seconds(env: VecEnv) -> float:
    """Time of one step with random actions."""
    buffers, actions = env.step_buffers(), []
    env.reset(seed=1, out=buffers)
    for _ in range(STEPS):
        actions.append(env.sample_actions())
        env.step(actions[-1], out=buffers)

    def steps() -> None:
        for action in actions:  # replays visit other states, with other action masks
            env.step(env.sample_actions() if env.layout.masks_actions else action, out=buffers)

    return seconds(captured(steps, env.device), env.device) / STEPS


def _sample_and_step_seconds(env: VecEnv) -> float:
    """Time of one step that draws its actions, with their log-probabilities, as in training."""
    buffers, sampler = env.step_buffers(), Sampler(env)
    env.reset(seed=1, out=buffers)
    parameters = UniformParameters(sampler, buffers)
    sample = dataclasses.replace(sampler.sample(parameters.tensor), entropies=None)

    def steps() -> None:
        for _ in range(STEPS):
            parameters.refresh()  # a forbidden action would end the episode
            sampler.step(parameters.tensor, sample=sample, out=buffers)

    return seconds(captured(steps, env.device), env.device) / STEPS
