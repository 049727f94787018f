"""RoleView: the parts of a game's tensors that belong to some roles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError


class RoleView:
    """The parts of a game's tensors that belong to the agents of some roles.

    ``agents`` is their slice of the agent axis, ``obs_slice`` the slices of the observation axes that they use,
    ``obs_parts`` the parts of their observations (None if they declare none, or different ones), ``parameter_columns``
    their columns of the parameter axis, ``continuous`` whether they have a Box, ``head_sizes`` the choices of each of
    their heads (empty for a Box), ``bounds`` those of their Box.

    Raises:
        ConfigError: The roles are unknown, not adjacent, or differ in observations or actions.
    """

    def __init__(self, game: Env, roles: Sequence[str], device: torch.device | None = None) -> None:
        name, known = type(game).__name__, list(game.layout.roles)
        if unknown := [role for role in roles if role not in known]:
            raise ConfigError(f"unknown role {', '.join(map(repr, unknown))} of {name}; the roles are {known}")
        first, action = roles[0], game.layout.action
        for role in roles:
            kinds = {name: (action.sizes[name], action.bounds.get(name)) for name in (role, first)}
            shapes, spaces = game.layout.observation.shapes, action.spaces
            if shapes[role] != shapes[first] or kinds[role] != kinds[first]:
                raise ConfigError(
                    f"{role!r} of {name} has observations {shapes[role]} and actions {spaces[role]}, {first!r} has "
                    f"{shapes[first]} and {spaces[first]}; expected equal ones: configure one policy for each"
                )
        slices = [game.layout.role_slices[role] for role in roles]
        if any(after.start != before.stop for before, after in pairwise(slices)):
            raise ConfigError(
                f"a policy cannot be shared by {' and '.join(roles)} of {name}; expected adjacent "
                f"roles in the order of {known}"
            )
        self.roles, self.agents = tuple(roles), slice(slices[0].start, slices[-1].stop)
        self.num_agents = self.agents.stop - self.agents.start
        self.obs_slice, self.obs_shape = game.layout.observation.own(first), game.layout.observation.shapes[first]
        parts = [game.layout.observation.parts.get(role) for role in roles]
        self.obs_parts = parts[0] if all(part == parts[0] for part in parts) else None
        self.continuous, self.num_heads = first in action.bounds, len(action.sizes[first])
        self.bounds = action.bounds.get(first, ((), ()))
        self.head_sizes = () if self.continuous else action.sizes[first]
        self.parameter_columns: slice | torch.Tensor = slice(0, 2 * self.num_heads)
        if not self.continuous:
            widest, offset, columns = action.head_sizes, 0, list[int]()
            for head, size in enumerate(self.head_sizes):
                columns += range(offset, offset + size)
                offset += widest[head]
            whole = columns == list(range(len(columns)))
            self.parameter_columns = slice(0, len(columns)) if whole else torch.tensor(columns, device=device)
        self.num_parameters = 2 * self.num_heads if self.continuous else sum(self.head_sizes)

    def obs(self, rows: torch.Tensor) -> torch.Tensor:
        """These agents' observations (num_envs, count, *obs_shape), a view of (num_envs, num_agents, *shape)."""
        return rows[(slice(None), self.agents, *self.obs_slice)]

    def mask(self, action_mask: torch.Tensor | None) -> torch.Tensor | None:
        """These agents' columns of a game's masks (…, num_logits); None for a Box, which has no choices to mask."""
        return None if action_mask is None or self.continuous else action_mask[..., self.parameter_columns]
