"""A driver and helpers: roles with observations and choices of their own, masked choices, agents that leave early."""

from dataclasses import dataclass

from gymnasium.spaces import MultiDiscrete

from gpu_vecenv.declare.env import Env, Field, i32, param


@dataclass(frozen=True, kw_only=True)
class Crew(Env):
    """The driver moves along a road; helpers hand things over when they are rested."""

    num_helpers: int = param(2, low=1)
    length: int = param(6, low=2)
    max_steps: int = param(9, low=1)

    state = (Field("place", i32), Field("rest", i32, ("num_helpers",)))
    masks_actions = True
    obs_dim = {"driver": 2, "helper": 4}  # noqa: RUF012
    action_space = {"driver": MultiDiscrete([5]), "helper": MultiDiscrete([2, 3])}  # noqa: RUF012

    @property
    def roles(self):
        return {"driver": 1, "helper": self.num_helpers}
