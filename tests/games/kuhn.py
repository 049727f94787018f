"""Kuhn poker: a zero-sum game of hidden cards, whose solution is known."""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, i32


@dataclass(frozen=True, kw_only=True)
class Kuhn(Env):
    """Each player gets one of three cards, pays an ante of 1, and in turn passes (0) or bets 1 (1).

    A bet that is answered by a pass wins the antes; otherwise the higher card wins them and the bets. After a pass and
    a bet the first player decides once more.

    Observation: one's own card, one-hot (3), then the first move and the second one, each as passed, bet (2); zeros
    before it was made.
    """

    state = (Field("card", i32, ("num_agents",)), Field("moves", i32, (2,)))  # a move: -1, not made; 0, pass; 1, bet
    takes_turns = True
    zero_sum = True
    roles = {"first": 1, "second": 1}  # noqa: RUF012
    obs_dim = 7
    action_space = Discrete(2)
    max_steps = 3
