"""Trainer: the training loop. Each iteration collects a rollout and updates every policy from it.

Shapes: T steps, E environments, A agents.

The environment runs in "next_step" mode: the last observation of an episode is row t + 1 of the rollout, so the same
forward pass computes its value. At the step after it the environment resets; that transition is masked, like those of
agents that have left the game.

On a GPU an iteration whose gradients come from kernels is one CUDA graph, with the collectives of several processes.
Where torch computes gradients, or collectives cannot be captured, these are graphs: rollout, permutation of the
samples, gradient of a minibatch, optimizer step, metrics. Both have the same collectives: one after the rollout, for
all statistics, one a minibatch, for the gradients of all policies, and one when metrics are read. The host reads the
device once in one or more iterations. Checkpoints hold everything that an iteration depends on: an interrupted run
resumes bit-identically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from gpu_vecenv._version import __version__
from gpu_vecenv.absent import OF_TRAINER, absent_attribute
from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.engine.arguments import validate_int, validate_seed
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CapacityError, ConfigError, NonFiniteError, counted
from gpu_vecenv.escapes import warn
from gpu_vecenv.progress import OnProgress, no_progress
from gpu_vecenv.train.algorithms import CONFIGS, algorithm_of
from gpu_vecenv.train.capacity import check_capacity
from gpu_vecenv.train.captured_collectives import why_not_captured
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.train.curriculum import Curriculum, Schedules
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.episode_log import EpisodeLog
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.fixed_actions import FixedActions
from gpu_vecenv.train.fixed_policy import FixedPolicy, kinds_of
from gpu_vecenv.train.fused_rollout import fused_rollout
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, StageTimer, capture_stream, on_stream
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.learner_kernels import advantage_launch
from gpu_vecenv.train.level_replay import Levels, with_table
from gpu_vecenv.train.metrics import MetricsReader, NonFiniteMetrics, read_totals, time_fractions
from gpu_vecenv.train.network_checks import check_independent_rows
from gpu_vecenv.train.opponent_ranges import Ranges
from gpu_vecenv.train.opponents import Opponents
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.perceptron import acting_kernels
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.policy_kernels import Forward, choose_kernels
from gpu_vecenv.train.policy_specs import PolicySpec, Sharing, keeps_states, policy_of_spec, resolve_specs
from gpu_vecenv.train.populations import check_member, check_populations, members_of, populations_of
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.reductions import GradientBucket, SummedTensors
from gpu_vecenv.train.reward import RewardFunction
from gpu_vecenv.train.role_view import agents_of, role_of
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.sequences import RecurrentStates
from gpu_vecenv.train.staggered_starts import stagger
from gpu_vecenv.train.stored_config import with_defaults
from gpu_vecenv.train.trainer_state import check_fits, digests_of_initial_states
from gpu_vecenv.train.updates import Updates


class Trainer:
    """Trains a policy for each role, for each agent, or for any of them together, on an environment.

    Args:
        env: The environment. If it is not in "next_step" mode, has ``agents_as_envs``, or the curriculum has levels, it
            is used as a template: the trainer steps another one with otherwise equal arguments. With torch.distributed
            it is this process's shard, and its ``first_env_index`` is the process's rank times ``num_envs``.
        config: Hyperparameters; their class decides the algorithm. None: those of PPO.
        seed: For the environment, the initial weights and the order of the minibatches.
        policies: Role or agent -> its policy; those that share one are joined by "+", as in "tagger+runner" or
            "tagger_0+tagger_2". A module stands for ``PolicySpec(network=module)``. None trains default ones, see
            ``sharing``.
        sharing: Without ``policies``: one policy for the agents of a "role", one for each "agent", or one for "all".
        reward: A function of a ``Transition`` that returns the rewards to train with, (num_envs, num_agents) float32,
            in place of the game's own; see ``Transition`` for its tensors. On a GPU it becomes part of a CUDA graph: it
            must be torch operations alone, without host reads, random numbers or Python state that changes. Logged
            returns and evaluations are those of the game; "shaped_reward_<role>" is its mean over agent-steps.
        opponents: In a share of the environments one side learns; earlier policies, scripts or others play the rest.
            None: all agents play by the present policies everywhere. In one process only.
        curriculum: What changes in the course of the training, see ``Curriculum``.
        graphs: Whether to use CUDA graphs on a GPU.
        on_iteration: Called with a dictionary of metrics after every iteration that ``train`` reads; training ends when
            it returns True.

    Attributes:
        policies: Name -> policy. The members of a population of "tagger" are "tagger_p0", "tagger_p1", ….
        members: Name -> which policy it is a member of, its number, and its environments.
        populations: Policy -> number of members, of those with several.
        levels: With ``Curriculum(levels=…)`` what there is to learn from each initial state, see ``Levels``; else None.

    Raises:
        ConfigError: The configuration does not match the environment.
        TypeError, ValueError: ``reward`` returns something else than such a tensor, or writes to its argument.
        CapacityError: The rollout does not fit in memory.

    Example:
        >>> env = gpu_vecenv.make("cartpole", num_envs=64)
        >>> trainer = gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig(total_steps=4096), seed=1)
        >>> metrics = trainer.train()
        >>> int(metrics["env_steps"]), [*trainer.policies]
        (4096, ['agent'])
    """

    def __init__(
        self,
        env: VecEnv,
        config: LearnerConfig | None = None,
        *,
        seed: int = 0,
        policies: Mapping[str, PolicySpec | nn.Module] | None = None,
        sharing: Sharing = "role",
        reward: RewardFunction | None = None,
        opponents: OpponentsConfig | None = None,
        curriculum: Curriculum | None = None,
        graphs: bool = True,
        on_iteration: Callable[[dict[str, float]], bool | None] | None = None,
    ) -> None:
        _check_arguments(env, config, policies, opponents, curriculum, graphs, on_iteration)
        self.config: LearnerConfig = config or PPOConfig()
        self.seed, self.on_iteration = validate_seed(seed), on_iteration
        self.world, self.iteration = World.current(), 0
        self._nonfinite = NonFiniteMetrics()
        self._networks_checked = False
        self._in_iteration = False  # stays True after an iteration that an error or an interrupt ended
        self._progress = 0.0  # the fraction of the run that was done before the iteration
        self._unread, self._start = 0, 0.0  # iterations whose metrics were not read, and when the first of them began
        self._check_processes(env, opponents, curriculum)
        specs = resolve_specs(env.game, self.config, policies, sharing)
        check_populations(specs, self.config, has_opponents=opponents is not None, num_processes=self.world.size)
        self.members = members_of(specs, env.num_envs)
        self.populations = populations_of(specs)
        ranges = None if opponents is None else self._ranges(opponents, env, specs)
        self._bytes_per_env = check_capacity(env, self.config, specs, masks_samples=ranges is not None)
        self._initial_states = digests_of_initial_states(env, curriculum)
        self.env = _next_step_env(env, curriculum)
        self._stream = capture_stream(self.env.functions.backend, threading.get_ident())
        graph_pool = GraphPool() if graphs and env.device.type == "cuda" else None
        with self.training():
            specs = {name: specs[member.policy] for name, member in self.members.items()}
            self.configs = {name: spec.config or self.config for name, spec in specs.items()}
            keeps = {"keeps_states": keeps_states(specs, self.config), "masks_samples": ranges is not None}
            self.rollout = Rollout(self.env, self.config.num_steps, reward, **keeps)
            self.policies = self._make_policies(specs)
            self._choose_kernels(specs)
            self._make_learners(specs, graph_pool)
            self._make_forward_passes()
            self.opponents: Opponents | None = None
            if opponents is not None and ranges is not None:
                networks = {name: own for name, own in self.policies.items() if not isinstance(own, FixedPolicy)}
                acting = (networks, self._parameters, self.seed, self.config.squash, self.kernels)
                self.opponents = Opponents(opponents, ranges, self.rollout, *acting, self.config.precision)
            fixed = [policy for policy in self.policies.values() if isinstance(policy, FixedPolicy)]
            self._fixed_actions = FixedActions(fixed, self.rollout, self.opponents) if fixed else None
            self._make_fused_rollout()
            discounts = self._make_advantages()
            self._make_curriculum(curriculum, env, discounts)
            self._begin_first_episodes()
            self.metrics_reader = MetricsReader(
                self.rollout, self.learners, self.episode_log, self.world, self.opponents
            )
            moments = [x for learner in self.learners.values() for x in learner.moments_of_samples]
            # Also what stops all updates, so that all processes skip the same ones.
            self._sum_statistics = SummedTensors([*moments, self.metrics_reader.stopped], self.world)
        self.graphs, self.timer = graph_pool is not None, StageTimer(env.device)
        self._graphed_rollout = GraphedCallable(self._collect_rollout, "the rollout", graph_pool)
        self._graphed_begin = GraphedCallable(self._begin_updates, "the start of the updates", graph_pool)
        self._graphed_end = GraphedCallable(self._end_updates, "the metrics", graph_pool)
        whole, stages = self.iteration_on_device, self._iteration_in_stages
        self._graphed_iteration = GraphedCallable(whole, "the iteration", graph_pool, stages, self.world)

    def _check_processes(self, env: VecEnv, opponents: OpponentsConfig | None, curriculum: Curriculum | None) -> None:
        """Raise ConfigError if processes have the same environments, or an option that works in one process alone."""
        size, rank = self.world.size, self.world.rank
        if size == 1:
            return
        if env.first_env_index != rank * env.num_envs:
            raise ConfigError(
                f"env.first_env_index is {env.first_env_index} in process {rank} of {size}; expected "
                f"rank x num_envs = {rank * env.num_envs}: environments with one index are identical"
            )
        if opponents is not None:
            raise ConfigError(f"opponents are given with {size} processes; expected one process")
        if curriculum is not None and curriculum.levels is not None:
            raise ConfigError(f"curriculum: levels with {size} processes; expected one process")

    def _make_policies(self, specs: Mapping[str, PolicySpec]) -> dict[str, Policy]:
        """The policy of each member, with the same weights in all processes."""
        policies: dict[str, Policy] = {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # only the CPU's: weights are initialised there
            for name, spec in specs.items():
                own, config = self.members[name].policy, self.configs[name]
                policies[name] = policy_of_spec(own, spec, config, self.env.game, self.rollout.obs[0])
        for policy in policies.values():  # users' networks may differ between processes
            for tensor in policy.state_dict().values():
                self.world.broadcast(tensor)
        return policies

    def _choose_kernels(self, specs: Mapping[str, PolicySpec]) -> None:
        """What computes each policy, before there are optimizers of its weights; states of the recurrent ones."""
        precision = self.config.precision
        choices = {
            name: choose_kernels(policy, self.rollout, precision, self.configs[name].chunk_rows)
            for name, policy in self.policies.items()
        }
        self.kernels = {name: choice.kernels for name, choice in choices.items()}  # None: torch
        # What acts for policies that torch computes otherwise, see `acting_kernels`.
        self._actors = {
            name: found
            for name, policy in self.policies.items()
            if self.kernels[name] is None and (found := acting_kernels(policy, self.rollout, precision))
        }
        # Why not one kernel computes a policy, and why torch does; None: kernels do.
        self.unfused_reasons = {name: choice.unfused_reason for name, choice in choices.items()}
        self.torch_reasons = {name: choice.torch_reason for name, choice in choices.items()}
        self.states = {
            name: RecurrentStates(
                policy,
                self.rollout,
                self.configs[name].sequence_length if specs[name].train else None,
                precision,
                self.members[name].envs,
            )
            for name, policy in self.policies.items()
            if policy.recurrent_state_size
        }

    def _make_learners(self, specs: Mapping[str, PolicySpec], graph_pool: GraphPool | None) -> None:
        """The learners of the policies that are trained, whose gradients are parts of one tensor, and their updates."""
        # Why the collectives of several processes are between CUDA graphs; None: they are in them.
        self.collectives_reason = None if graph_pool is None else why_not_captured(self.world)
        kinds = {name: algorithm_of(self.configs[name]).learner for name, spec in specs.items() if spec.train}
        sizes = {name: kind.num_gradients_and_metrics(self.policies[name]) for name, kind in kinds.items()}
        num_updates = {name: self.configs[name].num_updates for name in kinds}
        bucket = GradientBucket(sizes, num_updates, self.world, self.env.device)
        self.learners = {
            name: kind(
                self.policies[name],
                self.configs[name],
                self.rollout,
                kernels=self.kernels[name],
                states=self.states.get(name),
                envs=self.members[name].envs,
                storage=bucket.parts[name],
                seed=self.seed,
                world=self.world,
                graph_pool=graph_pool,
                num_iterations=self.num_iterations,
            )
            for name, kind in kinds.items()
        }
        self._updates = Updates(self.learners, bucket, self.world)

    def _make_forward_passes(self) -> None:
        """The sampler, the parameters of the distributions of a step, and what writes those of each policy."""
        env = self.env
        self.sampler = Sampler(env, squash=self.config.squash)
        shape = (env.num_envs, env.num_agents, self.sampler.num_parameters)
        self._parameters = torch.zeros(shape, device=env.device)
        self._forward_passes = [
            Forward(
                policy,
                self.rollout,
                self._parameters,
                self.kernels[name],
                self.states.get(name),
                self.members[name].envs,
                steps_at_once=self.configs[name].steps_at_once(env.num_envs * env.num_agents),
            )
            for name, policy in self.policies.items()
            if not isinstance(policy, FixedPolicy)
        ]

    def _make_fused_rollout(self) -> None:
        """One launch for a rollout, or the reason why it takes several a step."""
        self._fused_rollout, self.rollout_reason = fused_rollout(
            self.rollout,
            self.sampler,
            self.unfused_reasons,
            self.kernels,
            actors=self._actors,
            opponents=self.opponents,
            members=self.members,
        )

    def _make_advantages(self) -> dict[str, torch.Tensor]:
        """The launch that computes advantages and returns; the tensors of its discounts, which a curriculum changes."""
        gamma, gae_lambda = torch.zeros((2, self.env.num_agents), device=self.env.device)
        for learner in self.learners.values():
            gamma[learner.policy.view.agents] = learner.config.gamma
            gae_lambda[learner.policy.view.agents] = learner.config.trace_decay
        data = self.rollout
        numbers, out = (data.rewards, data.values[:-1], data.values[1:]), (data.advantages, data.returns)
        flags = data.terminations, data.truncations, data.active[:-1]
        self._compute_advantages = advantage_launch(self.env, *numbers, *flags, gamma, gae_lambda, data.acting, out=out)
        return {"gamma": gamma, "gae_lambda": gae_lambda}

    def _make_curriculum(
        self, curriculum: Curriculum | None, given: VecEnv, discounts: Mapping[str, torch.Tensor]
    ) -> None:
        """What changes in the course of the training, set to its first values; levels are those of the env given."""
        self._schedules: Schedules | None = None
        self.levels: Levels | None = None
        if curriculum is None:
            return
        self._schedules = Schedules(curriculum, self.env, self.learners, discounts)
        self._schedules.apply(0.0)
        if curriculum.levels is not None:
            num_levels = len(given.data[f"initial_{given.build.initial_fields[0]}"])
            self.levels = Levels(curriculum.levels, self.rollout, num_levels, self.seed)

    def _begin_first_episodes(self) -> None:
        """Reset all environments, staggered if so configured."""
        self.env.reset(seed=self.seed, out=self.rollout.last)
        shortened = stagger(self.env) if self.config.staggered_starts else None
        self.rollout.refresh_last_step()
        self._check_networks(self.rollout.obs[-1:])
        self.episode_log = EpisodeLog(self.env)
        if shortened is not None:
            self.episode_log.skip_current(shortened)
            if self.opponents is not None:
                self.opponents.skip_current(shortened)

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_TRAINER)

    @property
    def env_steps_per_iteration(self) -> int:
        """Env-steps of one iteration, summed over all processes."""
        return self.config.num_steps * self.env.num_envs * self.world.size

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run; the last one completes ``total_steps``."""
        return -(-self.config.total_steps // self.env_steps_per_iteration)

    def train(self, log_interval: int = 1) -> dict[str, float]:
        """Run the remaining iterations, or until ``on_iteration`` returns True; return the metrics that were read last.

        Where none remain, it returns {} with a RuntimeWarning. To train on, ``save`` to a file and ``load`` it into a
        new Trainer whose ``config`` has a larger ``total_steps``.

        Args:
            log_interval: See ``train_interval``.
        """
        metrics: dict[str, float] = {}
        if self.iteration >= self.num_iterations:
            warn(
                f"train: all {counted(self.num_iterations, 'iteration')} are done, nothing was trained; to train on, "
                "save(path), and load(path) into a new Trainer with a larger total_steps",
                RuntimeWarning,
                stacklevel=2,
            )
        while self.iteration < self.num_iterations:
            metrics = self.train_interval(log_interval)
            if self.on_iteration and self.on_iteration(metrics):
                break
        return metrics

    def train_interval(self, log_interval: int) -> dict[str, float]:
        """Train up to the next iteration that is a multiple of ``log_interval``, or to the last; return metrics.

        After the last iteration it trains one more.

        The host reads the device once in all these iterations. Weights do not depend on ``log_interval``, unless a
        curriculum follows metrics. See ``read_iteration`` for the metrics and errors.
        """
        log_interval = validate_int("log_interval", log_interval, 1)
        while (self.iteration + 1) % log_interval and self.iteration + 1 < self.num_iterations:
            self.launch_iteration()
        return self.train_iteration()

    def train_iteration(self) -> dict[str, float]:
        """Collect one rollout and update all policies; return metrics. One device synchronisation, to read them.

        A RuntimeWarning is given for a metric that is NaN or infinite for the first time.

        Raises:
            NonFiniteError: A loss or gradient became NaN or infinite; all later updates were skipped.
            CapacityError: Not enough device memory.
        """
        self.launch_iteration()
        return self.read_iteration()

    def launch_iteration(self) -> None:
        """Start an iteration on the device.

        No device synchronisation, but in the first two iterations, which check networks, compile and capture.

        Raises:
            CapacityError: Not enough device memory.
        """
        with self.training():
            self.prepare_iteration()
            self.enqueue_iteration()
        self.count_iteration()

    def read_iteration(self, totals: Sequence[float] | None = None) -> dict[str, float]:
        """Wait for the device and return the metrics of all iterations since the last read.

        ``iteration``, ``env_steps``, rates and means over episodes are as they are after the last of them; ``episodes``
        is a sum, and metrics of the learners are means, over all of them. Shares of time are those of the last.

        Args:
            totals: What ``read_totals`` read of ``metrics_reader``, for several trainers in one copy; None reads it.

        Raises:
            NonFiniteError: A loss or gradient became NaN or infinite in one of them; all later updates were skipped.
                ``iteration`` is then that of the last read.
            ConfigError: There was none since the last read.
        """
        if not self._unread:
            raise ConfigError("read_iteration: no iteration since the last read; expected launch_iteration() before it")
        first, count = self.iteration - self._unread + 1, self._unread
        rates = {
            f"{rate}_{name}": value
            for name, learner in self.learners.items()
            for rate, value in learner.config.rates(self._progress).items()
        }
        if self._schedules is not None:
            rates |= {name: value for name, value in self._schedules.rates().items() if name in rates}
        try:
            if totals is None:
                with torch.cuda.stream(self._stream):
                    (totals,) = read_totals([self.metrics_reader])
            iterations = f"iteration {first}" if count == 1 else f"iterations {first} to {self.iteration}"
            read = self.metrics_reader(totals, iterations)
        except NonFiniteError:
            self.iteration -= count
            self._unread, self._in_iteration = 0, True
            raise
        seconds = (time.perf_counter() - self._start) / count
        self._unread = 0
        metrics = {
            "iteration": self.iteration,
            "env_steps": self.iteration * self.env_steps_per_iteration,
            "agent_steps_per_s": self.env_steps_per_iteration * self.env.num_agents / seconds,
            **time_fractions(self.timer, seconds),
            **dict.fromkeys(rates),  # for the order of the columns: ``read`` has rates as configured, too
            **read,
            **rates,
            **({} if self._schedules is None else self._schedules.metrics()),
        }
        if self._schedules is not None:
            self._schedules.read(metrics)
        for found in self._nonfinite(metrics):
            if self.world.rank == 0:
                warn(str(found), RuntimeWarning, stacklevel=3)
        return metrics

    def begin_iteration(self) -> None:
        """Collect a rollout and prepare the learners, for callers with an update loop of their own."""
        with self.training():
            self.prepare_iteration()
            self._begin_in_stages()

    def end_iteration(self) -> dict[str, float]:
        """Update the normalizers and return the metrics of an iteration; errors as in ``read_iteration``."""
        with self.training():
            self._graphed_end()
        self.count_iteration()
        return self.read_iteration()

    @property
    def by_kernels(self) -> bool:
        """Whether an iteration can be one CUDA graph: all gradients come from kernels, and graphs have collectives."""
        return self.collectives_reason is None and all(learner.uses_kernels for learner in self.learners.values())

    def use_stream(self, stream: torch.cuda.Stream) -> None:
        """Run on this stream from now on: trainers on different ones may run at the same time."""
        self._stream = stream

    @property
    def networks_checked(self) -> bool:
        """Whether an iteration was trained, whose observations checked the networks."""
        return self._networks_checked

    def prepare_iteration(self) -> None:
        """The host's part of an iteration, before its kernels are launched."""
        self.env.check_ready("train_iteration")
        self.timer.follow(self.timer)
        if not self._unread:
            self._start = time.perf_counter()
        self._progress = min(self.iteration / self.num_iterations, 1.0)
        if self._in_iteration:
            self.rollout.refresh_last_step()
            for learner in self.learners.values():
                learner.discard_statistics()
        self._in_iteration = True
        if self._schedules is not None and self._schedules.apply(self._progress):
            self.rollout.refresh_last_step()
        for learner in self.learners.values():
            learner.prepare_update(self.iteration)
        self.metrics_reader.begin_iteration()

    def enqueue_iteration(self) -> None:
        """All of an iteration that the device does, as CUDA graphs."""
        if self.by_kernels:
            self._graphed_iteration()
        else:
            self._iteration_in_stages()

    def count_iteration(self) -> None:
        """Count an iteration that was enqueued."""
        self.iteration += 1
        self._unread += 1
        for learner in self.learners.values():
            learner.enqueued(self.iteration)
        self.metrics_reader.count_iteration()
        self._in_iteration = False

    def iteration_on_device(self) -> None:
        """All of an iteration that the device does, if it is ``by_kernels``; may be captured in a CUDA graph."""
        self._collect_rollout()
        self._sum_statistics()
        self._begin_updates()
        self._updates.on_device()
        self._end_updates()

    def _iteration_in_stages(self) -> None:
        """The same of all learners, each stage a graph, the collectives between them."""
        self._begin_in_stages()
        self._updates.in_stages()
        self._graphed_end()

    def _begin_in_stages(self) -> None:
        """Up to the first minibatch."""
        self._graphed_rollout()
        self._sum_statistics()
        self._graphed_begin()

    def _check_networks(self, obs: torch.Tensor) -> None:
        for name, learner in self.learners.items():
            check_independent_rows(name, learner.policy, obs)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """``training_stream``, with the errors of ``capacity_errors``."""
        with self.capacity_errors(), self.training_stream():
            yield

    @contextlib.contextmanager
    def capacity_errors(self) -> Iterator[None]:
        """A CapacityError in place of torch's OutOfMemoryError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            each, half = self._bytes_per_env, self.env.num_envs // 2
            fix = f"num_envs = {half:,} needs half" if half else "reduce num_steps or the networks' hidden_sizes"
            raise CapacityError(
                f"{str(error).splitlines()[0]} With num_envs = {self.env.num_envs:,} an iteration needs more than "
                f"{each * self.env.num_envs:,} bytes; {fix}"
            ) from error

    @contextlib.contextmanager
    def training_stream(self) -> Iterator[None]:
        """Run on a CUDA stream where graphs can be captured, with the configured precision; no effect on the CPU."""
        with on_stream(self._stream, self.env.device, allow_tf32=self.config.precision == "tf32"):
            yield

    @torch.no_grad()
    def _collect_rollout(self) -> None:
        """Also prepare the learners for it, and take its statistics."""
        self.timer.mark("start")
        data, timed_step = self.rollout, self.config.num_steps // 2  # its stages' shares of the time hold for all steps
        for learner in self.learners.values():
            learner.begin_rollout()
        if self.levels is not None:
            self.levels.begin_rollout()
        if self.opponents is not None:
            self.begin_episodes(self.opponents.begin_rollout())
        left: list[Forward] = self._forward_passes
        if self._fused_rollout is not None and self._fused_rollout.applies():
            self._fused_rollout()
            left = [forward for forward in self._forward_passes if forward.values_later]
        else:
            passes: list[Callable[[int], None]] = [*self._forward_passes]
            acts: list[Callable[[int], None]] = [] if self._fixed_actions is None else [self._fixed_actions]
            if self.opponents is not None:
                passes.append(self.opponents)
                acts += [self.opponents.act] * self.opponents.acts_itself
            data.collect(passes, self.sampler, self._parameters, self.timer.mark, timed_step, acts)
        for forward in left:
            forward.finish()
        if self.opponents is not None:
            self.opponents.end_rollout()
        self._compute_advantages()
        if self.levels is not None:
            self.levels.end_rollout()
        for learner in self.learners.values():
            learner.update_statistics()
        self.timer.mark("collected")
        if not self._networks_checked:  # the first observations of all environments may have been equal
            self._check_networks(self.rollout.obs[:-1])
            self._networks_checked = True

    def begin_episodes(self, begins: torch.Tensor) -> None:
        """Begin new episodes, in the last row of the rollout, in environments (E,) bool."""
        self.env.reset(mask=begins, out=self.rollout.last)
        self.rollout.keep_state(-1)
        for states in self.states.values():
            states.current.masked_fill_(begins[:, None, None], 0)
        for learner in self.learners.values():
            learner.reward_sums.masked_fill_(begins[:, None], 0)

    def _ranges(self, opponents: OpponentsConfig, env: VecEnv, specs: Mapping[str, PolicySpec]) -> Ranges:
        """The environments with opponents; ConfigError unless there can be such."""
        trained = {name: agents_of(env.game, name.split("+")) for name, spec in specs.items() if spec.train}
        whole = [name for name in trained if (specs[name].config or self.config).learns_as_team]
        return Ranges(opponents, env.game, env.num_envs, trained, whole)

    @torch.no_grad()
    def _begin_updates(self) -> None:
        """Schedules and counters of the learners, for the iteration's updates."""
        for learner in self.learners.values():
            learner.begin_update()

    @torch.no_grad()
    def _end_updates(self) -> None:
        """Update the normalizers, and add the metrics of the iteration."""
        for learner in self.learners.values():
            learner.update_normalizers()
        self.timer.mark("updated")
        self.metrics_reader.add_iteration()

    def evaluate(
        self,
        episodes: int = 1000,
        *,
        random_roles: Sequence[str] = (),
        member: int = 0,
        greedy: bool = False,
        seed: int = 1,
        on_progress: OnProgress = no_progress,
    ) -> dict[str, float]:
        """Play whole episodes in a separate environment, see ``evaluate``; the state of training does not change.

        Args:
            episodes: Number of episodes.
            random_roles: Roles, or agents with policies of their own, that act uniformly at random instead.
            member: The number of the member of each population that acts.
            greedy: Take the most likely action instead of sampling.
            seed: Seed of the evaluation.
            on_progress: Called with the fraction that is done and a text.
        """
        role_policies = self.role_policies(random_roles, member)
        return evaluate(self.env, role_policies, episodes, greedy=greedy, seed=seed, on_progress=on_progress)

    def acting_members(self, number: int = 0) -> list[str]:
        """Names of the policies that act together: of populations the members of this number.

        In one of fewer members these begin anew: its member ``number`` modulo their number.

        Raises:
            ConfigError: No population has such a member.
        """
        check_member(self.populations, number)
        members = self.members.items()
        return [name for name, own in members if own.number == number % self.populations.get(own.policy, 1)]

    def role_policies(self, random_roles: Sequence[str] = (), member: int = 0) -> dict[str, Policy | None]:
        """The policies for ``evaluate``, by role or agent: of populations the members of this number.

        None for the ``random_roles``.

        Raises:
            ConfigError: No population has such a member, or there is no such role or agent.
        """
        game = self.env.game
        acting = [self.policies[name] for name in self.acting_members(member)]
        policies = {name: policy for policy in acting for name in policy.view.names}
        known = list(dict.fromkeys([*game.layout.roles, *policies]))
        check_kind("random_roles", random_roles, (tuple, list, set, frozenset), f"a list of some of {known}")
        if unknown := set(random_roles) - set(known):
            raise ConfigError(f"random_roles has {sorted(unknown, key=str)}; expected some of {known}")
        random = set(random_roles)
        return {name: None if {name, role_of(game, name)} & random else policy for name, policy in policies.items()}

    def process_state(self) -> dict[str, torch.Tensor]:
        """What the next iteration of this process depends on beside policies and optimizers: live tensors by name."""
        tensors = {f"env.{name}": tensor for name, tensor in self.env.state_dict().items()}
        tensors |= {
            f"shared.{field.name}": self.env.state[field.name] for field in self.env.game.layout.fields if field.shared
        }
        tensors["episodes.latest"] = self.episode_log.latest
        tensors |= {f"optimizer.{name}.reward_sums": learner.reward_sums for name, learner in self.learners.items()}
        tensors |= {f"recurrent.{name}": states.current for name, states in self.states.items()}
        opponents = self.opponents
        if opponents is not None:
            tensors |= {f"opponents.{name}": tensor for name, tensor in opponents.state().items()}
        if self._schedules is not None:
            tensors |= {f"curriculum.{name}": tensor for name, tensor in self._schedules.state().items()}
        if self.levels is not None:
            tensors |= {f"levels.{name}": tensor for name, tensor in self.levels.state().items()}
        return tensors

    def load_process_state(self, tensors: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Continue after this iteration from what ``process_state`` returned, with policies and optimizers as they are.

        Raises:
            ConfigError: Names, shapes or dtypes differ. Nothing has changed.
        """
        own = self.process_state()
        expected, found = ({n: (tuple(x.shape), x.dtype) for n, x in some.items()} for some in (own, tensors))
        if found != expected:
            names = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
            raise ConfigError(
                f"the saved state and this trainer's differ in {', '.join(names)}: {[found.get(n) for n in names]}; "
                f"expected {[expected.get(n) for n in names]}"
            )
        self._restore(own, tensors, iteration)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything the next iteration depends on: live tensors by name, and a JSON-serialisable description."""
        tensors = self.process_state()
        for name, policy in self.policies.items():
            tensors |= {f"policy.{name}.{key}": tensor for key, tensor in policy.state_dict().items()}
        for name, learner in self.learners.items():
            tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in learner.optimizer_state().items()}
        game = self.env.game
        return tensors, {
            "game": game.name(),
            "game_config": dataclasses.asdict(game),
            "num_envs": self.env.num_envs,
            "world_size": self.world.size,
            "first_env_index": self.env.first_env_index,
            "seed": self.seed,
            "iteration": self.iteration,
            "algorithm": self.config.algorithm,
            "algorithms": {name: config.algorithm for name, config in self.configs.items()},
            "config": dataclasses.asdict(self.config),
            "policies": {name: dataclasses.asdict(config) for name, config in self.configs.items()},
            "trained": list(self.learners),
            "populations": self.populations or None,
            "actors": kinds_of(self.policies) or None,
            "opponents": None if self.opponents is None else self.opponents.config.description(),
            "reward": None if self.rollout.shaping is None else self.rollout.shaping.name,
            "curriculum": None if self._schedules is None else self._schedules.curriculum.description(),
            "initial_states": self._initial_states,
            "made_with": {
                "gpu_vecenv": __version__,
                # What floating-point results depend on.
                "torch": torch.__version__,
                "device": self.env.device.type,
                "threads": torch.get_num_threads(),
            },
        }

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint, from which ``load`` resumes bit-identically; return the path."""
        save_checkpoint(Path(path), *self.state())
        return Path(path)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint of a trainer with the same game, size and policies; return its manifest.

        Options that a file of an older version lacks have their defaults, with which nothing changes.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointCorruptError: The file is damaged, not a checkpoint, or of another version of the format.
            ConfigError: It is of another game, size or policy, or has options that this version lacks. Nothing has
                changed.
        """
        tensors, manifest = load_checkpoint(Path(path))
        self.load_state(tensors, manifest, str(path))
        return manifest

    def load_state(self, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], source: str) -> None:
        """Resume from what ``state`` returned; errors are those of ``load`` and name the ``source``."""
        manifest = with_defaults(manifest, source)
        own, description = self.state()
        check_fits(tensors, manifest, own, description, source)
        self._restore(own, tensors, int(manifest["iteration"]))

    def _restore(self, own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Copy ``tensors`` into ``own`` and continue after this iteration.

        Nothing is left of iterations before, also where one of them failed or was interrupted.
        """
        self.env.load_state_dict({n.removeprefix("env."): x for n, x in tensors.items() if n.startswith("env.")})
        for learner in self.learners.values():
            learner.discard_statistics()
        for name, tensor in own.items():
            if not name.startswith("env."):
                tensor.copy_(tensors[name])
        if self._schedules is not None:
            self._schedules.restored()
        if self.levels is not None:
            self.levels.restored()
        self.iteration, self._unread, self._in_iteration = iteration, 0, False
        self.metrics_reader.discard()
        self.rollout.refresh_last_step()

    def close(self) -> None:
        """Release the memory of the environment, the rollout and the graphs."""
        self.env.close()
        for name in (
            "rollout",
            "states",
            "kernels",
            "_actors",
            "learners",
            "sampler",
            "episode_log",
            "_graphed_iteration",
            "_graphed_rollout",
            "_graphed_begin",
            "_graphed_end",
            "_updates",
            "_sum_statistics",
            "_compute_advantages",
            "_parameters",
            "_forward_passes",
            "_fixed_actions",
            "_fused_rollout",
            "metrics_reader",
            "opponents",
            "_schedules",
            "levels",
        ):
            vars(self).pop(name, None)
        gc.collect()  # learners and their GraphedCallables are reference cycles


def _check_arguments(
    env: object,
    config: object,
    policies: object,
    opponents: object,
    curriculum: object,
    graphs: object,
    on_iteration: object,
) -> None:
    """Raise TypeError unless the arguments of a Trainer are of their kinds."""
    if not isinstance(env, VecEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv; a view has it as view.vec_env")
    check_flag("graphs", graphs)
    if on_iteration is not None and not callable(on_iteration):
        raise TypeError(f"on_iteration is a {type(on_iteration).__name__}; expected a function or None")
    arguments: list[tuple[str, object, tuple[type, ...]]] = [
        ("config", config, CONFIGS),
        ("policies", policies, (Mapping,)),
        ("opponents", opponents, (OpponentsConfig,)),
        ("curriculum", curriculum, (Curriculum,)),
    ]
    for name, given, kinds in arguments:
        if given is not None and not isinstance(given, kinds):
            expected = " or ".join(f"a {kind.__name__}" for kind in kinds)
            raise TypeError(f"{name} is a {type(given).__name__}; expected {expected} or None")


def _next_step_env(env: VecEnv, curriculum: Curriculum | None) -> VecEnv:
    """The environment that a trainer steps: the one given, unless it is of another mode or levels are replayed."""
    if curriculum is not None and curriculum.levels is not None:
        return with_table(env)
    fits = env.autoreset_mode == "next_step" and not env.agents_as_envs
    return env if fits else env.like(autoreset_mode="next_step", agents_as_envs=False)
