"""Resets at all moments, lists of seeds, later episodes: bugs for K01 to K10."""

import numpy as np

from mutants.ring import DISABLED, LIMIT, NEXT, SAME, BothFlagsRing, Ring, mixed, planted


@planted("K01", mode=NEXT)
class ResetLeavesAResetPending(Ring):
    def reset(self, *, seed=None, options=None):
        over = ~self.active.any(1) & self.begun
        obs, info = super().reset(seed=seed, options=options)
        self.active &= ~over[:, None]
        return obs, info


@planted("K01")
class EmptyOptionsHideTheSeed(Ring):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if options == {} else seed, options=options)


class SeedsRing(Ring):
    """Takes lists of seeds."""

    def validate_seed(self, seed):
        if not isinstance(seed, list):
            return super().validate_seed(seed)
        if len(seed) != self.num_rings:
            raise ValueError(f"{len(seed)} seeds for {self.num_rings} rings")
        return [super(SeedsRing, self).validate_seed(own) for own in seed]

    def env_keys(self, seed):
        if not isinstance(seed, list):
            return super().env_keys(seed)
        return np.array([super(SeedsRing, self).env_keys(own)[ring] for ring, own in enumerate(seed)])


@planted("K01")
class ListOfSeedsIsNoSeed(SeedsRing):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if isinstance(seed, list) else seed, options=options)


@planted("K01")
class FirstSeedOfTheListForAll(SeedsRing):
    def env_keys(self, seed):
        return super().env_keys(seed[0] if isinstance(seed, list) else seed)


@planted("K01")
class ShortListOfSeedsAccepted(SeedsRing):
    def validate_seed(self, seed):
        return super().validate_seed((seed * self.num_rings)[: self.num_rings] if isinstance(seed, list) else seed)


@planted("K01")
class SeedsOfTheListAddUp(SeedsRing):
    def env_keys(self, seed):
        return super().env_keys(sum(seed) if isinstance(seed, list) else seed)


@planted("K03")
class StreamsRepeatAfter32Environments(Ring):
    def env_keys(self, seed):
        return super().env_keys(seed)[np.arange(self.num_rings) % 32]


@planted("K05")
class EnvironmentsBeyondAByteOverwriteTheFirst(Ring):
    def env_keys(self, seed):
        keys = super().env_keys(seed)
        keys[: max(0, self.num_rings - 256)] = keys[256:]
        return keys


@planted("K07")
class FirstResetWithoutASeedIsSeedZero(Ring):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0 if seed is None and not self.begun else seed, options=options)


@planted("K07")
class ResetWithoutASeedStartsAllAlike(Ring):
    def reset(self, *, seed=None, options=None):
        if seed is None and not options and self.begun:
            self.keys[:], self.draws[:] = self.keys[0], self.draws[0]
        return super().reset(seed=seed, options=options)


class EpisodeRing(Ring):
    """Starts and drifts are drawn from keys of the episode."""

    def reset_seed(self, seed, chosen):
        super().reset_seed(seed, chosen)
        self.first, self.episode = self.keys.copy(), np.zeros(self.num_rings, np.uint64)

    def autoreset(self, chosen):
        self.episode[chosen] += np.uint64(1)
        self.keys, self.draws = np.where(chosen, self.episode_keys(), self.keys), np.where(chosen, 0, self.draws)
        self.draws = self.draws.astype(np.uint64)
        super().autoreset(chosen)


@planted("K08")
class LaterEpisodesAreTheSameEverywhere(EpisodeRing):
    def episode_keys(self):
        return mixed(self.first[0] ^ mixed(self.episode))


@planted("K08")
class EpisodesOfTheNextEnvironment(EpisodeRing):
    def episode_keys(self):
        return mixed(self.first[0] ^ mixed(self.episode + np.arange(self.num_rings, dtype=np.uint64)))


@planted("K09")
class MaskedEnvironmentsStartAlike(Ring):
    def begin(self, chosen):
        super().begin(chosen)
        if getattr(self, "masked", False):
            first = int(chosen.argmax())
            self.cell[chosen], self.goal[chosen] = self.cell[first], self.goal[first]

    def reset(self, *, seed=None, options=None):
        self.masked = bool(options) and seed is None
        outputs = super().reset(seed=seed, options=options)
        self.masked = False
        return outputs


@planted("K09")
class TheMaskStays(Ring):
    def validate_mask(self, options):
        self.mask = super().validate_mask(options) & (True if options else getattr(self, "mask", True))
        return self.mask


@planted("K09")
class MaskOfAllIsForgotten(Ring):
    def validate_mask(self, options):
        chosen = super().validate_mask(options)
        return chosen & (not options or not chosen.all())


@planted("K09", mode=NEXT)
class MaskedResetLeavesAResetPending(Ring):
    def reset(self, *, seed=None, options=None):
        over = ~self.active.any(1) & self.begun & (options is not None)
        obs, info = super().reset(seed=seed, options=options)
        self.active &= ~over[:, None]
        return obs, info


@planted("K10", mode=NEXT)
class ResetWithoutASeedLeavesAResetPending(Ring):
    def reset(self, *, seed=None, options=None):
        over = ~self.active.any(1) & self.begun & (seed is None)
        obs, info = super().reset(seed=seed, options=options)
        self.active &= ~over[:, None]
        return obs, info


@planted("K10", mode=DISABLED)
class ResetWithoutASeedKeepsTheClock(Ring):
    def reset(self, *, seed=None, options=None):
        time = self.time.copy()
        outputs = super().reset(seed=seed, options=options)
        if seed is None and not options:
            self.time = time
        return outputs


@planted("K10", mode=SAME)
class ObservationsLagBehind(Ring):
    def after_moves(self, ends):
        self.late, self.ends = self.seen, ends

    def begin(self, chosen):
        super().begin(chosen)
        self.seen = super().observe()
        self.late = np.where(chosen[:, None], self.seen, getattr(self, "late", self.seen))

    def observe(self):
        return self.late.copy()

    def final(self, ends):
        return {"final_obs": super().observe(), "_final_obs": ends} if ends.any() else {}

    def step(self, actions):
        self.check_callable()
        self.seen = super().observe()
        return super().step(actions)


@planted("K10")
class EveryTruncationTerminates(BothFlagsRing):
    def flags(self, rewards, terminations, truncations):
        rewards, terminations, truncations = super().flags(rewards, terminations, truncations)
        return rewards, terminations | truncations, truncations


@planted("K10")
class LastEnvironmentTerminatesAtTheLimit(Ring):
    def flags(self, rewards, terminations, truncations):
        rewards, terminations, truncations = super().flags(rewards, terminations, truncations)
        terminations[-1] |= truncations[-1]
        truncations[-1] = False
        return rewards, terminations, truncations


@planted("K10")
class LimitShiftedByAReset(Ring):
    def limit(self):
        return LIMIT + getattr(self, "shift", 0)

    def reset(self, *, seed=None, options=None):
        if seed is None and options is None and self.begun:
            self.shift = 1
        if seed is not None and options is None:
            self.shift = 0
        return super().reset(seed=seed, options=options)
