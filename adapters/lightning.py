"""PyTorch Lightning: our PPO as a LightningModule, so that loggers, checkpoints, profilers and DDP are Lightning's.

One epoch of Lightning is one iteration of ``gpu_vecenv.Trainer``: before the first batch a rollout, collected as there,
with CUDA graphs where there is a GPU; then for each minibatch one backward pass and one step of each policy's own Adam,
both through Lightning and without graphs. Losses, orders of rows and results are our trainer's, but for rounding.

The run ends with the epoch that completes ``total_steps``, which the schedules follow, or with ``max_epochs``. Metrics
are logged once an epoch, and twice the host looks at the device: for the returns, and for NaN. Checkpoints of whole
epochs hold the environments of all processes: ``fit(module, ckpt_path=…)`` goes on as if it had not stopped.

``fit`` moves the environment to Lightning's device; with "ddp" each process has ``num_envs`` replicas of its own. Else
the module stays: it ignores ``to(…)``. ``chunk_rows`` means nothing: minibatches go through the network at once.
"""

from __future__ import annotations

from typing import Any

import torch

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, VecEnv
from gpu_vecenv.adapters import requires_extra, split_config
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.ppo import LOSS_METRICS, loss, masked_normalize

with requires_extra("lightning"):
    from lightning import LightningModule
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy


class PPOModule(LightningModule):
    """``inner`` is the ``gpu_vecenv.Trainer`` that collects and evaluates, ``policies`` are its own; errors as there.

    ConfigError also where policies differ in epochs or minibatches, and for "tf32": torch has a setting of its own.
    """

    def __init__(self, env: VecEnv, config: PPOConfig | None = None, seed: int = 0, policies: Any = None) -> None:
        super().__init__()
        self.automatic_optimization, self._given = False, policies
        self._is_set_up = self._mid_epoch = False  # for Lightning's Trainer; within an epoch
        self._set_trainer(Trainer(env, config, seed=seed, policies=policies))
        shapes = {(x.config.num_epochs, x.config.num_minibatches) for x in self.learners.values()}
        if len(shapes) != 1 or self.inner.config.precision == "tf32":
            found = f"precision is {self.inner.config.precision}, (num_epochs, num_minibatches) are {shapes}"
            raise ConfigError(f"{found}; expected one pair, and no tf32, which is torch's own setting here")
        ((self._passes, self._count),) = shapes

    def _set_trainer(self, inner: Trainer) -> None:
        self.inner, self.learners, self.policies = inner, inner.learners, torch.nn.ModuleDict(inner.policies)
        inner.learners = {}  # its iterations only collect

    def _apply(self, fn: Any, recurse: bool = True) -> PPOModule:
        return self  # graphs know the weights by address, and Lightning moves modules to the CPU when it is done

    def setup(self, stage: str) -> None:
        """Take this process's device and shard; ConfigError where strategy or precision is one that cannot work."""
        inner, strategy, precision, self._is_set_up = self.inner, self.trainer.strategy, self.trainer.precision, True
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or precision != "32-true":
            found = f"strategy is {type(strategy).__name__}, precision {precision!r}"
            raise ConfigError(f"{found}; expected one device or 'ddp', and '32-true': PPOConfig has a precision, too")
        shard = {"device": strategy.root_device, "first_env_index": self.trainer.global_rank * inner.env.num_envs}
        if inner.world.size != self.trainer.world_size or any(getattr(inner.env, k) != shard[k] for k in shard):
            weights, env = self.policies.state_dict(), inner.env.like(**shard)
            inner.close()
            self._set_trainer(Trainer(env, inner.config, seed=inner.seed, policies=self._given))
            self.policies.load_state_dict(weights)

    def train_dataloader(self) -> range:
        """The numbers of an epoch's minibatches; the rows stay where they are."""
        return range(self._passes * self._count)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """An Adam for each policy that learns. It takes no step where ``skip_update`` of its learner is 1."""
        return [learner.optimizer for learner in self.learners.values()]

    def on_train_epoch_start(self) -> None:
        """Collect."""
        number, self._mid_epoch = self.inner.iteration, True
        kept, metrics = ("env_steps", "episode", "return", "terminated"), self.inner.train_iteration()
        entries: dict[str, Any] = {name: value for name, value in metrics.items() if name.startswith(kept)}
        for name, learner in self.learners.items():
            learner.update_statistics()
            rate, clip, weight = learner.config.schedule(min(number / self.inner.num_iterations, 1.0))
            learner.optimizer.param_groups[0]["lr"] = rate
            tensors = (
                learner.clip,
                learner.entropy_coefficient,
                learner.epoch,
                learner.metric_sums,
                learner.skip_update,
            )
            for tensor, value in zip(tensors, (clip, weight, number * self._passes, 0, 0), strict=True):
                tensor.fill_(value)
            entries |= {f"learning_rate_{name}": rate, f"explained_variance_{name}": learner.explained_variance}
        self.log_dict(entries, sync_dist=True)

    def training_step(self, batch: int, batch_idx: int) -> None:
        """One step of each policy. One backward pass for all, as DDP wants it: they share no weights."""
        parts, total = list[torch.Tensor](), torch.zeros((), device=self.inner.env.device)
        for learner in self.learners.values():
            if batch % self._count == 0:
                learner.shuffle()
            learner.optimizer.zero_grad()
            data, indices = learner.rollout, learner.order.view(self._count, -1)[batch % self._count]
            active, estimates = (x.flatten()[indices] for x in (data.active[:-1], data.advantages))
            advantages_used = masked_normalize(estimates, active) if learner.config.normalize_advantages else estimates
            rows, weight = data.batch(learner.policy.view, indices, advantages_used), learner.entropy_coefficient
            own, part = loss(learner.policy, rows, learner.config, clip=learner.clip, entropy_coefficient=weight)
            parts, total = [*parts, part], total + own
        self.manual_backward(total)
        optimizers: Any = self.optimizers()  # in Lightning's own clothes; a list unless there is one
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for (name, learner), part, optimizer in zip(self.learners.items(), parts, optimizers, strict=True):
            learner.world.all_reduce_mean(part)
            most, limit = learner.config.max_grad_norm, learner.config.target_kl
            metrics = torch.stack([*part, torch.nn.utils.clip_grad_norm_(learner.parameters, most)])
            kl_exceeded = limit is not None and metrics[LOSS_METRICS.index("approx_kl")] > limit
            learner.skip_update.clamp_(min=(~metrics.isfinite().all() | kl_exceeded).float())
            optimizer.step()
            learner.metric_sums += torch.cat([metrics, learner.skip_update[None]])
            entries = {f"{metric}_{name}": value for metric, value in zip(LOSS_METRICS, metrics, strict=True)}
            self.log_dict(entries, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        """Statistics of this epoch normalise the next; NonFiniteError where a loss or gradient was not finite."""
        for name, learner in self.learners.items():
            if not learner.metric_sums.isfinite().all():
                raise NonFiniteError(f"epoch {self.current_epoch}: losses of {name} are not finite; no step was taken")
            for _, _, moments in learner.normalizer_updates:
                learner.world.all_reduce_sum(moments)
            learner.update_normalizers()
        self._mid_epoch = False
        self.trainer.should_stop |= self.inner.iteration >= self.inner.num_iterations

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the environments, each tensor (processes, …), and the iteration."""
        state, alone = self.inner.env.state_dict(), self.inner.world.size == 1
        envs = {name: x[None] if alone else self.all_gather(x) for name, x in state.items()}
        checkpoint["gpu_vecenv"] = {"envs": envs, "iteration": self.inner.iteration, "mid_epoch": self._mid_epoch}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from them in ``fit``; ConfigError where it is of within an epoch, or of more or fewer processes."""
        if not self._is_set_up:
            return  # load_from_checkpoint: weights are all
        inner, found = self.inner, checkpoint["gpu_vecenv"]
        (processes,) = {len(x) for x in found["envs"].values()}
        if found["mid_epoch"] or processes != inner.world.size:
            when = f"{'within' if found['within'] else 'at the end of'} an epoch, by {processes} processes"
            raise ConfigError(f"the checkpoint was written {when}; expected at the end of one, by {inner.world.size}")
        inner.env.load_state_dict({name: x[inner.world.rank] for name, x in found["envs"].items()})
        inner.iteration = found["iteration"]
        inner.rollout.refresh_last_step()


def make(game: Any, num_envs: int, device: Any = None, config: Any = None, seed: int = 0, **options: Any) -> PPOModule:
    """``num_envs`` replicas in each process; options are the game's, those of ``gpu_vecenv.make``, and policies."""
    policies, first = options.pop("policies", None), World.current().rank * num_envs
    game, rest = split_config(game, options, autoreset_mode="next_step", agents_as_envs=False, first_env_index=first)
    return wrap(gpu_vecenv.make(game, num_envs, device, **rest), config, seed, policies)


def wrap(env: VecEnv, config: PPOConfig | None = None, seed: int = 0, policies: Any = None) -> PPOModule:
    """The module around an environment, which it takes over; seed and policies are as for ``gpu_vecenv.Trainer``."""
    return PPOModule(env, config, seed, policies)
