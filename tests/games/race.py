"""A turn-based game of two players with a known solution."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, i32, param


@dataclass(frozen=True, kw_only=True)
class Race(Env):
    """Players take turns in adding 1 or 2 to a total; who reaches ``goal`` gets 1, the other one loses 1.

    Total and first player are random at first. Both observe the total, one-hot, and whether it is their turn. A player
    wins, if the other one makes no mistake, who can leave a multiple of 3 to the goal: see
    ``winning_actions``.
    """

    goal: int = param(10, low=3)
    max_steps: int = param(100, low=1)

    state = (Field("total", i32), Field("player", i32))
    takes_turns = True
    zero_sum = True
    roles = {"player": 2}  # noqa: RUF012
    action_space = Discrete(2)  # add 1, add 2

    @property
    def obs_dim(self):
        return self.goal + 2

    def winning_actions(self, total):
        """The actions at this total after which the other player cannot win."""
        left = [max(0, self.goal - total - 1 - action) for action in range(2)]
        return [action for action in range(2) if left[action] % 3 == 0]
