"""Storage of a rollout: what T steps of E replicas with A agents leave for the learner."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.engine.sampler import Sample, Sampler
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CapacityError
from gpu_vecenv.train.distributions import masked
from gpu_vecenv.train.policy import Policy, RoleView


class Rollout:
    """Storage of one iteration. The environment writes observations where the learner reads them: nothing is copied.

    Tensors are (T, E, A, …); ``obs``, ``active``, ``action_mask`` and ``values`` have one row more.
    """

    def __init__(self, env: VecEnv, num_steps: int) -> None:
        self.env, rows, device = env, (num_steps, env.num_envs, env.num_agents), env.device
        after, action = (num_steps + 1, *rows[1:]), env.game.layout.action
        self.obs = torch.zeros(
            (*after, *env.game.layout.observation.shape), dtype=env.buffers_layout.obs_dtype, device=device
        )
        self.active = torch.zeros(after, dtype=torch.bool, device=device)
        self.values = torch.zeros(after, device=device)
        choices = (env.buffers_layout.num_choices,) if env.buffers_layout.num_choices else ()
        self.action_mask = torch.zeros((*after, *choices), dtype=torch.bool, device=device) if choices else None
        kind = torch.float32 if action.continuous else torch.int32
        self.draws = torch.zeros((*rows, *action.shape), dtype=kind, device=device)  # actions, or what becomes them
        self.log_probs, self.rewards, self.advantages, self.returns = torch.zeros((4, *rows), device=device)
        self.terminations, self.truncations = torch.zeros((2, *rows), dtype=torch.bool, device=device)
        self.step_buffers = [
            env.step_buffers(
                **self._before(t + 1),
                rewards=self.rewards[t],
                terminations=self.terminations[t],
                truncations=self.truncations[t],
            )
            for t in range(num_steps)
        ]
        boxed = torch.empty_like(self.draws[0])
        self.samples = [
            Sample(boxed, self.log_probs[t], None, self.draws[t])
            if action.continuous
            else Sample(self.draws[t], self.log_probs[t])
            for t in range(num_steps)
        ]
        self.last = env.step_buffers(**self._before(-1))

    def _before(self, t: int) -> dict[str, torch.Tensor]:
        """What step t begins with, and step t - 1 has written."""
        rows = {"obs": self.obs[t], "active": self.active[t]}
        return rows if self.action_mask is None else rows | {"action_mask": self.action_mask[t]}

    def carry_over(self) -> None:
        """The end of the last iteration is the beginning of the next."""
        for name, first in self._before(0).items():
            first.copy_(self._before(-1)[name])

    def collect(
        self,
        policies: Collection[Policy],
        sampler: Sampler,
        parameters: torch.Tensor,
        mark: Callable[[str], None] = lambda stage: None,
        timed_step: int | None = None,
    ) -> None:
        """All steps of an iteration, but for the values of the state that the last one leads to.

        Args:
            policies: Of all roles.
            sampler: Of the environment.
            parameters: (E, A, sampler.num_parameters) float32, into which each policy writes its agents' outputs.
            mark: Told the stages of one step: "policy", "sampling", "env" as they begin, "step_end" at its end.
            timed_step: That step. To tell its stages apart it samples and steps one after the other, the others at once:
                the same bits.
        """
        self.carry_over()
        for t, (buffers, sample) in enumerate(zip(self.step_buffers, self.samples, strict=True)):
            record_stage = mark if t == timed_step else lambda stage: None
            record_stage("policy")
            for policy in policies:
                view = policy.view
                outputs, self.values[t][:, view.agents] = policy(view.obs(self.obs[t]))
                parameters[:, view.agents][..., view.parameter_columns] = outputs
            record_stage("sampling")
            allowed = masked(parameters, None if self.action_mask is None else self.action_mask[t])
            if t == timed_step:
                sampler.sample(allowed, out=sample)
                record_stage("env")
                self.env.step(sample.actions, out=buffers)
            else:
                sampler.step(allowed, sample=sample, out=buffers)
            record_stage("step_end")

    def refresh_last_step(self) -> None:
        """Fill the last row from the environment's state, as after ``load_state_dict``."""
        self.env.observe(out=self.obs[-1])
        self.active[-1].copy_(self.env.active)
        if self.action_mask is not None:
            self.action_mask[-1].copy_(self.env.action_mask)

    def flat_obs(self, view: RoleView) -> torch.Tensor:
        """All observations before a step, cut to a role's own: (T * E * A, *obs_shape), no copy."""
        return self.obs[:-1].flatten(0, 2)[(slice(None), *view.obs_slice)]

    @staticmethod
    def bytes_per_env(env: VecEnv, num_steps: int) -> int:
        """Memory of one replica's rows, with what the update makes of them."""
        per_row = (
            env.game.layout.obs_size * env.buffers_layout.obs_dtype.itemsize + 4 * env.game.layout.action.heads + 40
        )
        per_row += env.buffers_layout.num_choices
        return (num_steps + 1) * env.num_agents * 2 * per_row


def check_capacity(env: VecEnv, num_steps: int) -> None:
    """Raise CapacityError where a rollout does not fit in the device's free memory."""
    each, free = Rollout.bytes_per_env(env, num_steps), free_bytes(env.device)
    if each * env.num_envs > free:
        raise CapacityError(
            f"a rollout of {num_steps} steps x {env.num_envs:,} replicas needs about {each * env.num_envs:,} bytes, "
            f"{free:,} are free on {env.device}; at most num_envs = {free // each:,} fit"
        )


def max_num_envs_that_fit(make_env: Callable[[int], VecEnv], num_steps: int, wanted: int) -> int:
    """The most replicas up to ``wanted`` whose environment and rollout fit in 80 % of the free memory."""
    env = make_env(1)
    each = env.bytes_per_env() + Rollout.bytes_per_env(env, num_steps)
    fit = int(0.8 * free_bytes(env.device)) // each
    env.close()
    if fit < 1:
        raise CapacityError(
            f"one replica needs about {each:,} bytes; {free_bytes(env.device):,} are free on {env.device}"
        )
    return min(wanted, fit)
