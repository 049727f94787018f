"""Slow adversaries that hunt fast agents among obstacles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.drawing import GREEN, GREY, RED, Drawing, discs, square_around
from gpu_vecenv.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class SimpleTag(Env):
    """The rules and defaults of MPE2's simple_tag_v3."""

    num_good: int = param(1, low=1)  # agents that flee
    num_adversaries: int = param(3, low=1)  # agents that chase
    num_obstacles: int = param(2, low=0)  # round bodies that stand in the way
    max_steps: int = param(25, low=1)  # ticks until the episode is truncated
    continuous_actions: bool = False  # actions: True, five forces in [0, 1]; False, one of five choices
    curriculum: bool = False  # True: the state field curriculum_stage says how fast good agents are
    terminate_on_success: bool = False  # True: the episode ends once every good agent is caught at the same time
    num_agent_neighbors: int | None = param(None, low=1)  # nearest other agents that are seen; None: all
    num_landmark_neighbors: int | None = param(None, low=1)  # nearest obstacles that are seen; None: all

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten ticks
        Field("landmark", f32, ("landmark_rows", 2)),  # places of the obstacles
        Field("speed_factor", f32),  # of good agents, on force and top speed; by the stage at which the episode began
        Field("curriculum_stage", i32, shared=True),  # 0, 1 or 2; without curriculum it does not matter
    )
    derived = ("num_landmarks", "see_all_agents", "see_all_landmarks", "num_seen_agents", "num_seen_landmarks")
    terminated_means = "every good agent was caught"
    render_fps = 10
    version = 3

    @property
    def roles(self) -> Mapping[str, int]:
        return {"adversary": self.num_adversaries, "agent": self.num_good}

    @property
    def num_landmarks(self) -> int:
        """Obstacles of one replica."""
        return self.num_obstacles

    @property
    def landmark_rows(self) -> int:
        """Rows of the landmark field, which cannot be empty: without obstacles there is one that nothing touches."""
        return max(1, self.num_obstacles)

    @property
    def see_all_agents(self) -> bool:
        """Whether an observation lists every other agent."""
        return self.num_agent_neighbors is None

    @property
    def see_all_landmarks(self) -> bool:
        """Whether an observation lists every obstacle."""
        return self.num_landmark_neighbors is None

    @property
    def num_seen_agents(self) -> int:
        """Places for other agents in one observation."""
        return self.num_agents - 1 if self.num_agent_neighbors is None else self.num_agent_neighbors

    @property
    def num_seen_landmarks(self) -> int:
        """Places for obstacles in one observation."""
        return self.num_landmarks if self.num_landmark_neighbors is None else self.num_landmark_neighbors

    @property
    def obs_dim(self) -> Mapping[str, int]:
        places = 4 + 2 * self.num_seen_landmarks + 2 * self.num_seen_agents
        if self.num_agent_neighbors is not None:  # a velocity for every agent in sight, an adversary's is 0
            return dict.fromkeys(self.roles, places + 2 * self.num_agent_neighbors)
        return {"adversary": places + 2 * self.num_good, "agent": places + 2 * (self.num_good - 1)}

    @property
    def action_space(self) -> Box | Discrete:
        return Box(0, 1, (5,)) if self.continuous_actions else Discrete(5)  # nothing, left, right, down, up

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"curriculum_stage": np.zeros((), np.int32)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        adversaries, agents = np.split(state["position"], [self.num_adversaries])
        shapes = discs(state["landmark"][: self.num_obstacles], 0.2, GREY)
        shapes += discs(adversaries, 0.075, RED) + discs(agents, 0.05, GREEN)
        return Drawing(square_around(shapes, 1.2), shapes)
