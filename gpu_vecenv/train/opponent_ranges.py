"""Which environments play against opponents, who learns in them, and whom each kind of opponent can play there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.fixed_policy import STILL, noop_of
from gpu_vecenv.train.opponents_config import SNAPSHOTS, Opponent, OpponentsConfig
from gpu_vecenv.train.role_view import agents_of, sides_of_game


class Side(NamedTuple):
    """Agents that play together: those of a role, or one agent in a game of one role."""

    name: str
    agents: frozenset[int]


def opponent_sides(game: Env) -> list[Side]:
    """The sides of a game. Raises ConfigError if it has one agent."""
    names = sides_of_game(game)
    if len(names) < 2:
        raise ConfigError(f"{type(game).__name__} has one agent; expected a game of several with opponents=…")
    return [Side(name, frozenset(agents_of(game, [name]))) for name in names]


def preset_opponents(game: Env, num_envs: int | None) -> OpponentsConfig | None:
    """The opponents that a game's preset has, with fewer ranges where there are few environments.

    Args:
        game: The game.
        num_envs: Environments in all; None where they are not known yet.

    Returns:
        None where the preset of the game's version has none, or each side would not have a range of one environment.
    """
    if not game.own_preset_opponents:
        return None
    config = OpponentsConfig(**game.own_preset_opponents)
    if num_envs is None:
        return config
    ranges = min(config.num_ranges, int(config.share * num_envs))
    return dataclasses.replace(config, num_ranges=ranges) if ranges >= len(opponent_sides(game)) else None


class Ranges:
    """Contiguous ranges of the last environments, each with a side that learns.

    Attributes:
        first: The first environment of the first range; those before it have no opponents.
        size: Environments of a range.
        sides: Those that learn in some range; range r has ``sides[r % len(sides)]``.
        plays: Kind of opponents -> for each of the sides the agents that such an opponent plays, maybe none.

    Args:
        config: The opponents.
        game: The game.
        num_envs: Environments in all.
        trained: Trained policy -> its agents.
        whole: Of them those whose agents cannot be divided between sides.

    Raises:
        ConfigError: There are too few environments, the game has no sides or lacks what an opponent needs, or an
            opponent cannot play against any side that learns.
    """

    def __init__(
        self,
        config: OpponentsConfig,
        game: Env,
        num_envs: int,
        trained: Mapping[str, Sequence[int]],
        whole: Sequence[str] = (),
    ) -> None:
        agents = frozenset(agent for own in trained.values() for agent in own)
        everyone = frozenset(range(game.layout.num_agents))
        sides = [side for side in opponent_sides(game) if side.agents <= agents]
        for name in whole:
            own = frozenset(trained[name])
            if divided := [side.name for side in sides if side.agents & own and not own <= side.agents]:
                raise ConfigError(
                    f"the policy of {name} is a team's, whose agents learn together, but {divided[0]} would learn "
                    "alone against opponents; expected policies of the agents of one role"
                )
        self.plays: dict[str, list[frozenset[int]]] = {}
        for member, name in zip(config.members, config.names, strict=True):
            own = agents if name == SNAPSHOTS else everyone  # frozen policies have no snapshots
            if isinstance(member, Opponent):
                own = frozenset(agents_of(game, [part for key in member.actors for part in key.split("+")]))
            self.plays[name] = [own - side.agents for side in sides]
            if not any(self.plays[name]):
                learning = ", ".join(side.name for side in sides) or "none"
                raise ConfigError(f"opponent {name!r} plays against no side that learns; these are {learning}")
            if name == STILL:
                for role in game.layout.present_roles:
                    noop_of(game, role)  # raises
        kept = [k for k in range(len(sides)) if any(own[k] for own in self.plays.values())]
        self.sides = [sides[k] for k in kept]
        self.plays = {name: [own[k] for k in kept] for name, own in self.plays.items()}
        self.count = config.num_ranges
        if self.count < len(self.sides):
            names = ", ".join(side.name for side in self.sides)
            raise ConfigError(
                f"OpponentsConfig.num_ranges is {self.count}; expected at least one for each side that learns: {names}"
            )
        self.size = int(config.share * num_envs) // self.count
        if self.size < 1:
            raise ConfigError(
                f"OpponentsConfig.share is {config.share}, which of {num_envs} environments is "
                f"{int(config.share * num_envs)}, and OpponentsConfig.num_ranges is {self.count}; expected at least "
                "one environment for each range: more environments, a larger share or fewer ranges"
            )
        self.first = num_envs - self.count * self.size

    def side(self, number: int) -> int:
        """The side that learns in a range, as an index of ``sides``."""
        return number % len(self.sides)

    def envs(self, number: int) -> slice:
        """The environments of a range."""
        return slice(self.first + number * self.size, self.first + (number + 1) * self.size)
