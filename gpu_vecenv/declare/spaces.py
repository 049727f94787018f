"""Layouts of the observation and action tensors of a game with several roles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from gpu_vecenv.declare.field import known_dtype
from gpu_vecenv.declare.obs_parts import ObservationParts, Parts, total_size
from gpu_vecenv.errors import ConfigError, EnvDefinitionError

OBS_TYPES = (np.dtype(np.float32), np.dtype(np.uint8))
MAX_OBS_SIZE = 2**24  # items: the bounds of a space are arrays of this size on the host
MAX_FLOAT_CHOICES = 2**24  # a float32 holds every smaller whole number
PerRole = Space[Any] | Mapping[str, Space[Any]]


@dataclass(frozen=True)
class ObservationLayout:
    """The observation tensor of a game: ``(num_envs, num_agents, *shape)``, as wide as its widest role.

    ``spaces[role]`` is the role's own space; the rows of its agents contain the observation at ``own(role)``, else 0.
    ``parts[role]`` are the parts of its observation, of roles that declare them.
    """

    shape: tuple[int, ...]
    spaces: Mapping[str, Box]
    parts: Mapping[str, ObservationParts] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or uint8; the same for all roles."""
        return next(iter(self.spaces.values())).dtype

    @property
    def scale(self) -> float:
        """What policies divide observations by: of uint8 the largest upper bound of all roles' spaces, of float32 1."""
        if self.dtype != np.uint8:
            return 1.0
        return float(max(1, *(space.high.max() for space in self.spaces.values())))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Role name -> shape of its own observation."""
        return {role: space.shape for role, space in self.spaces.items()}

    @property
    def padded(self) -> bool:
        """Whether some role's observation is smaller than the widest."""
        return any(shape != self.shape for shape in self.shapes.values())

    def own(self, role: str) -> tuple[slice, ...]:
        """Slices, one per axis, of the observation of this role's agents within a row."""
        return tuple(slice(0, n) for n in self.spaces[role].shape)

    @property
    def widest(self) -> Box:
        """A space that contains every row, padding included."""
        if not self.padded and len({_bounds(space) for space in self.spaces.values()}) == 1:
            return deepcopy(next(iter(self.spaces.values())))  # a space has a random generator, which is not shared
        low, high = np.zeros((2, *self.shape), self.dtype)
        for role, space in self.spaces.items():
            low[self.own(role)] = np.minimum(low[self.own(role)], space.low)
            high[self.own(role)] = np.maximum(high[self.own(role)], space.high)
        return Box(low, high, dtype=self.dtype.type)

    @staticmethod
    def of(
        game: str, roles: Sequence[str], given: PerRole, parts: Mapping[str, Parts] | None = None
    ) -> ObservationLayout:
        """The layout of the declared observation spaces, and role -> declared parts.

        Raises:
            EnvDefinitionError: They are not boxes, do not fit in one tensor, or have another size than their parts.
        """
        spaces = {}
        for role, space in _by_role(game, roles, "observation", given).items():
            if not isinstance(space, Box) or space.dtype not in OBS_TYPES:
                raise EnvDefinitionError(
                    f"{game}: observation space of {role!r} is {space}; expected a Box of float32 or uint8"
                )
            _check_shape(game, space.shape)
            spaces[role] = space
        if len({space.dtype for space in spaces.values()}) > 1 or len({len(s.shape) for s in spaces.values()}) > 1:
            raise EnvDefinitionError(
                f"{game}: observation spaces are {spaces}; expected one dtype and one number of axes, to share a tensor"
            )
        widest = tuple(map(max, zip(*(space.shape for space in spaces.values()), strict=True)))
        for role, of_role in (parts or {}).items():
            if spaces[role].shape != (total_size(of_role),):
                raise EnvDefinitionError(
                    f"{game}: observations of {role!r} have shape {spaces[role].shape}, their obs_parts "
                    f"{total_size(of_role)} numbers; expected a vector of as many: declare obs_parts alone"
                )
        resolved = {role: ObservationParts.of(game, role, of_role) for role, of_role in (parts or {}).items()}
        return ObservationLayout(widest, spaces, resolved)


@dataclass(frozen=True)
class ActionLayout:
    """The action tensor of a game: ``(num_envs, num_agents, *shape)``, int32, or float32 if a role has a Box.

    Roles with fewer heads or choices than the widest role use the first ones. Where roles with a Box and roles with
    discrete heads share the tensor, a choice is a whole float32.

    Attributes:
        shape: Of one agent's action.
        spaces: Role -> its declared space.
        sizes: Role -> choices of each of its heads, 0 for an element of a Box.
        bounds: Role -> bounds of its Box, low and high, one for each element; without the roles with discrete heads.
    """

    shape: tuple[int, ...]
    spaces: Mapping[str, Space[Any]]
    sizes: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]

    @property
    def continuous(self) -> bool:
        """Whether every role has a Box."""
        return len(self.bounds) == len(self.spaces)

    @property
    def discrete(self) -> bool:
        """Whether every role has discrete heads."""
        return not self.bounds

    @property
    def mixed(self) -> bool:
        """Whether some role has a Box that another role does not have."""
        first = next(iter(self.spaces.values()))
        return bool(self.bounds) and any(space != first for space in self.spaces.values())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the action tensor: int32 or float32."""
        return np.dtype(np.int32 if self.discrete else np.float32)

    @property
    def heads(self) -> int:
        """Numbers in the widest role's action: discrete heads, or elements of a Box."""
        return math.prod(self.shape)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Number of choices of each discrete head, the largest of all roles."""
        sizes = [self.sizes[role] for role in self.spaces if role not in self.bounds]
        return tuple(max(s[h] for s in sizes if h < len(s)) for h in range(max(map(len, sizes), default=0)))

    @property
    def num_logits(self) -> int:
        """Logits per agent with discrete heads: the sum of the head sizes."""
        return sum(self.head_sizes)

    @property
    def num_parameters(self) -> int:
        """Policy outputs per agent, the widest role's: logits, or for a Box two for each of its numbers."""
        return max(self.num_logits, *(2 * len(low) for low, _ in self.bounds.values()), 0)

    @property
    def widest(self) -> Space[Any]:
        """The space of one agent's row of the action tensor: the widest role's, head by head.

        Raises:
            ConfigError: There is none, as some role has a Box that another does not have.
        """
        if self.mixed:
            raise ConfigError(
                f"action spaces {dict(self.spaces)} have no space in common; expected equal ones, or discrete ones only"
            )
        if self.continuous:
            return deepcopy(next(iter(self.spaces.values())))
        return MultiDiscrete(list(self.head_sizes)) if self.shape else Discrete(self.head_sizes[0])

    @staticmethod
    def of(game: str, roles: Sequence[str], given: PerRole) -> ActionLayout:
        """The layout of the declared action spaces.

        Raises:
            EnvDefinitionError: They are of unsupported kinds.
            ConfigError: The heads have 2^31 choices or more in all, or one has more than a float32 can tell apart
                beside a Box.
        """
        spaces = _by_role(game, roles, "action", given)
        sizes, bounds = {}, {}
        for role, space in spaces.items():
            _check_action_space(game, role, space)
            if isinstance(space, Box):
                bounds[role] = tuple(map(float, space.low)), tuple(map(float, space.high))
                sizes[role] = (0,) * len(space.low)
            else:
                choices: Any = space.n if isinstance(space, Discrete) else space.nvec  # type: ignore[attr-defined]
                sizes[role] = tuple(int(n) for n in np.ravel(choices))
        simple = all(isinstance(space, Discrete) for space in spaces.values())
        layout = ActionLayout(() if simple else (max(map(len, sizes.values())),), spaces, sizes, bounds)
        if layout.num_logits >= 2**31:
            raise ConfigError(
                f"{game}: action spaces {spaces} have {layout.num_logits:,} choices; "
                "expected fewer than 2^31 in all, because an action is a 32-bit int"
            )
        if bounds and max(layout.head_sizes, default=0) > MAX_FLOAT_CHOICES:
            raise ConfigError(
                f"{game}: action spaces {spaces} have a head of {max(layout.head_sizes):,} choices beside a Box; "
                f"expected at most {MAX_FLOAT_CHOICES:,}, because a choice is then a float32"
            )
        return layout


def _check_action_space(game: str, role: str, space: Space[Any]) -> None:
    if not isinstance(space, Discrete | MultiDiscrete | Box):
        raise EnvDefinitionError(
            f"{game}: action space of {role!r} is {space}; expected Discrete, MultiDiscrete or Box"
        )
    if isinstance(space, MultiDiscrete) and (len(space.shape) != 1 or not space.shape[0]):
        raise EnvDefinitionError(
            f"{game}: action space of {role!r} is a MultiDiscrete of shape {space.shape}; expected (heads,), at least 1"
        )
    if np.any(getattr(space, "start", 0)):
        raise EnvDefinitionError(f"{game}: action space {space} of {role!r} must start at 0")
    if isinstance(space, Box) and (
        len(space.shape) != 1 or not space.shape[0] or space.dtype != np.float32 or not space.is_bounded("both")
    ):
        raise EnvDefinitionError(
            f"{game}: action space {space} of {role!r}; expected a bounded Box of shape (n,), float32"
        )


def with_zero(space: Box) -> Box:
    """The space, extended where it does not contain 0."""
    if (space.low <= 0).all() and (space.high >= 0).all():
        return space
    return Box(np.minimum(space.low, 0), np.maximum(space.high, 0), dtype=space.dtype.type)


def unbounded(game: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Box:
    """The space of all float32 or uint8 arrays of this shape, or EnvDefinitionError, ConfigError."""
    if (known := known_dtype(dtype)) not in OBS_TYPES:
        raise EnvDefinitionError(f"{game}: obs_dtype is {dtype}; expected float32 or uint8")
    _check_shape(game, shape)
    if math.prod(shape) > MAX_OBS_SIZE:
        raise ConfigError(
            f"{game}: an observation of shape {shape} has {math.prod(shape):,} items; expected at most {MAX_OBS_SIZE:,}"
        )
    if known == np.uint8:
        return Box(0, 255, shape, np.uint8)
    return Box(-np.inf, np.inf, shape, np.float32)


def _check_shape(game: str, shape: tuple[int, ...]) -> None:
    sizes = isinstance(shape, tuple | list) and all(type(n) is int and n >= 1 for n in shape)
    if not sizes or not shape:
        raise EnvDefinitionError(f"{game}: obs_shape is {shape!r}; expected positive ints, such as (4,)")


def _by_role(game: str, roles: Sequence[str], what: str, given: PerRole) -> dict[str, Space[Any]]:
    spaces = dict(given) if isinstance(given, Mapping) else dict.fromkeys(roles, given)
    if set(spaces) != set(roles):
        raise EnvDefinitionError(
            f"{game}: {what} spaces for {sorted(spaces, key=str)}, but the roles are {sorted(roles)}; expected a space "
            "for each role, or one for all"
        )
    return {role: spaces[role] for role in roles}


def _bounds(space: Box) -> tuple[bytes, bytes]:
    return space.low.tobytes(), space.high.tobytes()
