"""simple_tag: slow adversaries chase fast agents among obstacles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_vecenv.declare.drawing import BLUE, GREY, RED, Drawing, discs, square_bounds
from gpu_vecenv.declare.env import Entities, Field, Own, f32, i32, param
from gpu_vecenv.envs.particles import Particles, curriculum_methods


@dataclass(frozen=True, kw_only=True)
class SimpleTag(Particles):
    """Slow adversaries chase a fast agent around obstacles. Rules and defaults of MPE2's simple_tag_v3."""

    num_good: int = param(1, low=1)  # agents that flee
    num_adversaries: int = param(3, low=1)  # agents that chase
    num_obstacles: int = param(2, low=0)  # discs at random positions
    curriculum: bool = False  # True: the state field curriculum_stage sets the speed of good agents
    terminate_on_success: bool = False  # True: the episode ends once every good agent is caught at the same time

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten steps
        Field("landmark", f32, ("landmark_rows", 2)),  # positions of the obstacles
        Field("speed_factor", f32),  # of good agents, on force and maximum speed; set by curriculum_stage at reset
        Field("curriculum_stage", i32, shared=True),  # 0, 1 or 2; used only with curriculum
    )
    termination_label = "every good agent was caught"
    preset = MappingProxyType({**Particles.preset, "num_minibatches": 25})
    reference_methods = curriculum_methods(3)

    @property
    def roles(self) -> Mapping[str, int]:
        return {"adversary": self.num_adversaries, "agent": self.num_good}

    @property
    def num_landmarks(self) -> int:
        """Obstacles of one environment."""
        return self.num_obstacles

    @property
    def landmark_rows(self) -> int:
        """Rows of the landmark field, which cannot be empty: without obstacles there is one unused row."""
        return max(1, self.num_obstacles)

    @property
    def obs_parts(self) -> Mapping[str, tuple[Own | Entities, ...]]:
        own = (Own("velocity", 2), Own("position", 2), Entities("landmark", self.num_observed_landmarks, 2))
        if not self.observe_all_agents:  # the nearest ones, of either role; velocities of adversaries are 0
            others = Entities("other", self.num_observed_agents, 2)
            return dict.fromkeys(self.roles, (*own, others, others))
        counts = {
            "adversary": (self.num_adversaries - 1, self.num_good),
            "agent": (self.num_adversaries, self.num_good - 1),
        }
        return {
            # The position of each, then velocities of good agents.
            role: (*own, Entities("adversary", adversaries, 2), Entities("agent", good, 2), Entities("agent", good, 2))
            for role, (adversaries, good) in counts.items()
        }

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"curriculum_stage": np.zeros((), np.int32)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        adversaries, agents = np.split(state["position"], [self.num_adversaries])
        shapes = discs(state["landmark"][: self.num_obstacles], 0.2, GREY)
        hunters, hunted = np.split(np.arange(self.num_agents), [self.num_adversaries])
        shapes += discs(adversaries, 0.075, RED, hunters) + discs(agents, 0.05, BLUE, hunted)
        return Drawing(square_bounds(shapes, 1.2), shapes)
