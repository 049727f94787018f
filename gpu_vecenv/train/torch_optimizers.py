"""torch's optimizers for a learner, and steps of them that are skipped on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gpu_vecenv.compile.function_manager import FunctionManager, Launch
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.optimizer import radam_launches

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
        optimizer = RAdam(parameters, **by_lists)
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


def address_table(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n, 4) int64, of n parameters the addresses of values, ``exp_avg``, ``exp_avg_sq`` and ``step``.

    Makes all of these contiguous, as elements of a gradient are.

    Args:
        optimizer: torch's Adam or RAdam, with all of its state.
        parameters: Those of the optimizer, float32.
    """
    names = "exp_avg", "exp_avg_sq", "step"
    tensors = [[p, *(optimizer.state[p][name] for name in names)] for p in parameters]
    for tensor in itertools.chain(*tensors):
        if not tensor.is_contiguous():
            tensor.data = tensor.detach().contiguous()
    table = torch.tensor([[tensor.data_ptr() for tensor in of_one] for of_one in tensors])
    return table.to(parameters[0].device)


class RAdam(torch.optim.RAdam):
    """torch's, whose steps are two launches after ``use_kernels``, in place of some hundred."""

    _launches: Sequence[Launch] = ()

    def use_kernels(
        self,
        functions: FunctionManager,
        gradient: torch.Tensor,
        *,
        skip_update: torch.Tensor,
        trainable: torch.Tensor,
    ) -> None:
        """Let kernels take the steps, see ``radam_launches``.

        All parameters have their state; all of these tensors stay where they are in memory.
        """
        group = self.param_groups[0]
        self._launches = radam_launches(
            functions,
            address_table(self, group["params"]),
            [p.numel() for p in group["params"]],
            gradient=gradient,
            trainable=trainable,
            skip_update=skip_update,
            learning_rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
        )

    def step(self, closure: Any = None) -> Any:
        """A step; see ``torch.optim.Optimizer.step``."""
        if not self._launches:
            return super().step(closure)
        loss = None if closure is None else closure()
        for launch in self._launches:
            launch()
        return loss


class SkippedSteps:
    """Lets steps of an optimizer change nothing, neither parameters nor state, where a tensor says so.

    It does so for any optimizer, with a copy of both before each step; there is no read on the host.

    Args:
        optimizer: Has all of its state, float32.
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
        tensors = self._tensors()
        sizes = torch.tensor([sum(x.numel() for x in self._of(p)) for p in parameters])
        self._owners = torch.arange(len(sizes)).repeat_interleave(sizes).to(trainable.device)
        self._before, self._after = torch.empty((2, len(self._owners)), device=trainable.device)
        self._parts_before, self._parts_after = (
            [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]
            for flat in (self._before, self._after)
        )
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._restore)

    def _of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        return [parameter.detach(), *optimizer_tensors(self._optimizer, [parameter])]

    def _tensors(self) -> list[torch.Tensor]:
        """Of each parameter itself and its state."""
        return [x for p in self._parameters for x in self._of(p)]

    def _keep(self, *_: object) -> None:
        torch._foreach_copy_(self._parts_before, self._tensors())

    @torch.no_grad()
    def _restore(self, *_: object) -> None:
        tensors = self._tensors()
        takes = self._trainable & (self._skip_update == 0)
        torch._foreach_copy_(self._parts_after, tensors)
        torch.where(takes[self._owners], self._after, self._before, out=self._after)
        torch._foreach_copy_(tensors, self._parts_after)
