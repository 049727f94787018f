"""make: a VecEnv from a game's name and configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import Game, configured


def make(
    game: Game,
    num_envs: int | None = None,
    device: str | torch.device | None = None,
    *,
    autoreset_mode: Any = "same_step",
    agents_as_envs: bool = False,
    driver: str | None = None,
    validate: Any = "async",
    arrays: Any = None,
    initial_states: Any = None,
    randomize: Any = None,
    first_env_index: int = 0,
    end_on_nonfinite: bool = False,
    **config: Any,
) -> VecEnv:
    """``num_envs`` environments of a game: ``make("tag_continuous", num_envs=2000, num_taggers=10)``.

    ``game`` is a registered name, an Env class or an Env; ``config`` is the game's own configuration; the other
    arguments are those of ``VecEnv``. ``randomize={"gravity": (8, 12)}`` makes parameters differ between environments.

    Raises:
        UnknownGameError, ConfigError: The name or the configuration is wrong.
        TypeError: ``num_envs`` is missing.
    """
    configuration = configured(game, config, OPTIONS)
    if num_envs is None:
        raise TypeError(
            f'num_envs is None, or missing; expected an int >= 1: make("{configuration.name()}", num_envs=1000)'
        )
    return VecEnv(
        configuration,
        num_envs,
        device,
        autoreset_mode=autoreset_mode,
        agents_as_envs=agents_as_envs,
        driver=driver,
        validate=validate,
        arrays=arrays,
        initial_states=initial_states,
        randomize=randomize,
        first_env_index=first_env_index,
        end_on_nonfinite=end_on_nonfinite,
    )


def make_for(view: type, game: Game, num_envs: int, device: Any, arguments: Mapping[str, Any], **own: Any) -> VecEnv:
    """The VecEnv of a view.

    Args:
        view: Its class; an error on an unknown argument lists those of its constructor too.
        game: As for ``make``.
        num_envs: As for ``make``.
        device: As for ``make``.
        arguments: Of ``make``, that were given to the view.
        own: Of ``make``, that the view sets itself.
    """
    options = set(OPTIONS) - {"num_envs", *own}
    parameters = inspect.signature(view).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    config = {name: value for name, value in arguments.items() if name not in options}
    configuration = configured(game, config, options | names - {"game"})
    rest = {name: value for name, value in arguments.items() if name in options}
    return make(configuration, num_envs, device, **rest, **own)


OPTIONS = tuple(name for name in inspect.signature(make).parameters if name not in ("game", "config"))
