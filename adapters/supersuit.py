"""SuperSuit, in two ways.

``make`` builds SuperSuit's own vector environment of PettingZoo environments in NumPy, which resets in the same step.
Each environment is a Python object with dictionaries of agents, so the time of a step grows with their number. Use it
for code that needs these classes.

``NATIVE`` works without SuperSuit: functions with the names and arguments of SuperSuit's wrappers, also attributes of
this module, for a Gymnasium view of tensors in any autoreset mode: ``supersuit.frame_stack_v2(env, 4)``. Tensors stay
on the device; lambda functions get the tensors of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pettingzoo
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.wrappers.vector import TransformAction, TransformReward

from gpu_vecenv import GymnasiumVectorEnv, ParallelEnv, wrappers
from gpu_vecenv.adapters import check_actions, check_argument, check_num_envs, requires_extra
from gpu_vecenv.errors import refuse_counterparts


def _observations(env: Any, change: Callable[..., Any], change_space: Callable[..., Any] | None = None) -> Any:
    space = env.single_observation_space
    if change_space is not None:
        return wrappers.TransformObservation(env, change, None, change_space(space))
    ends = [change(torch.from_numpy(bound)[None])[0].numpy() for bound in (space.low, space.high)]
    box = Box(np.minimum(*ends), np.maximum(*ends), dtype=ends[0].dtype.type)
    return wrappers.TransformObservation(env, change, None, box)


def _actions(env: Any, change: Callable[..., Any], change_space: Callable[..., Any]) -> Any:
    space = change_space(env.single_action_space)
    return TransformAction(env, change, None, None if space == env.single_action_space else space)


def _stack(padding_type: str, env: Any, stack_size: int = 4, stack_dim: int = -1) -> Any:
    axes = len(env.single_observation_space.shape)
    if stack_dim not in (0, -1) or not 1 <= axes <= 3:
        raise ValueError(f"frame_stack: stack_dim is {stack_dim}, {axes} axes; expected 0 or -1, and 1 to 3 axes")
    stack = wrappers.FrameStackObservation(env, stack_size, padding_type=padding_type)
    if stack_dim == 0:
        return stack if axes == 2 else _observations(stack, lambda obs: obs.flatten(1, 2))
    return _observations(stack, lambda obs: obs.movedim(1, -1) if axes == 2 else obs.movedim(1, -2).flatten(-2))


def _one_color(env: Any, mode: str = "full") -> Any:
    if mode not in ("full", *"RGB"):
        raise ValueError(f'color_reduction: mode is {mode!r}; expected "full", "R", "G" or "B"')
    if (shape := env.single_observation_space.shape)[2:] != (3,):
        raise ValueError(f"color_reduction: observations have shape {shape}; expected (height, width, 3)")

    def reduced(obs: torch.Tensor) -> torch.Tensor:
        if mode != "full":
            return obs[..., "RGB".index(mode)]
        red, green, blue = obs.float().unbind(-1)
        return (0.299 * red + 0.587 * green + 0.114 * blue).to(torch.uint8)

    return _observations(env, reduced)


def _unchanged(env: Any) -> Any:
    return env


def _native(wrapper: Callable[..., Any], env: Any, *arguments: Any, **named: Any) -> Any:
    if not isinstance(getattr(env, "unwrapped", None), GymnasiumVectorEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a gpu_vecenv.GymnasiumVectorEnv")
    return wrapper(env, *arguments, **named)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "action_lambda_v1": _actions,
    "agent_indicator_v0": wrappers.AgentIndicator,
    "black_death_v3": _unchanged,  # rows of inactive agents are zeros
    "clip_actions_v0": wrappers.ClipAction,
    "clip_reward_v0": lambda env, lower_bound=-1, upper_bound=1: wrappers.ClipReward(env, lower_bound, upper_bound),
    "color_reduction_v0": _one_color,
    "delay_observations_v0": wrappers.DelayObservation,
    "dtype_v0": wrappers.DtypeObservation,
    "flatten_v0": wrappers.FlattenObservation,
    "frame_stack_v1": partial(_stack, "zero"),
    "frame_stack_v2": partial(_stack, "reset"),
    "max_observation_v0": wrappers.MaxObservation,
    "normalize_obs_v0": lambda env, env_min=0.0, env_max=1.0: wrappers.RescaleObservation(env, env_min, env_max),
    "observation_lambda_v0": _observations,
    "pad_action_space_v0": _unchanged,  # the engine pads, and checks each role's choices
    "pad_observations_v0": _unchanged,
    "reshape_v0": wrappers.ReshapeObservation,
    "resize_v1": lambda env, x_size, y_size: wrappers.ResizeObservation(env, (y_size, x_size)),
    "reward_lambda_v0": TransformReward,
    "sticky_actions_v0": wrappers.StickyAction,
}
NATIVE = {name: partial(_native, wrapper) for name, wrapper in WRAPPERS.items()}
_VECTORS = "concat_vec_envs_v1 gym_vec_env_v0 pettingzoo_env_to_vec_env_v1"
_SB3 = "stable_baselines_vec_env_v0 stable_baselines3_vec_env_v0"
NOT_NATIVE = {
    **dict.fromkeys(_VECTORS.split(), "all agents of all environments are rows already"),
    **dict.fromkeys(_SB3.split(), "use gpu_vecenv.adapters.sb3"),
    **dict.fromkeys("nan_noop_v0 nan_random_v0 nan_zeros_v0".split(), "action_lambda_v1 can replace such actions"),
    "frame_skip_v0": "a row that ends during the skipped steps would continue in its next episode; repeat in the game",
    "scale_actions_v0": "its space is not that of the valid actions; use wrappers.RescaleAction with the "
    "bounds you need",
    "vectorize_aec_env_v0": "agents that act in turn cannot be batched",
}


def __getattr__(name: str) -> Callable[..., Any]:
    """A wrapper by SuperSuit's name. AttributeError gives the reason if there is none."""
    if name in NATIVE:
        return NATIVE[name]
    raise AttributeError(f"no native {name}: {NOT_NATIVE.get(name, 'SuperSuit has none')}")


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, *, base_class: str = "gymnasium", **config: Any) -> Any:
    """``num_envs`` environments by ``concat_vec_envs_v1``; row ``e * num_agents + a`` is agent a of environment e.

    ``device`` None is the CPU. ``base_class="stable_baselines3"`` supports SB3's ``seed``; SuperSuit's own fails.
    ``config`` as for ``gpu_vecenv.ParallelEnv``, with ``black_death`` as for ``wrap``.
    """
    check_num_envs(num_envs)
    fits = isinstance(base_class, str) and base_class in ("gymnasium", "stable_baselines3")
    check_argument("base_class", base_class, fits, '"gymnasium" or "stable_baselines3"', ValueError)
    black_death = config.pop("black_death", False)
    single = wrap(ParallelEnv(game, "cpu" if device is None else device, output="numpy", **config), black_death)
    import supersuit

    with requires_extra("sb3"):
        vector = supersuit.concat_vec_envs_v1(single, num_envs, base_class=base_class)
    if base_class == "stable_baselines3":
        seeds: list[int | None] = []
        begin, vector.venv.seed = vector.venv.reset, seeds.append
        vector.venv.reset = lambda: begin(seed=seeds.pop() if seeds else None)
    return vector


def wrap(env: Any, black_death: bool = False) -> Any:
    """A ``gpu_vecenv.ParallelEnv`` with ``output="numpy"``, or wrapped, as SuperSuit's vector of its agents.

    If roles differ it is padded. SuperSuit raises when an agent leaves early, unless ``black_death``: then the end of
    an episode is reported one step late, without final observations, as both terminated and truncated.

    Raises:
        TypeError: ``env`` is of another class.
        UnsupportedGameError: Actions are masked, or roles have different spaces that are not Discrete.
    """
    with requires_extra("supersuit"):
        import supersuit
    check_argument("black_death", black_death, isinstance(black_death, bool), "True or False")
    inner = env.unwrapped if isinstance(env, pettingzoo.ParallelEnv) else env
    if not isinstance(inner, ParallelEnv) or inner.output != "numpy":
        raise TypeError(f'env is a {type(env).__name__}; expected a gpu_vecenv.ParallelEnv with output="numpy"')
    seen, choices = ([space(a) for a in env.possible_agents] for space in (env.observation_space, env.action_space))
    check_actions("SuperSuit", choices[0], (Discrete, MultiDiscrete, Box), env.unwrapped.game.layout.masks_actions)
    if any(space != choices[0] for space in choices):
        for space in choices:
            check_actions("SuperSuit's pad_action_space_v0", space, (Discrete,))
        env = supersuit.pad_action_space_v0(env)
    if any(space != seen[0] for space in seen):
        env = supersuit.pad_observations_v0(env)
    return supersuit.pettingzoo_env_to_vec_env_v1(supersuit.black_death_v3(env) if black_death else env)
