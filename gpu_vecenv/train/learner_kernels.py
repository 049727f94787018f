"""What a learner does row by row, as kernels: advantages, orders, copies of rows, the loss of PPO with its gradients.

``advantages`` and ``loss`` in ``ppo.py`` say the same in torch. Rows are read where the rollout has them, but for the
observations of a minibatch.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_vecenv.compile.backends import Argument, LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.layers import are_packed, width_of
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.rollout_storage import Rollout

LOSS_BLOCK = 128  # threads, as learner.cu has it
MAX_PARTIAL_SUMS = 2**15  # of a minibatch's moments


def _compiled(env: VecEnv) -> Program:
    return env.functions.compile(cuda_folder() / "learner/learner.cu", game=env.game)


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
        values: Of the states before each step.
        next_values: Of the states that each step led to.
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


def shuffle_launch(
    functions: FunctionManager, indices: torch.Tensor, seed: torch.Tensor, epoch: torch.Tensor, *, out: torch.Tensor
) -> Launch:
    """``indices`` in a pseudo-random order, whenever it is called: a function of seed, epoch and their number alone.

    Args:
        functions: Of the tensors' device.
        indices: (rows,) int64, as ``out``.
        seed: (1,) int64, whose bits count; like ``epoch`` it is read on the device.
        epoch: (1,) int64.
        out: Where they are written.
    """
    program = functions.compile(cuda_folder() / "learner/minibatch.cu")
    return program.prepare("shuffle", LaunchShape(len(indices)), [indices, seed, epoch, out, np.int64(len(indices))])


class RowGather:
    """Copies of the rows of a table at any indices.

    Args:
        functions: Of the table's device.
        table: (…, *shape), any dtype. Its rows may lie apart, as those of a padded observation do.
        most: The most rows that are copied at once.
    """

    def __init__(self, functions: FunctionManager, table: torch.Tensor, most: int) -> None:
        self.table = table
        size, self._shape = table.element_size(), table.shape[1:]
        self._bytes, self._stride = self._shape.numel() * size, table.stride(0) * size
        program = functions.compile(cuda_folder() / "learner/minibatch.cu")
        none, shape = np.int64(0), LaunchShape(most, work=most * max(1, self._bytes // 4))
        self._launch = program.prepare("gather_rows", shape, [None, none, none, np.int32(0), None, None, none])

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """(rows, *shape), those at ``indices`` (rows,) int64, contiguous."""
        if self._bytes == 0 or not self.table[0].is_contiguous():
            return self.table.index_select(0, indices)
        out = torch.empty((len(indices), *self._shape), dtype=self.table.dtype, device=self.table.device)
        addresses = self.table.data_ptr(), out.data_ptr()
        word = next(w for w in (16, 4, 1) if all(x % w == 0 for x in (*addresses, self._bytes, self._stride)))
        layout = np.int64(self._stride), np.int64(self._bytes), np.int32(word)
        self._launch.arguments[:] = addresses[0], *layout, indices.data_ptr(), addresses[1], np.int64(len(indices))
        self._launch()
        return out


def clip_grad_norm_launch(
    functions: FunctionManager,
    norm: torch.Tensor,
    metrics: torch.Tensor,
    gradient: torch.Tensor,
    *,
    max_grad_norm: float,
    target_kl: float | None,
    kl_index: int,
    skip_update: torch.Tensor,
    metric_sums: torch.Tensor,
) -> Launch:
    """Whenever it is called, what comes between a minibatch's gradient and the step along it, in index.

    Args:
        functions: Of the tensors' device.
        norm: Of the gradient; () float32, as all others.
        metrics: (n,) of a minibatch.
        gradient: (parameters,); it is scaled down to the largest norm.
        max_grad_norm: See ``PPOConfig.max_grad_norm``.
        target_kl: None: none.
        kl_index: Which of the metrics is the approximate KL.
        skip_update: () becomes 1 where the KL is beyond its target, or a figure or the norm is not finite.
        metric_sums: (n + 2,), to which metrics, norm and ``skip_update`` are added.
    """
    target = np.float32(np.inf if target_kl is None else target_kl)
    arguments: list[Argument] = [norm, np.float32(max_grad_norm), target, metrics, np.int32(len(metrics))]
    arguments += [np.int32(kl_index), gradient, skip_update, metric_sums, np.int64(len(gradient))]
    program = functions.compile(cuda_folder() / "learner/minibatch.cu")
    return program.prepare("clip_grad_norm", LaunchShape(len(gradient) + 1), arguments)


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
            "advantage_moments", LaunchShape(minibatch), [data.active, data.advantages, None, None, none, none]
        )
        fixed: list[Argument] = [data.active, data.draws, data.log_probs, data.values, data.advantages, data.returns]
        fixed += [data.action_mask, clip, entropy_coefficient, np.int32(normalize_advantages)]
        fixed += [np.int32(policy.squash == "tanh"), np.float32(value_coefficient)]
        fixed += [np.float32(-1 if value_clip is None else value_clip), np.int32(policy.view.num_parameters)]
        varying: list[Argument] = [None, None, None, None, none, None, none, None, np.int32(0), None, None, none]
        self._first = len(fixed)  # index of the first argument that varies
        self._loss = program.prepare(
            "loss_gradients", LaunchShape(chunk, threads_per_block=LOSS_BLOCK), [*fixed, *varying]
        )

    def moments(self, indices: torch.Tensor) -> torch.Tensor:
        """Number, sum and sum of squares of the advantages of active rows at these indices of a rollout: (3,) float64.

        ``indices`` (minibatch,) int64, contiguous, count through (T, E, A).
        """
        parts = torch.empty((3, min(len(indices), MAX_PARTIAL_SUMS)), dtype=torch.float64, device=indices.device)
        self._moments.arguments[2:] = (
            indices.data_ptr(),
            parts.data_ptr(),
            np.int64(parts.shape[1]),
            np.int64(len(indices)),
        )
        self._moments()
        return parts.sum(1)

    def __call__(
        self, indices: torch.Tensor, moments: torch.Tensor, parameters: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``parameters`` and of ``values``, and the rows' part of the five metrics of ``ppo.loss``.

        Args:
            indices: (rows,) int64, contiguous: part of a minibatch.
            moments: Those of the whole minibatch: with its count, metric_sums of its parts add up.
            parameters: (rows, n) float32, of the policy at these rows.
            values: (rows,) float32.

        Raises:
            ConfigError: The policy's outputs have other shapes, or are elsewhere.
        """
        rows, device = len(indices), indices.device
        expected = [(rows, self.policy.view.num_parameters), (rows,)]
        if (found := [tuple(x.shape) for x in (parameters, values)]) != expected or parameters.device != device:
            raise ConfigError(
                f"the network of {'+'.join(self.policy.view.roles)} gives shapes {found} on {parameters.device} for "
                f"{rows} observations; expected parameters and values, {expected} on {device}"
            )
        parameters, values = parameters.detach(), values.detach()
        if parameters.stride(1) != 1:
            parameters = parameters.contiguous()
        count = parameters.shape[1]
        together = are_packed(parameters, values)  # then the gradients do so, too
        gradients = torch.empty((rows, width_of(count) if together else count), device=device)
        value_gradients = gradients[:, count] if together else torch.empty(rows, device=device)
        metrics = torch.empty((5, rows), device=device)
        unit = self.policy.value_scale
        unit = unit if isinstance(unit, torch.Tensor) else self._one
        self._loss.arguments[self._first :] = [
            *(x.data_ptr() for x in (unit, moments, indices, parameters)),
            *(np.int64(parameters.stride(0)), values.data_ptr(), np.int64(values.stride(0))),
            *(gradients.data_ptr(), np.int32(gradients.shape[1]), 0 if together else value_gradients.data_ptr()),
            *(metrics.data_ptr(), np.int64(rows)),
        ]
        self._loss()
        return gradients[:, :count], value_gradients, metrics.sum(1)
