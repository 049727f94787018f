"""skirmish: an army of agents fights an army that a script commands. Units and scenarios are in armies.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Discrete

from gpu_vecenv.declare.drawing import BLUE, GOLD, GREEN, GREY, PALE, RED, WHITE, Circle, Drawing, Line, Polygon, blend
from gpu_vecenv.declare.env import Entities, Env, Field, Own, boolean, f32, i32, param
from gpu_vecenv.envs.armies import UNITS, armies_of

FIRST_ATTACK = 5  # of the actions
RUN = {"num_envs": 128, "total_steps": 5_000_000, "num_steps": 80, "hidden_sizes": (128, 128)}
LEARNING = {"learning_rate": 1e-3, "final_entropy_coefficient": 0.0, "normalize_returns": True, "shared_trunk": False}

Q_RUN = {**RUN, "num_steps": 16, "num_epochs": 4, "num_minibatches": 16}
Q_LEARNING = {"learning_rate": 5e-4, "gamma": 0.99, "q_lambda": 0.5, "final_epsilon": 0.05}


@dataclass(frozen=True, kw_only=True)
class Skirmish(Env):
    """Allies fight a scripted army. Rules and defaults of JaxMARL 0.2.0's HeuristicEnemySMAX."""

    scenario: str = "3s5z"  # the armies: 3s5z against its like, 5m_vs_6m, or N units at random: smacv2_N_units
    map_width: float = param(32.0, low=1.0, high=1e6)  # from wall to wall
    map_height: float = param(32.0, low=1.0, high=1e6)  # from wall to wall
    start_spread: float = param(2.0, low=0, high=1e6)  # the farthest from its group that a unit starts, on each axis
    max_steps: int = param(100, low=1)  # steps until the episode is truncated
    world_steps_per_env_step: int = param(8, low=1, high=1000)  # moves and attacks in one step
    time_per_step: float = param(0.0625, low=1e-6, high=1e3)  # seconds, of a move
    walls_cause_death: bool = True  # False: walls only stop units
    won_battle_bonus: float = 1.0  # added to all rewards once all enemies are dead and an ally is alive
    enemy_shoots: bool = True  # False: enemies follow agents and attack nobody
    attack_mode: Literal["closest", "random"] = "closest"  # whom of the units in its range an enemy attacks
    see_enemy_actions: bool = True  # False: agents do not see what enemies did last
    observed_units: int | Literal["all"] = param("all", low=1)  # nearest visible allies, and enemies, or all by number

    state = (
        Field("position", f32, ("num_units", 2)),  # allies, then enemies
        Field("health", f32, ("num_units",)),  # 0 of the dead
        Field("cooldown", f32, ("num_units",)),  # seconds until the unit can attack, which it can from 0 down
        Field("unit_type", i32, ("num_units",)),  # row of unit_stats
        Field("action", i32, ("num_units",)),  # the last one; enemies count their targets from the last ally on
        Field("goal", f32, ("num_enemies", 2)),  # where an enemy goes that sees no ally
        Field("prey", i32, ("num_enemies",)),  # the ally that an enemy attacks, or -1
        Field("won", boolean),  # all enemies are dead and an ally is alive
        Field("world", f32, ("world_size",)),  # what a central critic sees
        Field("unit_stats", f32, ("num_types", "num_stats"), shared=True),  # one row per type of units
        Field("army", i32, ("num_units",), shared=True),  # types of all units, if they are not drawn
    )
    derived = (
        *("num_allies", "num_enemies", "drawn_armies", "attacks_closest"),
        *("observe_all", "num_seen_allies", "num_seen_enemies"),
    )
    num_types, num_stats = len(UNITS), len(UNITS["m"])
    masks_actions = team_reward = True
    noop = 4
    critic_state = ("world",)
    state_metrics = ("won",)
    termination_label = "one army was destroyed"
    render_fps = 10
    obs_staging_bytes = 48 << 10
    preset = MappingProxyType({**RUN, **LEARNING})
    algorithm_presets = MappingProxyType({"pqn-vdn": {**Q_RUN, **Q_LEARNING}})

    def validate(self) -> None:
        armies_of(self.scenario)

    armies = property(lambda self: armies_of(self.scenario))
    num_allies = property(lambda self: len(self.armies.allies))
    num_enemies = property(lambda self: len(self.armies.enemies))
    num_units = property(lambda self: self.num_allies + self.num_enemies)
    world_size = property(lambda self: 12 * self.num_units)
    drawn_armies = property(lambda self: self.armies.drawn)
    attacks_closest = property(lambda self: self.attack_mode == "closest")
    observe_all = property(lambda self: self.observed_units == "all")
    num_seen_allies = property(lambda self: self.num_allies - 1 if self.observe_all else self.observed_units)
    num_seen_enemies = property(lambda self: self.num_enemies if self.observe_all else self.observed_units)

    @property
    def roles(self) -> Mapping[str, int]:
        return {"ally": self.num_allies}

    @property
    def obs_parts(self) -> tuple[Own | Entities, ...]:
        seen = {"ally": self.num_seen_allies, "enemy": self.num_seen_enemies}
        own = Own("health", 1), Own("position", 2), Own("cooldown", 1), Own("unit_type", 6)
        return (*(Entities(army, count, 13, presence=0) for army, count in seen.items()), *own)

    @property
    def action_space(self) -> Discrete:
        return Discrete(FIRST_ATTACK + self.num_seen_enemies)  # north, east, south, west, stop, attack one of these

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        armies = self.armies
        return {"unit_stats": np.array([*UNITS.values()], f32), "army": np.array(armies.allies + armies.enemies, i32)}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        width, height, stats = self.map_width, self.map_height, state["unit_stats"][state["unit_type"]]
        shapes: list[Any] = [Line([(0, 0), (width, 0), (width, height), (0, height), (0, 0)], width / 150, GREY)]
        alive, colours = state["health"] > 0, [BLUE] * self.num_allies + [RED] * self.num_enemies
        for i in np.argsort(alive, kind="stable"):  # the dead first: others walk over them
            (x, y), radius, colour = state["position"][i], stats[i][4], colours[i]
            owner = int(i) if i < self.num_allies else None
            if not alive[i]:
                shapes.append(Circle(x, y, radius, blend(colour, WHITE, 0.85), owner))
                continue
            shapes.append(Circle(x, y, radius, colour, owner))
            kind = int(state["unit_type"][i])
            if kind:  # marines bear no mark, others as many corners as their type's number and two
                turns = np.arange(kind + 2) / (kind + 2) * 2 * np.pi + np.pi / 2
                corners = np.stack([x + 0.55 * radius * np.cos(turns), y + 0.55 * radius * np.sin(turns)], 1)
                shapes.append(Polygon(corners, blend(colour, WHITE, 0.6)))
            target = self._target(state, int(i))
            if target is not None and alive[target]:
                shapes.append(Line([(x, y), state["position"][target]], width / 500, blend(colour, GOLD, 0.5)))
            share, top = min(state["health"][i] / stats[i][5], 1.0), y + 1.25 * radius
            ends = [(x - radius, top), (x + radius, top), (x - radius + 2 * radius * share, top)]
            shapes += [Line(ends[:2], radius / 4, PALE), Line(ends[::2], radius / 4, blend(RED, GREEN, share))]
        margin = max(width, height) / 40
        return Drawing((-margin, width + margin, -margin, height + margin), shapes)

    def _target(self, state: Mapping[str, np.ndarray[Any, Any]], unit: int) -> int | None:
        """The unit that an enemy attacked last, or an agent if it chooses among all enemies."""
        target = int(state["action"][unit]) - FIRST_ATTACK
        if target < 0 or (unit < self.num_allies and not self.observe_all):
            return None
        return int(self.num_allies + (target if unit < self.num_allies else -1 - target))
