"""A game of memory: the first observation says what is right some steps later, and nothing else does."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, param


@dataclass(frozen=True, kw_only=True)
class Recall(Env):
    """Each player sees its cue, 1 or -1, in its first observation and 0 in later ones; beside it the steps since reset.

    The action in the last step, ``delay`` steps after the cue, is paid: 1 for choice 1 after cue 1 and for choice 0
    after cue -1, else -1. Without memory nothing is better than a mean return of 0.
    """

    num_players: int = param(2, low=1)
    delay: int = param(3, low=1)

    state = (Field("cue", f32, ("num_agents",)),)
    obs_dim = 2
    action_space = Discrete(2)

    @property
    def max_steps(self):
        return self.delay + 1

    @property
    def roles(self):
        return {"player": self.num_players}
