"""Launches of the learner's kernels: advantages, orders of samples, gathered rows, PPO's loss and its gradients.

``advantages`` and ``loss`` in ``ppo.py`` are their reference in torch. Kernels read the rollout's tensors by sample
index; only observations are gathered into a minibatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.engine_kernels import squash_source
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64, u64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.layers import are_packed, width_of
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.rollout_storage import Rollout

ADVANTAGE_BLOCK = 64  # threads per block: a column is a loop over all steps, and columns are few for a GPU
LOSS_BLOCK = 128  # threads per block; the same as LOSS_BLOCK in learner.cu
SHUFFLE_BLOCK = 256  # threads per block; the same as SHUFFLE_BLOCK in minibatch.cu
GATHER_BLOCK, WORDS_IN_FLIGHT = 256, 4  # threads per block, words of a thread; the same as in minibatch.cu
TILE_ROWS = 1024  # whose moments a block adds up; the same as TILE_ROWS in minibatch.cu

_STEPS = ("num_steps", "columns")
_ADVANTAGES = (
    Array("rewards", f32, const=True, shape=_STEPS),
    Array("values", f32, const=True, shape=_STEPS),
    Array("next_values", f32, const=True, shape=_STEPS),
    Array("terminations", boolean, const=True, shape=_STEPS),
    Array("truncations", boolean, const=True, shape=_STEPS),
    Array("active", boolean, const=True, shape=_STEPS),
    Array("gamma", f32, const=True),
    Array("gae_lambda", f32, const=True),
    Array("estimates", f32, shape=_STEPS),
    Array("returns", f32, shape=_STEPS),
    Scalar("num_steps", i64),
    Scalar("columns", i64),
)
SHUFFLE = KernelSignature(
    "shuffle",
    (
        Array("indices", i64, const=True),
        Array("seed", u64, const=True, shape=(1,)),
        Array("epoch", i64, shape=(1,)),
        Scalar("permutes", boolean),
        Array("active", boolean, const=True),
        Array("acting", boolean, const=True, optional=True),
        Array("estimates", f32, const=True),
        Array("order", i64),
        Array("moments", f64, shape=("minibatches", 4)),
        Array("parts", f64),
        Array("tickets", i32),
        Scalar("minibatches", i64),
        Scalar("rows", i64),  # of a minibatch
    ),
)
GATHER_ROWS = KernelSignature(
    "gather_rows",
    (
        Array("table", None, const=True, strided=True),
        Scalar("stride", i64),  # bytes from one row of the table to the next
        Scalar("words", i32),  # of a row
        Scalar("word", i32),  # bytes that are copied at once
        Scalar("block_rows", i32),
        Array("indices", i64, const=True, shape=("rows",)),
        Array("out", None),
        Scalar("rows", i64),
    ),
)
CLIP_GRAD_NORM = KernelSignature(
    "clip_grad_norm",
    (
        Array("norm", f32, const=True, shape=()),
        Array("critic_norm", f32, const=True, optional=True, shape=()),
        Scalar("first_of_critic", i64),
        Scalar("max_grad_norm", f32),
        Scalar("critic_max_grad_norm", f32),
        Scalar("target_kl", f32),
        Array("metrics", f32, const=True, shape=("num_metrics",)),
        Scalar("num_metrics", i32),
        Scalar("kl_index", i32),
        Array("learning_rate", f32, shape=()),
        Scalar("desired_kl", f32),
        Scalar("least_rate", f32),
        Scalar("most_rate", f32),
        Array("gradient", f32, shape=("parameters",)),
        Array("skip_update", f32, shape=()),
        Array("metric_sums", f32),
        Scalar("parameters", i64),
    ),
)


def _acting(layout: GameLayout, **options: Any) -> tuple[Array, ...]:
    return (Array("acting", boolean, const=True, **options),) if layout.tracks_acting else ()


def advantages(layout: GameLayout) -> KernelSignature:
    """The kernel of the advantages; ``acting`` has a row more than the others."""
    return KernelSignature("advantages", (*_ADVANTAGES, *_acting(layout)))


def loss_arguments(layout: GameLayout) -> tuple[Array | Scalar, ...]:
    """What the loss of a sample takes beside a network's outputs: the rollout and hyperparameters."""
    return (
        Array("active", boolean, const=True),
        *_acting(layout),
        Array("draws", layout.action.dtype, const=True),
        Array("log_probs", f32, const=True),
        Array("old_values", f32, const=True),
        Array("estimates", f32, const=True),
        Array("returns", f32, const=True),
        Array("action_mask", boolean, const=True, optional=True),
        Array("clip", f32, const=True, shape=()),
        Array("entropy_coefficient", f32, const=True, shape=()),
        Scalar("normalize_advantages", boolean),
        Scalar("value_coefficient", f32),
        Scalar("value_clip", f32),
        Scalar("scales_value_clip", boolean),
        Scalar("huber_delta", f32),
    )


@dataclass(frozen=True)
class LossSettings:
    """Options of PPO's loss, see ``PPOConfig``; clip and entropy_coefficient are tensors, which schedules change.

    Attributes:
        clip: Of the probability ratio; () float32, like the next.
        entropy_coefficient: Weight of the entropy bonus.
        value_coefficient: Weight of the value loss.
        value_clip: Of the change of a value; None: no clipping.
        normalize_advantages: To mean 0 and variance 1 over a minibatch's active samples.
        scales_value_clip: Whether ``value_clip`` is in the policy's ``value_scale``, otherwise in units of returns.
        huber_delta: Errors beyond it, in the policy's ``value_scale``, have a linear loss; None: all are squared.
        skip_update: () float32; ``PerceptronKernels`` compute nothing where it is 1. None: they always do.
    """

    clip: torch.Tensor
    entropy_coefficient: torch.Tensor
    value_coefficient: float
    value_clip: float | None
    normalize_advantages: bool
    scales_value_clip: bool
    huber_delta: float | None
    skip_update: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        config: PPOConfig,
        clip: torch.Tensor,
        entropy_coefficient: torch.Tensor,
        skip_update: torch.Tensor | None = None,
    ) -> LossSettings:
        """Those of a configuration, with these tensors."""
        return cls(
            clip,
            entropy_coefficient,
            config.value_coefficient,
            config.value_clip,
            config.normalize_advantages,
            config.scales_value_clip,
            config.huber_delta if config.value_loss == "huber" else None,
            skip_update,
        )


def loss_values(rollout: Rollout, settings: LossSettings) -> dict[str, Any]:
    """The values of ``loss_arguments``."""
    return {
        "active": rollout.learned,
        **({} if rollout.acting is None else {"acting": rollout.acting}),
        "draws": rollout.draws,
        "log_probs": rollout.log_probs,
        "old_values": rollout.values,
        "estimates": rollout.advantages,
        "returns": rollout.returns,
        "action_mask": rollout.action_mask,
        "clip": settings.clip,
        "entropy_coefficient": settings.entropy_coefficient,
        "normalize_advantages": settings.normalize_advantages,
        "value_coefficient": settings.value_coefficient,
        "value_clip": -1 if settings.value_clip is None else settings.value_clip,
        "scales_value_clip": settings.scales_value_clip,
        "huber_delta": -1 if settings.huber_delta is None else settings.huber_delta,
    }


def loss_gradients(layout: GameLayout) -> KernelSignature:
    """The kernel of the loss, for a game's kind of actions."""
    return KernelSignature(
        "loss_gradients",
        (
            *loss_arguments(layout),
            Scalar("num_parameters", i32),
            Array("value_scale", f32, const=True, shape=()),
            Array("moments", f64, const=True, shape=(4,)),
            Array("indices", i64, const=True, shape=("rows",)),
            Array("parameters", f32, const=True, strided=True, shape=("rows", "num_parameters")),
            Scalar("parameter_stride", i64),
            Array("values", f32, const=True, strided=True, shape=("rows",)),
            Scalar("value_stride", i64),
            Array("gradients", f32, shape=("rows", "width")),
            Scalar("width", i32),
            Array("value_gradients", f32, optional=True, shape=("rows",)),
            Array("metrics", f32, shape=(5, "rows")),
            Scalar("rows", i64),
        ),
    )


def _game_program(env: VecEnv, squash: Squash = "clip") -> Program:
    kernels, constants = [advantages(env.game.layout), loss_gradients(env.game.layout)], squash_source(squash)
    source = cuda_folder() / "learner/learner.cu"
    return env.functions.compile(source, kernels=kernels, game=env.game, constants=constants)


def _minibatch_program(functions: FunctionManager) -> Program:
    kernels = [SHUFFLE, GATHER_ROWS, CLIP_GRAD_NORM]
    return functions.compile(cuda_folder() / "learner/minibatch.cu", kernels=kernels)


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
    acting: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> Launch:
    """A launch of ``ppo.advantages`` of these tensors, and of the returns: advantages plus values.

    Args:
        env: Its game and device.
        rewards: (T, …, num_agents) float32. All tensors but gamma and gae_lambda have this shape and are contiguous;
            flags are bool.
        values: Of the states before each step.
        next_values: Of the states after each step.
        terminations: The state after the step has value 0.
        truncations: The sum over later steps ends.
        active: Estimates of inactive agents are 0.
        gamma: (num_agents,) float32.
        gae_lambda: (num_agents,) float32.
        acting: (T + 1, …, num_agents) bool, agents that act in each step, where the game's layout ``tracks_acting``.
        out: Tensors for advantages and returns, float32.
    """
    columns = rewards[0].numel()
    return _game_program(env).prepare(
        "advantages",
        LaunchShape(columns, threads_per_block=ADVANTAGE_BLOCK, work=rewards.numel()),
        rewards=rewards,
        values=values,
        next_values=next_values,
        terminations=terminations,
        truncations=truncations,
        active=active,
        gamma=gamma,
        gae_lambda=gae_lambda,
        estimates=out[0],
        returns=out[1],
        num_steps=len(rewards),
        columns=columns,
        **({} if acting is None else {"acting": acting}),
    )


def shuffle_launch(
    functions: FunctionManager,
    indices: torch.Tensor,
    seed: torch.Tensor,
    epoch: torch.Tensor,
    active: torch.Tensor,
    advantages: torch.Tensor,
    *,
    acting: torch.Tensor | None = None,
    permutes: bool,
    out: torch.Tensor,
    moments: torch.Tensor,
) -> Launch:
    """A launch that orders the samples of an epoch, and adds up the advantages of each of its minibatches.

    Args:
        functions: The FunctionManager of the tensors' device.
        indices: (num_minibatches * rows,) int64, which count through ``advantages``.
        seed: (1,) int64, the bits of a uint64; read on the device, like ``epoch``.
        epoch: (1,) int64, increased by 1.
        active: (T + 1, E, A) bool.
        advantages: (T, E, A) float32.
        acting: (T + 1, E, A) bool; None: all active agents act.
        permutes: Whether the order is a pseudo-random one, a function of seed, epoch and length alone; otherwise it is
            that of ``indices``.
        out: (num_minibatches * rows,) int64, the indices in their order.
        moments: (num_minibatches, 4) float64: the number of a minibatch's active samples whose agents acted, the sum
            of their advantages and that of the squares; the number of all active samples.
    """
    minibatches, device = len(moments), indices.device
    rows = len(indices) // minibatches
    tiles = -(-rows // TILE_ROWS) * minibatches
    return _minibatch_program(functions).prepare(
        "shuffle",
        LaunchShape(tiles, threads_per_item=SHUFFLE_BLOCK, threads_per_block=SHUFFLE_BLOCK, work=len(indices)),
        indices=indices,
        seed=seed,
        epoch=epoch,
        permutes=permutes,
        active=active,
        acting=acting,
        estimates=advantages,
        order=out,
        moments=moments,
        parts=torch.zeros(tiles * 4, dtype=torch.float64, device=device),
        tickets=torch.zeros(minibatches + 1, dtype=torch.int32, device=device),
        minibatches=minibatches,
        rows=rows,
    )


class RowGather:
    """Gathers rows of a table by their indices.

    Args:
        functions: The FunctionManager of the table's device.
        table: (…, *shape), any dtype. Its rows may have a stride, as padded observations do.
        most: The largest number of indices.
    """

    def __init__(self, functions: FunctionManager, table: torch.Tensor, most: int) -> None:
        self.table = table
        size, self._shape = table.element_size(), table.shape[1:]
        self._bytes, self._stride = self._shape.numel() * size, table.stride(0) * size
        # Where results are, their memory begins at a multiple of 16 bytes.
        blocks = -(-most // self._block_rows(self._word(table.data_ptr())))
        block = {"threads_per_item": GATHER_BLOCK, "threads_per_block": GATHER_BLOCK}
        shape = LaunchShape(blocks, **block, work=most * max(1, self._bytes // 4))
        self._launch = _minibatch_program(functions).prepare("gather_rows", shape, stride=self._stride)

    def _word(self, *addresses: int) -> int:
        """Bytes to copy at once, of rows at these addresses."""
        return next(w for w in (16, 4, 1) if all(x % w == 0 for x in (*addresses, self._bytes, self._stride)))

    def _block_rows(self, word: int) -> int:
        """Rows of a block: so many that no thread loads its words one after the other."""
        return max(1, GATHER_BLOCK * WORDS_IN_FLIGHT // max(1, self._bytes // word))

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows at ``indices`` (rows,) int64: (rows, *shape), contiguous."""
        if self._bytes == 0 or not self.table[0].is_contiguous():
            return self.table.index_select(0, indices)
        out = torch.empty((len(indices), *self._shape), dtype=self.table.dtype, device=self.table.device)
        word = self._word(self.table.data_ptr(), out.data_ptr())
        sizes = {"word": word, "words": self._bytes // word, "block_rows": self._block_rows(word)}
        self._launch(table=self.table, indices=indices, out=out, rows=len(indices), **sizes)
        return out


def clip_grad_norm_launch(
    functions: FunctionManager,
    norm: torch.Tensor,
    metrics: torch.Tensor,
    gradient: torch.Tensor,
    *,
    critic_norm: torch.Tensor | None = None,
    first_of_critic: int = 0,
    max_grad_norm: float,
    critic_max_grad_norm: float | None = None,
    target_kl: float | None,
    kl_index: int,
    learning_rate: torch.Tensor,
    desired_kl: float | None = None,
    rate_limits: tuple[float, float] = (0.0, math.inf),
    skip_update: torch.Tensor,
    metric_sums: torch.Tensor,
) -> Launch:
    """A launch that clips the norm of a gradient and decides whether the optimizer step is skipped, in place.

    Args:
        functions: The FunctionManager of the tensors' device.
        norm: () float32, like all others: of the gradient, without that of the critic where ``critic_norm`` is given.
        metrics: (n,) of the minibatch.
        gradient: (parameters,), scaled down to ``max_grad_norm``.
        critic_norm: () of the part of the gradient that is scaled down to ``critic_max_grad_norm`` instead; None: none.
        first_of_critic: Where that part begins; it is the last one.
        max_grad_norm: See ``LearnerConfig.max_grad_norm``.
        critic_max_grad_norm: See ``PPOConfig.critic_max_grad_norm``.
        target_kl: See ``PPOConfig.target_kl``.
        kl_index: Index of approx_kl among the metrics.
        learning_rate: () of the step, written if it follows approx_kl.
        desired_kl: See ``PPOConfig.desired_kl``.
        rate_limits: The least and the largest learning rate that follows approx_kl.
        skip_update: () set to 1 if approx_kl exceeds target_kl, or a metric or the norm is not finite.
        metric_sums: (n + 2,), to which ``skip_update`` is added, and metrics and norm unless it was 1 before.
    """
    return _minibatch_program(functions).prepare(
        "clip_grad_norm",
        LaunchShape(len(gradient) + 1),
        norm=norm,
        critic_norm=critic_norm,
        first_of_critic=first_of_critic if critic_norm is not None else len(gradient),
        max_grad_norm=max_grad_norm,
        critic_max_grad_norm=max_grad_norm if critic_max_grad_norm is None else critic_max_grad_norm,
        target_kl=math.inf if target_kl is None else target_kl,
        metrics=metrics,
        num_metrics=len(metrics),
        kl_index=kl_index,
        learning_rate=learning_rate,
        desired_kl=-1 if desired_kl is None else desired_kl,
        least_rate=rate_limits[0],
        most_rate=rate_limits[1],
        gradient=gradient,
        skip_update=skip_update,
        metric_sums=metric_sums,
        parameters=len(gradient),
    )


class LossKernel:
    """PPO's loss of samples of a rollout, and its gradients with respect to a network's outputs.

    Args:
        policy: The policy whose network gave the outputs.
        rollout: Everything but the outputs.
        settings: Of the loss.
        chunk: The largest number of samples of one call.
    """

    def __init__(self, policy: Policy, rollout: Rollout, settings: LossSettings, *, chunk: int) -> None:
        self.policy, self._one = policy, torch.ones((), device=rollout.rewards.device)
        self._loss = _game_program(rollout.env, policy.squash).prepare(
            "loss_gradients",
            LaunchShape(chunk, threads_per_block=LOSS_BLOCK),
            **loss_values(rollout, settings),
            num_parameters=policy.view.num_parameters,
        )

    def __call__(
        self, indices: torch.Tensor, moments: torch.Tensor, parameters: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``parameters`` and of ``values``, and these samples' part of the five metrics of ``ppo.loss``.

        Args:
            indices: (rows,) int64, contiguous: a chunk of a minibatch.
            moments: Of the whole minibatch: its count divides, so that the chunks' results add up.
            parameters: (rows, n) float32, the policy's outputs for these samples.
            values: (rows,) float32.

        Raises:
            ConfigError: The policy's outputs have other shapes, or are on another device.
        """
        rows, device = len(indices), indices.device
        expected = [(rows, self.policy.view.num_parameters), (rows,)]
        if (found := [tuple(x.shape) for x in (parameters, values)]) != expected or parameters.device != device:
            raise ConfigError(
                f"the network of {self.policy.view.name} returns shapes {found} on {parameters.device} for "
                f"{rows} observations; expected parameters and values, {expected} on {device}"
            )
        parameters, values = parameters.detach(), values.detach()
        if parameters.stride(1) != 1:
            parameters = parameters.contiguous()
        count = parameters.shape[1]
        together = are_packed(parameters, values)  # and so are the gradients
        gradients = torch.empty((rows, width_of(count) if together else count), device=device)
        value_gradients = gradients[:, count] if together else torch.empty(rows, device=device)
        metrics = torch.empty((5, rows), device=device)
        scale = self.policy.value_scale
        self._loss(
            value_scale=scale if isinstance(scale, torch.Tensor) else self._one,
            moments=moments,
            indices=indices,
            parameters=parameters,
            parameter_stride=parameters.stride(0),
            values=values,
            value_stride=values.stride(0),
            gradients=gradients,
            width=gradients.shape[1],
            value_gradients=None if together else value_gradients,
            metrics=metrics,
            rows=rows,
        )
        return gradients[:, :count], value_gradients, metrics.sum(1)
