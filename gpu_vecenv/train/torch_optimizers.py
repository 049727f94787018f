"""torch's optimizers for a learner, and steps of them that are skipped on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu_vecenv.train.learner_config import LearnerConfig

TORCH_WEIGHT_DECAY = 0.01  # the default of torch.optim.AdamW


def make_optimizer(
    parameters: Sequence[torch.Tensor], config: LearnerConfig, learning_rate: torch.Tensor
) -> torch.optim.Optimizer:
    """The optimizer of a configuration, with all of its state, at no steps.

    A step can be part of a CUDA graph: counters are on the device, where the rate is read.

    Args:
        parameters: Float32 tensors of one device, with their ``grad``.
        config: See ``LearnerConfig.optimizer``.
        learning_rate: () float32 on that device.
    """
    on_gpu = learning_rate.device.type == "cuda"
    rate: dict[str, Any] = {"lr": learning_rate}
    # Where optimizers have no fused kernel, lists of tensors take few launches, and do not read the rate on the host.
    by_lists = {**rate, "eps": config.adam_epsilon, "foreach": on_gpu, "capturable": on_gpu}
    fused_adam = {**rate, "eps": config.adam_epsilon, "fused": True, "capturable": on_gpu}
    momentum = config.momentum or 0.0
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, **fused_adam)
    elif config.optimizer == "adamw":
        decay = TORCH_WEIGHT_DECAY if config.weight_decay is None else config.weight_decay
        optimizer = torch.optim.AdamW(parameters, **fused_adam, weight_decay=decay)
    elif config.optimizer == "radam":
        optimizer = torch.optim.RAdam(parameters, **by_lists)
    elif config.optimizer == "rmsprop":
        optimizer = torch.optim.RMSprop(parameters, **by_lists, momentum=momentum)
    else:
        optimizer = torch.optim.SGD(parameters, **rate, fused=True, momentum=momentum)
    values = [p.detach().clone() for p in parameters]
    optimizer.step()  # makes the state
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)
        for tensor in optimizer_tensors(optimizer, parameters):
            tensor.zero_()
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The state of an optimizer, parameter after parameter."""
    return [x for p in parameters for _, x in sorted(optimizer.state[p].items()) if isinstance(x, torch.Tensor)]


class SkippedSteps:
    """Lets steps of an optimizer change nothing, neither parameters nor state, where a tensor says so.

    It does so for any optimizer, with a copy of both before each step; there is no read on the host.

    Args:
        optimizer: Has all of its state.
        parameters: Those of the optimizer.
        skip_update: () float32; where it is not 0, a step changes nothing.
        trainable: (n,) bool, of n parameters; a step changes nothing of those where it is False.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        skip_update: torch.Tensor,
        trainable: torch.Tensor,
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._skip_update, self._trainable = skip_update, trainable
        self._before: list[list[torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._restore)

    def _tensors(self) -> list[list[torch.Tensor]]:
        """Of each parameter itself and its state."""
        return [[p.detach(), *optimizer_tensors(self._optimizer, [p])] for p in self._parameters]

    def _keep(self, *_: object) -> None:
        self._before = [[x.clone() for x in own] for own in self._tensors()]

    @torch.no_grad()
    def _restore(self, *_: object) -> None:
        takes = self._trainable & (self._skip_update == 0)
        for take, own, before in zip(takes, self._tensors(), self._before, strict=True):
            for x, old in zip(own, before, strict=True):
                x.copy_(torch.where(take, x, old))
        self._before = []
