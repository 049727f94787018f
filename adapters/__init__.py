"""Adapters to RL libraries, one file per library: import the one you need, nothing else.

Each has ``make(game, num_envs, device=None, **config)`` and ``wrap(env)``. Here is what several of them share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from gymnasium.vector import VectorEnv

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.errors import UnsupportedGameError

# Adapters for what another library has no word for.
ELSEWHERE = {
    "roles with actions of their own": ("torchrl", "benchmarl", "skrl", "rllib"),
    "action masks": ("torchrl", "benchmarl", "rl_games", "tianshou"),
    "Box": ("sb3", "torchrl", "benchmarl", "skrl", "rsl_rl", "rl_games", "tianshou", "rllib", "cleanrl"),
    "Discrete": ("sb3", "torchrl", "benchmarl", "skrl", "rl_games", "tianshou", "rllib"),
    "MultiDiscrete": ("sb3", "torchrl", "skrl", "rl_games", "tianshou", "rllib"),
}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around the imports of a library: where it is missing, ModuleNotFoundError names the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'gpu-vecenv[{extra}]'", name=error.name
        ) from None


def unsupported(library: str, what: str, found: Any) -> UnsupportedGameError:
    """The error that says what a library has no word for, what the game has, and which adapters take it."""
    return UnsupportedGameError(
        f"{library} has no {what}; the game has {found}. gpu_vecenv.adapters for it: {', '.join(ELSEWHERE[what])}"
    )


def check_actions(
    library: str, space: Space[Any], kinds: tuple[type[Space[Any]], ...], masks_actions: bool = False
) -> None:
    """Refuse what a library has no word for: a kind of action space, or choices that are masked.

    Raises:
        UnsupportedGameError: With the adapters that take it.
    """
    if not isinstance(space, kinds):
        raise unsupported(library, type(space).__name__, f"actions {space}")
    if masks_actions:
        raise unsupported(library, "action masks", "them")


def checked_rows(
    env: Any,
    library: str,
    *,
    output: str = "torch",
    mode: str = "SAME_STEP",
    kinds: tuple[type[Space[Any]], ...] = (Discrete, MultiDiscrete, Box),
    masks: bool = False,
) -> GymnasiumVectorEnv:
    """``env``, a GymnasiumVectorEnv or one inside vector wrappers, if the adapter of ``library`` can serve it.

    Args:
        env: What ``wrap`` was given.
        library: For the messages.
        output: That the adapter works on, "torch" or "numpy".
        mode: Name of the autoreset mode that the library counts on.
        kinds: Action spaces that it knows.
        masks: Whether it knows action masks.

    Raises:
        TypeError, ValueError: It is another env, or has another output or autoreset mode.
        UnsupportedGameError: The library has no word for the game's actions; all rows share one policy and one space.
    """
    inner = getattr(env, "unwrapped", None)
    if not isinstance(env, VectorEnv) or not isinstance(inner, GymnasiumVectorEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv")
    if inner.output != output or inner.autoreset_mode.name != mode:
        raise ValueError(
            f'env has output="{inner.output}" and {inner.autoreset_mode}; '
            f'expected output="{output}" and "{mode.lower()}"'
        )
    check_actions(library, env.single_action_space, kinds, inner.game.masks_actions and not masks)
    sizes = {role: inner.game.action.sizes[role] for role, agents in inner.game.roles.items() if agents}
    if len(set(sizes.values())) > 1 and not inner.game.masks_actions:  # masks also hide what a smaller role lacks
        raise unsupported(library, "roles with actions of their own", f"sizes {sizes}")
    return env  # type: ignore[return-value]
