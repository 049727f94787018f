"""ParallelRings with one violation each; ``PLANTED_PARALLEL`` is the data: name -> (check, class, arguments)."""

import random
import secrets

import numpy as np
import torch

from gpu_vecenv import check_parallel_env
from mutants.parallel_ring import PLANTED_PARALLEL, ParallelRing, StatefulParallelRing, planted
from mutants.ring import CELLS, LIMIT
from mutants.vector_episodes import ClockNotReset, LimitOneTooLate
from mutants.vector_outputs import ObservationBufferReused
from mutants.vector_seeds import ResetReplaysTheLastSeed, SeedIgnored

__all__ = ["PLANTED_PARALLEL", "examined"]


def examined(kind, checks=None, steps=120, seed=17, max_steps=LIMIT, **arguments):
    """The report on a ParallelRing or one of its kin: compared with a plain one and with itself."""
    return check_parallel_env(
        lambda: kind(**arguments),
        checks=checks,
        steps=steps,
        seed=seed,
        max_steps=max_steps,
        oracle=lambda: next(base for base in kind.__mro__ if base.__module__ == ParallelRing.__module__)(**arguments),
        variants={"faster": lambda: kind(**{**arguments, "faster": True})},
    )


@planted("K01")
class LateChance(ParallelRing):
    def observations(self, agents):
        if self.world.elapsed_steps > 60:
            self.rows[:, 1] = secrets.randbelow(CELLS)
        return super().observations(agents)


@planted("K01")
class SeededResetKeepsTheLastMoves(ParallelRing):
    def reset(self, seed=None, options=None):
        last = self.world.last
        _, infos = super().reset(seed, options)
        self.world.last = last
        self.rows = self.world.observe()
        return self.observations(self.live), infos


@planted("K02")
class SeedReachesNothing(ParallelRing):
    ring = SeedIgnored


@planted("K02")
class SeedsInPairs(ParallelRing):
    def reset(self, seed=None, options=None):
        return super().reset(seed if type(seed) is not int or seed < 0 else seed // 2, options)


@planted("K07")
class UnseededResetReplays(ParallelRing):
    ring = ResetReplaysTheLastSeed


@planted("K07")
class UnseededResetFromEntropy(ParallelRing):
    def reset(self, seed=None, options=None):
        return super().reset(secrets.randbits(40) if seed is None else seed, options)


@planted("K08")
class EveryEpisodeStartsAlike(ParallelRing):
    def reset(self, seed=None, options=None):
        outputs = super().reset(seed, options)
        if seed is not None:
            self.first = self.world.draws.copy()
        else:
            self.world.draws = self.first.copy()
            outputs = super().reset(None, options)
        return outputs


@planted("K10")
class TheLimitIsOneTooLate(ParallelRing):
    ring = LimitOneTooLate


@planted("K10")
class TheClockGoesOn(ParallelRing):
    ring = ClockNotReset


@planted("K10")
class WhoEndsStays(ParallelRing):
    def left(self, before, ended):
        return before if len(ended) < len(before) else []


@planted("K10")
class OneEndsAllLeave(ParallelRing):
    def left(self, before, ended):
        return [] if ended else before


@planted("K10")
class RewardsOfAllPossibleAgents(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        return {**dict.fromkeys(self.possible_agents, 0.0), **rewards}, terminations, truncations


@planted("K10")
class NoFlagsForTheGuard(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        truncations.pop("guard", None)
        return rewards, terminations, truncations


@planted("K10")
class InfosOfOneOnly(ParallelRing):
    def step(self, actions):
        *outputs, infos = super().step(actions)
        return *outputs, {agent: infos[agent] for agent in list(infos)[:1]}


@planted("K10")
class NewNamesAfterReset(ParallelRing):
    @property
    def agents(self):
        return [f"{agent}'" for agent in super().agents]


@planted("K10")
class TruncationCalledTermination(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        ended = {agent: terminations[agent] or truncations[agent] for agent in rewards}
        return rewards, ended, dict.fromkeys(rewards, False)


@planted("K11")
class GuardSeesTooMuch(ParallelRing):
    def observations(self, agents):
        return {agent: self.rows[self.places[agent]].copy() for agent in agents}


@planted("K11")
class SpacesMadeAnew(ParallelRing):
    def action_space(self, agent):
        return type(self.action_spaces[agent])(3)


@planted("K11")
class NanRewardOnce(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        if self.world.elapsed_steps == 50:
            rewards[next(iter(rewards))] = float("nan")
        return rewards, terminations, truncations


@planted("K11")
class FlagsAreNumbers(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        return rewards, {agent: int(flag) for agent, flag in terminations.items()}, truncations


@planted("K11")
class StateOutsideItsSpace(ParallelRing):
    def state(self):
        return super().state() + np.float32(CELLS + 2)


@planted("K11")
class RewardsBecomeTensors(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        if self.world.elapsed_steps > 15:
            rewards = {agent: torch.tensor(reward) for agent, reward in rewards.items()}
        return rewards, terminations, truncations


@planted("K12")
class ObservationsAreViewsOfOneBuffer(ParallelRing):
    ring = ObservationBufferReused

    def observations(self, agents):
        return {a: self.rows[self.places[a], : self.observation_spaces[a].shape[0]] for a in agents}


@planted("K12")
class OneDictionaryOfRewards(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        self.kept = getattr(self, "kept", {})
        self.kept.clear()
        self.kept.update(rewards)
        return self.kept, terminations, truncations


@planted("K12")
class StateIsLive(ParallelRing):
    def state(self):
        self.buffer = getattr(self, "buffer", super().state())
        self.buffer[:] = super().state()
        return self.buffer


@planted("K13")
class ActionsPopped(ParallelRing):
    def moves(self, actions):
        return np.array([actions.pop(agent, 1) for agent in self.possible_agents], np.int64)


@planted("K13")
class ActionsKeptByReference(ParallelRing):
    def moves(self, actions):
        late, self.kept = getattr(self, "kept", actions), actions
        return super().moves(late)


@planted("K14")
class MissingAgentsStay(ParallelRing):
    def check_keys(self, given, live):
        if given - live:
            super().check_keys(given, live)


@planted("K14")
class UnknownAgentsIgnored(ParallelRing):
    def checked(self, actions, live):
        known = isinstance(actions, dict) and {a: action for a, action in actions.items() if a in self.places}
        return super().checked(known or actions, live)


@planted("K14")
class ActionsWrappedAround(ParallelRing):
    def checked(self, actions, live):
        if isinstance(actions, dict):
            integers = (int, np.integer)
            actions = {a: np.int64(v % 3) if isinstance(v, integers) else v for a, v in actions.items()}
        return super().checked(actions, live)


@planted("K14")
class RefusedAfterTheClockMoved(ParallelRing):
    def checked(self, actions, live):
        self.world.time += 1
        actions = super().checked(actions, live)
        self.world.time -= 1
        return actions


@planted("K15")
class StepBeforeReset(ParallelRing):
    def check_callable(self):
        if self.live is None:
            self.reset(seed=0)
        super().check_callable()


@planted("K15")
class StepAfterClose(ParallelRing):
    def step(self, actions):
        self.world.closed = False
        return super().step(actions)


@planted("K16")
class NegativeSeedAccepted(ParallelRing):
    def reset(self, seed=None, options=None):
        return super().reset(abs(seed) if type(seed) is int else seed, options)


@planted("K16")
class SeedRefusedAfterTheReset(ParallelRing):
    def reset(self, seed=None, options=None):
        outputs = super().reset(None, options)
        return outputs if seed is None else super().reset(seed, options)


@planted("K17")
class GlobalRandomUsed(ParallelRing):
    def left(self, before, ended):
        random.random()
        return super().left(before, ended)


@planted("K17")
class GlobalNumpySeeded(ParallelRing):
    def reset(self, seed=None, options=None):
        np.random.seed(3)
        return super().reset(seed, options)


@planted("K18")
class EnvironmentKept(ParallelRing):
    every = []  # noqa: RUF012, that it is shared is the bug

    def close(self):
        super().close()
        self.every.append(self)


@planted("K18")
class BufferKept(ParallelRing):
    every = []  # noqa: RUF012

    def close(self):
        super().close()
        self.every.append(np.zeros(300))


@planted("K19")
class RewardOffByNinePerMille(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        return {agent: 1.009 * reward for agent, reward in rewards.items()}, terminations, truncations


@planted("K19")
class GuardAndScoutSwapRewards(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        others = dict(zip(rewards, reversed(list(rewards.values())), strict=True))
        return others, terminations, truncations


class Hasty(ParallelRing):
    def __init__(self, agents=3, faster=False):
        super().__init__(agents)
        self.faster = faster


@planted("K23")
class FasterRounds(Hasty):
    def outputs(self, rewards, terminations, truncations):
        if self.faster:
            rewards = {agent: float(np.float32(reward)) for agent, reward in rewards.items()}
        return rewards, terminations, truncations


@planted("K23")
class FasterHasNoState(Hasty):
    def state(self):
        return super().state() * (not self.faster)


@planted("K25")
class StateDictWithoutDraws(StatefulParallelRing):
    names = tuple(name for name in StatefulParallelRing.names if name != "draws")


@planted("K25")
class LoadForgetsWhoIsThere(StatefulParallelRing):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.live = list(self.possible_agents)


@planted("K26")
class ActionsOfThoseWhoHaveLeftMoveTheGoal(ParallelRing):
    def check_keys(self, given, live):
        if live - given:
            super().check_keys(given, live)

    def moves(self, actions):
        gone = sum(int(actions[agent]) for agent in actions if agent not in self.live)
        self.world.goal = (self.world.goal + gone) % CELLS
        return super().moves({agent: action for agent, action in actions.items() if agent in self.live})


@planted("K26")
class ThoseWhoHaveLeftArePaid(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        return {**dict.fromkeys(self.possible_agents, -0.01), **rewards}, terminations, truncations


@planted("K01")
class OptionsHideTheSeed(ParallelRing):
    def reset(self, seed=None, options=None):
        return super().reset(seed if options is None else None, options)


@planted("K07")
class FirstResetWithoutASeedIsSeedZero(ParallelRing):
    def reset(self, seed=None, options=None):
        return super().reset(0 if seed is None and self.live is None else seed, options)


@planted("K10")
class PossibleAgentsLeaveToo(ParallelRing):
    def step(self, actions):
        outputs = super().step(actions)
        self.possible_agents = [agent for agent in self.possible_agents if agent in self.live or not self.live]
        return outputs

    def moves(self, actions):
        return np.array([actions.get(agent, 1) for agent in self.places], np.int64)


@planted("K10")
class NumAgentsIsThatOfTheReset(ParallelRing):
    @property
    def num_agents(self):
        return len(self.possible_agents)


@planted("K10")
class RewardsOfThoseWhoLeaveComeLast(ParallelRing):
    def outputs(self, rewards, terminations, truncations):
        stay = {agent: rewards[agent] for agent in self.live}
        return {**stay, **rewards}, terminations, truncations


@planted("K10")
class StateOfTheStepBefore(ParallelRing):
    def reset(self, seed=None, options=None):
        outputs = super().reset(seed, options)
        self.shown = super().state()
        return outputs

    def step(self, actions):
        before = super().state()
        outputs = super().step(actions)
        self.shown = before
        return outputs

    def state(self):
        return self.shown.copy() if hasattr(self, "shown") else super().state()


@planted("K14")
class ActionsInTheOrderOfTheDictionary(ParallelRing):
    def moves(self, actions):
        return super().moves(dict(zip(self.live, actions.values(), strict=True)))


@planted("K14")
class PythonsNumbersAreZero(ParallelRing):
    def moves(self, actions):
        return super().moves({agent: 0 if type(action) is int else action for agent, action in actions.items()})


@planted("K18")
class EveryEpisodeKept(ParallelRing):
    def reset(self, seed=None, options=None):
        self.history = [*getattr(self, "history", []), np.zeros(10)]
        return super().reset(seed, options)


@planted("K27")
class RenderDraws(ParallelRing):
    def render(self):
        self.world.draw(np.ones(1, np.bool_))
        return super().render()


@planted("K27")
class FramesAreKeptForThreeSteps(ParallelRing):
    def render(self):
        if not hasattr(self, "kept") or self.world.elapsed_steps % 3 == 0:
            self.kept = super().render()
        return self.kept
