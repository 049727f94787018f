"""The caller's configuration of policies: which agents share one, with which network, hyperparameters and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_choice
from gpu_vecenv.declare.config import with_known_options
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import validate_int
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.algorithms import CONFIGS, algorithm_of
from gpu_vecenv.train.fixed_policy import WORDS, FixedActor, FixedPolicy
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.network_outputs import check_gradients, check_outputs
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.role_view import agents_of, check_each_agent_once

Sharing = Literal["role", "agent", "all"]  # who shares a policy: the agents of a role, no two agents, or all agents

RUN_WIDE_KEYS = (
    "total_steps",
    "num_steps",
    "staggered_starts",
    "squash",
    "precision",
)  # options on which all policies must agree


@with_known_options
@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Configuration of the policy of one or more roles, or of some agents.

    Args:
        network: A module with the ``forward`` of ``ActorCritic`` or of ``RecurrentActorCritic``; None makes the default
            network of ``config``.
        config: Hyperparameters of this policy, whose class decides its algorithm; None uses the trainer's.
        weights: Initial weights: the ``state_dict`` of a ``Policy``, such as one that ``load_policy(…)`` returned.
        train: False freezes the policy: it acts, but is not trained.
        actor: What acts in place of a network and is not trained, so that ``train`` is False: "random", uniform
            actions; "still", the no-op that the game declares; or a function from observations
            (num_envs, count, *shape) to actions of the agents' action space, see ``Opponent``. It has no network,
            weights or population.
        population: Members: so many policies with weights of their own, each of which acts in its share of the
            environments and learns from these alone. With more than one ``network`` is None.

    Raises:
        TypeError: A value has another type.
        ValueError: ``population`` is less than 1.
        ConfigError: ``population`` is several with a ``network``, or ``actor`` is another word, or given with one of
            what it does not have.

    Example:
        >>> env = gpu_vecenv.make("tag_gridworld", num_envs=8)
        >>> policies = {"tagger": gpu_vecenv.PolicySpec(), "runner": gpu_vecenv.PolicySpec(train=False)}
        >>> trainer = gpu_vecenv.Trainer(env, policies=policies)  # taggers learn, the runner does not
        >>> [*trainer.policies]
        ['tagger', 'runner']
    """

    network: nn.Module | None = None
    config: LearnerConfig | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    train: bool = True
    actor: FixedActor | None = None
    population: int = 1

    def __post_init__(self) -> None:
        expected: dict[str, tuple[type, ...]] = {
            "network": (nn.Module,),
            "config": CONFIGS,
            "weights": (Mapping,),
            "train": (bool,),
        }
        for name, kinds in expected.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) and (value is not None or bool in kinds):
                known = " or ".join(f"a {kind.__name__}" for kind in kinds)
                alternative = "" if bool in kinds else " or None"
                raise TypeError(f"PolicySpec.{name} is a {type(value).__name__}; expected {known}{alternative}")
        object.__setattr__(self, "population", validate_int("population", self.population, 1))
        if self.population > 1 and self.network is not None:
            raise ConfigError(
                f"population is {self.population} with a network, a {type(self.network).__name__}; expected "
                "network=None: each member has a default network with initial weights of its own"
            )
        if self.actor is not None:
            self._check_actor(self.actor)
            object.__setattr__(self, "train", False)

    def _check_actor(self, actor: object) -> None:
        expected = f"{' or '.join(map(repr, WORDS))}, or a function of observations that returns actions"
        if isinstance(actor, Policy) or (not isinstance(actor, str) and not callable(actor)):
            more = "; of a Policy give weights=policy.state_dict(), its config=, and train=False"
            raise TypeError(
                f"PolicySpec.actor is a {type(actor).__name__}; expected {expected}{more * isinstance(actor, Policy)}"
            )
        if isinstance(actor, str) and actor not in WORDS:
            raise ConfigError(f"PolicySpec.actor is {actor!r:.80}; expected {expected}")
        given = {"network": self.network, "weights": self.weights, "population": self.population > 1 or None}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"PolicySpec has an actor and {wrong[0]}; expected one of them: an actor has no network")


def keeps_states(specs: Mapping[str, PolicySpec], config: LearnerConfig) -> bool:
    """Whether a rollout stores what central critics see: any policy has one. ``config`` is of those without one."""
    return any((spec.config or config).reads_states for spec in specs.values())


def names_of_policies(game: Env, sharing: Sharing, roles: Sequence[str] | None = None) -> list[str]:
    """The names of the policies of some roles, of all that have agents if it is None.

    Raises:
        ConfigError: ``sharing`` is none of its values, or "agent" in a game where an agent has the name of a role.
    """
    check_choice("sharing", sharing, get_args(Sharing), ConfigError)
    layout = game.layout
    names = list(layout.present_roles if roles is None else roles)
    if sharing == "all":
        return ["+".join(names)] if names else []
    if sharing == "role":
        return names
    if clashing := [name for name in layout.agent_names if name in layout.roles]:
        raise ConfigError(
            f"sharing is 'agent', but {clashing[0]!r} is a role and an agent of {type(game).__name__}; expected "
            "different names of roles, or sharing='role'"
        )
    return [layout.agent_names[agent] for agent in agents_of(game, names)]


def resolve_specs(
    game: Env, config: LearnerConfig, given: Mapping[str, PolicySpec | nn.Module] | None, sharing: Sharing = "role"
) -> dict[str, PolicySpec]:
    """The specification of each policy, in the order of the game's agents.

    Args:
        game: The game.
        config: Of policies without one.
        given: Name -> policy; None gives default ones to those who share according to ``sharing``.
        sharing: Only where there are none given.

    Raises:
        TypeError: A value is neither a PolicySpec nor a module.
        ConfigError: Agents are missing or unknown, policies share weights, or differ in what belongs to the run; or
            ``sharing`` is wrong, or not "role" beside given policies.
    """
    defaults = {name: PolicySpec() for name in names_of_policies(game, sharing)}
    if given is not None and sharing != "role":
        raise ConfigError(
            f"sharing is {sharing!r}, but policies are given, whose names say who shares one; leave it out"
        )
    for name, spec in (given or {}).items():
        if not isinstance(spec, PolicySpec | nn.Module):
            raise TypeError(
                f"policies[{name!r}] is a {type(spec).__name__}; expected a PolicySpec or a torch module. The key "
                "names the roles or agents that share it, joined by '+'; the game has the roles "
                f"{dict(game.layout.roles)}"
            )
    specs = {
        name: spec if isinstance(spec, PolicySpec) else PolicySpec(network=spec)
        for name, spec in (defaults if given is None else given).items()
    }
    networks = [spec.network for spec in specs.values() if spec.network is not None]
    parts = [id(part) for network in networks for part in {network, *network.parameters()}]
    if len(set(parts)) < len(parts):
        raise ConfigError(
            f"policies {list(specs)} share weights; expected separate networks, or one shared policy, as in 'a+b'"
        )
    check_each_agent_once(game, specs)
    for name, spec in specs.items():
        for key in RUN_WIDE_KEYS if spec.config else ():
            own, common = getattr(spec.config, key), getattr(config, key)
            if own != common:
                raise ConfigError(f"{key} of {name} is {own!r}; expected {common!r}, as in the trainer's config")
    return dict(sorted(specs.items(), key=lambda item: agents_of(game, item[0].split("+"))))


def policy_of_spec(name: str, spec: PolicySpec, config: LearnerConfig, game: Env, obs: torch.Tensor) -> Policy:
    """The policy that a specification describes, on the device of ``obs`` (num_envs, num_agents, *shape).

    Raises:
        ConfigError: Its network returns other shapes than the agents' actions need, or cannot be trained; its weights
            do not fit; or it stands still in a game that declares no no-op.
    """
    if spec.actor is not None:
        return FixedPolicy(game, name.split("+"), spec.actor, squash=config.squash, device=obs.device)
    policy = algorithm_of(config).make_policy(game, name.split("+"), config, spec.network, obs.device)
    for p in policy.parameters():
        # Steps of optimizers, torch's fused ones too, go through a parameter and its gradient in the order of memory.
        p.data = p.data.contiguous()
    check_outputs(name, policy, obs)
    if spec.train and not any(p.requires_grad for p in policy.parameters()):
        raise ConfigError(
            f"the network of {name} has no trainable parameters; expected some, or PolicySpec(train=False)"
        )
    if spec.train:
        check_gradients(name, policy, obs)
    if spec.weights is not None:
        policy.load_weights(spec.weights)
    return policy.requires_grad_(spec.train)
