"""Values and memory: bugs for K11 to K13."""

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space

from mutants.ring import CELLS, LATE, Ring, planted


@planted("K11")
class ObservationOfOneEnvironmentIsSqueezed(Ring):
    def observe(self):
        return super().observe().squeeze()


@planted("K11")
class ObservationLeavesItsSpaceLate(Ring):
    def observe(self):
        rows = super().observe()
        rows[-1, 0] += 100 * (self.elapsed_steps > LATE)
        return rows


@planted("K11")
class NanInAnObservationLate(Ring):
    def observe(self):
        rows = super().observe()
        rows[-1, 3] = np.nan if self.elapsed_steps > LATE else rows[-1, 3]
        return rows


@planted("K11")
class InfinityInASpaceWithoutBounds(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.single_observation_space = Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def observe(self):
        rows = super().observe()
        rows[0, 0] = np.inf if self.elapsed_steps > LATE else rows[0, 0]
        return rows


@planted("K11")
class NanRewardOnce(Ring):
    def flags(self, rewards, terminations, truncations):
        rewards[-1] = np.nan if self.elapsed_steps == LATE else rewards[-1]
        return super().flags(rewards, terminations, truncations)


@planted("K11")
class DtypeOfRewardsDrifts(Ring):
    def flags(self, rewards, terminations, truncations):
        kind = np.float32 if self.elapsed_steps > 15 else np.float64
        return super().flags(rewards.astype(kind), terminations, truncations)


@planted("K11")
class ObservationsInDoublePrecision(Ring):
    def observe(self):
        return super().observe().astype(np.float64)


@planted("K00", agents=2)
class OneRewardForEachReplica(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards.sum(1), terminations, truncations)


@planted("K11")
class FlagsAreNumbers(Ring):
    def flags(self, rewards, terminations, truncations):
        return super().flags(rewards, terminations.astype(np.uint8), truncations.astype(np.uint8))


@planted("K11")
class FinalObservationOutsideItsSpace(Ring):
    def final(self, ends):
        info = super().final(ends)
        if info:
            info["final_obs"] = info["final_obs"] + np.float32(CELLS + 1)
        return info


@planted("K11")
class NumpyAfterTheFirstStep(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **(kwargs | {"output": "torch"}))

    def out(self, array):
        return array if self.elapsed_steps > 1 else super().out(array)


@planted("K12")
class ObservationBufferReused(Ring):
    def observe(self):
        rows = super().observe()
        self.buffer = getattr(self, "buffer", rows)
        self.buffer[...] = rows
        return self.buffer


@planted("K12", output="torch")
class RewardBufferReused(Ring):
    def flags(self, rewards, terminations, truncations):
        self.buffer = getattr(self, "buffer", rewards)
        self.buffer[...] = rewards
        return super().flags(self.buffer, terminations, truncations)


@planted("K12")
class FinalObservationOverwrittenLater(Ring):
    def final(self, ends):
        info = super().final(ends)
        if info:
            self.kept = getattr(self, "kept", info["final_obs"])
            self.kept[...] = info["final_obs"]
            info["final_obs"] = self.kept
        return info


@planted("K12")
class ObservationIsTheState(Ring):
    def observe(self):
        rows = super().observe()
        self.view = rows
        return rows

    def step(self, actions):
        self.check_callable()
        if self.active.all():
            self.cell = self.view[:, 0].astype(np.int64).reshape(self.cell.shape)
        return super().step(actions)


@planted("K13")
class ActionsChanged(Ring):
    def checked_moves(self, actions):
        moves = super().checked_moves(actions)
        actions[-1] = 1
        return moves


@planted("K13", output="torch", continuous=True)
class ActionsClippedInPlace(Ring):
    def checked_moves(self, actions):
        moves = super().checked_moves(actions)
        actions.clamp_(-0.5, 0.5)
        return moves


@planted("K13")
class ActionsKeptByReference(Ring):
    def checked_moves(self, actions):
        moves = super().checked_moves(actions)
        late, self.kept = getattr(self, "kept", None), actions
        return moves if late is None else (late - 1).reshape(moves.shape)


@planted("K13")
class OptionsEmptied(Ring):
    def validate_mask(self, options):
        chosen = super().validate_mask(options)
        (options or {}).pop("reset_mask", None)
        return chosen


@planted("K13")
class MaskCleared(Ring):
    def validate_mask(self, options):
        chosen = super().validate_mask(options)
        if options:
            options["reset_mask"][:] = False
        return chosen
