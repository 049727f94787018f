"""PPO with one policy shared by all agents.

Shapes: T steps, N envs, A agents, D obs_dim; B = N * A rows. Read from top to bottom: configuration, advantages,
loss, rollout, update, loop.

The environment runs in "next_step" mode: the last observation of an episode is simply row t + 1, valued by the same
forward pass; at the tick after it the environment resets, and that transition is masked, like those of agents that
have left the game.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_vecenv._version import __version__
from gpu_vecenv.arguments import checked_seed
from gpu_vecenv.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.device import free_bytes
from gpu_vecenv.env import check_fields, param
from gpu_vecenv.errors import CapacityError, CheckpointCorruptError, ConfigError, NonFiniteError
from gpu_vecenv.policy import default_policy, log_probs_and_entropies, masked
from gpu_vecenv.sampler import Sample, Sampler
from gpu_vecenv.vec_env import Fault, VecEnv


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Schulman et al., "Proximal policy optimization algorithms", 2017."""

    total_steps: int = param(1_000_000, low=1)  # env-steps of the whole run, all replicas together
    num_steps: int = param(32, low=1)  # T: ticks per iteration
    num_epochs: int = param(4, low=1)  # passes over each iteration's data
    num_minibatches: int = param(4, low=1)  # per epoch
    learning_rate: float = param(3e-4, low=0)  # of Adam
    anneal: bool = True  # learning rate falls linearly to 0
    gamma: float = param(0.99, low=0, high=1)  # discount per tick
    gae_lambda: float = param(0.95, low=0, high=1)  # Schulman et al. 2016, equation 16
    clip: float = param(0.2, low=0)  # of the probability ratio
    value_coefficient: float = param(0.5, low=0)  # weight of the value loss
    entropy_coefficient: float = param(0.01, low=0)  # weight of the entropy bonus
    max_grad_norm: float = param(0.5, low=0)  # gradients are scaled down to this norm
    hidden_sizes: tuple[int, ...] = param((64, 64), low=1)  # units of the policy's hidden layers

    def __post_init__(self) -> None:
        check_fields(self)


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    active: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimates, (T, …), 0 where an agent was not active.

    ``values`` is (T + 1, …): row t + 1 values the state that step t led to, before any reset. A terminated state is
    worth nothing; a truncated one keeps its value but ends the trace. The others are (T, …).
    """
    estimates, trace = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * ~terminations[t] - values[t]
        trace = (delta + gamma * gae_lambda * ~(terminations[t] | truncations[t]) * trace) * active[t]
        estimates[t] = trace
    return estimates


class Batch(NamedTuple):
    """Rows of a rollout, (rows, …). Only those of ``active`` agents count."""

    obs: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    active: torch.Tensor
    action_mask: torch.Tensor | None = None

    def at(self, places: torch.Tensor) -> Batch:
        """Some of the rows, (places,) int64."""
        return Batch._make(None if tensor is None else tensor[places] for tensor in self)


def mean_of(x: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Mean over active rows; the others may hold anything, NaN too. Nothing is read on the host."""
    return torch.where(active, x, 0).sum() / active.sum().clamp(min=1)


def loss(
    policy: nn.Module, batch: Batch, head_sizes: Sequence[int], config: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar to minimise, and (policy loss, value loss, entropy, approximate KL, clipped share) for the log."""
    logits, values = policy(batch.obs)
    log_probs, entropies = log_probs_and_entropies(logits, batch.actions, head_sizes, batch.action_mask)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return mean_of(x, batch.active)

    centred = batch.advantages - mean(batch.advantages)
    scaled = centred / (mean(centred.square()).sqrt() + 1e-8)
    log_ratio = torch.where(batch.active, log_probs - batch.log_probs, 0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = mean(-torch.minimum(ratio * scaled, clipped * scaled))
    value_loss = 0.5 * mean((values - batch.returns).square())
    entropy = mean(entropies)
    total = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
    with torch.no_grad():
        kl = mean(ratio - 1 - log_ratio)  # never negative: Schulman, "Approximating KL divergence", 2020
        clip_share = mean(((ratio - 1).abs() > config.clip).float())
        return total, torch.stack([policy_loss, value_loss, entropy, kl, clip_share])


LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "approximate_kl", "clip_share", "gradient_norm")


class Rollout:
    """Storage of one iteration. The environment writes observations where the learner reads them: nothing is copied."""

    def __init__(self, env: VecEnv, num_steps: int) -> None:
        rows, device = (num_steps, env.num_envs, env.num_agents), env.device
        after = (num_steps + 1, *rows[1:])
        self.obs = torch.empty((*after, *env.game.observation.shape), dtype=env.layout.obs_dtype, device=device)
        self.active = torch.empty(after, dtype=torch.bool, device=device)
        self.values = torch.empty(after, device=device)
        choices = (env.layout.num_choices,) if env.layout.num_choices else ()
        self.action_mask = torch.empty((*after, *choices), dtype=torch.bool, device=device) if choices else None
        self.actions = torch.empty((*rows, *env.game.action.shape), dtype=torch.int32, device=device)
        self.log_probs, self.entropies, self.rewards = (torch.empty(rows, device=device) for _ in range(3))
        self.terminations, self.truncations = (torch.empty(rows, dtype=torch.bool, device=device) for _ in range(2))
        self.slabs = [
            env.slab(
                **self._before(t + 1),
                rewards=self.rewards[t],
                terminations=self.terminations[t],
                truncations=self.truncations[t],
            )
            for t in range(num_steps)
        ]
        self.samples = [Sample(self.actions[t], self.log_probs[t], self.entropies[t]) for t in range(num_steps)]
        self.first = env.slab(**self._before(0))

    def _before(self, t: int) -> dict[str, torch.Tensor]:
        """What tick t begins with, and tick t - 1 has written."""
        rows = {"obs": self.obs[t], "active": self.active[t]}
        return rows if self.action_mask is None else rows | {"action_mask": self.action_mask[t]}

    def masked(self, t: int, logits: torch.Tensor) -> torch.Tensor:
        """Logits of tick t without the choices that it forbids."""
        return masked(logits, None if self.action_mask is None else self.action_mask[t])

    def go_on(self) -> None:
        """The end of the last iteration is the beginning of the next."""
        for name, first in self._before(0).items():
            first.copy_(self._before(-1)[name])

    @staticmethod
    def bytes_per_env(env: VecEnv, num_steps: int) -> int:
        """Memory of one replica's rows, with what the update makes of them."""
        per_row = env.game.obs_size * env.layout.obs_dtype.itemsize + 4 * env.game.action.heads + 40
        per_row += env.layout.num_choices
        return (num_steps + 1) * env.num_agents * 2 * per_row


class Trainer:
    """Trains one shared policy on an environment.

    Args:
        env: The environment. One that is not in "next_step" mode, or has agents as rows, serves as a pattern: the
            trainer steps its own, made with the same arguments otherwise.
        config: Hyper-parameters.
        seed: Of the environment, the weights and the minibatches.
        policy: A module mapping observations to (logits, values), see ``ActorCritic``; None makes one.
        on_iteration: Called with a dictionary of figures after every iteration.

    Raises:
        ConfigError: The configuration does not fit the environment.
        CapacityError: The rollout does not fit in memory.
    """

    def __init__(
        self,
        env: VecEnv,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        policy: nn.Module | None = None,
        on_iteration: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        fits = env.autoreset_mode == "next_step" and not env.rows
        self.env = env if fits else env.like(autoreset_mode="next_step", rows=False)
        self.config, self.seed, self.on_iteration = config or PPOConfig(), checked_seed(seed), on_iteration
        self.rows = self.config.num_steps * env.num_envs * env.num_agents  # per iteration
        if self.rows % self.config.num_minibatches:
            raise ConfigError(
                f"num_minibatches is {self.config.num_minibatches}; expected a divisor of num_steps x num_envs x "
                f"num_agents = {self.config.num_steps} x {env.num_envs} x {env.num_agents} = {self.rows}"
            )
        self._check_capacity()
        self.generator = torch.Generator(env.device).manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # the host's alone: weights are drawn there
            self.policy = (policy or default_policy(env.game, self.config.hidden_sizes)).to(env.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.config.learning_rate, eps=1e-5)
        self.sampler = Sampler(self.env)
        self.rollout = Rollout(self.env, self.config.num_steps)
        self.env.reset(seed=self.seed, out=self.rollout.first)
        self.iteration = 0
        self._collected = False  # whether the last row of the rollout is where the next one begins

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run: the last one completes ``total_steps``."""
        return -(-self.config.total_steps // (self.config.num_steps * self.env.num_envs))

    def train(self) -> dict[str, float]:
        """Run all remaining iterations; returns the last one's figures."""
        figures: dict[str, float] = {}
        while self.iteration < self.num_iterations:
            try:
                figures = self.train_iteration()
            except torch.OutOfMemoryError as error:
                each = Rollout.bytes_per_env(self.env, self.config.num_steps)
                raise CapacityError(
                    f"{str(error).splitlines()[0]} With num_envs = {self.env.num_envs:,} an iteration needs "
                    f"{each * self.env.num_envs:,} bytes and more; num_envs = {self.env.num_envs // 2:,} needs half"
                ) from error
            if self.on_iteration:
                self.on_iteration(figures)
        return figures

    def train_iteration(self) -> dict[str, float]:
        """One rollout and one update. Waits for the device once, to read the figures.

        Raises:
            NonFiniteError: The loss became NaN or infinite; weights and optimiser are as they were before the update.
        """
        start = time.perf_counter()
        share = 1 - self.iteration / self.num_iterations if self.config.anneal else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = share * self.config.learning_rate
        self._collect()
        before = copy.deepcopy((self.policy.state_dict(), self.optimizer.state_dict()))
        losses, explained = self._update()
        try:
            figures = self._read(losses, explained)
        except NonFiniteError:
            self.policy.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            raise
        self.iteration += 1
        seconds = time.perf_counter() - start
        env_steps = self.config.num_steps * self.env.num_envs
        return {
            "iteration": self.iteration,
            "env_steps": self.iteration * env_steps,
            "agent_steps_per_s": env_steps * self.env.num_agents / seconds,
            "learning_rate": share * self.config.learning_rate,
            **figures,
        }

    @torch.no_grad()
    def _collect(self) -> None:
        data = self.rollout
        if self._collected:
            data.go_on()
        for t, (slab, sample) in enumerate(zip(data.slabs, data.samples, strict=True)):
            logits, data.values[t] = self.policy(data.obs[t])
            self.sampler.sample(data.masked(t, logits), out=sample)
            self.env.step(data.actions[t], out=slab)
        data.values[-1] = self.policy(data.obs[-1])[1]
        self._collected = True

    def _update(self) -> tuple[torch.Tensor, torch.Tensor]:
        data, config = self.rollout, self.config
        active = data.active[:-1]
        estimates = advantages(
            data.rewards, data.values, data.terminations, data.truncations, active, config.gamma, config.gae_lambda
        )
        returns = estimates + data.values[:-1]
        rows = Batch(
            data.obs[:-1].flatten(0, 2),
            data.actions.view(self.rows, -1),
            data.log_probs.flatten(),
            estimates.flatten(),
            returns.flatten(),
            active.flatten(),
            None if data.action_mask is None else data.action_mask[:-1].flatten(0, 2),
        )
        losses = torch.zeros(len(LOSS_NAMES), device=self.env.device)
        for _ in range(config.num_epochs):
            order = torch.randperm(self.rows, generator=self.generator, device=self.env.device)
            for places in order.view(config.num_minibatches, -1):
                batch = rows.at(places)
                total, parts = loss(self.policy, batch, self.env.game.action.head_sizes, config)
                self.optimizer.zero_grad()
                total.backward()
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
                self.optimizer.step()
                losses += torch.cat([parts, norm[None]])
        spread = mean_of((returns - mean_of(returns, active)).square(), active)
        missed = mean_of((estimates - mean_of(estimates, active)).square(), active)
        explained = 1 - missed / spread.clamp(min=1e-8)
        return losses / (config.num_epochs * config.num_minibatches), explained

    def _read(self, losses: torch.Tensor, explained: torch.Tensor) -> dict[str, float]:
        """The one look at the device."""
        statistics, roles = self.env.episode_statistics(), self.env.game.role_slices
        episodes = statistics["episodes"].sum()
        counts = self.env.game.roles
        returns = [statistics["returns"][:, roles[role]].sum() / max(counts[role], 1) for role in roles]
        sums = [episodes, statistics["lengths"].sum(), statistics["terminations"].sum(), *returns]
        read = torch.stack([x.double() for x in (*losses, explained, *sums)]).tolist()
        self.env.clear_episode_statistics()
        names = [*LOSS_NAMES, "explained_variance", "episodes", "episode_length", "terminated_share"]
        figures = dict(zip([*names, *(f"return_{role}" for role in roles)], read, strict=True))
        if not all(abs(figures[name]) < float("inf") for name in LOSS_NAMES):
            losses_read = {name: figures[name] for name in LOSS_NAMES}
            raise NonFiniteError(
                f"iteration {self.iteration + 1}: losses {losses_read} are not finite; "
                "a smaller learning_rate or max_grad_norm may help"
            )
        per_episode = ["episode_length", "terminated_share", *(f"return_{role}" for role in roles)]
        return figures | {name: figures[name] / max(figures["episodes"], 1) for name in per_episode}

    @torch.no_grad()
    def evaluate(
        self, episodes: int = 1000, *, random_roles: Sequence[str] = (), greedy: bool = False, seed: int = 1
    ) -> dict[str, float]:
        """Play whole episodes in an environment of its own; training is not touched.

        Args:
            episodes: How many.
            random_roles: Roles that act uniformly at random instead of by the policy.
            greedy: Take the likeliest action instead of sampling.
            seed: Of the evaluation's random streams.

        Returns:
            "episodes", "episode_length" (mean ticks), "terminated_share" (of the episodes, those whose last
            tick truncated no agent) and "return_<role>" (mean over episodes and the role's agents).
        """
        game = self.env.game
        if unknown := set(random_roles) - set(game.roles):
            raise ConfigError(f"random_roles has {sorted(unknown)}; the roles are {list(game.roles)}")
        if type(episodes) is not int or episodes < 1:
            raise ConfigError(f"episodes is {episodes}; at least 1 is needed")
        rounds = -(-episodes // self.env.num_envs)
        num_envs = -(-episodes // rounds)
        env = self.env.like(num_envs=num_envs, autoreset_mode="disabled")
        sampler, slab, totals = Sampler(env), env.slab(), dict[str, float]()
        at_random = torch.zeros(game.num_agents, dtype=torch.bool, device=env.device)
        for role in random_roles:
            at_random[game.role_slices[role]] = True
        at_random = at_random.view(-1, *[1] * len(game.action.shape))
        for played in range(0, episodes, num_envs):
            obs, _ = env.reset(seed=seed if played == 0 else None, out=slab)
            env.clear_episode_statistics()
            while bool(env.active.any()):
                if bool((env.faults() & Fault.INVALID_ACTION).any()):
                    raise NonFiniteError("evaluate: the policy's logits are NaN, or exclude every choice")
                for _ in range(16):
                    logits = masked(self.policy(obs)[0], slab.action_mask)
                    actions = sampler.sample(logits, greedy=greedy).actions
                    env.step(torch.where(at_random, env.sample_actions(), actions), out=slab)
            counted = slice(0, min(num_envs, episodes - played))
            statistics = {name: tensor[counted] for name, tensor in env.episode_statistics().items()}
            sums = {"episode_length": statistics["lengths"], "terminated_share": statistics["terminations"]}
            sums |= {
                f"return_{role}": statistics["returns"][:, where].sum(-1) / max(game.roles[role], 1)
                for role, where in game.role_slices.items()
            }
            for name, tensor in sums.items():
                totals[name] = totals.get(name, 0.0) + float(tensor.double().sum())
        env.close()
        return {"episodes": episodes, **{name: total / episodes for name, total in totals.items()}}

    def save(self, path: str | Path) -> Path:
        """Write the policy's weights and what is needed to read them; returns the path."""
        game = self.env.game
        manifest = {
            "gpu_vecenv": __version__,
            "game": game.name(),
            "game_config": dataclasses.asdict(game),
            "ppo_config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "iteration": self.iteration,
            "num_envs": self.env.num_envs,
        }
        save_checkpoint(Path(path), self.policy.state_dict(), manifest)
        return Path(path)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read weights saved by a trainer of the same game and policy; returns the file's manifest.

        Raises:
            FileNotFoundError, CheckpointCorruptError: There is no file, or a damaged or foreign one.
            ConfigError: Its game or the shape of its policy differs.
        """
        tensors, manifest = load_checkpoint(Path(path))
        if manifest.get("game") != self.env.game.name():
            raise ConfigError(f"{path} is of the game {manifest.get('game')!r}; expected {self.env.game.name()!r}")
        own = {name: tuple(tensor.shape) for name, tensor in self.policy.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if own != found:
            raise ConfigError(f"{path} holds {found}; this policy has {own}")
        if any(not bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise CheckpointCorruptError(f"{path} holds NaN or infinite weights")
        self.policy.load_state_dict(tensors)
        return manifest

    def _check_capacity(self) -> None:
        each, free = Rollout.bytes_per_env(self.env, self.config.num_steps), free_bytes(self.env.device)
        if each * self.env.num_envs > free:
            raise CapacityError(
                f"a rollout of {self.config.num_steps} steps x {self.env.num_envs:,} replicas needs about "
                f"{each * self.env.num_envs:,} bytes, {free:,} are free on {self.env.device}; "
                f"at most num_envs = {free // each:,} fit"
            )


def fitting_num_envs(game_env: Callable[[int], VecEnv], num_steps: int, wanted: int) -> int:
    """The most replicas up to ``wanted`` whose environment and rollout fit in 80 % of the free memory."""
    env = game_env(1)
    each = env.bytes_per_env() + Rollout.bytes_per_env(env, num_steps)
    fit = int(0.8 * free_bytes(env.device)) // each
    env.close()
    if fit < 1:
        raise CapacityError(
            f"one replica needs about {each:,} bytes; {free_bytes(env.device):,} are free on {env.device}"
        )
    return min(wanted, fit)
