"""What a game declares: configuration, state fields, roles and spaces. Knows nothing of torch or of devices."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.spaces import Space

from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.source_rules import SOURCE_RULES
from gpu_vecenv.declare.spaces import ActionLayout, ObservationLayout, unbounded
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.files import cuda_folder

f32, f64 = np.dtype(np.float32), np.dtype(np.float64)
i32, i64 = np.dtype(np.int32), np.dtype(np.int64)
u8, u32, boolean = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.bool_)

C_TYPES = {
    f32: "float",
    f64: "double",
    i32: "i32",
    i64: "i64",
    u8: "u8",
    u32: "u32",
    boolean: "bool",
}
FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
CONSTANT_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,127}")  # a field's or role's name in capitals, with a word before it
# What a field may not be called: words of C++ and of the device code itself.
RESERVED = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl const "
    "constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern "
    "false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or "
    "or_eq private protected public register reinterpret_cast return short signed sizeof static static_assert "
    "static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned using "
    "virtual void volatile wchar_t while xor xor_eq i32 i64 u8 u32 u64 math".split()
)
# What a constant, a configuration key in capitals, may not be called: names that the device code gives itself.
RESERVED_CONSTANTS = frozenset(
    "HD TABLE KERNEL UNROLL THREADS_PER_ENV ENVS_PER_BLOCK SHARED_LIMIT ONCE INITIAL_STATES SCRATCH SCRATCH_IN_SHARED FOR_ITEMS FOR_RANGE "
    "FOR_AGENTS FOR_OBS FOR_ENVS ENV_KERNEL DEBUG_THREAD_ORDER STATE_PARAMETERS STATE_OF ENGINE_STATE_OF ACTION_HEADS "
    "ACTION_LOW ACTION_HIGH BOX_ACTIONS NUM_LOGITS LARGEST_HEAD NEXT_STEP SAME_STEP DISABLED INVALID_ACTION "
    "NONFINITE_ACTION NONFINITE STEPPED_AFTER_END ACTION_MASKS OBS_PADDED RESET_STREAM STEP_STREAM SAMPLER_STREAM "
    "RANDOM_ACTION_STREAM END_ON_NONFINITE GUARD_ROWS OUTPUT_ROWS ALLOW_STAGING OBS_STAGING_BYTES SAMPLED PARAMETERS_PER_AGENT "
    "ACTION_PARAMETERS ACTION_SOURCE".split()
)
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Field:
    """One named array of a replica's state.

    Args:
        name: The C and Python name, ``[a-z][a-z0-9_]*``.
        dtype: ``f32``, ``i32``, ``i64``, ``u8``, ``u32``, ``boolean`` or ``f64``.
        shape: Sizes of one replica's array: integers, or names of the game's attributes.
        shared: One read-only array for all replicas (a map, a table, a time series).
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        if type(self.name) is not str or not FIELD_NAME.fullmatch(self.name) or self.name in RESERVED:
            raise EnvDefinitionError(
                f"Field name {self.name!r}: expected a C identifier [a-z][a-z0-9_]* that is no C++ keyword"
            )
        try:
            known = np.dtype(self.dtype) in C_TYPES
        except (TypeError, ValueError, SyntaxError):  # NumPy reads a small language of dtypes
            known = False
        if not known:
            raise EnvDefinitionError(
                f"Field {self.name!r} has dtype {self.dtype}; expected one of {', '.join(map(str, C_TYPES))}"
            )
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if isinstance(self.shape, str) or not isinstance(self.shape, tuple | list):
            raise EnvDefinitionError(
                f"Field {self.name!r} has shape {self.shape!r}; expected a tuple, ({self.shape!r},)"
            )
        object.__setattr__(self, "shape", tuple(self.shape))


def param(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A configuration value in the closed range [low, high]."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Env:
    """A game. Its dataclass fields are its configuration; everything else follows from them.

    A subclass is a frozen, keyword-only dataclass that gives ``state``, ``roles``, ``obs_dim`` (or ``obs_shape``)
    and ``action_space``, and lies beside a ``.cu`` file of the same stem with ``reset``, ``step`` and ``observe``.

    Raises:
        ConfigError: A configuration value has the wrong type or lies outside its range.
        EnvDefinitionError: The declaration itself is inconsistent.
    """

    state: ClassVar[tuple[Field, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()  # further attributes that the device code sees as constants
    host: ClassVar[bool] = True  # False: all of CUDA C++, no CPU, no promise of equal bits
    allows: ClassVar[tuple[str, ...]] = ()  # rules of source_rules.py that its device code may break
    # Bytes of observations that a block of a GPU gathers in shared memory before it writes them. More leaves room for
    # fewer blocks, which pays where a step writes long rows and does little else.
    obs_staging_bytes: ClassVar[int] = 24 << 10
    source: ClassVar[Path | None] = None  # the .cu file, where it is not the declaration's neighbour
    termination_label: ClassVar[str] = "terminated"  # what an episode's end by termination says
    preset: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})  # of PPOConfig, and num_envs: what learns it well
    masks_actions: ClassVar[bool] = False  # True: observe also writes io.action_mask, the choices that are allowed
    title: ClassVar[str] = ""  # the name in Gymnasium's ids, gpu_vecenv/<title>-v<version>; empty: the class name
    render_fps: ClassVar[int] = 30  # steps a second, of a film of the game
    version: ClassVar[int] = 0  # rises when the rules change: results of two versions do not compare

    @property
    def roles(self) -> Mapping[str, int]:
        """Role name -> number of agents. Agents are numbered role by role, in this order."""
        return {"agent": 1}

    @property
    def obs_dim(self) -> int | Mapping[str, int]:
        """Length of an agent's observation vector, or role name -> length."""
        raise EnvDefinitionError(f"{type(self).__name__} declares no obs_dim, obs_shape or observation_space")

    @property
    def obs_shape(self) -> tuple[int, ...] | Mapping[str, tuple[int, ...]]:
        """Shape of one agent's observation, or role name -> shape."""
        length = self.obs_dim
        return {role: (n,) for role, n in length.items()} if isinstance(length, Mapping) else (length,)

    @property
    def obs_dtype(self) -> np.dtype[Any]:
        """``f32`` or ``u8``."""
        return f32

    @property
    def observation_space(self) -> Space[Any] | Mapping[str, Space[Any]]:
        """One agent's observation space, or role name -> space. A game with known bounds gives it itself."""
        shape, game = self.obs_shape, type(self).__name__
        if isinstance(shape, Mapping):
            return {role: unbounded(game, own, self.obs_dtype) for role, own in shape.items()}
        return unbounded(game, shape, self.obs_dtype)

    @property
    def action_space(self) -> Space[Any] | Mapping[str, Space[Any]]:
        """One agent's action space, or role name -> action space."""
        raise EnvDefinitionError(f"{type(self).__name__} declares no action_space")

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Values of shared fields that follow from the configuration; the others are given to ``make``."""
        return {}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        """Hook: how one replica looks; a game that has it can be rendered.

        Args:
            state: Field name -> the replica's values, without a replica axis; shared fields too. Besides ``elapsed_steps``,
                () int32, steps since reset, and ``active``, (num_agents,) bool, unless fields have these names.
        """
        raise EnvDefinitionError(f"{type(self).__name__} is not drawn: it has no method draw")

    def validate(self) -> None:
        """Hook: raise ConfigError where values contradict each other."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not _fits(value):
                raise ConfigError(f"{type(self).__name__}.{name} is {value}; expected a 32-bit int or a finite float32")
        self.validate()
        self._check_definition()

    def _check_definition(self) -> None:
        game = type(self).__name__
        own = vars(type(self))
        values = [hint for hint in own.get("__annotations__", {}).values() if "ClassVar" not in str(hint)]
        if values and "__dataclass_fields__" not in own:
            raise EnvDefinitionError(
                f"{game} has values of its own: write @dataclass(frozen=True, kw_only=True) above it"
            )
        if not isinstance(self.roles, Mapping):
            raise EnvDefinitionError(
                f"{game}: roles is {self.roles!r}; expected a mapping, role name -> number of agents (a method needs "
                "@property above it)"
            )
        for role, count in self.roles.items():
            if type(role) is not str or not FIELD_NAME.fullmatch(role):
                raise EnvDefinitionError(f"{game}: role {role!r} is no identifier [a-z][a-z0-9_]*")
            if type(count) is not int or count < 0:
                raise EnvDefinitionError(f"{game}: role {role!r} has {count!r} agents; expected an int >= 0")
        if self.num_agents < 1:
            raise ConfigError(f"{game}: {dict(self.roles)} is no agent at all; at least 1 is needed")
        if not isinstance(self.state, tuple | list) or not all(isinstance(field, Field) for field in self.state):
            raise EnvDefinitionError(f"{game}: state is {self.state!r}; expected a tuple of Field, (Field(…),) if one")
        names = [field.name for field in self.state]
        if len(set(names)) < len(names):
            raise EnvDefinitionError(f"{game}: state fields {names} are not all different")
        for field in self.state:
            self.shape(field)
        if self.num_agents * self.obs_size >= 2**31:
            raise ConfigError(
                f"{game}: num_agents x observation size = {self.num_agents} x {self.obs_size} is 2^31 or more; "
                "one replica's observations must be addressable by a 32-bit index"
            )
        if self.action.continuous and self.masks_actions:
            raise EnvDefinitionError(
                f"{game}: masks_actions is True, but its actions {self.action_space} are no choices"
            )
        if self.masks_actions and self.num_agents * self.action.num_logits >= 2**31:
            raise ConfigError(
                f"{game}: num_agents x logits = {self.num_agents} x {self.action.num_logits} is 2^31 or more; "
                "one replica's action masks must be addressable by a 32-bit index"
            )
        if not isinstance(self.allows, tuple | list) or not set(self.allows) <= set(SOURCE_RULES):
            raise EnvDefinitionError(
                f"{game}: allows is {self.allows!r}; "
                f"expected a tuple of names from {', '.join(map(repr, SOURCE_RULES))}"
            )
        if "obs_staging_bytes" in {field.name for field in dataclasses.fields(self)}:
            raise EnvDefinitionError(
                f"{game}: obs_staging_bytes is a key of the configuration; expected a number of bytes of the class's own, "
                "obs_staging_bytes = … without a type: give the key another name"
            )
        if type(self.obs_staging_bytes) is not int or not 0 <= self.obs_staging_bytes < 2**31:
            raise EnvDefinitionError(
                f"{game}: obs_staging_bytes is {self.obs_staging_bytes!r}; expected a number of bytes, 0 … 2^31 - 1"
            )
        self.constants()

    @classmethod
    def name(cls) -> str:
        """The game's registered name: the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def source_path(cls) -> Path:
        """The ``.cu`` file: ``source``, else beside the declaration; the bundled games' lie in the package's folder."""
        if cls.source is not None:
            return Path(cls.source)
        declaration = getattr(sys.modules[cls.__module__], "__file__", None)
        beside = Path(declaration).with_suffix(".cu") if declaration else Path(f"{cls.name()}.cu")
        bundled = cuda_folder() / "games" / f"{cls.name()}.cu"
        return bundled if bundled.exists() and not beside.exists() else beside

    def shape(self, field: Field) -> tuple[int, ...]:
        """A field's shape in numbers, one replica, names resolved."""
        sizes = []
        for size in field.shape:
            value = getattr(self, size, None) if isinstance(size, str) else size
            if type(value) is not int or value < 1:
                raise EnvDefinitionError(
                    f"{type(self).__name__}: state field {field.name!r} has size {size!r} = {value!r}; "
                    "expected a positive int or the name of an int attribute"
                )
            sizes.append(value)
        return tuple(sizes)

    @property
    def num_agents(self) -> int:
        """Agents of one replica, all roles."""
        return sum(self.roles.values())

    @property
    def obs_size(self) -> int:
        """Elements of one agent's row of the observation tensor, the widest role's."""
        return math.prod(self.observation.shape)

    @property
    def agent_names(self) -> list[str]:
        """``tagger_0``, ``tagger_1``, …, in agent order."""
        return [f"{role}_{i}" for role, count in self.roles.items() for i in range(count)]

    @property
    def role_slices(self) -> dict[str, slice]:
        """Role name -> its agents' places on the agent axis."""
        slices, start = {}, 0
        for role, count in self.roles.items():
            slices[role] = slice(start, start + count)
            start += count
        return slices

    @cached_property
    def observation(self) -> ObservationLayout:
        """How observations lie in the observation tensor."""
        return ObservationLayout.of(type(self).__name__, list(self.roles), self.observation_space)

    @cached_property
    def action(self) -> ActionLayout:
        """How actions lie in the action tensor."""
        return ActionLayout.of(type(self).__name__, list(self.roles), self.action_space)

    def constants(self) -> dict[str, int | float | bool]:
        """Name -> value of every compile-time constant of the device code."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # A configuration value may also be a word, or None; it is for Python alone.
        named = {name: value for name, value in named.items() if isinstance(value, int | float)}
        named |= {size: getattr(self, size) for f in self.state for size in f.shape if isinstance(size, str)}
        for name in self.derived:
            value = getattr(self, name, None)
            named[name] = value.item() if isinstance(value, np.generic) else value
        named |= {"num_agents": self.num_agents, "obs_size": self.obs_size}
        for role, where in self.role_slices.items():
            named |= {f"first_{role}": where.start, f"end_{role}": where.stop}
            named[f"obs_size_{role}"] = math.prod(self.observation.shapes[role])
        constants = {str.upper(name): value for name, value in named.items()}
        for name, value in constants.items():
            key = f"{type(self).__name__}.{name.lower()}"
            if not CONSTANT_NAME.fullmatch(name):
                raise EnvDefinitionError(f"{key}: {name!r} is no name of a constant; expected [A-Z][A-Z0-9_]*")
            if name in RESERVED_CONSTANTS:
                raise EnvDefinitionError(f"{key}: {name} is a word of the device code")
            # These very types: a subclass may write itself as it likes.
            if type(value) not in (bool, int, float) or not _fits(value):
                raise EnvDefinitionError(f"{key} is {value!r}; expected a bool, a 32-bit int or a finite float32")
        return constants


def check_fields(config: Any) -> None:
    """Check a dataclass's values against their declared types and ranges; NumPy scalars become Python's.

    Raises:
        ConfigError: Names the key, the value and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = _checked(f"{type(config).__name__}.{field.name}", field, hints[field.name], getattr(config, field.name))
        object.__setattr__(config, field.name, value)


def _fits(value: int | float) -> bool:
    """Whether C++ can hold it as int or float."""
    return abs(value) <= FLOAT32_MAX if isinstance(value, float) else -(2**31) <= value < 2**31


def _checked(key: str, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """The value as a plain Python one of the declared type, or ConfigError."""
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        if not isinstance(value, tuple | list):
            raise ConfigError(f"{key} is {value!r} ({type(value).__name__}); expected a tuple of {element.__name__}")
        return tuple(_checked(f"{key}[{place}]", field, element, item) for place, item in enumerate(value))
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    choices = [c for h in alternatives if typing.get_origin(h) is Literal for c in typing.get_args(h)]
    kinds = [h for h in alternatives if isinstance(h, type)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value = str.__str__(value)  # an enum's member, say, becomes the plain word
    if float in kinds and int not in kinds and type(value) is int and abs(value) <= FLOAT32_MAX:
        value = float(value)
    plain = isinstance(value, tuple(kinds)) and not isinstance(value, int | float)  # a Path is some kind of path
    if type(value) not in kinds and not plain and not any(type(value) is type(c) and value == c for c in choices):
        expected = [kind.__name__ for kind in kinds] + [repr(c) for c in choices]
        raise ConfigError(f"{key} is {value!r} ({type(value).__name__}); expected {' or '.join(expected)}")
    low, high = field.metadata.get("low"), field.metadata.get("high")
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if isinstance(value, float) and not abs(value) <= FLOAT32_MAX:
        raise ConfigError(f"{key} is {value}; expected a finite float32")
    if isinstance(value, int | float) and not low <= value <= high:
        raise ConfigError(f"{key} is {value}; expected a value in [{low}, {high}]")
    return value
