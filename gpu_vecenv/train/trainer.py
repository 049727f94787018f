"""The training loop: a policy for each role, rollouts, updates, and all of it saved and taken up again.

The environment runs in "next_step" mode: the last observation of an episode is simply row t + 1, valued by the same
forward pass; at the step after it the environment resets, and that transition is masked, like those of agents that
have left the game.

On a GPU the rollout, the order of the rows, each minibatch's gradients and each step of the optimiser are CUDA graphs.
The host reads the device once an iteration. All that an iteration depends on lies in tensors that a checkpoint holds,
so that a run that was interrupted goes on with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_vecenv._version import __version__
from gpu_vecenv.engine.arguments import validate_seed
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.errors import CapacityError, CheckpointCorruptError, ConfigError, NonFiniteError
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, StageTimer, capture_stream
from gpu_vecenv.train.learner_kernels import advantage_launch
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import LEARNER_METRICS, LOSS_METRICS, Learner, PPOConfig, make_policy
from gpu_vecenv.train.rollout_storage import Rollout, check_capacity

EXTRA_MANIFEST_KEYS = ("progress", "rank")  # to a checkpoint's manifest, by others than the trainer
RUN_WIDE_KEYS = ("total_steps", "num_steps", "squash", "precision")  # keys on which all policies must agree


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """How the policy of some roles is made, and whether it learns.

    Args:
        network: Any module that does what ``ActorCritic`` does; None makes one of ``config.hidden_sizes``.
        config: Hyper-parameters of its own; None takes the trainer's.
        weights: What it begins with: the ``state_dict`` of a ``Policy``, as ``load_policy(…)`` gives one from a run.
        train: False: it acts, and stays as it is.
    """

    network: nn.Module | None = None
    config: PPOConfig | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    train: bool = True


class Trainer:
    """Trains a policy for each role, or one for several roles, on an environment.

    Args:
        env: The environment. One that is not in "next_step" mode, or has agents as rows, serves as a pattern: the
            trainer steps its own, made with the same arguments otherwise. With torch.distributed it is this process's
            shard, whose ``first_env_index`` is the process's rank times ``num_envs``.
        config: Hyper-parameters.
        seed: Of the environment, the weights and the minibatches.
        policies: Role -> its policy, or the roles that share one joined by "+", as in "tagger+runner"; a module stands
            for ``PolicySpec(network=module)``. None gives each role one of its own.
        graphs: Whether to use CUDA graphs on a GPU.
        on_iteration: Called with a dictionary of metrics after every iteration; training ends when it returns True.

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
        policies: Mapping[str, PolicySpec | nn.Module] | None = None,
        graphs: bool = True,
        on_iteration: Callable[[dict[str, float]], bool | None] | None = None,
    ) -> None:
        if not isinstance(env, VecEnv):
            raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv: that of a view is its vec_env")
        for name, given, kind in (("config", config, PPOConfig), ("policies", policies, Mapping)):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{name} is a {type(given).__name__}; expected a {kind.__name__} or None")
        self.config, self.seed, self.on_iteration = config or PPOConfig(), validate_seed(seed), on_iteration
        self.world, self.iteration = World.current(), 0
        self._interrupted = False  # whether the last iteration ended by an error or an interrupt
        if self.world.size > 1 and env.first_env_index != self.world.rank * env.num_envs:
            raise ConfigError(
                f"env.first_env_index is {env.first_env_index} in process {self.world.rank} of {self.world.size}; expected "
                f"rank x num_envs = {self.world.rank * env.num_envs}, so that no two replicas are the same"
            )
        specs = self._specs(env, policies)
        check_capacity(env, self.config.num_steps)
        fits = env.autoreset_mode == "next_step" and not env.agents_as_envs
        self.env = env if fits else env.like(autoreset_mode="next_step", agents_as_envs=False)
        self._stream = capture_stream(env.device, threading.get_ident()) if env.device.type == "cuda" else None
        with self._on_training_stream():
            self.rollout = Rollout(self.env, self.config.num_steps)
            self.configs = {name: spec.config or self.config for name, spec in specs.items()}
            self.policies: dict[str, Policy] = {}
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)  # the host's alone: weights are drawn there
                for name, spec in specs.items():
                    self.policies[name] = self._policy(name, spec)
            for policy in self.policies.values():  # networks of the user's own may be another in each process
                for tensor in policy.state_dict().values():
                    self.world.broadcast(tensor)
            graph_pool = GraphPool() if graphs and env.device.type == "cuda" else None
            settings: dict[str, Any] = {"seed": self.seed, "world": self.world, "graph_pool": graph_pool}
            self.learners = {
                name: Learner(self.policies[name], self.configs[name], self.rollout, **settings)
                for name, spec in specs.items()
                if spec.train
            }
            self.sampler = Sampler(self.env, squash=self.config.squash)
            rows = (env.num_envs, env.num_agents)
            self._parameters = torch.zeros((*rows, self.sampler.num_parameters), device=env.device)
            gamma, gae_lambda = torch.zeros((2, env.num_agents), device=env.device)
            for learner in self.learners.values():
                gamma[learner.policy.view.agents] = learner.config.gamma
                gae_lambda[learner.policy.view.agents] = learner.config.gae_lambda
            data = self.rollout
            numbers, out = (data.rewards, data.values[:-1], data.values[1:]), (data.advantages, data.returns)
            flags = data.terminations, data.truncations, data.active[:-1]
            self._compute_advantages = advantage_launch(self.env, *numbers, *flags, gamma, gae_lambda, out=out)
            self.env.reset(seed=self.seed, out=self.rollout.last)
        self.timer = StageTimer(env.device)
        self._graphed_rollout = GraphedCallable(self._collect_rollout, "the rollout", graph_pool)

    def _specs(self, env: VecEnv, given: Mapping[str, PolicySpec | nn.Module] | None) -> dict[str, PolicySpec]:
        known = list(env.game.layout.present_roles)
        specs = {
            name: spec if isinstance(spec, PolicySpec) else PolicySpec(network=spec)
            for name, spec in ({role: PolicySpec() for role in known} if given is None else given).items()
        }
        networks = [spec.network for spec in specs.values() if spec.network is not None]
        if wrong := [network for network in networks if not isinstance(network, nn.Module)]:
            raise TypeError(f"policies hold a {type(wrong[0]).__name__}; expected a PolicySpec or a torch module")
        parts = [id(part) for network in networks for part in {network, *network.parameters()}]
        if len(set(parts)) < len(parts):
            raise ConfigError(
                f"policies {list(specs)} have weights in common; roles share a whole policy, as in 'a+b', or nothing"
            )
        named = [role for name in specs for role in name.split("+")]
        if sorted(named) != sorted(known):
            raise ConfigError(f"policies are for {list(specs)}; expected each of the roles {known} once")
        for name, spec in specs.items():
            for key in RUN_WIDE_KEYS if spec.config else ():
                own, common = getattr(spec.config, key), getattr(self.config, key)
                if own != common:
                    raise ConfigError(f"{key} of {name} is {own!r}, the run's is {common!r}; expected the same")
        return dict(sorted(specs.items(), key=lambda item: known.index(item[0].split("+")[0])))  # as the game has them

    def _policy(self, name: str, spec: PolicySpec) -> Policy:
        policy = make_policy(self.env.game, name.split("+"), self.configs[name], spec.network, self.env.device)
        view = policy.view
        with torch.no_grad():
            found = [tuple(x.shape) for x in policy(view.obs(self.rollout.obs[0]))]
        expected = [(self.env.num_envs, view.num_agents, view.num_parameters), (self.env.num_envs, view.num_agents)]
        if found != expected:
            raise ConfigError(f"the network of {name} gives shapes {found}; expected parameters and values, {expected}")
        if spec.train and not any(p.requires_grad for p in policy.parameters()):
            raise ConfigError(f"the network of {name} has nothing to learn; expected parameters, or train=False")
        if spec.weights is not None:
            policy.load_weights(spec.weights)
        return policy.requires_grad_(spec.train)

    @property
    def env_steps_per_iteration(self) -> int:
        """Of all processes together."""
        return self.config.num_steps * self.env.num_envs * self.world.size

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run: the last one completes ``total_steps``."""
        return -(-self.config.total_steps // self.env_steps_per_iteration)

    def train(self) -> dict[str, float]:
        """Run the remaining iterations, or until ``on_iteration`` returns True; returns the last one's metrics."""
        metrics: dict[str, float] = {}
        while self.iteration < self.num_iterations:
            metrics = self.train_iteration()
            if self.on_iteration and self.on_iteration(metrics):
                break
        return metrics

    def train_iteration(self) -> dict[str, float]:
        """One rollout and one update. Waits for the device once, to read the metrics.

        Raises:
            NonFiniteError: A loss or gradient became NaN or infinite; from there on no step was taken.
            CapacityError: The memory of the device does not suffice.
        """
        self.env.check_ready("train_iteration")
        if self._interrupted:
            self.rollout.refresh_last_step()
            for learner in self.learners.values():
                for _, _, moments in learner.normalizer_updates:
                    moments.zero_()
        self._interrupted = True
        try:
            metrics = self._iterate()
        except torch.OutOfMemoryError as error:
            each = Rollout.bytes_per_env(self.env, self.config.num_steps)
            raise CapacityError(
                f"{str(error).splitlines()[0]} With num_envs = {self.env.num_envs:,} an iteration needs "
                f"{each * self.env.num_envs:,} bytes and more; num_envs = {self.env.num_envs // 2:,} needs half"
            ) from error
        self._interrupted = False
        return metrics

    def _iterate(self) -> dict[str, float]:
        start, progress = time.perf_counter(), min(self.iteration / self.num_iterations, 1.0)
        with self._on_training_stream():
            self.timer.mark("start")
            self._graphed_rollout()
            self.timer.mark("collected")
            for learner in self.learners.values():
                learner.update(progress, self.iteration)
            self.timer.mark("updated")
            metrics = self._read_metrics()
        self.iteration += 1
        seconds = time.perf_counter() - start
        return {
            "iteration": self.iteration,
            "env_steps": self.iteration * self.env_steps_per_iteration,
            "agent_steps_per_s": self.env_steps_per_iteration * self.env.num_agents / seconds,
            **self._time_fractions(seconds),
            **{
                f"learning_rate_{name}": learner.config.schedule(progress)[0] for name, learner in self.learners.items()
            },
            **metrics,
        }

    @contextlib.contextmanager
    def _on_training_stream(self) -> Iterator[None]:
        """On a stream of its own, where graphs can be captured, with the precision asked for."""
        if self._stream is None:
            yield
            return
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
        matmul.allow_tf32 = cudnn.allow_tf32 = self.config.precision == "tf32"
        cudnn.deterministic = True
        self._stream.wait_stream(torch.cuda.current_stream(self.env.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
            torch.cuda.current_stream(self.env.device).wait_stream(self._stream)

    @torch.no_grad()
    def _collect_rollout(self) -> None:
        data, timed_step = self.rollout, self.config.num_steps // 2  # one step's stages stand for all
        data.collect(self.policies.values(), self.sampler, self._parameters, self.timer.mark, timed_step)
        for policy in self.policies.values():
            data.values[-1][:, policy.view.agents] = policy(policy.view.obs(data.obs[-1]))[1]
        self._compute_advantages()
        for learner in self.learners.values():
            learner.update_statistics()

    def _read_metrics(self) -> dict[str, float]:
        """The one look at the device."""
        statistics, roles = self.env.episode_statistics(), self.env.game.layout.role_slices
        names = [f"{metric}_{name}" for name in self.learners for metric in LEARNER_METRICS]
        means = [learner.metrics_of_iteration().double() / self.world.size for learner in self.learners.values()]
        sums = {name: statistics[name].sum().double() for name in ("episodes", "lengths", "terminations")}
        faults, lost = self.env.faults(), int(Fault.NONFINITE)
        sums |= {
            "faults": (faults & ~lost).count_nonzero().double(),
            "nonfinite_envs": (faults & lost).bool().sum().double(),
        }
        sums |= {f"return_{role}": statistics["returns"][:, where].double().sum() for role, where in roles.items()}
        read = torch.cat([*means, torch.stack(list(sums.values()))])
        self.world.all_reduce_sum(read)
        metrics = dict(zip([*names, *sums], read.tolist(), strict=True))
        self.env.clear_episode_statistics()
        losses = {name: metrics[name] for name in names if name.startswith(LOSS_METRICS)}
        if not all(abs(value) < float("inf") for value in losses.values()):
            raise NonFiniteError(
                f"iteration {self.iteration + 1}: losses {losses} are not finite; "
                "a smaller learning_rate or max_grad_norm may help"
            )
        if faults := metrics.pop("faults"):
            raise NonFiniteError(
                f"iteration {self.iteration + 1}: {faults:.0f} replicas were given invalid actions and stand still; "
                "a policy gives NaN, or excludes every choice"
            )
        if not self.env.build.end_on_nonfinite:
            del metrics["nonfinite_envs"]
        episodes = max(metrics["episodes"], 1)
        metrics["episode_length"] = metrics.pop("lengths") / episodes
        metrics["terminated_fraction"] = metrics.pop("terminations") / episodes
        for role, count in self.env.game.layout.roles.items():
            metrics[f"return_{role}"] /= episodes * max(count, 1)
        return metrics

    def _time_fractions(self, seconds: float) -> dict[str, float]:
        """Of the time: the update's, and what the timed_step step says about the rollout's."""
        update, rollout = self.timer.seconds("collected", "updated"), self.timer.seconds("start", "collected")
        marks = pairwise(("policy", "sampling", "env", "step_end"))
        stages = {name: self.timer.seconds(name, after) for name, after in marks}
        step = sum(stages.values())
        shares = {
            f"{name}_time_fraction": rollout / seconds * stage / step if step else 0.0 for name, stage in stages.items()
        }
        return shares | {"update_time_fraction": update / seconds}

    def evaluate(
        self, episodes: int = 1000, *, random_roles: Sequence[str] = (), greedy: bool = False, seed: int = 1
    ) -> dict[str, float]:
        """Play whole episodes in an environment of its own, see ``evaluate``; training is not touched.

        Args:
            episodes: How many.
            random_roles: Roles that act uniformly at random instead of by their policy.
            greedy: Take the likeliest action instead of sampling.
            seed: Of the evaluation's random streams.
        """
        role_policies: dict[str, Any] = {}
        known = list(self.env.game.layout.roles)
        if unknown := set(random_roles) - set(known):
            raise ConfigError(f"random_roles has {sorted(unknown)}; the roles are {known}")
        for policy in self.policies.values():
            role_policies |= {role: None if role in random_roles else policy for role in policy.view.roles}
        return evaluate(self.env, role_policies, episodes, greedy=greedy, seed=seed)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that the next iteration depends on, live tensors by name; and what they belong to, as JSON values."""
        tensors = {f"env.{name}": tensor for name, tensor in self.env.state_dict().items()}
        tensors |= {
            f"shared.{field.name}": self.env.state[field.name] for field in self.env.game.layout.fields if field.shared
        }
        for name, policy in self.policies.items():
            tensors |= {f"policy.{name}.{key}": tensor for key, tensor in policy.state_dict().items()}
        for name, learner in self.learners.items():
            tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in learner.state().items()}
        game = self.env.game
        return tensors, {
            "game": game.name(),
            "game_config": dataclasses.asdict(game),
            "num_envs": self.env.num_envs,
            "world_size": self.world.size,
            "first_env_index": self.env.first_env_index,
            "seed": self.seed,
            "iteration": self.iteration,
            "config": dataclasses.asdict(self.config),
            "policies": {name: dataclasses.asdict(config) for name, config in self.configs.items()},
            "trained": list(self.learners),
            "made_with": {"gpu_vecenv": __version__, **self._platform()},
        }

    def _platform(self) -> dict[str, Any]:
        """What the bits of sums depend on beside the state."""
        return {"torch": torch.__version__, "device": self.env.device.type, "threads": torch.get_num_threads()}

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint, from which ``load`` goes on bit by bit; returns the path."""
        save_checkpoint(Path(path), *self.state())
        return Path(path)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint of a trainer of the same game, size and policies; returns the file's manifest.

        Raises:
            FileNotFoundError, CheckpointCorruptError: There is no file, or a damaged or foreign one.
            ConfigError: It is of another game, size or policy. Nothing has changed.
        """
        tensors, manifest = load_checkpoint(Path(path))
        self.load_state(tensors, manifest, str(path))
        return manifest

    def load_state(self, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], source: str) -> None:
        """Go on from what ``state`` gave; errors as in ``load`` name the ``source``."""
        own, described = self.state()
        wanted = json.loads(json.dumps(described))  # JSON knows no tuples
        if type(manifest.get("iteration")) is not int or manifest["iteration"] < 0:
            raise CheckpointCorruptError(f"{source}: iteration is {manifest.get('iteration')!r}; expected an int >= 0")
        if others := list(_differing(manifest, wanted)):
            raise ConfigError(f"{source} is of another run: {'; '.join(others)}")
        shapes, found_shapes = (
            {name: (str(x.dtype), tuple(x.shape)) for name, x in sorted(state.items())} for state in (own, tensors)
        )
        if shapes != found_shapes:
            differing = {name: (found_shapes.get(name), shapes.get(name)) for name in {*shapes, *found_shapes}}
            raise ConfigError(
                f"{source} and this trainer differ (name: file's, trainer's): "
                f"{ {name: pair for name, pair in sorted(differing.items()) if pair[0] != pair[1]} }"
            )
        bad = [n for n, x in tensors.items() if n.startswith(("policy", "optimizer")) and not bool(x.isfinite().all())]
        if bad:
            raise CheckpointCorruptError(f"{source} holds NaN or infinite numbers in {', '.join(bad)}")
        made_with = manifest.get("made_with")
        made_with = made_with if isinstance(made_with, dict) else {}
        if (before := {k: made_with.get(k) for k in self._platform()}) != self._platform():
            warnings.warn(f"{source} was made with {before}, this is {self._platform()}: bits may differ", stacklevel=3)
        self.env.load_state_dict({n.removeprefix("env."): x for n, x in tensors.items() if n.startswith("env.")})
        for name, tensor in own.items():
            if not name.startswith("env."):
                tensor.copy_(tensors[name])
        self.iteration = int(manifest["iteration"])
        self.rollout.refresh_last_step()

    def close(self) -> None:
        """Let go of the environment, the rollout and the graphs: their memory is free at once."""
        self.env.close()
        for name in ("rollout", "learners", "sampler", "_graphed_rollout", "_compute_advantages", "_parameters"):
            vars(self).pop(name, None)
        gc.collect()  # a stage knows its learner and the learner its stages


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """Where two descriptions differ in what the bits depend on. Another end is allowed: a run may go on for longer."""
    for key in sorted(
        {*found, *wanted} - {"iteration", "made_with", "total_steps", *(() if inside else EXTRA_MANIFEST_KEYS)}
    ):
        one, other = found.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{inside}{key}.")
        elif one != other:
            yield f"its {inside}{key} is {one!r}, this trainer's {other!r}"
