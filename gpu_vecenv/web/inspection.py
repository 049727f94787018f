"""What the page's inspector reads of a game: the parts of observations, and the state that central critics see."""

from __future__ import annotations

from typing import Any

from gpu_vecenv.declare.env import Env


def obs_parts_json(game: Env) -> dict[str, list[tuple[str, list[int]]]]:
    """Role -> the parts of its observation, (name, indices) in their order; without roles that declare none."""
    found = {}
    for role, parts in game.layout.observation.parts.items():
        rows = [(name, list(columns)) for name, columns in parts.own.items()]
        for entities in parts.entities:
            rows += [(f"{entities.name} {k}", list(columns)) for k, columns in enumerate(entities.columns)]
        found[role] = sorted(rows, key=lambda row: row[1])
    return found


def critic_state_json(game: Env) -> list[dict[str, Any]]:
    """The fields of a central critic's state in their order, ``of_agent`` where an agent's row alone; see ``Env``.

    Empty: it sees the observations of all agents.
    """
    layout = game.layout
    of_all = [{"name": name, "of_agent": False} for name in layout.critic_state]
    return of_all + [{"name": name, "of_agent": True} for name in layout.agent_critic_state]
