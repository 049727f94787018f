"""Rollout buffer: T steps of E environments with A agents."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch

from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.engine.sampler import Sample, Sampler
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train.central_critic import declares_state, state_size
from gpu_vecenv.train.reward import RewardFunction, Shaping, Transition
from gpu_vecenv.train.role_view import RoleView

TensorSpecs: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and dtype


def rollout_specs(
    env: VecEnv, num_steps: int, *, keeps_states: bool = False, masks_samples: bool = False
) -> TensorSpecs:
    """The tensors of a ``Rollout``, all that it allocates; estimates of its memory are of these.

    First those of the step buffers, T + 1 rows of each: in row T, what the first reset writes beside observations.
    """
    action, after = env.game.layout.action, (num_steps + 1, env.num_envs, env.num_agents)
    rows = (num_steps, *after[1:])
    specs = {
        name: ((num_steps + 1, *shape), dtype)
        for name, (shape, dtype) in env.buffers_layout.specs.items()
        if name != "final_obs"  # of other autoreset modes
    }
    draws = (*rows, *action.shape), TORCH_TYPES[action.dtype]
    specs |= {"values": (after, torch.float32), "draws": draws}
    specs |= dict.fromkeys(("log_probs", "advantages", "returns"), (rows, torch.float32))
    if not action.discrete:
        specs["boxed"] = draws[0][1:], draws[1]
    if keeps_states and declares_state(env.game):
        owners = env.num_agents if env.game.layout.agent_critic_state else 1
        specs["states"] = (*after[:2], owners, state_size(env.game)), torch.float32
    if masks_samples:
        specs["learned"] = after, torch.bool
    return specs


def no_mark(stage: str) -> None:
    """Mark no stage, see ``Rollout.collect``."""


class Rollout:
    """Rollout buffer of one iteration. The environment writes into it and the learner reads from it, without copies.

    Tensors are (T, E, A, …); ``obs``, ``active``, ``acting``, ``action_mask`` and ``values`` are (T + 1, E, A, …).
    ``acting`` is None where all active agents act. ``learned`` (T + 1, E, A) are the samples that learners use: where
    agents are ``active``, and with opponents not theirs.

    Args:
        env: The environment.
        num_steps: T.
        reward: Gives the rewards in place of the game's own; None keeps those.
        keeps_states: Whether it stores the state for critics at each step, if the game declares one.
        masks_samples: Whether ``learned`` is a tensor of its own, which is written after the rollout.
    """

    def __init__(
        self,
        env: VecEnv,
        num_steps: int,
        reward: RewardFunction | None = None,
        *,
        keeps_states: bool = False,
        masks_samples: bool = False,
    ) -> None:
        self.env = env
        stored = {
            name: torch.zeros(shape, dtype=dtype, device=env.device)
            for name, (shape, dtype) in rollout_specs(
                env, num_steps, keeps_states=keeps_states, masks_samples=masks_samples
            ).items()
        }
        self.obs, self.active, self.values = stored["obs"], stored["active"], stored["values"]
        self.learned = stored.get("learned", self.active)
        self.acting, self.action_mask = stored.get("acting"), stored.get("action_mask")
        self.draws, self.log_probs = stored["draws"], stored["log_probs"]  # actions before squashing
        self.advantages, self.returns, self._states = stored["advantages"], stored["returns"], stored.get("states")
        self.rewards, self.terminations, self.truncations = (
            stored[name][:-1] for name in ("rewards", "terminations", "truncations")
        )
        results = {n: stored[n] for n in env.buffers_layout.specs if n in stored and n not in self._before(0)}
        *self.step_buffers, self.last = [
            env.step_buffers(**self._before(min(t + 1, num_steps)), **{name: x[t] for name, x in results.items()})
            for t in range(num_steps + 1)
        ]
        self.samples = [
            Sample(self.draws[t], self.log_probs[t])
            if env.game.layout.action.discrete
            else Sample(stored["boxed"], self.log_probs[t], None, self.draws[t])
            for t in range(num_steps)
        ]
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
        mark: Callable[[str], None] | None = None,
        timed_step: int | None = None,
        acts: Collection[Callable[[int], None]] = (),
    ) -> None:
        """All T steps of an iteration. Does not compute the values of row T.

        Args:
            forward_passes: Of the policies of all roles: functions of t that write ``values[t]`` and ``parameters``.
            sampler: Of the environment.
            parameters: (E, A, sampler.num_parameters) float32, of the distributions of step t.
            mark: Called in ``timed_step`` with "policy", "sampling" and "env" as the stages begin, and with "step_end";
                None: not called.
            timed_step: This step samples and steps in two kernels, to time them; all others in one. Results are
                bit-identical.
            acts: Functions of t that change the actions that were drawn for step t, one after the other.
        """
        self.carry_over()
        for t, (buffers, sample) in enumerate(zip(self.step_buffers, self.samples, strict=True)):
            record_stage = mark if mark is not None and t == timed_step else no_mark
            record_stage("policy")
            for forward in forward_passes:
                forward(t)
            record_stage("sampling")
            if t == timed_step or acts:
                sampler.sample(parameters, out=sample)
                for act in acts:
                    act(t)
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

    @property
    def keeps_states(self) -> bool:
        """Whether it stores states for critics, which are not the observations."""
        return self._states is not None

    def keep_state(self, t: int) -> None:
        """Store what central critics see before step t from the environment's state, if it is not the observations."""
        if self._states is not None:
            env, out = self.env, self._states[t]
            parts = [env.state[name].reshape(env.num_envs, 1, -1) for name in env.game.layout.critic_state]
            parts += [env.state[name].reshape(*out.shape[:2], -1) for name in env.game.layout.agent_critic_state]
            torch.cat([part.float().expand(-1, out.shape[1], -1) for part in parts], 2, out=out)
