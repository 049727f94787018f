"""PPO in torch: its configuration, generalised advantage estimates and the loss. A2C is one of its configurations.

Shapes: T steps, E environments, A agents, B = T * E * A samples, D observation size.

``advantages``, ``loss`` and ``explained_variance`` are the reference. The trainer computes the same numbers with the
kernels of ``cuda/learner``, in one pass each (``learner.py``), and the tests compare the two. ``trainer.py`` has the
loop: collect a rollout, update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.train.networks import Activation
from gpu_vecenv.train.policy import NetworkKind, Policy, Precision, RoleView, default_network

SCHEDULED = ("learning_rate", "clip", "entropy_coefficient")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyperparameters of Schulman et al., "Proximal policy optimization algorithms", 2017.

    Each policy may have its own. The options marked * belong to the run: all policies must agree on them.
    """

    total_steps: int = param(1_000_000, low=1)  # * env-steps of the whole run, summed over all environments
    num_steps: int = param(32, low=1)  # * T: steps per iteration
    num_epochs: int = param(4, low=1)  # passes over each iteration's samples
    num_minibatches: int = param(4, low=1)  # per epoch
    learning_rate: float = param(3e-4, low=0)  # of Adam
    final_learning_rate: float | None = param(0.0, low=0)  # reached linearly at the end of the run; None: constant
    gamma: float = param(0.99, low=0, high=1)  # discount per step
    gae_lambda: float = param(0.95, low=0, high=1)  # Schulman et al. 2016, equation 16
    normalize_advantages: bool = True  # per minibatch, to mean 0 and variance 1
    clip: float = param(0.2, low=0)  # of the probability ratio
    final_clip: float | None = param(None, low=0)  # reached linearly; None: constant
    value_clip: float | None = param(None, low=0)  # of the change of a value, in units of returns; None: no clipping
    value_coefficient: float = param(0.5, low=0)  # weight of the value loss
    entropy_coefficient: float = param(0.01, low=0)  # weight of the entropy bonus
    final_entropy_coefficient: float | None = param(None, low=0)  # reached linearly; None: constant
    target_kl: float | None = param(None, low=0)  # skip an iteration's remaining updates once approx_kl exceeds it
    max_grad_norm: float = param(0.5, low=0)  # gradients are scaled down to this norm
    normalize_obs: bool = False  # by running mean and variance
    normalize_returns: bool = False  # the critic predicts in units of the deviation of discounted sums of rewards
    network: NetworkKind = "mlp"  # the default network; "cnn": of images, "entities": of lists that obs_parts declares
    hidden_sizes: tuple[int, ...] = param((64, 64), low=1)  # units of the hidden layers of the default network
    activation: Activation = "tanh"  # of the hidden layers
    shared_trunk: bool = True  # actor and critic share the hidden layers
    squash: Squash = "clip"  # * how Gaussian samples are mapped to a Box
    precision: Precision = "float32"  # * of matrix products: "tf32" rounds factors where a GPU can; "bfloat16" mixed
    chunk_rows: int = param(2**20, low=1)  # samples per forward pass; gradients of a minibatch's chunks are summed

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def a2c(cls, **changes: Any) -> PPOConfig:
        """Advantage actor-critic, Mnih et al. 2016: one update per rollout, so that no ratio is ever clipped.

        Huang et al., "A2C is a special case of PPO", 2022.
        """
        settings = {"num_steps": 5, "num_epochs": 1, "num_minibatches": 1, "gae_lambda": 1.0, "learning_rate": 7e-4}
        return cls(**{**settings, "normalize_advantages": False, **changes})

    def schedule_ends(self) -> dict[str, tuple[float, float]]:
        """What changes linearly with the progress of the run: name -> its values at the start and at the end."""
        ends = {name: (getattr(self, name), getattr(self, f"final_{name}")) for name in SCHEDULED}
        return {name: (start, start if end is None else end) for name, (start, end) in ends.items()}

    def schedule(self, progress: float) -> tuple[float, ...]:
        """Learning rate, clip and entropy coefficient when the fraction ``progress`` of the run is done."""
        return tuple(start + (end - start) * progress for start, end in self.schedule_ends().values())


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    active: torch.Tensor,
    gamma: float | torch.Tensor,
    gae_lambda: float | torch.Tensor,
) -> torch.Tensor:
    """Generalised advantage estimates (T, …), the shape of all arguments; 0 where an agent was not active.

    ``next_values[t]`` is the value of the state after step t, before any reset. A terminated state has value 0. A
    truncated one keeps its value, but the sum over later steps ends there. ``gamma`` and ``gae_lambda`` may be tensors
    that broadcast, such as one number per agent.
    """
    bootstrap = torch.where(terminations, 0, gamma * next_values)
    deltas = torch.where(active, rewards + bootstrap - values, 0)
    decays = torch.where(active & ~(terminations | truncations), gamma * gae_lambda, 0.0).to(deltas.dtype)
    estimates = torch.empty_like(deltas)
    last_gae = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        last_gae = torch.addcmul(deltas[t], decays[t], last_gae, out=estimates[t])
    return estimates


def masked_mean(x: torch.Tensor, active: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over the active samples; inactive ones are ignored, even NaN. No device synchronisation."""
    return torch.where(active, x, 0).sum() / (active.sum().clamp(min=1) if count is None else count)


def explained_variance(returns: torch.Tensor, errors: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Fraction of the returns' variance that is not the variance of their ``errors``, over the active samples, ().

    Where returns do not vary by more than float32 sums round, it is 1 if the errors do not either, otherwise 0, as with
    ``force_finite`` in scikit-learn. NaN says that a number is not finite, or that a square overflows.
    """
    mean = masked_mean(returns, active)
    variance = masked_mean((returns - mean).square(), active)
    unexplained = masked_mean((errors - masked_mean(errors, active)).square(), active)
    rounding = (1e-6 * mean).square()  # about 8 units in the last place
    explained = torch.where(variance <= rounding, (unexplained <= rounding).float(), 1 - unexplained / variance)
    return torch.where(variance.isfinite(), explained, torch.nan)


def masked_normalize(x: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """``x`` with mean 0 and variance 1 over the active samples."""
    centred = x - masked_mean(x, active)
    return centred / (masked_mean(centred.square(), active).sqrt() + 1e-8)


class Batch(NamedTuple):
    """Samples of a rollout, (B, …); inactive ones are ignored."""

    obs: torch.Tensor  # (B, *obs_shape)
    draws: torch.Tensor  # (B, heads): actions, or Gaussian samples before squashing
    log_probs: torch.Tensor  # (B,), as are the next three, float32: of the policy that collected the rollout
    values: torch.Tensor
    advantages: torch.Tensor  # normalised or not
    returns: torch.Tensor
    active: torch.Tensor  # (B,) bool
    action_mask: torch.Tensor | None = None  # (B, n) bool


def loss(
    policy: Policy,
    batch: Batch,
    config: PPOConfig,
    *,
    clip: torch.Tensor | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar to minimise, and its metrics (5,): policy loss, value loss, entropy, approx. KL, clip fraction.

    ``clip`` and ``entropy_coefficient`` default to the initial ones of ``config``. ``count`` divides the sums and
    defaults to the number of active samples; with that of a whole minibatch, the losses of its chunks add up.
    """
    parameters, values = policy(batch.obs)
    if clip is None:
        clip = values.new_tensor(config.clip)
    if entropy_coefficient is None:
        entropy_coefficient = values.new_tensor(config.entropy_coefficient)
    log_probs, entropies = policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return masked_mean(x, batch.active, count)

    log_ratio = torch.where(batch.active, log_probs - batch.log_probs, 0)
    ratio = log_ratio.exp()
    surrogate = ratio * batch.advantages
    surrogate_clipped = ratio.clamp(1 - clip, 1 + clip) * batch.advantages
    policy_loss = mean(-torch.minimum(surrogate, surrogate_clipped))
    errors = (values - batch.returns).square()
    if config.value_clip is not None:
        values_clipped = batch.values + (values - batch.values).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum(errors, (values_clipped - batch.returns).square())
    value_loss = 0.5 * mean(errors / policy.value_scale**2)
    entropy = mean(entropies)
    total = policy_loss + config.value_coefficient * value_loss - entropy_coefficient * entropy
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)  # never negative: Schulman, "Approximating KL divergence", 2020
        clip_fraction = mean(((ratio - 1).abs() > clip).float())
        return total, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])


def make_policy(
    game: Env, roles: Sequence[str], config: PPOConfig, network: nn.Module | None, device: torch.device
) -> Policy:
    """The policy of some roles as ``config`` describes it, with ``network`` or a default one."""
    if network is None:
        view = RoleView(game, roles)
        network = default_network(view, config.hidden_sizes, config.activation, config.shared_trunk, config.network)
    return Policy(
        game,
        roles,
        network,
        normalize_obs=config.normalize_obs,
        normalize_returns=config.normalize_returns,
        squash=config.squash,
        bfloat16=config.precision == "bfloat16",
        device=device,
    )
