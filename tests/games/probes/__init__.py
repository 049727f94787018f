"""Probe games: each can be got wrong by one fault of a learner only, and the right values and actions are known.

After Andy Jones, "Debugging RL, without the agonizing pain", 2021: start with the smallest game in which the suspected
part has work to do.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param
from gpu_vecenv.errors import ConfigError

FOLDER = Path(__file__).parent


class Probe(Env):
    """A game whose best policy is known."""

    obs_dim = 1
    action_space = Discrete(2)

    def value(self, obs: torch.Tensor, gamma: float) -> torch.Tensor:
        """What active agents with these observations, (…, agents, obs_dim), can expect if all play as ``best`` says.

        The result is (…, agents) float64.
        """
        raise NotImplementedError

    def best(self, obs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Actions that nothing surpasses, (…, agents) int32 or (…, agents, 1) float32; here all do."""
        return torch.zeros(obs.shape[:-1], dtype=torch.int32, device=obs.device)


def as_one(obs: torch.Tensor) -> torch.Tensor:
    """1 for every observation."""
    return torch.ones(obs.shape[:-1], dtype=torch.float64, device=obs.device)


@dataclass(frozen=True, kw_only=True)
class Constant(Probe):
    """Always the same: observation 1, reward 1, cut off now and then. Wrong if truncation is taken for an end."""

    max_steps: int = param(5, low=1)

    source = FOLDER / "constant.cu"

    def value(self, obs, gamma):
        return as_one(obs) / (1 - gamma)


@dataclass(frozen=True, kw_only=True)
class OneStep(Probe):
    """One step, paid as the observation says, 1 or -1. Wrong if the value does not depend on the observation, or goes
    on after the end.
    """

    state = (Field("sign", f32),)
    source = FOLDER / "one_step.cu"

    def value(self, obs, gamma):
        return obs[..., 0].double()


@dataclass(frozen=True, kw_only=True)
class TwoStep(Probe):
    """Two steps, paid at the end; the observation is the step. Wrong if the discount is missing or applied twice."""

    source = FOLDER / "two_step.cu"

    def value(self, obs, gamma):
        return gamma ** (1 - obs[..., 0].double())


@dataclass(frozen=True, kw_only=True)
class Choice(Probe):
    """One step: choice 1 is paid 1, choice 0 costs 1. Wrong if the policy goes downhill, or nowhere."""

    source = FOLDER / "choice.cu"

    def value(self, obs, gamma):
        return as_one(obs)

    def best(self, obs, mask=None):
        return as_one(obs).int()


@dataclass(frozen=True, kw_only=True)
class Match(Probe):
    """One step: choice 1 is right where the observation is 1, choice 0 where it is -1; right is paid 1, wrong costs 1.
    Wrong if rows of observations, actions and advantages are not each other's.
    """

    state = (Field("sign", f32),)
    source = FOLDER / "match.cu"

    def value(self, obs, gamma):
        return as_one(obs)

    def best(self, obs, mask=None):
        return (obs[..., 0] > 0).int()


@dataclass(frozen=True, kw_only=True)
class Delayed(Probe):
    """Two steps: the first choice decides what the second step pays, 1 or -1; the second choice nothing. The
    observation is the step: what was chosen cannot be seen. Wrong if credit does not travel back in time; with values
    that do not know the choice it travels by lambda > 0 alone.
    """

    state = (Field("first", i32),)
    source = FOLDER / "delayed.cu"

    def value(self, obs, gamma):
        return gamma ** (1 - obs[..., 0].double())

    def best(self, obs, mask=None):
        return as_one(obs).int()


@dataclass(frozen=True, kw_only=True)
class Forbidden(Probe):
    """One step: choices 0, 1 and 2 are paid 0, 0.5 and 1; in every other episode, by chance, 2 is forbidden, and
    nothing but the mask says so. Wrong if masks are not those of their rows, when acting or when learning.
    """

    state = (Field("allowed", i32),)
    masks_actions = True
    action_space = Discrete(3)
    source = FOLDER / "forbidden.cu"

    def value(self, obs, gamma):
        return 0.75 * as_one(obs)

    def best(self, obs, mask=None):
        return 1 + mask[..., 2].int()


@dataclass(frozen=True, kw_only=True)
class Target(Probe):
    """One step: the nearer to the target, the better; the cost is the square of the distance. The observation, 1 or
    -1, says which of two targets, a quarter of the range above or below its middle. Wrong if continuous actions are
    not those that the densities were of, or bounds are not applied.
    """

    low: float = -1.0
    high: float = 1.0

    state = (Field("sign", f32),)
    source = FOLDER / "target.cu"

    @property
    def action_space(self):
        return Box(self.low, self.high, (1,))

    def validate(self):
        if self.low >= self.high:
            raise ConfigError(f"Target: low is {self.low}, high is {self.high}; expected low < high")

    def value(self, obs, gamma):
        return 0 * as_one(obs)

    def best(self, obs, mask=None):
        return (self.low + self.high) / 2 + obs * (self.high - self.low) / 4


@dataclass(frozen=True, kw_only=True)
class Rivals(Probe):
    """One step, two roles: "left" has two choices and is paid for 1, "right" has three and is paid for 2. Left sees
    (1), right (1, 1). Wrong if roles get each other's rewards, logits or observations.
    """

    roles = {"left": 1, "right": 1}  # noqa: RUF012
    obs_dim = {"left": 1, "right": 2}  # noqa: RUF012
    action_space = {"left": Discrete(2), "right": Discrete(3)}  # noqa: RUF012
    source = FOLDER / "rivals.cu"

    def value(self, obs, gamma):
        return as_one(obs)

    def best(self, obs, mask=None):
        return torch.tensor([1, 2], dtype=torch.int32, device=obs.device).expand(obs.shape[:-1]).contiguous()


@dataclass(frozen=True, kw_only=True)
class Survivors(Probe):
    """Agent i is in the game for i + 1 steps, each paid 1. It sees the share of ``num_players`` steps that it has left.
    Whoever has left sees 1, as if all were before it, and gets nothing. Wrong if rows of agents out of the game teach.
    """

    num_players: int = param(4, low=1)

    source = FOLDER / "survivors.cu"

    @property
    def roles(self):
        return {"player": self.num_players}

    def value(self, obs, gamma):
        left = (obs[..., 0].double() * self.num_players).round()
        return sum((left > k).double() * gamma**k for k in range(self.num_players))


PROBES = (Constant, OneStep, TwoStep, Choice, Match, Delayed, Forbidden, Target, Rivals, Survivors)
