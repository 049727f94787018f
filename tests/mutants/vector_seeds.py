"""Seeds, environments and resets: bugs for K01 to K09."""

import secrets

import numpy as np

from mutants.ring import DISABLED, LATE, LIMIT, NEXT, U64, Ring, mixed, planted


@planted("K01")
class LateChance(Ring):
    def observe(self):
        rows = super().observe()
        rows[:, 3] = secrets.randbelow(3) if self.elapsed_steps > LATE else rows[:, 3]
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
        self.keys = np.where(chosen, self.env_keys(seed), self.keys)


@planted("K01")
class NumpySeedIgnored(Ring):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if isinstance(seed, np.integer) else seed, options=options)


@planted("K01")
class SeedZeroIsNoSeed(Ring):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if type(seed) is int and seed == 0 else seed, options=options)


@planted("K02")
class SeedZeroIsSeedOne(Ring):
    def env_keys(self, seed):
        return super().env_keys(seed or 1)


@planted("K02")
class SeedInSinglePrecision(Ring):
    def env_keys(self, seed):
        return super().env_keys(int(np.float32(seed)) if seed < 2**32 else seed)


@planted("K02")
class SeedIgnored(Ring):
    def env_keys(self, seed):
        return super().env_keys(99)


@planted("K02")
class SeedReachesTheFirstReplicaOnly(Ring):
    def env_keys(self, seed):
        return np.where(np.arange(self.num_rings) == 0, super().env_keys(seed), super().env_keys(1))


@planted("K02", mode=DISABLED)
class SeedMissesTheLastEnvironmentDisabled(Ring):
    def env_keys(self, seed):
        return np.where(np.arange(self.num_rings) == self.num_rings - 1, super().env_keys(1), super().env_keys(seed))


@planted("K02")
class SeedCutTo32Bits(Ring):
    def env_keys(self, seed):
        return super().env_keys(seed % 2**32)


@planted("K03")
class ReplicasIdentical(Ring):
    def env_keys(self, seed):
        return np.repeat(super().env_keys(seed)[:1], self.num_rings)


@planted("K03")
class LastReplicaLikeTheFirst(Ring):
    def env_keys(self, seed):
        keys = super().env_keys(seed)
        keys[-1] = keys[0]
        return keys


@planted("K04")
class SeedPlusReplica(Ring):
    def env_keys(self, seed):
        return mixed(np.arange(self.num_rings, dtype=np.uint64) + np.uint64(seed & U64))


@planted("K04", mode=NEXT)
class SeedPlusEnvironmentNextStep(SeedPlusReplica):
    pass


@planted("K04", mode=DISABLED)
class SeedPlusEnvironmentDisabled(SeedPlusReplica):
    pass


@planted("K04")
class SeedXorReplica(Ring):
    def env_keys(self, seed):
        return mixed(np.arange(self.num_rings, dtype=np.uint64) ^ np.uint64(seed & U64))


@planted("K05")
class SeedTimesReplicas(Ring):
    def env_keys(self, seed):
        return super().env_keys(seed * self.num_rings)


@planted("K05")
class OneStreamSharedByAll(Ring):
    def draw(self, chosen):
        counter = self.draws[0] + np.cumsum(chosen).astype(np.uint64)
        self.draws += np.uint64(chosen.sum())
        return mixed(self.keys[0] + mixed(counter))


@planted("K05")
class OneEnvironmentHasItsOwnKey(Ring):
    def env_keys(self, seed):
        return super().env_keys(seed) + np.uint64(self.num_rings == 1)


@planted("K05")
class TheSecondWarpWritesTheFirstKeys(Ring):
    def env_keys(self, seed):
        keys = super().env_keys(seed)
        keys[: max(0, self.num_rings - 32)] = keys[32:]
        return keys


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
    def validate_mask(self, options):
        return np.ones_like(super().validate_mask(options))


@planted("K09")
class MaskedResetDoesNothing(Ring):
    def validate_mask(self, options):
        chosen = super().validate_mask(options)
        return chosen & chosen.all()


@planted("K09")
class MaskedResetDoesNothingWithoutSeed(Ring):
    def reset(self, *, seed=None, options=None):
        if options and seed is None:
            self.validate_mask(options)
            return self.out(self.observe()), {}
        return super().reset(seed=seed, options=options)


@planted("K09")
class MaskedResetReturnsItsOwnRowsOnly(Ring):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs[np.repeat(~self.validate_mask(options), self.agents)] = 0
        return obs, info


@planted("K09")
class EmptyMaskResetsAll(Ring):
    def validate_mask(self, options):
        chosen = super().validate_mask(options)
        return chosen | ~chosen.any()


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
    def validate_mask(self, options):
        if options:
            raise ValueError("no options")
        return super().validate_mask(options)
