"""A game whose agents see the same and should not do the same."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, param


@dataclass(frozen=True, kw_only=True)
class Parity(Env):
    """One step: agents with an even number are paid 1 for choice 0, the others for choice 1. All observe a 1.

    One policy for all that does not see who an agent is gets a half on average, whatever it does.
    """

    num_agents_of_role: int = param(2, low=1)

    obs_dim = 1
    action_space = Discrete(2)

    @property
    def roles(self):
        return {"agent": self.num_agents_of_role}
