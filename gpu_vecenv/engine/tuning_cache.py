"""Cache of tuning results, and the choice of an environment's threads, and of one or two kernels to sample and step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends import Backend, GroupShape
from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.declare.env import Env
from gpu_vecenv.escapes import warn

SUFFIX = ".tuning.json"
# The part of a group's threads without an agent from which on sampling and step in one kernel are slower than in two,
# once the GPU is full. On an H200, one kernel's time by that of two: 3 of 8 threads (tag_gridworld) 1.12 with 100,000
# environments, 1.18 with 1,000,000; 1 of 4 (simple_spread) 1.01 with 100,000; 18 of 128 (tag_continuous) 1.02 with
# 20,000, 24 of 224 (tag_gridworld) 0.83 with 2,000; none 0.65 to 0.99. With 3 of 8 and a GPU that is not full 0.75 to
# 0.98 (docs/performance/h200-*.json).
IDLE_THREADS = 0.25


@dataclass(frozen=True)
class LaunchChoice:
    """How an environment's kernels are launched. It affects speed only."""

    group_shape: GroupShape | None  # None on the host
    fuse_sampling: bool | None  # whether ``Sampler.step`` is one kernel; None: by ``fused_sampling_pays_off``


def resolve_launches(
    game: Env,
    num_envs: int,
    backend: Backend,
    threads_per_env: int | None = None,
    threads_per_block: int | None = None,
    fuse_sampling: bool | None = None,
) -> LaunchChoice:
    """Explicit values; without any of the threads, what was tuned, else the default.

    On the host, where one thread runs an environment and the two kernels are separate, explicit values are checked too.

    Raises:
        ConfigError: ``threads_per_env`` or ``threads_per_block`` is not supported, or they do not fit together.
    """
    default = backend.default_threads_per_env(game.layout.num_agents, game.layout.largest_array)
    given = GroupShape.of(
        default if threads_per_env is None else threads_per_env,
        threads_per_block,
    )
    if backend.processor_name is None:
        return LaunchChoice(None, False)
    tuned = (
        read(tuning_path(game, num_envs, backend.processor_name))
        if threads_per_env is None and threads_per_block is None
        else None
    )
    if tuned is None:
        return LaunchChoice(given, fuse_sampling)
    return LaunchChoice(tuned.group_shape, tuned.fuse_sampling if fuse_sampling is None else fuse_sampling)


def fused_sampling_pays_off(num_envs: int, num_agents: int, shape: GroupShape, resident_threads: int) -> bool:
    """Whether sampling and step in one kernel are likely faster than in two, where the kernel's memory allows it.

    One kernel saves a launch, and the actions' way through memory. But the threads of a group that have no agent do
    nothing while the others draw, where a kernel of its own for sampling has a thread for each agent. Until the GPU is
    full that costs nothing; beyond it other groups wait for these threads.
    """
    threads = shape.threads_per_env
    rounds = -(-num_agents // threads)
    idle = 1 - num_agents / (rounds * threads)
    return idle < IDLE_THREADS or num_envs * threads <= resident_threads


def tuning_path(game: Env, num_envs: int, processor_name: str) -> Path:
    """The file of the tuning result for a configured game, which need not exist.

    Its name is a hash of everything that the result may depend on: the library's version, the device code (game and
    configuration), the processor, and the number of environments to the nearest power of four.
    """
    key = "\n".join([__version__, processor_name, str(nearest_power_of_four(num_envs)), game_source(game.layout)])
    return cache_dir() / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)


def nearest_power_of_four(num_envs: int) -> int:
    """The nearest power of four: the same for 1,000 and 1,024 environments, and for 2,000 and 2,048."""
    power = 1
    while 4 * power - num_envs < num_envs - power:
        power *= 4
    return power


def read(path: Path) -> LaunchChoice | None:
    """The choice in a file; None if it is missing, unreadable or, with a warning, damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        found = json.loads(content)
        if not isinstance(fuse_sampling := found["fuse_sampling"], bool):
            raise TypeError(f"fuse_sampling is {fuse_sampling!r:.80}; expected true or false")
        return LaunchChoice(GroupShape(found["threads_per_env"], found["threads_per_block"]), fuse_sampling)
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # errors of JSON, missing keys, wrong types
        warn(f"{path} is damaged and ignored ({error!r:.200}); run tune() again", stacklevel=2)
        return None
