"""Adapters to RL libraries, one file per library: import the one you need, nothing else.

Each has ``make(game, num_envs, device=None, **config)`` and ``wrap(env)``. Here is what several of them share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from gymnasium.vector import VectorEnv

from gpu_vecenv import Env, GymnasiumVectorEnv, configure
from gpu_vecenv.errors import ConfigError, UnsupportedGameError

# Adapters for what another library has no word for.
SUPPORTED_BY = {
    "roles with actions of their own": ("torchrl", "benchmarl", "skrl", "rllib"),
    "action masks": ("sb3", "torchrl", "benchmarl", "rl_games", "tianshou"),
    "Box": ("sb3", "torchrl", "benchmarl", "skrl", "rsl_rl", "rl_games", "tianshou", "rllib", "cleanrl"),
    "Discrete": ("sb3", "torchrl", "benchmarl", "skrl", "rl_games", "tianshou", "rllib"),
    "MultiDiscrete": ("sb3", "torchrl", "skrl", "rl_games", "tianshou", "rllib"),
}


@contextmanager
def requires_extra(extra: str) -> Iterator[None]:
    """Around the imports of a library: where it is missing, ModuleNotFoundError names the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'gpu-vecenv[{extra}]'", name=error.name
        ) from None


def split_config(game: Any, config: Mapping[str, Any], **fixed: Any) -> tuple[Env, dict[str, Any]]:
    """The game, with those of ``config`` that are its own, and the others with what the adapter fixes.

    Raises:
        ConfigError: ``config`` has what the adapter fixes.
        ConfigError, UnknownGameError, TypeError: As ``gpu_vecenv.configure``.
    """
    for name in fixed:
        if name in config:
            raise ConfigError(f"{name} is {config[name]!r}; the adapter sets it ({fixed[name]!r}): leave it out")
    own = {field.name for field in dataclasses.fields(configure(game))}
    rest = {name: value for name, value in config.items() if name not in own}
    return configure(game, **{name: config[name] for name in config if name in own}), {**rest, **fixed}


class ActionClip:
    """Actions clipped to a Box, on the device; those of other spaces are left as they are."""

    def __init__(self, space: Space[Any], device: torch.device) -> None:
        bounds = (space.low, space.high) if isinstance(space, Box) else ()
        self._bounds = [torch.tensor(bound, device=device) for bound in bounds]

    def __call__(self, actions: torch.Tensor) -> torch.Tensor:
        """(…, n) float32, or those of another space. TypeError where a Box is given others."""
        if self._bounds and not (isinstance(actions, torch.Tensor) and actions.is_floating_point()):
            kind = getattr(actions, "dtype", type(actions).__name__)
            raise TypeError(f"step: actions are {kind}; expected a tensor of torch.float32")
        return actions.clamp(*self._bounds) if self._bounds else actions


def unsupported(library: str, what: str, found: Any, *also: str) -> UnsupportedGameError:
    """The error that says what a library has no word for, what the game has, and which adapters take it.

    Args:
        library: For the message.
        what: A key of SUPPORTED_BY.
        found: What the game has.
        also: Other keys: what else of the game those adapters must take.
    """
    names = [name for name in SUPPORTED_BY[what] if all(name in SUPPORTED_BY[other] for other in also)]
    return UnsupportedGameError(
        f"{library} has no {what}; the game has {found}. gpu_vecenv.adapters for it: {', '.join(names)}"
    )


def check_actions(
    library: str, space: Space[Any], kinds: tuple[type[Space[Any]], ...], masks_actions: bool = False
) -> None:
    """Refuse what a library has no word for: a kind of action space, or choices that are masked.

    Raises:
        UnsupportedGameError: With the adapters that take it.
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
    """``env``, a GymnasiumVectorEnv or one inside vector wrappers, if the adapter of ``library`` can serve it.

    Args:
        env: What ``wrap`` was given.
        library: For the messages.
        output: That the adapter works on, "torch" or "numpy".
        mode: Name of the autoreset mode that the library counts on.
        kinds: Action spaces that it knows.
        masks: Whether it knows action masks.
        wrapped: Whether there may be wrappers.

    Raises:
        TypeError, ValueError: It is another env, or has another output or autoreset mode.
        UnsupportedGameError: The library has no word for the game's actions; all rows share one policy and one space.
    """
    inner = getattr(env, "unwrapped", None)
    if not isinstance(env, VectorEnv) or not isinstance(inner, GymnasiumVectorEnv):
        raise TypeError(
            f"env is a {type(env).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv, or take make(game, num_envs)"
        )
    if env is not inner and not wrapped:
        raise TypeError(f"env is a {type(env).__name__}; expected a GymnasiumVectorEnv without wrappers for {library}")
    if inner.output != output or inner.autoreset_mode.name != mode:
        raise ValueError(
            f'env has output="{inner.output}" and {inner.autoreset_mode}; '
            f'expected output="{output}" and "{mode.lower()}"'
        )
    if kinds == (Box,) and getattr(inner.game, "continuous_actions", True) is False:
        raise UnsupportedGameError(f"{library} takes Box actions only; make the game with continuous_actions=True")
    check_actions(library, env.single_action_space, kinds, inner.game.layout.masks_actions and not masks)
    sizes = {role: inner.game.layout.action.sizes[role] for role, agents in inner.game.layout.roles.items() if agents}
    if (
        len(set(sizes.values())) > 1 and not inner.game.layout.masks_actions
    ):  # masks also hide what a smaller role lacks
        raise unsupported(library, "roles with actions of their own", f"sizes {sizes}")
    return env  # type: ignore[return-value]
