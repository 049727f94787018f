"""Parts of an observation vector: numbers about the agent itself, and lists of like entities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gpu_vecenv.declare.field import FIELD_NAME
from gpu_vecenv.errors import EnvDefinitionError


@dataclass(frozen=True)
class Own:
    """The next numbers of an observation: of the agent itself, or of the whole environment.

    Args:
        name: What they are, ``[a-z][a-z0-9_]*``.
        size: How many there are; 0 for none.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        _check_name(self)
        _check_int(self, "size", 0)


@dataclass(frozen=True)
class Entities:
    """The next numbers of an observation: a list of like entities, such as other agents, in no order that matters.

    Several parts of one name are features of the same entities.

    Args:
        name: What they are, ``[a-z][a-z0-9_]*``.
        count: Entities in the list; 0 for none.
        features: Numbers of each.
        presence: Index of the feature that is 0 where the list has no entity in a place; None: it has one everywhere.
        by_feature: Whether the first feature of all entities comes first, then the second of all; by default the
            features of an entity are consecutive.
    """

    name: str
    count: int
    features: int
    presence: int | None = None
    by_feature: bool = False

    def __post_init__(self) -> None:
        _check_name(self)
        _check_int(self, "count", 0)
        _check_int(self, "features", 1)
        if self.presence is not None:
            _check_int(self, "presence", 0, self.features - 1)
        if not isinstance(self.by_feature, bool):
            raise EnvDefinitionError(
                f"Entities {self.name!r} has by_feature {self.by_feature!r:.80}; expected True or False"
            )

    @property
    def size(self) -> int:
        """Numbers of all entities."""
        return self.count * self.features


Parts: TypeAlias = Sequence[Own | Entities]


@dataclass(frozen=True)
class EntityList:
    """A list of entities, by where its numbers are in an observation.

    Attributes:
        name: What they are.
        columns: (count, features): the index of each feature of each entity.
        presence: The feature that is 0 where there is no entity; None: there is one everywhere.
    """

    name: str
    columns: tuple[tuple[int, ...], ...]
    presence: int | None

    @property
    def count(self) -> int:
        """Entities in the list."""
        return len(self.columns)

    @property
    def features(self) -> int:
        """Numbers of each."""
        return len(self.columns[0])


@dataclass(frozen=True)
class ObservationParts:
    """The parts of a role's observation.

    Attributes:
        own: Name -> indices of these numbers in the observation.
        entities: Lists with at least one entity, in the order in which they begin.
    """

    own: Mapping[str, tuple[int, ...]]
    entities: tuple[EntityList, ...]

    @property
    def own_columns(self) -> tuple[int, ...]:
        """Indices of all numbers that belong to no list."""
        return tuple(column for columns in self.own.values() for column in columns)

    def describe(self) -> str:
        """One line: names and sizes, of lists as entities x features."""
        words = [f"{name} {len(columns)}" for name, columns in self.own.items()]
        for entities in self.entities:
            presence = "" if entities.presence is None else f", absent where feature {entities.presence} is 0"
            words.append(f"{entities.name} {entities.count} x {entities.features}{presence}")
        return "; ".join(words)

    @staticmethod
    def of(game: str, role: str, given: Parts) -> ObservationParts:
        """The declared parts.

        Raises:
            EnvDefinitionError: Parts of one name do not fit together.
        """
        own: dict[str, tuple[int, ...]] = {}
        lists: dict[str, EntityList] = {}
        start = 0
        for part in given:
            if part.name in own or (part.name in lists and isinstance(part, Own)):
                raise EnvDefinitionError(
                    f"{game}: obs_parts of {role!r} have the name {part.name!r} twice; expected a name once, or "
                    "Entities of one count"
                )
            if part.size:
                where = np.arange(start, start + part.size)
                start += part.size
                if isinstance(part, Own):
                    own[part.name] = tuple(where.tolist())
                else:
                    lists[part.name] = _extended(game, role, lists.get(part.name), part, where)
        return ObservationParts(own, tuple(lists.values()))


def check_parts(game: str, roles: Sequence[str], given: Any) -> dict[str, Parts]:
    """Role -> its declared parts; empty if none are declared.

    Raises:
        EnvDefinitionError: They are of another kind, or those of a role are missing.
    """
    expected = 'a tuple of Own and Entities, such as (Own("velocity", 2), Entities("agent", 3, 2)), or role -> tuple'
    by_role = given if isinstance(given, Mapping) else dict.fromkeys(roles, given)
    for parts in by_role.values():
        if not isinstance(parts, tuple | list) or not all(isinstance(part, Own | Entities) for part in parts):
            raise EnvDefinitionError(f"{game}: obs_parts is {given!r:.200}; expected {expected}")
    if set(by_role) != set(roles):
        raise EnvDefinitionError(
            f"{game}: obs_parts are for {sorted(by_role, key=str)}, but the roles are {sorted(roles)}; expected parts "
            "for each role, or one tuple for all"
        )
    return {role: by_role[role] for role in roles if by_role[role]}


def total_size(parts: Parts) -> int:
    """Numbers of all parts."""
    return sum(part.size for part in parts)


def _extended(game: str, role: str, known: EntityList | None, part: Entities, where: Any) -> EntityList:
    """A list with the features of one more part, whose numbers are at these indices."""
    rows = where.reshape(part.features, part.count).T if part.by_feature else where.reshape(part.count, part.features)
    columns = tuple(tuple(row) for row in rows.tolist())
    if known is None:
        return EntityList(part.name, columns, part.presence)
    if known.count != part.count or (known.presence is not None and part.presence is not None):
        raise EnvDefinitionError(
            f"{game}: obs_parts of {role!r} have {known.count} and {part.count} entities {part.name!r}, or two "
            "features that tell their presence; expected one count, and one such feature at most"
        )
    presence = known.presence if part.presence is None else known.features + part.presence
    both = zip(known.columns, columns, strict=True)
    return EntityList(part.name, tuple((*before, *after) for before, after in both), presence)


def _check_name(part: Own | Entities) -> None:
    if type(part.name) is not str or not FIELD_NAME.fullmatch(part.name):
        raise EnvDefinitionError(
            f"{type(part).__name__} has the name {part.name!r:.80}; expected an identifier [a-z][a-z0-9_]*"
        )


def _check_int(part: Own | Entities, attribute: str, low: int, high: int | None = None) -> None:
    value = getattr(part, attribute)
    if type(value) is not int or value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise EnvDefinitionError(
            f"{type(part).__name__} {part.name!r} has {attribute} {value!r:.80}; expected an int {expected}"
        )
