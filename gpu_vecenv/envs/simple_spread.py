"""Agents that cover landmarks together without running into each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from gpu_vecenv.drawing import BLACK, BLUE, Drawing, discs, square_around
from gpu_vecenv.env import Env, Field, f32, i32, param


@dataclass(frozen=True, kw_only=True)
class SimpleSpread(Env):
    """The rules and defaults of MPE2's simple_spread_v3."""

    num_agents: int = param(3, low=1)  # agents, and as many landmarks
    local_ratio: float = param(0.5, low=0, high=1)  # weight of an agent's own reward; the shared one has the rest
    max_steps: int = param(25, low=1)  # ticks until the episode is truncated
    continuous_actions: bool = False  # actions: True, five forces in [0, 1]; False, one of five choices
    curriculum: bool = False  # True: collisions cost nothing while the state field curriculum_stage is 0
    terminate_on_success: bool = False  # True: the episode ends once every landmark is covered
    num_agent_neighbors: int | None = param(None, low=1)  # nearest other agents that are seen; None: all
    num_landmark_neighbors: int | None = param(None, low=1)  # nearest landmarks that are seen; None: all

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten ticks
        Field("landmark", f32, ("num_landmarks", 2)),
        Field("curriculum_stage", i32, shared=True),  # 0 or 1; without curriculum it does not matter
    )
    derived = ("see_all_agents", "see_all_landmarks", "num_seen_agents", "num_seen_landmarks")
    terminated_means = "every landmark was covered"
    render_fps = 10
    version = 3

    @property
    def roles(self) -> Mapping[str, int]:
        return {"agent": self.num_agents}

    @property
    def num_landmarks(self) -> int:
        """Landmarks of one replica."""
        return self.num_agents

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
    def obs_dim(self) -> int:
        return 4 + 2 * self.num_seen_landmarks + 4 * self.num_seen_agents

    @property
    def action_space(self) -> Box | Discrete:
        return Box(0, 1, (5,)) if self.continuous_actions else Discrete(5)  # nothing, left, right, down, up

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"curriculum_stage": np.zeros((), np.int32)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        agents = discs(state["position"], 0.15, BLUE)
        shapes = [*agents, *discs(state["landmark"], 0.05, BLACK)]  # one sees which landmarks are covered
        return Drawing(square_around(shapes, 1.2), shapes)
