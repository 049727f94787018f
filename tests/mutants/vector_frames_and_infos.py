"""Rendering, infos at ends, state, growth, samples, nested actions: bugs for K11, K14, K17, K18, K21, K25, K27, K28."""

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space

from mutants.ring import CELLS, DISABLED, NEXT, DictActionRing, MaskedRing, Ring, StatefulRing, StatisticsRing, planted


@planted("K27")
class RenderDraws(Ring):
    def render(self):
        self.draw(np.ones(self.num_rings, np.bool_))
        return super().render()


@planted("K27", mode=NEXT)
class RenderMovesTheClock(Ring):
    def render(self):
        self.time += 1
        return super().render()


@planted("K27")
class FramesAreKeptForThreeSteps(Ring):
    def render(self):
        if not hasattr(self, "kept") or self.elapsed_steps % 3 == 0:
            self.kept = super().render()
        return self.kept


@planted("K27", mode=DISABLED)
class FramesInReverseOrder(Ring):
    def render(self):
        return super().render()[::-1]


@planted("K27")
class FrameOfTheFirstForAll(Ring):
    def render(self):
        return (super().render()[0],) * self.num_rings


@planted("K27")
class FramesBlink(Ring):
    def render(self):
        self.lit = not getattr(self, "lit", False)
        return tuple(frame | np.uint8(self.lit) for frame in super().render())


@planted("K27")
class RenderModeIsNotDeclared(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metadata["render_modes"] = ["human"]


@planted("K27")
class FramesOfFloats(Ring):
    def render(self):
        return tuple(frame / 255 for frame in super().render())


@planted("K28")
class ReturnsGoOn(StatisticsRing):
    def clear(self, chosen):
        returns = self.returns
        super().clear(chosen)
        self.returns = returns


@planted("K28", mode=NEXT)
class ResetStepsCount(StatisticsRing):
    def count(self, rewards, resetting):
        super().count(rewards, np.zeros_like(resetting))


@planted("K28", mode=DISABLED)
class LastRewardIsNotCounted(StatisticsRing):
    def count(self, rewards, resetting):
        super().count(np.where(rewards == 1, 0, rewards), resetting)


@planted("K28")
class StatisticsOfTheNeighbour(StatisticsRing):
    def step(self, actions):
        *outputs, info = super().step(actions)
        if "final_info" in info:
            episode = info["final_info"]["episode"]
            episode["r"] = np.roll(episode["r"], 1)
        return *outputs, info


@planted("K28", mode=NEXT)
class StatisticsWhereNothingEnds(StatisticsRing):
    def step(self, actions):
        *outputs, info = super().step(actions)
        for part in ("r", "l"):
            if "episode" in info:
                info["episode"][f"_{part}"] = info["_episode"] = np.ones(self.num_rings, np.bool_)
        return *outputs, info


@planted("K28")
class MaskInFinalInfoIsNeverCleared(StatisticsRing):
    def step(self, actions):
        *outputs, info = super().step(actions)
        if "final_info" in info:
            self.sticky = getattr(self, "sticky", False) | info["_final_info"]
            info["final_info"]["_episode"] = self.sticky
        return *outputs, info


@planted("K28")
class FinalInfoOfTheNextStart(StatisticsRing):
    def final_info(self, last, statistics):
        return self.cell_info() | statistics


@planted("K28")
class FinalInfoOfTheStepBefore(StatisticsRing):
    def final_info(self, last, statistics):
        return self.before | statistics

    def step(self, actions):
        self.before = self.cell_info()
        return super().step(actions)


@planted("K28")
class FinalInfoAtTerminationsOnly(StatisticsRing):
    def step(self, actions):
        *outputs, info = super().step(actions)
        if "final_info" in info:
            info["_final_info"] = info["_final_info"] & outputs[2]
        return *outputs, info


@planted("K11")
class OutOfItsSpaceWithExtremeActions(Ring):
    def move(self, goes, moves):
        self.run = np.where(moves == 1, getattr(self, "run", 0) + 1, 0)
        super().move(goes, moves)

    def observe(self):
        rows = super().observe()
        rows[:, 3] += np.where(getattr(self, "run", np.zeros_like(self.cell)).reshape(-1) > 25, CELLS, 0)
        return rows


@planted("K11")
class SpaceBecomesNarrower(Ring):
    def autoreset(self, chosen):
        super().autoreset(chosen)
        if self.elapsed_steps > 30:
            self.single_observation_space = Box(-1, CELLS + 1, (4,), np.float32)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)


@planted("K11")
class MaskForbidsEverythingOnce(MaskedRing):
    def step(self, actions):
        *outputs, info = super().step(actions)
        info["action_mask"][1] &= self.elapsed_steps != 20
        return *outputs, info


@planted("K14")
class MissingPartIsZero(DictActionRing):
    def checked_moves(self, actions):
        if isinstance(actions, dict) and set(actions) == {"rest"}:
            actions = {"move": np.zeros(self.num_envs, np.int64), **actions}
        return super().checked_moves(actions)


@planted("K14")
class FurtherPartsIgnored(DictActionRing):
    def checked_moves(self, actions):
        if isinstance(actions, dict) and isinstance(actions.get("rest"), tuple):
            actions = {**actions, "rest": actions["rest"][:1]}
        return super().checked_moves(actions)


@planted("K14")
class PartsAreClipped(DictActionRing):
    def checked_moves(self, actions):
        if isinstance(actions, dict) and getattr(actions.get("move"), "dtype", None) == np.int64:
            actions = {**actions, "move": np.clip(actions["move"], 0, 2)}
        return super().checked_moves(actions)


@planted("K17")
class DrawsFromItsActionSpace(Ring):
    def reset_seed(self, seed, chosen):
        super().reset_seed(seed, chosen)
        self.action_space.seed(seed % 2**31)

    def observe(self):
        rows = super().observe()
        rows[:, 3] = self.action_space.sample()
        return rows


@planted("K18")
class EveryEpisodeKept(Ring):
    def autoreset(self, chosen):
        self.history = getattr(self, "history", [])
        self.history += self.time[chosen].tolist()
        self.history += [float(cell) for cell in self.cell[chosen, 0]]
        super().autoreset(chosen)


@planted("K18", mode=DISABLED)
class EveryResetKept(Ring):
    def reset(self, *, seed=None, options=None):
        outputs = super().reset(seed=seed, options=options)
        self.history = [*getattr(self, "history", []), outputs[0]]
        return outputs


@planted("K21")
class StateIsACopy(StatefulRing):
    load_state_dict = None

    @property
    def state(self):
        return {name: array.copy() for name, array in super().state.items()}


@planted("K21")
class RowsOfTheStateReversed(StatefulRing):
    def state_dict(self):
        return {name: array[::-1].copy() for name, array in self.state.items()}

    def load_state_dict(self, state):
        super().load_state_dict({name: array[::-1] for name, array in state.items()})


@planted("K25")
class StateDictDraws(StatefulRing):
    def state_dict(self):
        self.draw(np.ones(self.num_rings, np.bool_))
        return super().state_dict()
