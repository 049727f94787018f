"""simple_adversary: good agents cover a goal landmark that their adversary does not observe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_vecenv.declare.drawing import BLACK, BLUE, GREY, RED, Drawing, discs, square_bounds
from gpu_vecenv.declare.env import Entities, Field, Own, f32, i32, param
from gpu_vecenv.envs.particles import Particles


@dataclass(frozen=True, kw_only=True)
class SimpleAdversary(Particles):
    """Agents reach a goal that an adversary does not know. Rules and defaults of MPE2's simple_adversary_v3."""

    num_good: int = param(2, low=1)  # agents that observe the goal, and as many landmarks

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten steps
        Field("landmark", f32, ("num_landmarks", 2)),
        Field("goal", i32),  # index of the goal landmark
    )

    reference_arguments = MappingProxyType({**Particles.reference_arguments, "N": "num_good"})

    @property
    def roles(self) -> Mapping[str, int]:
        return {"adversary": 1, "agent": self.num_good}

    @property
    def num_landmarks(self) -> int:
        """Landmarks of one environment."""
        return self.num_good

    @property
    def obs_parts(self) -> Mapping[str, tuple[Own | Entities, ...]]:
        landmarks, others = Entities("landmark", self.num_observed_landmarks, 2), self.num_observed_agents
        if not self.observe_all_agents:  # the nearest ones, of either role
            return {
                "adversary": (landmarks, Entities("other", others, 2)),
                "agent": (Own("goal", 2), landmarks, Entities("other", others, 2)),
            }
        return {
            "adversary": (landmarks, Entities("agent", self.num_good, 2)),
            "agent": (
                Own("goal", 2),
                landmarks,
                Entities("adversary", 1, 2),
                Entities("agent", self.num_good - 1, 2),
            ),
        }

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        adversary, agents = np.split(state["position"], [1])
        shapes = discs(agents, 0.15, BLUE, range(1, self.num_agents)) + discs(adversary, 0.15, RED, [0])
        shapes += discs(state["landmark"], 0.08, GREY)
        shapes += discs(state["landmark"][[state["goal"]]], 0.08, BLACK)
        return Drawing(square_bounds(shapes, 1.2), shapes)
