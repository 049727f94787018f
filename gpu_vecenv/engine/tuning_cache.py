"""What tuning.py has measured, kept beside the compiled kernels, and how an environment finds its team and block."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends import Backend, TeamShape
from gpu_vecenv.compile.cache import folder
from gpu_vecenv.compile.codegen import game_text
from gpu_vecenv.declare.env import Env

SUFFIX = ".tuning.json"


def team_shape(game: Env, num_envs: int, backend: Backend, team: int | None, block: int | None) -> TeamShape | None:
    """What was given, the default in place of what was not; if nothing was, what is kept, else the default.

    None where no lanes share replicas; what was given is checked all the same.

    Raises:
        ConfigError: ``team`` or ``block`` is none that there are, or they do not go together.
    """
    given = TeamShape.of(backend.team(game.num_agents) if team is None else team, block)
    if backend.hardware is None:
        return None
    kept = read(tuning_path(game, num_envs, backend.hardware)) if team is None and block is None else None
    return kept or given


def tuning_path(game: Env, num_envs: int, hardware: str) -> Path:
    """Where the choice for a game with its configuration lies, whether or not there is one.

    The name is a hash of all that the choice may depend on: the library's version, the device text (rules and
    configuration), the processor, and the number of replicas to the nearest power of four.
    """
    key = "\n".join([__version__, hardware, str(nearest_power(num_envs)), game_text(game)])
    return folder() / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)


def nearest_power(num_envs: int) -> int:
    """The power of four that is nearest: 1,000 and 1,024 replicas have the same, and 2,000 and 2,048."""
    power = 1
    while 4 * power - num_envs < num_envs - power:
        power *= 4
    return power


def read(path: Path) -> TeamShape | None:
    """The team and the block in a file; None if it is not there, cannot be read or, with a warning, is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        found = json.loads(content)
        return TeamShape(found["team"], found["block"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # whatever damage may look like
        warnings.warn(f"{path} is damaged: nothing is kept there ({error!r:.200}); tune anew", stacklevel=2)
        return None
