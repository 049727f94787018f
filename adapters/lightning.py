"""PyTorch Lightning: the PPO trainer as a LightningModule, with Lightning's loggers, checkpoints, profilers and DDP.

One epoch is one iteration of ``gpu_vecenv.Trainer``: ``on_train_epoch_start`` collects a rollout, each
``training_step`` computes the gradient of one minibatch for every policy and takes one optimizer step, with the
learners of the Trainer. Results are those of the Trainer.

The run ends with the epoch that completes ``total_steps``, which the schedules follow, or with ``max_epochs``. Metrics
are those of the Trainer, logged once an epoch. Checkpoints of whole epochs contain the environments of all processes:
``fit(module, ckpt_path=…)`` resumes bit-identically.

``fit`` moves the environment to Lightning's device; with "ddp" each process has ``num_envs`` environments of its own.
The module ignores ``to(…)``, because CUDA graphs refer to the memory of its weights.
"""

from __future__ import annotations

from typing import Any

import torch

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, VecEnv
from gpu_vecenv.adapters import check_num_envs, requires_extra, split_config
from gpu_vecenv.errors import ConfigError, refuse_counterparts

with requires_extra("lightning"):
    from lightning import LightningModule
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy


class PPOModule(LightningModule):
    """PPO on an environment; ``inner`` is its ``gpu_vecenv.Trainer``, ``policies`` are the Trainer's.

    Args:
        env: As for ``gpu_vecenv.Trainer``, like all of these.
        config: Hyperparameters.
        seed: For the environment, the initial weights and the order of the minibatches.
        policies: Role or agent -> its policy.
        sharing: Who shares a policy where none are given.
        reward: A function of a ``gpu_vecenv.Transition`` that returns the rewards to train with.

    Raises:
        ConfigError: As for ``gpu_vecenv.Trainer``; also if policies differ in ``num_epochs`` or ``num_minibatches``,
            for ``desired_kl``, and for precision "tf32", which Lightning's users set with
            ``torch.set_float32_matmul_precision``.
    """

    def __init__(
        self,
        env: VecEnv,
        config: PPOConfig | None = None,
        seed: int = 0,
        policies: Any = None,
        reward: Any = None,
        *,
        sharing: Any = "role",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._given = {"seed": seed, "policies": policies, "reward": reward, "sharing": sharing}
        self._is_set_up = self._mid_epoch = False
        self._set_trainer(Trainer(env, config, **self._given))
        counts = {(x.config.num_epochs, x.config.num_minibatches) for x in self.learners.values()}
        if any("learning_rate" not in learner.config.rates(0.0) for learner in self.learners.values()):
            raise ConfigError("desired_kl is given; expected None: checkpoints of Lightning lack the learning rate")
        if len(counts) != 1 or self.inner.config.precision == "tf32":
            found = f"precision is {self.inner.config.precision}, (num_epochs, num_minibatches) are {counts}"
            raise ConfigError(f"{found}; expected one pair, and 'float32' or 'bfloat16': set tf32 in torch instead")

    def _set_trainer(self, inner: Trainer) -> None:
        self.inner, self.learners, self.policies = inner, inner.learners, torch.nn.ModuleDict(inner.policies)

    def _apply(self, fn: Any, recurse: bool = True) -> PPOModule:
        return self  # Lightning moves modules to the CPU after fit

    def setup(self, stage: str) -> None:
        """Move to this process's device and shard; ConfigError if strategy or precision is not supported."""
        inner, strategy, precision, self._is_set_up = self.inner, self.trainer.strategy, self.trainer.precision, True
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or precision != "32-true":
            found = f"strategy is {type(strategy).__name__}, precision {precision!r}"
            raise ConfigError(f"{found}; expected one device or 'ddp', and '32-true': PPOConfig has a precision, too")
        shard = {"device": strategy.root_device, "first_env_index": self.trainer.global_rank * inner.env.num_envs}
        if inner.world.size != self.trainer.world_size or any(getattr(inner.env, k) != shard[k] for k in shard):
            weights, env = self.policies.state_dict(), inner.env.like(**shard)
            inner.close()
            self._set_trainer(Trainer(env, inner.config, **self._given))
            self.policies.load_state_dict(weights)

    def train_dataloader(self) -> range:
        """The numbers of an epoch's minibatches; the learners gather their samples."""
        return range(next(iter(self.learners.values())).num_updates)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of each trained policy."""
        return [learner.optimizer for learner in self.learners.values()]

    def on_train_epoch_start(self) -> None:
        """Collect a rollout."""
        self._mid_epoch = True
        self.inner.begin_iteration()

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Minibatch ``batch``: gradient and optimizer step of each policy."""
        optimizers: Any = self.optimizers()  # wrapped by Lightning, which counts steps; a list unless there is one
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        with self.inner.training_stream():
            for learner, optimizer in zip(self.learners.values(), optimizers, strict=True):
                learner.minibatch_gradient(batch)
                learner.clip_grad_norm()
                optimizer.step()

    def on_train_epoch_end(self) -> None:
        """Log the metrics; NonFiniteError if a loss or gradient was not finite."""
        metrics = self.inner.end_iteration()
        del metrics["iteration"]
        self.log_dict(metrics, sync_dist=True)
        self._mid_epoch = False
        self.trainer.should_stop |= self.inner.iteration >= self.inner.num_iterations

    def _reward_name(self) -> str | None:
        shaping = self.inner.rollout.shaping
        return None if shaping is None else shaping.name

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of all processes, each tensor (processes, …), the iteration and the reward."""
        state, alone = self.inner.process_state(), self.inner.world.size == 1
        processes = {name: x[None].clone() if alone else self.all_gather(x) for name, x in state.items()}
        when = {"iteration": self.inner.iteration, "mid_epoch": self._mid_epoch}
        checkpoint["gpu_vecenv"] = {"processes": processes, "reward": self._reward_name(), **when}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them in ``fit``.

        Raises:
            ConfigError: They were saved during an epoch, by another number of processes, with another reward, or of
                other environments or policies. Nothing has changed.
        """
        if not self._is_set_up:
            return  # load_from_checkpoint restores weights only
        inner, found = self.inner, checkpoint["gpu_vecenv"]
        if "processes" not in found:
            raise ConfigError("the checkpoint was saved by another version of gpu_vecenv; expected one of this version")
        (processes,) = {len(x) for x in found["processes"].values()}
        if found["mid_epoch"] or processes != inner.world.size:
            when = f"{'during' if found['mid_epoch'] else 'at the end of'} an epoch, by {processes} processes"
            raise ConfigError(f"the checkpoint was saved {when}; expected at the end of one, by {inner.world.size}")
        if found.get("reward") != self._reward_name():
            reward = f"{found.get('reward')!r}, this module's {self._reward_name()!r}"
            raise ConfigError(f"the checkpoint's reward is {reward}; expected the same function")
        own = {name: x[inner.world.rank] for name, x in found["processes"].items()}
        inner.load_process_state(own, found["iteration"])


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, config: Any = None, seed: int = 0, **options: Any) -> PPOModule:
    """``num_envs`` environments per process; options: the game's, ``gpu_vecenv.make``'s, policies, sharing, reward."""
    check_num_envs(num_envs)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    given = {name: options.pop(name) for name in ("policies", "sharing", "reward") if name in options}
    first = rank * num_envs
    game, rest = split_config(game, options, autoreset_mode="next_step", agents_as_envs=False, first_env_index=first)
    return wrap(gpu_vecenv.make(game, num_envs, device, **rest), config, seed, **given)


def wrap(
    env: VecEnv,
    config: PPOConfig | None = None,
    seed: int = 0,
    policies: Any = None,
    reward: Any = None,
    *,
    sharing: Any = "role",
) -> PPOModule:
    """A module that trains on ``env``; seed, policies, sharing and reward are those of ``gpu_vecenv.Trainer``."""
    return PPOModule(env, config, seed, policies, reward, sharing=sharing)
