"""Base of the particle games of MPE2; their device code shares particles.cuh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from gymnasium.spaces import Box, Discrete

from gpu_vecenv.declare.env import Env, FixedArgument, param


def curriculum_methods(stages: int) -> Mapping[str, Callable[..., None]]:
    """mpe2's methods that change ``curriculum_stage``, a shared field in [0, stages - 1]."""

    def set_curriculum_stage(state: Mapping[str, Any], stage: int) -> None:
        """Set the stage; one outside the range becomes the nearest one."""
        state["curriculum_stage"].fill_(max(0, min(stage, stages - 1)))

    def advance_curriculum(state: Mapping[str, Any]) -> None:
        """Set the next stage; the last one stays."""
        set_curriculum_stage(state, int(state["curriculum_stage"]) + 1)

    return MappingProxyType({"set_curriculum_stage": set_curriculum_stage, "advance_curriculum": advance_curriculum})


@dataclass(frozen=True, kw_only=True)
class Particles(Env):
    """Agents among landmarks on an unbounded plane. Abstract: a subclass declares roles and landmarks."""

    max_steps: int = param(25, low=1)  # steps until the episode is truncated
    continuous_actions: bool = False  # actions: True, five forces in [0, 1]; False, one of five choices
    num_agent_neighbors: int | None = param(None, low=1)  # nearest other agents in an observation; None: all
    num_landmark_neighbors: int | None = param(None, low=1)  # nearest landmarks in an observation; None: all

    derived: ClassVar[tuple[str, ...]] = (
        "num_landmarks",
        "observe_all_agents",
        "observe_all_landmarks",
        "num_observed_agents",
        "num_observed_landmarks",
    )
    render_fps: ClassVar[int] = 10
    noop = 0
    preset = MappingProxyType(
        {
            "num_envs": 512,
            "total_steps": 8_000_000,
            "num_steps": 25,
            "learning_rate": 0.001,
            "gamma": 0.95,
            "final_entropy_coefficient": 0.0,
            "hidden_sizes": (128, 128),
            "normalize_returns": True,
            "shared_trunk": False,
        }
    )
    reference_arguments = MappingProxyType(
        {
            **Env.reference_arguments,
            "dynamic_rescaling": FixedArgument(True, "agents and landmarks are drawn to the scale of the picture"),
            "benchmark_data": FixedArgument(False, "infos hold no benchmark data"),
        }
    )
    version: ClassVar[int] = 3

    @property
    def num_landmarks(self) -> int:
        """Landmarks of one environment."""
        raise NotImplementedError

    @property
    def observe_all_agents(self) -> bool:
        """Whether an observation lists every other agent."""
        return self.num_agent_neighbors is None

    @property
    def observe_all_landmarks(self) -> bool:
        """Whether an observation lists every landmark."""
        return self.num_landmark_neighbors is None

    @property
    def num_observed_agents(self) -> int:
        """Other agents in one observation."""
        return self.num_agents - 1 if self.num_agent_neighbors is None else self.num_agent_neighbors

    @property
    def num_observed_landmarks(self) -> int:
        """Landmarks in one observation."""
        return self.num_landmarks if self.num_landmark_neighbors is None else self.num_landmark_neighbors

    @property
    def action_space(self) -> Box | Discrete:
        return Box(0, 1, (5,)) if self.continuous_actions else Discrete(5)  # no action, left, right, down, up
