"""Rollout buffer: T steps of E environments with A agents."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.engine.sampler import Sample, Sampler
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CapacityError
from gpu_vecenv.train.central_critic import declares_state, state_size
from gpu_vecenv.train.reward import RewardFunction, Shaping, Transition
from gpu_vecenv.train.role_view import RoleView


class Rollout:
    """Rollout buffer of one iteration. The environment writes into it and the learner reads from it, without copies.

    Tensors are (T, E, A, …); ``obs``, ``active``, ``acting``, ``action_mask`` and ``values`` are (T + 1, E, A, …).
    ``acting`` is None where all active agents act.

    Args:
        env: The environment.
        num_steps: T.
        reward: Gives the rewards in place of the game's own; None keeps those.
        keeps_states: Whether it stores the state for critics at each step, if the game declares one.
    """

    def __init__(
        self, env: VecEnv, num_steps: int, reward: RewardFunction | None = None, *, keeps_states: bool = False
    ) -> None:
        self.env, rows, device = env, (num_steps, env.num_envs, env.num_agents), env.device
        after, action = (num_steps + 1, *rows[1:]), env.game.layout.action
        self.obs = torch.zeros(
            (*after, *env.game.layout.observation.shape), dtype=env.buffers_layout.obs_dtype, device=device
        )
        self.active = torch.zeros(after, dtype=torch.bool, device=device)
        self.acting = torch.zeros_like(self.active) if env.layout.tracks_acting else None
        self.values = torch.zeros(after, device=device)
        choices = (env.buffers_layout.num_choices,) if env.buffers_layout.num_choices else ()
        self.action_mask = torch.zeros((*after, *choices), dtype=torch.bool, device=device) if choices else None
        # Actions before squashing.
        self.draws = torch.zeros((*rows, *action.shape), dtype=TORCH_TYPES[action.dtype], device=device)
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
            Sample(self.draws[t], self.log_probs[t])
            if action.discrete
            else Sample(boxed, self.log_probs[t], None, self.draws[t])
            for t in range(num_steps)
        ]
        self.last = env.step_buffers(**self._before(-1))
        self._states: torch.Tensor | None = None
        if keeps_states and declares_state(env.game):
            owners = env.num_agents if env.game.layout.agent_critic_state else 1
            self._states = torch.zeros((*after[:2], owners, state_size(env.game)), device=device)
        self.shaping = None if reward is None else Shaping(reward)
        if self.shaping is not None:
            self.shaping(self.transition(0))  # raises if it returns anything else than rewards

    def _before(self, t: int) -> dict[str, torch.Tensor]:
        """Tensors before step t, written by step t - 1."""
        rows = {"obs": self.obs[t], "active": self.active[t]}
        optional = {"action_mask": self.action_mask, "acting": self.acting}
        return rows | {name: tensor[t] for name, tensor in optional.items() if tensor is not None}

    def carry_over(self) -> None:
        """Copy row T to row 0, for the next iteration."""
        if self._states is not None:
            self._states[0].copy_(self._states[-1])
        for name, first in self._before(0).items():
            first.copy_(self._before(-1)[name])

    def collect(
        self,
        forward_passes: Collection[Callable[[int], None]],
        sampler: Sampler,
        parameters: torch.Tensor,
        mark: Callable[[str], None] = lambda stage: None,
        timed_step: int | None = None,
    ) -> None:
        """All T steps of an iteration. Does not compute the values of row T.

        Args:
            forward_passes: Of the policies of all roles: functions of t that write ``values[t]`` and ``parameters``.
            sampler: Of the environment.
            parameters: (E, A, sampler.num_parameters) float32, of the distributions of step t.
            mark: Called in ``timed_step`` with "policy", "sampling" and "env" as the stages begin, and with "step_end".
            timed_step: This step samples and steps in two kernels, to time them; all others in one. Results are
                bit-identical.
        """
        self.carry_over()
        for t, (buffers, sample) in enumerate(zip(self.step_buffers, self.samples, strict=True)):
            record_stage = mark if t == timed_step else lambda stage: None
            record_stage("policy")
            for forward in forward_passes:
                forward(t)
            record_stage("sampling")
            if t == timed_step:
                sampler.sample(parameters, out=sample)
                record_stage("env")
                self.env.step(sample.actions, out=buffers)
            else:
                sampler.step(parameters, sample=sample, out=buffers)
            self.keep_state(t + 1)
            if self.shaping is not None:
                self.rewards[t].copy_(self.shaping(self.transition(t)))
            record_stage("step_end")

    def transition(self, t: int) -> Transition:
        """Step t, which must be the last one that was taken: the storage of a Box's actions is that of all steps."""
        flags = self.terminations[t], self.truncations[t], self.active[t]
        return Transition(self.obs[t], self.samples[t].actions, self.rewards[t], self.obs[t + 1], *flags)

    def refresh_last_step(self) -> None:
        """Write row T from the environment's state, for example after ``load_state_dict``."""
        self.env.observe(out=self.obs[-1])
        self.keep_state(-1)
        self.active[-1].copy_(self.env.active)
        if self.acting is not None:
            self.acting[-1].copy_(self.env.acting)
        if self.action_mask is not None:
            self.action_mask[-1].copy_(self.env.action_mask)

    def flat_obs(self, view: RoleView) -> torch.Tensor:
        """Observations before each step, of a role's shape: (B, *obs_shape), a view; B = T * E * A."""
        return self.obs[:-1].flatten(0, 2)[(slice(None), *view.obs_slice)]

    def critic_states(self) -> torch.Tensor:
        """What central critics see at each step, a view, see ``state_size``.

        (T + 1, E, A, S) if the state has parts that are an agent's own, else (T + 1, E, 1, S).
        """
        return self.obs.flatten(2)[:, :, None] if self._states is None else self._states

    def keep_state(self, t: int) -> None:
        """Store what central critics see before step t from the environment's state, if it is not the observations."""
        if self._states is not None:
            env, out = self.env, self._states[t]
            parts = [env.state[name].reshape(env.num_envs, 1, -1) for name in env.game.layout.critic_state]
            parts += [env.state[name].reshape(*out.shape[:2], -1) for name in env.game.layout.agent_critic_state]
            torch.cat([part.float().expand(-1, out.shape[1], -1) for part in parts], 2, out=out)

    @staticmethod
    def bytes_per_env(env: VecEnv, num_steps: int) -> int:
        """Memory of one environment's part of the rollout and of the temporaries of the update."""
        per_row = (
            env.game.layout.obs_size * env.buffers_layout.obs_dtype.itemsize + 4 * env.game.layout.action.heads + 40
        )
        per_row += env.buffers_layout.num_choices
        return (num_steps + 1) * env.num_agents * 2 * per_row


def check_capacity(env: VecEnv, num_steps: int) -> None:
    """Raise CapacityError if a rollout does not fit in the device's free memory."""
    each, free = Rollout.bytes_per_env(env, num_steps), free_bytes(env.device)
    if each * env.num_envs > free:
        raise CapacityError(
            f"a rollout of {num_steps} steps x {env.num_envs:,} environments needs about "
            f"{each * env.num_envs:,} bytes, "
            f"{free:,} are free on {env.device}; at most num_envs = {free // each:,} fit"
        )


def max_num_envs_that_fit(make_env: Callable[[int], VecEnv], num_steps: int, wanted: int, runs: int = 1) -> int:
    """The largest number of environments of each run, up to ``wanted``.

    Those of all runs must fit with their rollouts in 80 % of the free memory.
    """
    env = make_env(1)
    each = runs * (env.bytes_per_env() + Rollout.bytes_per_env(env, num_steps))
    fit = int(0.8 * free_bytes(env.device)) // each
    env.close()
    if fit < 1:
        of_each = f" of each of {runs} runs" * (runs > 1)
        raise CapacityError(
            f"one environment{of_each} needs about {each:,} bytes; {free_bytes(env.device):,} are free on {env.device}"
        )
    return min(wanted, fit)
