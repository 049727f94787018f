"""A game that a team wins only if one of its units dies for it."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, boolean, param


@dataclass(frozen=True, kw_only=True)
class Sacrifice(Env):
    """A unit that chooses 1 before the last step opens a door and dies. After ``max_steps`` each unit gets 1 if one is
    dead and another one alive, and ``consolation`` if all are alive; nothing if all are dead. Units observe the steps
    left, as a share, whether another one is dead, and their id.

    With ``limit`` the last step truncates.
    """

    num_units: int = param(2, low=2)
    consolation: float = 0.2
    limit: bool = False
    max_steps: int = param(3, low=1)

    state = (Field("dead", boolean, ("num_units",)),)
    team_reward = True
    action_space = Discrete(2)

    @property
    def roles(self):
        return {"unit": self.num_units}

    @property
    def obs_dim(self):
        return 2 + self.num_units

    @property
    def agent_id_size(self):
        return self.num_units


@dataclass(frozen=True, kw_only=True)
class Selfish(Sacrifice):
    """The same, but units that have died get nothing."""

    team_reward = False
    agent_id_size = 0


Selfish.source = Sacrifice.source_path()
