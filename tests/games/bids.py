"""Bids of those who are there: is the highest one above a limit?"""

from dataclasses import dataclass

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Entities, Env, Field, Own, boolean, f32, param


@dataclass(frozen=True, kw_only=True)
class Bids(Env):
    """One step: choice 1 is paid 1 if somebody who is there bids more than the limit, else choice 0."""

    bidders: int = param(6, low=1)

    state = (Field("limit", f32), Field("bid", f32, ("bidders",)), Field("there", boolean, ("bidders",)))
    action_space = Discrete(2)

    @property
    def obs_parts(self):
        return (Own("limit", 1), Entities("bidder", self.bidders, 2, presence=1))
