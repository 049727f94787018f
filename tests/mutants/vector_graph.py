"""Bugs for K22, which needs a CUDA device: a counter that lives there, and steps that a graph does not repeat."""

import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mutants.ring import planted


class Counter(VectorEnv):
    """Adds actions up; an episode ends after 7 steps. No step reads anything on the host."""

    def __init__(self, num_envs, device="cuda"):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = Box(-1000, 1000, (2,))
        self.single_action_space = Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.sums = torch.zeros(num_envs, device=device)
        self.time = torch.zeros(num_envs, device=device)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.sums.fill_(float((seed or 0) % 5))
        self.time.zero_()
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        return torch.stack([self.sums, self.time], 1)

    def step(self, actions):
        self.steps += 1
        self.sums += self.gain() * actions
        self.time += 1
        ends = self.time >= 7
        final = self.observe()
        self.sums[...] = torch.where(ends, 0, self.sums)
        self.time[...] = torch.where(ends, 0, self.time)
        info = {"final_obs": final, "_final_obs": ends}
        return self.observe(), self.sums.clone(), torch.zeros_like(ends), ends, info

    def gain(self):
        return 1


@planted("K22")
class ClockOnTheHost(Counter):
    def gain(self):
        return self.steps


@planted("K22")
class NewMemoryEachStep(Counter):
    def step(self, actions):
        self.sums = self.sums.clone()
        return super().step(actions)
