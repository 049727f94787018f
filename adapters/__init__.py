"""Adapters to RL libraries, one module per library; import only the one you need.

Each has ``make(game, num_envs, device=None, **config)`` and ``wrap(env)``. This file holds their shared code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from gymnasium.vector import VectorEnv

from gpu_vecenv import Env, GymnasiumVectorEnv, configure
from gpu_vecenv.errors import ConfigError, UnsupportedGameError

# Feature -> adapters that support it.
SUPPORTED_BY = {
    "roles with actions of their own": ("torchrl", "benchmarl", "skrl", "rllib", "lightning"),
    "a Box beside discrete actions": ("torchrl", "skrl", "rllib", "lightning"),
    "action masks": ("sb3", "torchrl", "benchmarl", "rl_games", "tianshou", "lightning"),
    "Box": (
        "sb3",
        "torchrl",
        "benchmarl",
        "skrl",
        "rsl_rl",
        "rl_games",
        "tianshou",
        "rllib",
        "cleanrl",
        "pufferlib",
        "lightning",
    ),
    "Discrete": ("sb3", "torchrl", "benchmarl", "skrl", "rl_games", "tianshou", "rllib", "pufferlib", "lightning"),
    "MultiDiscrete": ("sb3", "torchrl", "skrl", "rl_games", "tianshou", "rllib", "pufferlib", "lightning"),
}


@contextmanager
def requires_extra(extra: str) -> Iterator[None]:
    """Context of a library's imports: ModuleNotFoundError names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'gpu-vecenv[{extra}]'", name=error.name
        ) from None


def check_argument(name: str, value: Any, fits: bool, expected: str, error: type[Exception] = TypeError) -> None:
    """``error`` unless the argument ``fits``."""
    if not fits:
        raise error(f"{name} is {value!r:.80} ({type(value).__name__}); expected {expected}")


def check_num_envs(num_envs: Any) -> None:
    """TypeError or ValueError unless the argument is an int in [1, 2**31 - 1]; for adapters that use it themselves."""
    is_int = isinstance(num_envs, int | np.integer) and not isinstance(num_envs, bool)
    check_argument("num_envs", num_envs, is_int, "an int >= 1")
    check_argument("num_envs", num_envs, 0 < num_envs < 2**31, "an int in [1, 2**31 - 1]", ValueError)


def split_config(
    game: Any, config: Mapping[str, Any], elsewhere: Mapping[str, str] = MappingProxyType({}), /, **fixed: Any
) -> tuple[Env, dict[str, Any]]:
    """Split ``config``: the configured game, and the remaining arguments with those that the adapter fixes.

    Args:
        game: As for ``gpu_vecenv.configure``.
        config: Arguments by name.
        elsewhere: Name of what is no argument of the adapter -> what to do instead.
        fixed: Arguments that the adapter fixes.

    Raises:
        ConfigError: ``config`` has an argument that the adapter fixes, or one of ``elsewhere``.
        ConfigError, UnknownGameError, TypeError: As ``gpu_vecenv.configure``.
    """
    for name in fixed:
        if name in config:
            raise ConfigError(f"{name} is {config[name]!r}; the adapter sets it ({fixed[name]!r}): leave it out")
    for name in elsewhere:
        if name in config:
            raise ConfigError(f"{name} is {config[name]!r}, which is not an argument of make: {elsewhere[name]}")
    own = {field.name for field in dataclasses.fields(configure(game))}
    rest = {name: value for name, value in config.items() if name not in own}
    return configure(game, **{name: config[name] for name in config if name in own}), {**rest, **fixed}


def unsupported(library: str, feature: str, found: Any, *also: str) -> UnsupportedGameError:
    """The error for a feature that a library does not support; it lists the adapters that do.

    Args:
        library: For the message.
        feature: The feature, a key of SUPPORTED_BY.
        found: What the game has.
        also: Other features of the game that those adapters must support.
    """
    names = [name for name in SUPPORTED_BY[feature] if all(name in SUPPORTED_BY[other] for other in also)]
    return UnsupportedGameError(
        f"{library} does not support {feature}; the game has {found}. gpu_vecenv.adapters that do: {', '.join(names)}"
    )


def check_actions(
    library: str, space: Space[Any], kinds: tuple[type[Space[Any]], ...], masks_actions: bool = False
) -> None:
    """Raise if a library does not support the kind of action space, or action masks.

    Raises:
        UnsupportedGameError: The message lists the adapters that do.
    """
    kind = type(space).__name__
    if not isinstance(space, kinds):
        raise unsupported(library, kind, f"actions {space}", *["action masks"] * masks_actions)
    if masks_actions:
        raise unsupported(library, "action masks", "them", kind)


def checked_vector_env(
    env: Any,
    library: str,
    *,
    output: str = "torch",
    mode: str = "SAME_STEP",
    kinds: tuple[type[Space[Any]], ...] = (Discrete, MultiDiscrete, Box),
    masks: bool = False,
    wrapped: bool = True,
) -> GymnasiumVectorEnv:
    """``env``, a GymnasiumVectorEnv or one inside vector wrappers, if the adapter of ``library`` supports it.

    Args:
        env: The argument of ``wrap``.
        library: For the messages.
        output: Required output, "torch" or "numpy".
        mode: Name of the required autoreset mode.
        kinds: Supported action spaces.
        masks: Whether action masks are supported.
        wrapped: Whether wrappers are allowed.

    Raises:
        TypeError, ValueError: ``env`` is of another class, output or autoreset mode.
        UnsupportedGameError: The library does not support the game's actions; all rows share one policy and one space.
    """
    inner = getattr(env, "unwrapped", None)
    if not isinstance(env, VectorEnv) or not isinstance(inner, GymnasiumVectorEnv):
        raise TypeError(
            f"env is a {type(env).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv, or call make(game, num_envs)"
        )
    if env is not inner and not wrapped:
        raise TypeError(f"env is a {type(env).__name__}; expected a GymnasiumVectorEnv without wrappers for {library}")
    if inner.output != output or inner.autoreset_mode.name != mode:
        raise ValueError(
            f'env has output="{inner.output}" and {inner.autoreset_mode}; '
            f'expected output="{output}" and "{mode.lower()}"'
        )
    if kinds == (Box,) and getattr(inner.game, "continuous_actions", True) is False:
        raise UnsupportedGameError(f"{library} supports Box actions only; make the game with continuous_actions=True")
    check_actions(library, env.single_action_space, kinds, inner.game.layout.masks_actions and not masks)
    sizes = {role: inner.game.layout.action.sizes[role] for role, agents in inner.game.layout.roles.items() if agents}
    if (
        len(set(sizes.values())) > 1 and not inner.game.layout.masks_actions
    ):  # masks also exclude the choices that a smaller role lacks
        raise unsupported(library, "roles with actions of their own", f"sizes {sizes}")
    return env  # type: ignore[return-value]
