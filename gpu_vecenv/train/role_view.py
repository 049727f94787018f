"""RoleView: the parts of a game's tensors that belong to some roles, or to single agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError, nearest


def agents_of(game: Env, names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of the agents that names stand for, in the order of the game.

    A name is a role's, which stands for all of its agents, or an agent's, such as "tagger_0". Where a role has the name
    of an agent it is the role's.

    Raises:
        ConfigError: A name is neither, or an agent is named twice.
    """
    layout, found = game.layout, list[int]()
    for name in names:
        if name in layout.roles:
            where = layout.role_slices[name]
            found += range(where.start, where.stop)
        elif name in layout.agent_names:
            found.append(layout.agent_names.index(name))
        else:
            hint = f"; {nearest(name, layout.agent_names)}" if name.rpartition("_")[0] in layout.roles else ""
            raise ConfigError(
                f"unknown role {name!r} of {type(game).__name__}; the roles are {list(layout.roles)}{hint}"
            )
    if len(set(found)) < len(found):
        twice = next(agent for agent in found if found.count(agent) > 1)
        raise ConfigError(
            f"{'+'.join(names)} has {layout.agent_names[twice]} of {type(game).__name__} twice; expected each once"
        )
    return tuple(sorted(found))


def role_of(game: Env, name: str) -> str:
    """The role that ``name`` is, or that the agent of this name has."""
    layout = game.layout
    return name if name in layout.roles else layout.agent_roles[agents_of(game, [name])[0]]


def check_names(game: Env, roles: Sequence[str]) -> None:
    """Raise TypeError unless ``roles`` is a list or tuple of names."""
    known = list(game.layout.roles)
    check_kind("roles", roles, (tuple, list), f"a list of some of {known}, or of agents")
    for name in roles:
        check_kind("a name in roles", name, str, f"one of {known}, or an agent")


def sides_of_game(game: Env) -> tuple[str, ...]:
    """Names of those that play with or against each other: all roles that have agents, or of one role its agents."""
    present = tuple(game.layout.present_roles)
    return present if len(present) > 1 else tuple(game.layout.agent_names)


def sides_with_returns(game: Env) -> tuple[str, ...]:
    """Names of those whose mean returns say how well policies play: all roles.

    In a zero-sum game of one role these are its agents: the mean over the role is always 0.
    """
    roles = tuple(game.layout.roles)
    return tuple(game.layout.agent_names) if game.zero_sum and len(game.layout.present_roles) == 1 else roles


def check_each_agent_once(game: Env, names: Iterable[str], what: str = "policies") -> None:
    """Raise ConfigError unless each agent has one of the policies of these names, and each policy has agents.

    A name is a role, an agent, or several joined by "+"; ``what`` it names is for the message.
    """
    names, layout = list(names), game.layout
    roles = list(layout.present_roles)
    for name in names:
        check_kind(f"the name of one of the {what}", name, str, f'a role, or roles joined by "+": {roles}')
    own = [agents_of(game, name.split("+")) for name in names]
    if not all(own) or sorted(agent for agents in own for agent in agents) != list(range(layout.num_agents)):
        raise ConfigError(
            f"{what} are for {names}; expected each of the roles {roles} once, or each of their agents, such as "
            f"{layout.agent_names[0]!r}"
        )


class RoleView(nn.Module):
    """The parts of a game's tensors that belong to the agents of some roles, or to some agents.

    A module, so that its indices follow the policy that it is of to another device.

    Args:
        game: The game.
        names: Of roles and of agents, see ``agents_of``.
        device: Of the indices.

    Attributes:
        names: As they were given.
        name: The names, joined by "+".
        roles: Of the agents.
        agents: An index of the agents on their axis: a slice, or int64 where they are not consecutive.
        agent_numbers: Their numbers there, in ascending order.
        num_agents: How many they are.
        obs_slice: Slices of the observation axes that they use.
        obs_shape: Of an observation without padding.
        obs_parts: The parts of their observations; None if they declare none, or different ones.
        parameter_columns: Their columns of the parameter axis.
        num_parameters: Of their distributions.
        continuous: Whether they have a Box.
        head_sizes: The choices of each of their heads; empty for a Box.
        num_heads: Heads, or numbers of the Box.
        bounds: Of their Box.

    Raises:
        ConfigError: A name is unknown, an agent is named twice, or they differ in observations or actions.
    """

    agents: slice | torch.Tensor
    parameter_columns: slice | torch.Tensor
    _positions: torch.Tensor

    def __init__(self, game: Env, names: Sequence[str], device: torch.device | None = None) -> None:
        super().__init__()
        layout, action = game.layout, game.layout.action
        self.names, self.name, self.agent_numbers = tuple(names), "+".join(names), agents_of(game, names)
        named = dict.fromkeys(role_of(game, name) for name in names)
        self.roles = tuple(role for role in layout.roles if role in named)
        first = next(iter(named))
        for role in named:
            kinds = {name: (action.sizes[name], action.bounds.get(name)) for name in (role, first)}
            shapes, spaces = layout.observation.shapes, action.spaces
            if shapes[role] != shapes[first] or kinds[role] != kinds[first]:
                raise ConfigError(
                    f"{role!r} of {type(game).__name__} has observations {shapes[role]} and actions {spaces[role]}, "
                    f"{first!r} has {shapes[first]} and {spaces[first]}; expected equal ones: configure one policy for "
                    "each"
                )
        self.num_agents, numbers = len(self.agent_numbers), self.agent_numbers
        consecutive = slice(numbers[0], numbers[-1] + 1) if numbers else slice(0, 0)
        is_slice = consecutive.stop - consecutive.start == self.num_agents
        self._index("agents", consecutive if is_slice else list(numbers), device)
        positions = torch.zeros(layout.num_agents, dtype=torch.int64)
        positions[list(numbers)] = torch.arange(self.num_agents)
        self.register_buffer("_positions", positions.to(device), persistent=False)
        self.obs_slice, self.obs_shape = layout.observation.own(first), layout.observation.shapes[first]
        parts = [layout.observation.parts.get(role) for role in self.roles]
        self.obs_parts = parts[0] if all(part == parts[0] for part in parts) else None
        self.continuous, self.num_heads = first in action.bounds, len(action.sizes[first])
        self.bounds = action.bounds.get(first, ((), ()))
        self.head_sizes = () if self.continuous else action.sizes[first]
        own_columns: slice | list[int] = slice(0, 2 * self.num_heads)
        if not self.continuous:
            widest, offset, columns = action.head_sizes, 0, list[int]()
            for head, size in enumerate(self.head_sizes):
                columns += range(offset, offset + size)
                offset += widest[head]
            whole = columns == list(range(len(columns)))
            own_columns = slice(0, len(columns)) if whole else columns
        self._index("parameter_columns", own_columns, device)
        self.num_parameters = 2 * self.num_heads if self.continuous else sum(self.head_sizes)

    def obs(self, rows: torch.Tensor) -> torch.Tensor:
        """These agents' observations (num_envs, count, *obs_shape), of (num_envs, num_agents, *shape).

        A view if the agents are consecutive.
        """
        return rows[(slice(None), self.agents, *self.obs_slice)]

    def mask(self, action_mask: torch.Tensor | None) -> torch.Tensor | None:
        """These agents' columns of a game's masks (…, num_logits); None for a Box, which has no choices to mask."""
        return None if action_mask is None or self.continuous else action_mask[..., self.parameter_columns]

    def write_parameters(self, parameters: torch.Tensor, out: torch.Tensor) -> None:
        """Write parameters (num_envs, count, num_parameters) to the agents' rows and columns of (…, num_agents, n)."""
        agents, columns = self.agents, self.parameter_columns
        if isinstance(agents, torch.Tensor) and isinstance(columns, torch.Tensor):
            agents = agents[:, None]
        out[:, agents, columns] = parameters

    def positions(self) -> torch.Tensor:
        """The number of each of the game's agents among these, (num_agents of the game,) int64; 0 for others."""
        return self._positions

    def _index(self, name: str, index: slice | list[int], device: torch.device | None) -> None:
        if isinstance(index, slice):
            setattr(self, name, index)
        else:
            self.register_buffer(name, torch.tensor(index, device=device), persistent=False)
