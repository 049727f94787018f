"""Proximal policy optimisation, and A2C as one of its configurations: what a policy learns from a rollout.

Shapes: T steps, E replicas, A agents. Read from top to bottom: configuration, advantages, loss, learner. The loop
around it, which fills the rollout, is in ``trainer.py``. ``advantages`` and ``loss`` say in torch what is computed; the
trainer computes it by the kernels of ``learner_kernels.py``, in one pass each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.graph import GraphedCallable, GraphPool
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.learner_kernels import LossKernel, RowGather, clip_grad_norm_launch, shuffle_launch
from gpu_vecenv.train.policy import Activation, ActorCritic, Normalizer, Policy, Precision, RoleView, default_network
from gpu_vecenv.train.rollout_storage import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Schulman et al., "Proximal policy optimization algorithms", 2017.

    Each policy may have its own, but for those marked *: they belong to the run and must agree.
    """

    total_steps: int = param(1_000_000, low=1)  # * env-steps of the whole run, all replicas together
    num_steps: int = param(32, low=1)  # * T: steps per iteration
    num_epochs: int = param(4, low=1)  # passes over each iteration's data
    num_minibatches: int = param(4, low=1)  # per epoch
    learning_rate: float = param(3e-4, low=0)  # of Adam
    final_learning_rate: float | None = param(0.0, low=0)  # reached linearly at the end of the run; None: constant
    gamma: float = param(0.99, low=0, high=1)  # discount per step
    gae_lambda: float = param(0.95, low=0, high=1)  # Schulman et al. 2016, equation 16
    normalize_advantages: bool = True  # each minibatch's: mean 0, variance 1
    clip: float = param(0.2, low=0)  # of the probability ratio
    final_clip: float | None = param(None, low=0)  # reached linearly; None: constant
    value_clip: float | None = param(None, low=0)  # of a value's change, in units of returns; None: none
    value_coefficient: float = param(0.5, low=0)  # weight of the value loss
    entropy_coefficient: float = param(0.01, low=0)  # weight of the entropy bonus
    final_entropy_coefficient: float | None = param(None, low=0)  # reached linearly; None: constant
    target_kl: float | None = param(None, low=0)  # from a minibatch beyond it on an iteration's steps are not taken
    max_grad_norm: float = param(0.5, low=0)  # gradients are scaled down to this norm
    normalize_obs: bool = False  # by running mean and variance
    normalize_returns: bool = False  # values are learned in units of the returns' running deviation
    hidden_sizes: tuple[int, ...] = param((64, 64), low=1)  # units of the network's hidden layers
    activation: Activation = "tanh"  # of the hidden layers
    shared_trunk: bool = True  # actor and critic share the hidden layers
    squash: Squash = "clip"  # * how draws of a Gaussian are brought into a Box
    precision: Precision = "float32"  # * of matrix products: "tf32" rounds factors where a GPU can; "bfloat16" mixed
    chunk_rows: int = param(2**20, low=1)  # rows that go through the network at once; minibatches add chunks up

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def a2c(cls, **changes: Any) -> PPOConfig:
        """Advantage actor-critic, Mnih et al. 2016: one step on each rollout, so that no ratio is ever clipped.

        Huang et al., "A2C is a special case of PPO", 2022.
        """
        settings = {"num_steps": 5, "num_epochs": 1, "num_minibatches": 1, "gae_lambda": 1.0, "learning_rate": 7e-4}
        return cls(**{**settings, "normalize_advantages": False, **changes})

    def schedule(self, progress: float) -> tuple[float, float, float]:
        """Learning rate, clip and entropy coefficient when this share of the run is done."""

        def between(start: float, end: float | None) -> float:
            return start if end is None else start + (end - start) * progress

        return (
            between(self.learning_rate, self.final_learning_rate),
            between(self.clip, self.final_clip),
            between(self.entropy_coefficient, self.final_entropy_coefficient),
        )


def make_policy(
    game: Env, roles: Sequence[str], config: PPOConfig, network: nn.Module | None, device: torch.device
) -> Policy:
    """The policy of some roles as the configuration describes it, around ``network`` or one of ``hidden_sizes``."""
    if network is None:
        view = RoleView(game, roles)
        network = default_network(view, config.hidden_sizes, config.activation, config.shared_trunk)
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
    """Generalised advantage estimates, (T, …) as all others, 0 where an agent was not active.

    ``next_values[t]`` values the state that step t led to, before any reset. A terminated state is worth nothing; a
    truncated one keeps its value but ends the trace. ``gamma`` and ``gae_lambda`` may be tensors that broadcast, one
    number for each agent.
    """
    ahead = torch.where(terminations, 0, gamma * next_values)
    deltas = torch.where(active, rewards + ahead - values, 0)
    decays = torch.where(active & ~(terminations | truncations), gamma * gae_lambda, 0.0).to(deltas.dtype)
    estimates = torch.empty_like(deltas)
    trace = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        trace = torch.addcmul(deltas[t], decays[t], trace, out=estimates[t])
    return estimates


def masked_mean(x: torch.Tensor, active: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over active rows; the others may hold anything, NaN too. Nothing is read on the host."""
    return torch.where(active, x, 0).sum() / (active.sum().clamp(min=1) if count is None else count)


def masked_normalize(x: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """With mean 0 and variance 1 over the active rows."""
    centred = x - masked_mean(x, active)
    return centred / (masked_mean(centred.square(), active).sqrt() + 1e-8)


def loss(
    policy: Policy,
    batch: Batch,
    config: PPOConfig,
    *,
    clip: torch.Tensor | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar to minimise, and (policy loss, value loss, entropy, approximate KL, clipped share) for the log.

    ``clip`` and ``entropy_coefficient`` default to the configuration's first ones; ``count`` divides the sums, by
    default the number of active rows: with that of a whole minibatch, losses of its parts add up.
    """
    parameters, values = policy(batch.obs)
    clip = values.new_tensor(config.clip) if clip is None else clip
    entropy_weight = config.entropy_coefficient if entropy_coefficient is None else entropy_coefficient
    log_probs, entropies = policy.log_probs_and_entropies(parameters, batch.draws, batch.action_mask)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return masked_mean(x, batch.active, count)

    log_ratio = torch.where(batch.active, log_probs - batch.log_probs, 0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate, surrogate_clipped = ratio * batch.advantages, clipped * batch.advantages
    policy_loss = mean(-torch.minimum(surrogate, surrogate_clipped))
    errors = (values - batch.returns).square()
    if config.value_clip is not None:
        values_clipped = batch.values + (values - batch.values).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum(errors, (values_clipped - batch.returns).square())
    value_loss = 0.5 * mean(errors / policy.value_scale**2)
    entropy = mean(entropies)
    total = policy_loss + config.value_coefficient * value_loss - entropy_weight * entropy
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)  # never negative: Schulman, "Approximating KL divergence", 2020
        clip_fraction = mean(((ratio - 1).abs() > clip).float())
        return total, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])


LOSS_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
LEARNER_METRICS = (*LOSS_METRICS, "skipped_fraction", "explained_variance")  # of a learner, for the log


class Learner:
    """One policy in training: which rows of the rollout are its own, their order, its optimiser.

    Every tensor that it keeps is written in index, so that its stages can be graphs.
    """

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        rollout: Rollout,
        *,
        seed: int,
        world: World,
        graph_pool: GraphPool | None,
    ) -> None:
        self.policy, self.config, self.rollout, self.world = policy, config, rollout, world
        device, agents = rollout.rewards.device, policy.view.agents
        sample_indices = torch.arange(rollout.rewards.numel(), device=device).view_as(rollout.rewards)
        self.indices = sample_indices[:, :, agents].flatten().contiguous()
        if len(self.indices) % config.num_minibatches:
            steps, num_envs, count = sample_indices[:, :, agents].shape
            raise ConfigError(
                f"num_minibatches is {config.num_minibatches}; expected a divisor of num_steps x num_envs x agents = "
                f"{steps} x {num_envs} x {count} = {len(self.indices)}"
            )
        if config.normalize_advantages and len(self.indices) == config.num_minibatches:
            raise ConfigError(
                f"num_minibatches is {config.num_minibatches}, so each holds {len(self.indices)} / "
                f"{config.num_minibatches} = 1 row, whose normalised advantage is always 0; expected fewer, or "
                "normalize_advantages=False"
            )
        self.order = self.indices.clone()
        self.epoch, self.minibatch_index = torch.zeros((2, 1), dtype=torch.int64, device=device)
        own_seed = torch.tensor([seed - (seed >> 63 << 64)], device=device)  # the same bits, signed
        functions = rollout.env.functions
        self._shuffle = shuffle_launch(functions, self.indices, own_seed, self.epoch, out=self.order)
        self.learning_rate, self.clip, self.entropy_coefficient = torch.zeros(3, device=device)
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.obs = rollout.flat_obs(policy.view)
        # A minibatch of all rows, in order, is read where it lies.
        self.in_order = config.num_minibatches == 1 and len(self.indices) == len(self.obs)
        minibatch = len(self.indices) // config.num_minibatches
        chunk = min(minibatch, config.chunk_rows)
        self._rows = RowGather(functions, self.obs, chunk)
        if isinstance(policy.network, ActorCritic):
            kernel_on(device)  # made before a capture
        self.kernel = LossKernel(
            policy,
            rollout,
            minibatch=minibatch,
            chunk=chunk,
            clip=self.clip,
            entropy_coefficient=self.entropy_coefficient,
            value_coefficient=config.value_coefficient,
            value_clip=config.value_clip,
            normalize_advantages=config.normalize_advantages,
        )
        # All gradients lie in one tensor, the metrics of the log behind them: one sum over processes, one norm.
        sizes = [p.numel() for p in self.parameters]
        flat = torch.zeros(sum(sizes) + len(LOSS_METRICS) - 1, device=device)
        self.flat_grad_and_metrics, self.flat_grad, self.metrics = flat, flat[: sum(sizes)], flat[sum(sizes) :]
        for p, part in zip(self.parameters, self.flat_grad.split(sizes), strict=True):
            p.grad = part.view_as(p)
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=self.learning_rate, eps=1e-5, fused=True, capturable=device.type == "cuda"
        )
        # Where it is 1, Adam changes nothing: the device decides. It is a word of torch's own gradient scaler.
        self.skip_update = torch.ones((), device=device)
        self.optimizer.found_inf = self.skip_update  # type: ignore[attr-defined]
        self.optimizer.step()  # makes Adam's state
        self.metric_sums = torch.zeros(len(LOSS_METRICS) + 1, device=device)  # and steps that were not taken
        self._norm = torch.zeros((), device=device)
        self._clip_grad_norm = clip_grad_norm_launch(
            functions,
            self._norm,
            self.metrics,
            self.flat_grad,
            max_grad_norm=config.max_grad_norm,
            target_kl=config.target_kl,
            kl_index=LOSS_METRICS.index("approx_kl"),
            skip_update=self.skip_update,
            metric_sums=self.metric_sums,
        )
        self.explained_variance = torch.zeros((), device=device)
        sources: tuple[tuple[Normalizer | None, Callable[[int], torch.Tensor]], ...] = (
            (policy.obs_normalizer, lambda t: policy.view.obs(rollout.obs[t]).flatten(0, 1)),
            (policy.return_normalizer, lambda t: rollout.returns[t][:, agents].flatten()),
        )
        self.normalizer_updates = [
            (normalizer, rows, torch.zeros(1 + 2 * normalizer.mean.numel(), dtype=torch.float64, device=device))
            for normalizer, rows in sources
            if normalizer is not None
        ]
        named = {
            call.__name__: call for call in (self.shuffle, self.backward, self.optimizer_step, self.update_normalizers)
        }
        roles = "+".join(policy.view.roles)
        self.stages = [GraphedCallable(call, f"{name} of {roles}", graph_pool) for name, call in named.items()]

    def update_statistics(self) -> None:
        """Take in what an iteration has collected."""
        data, agents = self.rollout, self.policy.view.agents
        active, returns, estimates = (x[:, :, agents] for x in (data.active[:-1], data.returns, data.advantages))
        spread, missed = (masked_mean((x - masked_mean(x, active)).square(), active) for x in (returns, estimates))
        self.explained_variance.copy_(1 - missed / spread.clamp(min=1e-8))
        for normalizer, rows, moments in self.normalizer_updates:
            for t, counted in enumerate(active.flatten(1)):
                moments += normalizer.moments(rows(t), counted)

    def update(self, progress: float, iteration: int) -> None:
        """All epochs and minibatches of an iteration, when ``progress`` of the run is done."""
        schedule = (self.learning_rate, self.clip, self.entropy_coefficient)
        for tensor, value in zip(schedule, self.config.schedule(progress), strict=True):
            tensor.fill_(value)
        self.epoch.fill_(iteration * self.config.num_epochs)
        self.metric_sums.zero_()
        self.skip_update.zero_()
        shuffle, backward, optimizer_step, update_normalizers = self.stages
        for _ in range(self.config.num_epochs):
            shuffle()
            for _ in range(self.config.num_minibatches):
                backward()
                self.world.all_reduce_mean(self.flat_grad_and_metrics)
                optimizer_step()
        for _, _, moments in self.normalizer_updates:
            self.world.all_reduce_sum(moments)
        if self.normalizer_updates:
            update_normalizers()

    def shuffle(self) -> None:
        """A new order of the rows: a function of seed, epoch and row alone, the same on every device."""
        if self.config.num_minibatches > 1:
            self._shuffle()
        self.epoch += 1
        self.minibatch_index.zero_()

    def backward(self) -> None:
        """Gradients of the next minibatch, chunk by chunk."""
        indices = self.order.view(self.config.num_minibatches, -1).index_select(0, self.minibatch_index)[0]
        moments = self.kernel.moments(indices)
        for start in range(0, len(indices), self.config.chunk_rows):
            part = slice(start, start + self.config.chunk_rows)
            with _fused(self.policy.network):
                outputs = self.policy(self.obs[part] if self.in_order else self._rows(indices[part]))
            *gradients, metrics = self.kernel(indices[part], moments, *outputs)
            learnt = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            own, of_own = zip(*learnt, strict=True)
            learning = [p for p in self.parameters if p.requires_grad]  # some may have been frozen since
            found = dict(zip(learning, torch.autograd.grad(own, learning, of_own, allow_unused=True), strict=True))
            parts = [(torch.zeros_like(p) if found.get(p) is None else found[p]).flatten() for p in self.parameters]
            if start == 0:
                torch.cat([*parts, metrics], out=self.flat_grad_and_metrics)
            else:
                self.flat_grad_and_metrics += torch.cat([*parts, metrics])
        self.minibatch_index += 1

    def optimizer_step(self) -> None:
        """One step of the optimiser, unless the gradient is not finite or the policy has moved too far."""
        torch.linalg.vector_norm(self.flat_grad, out=self._norm)
        self._clip_grad_norm()
        self.optimizer.step()

    def update_normalizers(self) -> None:
        """Statistics of this iteration normalise the next: within one, nothing moves but the weights."""
        for normalizer, _, moments in self.normalizer_updates:
            normalizer.update_from_moments(moments)
            moments.zero_()

    def metrics_of_iteration(self) -> torch.Tensor:
        """Those of the names in ``LEARNER_METRICS``, means over the minibatches, on the device."""
        steps = self.config.num_epochs * self.config.num_minibatches
        return torch.cat([self.metric_sums / steps, self.explained_variance[None]])

    def state(self) -> dict[str, torch.Tensor]:
        """Optimiser's tensors, live, by name."""
        states = (self.optimizer.state[p] for p in self.parameters)
        return {f"{k}.{name}": tensor for k, state in enumerate(states) for name, tensor in sorted(state.items())}


@contextmanager
def _fused(network: nn.Module) -> Iterator[None]:
    """The default network gives gradients by the kernels of layers.py; afterwards it is torch's own again."""
    if isinstance(network, ActorCritic):
        network.fused = True
    try:
        yield
    finally:
        if isinstance(network, ActorCritic):
            network.fused = False
