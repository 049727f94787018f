"""Tag on a square: many taggers chase many runners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import MultiDiscrete

from gpu_vecenv.declare.drawing import BLACK, BLUE, GREY, RED, WHITE, Circle, Drawing, Line, blend, discs
from gpu_vecenv.declare.env import Entities, Env, Field, OtherVersion, Own, boolean, f32, param
from gpu_vecenv.errors import ConfigError

PRESET_V0 = MappingProxyType(
    {
        "num_envs": 64,
        "total_steps": 1_500_000,
        "num_steps": 64,
        "learning_rate": 0.001,
        "gamma": 0.98,
        "final_entropy_coefficient": 0.0,
        "hidden_sizes": (128, 128),
        "normalize_obs": True,
        "normalize_returns": True,
        "shared_trunk": False,
        "precision": "tf32",
    }
)


@dataclass(frozen=True, kw_only=True)
class TagContinuous(Env):
    """Agents accelerate and turn; a runner nearer to a tagger than tagging_distance is tagged and leaves the game."""

    num_taggers: int = param(10, low=1)  # agents that chase
    num_runners: int = param(100, low=1)  # agents that flee
    side: float = param(20.0, low=1e-3, high=1e9)  # of the square
    max_steps: int = param(500, low=1)  # steps until the episode is truncated
    max_speed: float = param(1.0, low=1e-6)  # per step, before the skill factor
    tagger_skill: float = param(1.0, low=0)  # factor on max_speed
    runner_skill: float = param(1.0, low=0)  # factor on max_speed
    min_acceleration: float = -0.1  # per step, lowest level
    max_acceleration: float = 0.1  # per step, highest level
    acceleration_levels: int = param(20, low=1)  # besides "no change"
    min_turn: float = param(-2.356, low=-6.283, high=6.283)  # rad per step, lowest level
    max_turn: float = param(2.356, low=-6.283, high=6.283)  # rad per step, highest level
    turn_levels: int = param(20, low=1)  # besides "no change"
    num_neighbors: int | Literal["all"] = param(10, low=1)  # nearest other agents in an observation, or "all"
    egocentric: bool = True  # agents observe themselves, and others in their own frame; False: as in version 0
    tagging_distance: float = param(0.02, low=0, high=1e3)  # as a fraction of side
    tag_reward: float = 10.0  # to the nearest tagger, for each runner it tags
    tag_penalty: float = -10.0  # to a tagged runner
    tagger_step_reward: float = 0.0  # to every tagger, every step
    runner_step_reward: float = 0.0  # to every runner in game, every step
    edge_penalty: float = 0.0  # added when the edge stops an agent
    survival_reward: float = 1.0  # to every runner still in game at the last step
    runner_leaves_when_tagged: bool = True  # False: tagged runners play on

    state = (
        Field("position", f32, ("num_agents", 2)),  # in [0, side]
        Field("heading", f32, ("num_agents",)),  # rad, in [0, 2 pi)
        Field("speed", f32, ("num_agents",)),  # per step
        Field("acceleration", f32, ("num_agents",)),  # per step
        Field("in_game", boolean, ("num_agents",)),  # False once tagged
        Field("acceleration_level", f32, ("num_acceleration_actions",), shared=True),  # per step
        Field("turn_level", f32, ("num_turn_actions",), shared=True),  # rad
    )
    derived = ("num_observed", "observe_all")
    termination_label = "every runner was tagged"
    version = 1
    other_versions = MappingProxyType({0: OtherVersion(config={"egocentric": False}, preset=PRESET_V0)})
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 15_000_000,
            "num_steps": 64,
            "num_minibatches": 32,
            "learning_rate": 0.0005,
            "gamma": 0.99,
            "final_entropy_coefficient": 0.0,
            "hidden_sizes": (128, 128),
            "normalize_obs": True,
            "normalize_returns": True,
            "shared_trunk": False,
            "precision": "tf32",
        }
    )
    # A tagger gains in nearly every episode, so that every opponent counts as beaten and "hard" sampling would draw
    # random play ever less. An opponent stays for three episodes of the usual length: 24 iterations of 64 steps.
    preset_opponents = MappingProxyType(
        {"members": ("snapshots", "random"), "share": 0.5, "sampling": "uniform", "reassign_interval": 24}
    )

    def validate(self) -> None:
        for low, high in (("min_acceleration", "max_acceleration"), ("min_turn", "max_turn")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(f"TagContinuous.{low} = {getattr(self, low)} exceeds {high} = {getattr(self, high)}")

    @property
    def roles(self) -> Mapping[str, int]:
        return {"tagger": self.num_taggers, "runner": self.num_runners}

    @property
    def observe_all(self) -> bool:
        """Whether an observation lists every other agent."""
        return self.num_neighbors == "all"

    @property
    def num_observed(self) -> int:
        """Agents in one observation."""
        return self.num_agents - 1 if self.num_neighbors == "all" else self.num_neighbors

    @property
    def obs_parts(self) -> tuple[Own | Entities, ...]:
        if self.egocentric:
            others = Entities("other", self.num_observed, 7, presence=5, by_feature=True)
            own = Own("heading", 2), Own("speed", 1), Own("acceleration", 1), Own("position", 2), Own("time", 1)
            return (others, *own)
        return (Entities("other", self.num_observed, 7, presence=6, by_feature=True), Own("time", 1))

    @property
    def num_acceleration_actions(self) -> int:
        """Choices of the first action head; 0 is "no change"."""
        return self.acceleration_levels + 1

    @property
    def num_turn_actions(self) -> int:
        """Choices of the second action head; 0 is "no change"."""
        return self.turn_levels + 1

    @property
    def action_space(self) -> MultiDiscrete:
        return MultiDiscrete([self.num_acceleration_actions, self.num_turn_actions])

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {
            "acceleration_level": _levels(self.min_acceleration, self.max_acceleration, self.acceleration_levels),
            "turn_level": _levels(self.min_turn, self.max_turn, self.turn_levels),
        }

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        side, size = (
            self.side,
            self.side / 90,
        )  # the radius of agents has no meaning; pale discs show the tagging distance
        position, heading, in_game = state["position"], state["heading"], state["in_game"]
        edge = Line([(0, 0), (side, 0), (side, side), (0, side), (0, 0)], side / 300, GREY)
        taggers = np.arange(self.num_agents) < self.num_taggers
        reach = discs(position[taggers], min(self.tagging_distance, 2.0) * side, blend(RED, WHITE, 0.85))
        tagged = discs(position[~in_game], size, blend(BLUE, WHITE, 0.75), np.flatnonzero(~in_game))
        agents: list[Circle | Line] = []
        for i in np.flatnonzero(in_game)[::-1]:  # taggers last
            x, y = position[i]
            ahead = x + 1.8 * size * np.cos(heading[i]), y + 1.8 * size * np.sin(heading[i])
            agents += [Line([(x, y), ahead], side / 200, BLACK), Circle(x, y, size, RED if taggers[i] else BLUE, i)]
        margin = 2.2 * size
        return Drawing((-margin, side + margin, -margin, side + margin), [*reach, edge, *tagged, *agents])


def _levels(low: float, high: float, count: int) -> np.ndarray[Any, Any]:
    """Index 0: no change; 1 … count: equally spaced, both ends included. float32, (count + 1,)."""
    return np.concatenate([[0.0], np.linspace(low, high, count)]).astype(np.float32)
