"""PPOLearner: what PPO adds to a learner. ``ppo.py`` has the equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.iteration_kernels import begin_update_launch
from gpu_vecenv.train.learner import Learner, Loss
from gpu_vecenv.train.learner_kernels import LossKernel, LossSettings
from gpu_vecenv.train.policy_kernels import GradientsCall, PolicyKernels
from gpu_vecenv.train.ppo import PPOConfig

LOSS_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class PPOLearner(Learner[PPOConfig]):
    """Trains one policy by PPO, with the kernels of the policy where it has some.

    Raises:
        ConfigError: As ``Learner``, or minibatches have one sample each, whose advantage is normalised.
    """

    loss_metrics = LOSS_METRICS

    def make_loss(self, chunk: int) -> Loss:
        """By a kernel."""
        config, samples = self.config, len(self.indices)
        if config.normalize_advantages and samples == config.num_minibatches:
            raise ConfigError(
                f"num_minibatches is {config.num_minibatches}, so each has {samples} / {config.num_minibatches} = 1 "
                "sample, whose normalised advantage is always 0; expected fewer, or normalize_advantages=False"
            )
        self.clip, self.entropy_coefficient = torch.zeros((2,), device=self.learning_rate.device)
        self.loss_settings = LossSettings.of(config, self.clip, self.entropy_coefficient, self.skip_update)
        return LossKernel(self.policy, self.rollout, self.loss_settings, chunk=chunk)

    def kernel_gradients(self, kernels: PolicyKernels, rows: int) -> tuple[GradientsCall, torch.Tensor]:
        """With the same settings as the loss."""
        return kernels.gradients(rows, self.loss_settings)

    def make_begin(self) -> Callable[[], None]:
        """By a kernel, which also writes clip and entropy coefficient."""
        # What the schedule writes where the rate follows approx_kl.
        follows_kl = self.config.desired_kl is not None
        scheduled_rate = torch.zeros_like(self.learning_rate) if follows_kl else self.learning_rate
        launch = begin_update_launch(
            self.rollout.env.functions,
            self.num_iterations,
            self.config.num_epochs,
            schedules=self.schedules,
            iteration=self.iteration,
            progress=self.progress,
            scheduled=(scheduled_rate, self.clip, self.entropy_coefficient),
            epoch=self.epoch,
            skip_update=self.skip_update,
            metric_sums=self.metric_sums,
        )
        return lambda: launch(stopped=self._stopped)

    def step_settings(self) -> dict[str, Any]:
        """A rate that follows approx_kl, and updates that are skipped for it."""
        config = self.config
        return {
            "target_kl": config.target_kl,
            "kl_index": LOSS_METRICS.index("approx_kl"),
            "desired_kl": config.desired_kl,
            "rate_limits": (config.least_learning_rate, config.most_learning_rate),
        }

    @property
    def critic_max_grad_norm(self) -> float | None:
        """An option of PPO."""
        return self.config.critic_max_grad_norm

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Also a learning rate that is not scheduled."""
        own = {} if self.config.desired_kl is None else {"learning_rate": self.learning_rate}
        return super().optimizer_state() | own
