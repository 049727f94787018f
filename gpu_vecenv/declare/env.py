"""Env: the declaration of a game. Imports neither torch nor CUDA."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Space

from gpu_vecenv.declare.attributes import check_attributes
from gpu_vecenv.declare.config import FixedArgument, check_fields, fits_device, param
from gpu_vecenv.declare.drawing import Drawing
from gpu_vecenv.declare.field import FIELD_NAME, Field, boolean, f32, f64, i32, i64, u8, u32
from gpu_vecenv.declare.kernels import KernelSignature
from gpu_vecenv.declare.layout import (
    FieldLayout,
    GameLayout,
    resolve_constants,
    resolve_engine_fields,
    slices_of_roles,
)
from gpu_vecenv.declare.obs_parts import Entities, Own, Parts, check_parts, total_size
from gpu_vecenv.declare.randomize import Range, checked_ranges, randomizable, resolve_randomized, with_values
from gpu_vecenv.declare.spaces import ActionLayout, ObservationLayout, unbounded
from gpu_vecenv.declare.versions import OtherVersion
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.files import cuda_folder

HOW_TO_DRAW = "give the game a method draw(self, state), of which gpu-vecenv new my_game writes an example"
MAX_AGENTS = 2**20  # of one environment

# Also what a declaration needs besides Env, so that one import line is enough.
__all__ = [
    "Entities",
    "Env",
    "Field",
    "FixedArgument",
    "OtherVersion",
    "Own",
    "boolean",
    "f32",
    "f64",
    "i32",
    "i64",
    "param",
    "u8",
    "u32",
]


@dataclass(frozen=True, kw_only=True)
class Env:
    """A game. Its dataclass fields are its configuration; everything else is derived from them.

    A subclass is a dataclass, ``@dataclass(frozen=True, kw_only=True)``, that declares ``state``, ``obs_dim`` (or
    ``obs_shape``, or ``obs_parts``) and ``action_space``, and ``roles`` if it has more than one agent: the default is
    one agent, of the role "agent". Beside it is a ``.cu`` file of the same stem with ``reset``, ``step`` and
    ``observe``. What the declaration resolves to (sizes in numbers, layouts of tensors, constants) is ``layout``.

    ``randomize``, a field of every game, takes a mapping, parameter -> (low, high), and holds it as a tuple of (name,
    low, high), sorted by name. Each environment draws these parameters anew at each reset, uniformly in [low, high), as
    float32; if low equals high, that is the value. They are then fields of the state, (num_envs,) float32, beside the
    declared ones. A game's floats can be randomised, as far as ``randomizable`` names them.

    Raises:
        ConfigError: A configuration value has the wrong type or lies outside its range.
        EnvDefinitionError: The declaration itself is inconsistent.

    Example:
        >>> game = gpu_vecenv.configure("tag_gridworld", num_taggers=2)  # an Env
        >>> game.num_taggers, game.max_steps, game.num_agents
        (2, 100, 3)
        >>> game.layout.observation.shape
        (13,)
    """

    # Parameters that each environment draws anew at each reset: (name, low, high) of each.
    randomize: tuple[Range, ...] = dataclasses.field(default=(), repr=False, metadata={"convert": checked_ranges})

    state: ClassVar[tuple[Field, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()  # further attributes that become constants of the device code
    host: ClassVar[bool] = True  # False: all of CUDA C++; no CPU, not bit-identical across devices
    kernels: ClassVar[tuple[KernelSignature, ...]] = ()  # further kernels of its .cu file, for env.program.launch
    allows: ClassVar[tuple[str, ...]] = ()  # source rules that its device code may break
    # Bytes of observations that a thread block collects in shared memory before it writes them. Larger values reduce
    # occupancy, which pays off where a step writes long rows and does little else.
    obs_staging_bytes: ClassVar[int] = 24 << 10
    source: ClassVar[Path | None] = None  # the .cu file, where it is not beside the declaration
    termination_label: ClassVar[str] = "terminated"  # description of termination, for logs and films
    preset: ClassVar[Mapping[str, Any]] = types.MappingProxyType(
        {}
    )  # num_envs and PPOConfig values that train this game well
    # The same with as few env-steps as possible instead of as little time: --preset sample-efficient.
    sample_efficient_preset: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    # OpponentsConfig values that go with ``preset``: whom a share of the environments plays against in training.
    preset_opponents: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    # What ``preset`` is for PPO, for other algorithms of the command line, by their names, such as "pqn-vdn".
    algorithm_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    # What changes in the course of a training with any of these: points of schedules, see ``Curriculum.of_points``.
    preset_schedules: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    # Fields of the state that a central critic sees, one after the other, each as float32. Empty: all observations.
    critic_state: ClassVar[tuple[str, ...]] = ()
    # Fields (num_agents, …), of which the critic sees an agent's own row after those, for the agent's value.
    agent_critic_state: ClassVar[tuple[str, ...]] = ()
    # Fields of the state whose means are metrics of the game, "state_<field>", in training and evaluations.
    state_metrics: ClassVar[tuple[str, ...]] = ()
    masks_actions: ClassVar[bool] = False  # True: observe also writes io.action_mask, the allowed choices
    takes_turns: ClassVar[bool] = False  # True: observe also writes io.acting, the agents that act in the coming step
    # True, or names of roles: an agent of theirs that ends before its episode does has died. It acts no longer, its
    # observation is zero but for its id, and it receives rewards until the episode ends.
    team_reward: ClassVar[bool | tuple[str, ...]] = False
    # The action with which an agent does nothing: one number for all heads or all of a Box, or a tuple of numbers; or
    # role -> that. Opponents that stand still need it.
    noop: ClassVar[int | float | tuple[float, ...] | Mapping[str, Any] | None] = None
    zero_sum: ClassVar[bool] = False  # True: two agents, whose rewards sum to 0 in every step
    # The device code reads Box actions clipped to their bounds. False: it reads them as they were given, if finite.
    clip_actions: ClassVar[bool] = True
    title: ClassVar[str] = ""  # the name in Gymnasium's ids, gpu_vecenv/<title>-v<version>; empty: the class name
    reset_options: ClassVar[tuple[str, ...]] = ()  # options of Gymnasium's reset, arguments of initial_ranges
    # Of the reference in Gymnasium. With a time limit of Gymnasium's, max_steps is that of its TimeLimit wrapper, and
    # an environment of gymnasium.make has no other.
    gymnasium_time_limit: ClassVar[bool] = False
    reward_threshold: ClassVar[float | None] = None  # mean return at which the task counts as solved
    render_fps: ClassVar[int] = 30  # steps per second in a film of the game
    # Arguments of the environments that this game stands in for, by their names there -> the field with the value, or
    # the only value that they can have. ``configure`` accepts them beside the fields.
    reference_arguments: ClassVar[Mapping[str, str | FixedArgument]] = types.MappingProxyType(
        {"max_cycles": "max_steps", "max_episode_steps": "max_steps"}  # PettingZoo's, Gymnasium's
    )
    # Methods of those environments, by their names there: functions of the state (field -> live array) and the method's
    # own arguments. PettingZoo's views have them.
    reference_methods: ClassVar[Mapping[str, Callable[..., Any]]] = types.MappingProxyType({})
    version: ClassVar[int] = 0  # increased when the rules change: results of two versions are not comparable
    # Versions that other configurations play, by number. Each has ids of its own in Gymnasium and PettingZoo.
    other_versions: ClassVar[Mapping[int, OtherVersion]] = types.MappingProxyType({})

    @property
    def roles(self) -> Mapping[str, int]:
        """Role name -> number of agents, by default one "agent". Agents are numbered role by role, in this order."""
        return {"agent": 1}

    @property
    def obs_parts(self) -> Parts | Mapping[str, Parts]:
        """What an agent's observation vector consists of, in order, or role name -> that; empty: not declared.

        It determines ``obs_dim``. ``PPOConfig(network="entities")`` needs it.
        """
        return ()

    @property
    def obs_dim(self) -> int | Mapping[str, int]:
        """Length of an agent's observation vector, or role name -> length."""
        if isinstance(self.obs_parts, Mapping):
            return {role: total_size(parts) for role, parts in self._checked_parts().items()}
        if self.obs_parts:
            return total_size(next(iter(self._checked_parts().values())))
        raise EnvDefinitionError(
            f"{type(self).__name__} declares no obs_dim, obs_shape, obs_parts or observation_space; expected one, "
            "such as obs_dim = 4"
        )

    @property
    def obs_shape(self) -> tuple[int, ...] | Mapping[str, tuple[int, ...]]:
        """Shape of one agent's observation, or role name -> shape; of an image (height, width, channels)."""
        length = self.obs_dim
        return {role: (n,) for role, n in length.items()} if isinstance(length, Mapping) else (length,)

    @property
    def obs_dtype(self) -> np.dtype[Any]:
        """``f32`` or ``u8``."""
        return f32

    @property
    def observation_space(self) -> Space[Any] | Mapping[str, Space[Any]]:
        """One agent's observation space, or role name -> space. Override it for known bounds."""
        shape, game = self.obs_shape, type(self).__name__
        if isinstance(shape, Mapping):
            return {role: unbounded(game, own, self.obs_dtype) for role, own in shape.items()}
        return unbounded(game, shape, self.obs_dtype)

    def _checked_observation_space(self) -> Space[Any] | Mapping[str, Space[Any]]:
        """The observation space, whose shapes are those that ``obs_dim`` or ``obs_shape`` declare, if any."""
        space, own = self.observation_space, type(self)
        if own.observation_space is Env.observation_space or (own.obs_dim, own.obs_shape) == (
            Env.obs_dim,
            Env.obs_shape,
        ):
            return space
        declared = self.obs_shape
        for role in self.roles:
            found = space.get(role) if isinstance(space, Mapping) else space
            shape = declared.get(role) if isinstance(declared, Mapping) else declared
            if isinstance(found, Box) and shape is not None and found.shape != tuple(shape):
                raise EnvDefinitionError(
                    f"{own.__name__}: the observation space of {role!r} has shape {found.shape}, and obs_dim or "
                    f"obs_shape say {tuple(shape)}; expected the same, or the space alone"
                )
        return space

    @property
    def agent_id_size(self) -> int:
        """Items at the end of each observation that say which agent it is of, and stay when it dies.

        Of roles with ``team_reward``.
        """
        return 0

    @property
    def action_space(self) -> Space[Any] | Mapping[str, Space[Any]]:
        """One agent's action space, or role name -> action space."""
        raise EnvDefinitionError(
            f"{type(self).__name__} declares no action_space; expected one, such as action_space = Discrete(5)"
        )

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Values of shared fields that the configuration determines; ``make(arrays=…)`` takes the others."""
        return {}

    def initial_ranges(self, options: Mapping[str, float]) -> Mapping[str, tuple[float, float]]:
        """Hook: the ranges that ``reset`` draws the initial state from, uniformly, with these ``reset_options``.

        Args:
            options: Values of some of ``reset_options``; the others have the configuration's.

        Returns:
            Name of a float32 state field -> (low, high). A view's ``reset(options=…)`` moves what the device code
            has drawn from the configuration's own ranges.
        """
        return {}

    def draw(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Drawing:
        """Hook: the picture of one environment; a game that defines it can be rendered.

        Args:
            state: Field name -> the environment's values, without an environment axis; shared fields too. Also
                ``elapsed_steps``, () int32, steps since reset, and ``active``, (num_agents,) bool, unless fields have
                these names.
        """
        raise EnvDefinitionError(
            f"{type(self).__name__} cannot be rendered: it has no method draw; to watch it, {HOW_TO_DRAW}"
        )

    def validate(self) -> None:
        """Hook: raise ConfigError where values contradict each other."""

    def __post_init__(self) -> None:
        check_attributes(type(self), Env)
        check_fields(self)
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not fits_device(value):
                raise ConfigError(f"{type(self).__name__}.{name} is {value}; expected a 32-bit int or a finite float32")
        self.validate()
        self.layout  # noqa: B018  a wrong declaration raises when it is configured, not at its first use

    @cached_property
    def layout(self) -> GameLayout:
        """What this declaration resolves to; computed once, when the game is configured.

        Raises:
            ConfigError, EnvDefinitionError: The declaration is inconsistent.
        """
        game = type(self).__name__
        roles = self._checked_roles()
        num_agents = sum(roles.values())
        fields = self._resolved_fields()
        observation = ObservationLayout.of(game, list(roles), self._checked_observation_space(), self._checked_parts())
        obs_size = math.prod(observation.shape)
        if num_agents * obs_size >= 2**31:
            raise ConfigError(
                f"{game}: num_agents x observation size = {num_agents} x {obs_size} is 2^31 or more; expected less, as "
                "one environment's observations are addressed by a 32-bit index"
            )
        action_space = self.action_space
        action = ActionLayout.of(game, list(roles), action_space)
        if action.continuous and self.masks_actions:
            raise EnvDefinitionError(
                f"{game}: masks_actions is True, but the action space {action_space} has no discrete choices; "
                "expected Discrete or MultiDiscrete, or masks_actions = False"
            )
        if self.masks_actions and num_agents * action.num_logits >= 2**31:
            raise ConfigError(
                f"{game}: num_agents x logits = {num_agents} x {action.num_logits} is 2^31 or more; expected less, "
                "as one environment's action masks are addressed by a 32-bit index"
            )
        team_roles = self._checked_team_roles(roles)
        if self.zero_sum and num_agents != 2:
            raise EnvDefinitionError(
                f"{game}: zero_sum is True, but there are {num_agents} agents in roles {roles}; expected 2"
            )
        role_slices = slices_of_roles(roles)
        named = self._values() | {"num_agents": num_agents, "obs_size": obs_size}
        for role, where in role_slices.items():
            named |= {f"first_{role}": where.start, f"end_{role}": where.stop}
            named[f"obs_size_{role}"] = math.prod(observation.shapes[role])
        constants = resolve_constants(game, named)
        randomized, derived = resolve_randomized(self)
        varying = {name.upper() for name in (*(parameter.name for parameter in randomized), *derived)}
        ranges = {name: (low, high) for name, low, high in self.randomize}
        return GameLayout(
            name=game,
            config=f"{self!r} with randomize={ranges}" if ranges else repr(self),
            source_path=self.source_path(),
            host=self.host,
            kernels=tuple(self.kernels),
            allows=tuple(self.allows),
            roles=roles,
            role_slices=role_slices,
            agent_names=tuple(f"{role}_{i}" for role, count in roles.items() for i in range(count)),
            observation=observation,
            action=action,
            masks_actions=self.masks_actions,
            critic_state=tuple(self.critic_state),
            agent_critic_state=self._checked_agent_critic_state(fields, num_agents),
            clips_actions=self.clip_actions,
            takes_turns=self.takes_turns,
            team_roles=team_roles,
            agent_id_size=self._checked_agent_id_size(observation, team_roles),
            zero_sum=self.zero_sum,
            fields=(*fields, *(FieldLayout(parameter.name, f32, ()) for parameter in randomized)),
            engine_fields=resolve_engine_fields(
                num_agents,
                action.num_logits if self.masks_actions else 0,
                tracks_acting=self.takes_turns or bool(team_roles),
                num_randomized=len(randomized),
            ),
            constants={name: value for name, value in constants.items() if name not in varying},
            randomized=randomized,
            derived=derived,
            obs_staging_bytes=self.obs_staging_bytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy resolves its layout itself: the configuration is enough, and pickles stay small.
        return {name: value for name, value in vars(self).items() if name != "layout"}

    @property
    def num_agents(self) -> int:
        """Agents of one environment, all roles."""
        return sum(self.roles.values())

    @property
    def played_version(self) -> int:
        """The version whose rules this configuration plays: ``version``, or one of ``other_versions``."""
        for number, other in self.other_versions.items():
            if all(getattr(self, name) == value for name, value in other.config.items()):
                return number
        return self.version

    @property
    def own_preset(self) -> Mapping[str, Any]:
        """The preset of the version that this configuration plays."""
        played = self.played_version
        return self.other_versions[played].preset if played in self.other_versions else self.preset

    @property
    def own_preset_opponents(self) -> Mapping[str, Any]:
        """``preset_opponents``, or of another version than ``version`` none."""
        return {} if self.played_version in self.other_versions else self.preset_opponents

    @property
    def randomizable(self) -> tuple[str, ...]:
        """Names that ``randomize`` may have: floats that decide no space, size, role or shared field."""
        return randomizable(self)

    def with_drawn_values(self, state: Mapping[str, np.ndarray[Any, Any]]) -> Env:
        """The declaration of one environment: its randomised parameters have their values there.

        Args:
            state: As for ``draw``.
        """
        if not self.randomize:
            return self
        return with_values(self, {name: float(state[name]) for name, _, _ in self.randomize})

    @classmethod
    def own_fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The configuration that the game itself declares: all of its dataclass's fields but ``randomize``."""
        return tuple(field for field in dataclasses.fields(cls) if field.name != "randomize")

    @classmethod
    def name(cls) -> str:
        """The game's registered name: the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def source_path(cls) -> Path:
        """The ``.cu`` file: ``source``, else beside the declaration, else among the bundled games."""
        if cls.source is not None:
            return Path(cls.source)
        declaration = getattr(sys.modules.get(cls.__module__), "__file__", None)
        beside = Path(declaration).with_suffix(".cu") if declaration else Path(f"{cls.name()}.cu")
        bundled = cuda_folder() / "games" / f"{cls.name()}.cu"
        return bundled if bundled.exists() and not beside.exists() else beside

    def _checked_agent_critic_state(self, fields: Sequence[FieldLayout], num_agents: int) -> tuple[str, ...]:
        shapes = {field.name: field.shape for field in fields}
        for name in self.agent_critic_state:
            if shapes[name][:1] != (num_agents,):
                raise EnvDefinitionError(
                    f"{type(self).__name__}: agent_critic_state has {name!r} with shape {shapes[name]}; expected a row "
                    f'for each agent, ({num_agents}, …): write its first size as "num_agents", or name the field in '
                    "critic_state, which all critics see"
                )
        return tuple(self.agent_critic_state)

    def _checked_team_roles(self, roles: Mapping[str, int]) -> tuple[str, ...]:
        given = self.team_reward
        if isinstance(given, bool):
            return tuple(roles) if given else ()
        if unknown := [role for role in given if role not in roles]:
            raise EnvDefinitionError(
                f"{type(self).__name__}: team_reward names {unknown}; expected True, False or some of {list(roles)}"
            )
        return tuple(role for role in roles if role in given)

    def _checked_agent_id_size(self, observation: ObservationLayout, team_roles: tuple[str, ...]) -> int:
        game, size = type(self).__name__, self.agent_id_size
        if type(size) is not int or size < 0:
            raise EnvDefinitionError(f"{game}: agent_id_size is {size!r}; expected an int >= 0")
        if size > 0 and not team_roles:
            raise EnvDefinitionError(f"{game}: agent_id_size is {size}; expected 0, or roles with team_reward")
        for role in team_roles:
            if size > 0 and (len(shape := observation.shapes[role]) != 1 or size > shape[0]):
                raise EnvDefinitionError(
                    f"{game}: agent_id_size is {size}, and {role!r} has observations of shape {shape}; expected at "
                    "most their length, of one axis"
                )
        return size

    def _checked_roles(self) -> dict[str, int]:
        game, roles = type(self).__name__, self.roles
        if not isinstance(roles, Mapping):
            raise EnvDefinitionError(f"{game}: roles is {roles!r}; expected a mapping, role name -> number of agents")
        for role, count in roles.items():
            if type(role) is not str or not FIELD_NAME.fullmatch(role):
                raise EnvDefinitionError(f"{game}: role {role!r} is no identifier; expected [a-z][a-z0-9_]*")
            if type(count) is not int or count < 0:
                raise EnvDefinitionError(f"{game}: role {role!r} has {count!r} agents; expected an int >= 0")
        if sum(roles.values()) < 1:
            raise ConfigError(f"{game}: roles {dict(roles)} have no agents; expected at least 1")
        if sum(roles.values()) > MAX_AGENTS:
            raise ConfigError(
                f"{game}: roles {dict(roles)} have {sum(roles.values()):,} agents; expected at most {MAX_AGENTS:,} in "
                "one environment, because each has a name and a role on the host"
            )
        if type(self.num_agents) is not int or self.num_agents != sum(roles.values()):
            raise EnvDefinitionError(
                f"{game}: num_agents is {self.num_agents!r}, but roles {dict(roles)} have "
                f"{sum(roles.values())} agents; expected as many: declare "
                "roles alone, or roles that num_agents determines"
            )
        return dict(roles)

    def _checked_parts(self) -> dict[str, Parts]:
        return check_parts(type(self).__name__, list(self.roles), self.obs_parts)

    def _resolved_fields(self) -> tuple[FieldLayout, ...]:
        """The state with sizes in numbers."""
        game = type(self).__name__
        names = [field.name for field in self.state]
        if len(set(names)) < len(names):
            raise EnvDefinitionError(f"{game}: state fields {names} are not all different; expected a name once")
        fields = []
        for field in self.state:
            present = getattr(self, field.when, None) if field.when else True
            if not isinstance(present, bool):
                raise EnvDefinitionError(
                    f"{game}: state field {field.name!r} has when = {field.when!r}, which is {present!r:.200}; "
                    "expected the name of a bool attribute"
                )
            if not present:
                continue
            shape = []
            for size in field.shape:
                value = getattr(self, size, None) if isinstance(size, str) else size
                if type(value) is not int or value < 1:
                    raise EnvDefinitionError(
                        f"{game}: state field {field.name!r} has size {size!r} = {value!r}; "
                        "expected a positive int or the name of an int attribute"
                    )
                shape.append(value)
            resolved = FieldLayout(field.name, field.dtype, tuple(shape), field.shared)
            if resolved.size >= 2**31 and not field.shared:
                raise ConfigError(
                    f"{game}: state field {field.name!r} has {resolved.size:,} items in one environment; "
                    "expected fewer than 2^31, as they are addressed by a 32-bit index"
                )
            fields.append(resolved)
        return tuple(fields)

    def _values(self) -> dict[str, Any]:
        """Name -> value of what the declaration makes a constant of the device code."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # Strings and None are configuration for Python alone.
        named = {name: value for name, value in named.items() if isinstance(value, int | float)}
        named |= {size: getattr(self, size) for f in self.state for size in f.shape if isinstance(size, str)}
        for name in self.derived:
            value = getattr(self, name, None)
            named[name] = value.item() if isinstance(value, np.generic) else value
        return named
