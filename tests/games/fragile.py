"""A game whose actions cause faults: NaN in one place, writes outside of its environment, an illegal access."""

from dataclasses import dataclass
from pathlib import Path

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, f64, param

FAULTS = (
    "none",
    "NaN in the state",
    "infinity in the state",
    "NaN in a reward",
    "infinity in a reward",
    "NaN in an observation",
    "NaN in a double",
    "beyond the state",
    "before the state",
    "beyond the observations",
    "beyond the rewards",
    "beyond the flags",
    "an address that nobody owns",
)


@dataclass(frozen=True, kw_only=True)
class Fragile(Env):
    """Agents that walk; a choice k > 0 is the fault FAULTS[k], of agent 1 in its environment."""

    num_actions: int = param(len(FAULTS), low=2)

    source = Path(__file__).with_name("fragile.cu")
    state = (
        Field("place", f32, ("num_agents", 2)),
        Field("clock", f64, (1,)),
        Field("wanted", f32, (1,)),  # an observation to spoil
    )

    @property
    def roles(self):
        return {"agent": 2}

    @property
    def obs_dim(self):
        return 3

    @property
    def action_space(self):
        return Discrete(self.num_actions)
