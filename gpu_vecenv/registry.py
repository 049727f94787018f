"""Names of games."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gpu_vecenv.env import FIELD_NAME, Env
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, UnknownGameError, nearest
from gpu_vecenv.vec_env import VecEnv

GAMES: dict[str, type[Env]] = {game.name(): game for game in (TagContinuous, TagGridworld)}


def register(game: type[Env], name: str | None = None) -> None:
    """Make a game known by name; by default its class name in snake case.

    Raises:
        EnvDefinitionError: It is no Env, or the name is no identifier or already another game's.
    """
    if not (isinstance(game, type) and issubclass(game, Env)):
        raise EnvDefinitionError(f"register: {game!r} is no subclass of gpu_vecenv.Env")
    name = game.name() if name is None else name
    if not FIELD_NAME.fullmatch(name):
        raise EnvDefinitionError(f"register: {name!r} is no identifier [a-z][a-z0-9_]*")
    if GAMES.get(name, game) is not game:
        raise EnvDefinitionError(f"register: {name!r} is already {GAMES[name].__qualname__}")
    GAMES[name] = game


def find_game(name: str) -> type[Env]:
    """The game of that name.

    Raises:
        UnknownGameError: There is none; the message has the nearest names.
    """
    if not isinstance(name, str):
        raise TypeError(f"a game's name is {name!r} ({type(name).__name__}); expected a string")
    if name not in GAMES:
        raise UnknownGameError(
            f"no game is called {name[:128]!r}; {nearest(name, GAMES)}. "
            "Games of your own are made known by gpu_vecenv.register(MyGame)"
        )
    return GAMES[name]


def configure(name: str, **config: Any) -> Env:
    """A game with its configuration.

    Raises:
        UnknownGameError: No game has this name.
        ConfigError: A key is unknown, or a value has the wrong type or range.
    """
    game = find_game(name)
    keys = [field.name for field in dataclasses.fields(game)]
    for key in config:
        if key not in keys:
            raise ConfigError(f"{name} has no configuration key {key!r} (= {config[key]!r}); {nearest(key, keys)}")
    return game(**config)


def make(
    name: str,
    num_envs: int,
    device: str | torch.device | None = None,
    *,
    autoreset_mode: Any = "same_step",
    driver: str | None = None,
    validate: Any = "async",
    arrays: Any = None,
    starts: Any = None,
    first_replica: int = 0,
    **config: Any,
) -> VecEnv:
    """``num_envs`` replicas of a registered game: ``make("tag_continuous", num_envs=2000, num_taggers=10)``.

    ``config`` is the game's own configuration; the other arguments are those of ``VecEnv``.

    Raises:
        UnknownGameError, ConfigError: The name or the configuration is wrong.
    """
    return VecEnv(
        configure(name, **config),
        num_envs,
        device,
        autoreset_mode=autoreset_mode,
        driver=driver,
        validate=validate,
        arrays=arrays,
        starts=starts,
        first_replica=first_replica,
    )
