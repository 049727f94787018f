"""Learner: the updates of one policy from a rollout, with the kernels of ``cuda/learner`` and CUDA graphs.

Shapes: T steps, E environments, A agents, B = T * E * A samples, D observation size. A subclass has an algorithm's loss
and schedules: ``ppo_learner.py``, ``pqn_learner.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from gpu_vecenv.compile.function_manager import Launch
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.env_ranges import EnvRanges, all_envs
from gpu_vecenv.train.graph import GraphedCallable, GraphPool
from gpu_vecenv.train.iteration_kernels import explained_variance_launch, learner_metrics_launch
from gpu_vecenv.train.kept_tensors import FlatTensors, KeptTensors
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.learner_kernels import RowGather, clip_grad_norm_launch, shuffle_launch
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.normalizer_kernels import NormalizerUpdate, obs_update, reward_update, state_update
from gpu_vecenv.train.normalizers import ValueNorm
from gpu_vecenv.train.optimizer import (
    adam_launch,
    adam_launch_by_addresses,
    few_squares,
    num_squares,
    sum_parts_launch,
    sum_squares_launch,
)
from gpu_vecenv.train.perceptron import is_plain
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.policy_kernels import GradientsCall, PolicyKernels
from gpu_vecenv.train.rollout_context import RolloutContext
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.sequences import RecurrentStates, Sequences, agents_together, block_shuffle, first_samples
from gpu_vecenv.train.torch_optimizers import (
    RAdam,
    SkippedSteps,
    address_table,
    make_optimizer,
    optimizer_tensors,
)
from gpu_vecenv.train.value_norm import ValueNormUpdate

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")  # the state's tensors, by their names in torch
OTHER_METRICS = ("skipped_fraction", "explained_variance", "learning_rate")  # beside those of the loss
ConfigT = TypeVar("ConfigT", bound=LearnerConfig)


class Loss(Protocol):
    """The loss of samples of a rollout, and its gradients with respect to a network's outputs."""

    def __call__(
        self, indices: torch.Tensor, moments: torch.Tensor, parameters: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``parameters`` and ``values``, and these samples' part of the loss's metrics.

        Args:
            indices: (rows,) int64, contiguous: a chunk of a minibatch.
            moments: (4,) float64, of the whole minibatch, see ``shuffle_launch``.
            parameters: (rows, n) float32, the policy's outputs for these samples.
            values: (rows,) float32.
        """


class Learner(ABC, Generic[ConfigT]):
    """Trains one policy: its sample indices, their order in each epoch, its gradients and its optimizer.

    All tensors are written in place, so that CUDA graphs of the stages stay valid.

    Attributes:
        loss_metrics: Names of the numbers that the loss gives, and "grad_norm", the last one; all must be finite.
        schedules: (n, 2) float64, of the options ``LearnerConfig.scheduled`` the values at the run's start and end.
        together: So many agents of an environment are in a minibatch together, side by side: 1, or all of the policy's.
        envs: The environments in which the policy acts.

    Args:
        policy: The policy, on the rollout's device.
        config: Its hyperparameters.
        rollout: What it learns from.
        seed: Of the order of the samples.
        world: The processes that average gradients.
        graph_pool: Memory pool of the CUDA graphs; None runs without graphs.
        kernels: Of the policy, which compute its gradients; None: torch does, with the kernel of the loss.
        num_iterations: Of the run, which the schedules follow.
        states: In the rollout, of a recurrent policy; it learns from sequences in place of samples.
        envs: The environments in which the policy acts, from which it learns; None: all.
        storage: Where gradients and metrics are, (``num_gradients_and_metrics``,) float32 zeros; None: a tensor of its
            own.

    Raises:
        ConfigError: The minibatches cannot have equal sizes.
    """

    loss_metrics: ClassVar[tuple[str, ...]]
    together = 1

    def __init__(
        self,
        policy: Policy,
        config: ConfigT,
        rollout: Rollout,
        *,
        seed: int,
        world: World,
        graph_pool: GraphPool | None,
        kernels: PolicyKernels | None = None,
        num_iterations: int = 1,
        states: RecurrentStates | None = None,
        envs: EnvRanges | None = None,
        storage: torch.Tensor | None = None,
    ) -> None:
        self.policy, self.config, self.rollout, self.world = policy, config, rollout, world
        self.kernels, self.num_iterations = kernels, num_iterations
        device = rollout.rewards.device
        self.envs = envs or all_envs(rollout.env.num_envs)
        self.epoch, self.minibatch_index, self.iteration = torch.zeros((3, 1), dtype=torch.int64, device=device)
        self.progress, self._stopped = torch.zeros((2, 1), dtype=torch.float64, device=device)
        # The value of `iteration` that the host expects on the device; None: it must be written.
        self._clock: int | None = 0
        self.schedules = torch.tensor(list(config.schedule_ends().values()), dtype=torch.float64).to(device)
        self.learning_rate = torch.zeros((), device=device)
        self.learning_rate.fill_(config.learning_rate)
        self.skip_update = torch.ones((), device=device)  # the kernel clip_grad_norm, or that of Adam, sets it
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self._make_order(seed, states)
        self._make_loss_of_chunks()
        self._make_gradient(storage)
        self._make_optimizer()
        self._make_step()
        self.explained_variance = torch.zeros((), device=device)
        self._explain_variance = explained_variance_launch(
            rollout.env.functions,
            self.indices,
            rollout.returns,
            rollout.advantages,
            rollout.learned,
            out=self.explained_variance,
        )
        self._begin = self.make_begin()
        self._add_metrics: Launch | None = None
        self._make_normalizer_updates()
        stages = self.normalize_values, self.shuffle, self.backward, self.optimizer_step, self.all_minibatches
        self.stages = {
            stage.__name__: GraphedCallable(stage, f"{stage.__name__} of {policy.view.name}", graph_pool)
            for stage in stages
        }

    def _make_order(self, seed: int, states: RecurrentStates | None) -> None:
        """The indices of the samples, and what permutes them in each epoch."""
        policy, config, rollout = self.policy, self.config, self.rollout
        self.indices = first_samples(policy, rollout, 1, 1, self.envs).flatten().contiguous()
        firsts = first_samples(policy, rollout, 1, self.together, self.envs)
        if firsts.numel() % config.num_minibatches:
            raise ConfigError(
                f"num_minibatches is {config.num_minibatches}; expected a divisor of num_steps x num_envs x "
                f"{'agents' if self.together == 1 else 'teams'} = {' x '.join(map(str, firsts.shape))} = "
                f"{firsts.numel()}"
            )
        self.sequences = None
        if states is not None:
            self.sequences = Sequences(policy, rollout, states, config.num_minibatches, self.together, self.envs)
        self.order = self.indices.clone()
        self.moments = torch.zeros((config.num_minibatches, 4), dtype=torch.float64, device=self.order.device)
        # uint64 reinterpreted as int64
        seed_word = torch.tensor([seed - (seed >> 63 << 64)], device=self.order.device)
        written: dict[str, torch.Tensor] = {"out": self.order, "moments": self.moments}
        self._shuffle: Callable[[], None]
        if self.sequences is not None:
            self._shuffle = self.sequences.shuffle(seed_word, self.epoch, **written)
        elif self.together > 1:
            teams = firsts.flatten().contiguous(), 1, agents_together(policy, self.together)
            self._shuffle = block_shuffle(rollout, *teams, seed_word, self.epoch, out=self.order, moments=self.moments)
        else:
            self._shuffle = shuffle_launch(
                rollout.env.functions,
                self.indices,
                seed_word,
                self.epoch,
                rollout.learned,
                rollout.advantages,
                acting=rollout.acting,
                permutes=config.num_minibatches > 1,
                **written,
            )

    def _make_loss_of_chunks(self) -> None:
        """The loss of so many samples as are computed at once, and what gathers their observations."""
        policy, config, rollout = self.policy, self.config, self.rollout
        self.obs = rollout.flat_obs(policy.view)
        # One minibatch that holds every sample needs neither a permutation nor a copy of the observations.
        self.in_order = config.num_minibatches == 1 and len(self.indices) == len(self.obs)
        length = 1 if self.sequences is None else self.sequences.length
        # Whole sequences, of whole teams.
        blocks_of_chunk = max(1, min(self._minibatch_rows, config.chunk_rows) // (length * self.together))
        self._chunk_sequences = blocks_of_chunk * self.together
        self._chunk = chunk = self._chunk_sequences * length
        self._rows = RowGather(rollout.env.functions, self.obs, chunk)
        self._context = RolloutContext(policy, rollout, chunk)
        if _with_layer_kernels(policy):
            kernel_on(self.obs.device)  # compiled here: compilation is not possible during graph capture
        self.kernel = self.make_loss(chunk)

    def _make_gradient(self, storage: torch.Tensor | None) -> None:
        """One flat tensor of all gradients and then the metrics, for one all-reduce and one norm; sums of metrics."""
        sizes, device = [p.numel() for p in self.parameters], self.learning_rate.device
        flat = torch.zeros(self.num_gradients_and_metrics(self.policy), device=device) if storage is None else storage
        self.flat_grad_and_metrics, self.flat_grad, self.metrics = flat, flat[: sum(sizes)], flat[sum(sizes) :]
        self.grads = [g.view_as(p) for p, g in zip(self.parameters, self.flat_grad.split(sizes), strict=True)]
        self._set_grads()
        # Of each parameter, and of its columns: callers may freeze some later.
        self._trainable, self.trainable = [True] * len(sizes), torch.ones(len(sizes), dtype=torch.bool, device=device)
        self._is_trainable = torch.ones_like(flat, dtype=torch.bool)
        self.metric_sums = torch.zeros(len(self.loss_metrics) + 1, device=device)  # the last one counts skipped updates
        self._norms: dict[str, Any] = {"norm": torch.zeros((), device=device)}
        self._parts_of_norms = {"norm": self.flat_grad}
        if self.critic_max_grad_norm is not None:
            first = sum(p.numel() for p in self.policy.network.parameters() if p.requires_grad)
            self._norms["critic_norm"] = torch.zeros((), device=device)
            self._parts_of_norms = {"norm": self.flat_grad[:first], "critic_norm": self.flat_grad[first:]}

    def _make_optimizer(self) -> None:
        """The optimizer, which takes no step where ``skip_update`` is 1."""
        self.optimizer = make_optimizer(self.parameters, self.config, self.learning_rate)
        if self.config.optimizer == "adam":  # torch.amp.GradScaler's attribute: where it is 1, Adam changes nothing
            self.optimizer.found_inf = self.skip_update  # type: ignore[attr-defined]
        elif isinstance(self.optimizer, RAdam):
            skips = {"skip_update": self.skip_update, "trainable": self.trainable}
            self.optimizer.use_kernels(self.rollout.env.functions, self.flat_grad, **skips)
        else:
            SkippedSteps(self.optimizer, self.parameters, self.skip_update, self.trainable)

    def _make_step(self) -> None:
        """What computes the gradient of a minibatch, clips it and, with Adam, takes the step."""
        functions, critic_limit = self.rollout.env.functions, self.critic_max_grad_norm
        flat, num_gradients = self.flat_grad_and_metrics, len(self.flat_grad)
        settings: dict[str, Any] = {
            "max_grad_norm": self.config.max_grad_norm,
            "learning_rate": self.learning_rate,
            "skip_update": self.skip_update,
            "metric_sums": self.metric_sums,
            **self.step_settings(),
        }
        self._clip_grad_norm = clip_grad_norm_launch(
            functions,
            metrics=self.metrics,
            gradient=self.flat_grad,
            **self._norms,
            first_of_critic=len(self._parts_of_norms["norm"]),
            critic_max_grad_norm=critic_limit,
            **settings,
        )
        count = few_squares(num_gradients) if self.kernels is None else num_squares(len(flat))
        self._squares = torch.zeros(count, dtype=torch.float64, device=flat.device)
        if self.kernels is not None:
            self._gradients, parts = self.kernel_gradients(self.kernels, self._minibatch_rows)
            self._sum_parts = sum_parts_launch(
                functions,
                parts,
                trainable=self._is_trainable,
                out=flat,
                squares=self._squares,
                num_squared=num_gradients,
                skip_update=self.skip_update,
            )
        self._adam: Launch | None = None
        if self.config.optimizer == "adam" and critic_limit is None:
            self._sum_squares = sum_squares_launch(
                functions,
                self.flat_grad,
                trainable=self._is_trainable[:num_gradients],
                squares=self._squares,
                skip_update=self.skip_update,
            )
            self._adam = self._adam_launch(settings)
        self._kept = KeptTensors(self._parameters_and_state())

    def _adam_launch(self, settings: Mapping[str, Any]) -> Launch:
        """One kernel that clips the gradient and takes the step of Adam."""
        functions = self.rollout.env.functions
        arguments: dict[str, Any] = {
            "gradient": self.flat_grad,
            "squares": self._squares,
            "metrics": self.metrics,
            "eps": self.config.adam_epsilon,
            **settings,
        }
        if self.kernels is None:
            table = address_table(self.optimizer, self.parameters)
            return adam_launch_by_addresses(functions, table, [p.numel() for p in self.parameters], **arguments)
        moments = [self.optimizer.state[p] for p in self.parameters]
        flat_state = {name: FlatTensors([own[name] for own in moments]).flat for name in ADAM_STATE}
        return adam_launch(
            functions,
            parameters=self.kernels.parameters.flat,
            exp_avg=flat_state["exp_avg"],
            exp_avg_sq=flat_state["exp_avg_sq"],
            steps=flat_state["step"],
            **arguments,
        )

    def _make_normalizer_updates(self) -> None:
        """What updates the statistics of observations, states and returns."""
        policy, rollout = self.policy, self.rollout
        shape = self.envs.of(rollout.rewards[0])[:, policy.view.agents].shape
        # Discounted, of each agent's episode so far.
        self.reward_sums = torch.zeros(shape, device=rollout.rewards.device)
        self.normalizer_updates: list[NormalizerUpdate] = []
        if policy.obs_normalizer is not None:
            self.normalizer_updates.append(obs_update(policy.obs_normalizer, rollout, policy.view, self.indices))
        if policy.state_normalizer is not None:
            of_states = policy.state_normalizer, rollout, policy.view, self.indices, self.envs
            self.normalizer_updates.append(state_update(*of_states))
        self._value_norm: ValueNormUpdate | None = None
        if isinstance(policy.return_normalizer, ValueNorm):
            self._value_norm = ValueNormUpdate(policy, rollout, self.indices, self.num_updates, self.envs)
        elif policy.return_normalizer is not None:
            of_rewards = policy.return_normalizer, rollout, self.indices, self.reward_sums, self.config.gamma
            self.normalizer_updates.append(reward_update(*of_rewards))

    @property
    def _minibatch_rows(self) -> int:
        return len(self.indices) // self.config.num_minibatches

    @abstractmethod
    def make_loss(self, chunk: int) -> Loss:
        """The loss of at most ``chunk`` samples at a time; its metrics are ``loss_metrics``."""

    @abstractmethod
    def make_begin(self) -> Callable[[], None]:
        """What begins an iteration's updates on the device, see ``begin_update``."""

    def step_settings(self) -> dict[str, Any]:
        """Further arguments of ``clip_grad_norm_launch`` and ``adam_launch``."""
        return {"target_kl": None, "kl_index": 0}

    def kernel_gradients(self, kernels: PolicyKernels, rows: int) -> tuple[GradientsCall, torch.Tensor]:
        """What computes the gradients of so many samples in place of the loss and torch, of policies with kernels."""
        raise NotImplementedError

    @property
    def critic_max_grad_norm(self) -> float | None:
        """See ``PPOConfig.critic_max_grad_norm``."""
        return None

    @classmethod
    def num_gradients_and_metrics(cls, policy: Policy) -> int:
        """Of a minibatch: elements of the parameters that can learn, and metrics of the loss."""
        return sum(p.numel() for p in policy.parameters() if p.requires_grad) + len(cls.loss_metrics) - 1

    @classmethod
    def metric_names(cls) -> tuple[str, ...]:
        """Names of what is logged for each policy, ``loss_metrics`` first."""
        return (*cls.loss_metrics, *OTHER_METRICS)

    @property
    def uses_kernels(self) -> bool:
        """Whether the gradients come from the network's kernels: not once its layers have hooks."""
        return self.kernels is not None and is_plain(self.policy)

    @property
    def num_updates(self) -> int:
        """Minibatches per iteration, all epochs together."""
        return self.config.num_updates

    def report_to(self, totals: torch.Tensor, faults: torch.Tensor, stopped: torch.Tensor) -> None:
        """Where ``add_metrics`` adds the numbers of ``metric_names``, and when updates are skipped.

        See ``learner_metrics_launch``.
        """
        self._stopped = stopped
        self._add_metrics = learner_metrics_launch(
            self.rollout.env.functions,
            metric_sums=self.metric_sums,
            explained_variance=self.explained_variance,
            learning_rate=self.learning_rate,
            num_losses=len(self.loss_metrics),
            num_updates=self.num_updates,
            faults=faults,
            totals=totals,
            stopped=stopped,
        )

    def prepare_update(self, iteration: int) -> None:
        """The host's part of an iteration's updates, after so many iterations, before kernels are launched.

        Adopts what callers may have changed: gradients, the optimizer's tensors, which parameters can learn.
        """
        if self._clock != iteration:
            self.iteration.fill_(iteration)
            self.progress.fill_(min(iteration / self.num_iterations, 1.0))
        self._clock = None
        self._set_grads()
        self.optimizer.param_groups[0]["lr"] = self.learning_rate  # optimizer.load_state_dict replaces the tensors
        self._kept.adopt(self._parameters_and_state())
        trainable = [p.requires_grad for p in self.parameters]
        if trainable != self._trainable:
            self.trainable.copy_(torch.tensor(trainable))
            parts = self._is_trainable[: len(self.flat_grad)].split([p.numel() for p in self.parameters])
            for part, learns in zip(parts, trainable, strict=True):
                part.fill_(learns)
            self._trainable = trainable

    def enqueued(self, iteration: int) -> None:
        """The device will have counted so many iterations."""
        self._clock = iteration

    def begin_rollout(self) -> None:
        """Prepare the policy for an iteration's rollout, on the device."""

    def begin_update(self) -> None:
        """Begin an iteration's updates on the device: schedules, number of the first epoch, sums of metrics.

        ``iteration`` and ``progress`` are then those of the next one.
        """
        self._begin()

    def add_metrics(self) -> None:
        """Add an iteration's metrics to the totals of ``report_to``, on the device."""
        assert self._add_metrics is not None
        self._add_metrics()

    def _set_grads(self) -> None:
        for p, grad in zip(self.parameters, self.grads, strict=True):  # a caller's zero_grad sets them to None
            if p.grad is not grad:
                p.grad = grad

    def _parameters_and_state(self) -> list[torch.Tensor]:
        """What a step of the optimizer changes."""
        return [*self.parameters, *optimizer_tensors(self.optimizer, self.parameters)]

    def update(self) -> None:
        """All epochs and minibatches of an iteration."""
        if self.uses_kernels and self.world.size == 1:
            self.stages["all_minibatches"]()
            return
        for k in range(self.num_updates):
            self.minibatch_gradient(k)
            self.stages["optimizer_step"]()

    def minibatch_gradient(self, minibatch: int) -> None:
        """Gradient of the iteration's next minibatch, of number ``minibatch``, averaged over all processes."""
        self.local_gradient(minibatch)
        self.world.all_reduce_mean(self.flat_grad_and_metrics)

    def local_gradient(self, minibatch: int) -> None:
        """As ``minibatch_gradient``, of this process's samples alone.

        On a CPU a gradient that would not be used is left out; on a GPU the host does not read whether it would be.
        """
        on_host = self.skip_update.device.type == "cpu" and not self.uses_kernels
        if minibatch and on_host and self.skip_update.item():
            return
        if minibatch == 0 and self._value_norm is not None:
            self.stages["normalize_values"]()
        if minibatch % self.config.num_minibatches == 0:
            self.stages["shuffle"]()
        self.stages["backward"]()

    @property
    def moments_of_samples(self) -> list[torch.Tensor]:
        """What ``update_statistics`` adds up, float64; those of several processes are summed after it."""
        of_values = [] if self._value_norm is None else [self._value_norm.moments]
        return [*of_values, *(update.moments for update in self.normalizer_updates)]

    def update_statistics(self) -> None:
        """Explained variance of the rollout, and its moments for the normalizers."""
        self._explain_variance()
        for update in self.normalizer_updates:
            update.add_samples()
        if self._value_norm is not None:
            self._value_norm.add_samples()

    def normalize_values(self) -> None:
        """Update the statistics of returns with ``value_norm_beta``, and the rollout's values, before all minibatches.

        With the samples of all processes, see ``moments_of_samples``.
        """
        if self._value_norm is not None:
            with torch.no_grad():
                self._value_norm.apply()

    def shuffle(self) -> None:
        """A new order of the samples: a function of seed, epoch and sample index alone, the same on every device.

        Also the moments of each minibatch's advantages.
        """
        self._shuffle()
        self.minibatch_index.zero_()

    def all_minibatches(self) -> None:
        """All epochs and minibatches of an iteration, by the network's kernels."""
        for k in range(self.num_updates):
            self.gradient_by_kernels(k)
            self.optimizer_step()

    def gradient_by_kernels(self, minibatch: int) -> None:
        """As ``local_gradient``, by the network's kernels; may be part of a CUDA graph of all minibatches."""
        index = minibatch % self.config.num_minibatches
        if minibatch == 0:
            self.normalize_values()
        if index == 0:
            self._shuffle()
        self._gradient(self._minibatches[index], self.moments[index])

    @property
    def _minibatches(self) -> torch.Tensor:
        return self.order.view(self.config.num_minibatches, -1)

    def backward(self) -> None:
        """Write the gradient and the metrics of the next minibatch."""
        indices, moments = (x.index_select(0, self.minibatch_index)[0] for x in (self._minibatches, self.moments))
        (self._gradient if self.uses_kernels else self._gradient_by_torch)(indices, moments)
        self.minibatch_index += 1

    def _gradient(self, indices: torch.Tensor, moments: torch.Tensor) -> None:
        """By the network's kernels."""
        self._gradients(indices=indices, moments=moments)
        self._sum_parts()

    def _gradient_by_torch(self, indices: torch.Tensor, moments: torch.Tensor) -> None:
        """Chunk by chunk."""
        for number, (part, outputs) in enumerate(self._outputs_of_chunks(indices)):
            *output_grads, metrics = self.kernel(part, moments, *outputs)
            pairs = [pair for pair in zip(outputs, output_grads, strict=True) if pair[0].requires_grad]
            trainable = [p for p in self.parameters if p.requires_grad]  # callers may freeze parameters later
            found: dict[torch.Tensor, torch.Tensor | None] = {}
            if pairs:  # none if all are frozen
                with_grad, grads = zip(*pairs, strict=True)
                gradients = torch.autograd.grad(with_grad, trainable, grads, allow_unused=True)
                found = dict(zip(trainable, gradients, strict=True))
            all_grads = ((p, found.get(p)) for p in self.parameters)
            parts = [(torch.zeros_like(p) if grad is None else grad).flatten() for p, grad in all_grads]
            if number == 0:
                torch.cat([*parts, metrics], out=self.flat_grad_and_metrics)
            else:
                self.flat_grad_and_metrics += torch.cat([*parts, metrics])

    def _outputs_of_chunks(self, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Of each chunk of a minibatch its indices, and the policy's parameters and values."""
        if self.sequences is not None:
            yield from self.sequences.outputs(indices, self._chunk_sequences, self._rows, self._context)
            return
        for start in range(0, len(indices), self._chunk):
            part = slice(start, start + self._chunk)
            with _fused(self.policy):
                obs = self.obs[part] if self.in_order else self._rows(indices[part])
                outputs = self.policy(obs, context=self._context.of_samples(indices[part]))
            yield indices[part], outputs

    def clip_grad_norm(self) -> None:
        """Scale the gradient down to ``max_grad_norm``, or that of a critic apart; add up the metrics.

        Also decide whether the update is skipped. It is if the gradient or a metric is not finite, or a metric exceeds
        a limit of ``step_settings``; then also for the rest of the iteration.
        """
        for name, part in self._parts_of_norms.items():
            torch.linalg.vector_norm(part, out=self._norms[name])
        self._clip_grad_norm()

    def optimizer_step(self) -> None:
        """Clip the gradient; one step of the optimizer, unless the update is skipped."""
        if self._adam is None:
            self.clip_grad_norm()
            self.optimizer.step()
            return
        if self.world.size > 1 or not self.uses_kernels:
            # The gradient is an average, or torch's: no sum of parts, whose squares are known.
            self._sum_squares()
        self._adam()

    def update_normalizers(self) -> None:
        """Update the normalizers, once an iteration: within one, observations are always normalised alike.

        With the samples of all processes, see ``moments_of_samples``.
        """
        for update in self.normalizer_updates:
            update.apply()

    def discard_statistics(self) -> None:
        """Drop the moments and reward sums of a rollout whose iteration was interrupted."""
        self.reward_sums.zero_()
        for moments in self.moments_of_samples:
            moments.zero_()

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's live tensors by name."""
        states = (self.optimizer.state[p] for p in self.parameters)
        return {
            f"{k}.{name}": tensor
            for k, state in enumerate(states)
            for name, tensor in sorted(state.items())
            if isinstance(tensor, torch.Tensor)
        }


def _with_layer_kernels(policy: Policy) -> list[ActorCritic | Tower]:
    """The default networks of a policy, whose gradients the kernels of layers.py can compute."""
    return [network for network in (policy.network, policy.critic) if isinstance(network, ActorCritic | Tower)]


@contextmanager
def _fused(policy: Policy) -> Iterator[None]:
    """Let the default networks compute gradients with the kernels of layers.py; restore them afterwards."""
    networks = _with_layer_kernels(policy)
    for network in networks:
        network.fused = True
    try:
        yield
    finally:
        for network in networks:
            network.fused = False
