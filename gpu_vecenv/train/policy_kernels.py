"""What computes a policy: kernels of the default network where there are some, otherwise torch.

``choose_kernels`` takes the fastest; ``Forward`` is the forward pass of a rollout by either.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from gpu_vecenv.train.env_ranges import EnvRanges, all_envs
from gpu_vecenv.train.host_kernels import HostKernels, why_not_on_host
from gpu_vecenv.train.kept_tensors import FlatTensors
from gpu_vecenv.train.layerwise import LayerwiseKernels, why_not_layerwise
from gpu_vecenv.train.learner_kernels import LossSettings
from gpu_vecenv.train.perceptron import PerceptronKernels, is_plain, why_not_fused
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.rollout_context import RolloutContext
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.sequences import RecurrentStates

# Observations of a step, of all agents, below which torch is faster than kernels layer by layer, but in bfloat16. On an
# H200 with TF32 and layers of 256 units it is by 3 and 13 % with 11,000, and slower by 12 % with 220,000:
# docs/performance/h200-learner.json.
MIN_STEP_ROWS = 2**16


class GradientsCall(Protocol):
    """Computes the gradients of the samples ``indices`` (rows,) int64, see ``PerceptronKernels.gradients``."""

    def __call__(self, *, indices: torch.Tensor, moments: torch.Tensor) -> None:
        """Compute them."""


class ForwardCall(Protocol):
    """Computes the outputs and values of a step's observations, see ``PerceptronKernels.forward``."""

    def __call__(
        self,
        *,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None,
        outputs: torch.Tensor | None,
        values: torch.Tensor,
    ) -> None:
        """Compute them."""


class PolicyKernels(Protocol):
    """What computes a policy in place of torch: ``PerceptronKernels``, ``LayerwiseKernels`` or ``HostKernels``."""

    policy: Policy
    parameters: FlatTensors

    def begin_rollout(self) -> None:
        """Called before the first forward pass after the weights may have changed."""

    def gradients(self, rows: int, settings: LossSettings) -> tuple[GradientsCall, torch.Tensor]:
        """See ``PerceptronKernels.gradients``."""

    def forward(self, *, num_envs: int | None = None) -> ForwardCall:
        """See ``PerceptronKernels.forward``."""


class Choice(NamedTuple):
    """What computes a policy, and why nothing faster does, in a few words."""

    kernels: PolicyKernels | None  # None: torch
    unfused_reason: str | None  # None: PerceptronKernels do
    torch_reason: str | None  # None: kernels do


def choose_kernels(policy: Policy, rollout: Rollout, precision: Precision, chunk_rows: int) -> Choice:
    """The fastest of PerceptronKernels, LayerwiseKernels, HostKernels and torch that computes a policy.

    Args:
        policy: The policy.
        rollout: The samples.
        precision: Of the matrix products.
        chunk_rows: The largest number of rows of a forward pass, see ``LearnerConfig``.
    """
    if policy.torch_reason is not None:
        return Choice(None, policy.torch_reason, policy.torch_reason)
    unfused_reason = why_not_fused(policy, rollout, precision)
    if unfused_reason is None:
        return Choice(PerceptronKernels(policy, rollout, precision), None, None)
    if rollout.env.device.type == "cpu" and rollout.env.functions.backend.tensor_cores is None:
        torch_reason = why_not_on_host(policy, rollout, precision)
        kernels = HostKernels(policy, rollout, precision) if torch_reason is None else None
        return Choice(kernels, unfused_reason, torch_reason)
    torch_reason = why_not_layerwise(policy, rollout) or _why_slower_layerwise(rollout, precision)
    if torch_reason is not None:
        return Choice(None, unfused_reason, torch_reason)
    return Choice(LayerwiseKernels(policy, rollout, precision, chunk_rows), unfused_reason, None)


def _why_slower_layerwise(rollout: Rollout, precision: Precision) -> str | None:
    """Why torch is faster than LayerwiseKernels, in a few words; None if it is not.

    The rows are those of all policies, so that one choice holds for a run: its iterations are one CUDA graph or none.
    """
    rows = rollout.rewards[0].numel()
    if precision == "bfloat16" or rows >= MIN_STEP_ROWS:
        return None
    return f"faster than kernels layer by layer with {rows:,} agents in a step; from {MIN_STEP_ROWS:,} on it is not"


class Forward:
    """The forward passes of a policy in a rollout, by its kernels or by torch.

    A central critic without memory computes no values in the steps, which do not need them, but of all of them in
    ``finish``: a few large products take a fraction of the time of many small ones.

    Attributes:
        values_later: Whether that is so.

    Args:
        policy: The policy.
        rollout: Has the observations, and stores the values.
        outputs: (E, A, sampler.num_parameters) float32, where the parameters of its agents' distributions are written.
        kernels: Of the policy; None: torch.
        states: Of the policy, if it is recurrent.
        envs: The environments in which it acts; None: all.
        steps_at_once: Whose values ``finish`` computes in one pass, at most.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        outputs: torch.Tensor,
        kernels: PolicyKernels | None,
        states: RecurrentStates | None = None,
        envs: EnvRanges | None = None,
        steps_at_once: int = 1,
    ) -> None:
        self.policy, self.rollout, self.outputs = policy, rollout, outputs
        self.values_later, self._steps_at_once = policy.critic is not None and states is None, steps_at_once
        self._envs = envs = envs or all_envs(rollout.env.num_envs)
        self.kernels, self.states, self._context = kernels, states, RolloutContext(policy, rollout, envs=envs)
        self._launch = None if kernels is None else kernels.forward(num_envs=envs.size)  # of one range

    def __call__(self, t: int) -> None:
        """Step t's parameters, and its values unless ``finish`` computes them.

        Parameters of forbidden choices are the least float. Weights must not change between step 0 and ``finish``. A
        recurrent policy takes the step.
        """
        if not self.values_later:
            self._pass(t)
            return
        data, view, envs = self.rollout, self.policy.view, self._envs
        self._write_parameters(t, self.policy.parameters_of(view.obs(envs.of(data.obs[t]))))

    def finish(self) -> None:
        """The values that the steps did not compute, which are at least those of row T."""
        if not self.values_later:
            self._pass(-1, only_values=True)
            return
        values, agents = self.rollout.values, self.policy.view.agents
        for first in range(0, len(values), self._steps_at_once):
            steps = slice(first, first + self._steps_at_once)
            for own in self._envs.slices:
                part = values[steps, own]
                leading = (*part.shape[:2], self.policy.view.num_agents)
                part[:, :, agents] = self.policy.central_values(self._context.of_steps(steps, own), leading)

    def _pass(self, t: int, *, only_values: bool = False) -> None:
        """Step t's parameters and values, or only the values."""
        data, view, envs = self.rollout, self.policy.view, self._envs
        if self.kernels is not None and self._launch is not None and is_plain(self.policy):
            if t == 0:
                self.kernels.begin_rollout()
            for own in envs.slices:
                self._launch(
                    obs=data.obs[t][own].flatten(0, 1)[(slice(None), *view.obs_slice)],
                    action_mask=None if data.action_mask is None or view.continuous else data.action_mask[t][own],
                    outputs=None if only_values else self.outputs[own],
                    values=data.values[t][own],
                )
            return
        obs, context = view.obs(envs.of(data.obs[t])), self._context.of_step(t)
        if self.states is None:
            outputs, values = self.policy(obs, context=context)
        else:
            if not only_values:
                self.states.begin_step(t)
            with self.states.kernels():
                outputs, values, state = self.policy(obs, self.states.current, context=context)
            if not only_values:
                self.states.end_step(state, envs.of(data.active[t])[:, view.agents])
        for own, part in envs.parts(self.policy.state_values(outputs, values, self._mask(t))):
            data.values[t][own][:, view.agents] = part
        if not only_values:
            self._write_parameters(t, outputs)

    def _mask(self, t: int) -> torch.Tensor | None:
        mask, view = self.rollout.action_mask, self.policy.view
        return None if mask is None else view.mask(self._envs.of(mask[t])[:, view.agents])

    def _write_parameters(self, t: int, outputs: torch.Tensor) -> None:
        for own, part in self._envs.parts(self.policy.distribution(outputs, self._mask(t))):
            self.policy.view.write_parameters(part, self.outputs[own])
