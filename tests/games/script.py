"""A game that says in its observations what will happen: when each episode ends, how, and who leaves before."""

from dataclasses import dataclass

from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class Script(Env):
    """Observations of agent i: i + 1, steps since reset, the step that ends the episode, 1 if that step truncates and 0
    if it terminates, the episode's mark, a random number, and what the agent did last (its first number; 0 at first).

    The reward of a step is 10 * (i + 1) + the steps since reset, after the step. With ``leave``, every "other"
    terminates at that step already, unless its episode is over by then.
    """

    num_leads: int = param(1, low=1)
    num_others: int = param(0, low=0)
    leave: int = param(0, low=0)
    continuous: bool = False
    choices_of_others: int = param(4, low=1)
    max_steps: int = param(6, low=2)

    state = (Field("ends", i32), Field("truncates", i32), Field("mark", f32), Field("said", f32, ("num_agents",)))
    obs_dim = 6

    @property
    def roles(self):
        return {"lead": self.num_leads, "other": self.num_others}

    @property
    def action_space(self):
        if self.continuous:
            return Box(-1, 1, (2,))
        return {"lead": Discrete(4), "other": Discrete(self.choices_of_others)}
