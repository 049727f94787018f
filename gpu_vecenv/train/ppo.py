"""PPO in torch: its configuration, generalised advantage estimates and the loss. A2C is one of its configurations.

Shapes: T steps, E environments, A agents, B = T * E * A samples, D observation size.

``advantages``, ``loss`` and ``explained_variance`` are the reference. The trainer computes the same numbers with the
kernels of ``cuda/learner``, in one pass each (``learner.py``), and the tests compare the two. ``trainer.py`` has the
loop: collect a rollout, update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from gpu_vecenv.declare.config import param, with_known_options
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Context, Critic
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy import Policy, central_critic, default_actor, default_network
from gpu_vecenv.train.role_view import RoleView

ValueLoss = Literal["squared", "huber"]
MAPPO = {
    "num_epochs": 15,
    "num_minibatches": 1,
    "learning_rate": 5e-4,
    "final_learning_rate": None,
    "adam_epsilon": 1e-5,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "normalize_advantages": True,
    "clip": 0.2,
    "value_clip": 0.2,
    "scales_value_clip": True,
    "value_loss": "huber",
    "huber_delta": 10.0,
    "value_coefficient": 1.0,
    "entropy_coefficient": 0.01,
    "max_grad_norm": 10.0,
    "critic_max_grad_norm": 10.0,
    "value_norm_beta": 0.99999,
    "hidden_sizes": (64, 64),
    "activation": "relu",
    "critic": "central",
    "agent_ids": True,
    "actor_gain": 0.01,
    "sequence_length": 10,
}
SCHEDULED = ("learning_rate", "clip", "entropy_coefficient")


@with_known_options
@dataclass(frozen=True, kw_only=True)
class PPOConfig(LearnerConfig):
    """Hyperparameters of Schulman et al., "Proximal policy optimization algorithms", 2017.

    Each policy may have its own. The options marked * in ``docs/hyper_parameters.md`` and in the list of
    ``gpu-vecenv train GAME --help`` belong to the run: all policies must agree on them.

    Example:
        >>> config = gpu_vecenv.PPOConfig(total_steps=100_000, learning_rate=1e-3)
        >>> config.gamma, config.clip, config.num_minibatches
        (0.99, 0.2, 4)
    """

    gae_lambda: float = param(0.95, low=0, high=1)  # Schulman et al. 2016, equation 16
    normalize_advantages: bool = True  # per minibatch, to mean 0 and variance 1
    clip: float = param(0.2, low=0)  # of the probability ratio
    final_clip: float | None = param(None, low=0)  # reached linearly; None: constant
    value_clip: float | None = param(None, low=0)  # of the change of a value, in units of returns; None: no clipping
    scales_value_clip: bool = False  # value_clip is in units of the critic's output instead, see normalize_returns
    value_loss: ValueLoss = "squared"  # half the square of errors, or "huber": linear beyond huber_delta
    huber_delta: float = param(10.0, low=0)  # in units of the critic's output
    value_coefficient: float = param(0.5, low=0)  # weight of the value loss
    entropy_coefficient: float = param(0.01, low=0)  # weight of the entropy bonus
    final_entropy_coefficient: float | None = param(None, low=0)  # reached linearly; None: constant
    # the learning rate falls where approx_kl is over twice this, and rises where it is under half; None: the schedule
    desired_kl: float | None = param(None, low=0)
    least_learning_rate: float = param(1e-5, low=0)  # lower limit of the learning rate with desired_kl
    most_learning_rate: float = param(1e-2, low=0)  # upper limit of the learning rate with desired_kl
    target_kl: float | None = param(None, low=0)  # skip an iteration's remaining updates once approx_kl exceeds it
    normalize_returns: bool = False  # the critic predicts in units of the deviation of discounted sums of rewards
    # MAPPO's value norm in place of normalize_returns: mean and deviation of returns, decaying by this at each update
    value_norm_beta: float | None = param(None, low=0, high=1)
    shared_trunk: bool = True  # actor and critic share the hidden layers, unless the critic is central
    critic: Critic = "own"  # values of an agent are of its own observation, or "central": of those of all agents
    critic_max_grad_norm: float | None = param(None, low=0)  # of a central critic alone; None: max_grad_norm is of both
    actor_gain: float = param(0.01, low=0)  # of the actor head's orthogonal weights
    post_hidden_sizes: tuple[int, ...] = param((), low=1)  # units of layers behind a recurrent one, of actor and critic

    algorithm: ClassVar[str] = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize_returns and self.value_norm_beta is not None:
            raise ConfigError(
                f"normalize_returns is True and value_norm_beta is {self.value_norm_beta}; expected one of them"
            )
        if self.network in ("cnn", "entities") and self.critic == "central":
            raise ConfigError(
                f"network is {self.network!r} with critic 'central'; expected network 'mlp', 'gru' or 'lstm', or "
                "critic 'own'"
            )
        if self.critic_max_grad_norm is not None and self.critic != "central":
            raise ConfigError(
                f"critic_max_grad_norm is {self.critic_max_grad_norm} with critic {self.critic!r}; expected None, or "
                "critic 'central', which has a network of its own"
            )
        if self.post_hidden_sizes and self.network not in ("gru", "lstm"):
            raise ConfigError(
                f"post_hidden_sizes is {self.post_hidden_sizes} with network {self.network!r}; expected (), or network "
                "'gru' or 'lstm': they are behind the recurrent layer"
            )
        if not self.least_learning_rate <= self.most_learning_rate:
            raise ConfigError(
                f"least_learning_rate is {self.least_learning_rate}, most_learning_rate {self.most_learning_rate}; "
                "expected the former not to be larger"
            )
        limits = self.least_learning_rate, self.most_learning_rate
        if self.desired_kl is not None and not limits[0] <= self.learning_rate <= limits[1]:
            raise ConfigError(
                f"learning_rate is {self.learning_rate} with desired_kl; expected one of least_learning_rate, "
                f"{limits[0]}, to most_learning_rate, {limits[1]}, in which it stays"
            )

    @classmethod
    def mappo(cls, **changes: Any) -> PPOConfig:
        """MAPPO: Yu et al., "The surprising effectiveness of PPO in cooperative, multi-agent games", 2022.

        The default options of its reference implementation. Those of the run's sizes are not among them, and the
        network has no memory: with ``network="gru"`` it is their recurrent one, and ``num_steps`` a multiple of 10.
        """
        return cls(**{**MAPPO, **changes})

    @classmethod
    def a2c(cls, **changes: Any) -> PPOConfig:
        """Advantage actor-critic, Mnih et al. 2016: one update per rollout, so that no ratio is ever clipped.

        Huang et al., "A2C is a special case of PPO", 2022.
        """
        settings = {"num_steps": 5, "num_epochs": 1, "num_minibatches": 1, "gae_lambda": 1.0, "learning_rate": 7e-4}
        return cls(**{**settings, "normalize_advantages": False, **changes})

    @property
    def reads_states(self) -> bool:
        """Of a central critic."""
        return self.critic == "central"

    @property
    def trace_decay(self) -> float:
        """Of generalised advantage estimates."""
        return self.gae_lambda

    def rates(self, progress: float) -> dict[str, float]:
        """As for every algorithm, but for a rate that follows ``approx_kl``: the device has it."""
        return super().rates(progress) if self.desired_kl is None else {}

    @property
    def scheduled(self) -> tuple[str, ...]:
        """Also PPO's own."""
        return SCHEDULED

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
    acting: torch.Tensor | None = None,
    zero_sum: bool = False,
) -> torch.Tensor:
    """Generalised advantage estimates (T, …), the shape of all arguments but acting; 0 where an agent was not active.

    ``next_values[t]`` is the value of the state after step t, before any reset. A terminated state has value 0. A
    truncated one keeps its value, but the sum over later steps ends there. ``gamma`` and ``gae_lambda`` may be tensors
    that broadcast, such as one number per agent.

    ``acting`` (T + 1, …) marks the agents that act in each step; None: all active ones do. Lambda counts their own
    decisions only: from a decision to the agent's next one, rewards are discounted step by step and summed up, and
    values in between cancel out. The estimate of an active agent that does not act is the error of its value, by the
    same sum. With ``zero_sum``, for two agents on the last axis, the value of a state for an agent that does not act
    there is minus that for the other one, if it does.
    """
    factor: float | torch.Tensor = gamma * gae_lambda
    if acting is not None:
        if zero_sum:
            values, next_values = (
                torch.where(now | ~now.flip(-1), x, -x.flip(-1))
                for x, now in ((values, acting[:-1]), (next_values, acting[1:]))
            )
        factor = torch.where(acting[1:], factor, gamma)
    bootstrap = torch.where(terminations, 0, gamma * next_values)
    deltas = torch.where(active, rewards + bootstrap - values, 0)
    decays = torch.where(active & ~(terminations | truncations), factor, 0.0).to(deltas.dtype)
    estimates = torch.empty_like(deltas)
    last_gae = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        last_gae = torch.addcmul(deltas[t], decays[t], last_gae, out=estimates[t])
    return estimates


def adapted_rate(rate: float, approx_kl: float, config: PPOConfig) -> float:
    """A minibatch's learning rate, from that of the one before and its own KL divergence, with ``desired_kl``.

    The rule of Rudin et al., "Learning to walk in minutes using massively parallel deep reinforcement learning", 2022.
    """
    assert config.desired_kl is not None
    if approx_kl > 2 * config.desired_kl:
        return max(rate / 1.5, config.least_learning_rate)
    if 0 < approx_kl < config.desired_kl / 2:
        return min(rate * 1.5, config.most_learning_rate)
    return rate


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
    """Samples of a rollout, (B, …); inactive ones are ignored, and of agents that did not act all but the value is."""

    obs: torch.Tensor  # (B, *obs_shape)
    draws: torch.Tensor  # (B, heads): actions, or draws of a Box before squashing
    log_probs: torch.Tensor  # (B,), as are the next three, float32: of the policy that collected the rollout
    values: torch.Tensor
    advantages: torch.Tensor  # normalised or not
    returns: torch.Tensor
    active: torch.Tensor  # (B,) bool
    action_mask: torch.Tensor | None = None  # (B, n) bool
    acting: torch.Tensor | None = None  # (B,) bool; None: all active agents act
    context: Context | None = None  # what networks read beside the observations


def loss(
    policy: Policy,
    batch: Batch,
    config: PPOConfig,
    *,
    clip: torch.Tensor | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    value_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar to minimise, and its metrics (5,): policy loss, value loss, entropy, approx. KL, clip fraction.

    ``clip`` and ``entropy_coefficient`` default to the initial ones of ``config``. ``count`` divides the sums and
    defaults to the number of active samples whose agents acted; with that of a whole minibatch, the losses of its
    chunks add up. ``value_count``, of all active samples, does so for the value loss.
    """
    parameters, values = policy(batch.obs) if batch.context is None else policy(batch.obs, context=batch.context)
    if clip is None:
        clip = values.new_tensor(config.clip)
    if entropy_coefficient is None:
        entropy_coefficient = values.new_tensor(config.entropy_coefficient)
    log_probs, entropies = policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask)

    acted = batch.active if batch.acting is None else batch.active & batch.acting

    def mean(x: torch.Tensor) -> torch.Tensor:
        return masked_mean(x, acted, count)

    log_ratio = torch.where(acted, log_probs - batch.log_probs, 0)
    ratio = log_ratio.exp()
    surrogate = ratio * batch.advantages
    surrogate_clipped = ratio.clamp(1 - clip, 1 + clip) * batch.advantages
    policy_loss = mean(-torch.minimum(surrogate, surrogate_clipped))
    errors = (values - batch.returns).abs()
    if config.value_clip is not None:
        value_clip = config.value_clip * (policy.value_scale if config.scales_value_clip else 1)
        values_clipped = batch.values + (values - batch.values).clamp(-value_clip, value_clip)
        errors = torch.maximum(errors, (values_clipped - batch.returns).abs())
    errors = errors / policy.value_scale
    linear = config.huber_delta * (2 * errors - config.huber_delta)
    is_linear = (config.value_loss == "huber") & (errors > config.huber_delta)
    value_count = count if batch.acting is None else value_count
    value_loss = 0.5 * masked_mean(torch.where(is_linear, linear, errors.square()), batch.active, value_count)
    entropy = mean(entropies)
    total = policy_loss + config.value_coefficient * value_loss - entropy_coefficient * entropy
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)  # never negative: Schulman, "Approximating KL divergence", 2020
        clip_fraction = mean(((ratio - 1).abs() > clip).float())
        return total, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])


def make_policy(
    game: Env, roles: Sequence[str], config: PPOConfig, network: nn.Module | None, device: torch.device
) -> Policy:
    """The policy of some roles as ``config`` describes it, with ``network`` or a default one of ``hidden_sizes``.

    A central critic is one of ``hidden_sizes`` in any case, and recurrent if ``config.network`` is.
    """
    view, central = RoleView(game, roles), config.critic == "central"
    layers, ids, kind = (config.hidden_sizes, config.activation), config.agent_ids, config.network
    common: dict[str, Any] = {"agent_ids": ids, "post_hidden_sizes": config.post_hidden_sizes}
    settings: dict[str, Any] = {**common, "actor_gain": config.actor_gain, "squash": config.squash}
    if network is None and central:
        network = default_actor(view, *layers, kind, **settings)
    elif network is None:
        network = default_network(view, *layers, config.shared_trunk, kind, **settings)
    return Policy(
        game,
        roles,
        network,
        critic=central_critic(game, view, *layers, kind, **common) if central else None,
        agent_ids=ids,
        normalize_obs=config.normalize_obs,
        normalize_returns=config.normalize_returns,
        value_norm_beta=config.value_norm_beta,
        squash=config.squash,
        bfloat16=config.precision == "bfloat16",
        device=device,
    )
