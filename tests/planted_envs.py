"""A toy vector environment that keeps every promise, and variants of it that break one each.

Agents walk on a ring of 16 cells towards their replica's goal; a random drift moves them as well. An agent that
reaches the goal terminates; after 12 steps an episode is truncated. With two agents a replica is two rows.
"""

from __future__ import annotations

import os
import random
import secrets
import threading

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError, InvalidAction, ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.spaces import Dict as DictSpace
from gymnasium.spaces import Tuple as TupleSpace
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
CELLS, LIMIT, LATE = 16, 12, 200
U64 = (1 << 64) - 1


def mixed(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): uint64 -> uint64, any shape."""
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Ring(VectorEnv):
    def __init__(self, num_envs, mode=SAME, output="numpy", agents=1, continuous=False, device="cpu"):
        self.device = device
        self.replicas, self.agents, self.mode, self.output = num_envs, agents, mode, output
        self.num_envs = num_envs * agents
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = Box(-1, CELLS, (4,), np.float32)
        self.single_action_space = Box(-1, 1, (2,), np.float32) if continuous else Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        n = num_envs
        self.keys, self.draws = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        self.cell, self.last = np.zeros((n, agents), np.int64), np.zeros((n, agents), np.int64)
        self.goal, self.time = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.active = np.zeros((n, agents), np.bool_)
        self.ticks, self.begun = 0, False

    # ------------------------------------------------------------------ random streams

    def replica_keys(self, seed):
        """One key for each replica: no two pairs of seed and replica have the same."""
        return mixed(mixed(seed & U64) ^ mixed(np.arange(self.replicas) + (seed >> 64)) * np.uint64(3))

    def reseed(self, seed, chosen):
        self.keys = np.where(chosen, self.replica_keys(seed), self.keys)
        self.draws[chosen] = 0

    def draw(self, chosen):
        """One number for each chosen replica, (replicas,) uint64; the others' streams stay where they are."""
        numbers = mixed(self.keys + mixed(self.draws))
        self.draws[chosen] += np.uint64(1)
        return numbers

    # ------------------------------------------------------------------ episodes

    def begin(self, chosen):
        numbers = self.draw(chosen)
        cells = (numbers[:, None] >> (np.arange(self.agents, dtype=np.uint64) * np.uint64(8))) % np.uint64(CELLS)
        self.cell = np.where(chosen[:, None], cells.astype(np.int64), self.cell)
        self.goal = np.where(chosen, (numbers >> np.uint64(32)).astype(np.int64) % CELLS, self.goal)
        self.last = np.where(chosen[:, None], 0, self.last)
        self.clear_clock(chosen)
        self.active |= chosen[:, None]

    def clear_clock(self, chosen):
        self.time[chosen] = 0

    def autoreset(self, chosen):
        self.begin(chosen)

    def reset(self, *, seed=None, options=None):
        if self.closed:
            raise ClosedEnvironmentError("reset after close")
        chosen = self.checked_mask(options)
        if seed is not None:
            self.reset_seed(self.checked_seed(seed), chosen)
        elif not self.begun:
            self.reseed(secrets.randbits(63), chosen)
        self.begin(chosen)
        self.begun = True
        return self.out(self.observe()), {}

    def reset_seed(self, seed, chosen):
        self.reseed(seed, chosen)

    def checked_seed(self, seed):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {seed!r}; expected an int")
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more")
        return seed

    def checked_mask(self, options):
        """Which replicas to reset, (replicas,) bool."""
        unknown = set(options or {}) - {"reset_mask"}
        if unknown:
            raise ValueError(f"unknown options {unknown}")
        if not options:
            return np.ones(self.replicas, np.bool_)
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError("reset_mask: expected an array of bool")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask has shape {mask.shape}; expected ({self.num_envs},)")
        return mask.reshape(self.replicas, self.agents).any(1)

    # ------------------------------------------------------------------ steps

    def step(self, actions):
        self.check_callable()
        moves = self.checked_moves(actions)
        self.ticks += 1
        resets = ~self.active.any(1) & (self.mode is NEXT)
        if self.mode is DISABLED and not self.active.any(1).all():
            raise ResetNeeded("a replica's episode has ended")
        before = self.active.copy()
        goes = before & ~resets[:, None]
        self.time[~resets] += 1
        self.move(goes, moves)
        arrived = goes & (self.cell == self.goal[:, None])
        timeout = (self.time >= self.limit())[:, None] & goes & ~arrived
        rewards = np.where(goes, np.where(arrived, 1.0, -0.1), 0.0)
        self.active &= ~(arrived | timeout)
        ends = ~self.active.any(1) & ~resets
        terminations = self.flagged_at_the_end(arrived, timeout, ends)
        info = {}
        self.after_moves(ends)
        if self.mode is SAME:
            info = self.final(ends)
            self.autoreset(self.that_reset(ends))
        elif self.mode is NEXT:
            self.autoreset(self.that_reset(resets))
        obs = self.observe()
        rewards, terminations, timeout = self.flags(rewards, terminations, timeout)
        outputs = [self.out(value) for value in (obs, rewards.reshape(-1), terminations, timeout)]
        return *outputs, {key: self.out(value) for key, value in info.items()}

    def check_callable(self):
        if self.closed:
            raise ClosedEnvironmentError("step after close")
        if not self.begun:
            raise ResetNeeded("step before reset")

    def checked_moves(self, actions):
        """(replicas, agents) int64, -1, 0 or 1 cells."""
        wanted = np.ndarray if self.output == "numpy" else torch.Tensor
        if not isinstance(actions, wanted):
            raise TypeError(f"actions are a {type(actions).__name__}; expected {wanted.__name__}")
        space = self.action_space
        if getattr(actions, "requires_grad", False):
            raise TypeError("actions require a gradient")
        actions = np.asarray(actions if self.output == "numpy" else actions.cpu())
        if actions.dtype != space.dtype:
            raise TypeError(f"actions have dtype {actions.dtype}; expected {space.dtype}")
        if actions.shape != space.shape:
            raise ValueError(f"actions have shape {actions.shape}; expected {space.shape}")
        if not space.contains(actions):
            raise InvalidAction(f"actions {actions} are not in {space}")
        moves = np.rint(actions[:, 0]).astype(np.int64) if isinstance(space, Box) else actions - 1
        return moves.reshape(self.replicas, self.agents)

    def move(self, goes, moves):
        drift = (self.draw(goes.any(1)) >> np.uint64(40)).astype(np.int64) % 3 - 1
        self.cell = np.where(goes, (self.cell + moves + drift[:, None]) % CELLS, self.cell)
        self.last = np.where(goes, moves, 0)

    def limit(self):
        return LIMIT

    def flagged_at_the_end(self, arrived, timeout, ends):
        """A row that ended before its replica terminates once more with it."""
        return arrived | (ends[:, None] & ~timeout)

    def after_moves(self, ends):
        pass

    def flags(self, rewards, terminations, truncations):
        return rewards, terminations.reshape(-1), truncations.reshape(-1)

    def final(self, ends):
        if not ends.any():
            return {}
        return {"final_obs": self.observe(), "_final_obs": np.repeat(ends, self.agents)}

    def that_reset(self, chosen):
        return chosen

    def observe(self):
        """(rows, 4) float32: cell, goal, time, last move; zeros for an agent whose replica goes on without it."""
        n = self.agents
        columns = [self.cell, np.repeat(self.goal[:, None], n, 1), np.repeat(self.time[:, None], n, 1), self.last]
        rows = np.stack(columns, -1).astype(np.float32)
        gone = ~self.active & self.active.any(1)[:, None]
        rows[gone] = 0
        return rows.reshape(self.num_envs, 4)

    def out(self, array):
        return torch.as_tensor(array).to(self.device) if self.output == "torch" else array


class MaskedRing(Ring):
    """Forbids one of the three moves at each cell, and refuses it."""

    def allowed(self):
        return np.arange(3) != (self.cell.reshape(-1, 1) % 4)

    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        return obs, info | {"action_mask": self.out(self.allowed())}

    def step(self, actions):
        self.check_callable()
        self.checked_moves(actions)
        if self.active.all() and not self.allowed()[np.arange(self.num_envs), np.asarray(actions)].all():
            raise InvalidAction("a forbidden move")
        *outputs, info = super().step(actions)
        return *outputs, info | {"action_mask": self.out(self.allowed())}


class NestedRing(Ring):
    """Observations in a dict and a tuple; final observations row by row, as SyncVectorEnv gives them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        two = Box(-1, CELLS, (2,), np.float32)
        self.single_observation_space = DictSpace({"place": two, "rest": TupleSpace((two, Box(-1, CELLS, (1,))))})
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def nested(self, obs):
        return {"place": obs[..., :2], "rest": (obs[..., 2:], obs[..., :1] * 1)}

    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        return self.nested(obs), info

    def step(self, actions):
        obs, *outputs, info = super().step(actions)
        if "final_obs" in info:
            final = np.full(self.num_envs, None, object)
            for row in np.flatnonzero(info["_final_obs"]):
                final[row] = self.nested(info["final_obs"][row])
            info["final_obs"] = final
        return self.nested(obs), *outputs, info


class StillRing(Ring):
    """Nothing in it is random: one start, no drift. Seeds and replicas make no difference."""

    def draw(self, chosen):
        return np.full(self.replicas, 5 + (3 << 32), np.uint64)


class GarbageWhereTheMaskIsFalse(Ring):
    """Rows of final_obs that mean nothing differ from run to run."""

    def final(self, ends):
        garbage = np.full((self.num_envs, 4), secrets.randbelow(1000), np.float32)
        mask = np.repeat(ends, self.agents)
        return {"final_obs": np.where(mask[:, None], self.observe(), garbage), "_final_obs": mask}


class LeavingRowsBringFinalObservations(Ring):
    """A row that ends before its replica has its last observation in final_obs, too."""

    def after_moves(self, ends):
        self.leaving = (self.cell == self.goal[:, None]) & ~self.gone
        self.gone = ~self.active & self.active.any(1)[:, None]

    def begin(self, chosen):
        super().begin(chosen)
        self.gone = ~self.active & self.active.any(1)[:, None]

    def final(self, ends):
        mask = np.repeat(ends, self.agents) | self.leaving.reshape(-1)
        return {"final_obs": self.observe(), "_final_obs": mask}


# ---------------------------------------------------------------------- planted bugs

PLANTED = {}  # name -> (the check that is meant to find it, class, arguments)


def planted(check, **arguments):
    def enter(bug):
        PLANTED[bug.__name__] = check, bug, arguments
        return bug

    return enter


@planted("K01")
class LateChance(Ring):
    def observe(self):
        rows = super().observe()
        rows[:, 3] = secrets.randbelow(3) if self.ticks > LATE else rows[:, 3]
        return rows


@planted("K01")
class InstancesShareOneCounter(Ring):
    shared = np.zeros(1, np.uint64)

    def draw(self, chosen):
        self.shared += np.uint64(1)
        return mixed(self.keys + mixed(self.shared))

    def reseed(self, seed, chosen):
        super().reseed(seed, chosen)
        self.shared[:] = 0


@planted("K01")
class SeededResetKeepsSomething(Ring):
    def begin(self, chosen):
        kept = self.last
        super().begin(chosen)
        self.last = kept


@planted("K01")
class SeededResetKeepsTheDraws(Ring):
    def reseed(self, seed, chosen):
        self.keys = np.where(chosen, self.replica_keys(seed), self.keys)


@planted("K02")
class SeedIgnored(Ring):
    def replica_keys(self, seed):
        return super().replica_keys(99)


@planted("K02")
class SeedReachesTheFirstReplicaOnly(Ring):
    def replica_keys(self, seed):
        return np.where(np.arange(self.replicas) == 0, super().replica_keys(seed), super().replica_keys(1))


@planted("K02")
class SeedCutTo32Bits(Ring):
    def replica_keys(self, seed):
        return super().replica_keys(seed % 2**32)


@planted("K03")
class ReplicasIdentical(Ring):
    def replica_keys(self, seed):
        return np.repeat(super().replica_keys(seed)[:1], self.replicas)


@planted("K03")
class LastReplicaLikeTheFirst(Ring):
    def replica_keys(self, seed):
        keys = super().replica_keys(seed)
        keys[-1] = keys[0]
        return keys


@planted("K04")
class SeedPlusReplica(Ring):
    def replica_keys(self, seed):
        return mixed(np.arange(self.replicas, dtype=np.uint64) + np.uint64(seed & U64))


@planted("K04")
class SeedXorReplica(Ring):
    def replica_keys(self, seed):
        return mixed(np.arange(self.replicas, dtype=np.uint64) ^ np.uint64(seed & U64))


@planted("K05")
class SeedTimesReplicas(Ring):
    def replica_keys(self, seed):
        return super().replica_keys(seed * self.replicas)


@planted("K05")
class OneStreamSharedByAll(Ring):
    def draw(self, chosen):
        counter = self.draws[0] + np.cumsum(chosen).astype(np.uint64)
        self.draws += np.uint64(chosen.sum())
        return mixed(self.keys[0] + mixed(counter))


@planted("K06")
class OtherReplicasDrawsMoveTheStream(OneStreamSharedByAll):
    pass


@planted("K06")
class EndResetsTheNeighbour(Ring):
    def autoreset(self, chosen):
        super().autoreset(chosen | np.roll(chosen, 1))


@planted("K06")
class NeighboursDataInTheObservation(Ring):
    def observe(self):
        rows = super().observe()
        rows[:, 3] = np.roll(rows[:, 3], 1)
        return rows


@planted("K06")
class TickedByTheWholeBatch(Ring):
    def limit(self):
        return LIMIT - (self.time.sum() % 7 == 0)


@planted("K07")
class ResetReplaysTheLastSeed(Ring):
    def reset(self, *, seed=None, options=None):
        self.given = seed if seed is not None else getattr(self, "given", None)
        return super().reset(seed=self.given, options=options)


@planted("K07")
class UnseededResetFromEntropy(Ring):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=secrets.randbits(40) if seed is None else seed, options=options)


@planted("K08")
class AutoresetReseeds(Ring):
    def autoreset(self, chosen):
        self.draws[chosen] = 0
        super().autoreset(chosen)


@planted("K08", mode=NEXT)
class FixedStartAfterAutoreset(Ring):
    def autoreset(self, chosen):
        super().autoreset(chosen)
        self.cell[chosen], self.goal[chosen] = 3, 11


@planted("K08", mode=DISABLED)
class MaskedResetReplaysTheFirstStart(Ring):
    def begin(self, chosen):
        super().begin(chosen)
        if chosen.all():
            self.first = self.cell.copy(), self.goal.copy()
        else:
            self.cell = np.where(chosen[:, None], self.first[0], self.cell)
            self.goal = np.where(chosen, self.first[1], self.goal)


@planted("K09")
class MaskIgnored(Ring):
    def checked_mask(self, options):
        return np.ones_like(super().checked_mask(options))


@planted("K09")
class MaskedResetDoesNothing(Ring):
    def checked_mask(self, options):
        chosen = super().checked_mask(options)
        return chosen & chosen.all()


@planted("K09")
class MaskedResetDoesNothingWithoutSeed(Ring):
    def reset(self, *, seed=None, options=None):
        if options and seed is None:
            self.checked_mask(options)
            return self.out(self.observe()), {}
        return super().reset(seed=seed, options=options)


@planted("K09")
class MaskedResetReturnsItsOwnRowsOnly(Ring):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs[np.repeat(~self.checked_mask(options), self.agents)] = 0
        return obs, info


@planted("K09")
class MaskedSeedReseedsAll(Ring):
    def reset_seed(self, seed, chosen):
        super().reset_seed(seed, np.ones_like(chosen))


@planted("K09")
class MaskedSeedIgnored(Ring):
    def reset_seed(self, seed, chosen):
        if chosen.all():
            super().reset_seed(seed, chosen)


@planted("K09", mode=NEXT)
class MaskedResetClearsAllClocks(Ring):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self.time[:] = 0
        return obs, info


@planted("K09", mode=DISABLED)
class MaskRefusedThoughNeeded(Ring):
    def checked_mask(self, options):
        if options:
            raise ValueError("no options")
        return super().checked_mask(options)


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


@planted("K10")
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
class LastReplicaNeverResets(Ring):
    def that_reset(self, chosen):
        return chosen & (np.arange(self.replicas) < self.replicas - 1)


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
        self.active &= ~getattr(self, "waiting", np.zeros(self.replicas, np.bool_))[:, None]
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


@planted("K11")
class ObservationLeavesItsSpaceLate(Ring):
    def observe(self):
        rows = super().observe()
        rows[-1, 0] += 100 * (self.ticks > LATE)
        return rows


@planted("K11")
class NanInAnObservationLate(Ring):
    def observe(self):
        rows = super().observe()
        rows[-1, 3] = np.nan if self.ticks > LATE else rows[-1, 3]
        return rows


@planted("K11")
class InfinityInASpaceWithoutBounds(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.single_observation_space = Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def observe(self):
        rows = super().observe()
        rows[0, 0] = np.inf if self.ticks > LATE else rows[0, 0]
        return rows


@planted("K11")
class NanRewardOnce(Ring):
    def flags(self, rewards, terminations, truncations):
        rewards[-1] = np.nan if self.ticks == LATE else rewards[-1]
        return super().flags(rewards, terminations, truncations)


@planted("K11")
class DtypeOfRewardsDrifts(Ring):
    def flags(self, rewards, terminations, truncations):
        kind = np.float32 if self.ticks > 15 else np.float64
        return super().flags(rewards.astype(kind), terminations, truncations)


@planted("K11")
class ObservationsInDoublePrecision(Ring):
    def observe(self):
        return super().observe().astype(np.float64)


@planted("K11", agents=2)
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
        return array if self.ticks > 1 else super().out(array)


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
    def checked_mask(self, options):
        chosen = super().checked_mask(options)
        (options or {}).pop("reset_mask", None)
        return chosen


@planted("K13")
class MaskCleared(Ring):
    def checked_mask(self, options):
        chosen = super().checked_mask(options)
        if options:
            options["reset_mask"][:] = False
        return chosen


class Lenient(Ring):
    """Prepares what it is given until it passes."""

    def prepared(self, actions):
        raise NotImplementedError

    def checked_moves(self, actions):
        return super().checked_moves(self.prepared(actions))


@planted("K14")
class OutOfRangeAccepted(Lenient):
    def prepared(self, actions):
        return np.minimum(actions, 2) if isinstance(actions, np.ndarray) and actions.dtype == np.int64 else actions


@planted("K14")
class NegativeAccepted(Lenient):
    def prepared(self, actions):
        return np.maximum(actions, 0) if isinstance(actions, np.ndarray) and actions.dtype == np.int64 else actions


@planted("K14")
class OnlyTheFirstRowChecked(Lenient):
    def prepared(self, actions):
        if (
            isinstance(actions, np.ndarray)
            and actions.dtype == np.int64
            and actions.ndim == 1
            and actions[0] in range(3)
        ):
            return actions % 3
        return actions


@planted("K14")
class FloatsAccepted(Lenient):
    def prepared(self, actions):
        if getattr(actions, "dtype", None) == np.float32 and np.isfinite(actions).all():
            return actions.astype(np.int64)
        return actions


@planted("K14")
class BoolAccepted(Lenient):
    def prepared(self, actions):
        return actions.astype(np.int64) if getattr(actions, "dtype", None) == np.bool_ else actions


@planted("K14", continuous=True)
class NanAccepted(Lenient):
    def prepared(self, actions):
        return np.nan_to_num(actions, posinf=9, neginf=-9) if isinstance(actions, np.ndarray) else actions


@planted("K14", continuous=True)
class ClippedInSilence(Lenient):
    def prepared(self, actions):
        return np.clip(actions, -1, 1) if getattr(actions, "dtype", None) == np.float32 else actions


@planted("K14")
class OneActionForAllAccepted(Lenient):
    def prepared(self, actions):
        if isinstance(actions, np.ndarray) and actions.shape in ((), (1,)) and self.num_envs > 1:
            return np.broadcast_to(actions, (self.num_envs,))
        return actions


@planted("K14")
class NoneIsAnAction(Lenient):
    def prepared(self, actions):
        return np.ones(self.num_envs, np.int64) if actions is None else actions


@planted("K14", output="torch")
class RefusedAfterTheClockMoved(Ring):
    def checked_moves(self, actions):
        self.time += 1
        moves = super().checked_moves(actions)
        self.time -= 1
        return moves


@planted("K14")
class RefusedByIndexError(Ring):
    def checked_moves(self, actions):
        try:
            return super().checked_moves(actions)
        except InvalidAction as error:
            raise IndexError(str(error)) from error


@planted("K14", output="torch", continuous=True)
class GradientAccepted(Lenient):
    def prepared(self, actions):
        return actions.detach() if isinstance(actions, torch.Tensor) else actions


@planted("K15")
class StepBeforeReset(Ring):
    def check_callable(self):
        if self.closed:
            super().check_callable()


@planted("K15")
class StepAfterClose(Ring):
    def check_callable(self):
        if not self.closed:
            super().check_callable()


@planted("K15")
class ResetAfterClose(Ring):
    def reset(self, **arguments):
        closed, self.closed = self.closed, False
        outputs = super().reset(**arguments)
        self.closed = closed
        return outputs


@planted("K15")
class SecondCloseFails(Ring):
    def close(self, **arguments):
        if self.closed:
            raise ClosedEnvironmentError("close after close")
        super().close(**arguments)


@planted("K16")
class NegativeSeedAccepted(Ring):
    def checked_seed(self, seed):
        return super().checked_seed(abs(seed) if type(seed) is int else seed)


@planted("K16")
class SeedRounded(Ring):
    def checked_seed(self, seed):
        return super().checked_seed(int(seed) if type(seed) is float and seed == seed else seed)


@planted("K16")
class UnknownOptionAccepted(Ring):
    def checked_mask(self, options):
        return super().checked_mask({key: value for key, value in (options or {}).items() if key == "reset_mask"})


@planted("K16")
class MaskOfNumbersAccepted(Ring):
    def checked_mask(self, options):
        if options and "reset_mask" in options:
            options = options | {"reset_mask": np.asarray(options["reset_mask"]).astype(np.bool_)}
        return super().checked_mask(options)


@planted("K16")
class MaskBroadcast(Ring):
    def checked_mask(self, options):
        mask = (options or {}).get("reset_mask")
        if isinstance(mask, np.ndarray) and mask.shape == (1,):
            options = {"reset_mask": np.repeat(mask, self.num_envs)}
        return super().checked_mask(options)


@planted("K16")
class SeedRefusedAfterTheReset(Ring):
    def reset(self, *, seed=None, options=None):
        outputs = super().reset(seed=None, options=options)
        return outputs if seed is None else super().reset(seed=seed, options=options)


@planted("K17")
class GlobalNumpyUsed(Ring):
    def autoreset(self, chosen):
        np.random.random()
        super().autoreset(chosen)


@planted("K17")
class GlobalNumpySeeded(Ring):
    def reset_seed(self, seed, chosen):
        np.random.seed(seed % 2**32)
        super().reset_seed(seed, chosen)


@planted("K17")
class GlobalRandomUsed(Ring):
    def begin(self, chosen):
        random.random()
        super().begin(chosen)


@planted("K17")
class GlobalTorchSeeded(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)


@planted("K17")
class GlobalStatePutBackAfterUse(Ring):
    def observe(self):
        rows, state = super().observe(), random.getstate()
        rows[:, 3] = random.randrange(3)
        random.setstate(state)
        return rows


@planted("K18")
class EnvironmentKept(Ring):
    every = []  # noqa: RUF012, that it is shared is the bug

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.every.append(self)


@planted("K18")
class EmptiedEnvironmentKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        vars(self).clear()
        self.every.append(self)


@planted("K18")
class BufferKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        self.every.append(np.zeros(300))


@planted("K18")
class TensorKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        self.every.append(torch.zeros(300))


@planted("K18")
class FileLeftOpen(Ring):
    every = []  # noqa: RUF012

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.every.append(os.open(os.devnull, os.O_RDONLY))


@planted("K18")
class ThreadLeftRunning(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
