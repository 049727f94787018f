"""Ends, limits and autoreset: bugs for K10."""

import numpy as np

from mutants.ring import CELLS, DISABLED, LIMIT, NEXT, SAME, BothFlagsRing, Ring, planted


@planted("K10")
class ClockNotReset(Ring):
    def clear_clock(self, chosen):
        if not self.begun:
            super().clear_clock(chosen)


@planted("K10")
class FinalObservationMissing(Ring):
    def final(self, ends):
        return {}


@planted("K10")
class FinalObservationIsTheNextFirst(Ring):
    def step(self, actions):
        *outputs, info = super().step(actions)
        if info:
            info["final_obs"] = outputs[0] * 1
        return *outputs, info


@planted("K10")
class FinalObservationOfTheStepBefore(Ring):
    def step(self, actions):
        before = self.observe()
        *outputs, info = super().step(actions)
        if info:
            info["final_obs"] = before
        return *outputs, info


@planted("K10")
class FinalMaskShifted(Ring):
    def final(self, ends):
        return super().final(np.roll(ends, 1))


@planted("K10")
class FinalMaskAllTrue(Ring):
    def final(self, ends):
        return super().final(np.ones_like(ends)) if ends.any() else {}


@planted("K10")
class NextStepDeclaredSameStep(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **(kwargs | {"mode": NEXT}))
        self.metadata = {"autoreset_mode": SAME}


@planted("K10")
class SameStepDeclaredNextStep(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **(kwargs | {"mode": SAME}))
        self.metadata = {"autoreset_mode": NEXT}

    def final(self, ends):
        return {}


@planted("K10")
class NextStepDeclaredDisabled(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **(kwargs | {"mode": NEXT}))
        self.metadata = {"autoreset_mode": DISABLED}


@planted("K00")
class NoModeDeclared(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metadata = {}


@planted("K10")
class TruncationCalledTermination(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards, terminations | truncations, np.zeros_like(truncations))


@planted("K10", mode=NEXT)
class FlagsSwapped(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards, truncations, terminations)


@planted("K10")
class LimitOneTooLate(Ring):
    def limit(self):
        return LIMIT + 1


@planted("K10")
class NoLimitAtAll(Ring):
    def limit(self):
        return 10**9


@planted("K10", mode=NEXT)
class FinalObservationInNextStepMode(Ring):
    def step(self, actions):
        *outputs, info = super().step(actions)
        return *outputs, info | self.final(~self.active.any(1))


@planted("K10", mode=NEXT)
class LimitOneTooEarly(Ring):
    def limit(self):
        return LIMIT - 1


@planted("K10")
class BothFlagsDoNotEnd(BothFlagsRing):
    def environments_to_reset(self, chosen):
        return chosen & ~((self.cell == self.goal[:, None]).any(1) & self.timed_out)


@planted("K10")
class LastReplicaNeverResets(Ring):
    def environments_to_reset(self, chosen):
        return chosen & (np.arange(self.num_rings) < self.num_rings - 1)


@planted("K10", mode=NEXT)
class RewardInTheTickThatResets(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(np.where(rewards == 0, -0.1, rewards), terminations, truncations)


@planted("K10", mode=NEXT)
class TheTickThatResetsActs(Ring):
    def checked_moves(self, actions):
        self.moves = super().checked_moves(actions)
        return self.moves

    def autoreset(self, chosen):
        super().autoreset(chosen)
        self.cell = np.where(chosen[:, None], (self.cell + self.moves) % CELLS, self.cell)


@planted("K10", mode=NEXT)
class NextStepShowsTheStartAtOnce(Ring):
    def after_moves(self, ends):
        self.begin(ends)
        self.waiting = ends

    def step(self, actions):
        self.active &= ~getattr(self, "waiting", np.zeros(self.num_rings, np.bool_))[:, None]
        return super().step(actions)

    def autoreset(self, chosen):
        self.active |= chosen[:, None]


@planted("K10", agents=2)
class RowNotFlaggedAtItsReplicasEnd(Ring):
    def flagged_at_the_end(self, arrived, timeout, ends):
        return arrived


@planted("K10", agents=2)
class EndedRowIsPaid(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(np.where(rewards == 0, -0.1, rewards), terminations, truncations)


@planted("K10", agents=2)
class EndedRowStaysFlagged(Ring):
    def flagged_at_the_end(self, arrived, timeout, ends):
        return super().flagged_at_the_end(arrived, timeout, ends) | (~self.active & ~timeout)
