"""A dilemma: what is best for a team is not what is best for each of its players."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, param


@dataclass(frozen=True, kw_only=True)
class Gift(Env):
    """One step: choice 1 costs a player 1 and gives each of the others ``gift``; choice 0 does nothing. Players see 1.

    With ``gift`` > 1 the mean reward of n players is largest if all choose 1, (n - 1) gift - 1; a player alone is
    better off with 0, whatever the others do. Rewards are sums over the choices, as value decomposition has it.
    """

    num_players: int = param(3, low=2)
    gift: float = 2.0

    obs_dim = 1
    action_space = Discrete(2)

    @property
    def roles(self):
        return {"player": self.num_players}
