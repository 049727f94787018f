"""simple_spread: agents cover landmarks and avoid collisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_vecenv.declare.drawing import BLACK, BLUE, Drawing, discs, square_bounds
from gpu_vecenv.declare.env import Entities, Field, Own, f32, i32, param
from gpu_vecenv.envs.particles import Particles, curriculum_methods


@dataclass(frozen=True, kw_only=True)
class SimpleSpread(Particles):
    """Agents spread over landmarks without collisions. Rules and defaults of MPE2's simple_spread_v3."""

    num_agents: int = param(3, low=1)  # agents, and as many landmarks
    local_ratio: float = param(0.5, low=0, high=1)  # weight of an agent's own reward; the shared one has the rest
    curriculum: bool = False  # True: no penalty for collisions while the state field curriculum_stage is 0
    terminate_on_success: bool = False  # True: the episode ends once every landmark is covered

    state = (
        Field("position", f32, ("num_agents", 2)),
        Field("velocity", f32, ("num_agents", 2)),  # per unit of time, ten steps
        Field("landmark", f32, ("num_landmarks", 2)),
        Field("curriculum_stage", i32, shared=True),  # 0 or 1; used only with curriculum
    )
    termination_label = "every landmark was covered"
    preset = MappingProxyType({**Particles.preset, "num_minibatches": 16})
    # Of JaxMARL's baselines/QLearning/config/alg/pqn_vdn_ff_mpe.yaml.
    algorithm_presets = MappingProxyType(
        {
            "pqn-vdn": {
                "num_envs": 256,
                "total_steps": 2_000_000,
                "num_steps": 16,
                "num_epochs": 4,
                "num_minibatches": 16,
                "optimizer": "radam",
                "learning_rate": 5e-4,
                "final_learning_rate": None,
                "gamma": 0.9,
                "q_lambda": 0.3,
                "max_grad_norm": 1.0,
                "final_epsilon": 0.1,
                "hidden_sizes": (256, 256),
            }
        }
    )

    reference_arguments = MappingProxyType({**Particles.reference_arguments, "N": "num_agents"})
    reference_methods = curriculum_methods(2)

    @property
    def roles(self) -> Mapping[str, int]:
        return {"agent": self.num_agents}

    @property
    def num_landmarks(self) -> int:
        """Landmarks of one environment."""
        return self.num_agents

    @property
    def obs_parts(self) -> tuple[Own | Entities, ...]:
        return (
            Own("velocity", 2),
            Own("position", 2),
            Entities("landmark", self.num_observed_landmarks, 2),
            Entities("agent", self.num_observed_agents, 2),
            Entities("agent", self.num_observed_agents, 2),  # what they say: zeros
        )

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {"curriculum_stage": np.zeros((), np.int32)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        agents = discs(state["position"], 0.15, BLUE, range(self.num_agents))
        shapes = [*agents, *discs(state["landmark"], 0.05, BLACK)]  # on top: covered landmarks stay visible
        return Drawing(square_bounds(shapes, 1.2), shapes)
