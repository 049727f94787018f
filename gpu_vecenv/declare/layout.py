"""GameLayout: everything about one configured game that later stages need, resolved once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpu_vecenv.declare.config import fits_device
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64
from gpu_vecenv.declare.kernels import KernelSignature
from gpu_vecenv.declare.randomize import RandomizedParameter
from gpu_vecenv.declare.spaces import ActionLayout, ObservationLayout
from gpu_vecenv.errors import EnvDefinitionError

CONSTANT_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,127}")  # longer than a field's or role's name, which prefixes extend
# Names that a constant, such as a configuration key in capitals, may not have: the device code defines them itself.
RESERVED_CONSTANTS = frozenset(
    "HD TABLE KERNEL UNROLL THREADS_PER_ENV ENVS_PER_BLOCK SHARED_LIMIT ONCE SCRATCH SCRATCH_IN_SHARED "
    "FOR_ITEMS FOR_RANGE FOR_AGENTS FOR_OBS FOR_ENVS ENV_KERNEL DEBUG_THREAD_ORDER ACTION_HEADS ACTION_LOW ACTION_HIGH "
    "CLIP_ACTIONS BOX_ACTIONS DISCRETE_HEADS NUM_LOGITS LARGEST_HEAD NEXT_STEP SAME_STEP DISABLED INVALID_ACTION "
    "NONFINITE_ACTION NONFINITE STEPPED_AFTER_END ACTION_MASKS OBS_PADDED RESET_STREAM STEP_STREAM SAMPLER_STREAM "
    "RANDOM_ACTION_STREAM END_ON_NONFINITE GUARD_ROWS OUTPUT_ROWS ALLOW_STAGING OBS_STAGING_BYTES SAMPLED SQUASH "
    "PARAMETERS_PER_AGENT RANDOMIZED RANDOMIZED_PARAMETER RANDOMIZED_STREAM JOINED_LAUNCHES "
    "PARAMETER_BYTES TRACKS_ACTING TAKES_TURNS ZERO_SUM".split()
)


@dataclass(frozen=True)
class FieldLayout:
    """One array of the state with its sizes in numbers. ``shape`` is that of one environment."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    shared: bool = False

    @cached_property
    def size(self) -> int:
        """Items of one environment."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one environment."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class GameLayout:
    """The resolved facts of one configured game; code generation, stepping, views and training read nothing else.

    Attributes:
        name: The game's class name, for messages.
        config: The game's repr, as in the first line of the generated code.
        source_path: The game's ``.cu`` file.
        host: Whether the game also runs on the host.
        kernels: Signatures of the kernels that its device code defines besides reset, step and observe.
        allows: Source rules that the game's device code may break.
        roles: Role name -> number of agents, in the order of the agent axis.
        role_slices: Role name -> its agents on the agent axis.
        agent_names: ``tagger_0``, ``tagger_1``, …, in agent order.
        observation: Layout of the observation tensor.
        action: Layout of the action tensor.
        masks_actions: Whether the game writes action masks.
        critic_state: Names of the fields that a central critic sees; neither these nor the next: it sees all
            observations.
        agent_critic_state: Names of fields of which it sees the row of an agent.
        clips_actions: Whether the engine clips Box actions to their bounds.
        takes_turns: Whether the game writes which agents act in the coming step.
        team_roles: Roles whose agents receive rewards until the episode ends, also once they have died.
        agent_id_size: Items at the end of an observation that stay when an agent of theirs dies.
        zero_sum: Whether the rewards of its two agents sum to 0.
        fields: The declared state, and the values of randomised parameters.
        engine_fields: State that the engine keeps for each environment beside the declared one.
        constants: Name -> value of every compile-time constant of the device code.
        randomized: Parameters that differ between environments, each with a field of its name.
        derived: Name of a derived constant that follows from them -> its C++ expression in double.
        obs_staging_bytes: Bytes of observations that a block collects in shared memory.
    """

    name: str
    config: str
    source_path: Path
    host: bool
    kernels: tuple[KernelSignature, ...]
    allows: tuple[str, ...]
    roles: Mapping[str, int]
    role_slices: Mapping[str, slice]
    agent_names: tuple[str, ...]
    observation: ObservationLayout
    action: ActionLayout
    masks_actions: bool
    critic_state: tuple[str, ...]
    agent_critic_state: tuple[str, ...]
    clips_actions: bool
    takes_turns: bool
    team_roles: tuple[str, ...]
    agent_id_size: int
    zero_sum: bool
    fields: tuple[FieldLayout, ...]
    engine_fields: tuple[FieldLayout, ...]
    constants: Mapping[str, int | float | bool]
    randomized: tuple[RandomizedParameter, ...]
    derived: Mapping[str, str]
    obs_staging_bytes: int

    @property
    def num_agents(self) -> int:
        """Agents of one environment, all roles."""
        return len(self.agent_names)

    @cached_property
    def agent_roles(self) -> tuple[str, ...]:
        """The role of each agent, in agent order."""
        return tuple(role for role, count in self.roles.items() for _ in range(count))

    @cached_property
    def present_roles(self) -> tuple[str, ...]:
        """Roles that have agents."""
        return tuple(role for role, count in self.roles.items() if count)

    @cached_property
    def obs_size(self) -> int:
        """Items of one agent's row of the observation tensor, the widest role's."""
        return math.prod(self.observation.shape)

    @cached_property
    def largest_array(self) -> int:
        """Items of the largest array that a step of one environment writes: a field of the state, or observations.

        Of observations in bytes four count as one item, as they are copied in words.
        """
        own = (field.size for field in (*self.fields, *self.engine_fields) if not field.shared)
        observations = -(-self.num_agents * self.obs_size * self.observation.dtype.itemsize // 4)
        return max(observations, *own)

    @property
    def tracks_acting(self) -> bool:
        """Whether agents may be active in a step, and receive its reward, without acting in it."""
        return self.takes_turns or bool(self.team_roles)

    @cached_property
    def num_choices(self) -> int:
        """Entries of an agent's action mask; 0 for a game without masks."""
        return self.action.num_logits if self.masks_actions else 0

    def state_tensors(self, initial_fields: Iterable[str] = ()) -> list[tuple[str, FieldLayout]]:
        """(tensor name, field): the engine's fields, the game's, and the initial states of ``initial_fields``."""
        fields = [(f"engine_{field.name}", field) for field in self.engine_fields]
        fields += [(f"state_{field.name}", field) for field in self.fields]
        return fields + [(f"initial_{field.name}", field) for field in self.fields if field.name in set(initial_fields)]


def slices_of_roles(roles: Mapping[str, int]) -> dict[str, slice]:
    """Role name -> its agents on the agent axis."""
    slices, start = {}, 0
    for role, count in roles.items():
        slices[role] = slice(start, start + count)
        start += count
    return slices


def resolve_engine_fields(
    num_agents: int, num_choices: int, *, tracks_acting: bool = False, num_randomized: int = 0
) -> tuple[FieldLayout, ...]:
    """State that the engine keeps for each environment; ``num_choices`` is 0 for a game without action masks.

    Shared by all environments are the ranges of randomised parameters, if there are any.
    """
    fields: tuple[FieldLayout, ...] = (
        FieldLayout("key", i32, (2,)),  # key of the environment's random streams; the bits of a u32 pair
        FieldLayout("episode", i64, (1,)),  # episodes begun since seeding, minus one
        FieldLayout("elapsed_steps", i32, (1,)),  # steps since reset
        FieldLayout("active", boolean, (num_agents,)),  # agents whose episode has not ended
        FieldLayout("fault", i32, (1,)),  # fault bits since the last call of reset()
        FieldLayout("returns", f64, (num_agents,)),  # sum of rewards of the running episode; float32 would drift
        FieldLayout("completed_returns", f64, (num_agents,)),  # sums over episodes that have ended
        FieldLayout("completed_lengths", i64, (1,)),
        FieldLayout("completed_episodes", i64, (1,)),
        FieldLayout("completed_terminations", i64, (1,)),  # of those, the ones whose last step truncated no agent
    )
    if tracks_acting:
        fields = (
            *fields,
            FieldLayout("alive", boolean, (num_agents,)),  # agents that did not end before their episode
            FieldLayout("acting", boolean, (num_agents,)),  # agents whose next action counts
        )
    if num_randomized:  # low, high, the largest value below high
        fields = (*fields, FieldLayout("ranges", f32, (num_randomized, 3), shared=True))
    return (*fields, FieldLayout("action_mask", boolean, (num_agents, num_choices))) if num_choices else fields


def resolve_constants(game: str, named: Mapping[str, Any]) -> dict[str, int | float | bool]:
    """The constants of the device code, their names in capitals.

    Raises:
        EnvDefinitionError: A name is reserved or not an identifier, or a value does not fit in 32 bits.
    """
    constants = {str.upper(name): value for name, value in named.items()}
    for name, value in constants.items():
        key = f"{game}.{name.lower()}"
        if not CONSTANT_NAME.fullmatch(name):
            raise EnvDefinitionError(f"{key}: {name!r} cannot be a constant's name; expected [A-Z][A-Z0-9_]*")
        if name in RESERVED_CONSTANTS:
            raise EnvDefinitionError(f"{key}: the device code defines {name} itself; rename the value")
        # Exactly these types: a subclass may define its own repr, which the generated code would contain.
        if type(value) not in (bool, int, float) or not fits_device(value):
            raise EnvDefinitionError(f"{key} is {value!r}; expected a bool, a 32-bit int or a finite float32")
    return constants
