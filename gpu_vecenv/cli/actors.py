"""Who acts, as command lines name it: ROLE=RUN, ROLE=file.py:function, ROLE=random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.game_policy import GamePolicy, load_policy
from gpu_vecenv.train.opponents_config import RANDOM
from gpu_vecenv.train.role_view import role_of
from gpu_vecenv.train.scripts import Script, names_script


def role_and_source(text: str) -> tuple[str, str]:
    """Of ROLE=SOURCE; the role is "" without one, or where the whole text is a path that exists."""
    role, separator, source = text.partition("=")
    return (role, source) if separator and not Path(text).exists() else ("", text)


def role_sources(option: str, pairs: Sequence[str], roles: Sequence[str]) -> dict[str, str]:
    """Role -> source, of ROLE=SOURCE values of an option; ``roles`` are those of the game."""
    sources = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if len(sources) < len(pairs):
        wrong = next((text for text in pairs if "=" not in text), roles[0])
        example = f"{wrong}=runs/other" if wrong in roles else f"{roles[-1]}={wrong}"
        raise ConfigError(
            f"{option} is {' '.join(pairs)}; expected ROLE=RUN for each role, every role once, such as {example}"
        )
    return sources


def actors_of(option: str, game: Env, role: str, source: str, **options: Any) -> dict[str, RolePolicy]:
    """The actors that a source has for the agents of a role, or for an agent.

    Args:
        option: For errors.
        game: That is played.
        role: Role or agent, of a script also several joined by "+".
        source: A script, a run or one of its checkpoints, or "random".
        options: Of ``load_policy``.

    Raises:
        ConfigError: The source does not fit the game, or a script cannot be imported.
    """
    if source == RANDOM:
        return {role: None}
    if names_script(source):
        return {role: Script(role, source).actor(option, game)}
    return dict(load_other_run(option, game, role, source, **options).policies_of(role))


def load_other_run(option: str, game: Env, name: str, source: str, **options: Any) -> GamePolicy:
    """The policies of another run of the same game, where a role, or that of an agent, acts alike."""
    loaded, role = load_policy(source, **options), role_of(game, name)
    if loaded.game.name() != game.name():
        raise ConfigError(f"{option}: {source} is a run of {loaded.game.name()}; expected one of {game.name()}")
    expected, found = (
        (env.layout.observation.shapes[role], env.layout.action.sizes[role]) if env.layout.roles.get(role) else None
        for env in (game, loaded.game)
    )
    if expected != found:
        raise ConfigError(f"{option}: {name} of {source} has observations and actions {found}; expected {expected}")
    return loaded
