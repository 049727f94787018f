"""Agents that cover a goal which their adversary must not make out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.drawing import BLUE, GREEN, GREY, RED, Drawing, discs, square_around
from gpu_vecenv.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class SimpleAdversary(Env):
    """The rules and defaults of MPE2's simple_adversary_v3."""

    num_good: int = param(2, low=1)  # agents that know the goal, and as many landmarks
    max_steps: int = param(25, low=1)  # ticks until the episode is truncated
    continuous_actions: bool = False  # actions: True, five forces in [0, 1]; False, one of five choices
    num_agent_neighbors: int | None = param(None, low=1)  # nearest other agents that are seen; None: all
    num_landmark_neighbors: int | None = param(None, low=1)  # nearest landmarks that are seen; None: all

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten ticks
        Field("landmark", f32, ("num_landmarks", 2)),
        Field("goal", i32),  # number of the landmark that is the goal
    )
    derived = ("see_all_agents", "see_all_landmarks", "num_seen_agents", "num_seen_landmarks")
    render_fps = 10
    version = 3

    @property
    def roles(self) -> Mapping[str, int]:
        return {"adversary": 1, "agent": self.num_good}

    @property
    def num_landmarks(self) -> int:
        """Landmarks of one replica."""
        return self.num_good

    @property
    def see_all_agents(self) -> bool:
        """Whether an observation lists every other agent."""
        return self.num_agent_neighbors is None

    @property
    def see_all_landmarks(self) -> bool:
        """Whether an observation lists every landmark."""
        return self.num_landmark_neighbors is None

    @property
    def num_seen_agents(self) -> int:
        """Places for other agents in one observation."""
        return self.num_agents - 1 if self.num_agent_neighbors is None else self.num_agent_neighbors

    @property
    def num_seen_landmarks(self) -> int:
        """Places for landmarks in one observation."""
        return self.num_landmarks if self.num_landmark_neighbors is None else self.num_landmark_neighbors

    @property
    def obs_dim(self) -> Mapping[str, int]:
        places = 2 * self.num_seen_landmarks + 2 * self.num_seen_agents
        return {"adversary": places, "agent": places + 2}

    @property
    def action_space(self) -> Box | Discrete:
        return Box(0, 1, (5,)) if self.continuous_actions else Discrete(5)  # nothing, left, right, down, up

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        adversary, agents = np.split(state["position"], [1])
        shapes = discs(agents, 0.15, BLUE) + discs(adversary, 0.15, RED)
        shapes += discs(state["landmark"], 0.08, GREY)
        shapes += discs(state["landmark"][[state["goal"]]], 0.08, GREEN)
        return Drawing(square_around(shapes, 1.2), shapes)
