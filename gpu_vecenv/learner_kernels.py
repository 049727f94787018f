"""What a learner computes row by row, as kernels: advantages, and the loss of PPO with its gradients.

``advantages`` and ``loss`` in ``ppo.py`` say the same in torch. Rows are read where the rollout has them.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_vecenv.backends import Argument, LaunchShape
from gpu_vecenv.env import device_folder
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.function_manager import Launch, Program
from gpu_vecenv.policy import Policy
from gpu_vecenv.rollout_storage import Rollout
from gpu_vecenv.vec_env import VecEnv


def _compiled(env: VecEnv) -> Program:
    return env.functions.compile(device_folder() / "learner.cu", game=env.game)


def advantage_launch(
    env: VecEnv,
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    active: torch.Tensor,
    gamma: torch.Tensor,
    gae_lambda: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> Launch:
    """``ppo.advantages`` of these tensors whenever it is called, and returns: advantages plus values.

    Args:
        env: Whose game and device.
        rewards: (T, …, num_agents) float32, contiguous, as all others but the next two; flags are bool.
        values: Of the states before each tick.
        next_values: Of the states that each tick led to.
        terminations: A state is worth nothing then.
        truncations: A trace ends there.
        active: Estimates of others are 0.
        gamma: (num_agents,) float32.
        gae_lambda: (num_agents,) float32.
        out: Where advantages and returns are written, float32.
    """
    columns = rewards[0].numel()
    tensors: list[Argument] = [rewards, values, next_values, terminations, truncations, active, gamma, gae_lambda, *out]
    shape = LaunchShape(columns, work=rewards.numel())
    return _compiled(env).prepare("advantages", shape, [*tensors, np.int64(len(rewards)), np.int64(columns)])


class LossKernel:
    """The loss of PPO on rows of a rollout, and its gradients with respect to a network's outputs.

    Args:
        policy: Whose outputs they are.
        rollout: It has all but the outputs.
        minibatch: Rows of a minibatch.
        chunk: The most rows that are differentiated at once.
        clip: Of the probability ratio; () float32, like the next.
        entropy_coefficient: Weight of the entropy bonus.
        value_coefficient: Weight of the value loss.
        value_clip: Of a value's change; None: none.
        normalize_advantages: By mean and deviation of a minibatch's active rows.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        *,
        minibatch: int,
        chunk: int,
        clip: torch.Tensor,
        entropy_coefficient: torch.Tensor,
        value_coefficient: float,
        value_clip: float | None,
        normalize_advantages: bool,
    ) -> None:
        self.policy, self._one = policy, torch.ones((), device=rollout.rewards.device)
        program, data, none = _compiled(rollout.env), rollout, np.int64(0)
        self._moments = program.prepare(
            "advantage_moments", LaunchShape(minibatch), [data.active, data.advantages, None, None, none]
        )
        fixed: list[Argument] = [data.active, data.draws, data.log_probs, data.values, data.advantages, data.returns]
        fixed += [data.action_mask, clip, entropy_coefficient, np.int32(normalize_advantages)]
        fixed += [np.int32(policy.squash == "tanh"), np.float32(value_coefficient)]
        fixed += [np.float32(-1 if value_clip is None else value_clip), np.int32(policy.view.num_parameters)]
        varying: list[Argument] = [None, None, None, None, none, None, none, None, None, None, none]
        self._first = len(fixed)  # place of the first argument that varies
        self._loss = program.prepare("loss_gradients", LaunchShape(chunk), [*fixed, *varying])

    def moments(self, places: torch.Tensor) -> torch.Tensor:
        """Number, sum and sum of squares of the advantages of active rows at these places of a rollout: (3,) float64.

        ``places`` (minibatch,) int64, contiguous, count through (T, E, A).
        """
        parts = torch.empty((3, len(places)), dtype=torch.float64, device=places.device)
        self._moments.raw[2:] = places.data_ptr(), parts.data_ptr(), np.int64(len(places))
        self._moments()
        return parts.sum(1)

    def __call__(
        self, places: torch.Tensor, moments: torch.Tensor, parameters: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``parameters`` and of ``values``, and the rows' part of the five figures of ``ppo.loss``.

        Args:
            places: (rows,) int64, contiguous: part of a minibatch.
            moments: Those of the whole minibatch: with its count, losses of its parts add up.
            parameters: (rows, n) float32, of the policy at these rows.
            values: (rows,) float32.

        Raises:
            ConfigError: The policy's outputs have other shapes, or are elsewhere.
        """
        rows, device = len(places), places.device
        expected = [(rows, self.policy.view.num_parameters), (rows,)]
        if (found := [tuple(x.shape) for x in (parameters, values)]) != expected or parameters.device != device:
            raise ConfigError(
                f"the network of {'+'.join(self.policy.view.roles)} gives shapes {found} on {parameters.device} for "
                f"{rows} observations; expected parameters and values, {expected} on {device}"
            )
        parameters, values = parameters.detach(), values.detach()
        if parameters.stride(1) != 1:
            parameters = parameters.contiguous()
        gradients = torch.empty((rows, parameters.shape[1]), device=device)
        value_gradients, figures = torch.empty(rows, device=device), torch.empty((5, rows), device=device)
        unit = self.policy.value_unit
        unit = unit if isinstance(unit, torch.Tensor) else self._one
        self._loss.raw[self._first :] = [
            *(x.data_ptr() for x in (unit, moments, places, parameters)),
            *(np.int64(parameters.stride(0)), values.data_ptr(), np.int64(values.stride(0))),
            *(x.data_ptr() for x in (gradients, value_gradients, figures)),
            np.int64(rows),
        ]
        self._loss()
        return gradients, value_gradients, figures.sum(1)
