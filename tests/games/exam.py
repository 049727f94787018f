"""A game whose initial states differ in what there is to learn from them."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, i32, param

NOTHING, ALL, RIGHT = range(3)  # what a paper pays for


@dataclass(frozen=True, kw_only=True)
class Exam(Env):
    """Players answer the questions of a paper, which they see with the number of the question.

    ``pays`` of the paper: NOTHING, ALL answers 1, or RIGHT ones 1 (choice 1 of even questions, 0 of odd ones), where a
    wrong one ends the player's exam. ``initial_states`` give the papers.
    """

    num_papers: int = param(4, low=1)
    num_players: int = param(1, low=1)
    max_steps: int = param(4, low=1)

    state = (Field("paper", i32), Field("pays", i32))
    action_space = Discrete(2)

    @property
    def obs_dim(self):
        return self.num_papers + self.max_steps + 1

    @property
    def roles(self):
        return {"player": self.num_players}
