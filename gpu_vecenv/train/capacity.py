"""Memory of training: what a rollout and its policies store for each environment, and how many environments fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

import torch

from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CapacityError
from gpu_vecenv.train.algorithms import algorithm_of
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy import state_size_of
from gpu_vecenv.train.policy_specs import PolicySpec, keeps_states
from gpu_vecenv.train.recurrent import default_state_size
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.train.rollout_storage import TensorSpecs, rollout_specs
from gpu_vecenv.train.sequences import state_specs


def stored_specs(
    env: VecEnv, config: LearnerConfig, specs: Mapping[str, PolicySpec], *, masks_samples: bool = False
) -> TensorSpecs:
    """What a trainer stores for a rollout in all environments: ``Rollout``, ``RecurrentStates``, parameters of a step.

    Args:
        env: The environment, also if the trainer steps another one with equal arguments.
        config: Of policies without one.
        specs: Of the policies.
        masks_samples: Whether there are opponents.
    """
    central = keeps_states(specs, config)
    stored = rollout_specs(env, config.num_steps, keeps_states=central, masks_samples=masks_samples)
    game, num_envs = env.game, env.num_envs
    stored["parameters"] = (num_envs, game.layout.num_agents, game.layout.action.num_parameters), torch.float32
    for name, spec in specs.items():
        if spec.actor is not None:  # no network, and so no states
            continue
        own = spec.config or config
        of_cell = default_state_size(own.network, own.hidden_sizes)
        size = algorithm_of(own).num_cells(own) * of_cell if spec.network is None else state_size_of(spec.network)
        size += of_cell if own.reads_states else 0  # of the central critic
        if size:
            agents, length = RoleView(game, name.split("+")).num_agents, own.sequence_length if spec.train else None
            states = state_specs(config.num_steps, num_envs, agents, size, length)
            stored |= {f"{key} of {name}": spec_of_tensor for key, spec_of_tensor in states.items()}
    return stored


def bytes_per_env(
    env: VecEnv, config: LearnerConfig, specs: Mapping[str, PolicySpec], *, masks_samples: bool = False
) -> int:
    """Memory of one environment in training, beside that of ``VecEnv.bytes_per_env``; arguments of ``stored_specs``.

    What is stored, and as much again for the temporaries of an update, a guess, since these depend on the networks.
    """
    stored = stored_specs(env, config, specs, masks_samples=masks_samples).values()
    return 2 * -(-sum(math.prod(shape) * dtype.itemsize for shape, dtype in stored) // env.num_envs)


def check_capacity(
    env: VecEnv, config: LearnerConfig, specs: Mapping[str, PolicySpec], *, masks_samples: bool = False
) -> int:
    """``bytes_per_env``. Raises CapacityError if all environments do not fit in the device's free memory."""
    each, free = bytes_per_env(env, config, specs, masks_samples=masks_samples), free_bytes(env.device)
    if each * env.num_envs > free:
        raise CapacityError(
            f"a rollout of {config.num_steps} steps x {env.num_envs:,} environments needs about "
            f"{each * env.num_envs:,} bytes, "
            f"{free:,} are free on {env.device}; at most num_envs = {free // each:,} fit"
        )
    return each


def max_num_envs_that_fit(
    make_env: Callable[[int], VecEnv],
    config: LearnerConfig,
    specs: Mapping[str, PolicySpec],
    wanted: int,
    runs: int = 1,
) -> int:
    """The largest number of environments of each run, up to ``wanted``.

    Those of all runs must fit with their rollouts in 80 % of the free memory.
    """
    with contextlib.closing(make_env(1)) as env:
        each = runs * (env.bytes_per_env() + bytes_per_env(env, config, specs))
        device, free = env.device, free_bytes(env.device)
    fit = int(0.8 * free) // each
    if fit < 1:
        of_each, fewer = (f" of each of {runs} runs", ", train fewer runs at once") if runs > 1 else ("", "")
        raise CapacityError(
            f"one environment{of_each} needs about {each:,} bytes; {free:,} are free on {device}: reduce num_steps or "
            f"the networks' hidden_sizes{fewer}"
        )
    return min(wanted, fit)
