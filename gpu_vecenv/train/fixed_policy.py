"""Policies without a network: random actions, the no-op that the game declares, or a function of observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.role_view import agents_of
from gpu_vecenv.train.user_functions import naming, qualified_name

RANDOM: Literal["random"] = "random"
STILL: Literal["still"] = "still"
WORDS = (RANDOM, STILL)
FUNCTION = "function"  # stands for one in checkpoints, which have no code
Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
FixedActor: TypeAlias = Function | Literal["random", "still"]


def noop_of(game: Env, role: str) -> tuple[float, ...]:
    """The action of a role's agent that does nothing, a number for each of its heads, or of its Box.

    Raises:
        ConfigError: The game declares none, or one that the role does not have.
    """
    layout, declared = game.layout.action, game.noop
    found = declared.get(role) if isinstance(declared, Mapping) else declared
    if found is None:
        raise ConfigError(
            f"{STILL!r} is given, but {type(game).__name__} declares no noop of {role!r}; expected one, such as "
            f"noop = 0, or {RANDOM!r} or others in place of {STILL!r}"
        )
    numbers = tuple(found) if isinstance(found, tuple | list) else (found,) * len(layout.sizes[role])
    sizes, space = layout.sizes[role], layout.spaces[role]
    fits = len(numbers) == len(sizes)
    if fits and role in layout.bounds:
        fits = all(low <= x <= high for x, low, high in zip(numbers, *layout.bounds[role], strict=True))
    elif fits:
        fits = all(type(x) is int and 0 <= x < size for x, size in zip(numbers, sizes, strict=True))
    if not fits:
        raise ConfigError(f"noop of {role!r} of {type(game).__name__} is {found!r}; expected an action of {space}")
    return numbers


class StandingStill:
    """An actor that takes the no-op of its agents.

    Args:
        game: The game.
        names: Roles or agents of one action space.
        device: Of the observations.

    Raises:
        ConfigError: The game declares none, or one that a role does not have.
    """

    def __init__(self, game: Env, names: Sequence[str], device: torch.device) -> None:
        layout = game.layout
        roles = [layout.agent_roles[agent] for agent in agents_of(game, names)]
        dtype = torch.float32 if layout.action.bounds.keys() & roles else torch.int32
        actions = torch.tensor([noop_of(game, role) for role in roles], dtype=dtype, device=device)
        self._actions = actions if layout.action.shape else actions[:, 0]

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, count[, heads]), of observations (num_envs, count, *shape)."""
        return self._actions.expand(len(obs), *self._actions.shape).contiguous()


class FixedPolicy(Policy):
    """Policy of agents that do not learn, and that no network plays.

    Args:
        game: The game.
        roles: The roles, or names of single agents, that use this policy.
        actor: "random": uniformly among the allowed choices, or from the Box; "still": the no-op that the game
            declares; or a function from observations (num_envs, count, *shape) to actions of their action space. None:
            a function that a checkpoint does not have; the policy is there, but cannot act.
        squash: Of the run, see ``Policy``.
        device: Of the observations.

    Attributes:
        kind: "random", "still" or "function".

    Raises:
        ConfigError: It is another word, or "still" in a game that declares no no-op of the role.
    """

    torch_reason = "no network"

    def __init__(
        self,
        game: Env,
        roles: Sequence[str],
        actor: FixedActor | None,
        *,
        squash: Squash = "clip",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(game, roles, nn.Identity(), squash=squash, device=device)
        self.kind = actor if isinstance(actor, str) else FUNCTION
        self._game, self._actor = game, actor
        if actor is not None:
            self.function(self.action_bounds.device)  # raises

    @property
    def can_act(self) -> bool:
        """Whether the actor is known; a function is not in a checkpoint."""
        return self._actor is not None

    @property
    def actor(self) -> FixedActor:
        """As it was given. Raises ConfigError if it is a function that the checkpoint does not have."""
        if self._actor is None:
            name = self.view.name
            raise ConfigError(
                f"{name} was played by a function in training, which the checkpoint does not have; give what plays "
                f"{name} now: {name}=file.py:function, {name}={RANDOM} or {name}=RUN where a command takes opponents, "
                "and where this run is the opponent name the roles that it trained, ROLE=RUN; "
                f"in Python an actor of {name!r} in place of this policy"
            )
        return self._actor

    def function(self, device: torch.device) -> Function | None:
        """What computes the actions of observations on a device; None: they are random."""
        return function_of(self._game, self.view.names, self.actor, device)

    def forward(self, obs: torch.Tensor, *arguments: Any, **options: Any) -> NoReturn:
        """Raise ConfigError: there is no network."""
        raise ConfigError(f"the policy of {self.view.name} is {self.kind!r}, without a network; expected act(obs)")

    @property
    def acts_for_all_agents(self) -> bool:
        """Always: a function takes the observations of its agents together."""
        return True

    def _act(
        self,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None,
        state: torch.Tensor | None,
        greedy: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        view = self.view
        each = (view.num_agents, *view.obs_shape)
        batch = obs.shape[: obs.ndim - len(each)]
        if (function := self.function(obs.device)) is not None:
            actions: torch.Tensor = function(obs.reshape(-1, *each))
            return actions.reshape(*batch, *actions.shape[1:])
        if view.continuous:
            low, high = self.action_bounds
            shape = (*batch, view.num_agents, view.num_heads)
            drawn: torch.Tensor = low + (high - low) * torch.rand(shape, generator=generator, device=obs.device)
            return drawn
        even = torch.zeros((*batch, view.num_agents, view.num_parameters), device=obs.device)
        return self._actions(even, action_mask, greedy=False, generator=generator)


def function_of(game: Env, names: Sequence[str], actor: FixedActor, device: torch.device) -> Function | None:
    """The function that an actor without a network is; None: random actions.

    Args:
        game: The game.
        names: Of the actor's roles or agents.
        actor: "random", "still" or the function.
        device: Of the observations.

    Raises:
        ConfigError: It is another word, or "still" in a game that declares no no-op of a role.
    """
    if not isinstance(actor, str):
        return _named(actor)
    if actor not in WORDS:
        raise ConfigError(
            f"the actor of {'+'.join(names)} is {actor!r}; expected {RANDOM!r}, {STILL!r} or a function of observations"
        )
    return None if actor == RANDOM else StandingStill(game, names, device)


def _named(actor: Function) -> Function:
    """The function, whose errors have its name."""

    def act(obs: torch.Tensor) -> torch.Tensor:
        with naming(qualified_name(actor)):
            return actor(obs)

    return act


def kinds_of(policies: Mapping[str, Policy]) -> dict[str, str]:
    """Name -> its ``kind``, of the policies without a network."""
    return {name: policy.kind for name, policy in policies.items() if isinstance(policy, FixedPolicy)}


def stored_actors(manifest: Mapping[str, Any], source: str) -> dict[str, str]:
    """Policy -> its ``kind``, of those without a network in a checkpoint's manifest.

    Raises:
        CheckpointCorruptError: They are of other kinds.
    """
    found = manifest.get("actors") or {}
    kinds = (*WORDS, FUNCTION)
    if not isinstance(found, dict) or not all(kind in kinds for kind in found.values()):
        raise CheckpointCorruptError(f"{source}: actors is {found!r:.80}; expected policies with {', '.join(kinds)}")
    return found
