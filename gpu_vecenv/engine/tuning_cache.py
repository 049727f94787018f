"""What tuning.py has measured, kept beside the compiled kernels, and how an environment finds its threads_per_env and threads_per_block."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends import Backend, GroupShape
from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.declare.env import Env

SUFFIX = ".tuning.json"


def resolve_group_shape(
    game: Env, num_envs: int, backend: Backend, threads_per_env: int | None, threads_per_block: int | None
) -> GroupShape | None:
    """What was given, the default in place of what was not; if nothing was, what is kept, else the default.

    None where no lanes share replicas; what was given is checked all the same.

    Raises:
        ConfigError: ``threads_per_env`` or ``threads_per_block`` is none that there are, or they do not go together.
    """
    given = GroupShape.of(
        backend.default_threads_per_env(game.layout.num_agents) if threads_per_env is None else threads_per_env,
        threads_per_block,
    )
    if backend.processor_name is None:
        return None
    kept = (
        read(tuning_path(game, num_envs, backend.processor_name))
        if threads_per_env is None and threads_per_block is None
        else None
    )
    return kept or given


def tuning_path(game: Env, num_envs: int, processor_name: str) -> Path:
    """Where the choice for a game with its configuration lies, whether or not there is one.

    The name is a hash of all that the choice may depend on: the library's version, the device code (rules and
    configuration), the processor, and the number of replicas to the nearest power of four.
    """
    key = "\n".join([__version__, processor_name, str(nearest_power_of_four(num_envs)), game_source(game.layout)])
    return cache_dir() / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)


def nearest_power_of_four(num_envs: int) -> int:
    """The power of four that is nearest: 1,000 and 1,024 replicas have the same, and 2,000 and 2,048."""
    power = 1
    while 4 * power - num_envs < num_envs - power:
        power *= 4
    return power


def read(path: Path) -> GroupShape | None:
    """The threads_per_env and the threads_per_block in a file; None if it is not there, cannot be read or, with a warning, is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        found = json.loads(content)
        return GroupShape(found["threads_per_env"], found["threads_per_block"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # whatever damage may look like
        warnings.warn(f"{path} is damaged: nothing is kept there ({error!r:.200}); tune anew", stacklevel=2)
        return None
