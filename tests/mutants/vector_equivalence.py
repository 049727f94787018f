"""Other environments, state that is written, agents that are exchanged: bugs for K19 to K26, but for K22."""

import numpy as np

from mutants.ring import NEXT, SAME, PermutableRing, Ring, StatefulRing, planted


@planted("K19", agents=2)
class RewardsOfAgentsSwapped(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards[:, ::-1], terminations, truncations)


@planted("K19")
class RewardOffByNinePerMille(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards * 1.009, terminations, truncations)


@planted("K19")
class FinalObservationsClockIsLate(Ring):
    def final(self, ends):
        info = super().final(ends)
        if info:
            info["final_obs"][:, 2] -= 1
        return info


@planted("K20")
class NextStepDrawsOnceMore(Ring):
    def autoreset(self, chosen):
        if self.mode is NEXT:
            self.draw(chosen)
        super().autoreset(chosen)


@planted("K20")
class NextStepTerminatesAtTheLimit(Ring):
    def flags(self, rewards, terminations, truncations):
        if self.mode is NEXT:
            terminations, truncations = terminations | truncations, np.zeros_like(truncations)
        return super().flags(rewards, terminations, truncations)


@planted("K20", agents=2)
class SameStepPaysTheLastTickTwice(Ring):
    def flags(self, rewards, terminations, truncations):
        ended = (terminations | truncations).all(1, keepdims=True)
        return super().flags(rewards * (1 + (ended & (self.mode is SAME))), terminations, truncations)


@planted("K20")
class OneModeForAll(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **(kwargs | {"mode": SAME}))


@planted("K21")
class ClockClearedOnlyWhereItIsPositive(StatefulRing):
    def clear_clock(self, chosen):
        self.time = np.where(chosen & (self.time > 0), 0, self.time)


@planted("K21", mode=NEXT)
class EnergyResetByMultiplication(StatefulRing):
    names = (*StatefulRing.names, "energy")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.energy = np.zeros((self.num_rings, self.agents), np.float32)

    def begin(self, chosen):
        super().begin(chosen)
        self.energy *= ~chosen[:, None]

    def move(self, goes, moves):
        super().move(goes, moves)
        self.energy += np.float32(0.01) * goes

    def observe(self):
        rows = super().observe()
        rows[:, 3] = np.maximum(rows[:, 3] - self.energy.reshape(-1), -1)
        return rows


@planted("K21")
class MaskedSeedKeepsTheDraws(StatefulRing):
    def reseed(self, seed, chosen):
        self.keys = np.where(chosen, self.env_keys(seed), self.keys)
        self.draws = np.zeros_like(self.draws) if chosen.all() else np.where(chosen, self.draws * 0, self.draws)
        if not chosen.all():  # what wraps around is kept
            self.draws |= self.kept & chosen

    def reset(self, **arguments):
        self.kept = np.where(self.draws == np.iinfo(np.uint64).max, np.uint64(1), np.uint64(0))
        return super().reset(**arguments)


@planted("K24", agents=3)
class TheFirstAgentIsFaster(PermutableRing):
    def move(self, goes, moves):
        super().move(goes, moves * np.array([2, 1, 1]))


@planted("K24", agents=3)
class LaterAgentsGiveWay(PermutableRing):
    def move(self, goes, moves):
        before = self.cell.copy()
        super().move(goes, moves)
        blocked = self.cell[:, 1:] == self.cell[:, :-1]
        self.cell[:, 1:] = np.where(blocked, before[:, 1:], self.cell[:, 1:])


@planted("K24", agents=3, mode=NEXT)
class LastAgentIsPaidOnePerMilleMore(PermutableRing):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards * np.array([1, 1, 1.001]), terminations, truncations)


@planted("K23")
class OtherOutputInSinglePrecision(Ring):
    def flags(self, rewards, terminations, truncations):
        kind = np.float64 if self.output == "numpy" else np.float32
        return super().flags(rewards.astype(kind), terminations, truncations)


@planted("K23", mode=NEXT)
class OtherOutputAddsInAnotherOrder(Ring):
    def flags(self, rewards, terminations, truncations):
        parts = [0.1, 0.2, 0.3] if self.output == "numpy" else [0.3, 0.2, 0.1]
        bonus = (parts[0] + parts[1]) + parts[2]
        return super().flags(np.where(rewards != 0, rewards + bonus, 0), terminations, truncations)


@planted("K25")
class StateDictWithoutDraws(StatefulRing):
    names = tuple(name for name in StatefulRing.names if name != "draws")


@planted("K25", mode=NEXT)
class StateDictWithoutWhoIsActive(StatefulRing):
    names = tuple(name for name in StatefulRing.names if name != "active")


@planted("K25")
class StateDictIsLive(StatefulRing):
    def state_dict(self):
        return self.state


@planted("K25")
class LoadKeepsWhatItIsGiven(StatefulRing):
    def load_state_dict(self, state):
        for name in self.names:
            setattr(self, name, state[name])


@planted("K25", output="torch")
class LoadForgetsTheLastReplica(StatefulRing):
    def load_state_dict(self, state):
        for name, array in self.state.items():
            array[:-1] = state[name][:-1]


@planted("K26", agents=2)
class ActionsOfThoseWhoHaveEndedMoveTheOthers(Ring):
    def move(self, goes, moves):
        self.goal = np.where(goes.any(1), (self.goal + (moves * ~goes).sum(1)) % 16, self.goal)
        super().move(goes, moves)


@planted("K26", agents=2, mode=NEXT)
class ActionsOfThoseWhoHaveEndedMoveTheStream(Ring):
    def move(self, goes, moves):
        super().move(goes, moves)
        self.draws += ((moves * ~goes) > 0).any(1).astype(np.uint64) * goes.any(1).astype(np.uint64)


@planted("K26", agents=2)
class ThoseWhoHaveEndedArePaidALittle(Ring):
    def move(self, goes, moves):
        super().move(goes, moves)
        self.idle = ~goes & goes.any(1)[:, None]

    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards + 1e-9 * self.idle, terminations, truncations)
