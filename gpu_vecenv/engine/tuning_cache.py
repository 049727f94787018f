"""Cache of tuning results, and the choice of an environment's threads_per_env and threads_per_block."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends import Backend, GroupShape
from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.declare.env import Env
from gpu_vecenv.escapes import warn

SUFFIX = ".tuning.json"


def resolve_group_shape(
    game: Env, num_envs: int, backend: Backend, threads_per_env: int | None, threads_per_block: int | None
) -> GroupShape | None:
    """Explicit values, with the default for a missing one; without any, the tuned values, else the default.

    None on the host, where one thread runs an environment; explicit values are checked there too.

    Raises:
        ConfigError: ``threads_per_env`` or ``threads_per_block`` is not supported, or they do not fit together.
    """
    given = GroupShape.of(
        backend.default_threads_per_env(game.layout.num_agents) if threads_per_env is None else threads_per_env,
        threads_per_block,
    )
    if backend.processor_name is None:
        return None
    tuned = (
        read(tuning_path(game, num_envs, backend.processor_name))
        if threads_per_env is None and threads_per_block is None
        else None
    )
    return tuned or given


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


def read(path: Path) -> GroupShape | None:
    """The group shape in a file; None if it is missing, unreadable or, with a warning, damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        found = json.loads(content)
        return GroupShape(found["threads_per_env"], found["threads_per_block"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # errors of JSON, missing keys, wrong types
        warn(f"{path} is damaged and ignored ({error!r:.200}); run tune() again", stacklevel=2)
        return None
