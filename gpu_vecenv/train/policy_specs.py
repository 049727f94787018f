"""The caller's configuration of policies: which roles share one, with which network, hyperparameters and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.network_outputs import check_gradients, check_outputs
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.ppo import PPOConfig, make_policy

RUN_WIDE_KEYS = ("total_steps", "num_steps", "squash", "precision")  # options on which all policies must agree


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Configuration of the policy of one or more roles.

    Args:
        network: A module with the ``forward`` of ``ActorCritic`` or of ``RecurrentActorCritic``; None makes the default
            network of ``config``.
        config: Hyperparameters of this policy; None uses the trainer's.
        weights: Initial weights: the ``state_dict`` of a ``Policy``, such as one that ``load_policy(…)`` returned.
        train: False freezes the policy: it acts, but is not trained.

    Raises:
        TypeError: A value has another type.
    """

    network: nn.Module | None = None
    config: PPOConfig | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    train: bool = True

    def __post_init__(self) -> None:
        expected = {"network": nn.Module, "config": PPOConfig, "weights": Mapping, "train": bool}
        for name, kind in expected.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or kind is bool):
                alternative = "" if kind is bool else " or None"
                raise TypeError(
                    f"PolicySpec.{name} is a {type(value).__name__}; expected a {kind.__name__}{alternative}"
                )


def resolve_specs(
    game: Env, config: PPOConfig, given: Mapping[str, PolicySpec | nn.Module] | None
) -> dict[str, PolicySpec]:
    """The specification of each policy, in the order of the game's roles; None gives each role a policy of its own.

    Raises:
        TypeError: A value is neither a PolicySpec nor a module.
        ConfigError: Roles are missing or unknown, policies share weights, or differ in what belongs to the run.
    """
    known = list(game.layout.present_roles)
    if wrong := [spec for spec in (given or {}).values() if not isinstance(spec, PolicySpec | nn.Module)]:
        raise TypeError(f"policies hold a {type(wrong[0]).__name__}; expected a PolicySpec or a torch module")
    specs = {
        name: spec if isinstance(spec, PolicySpec) else PolicySpec(network=spec)
        for name, spec in ({role: PolicySpec() for role in known} if given is None else given).items()
    }
    networks = [spec.network for spec in specs.values() if spec.network is not None]
    parts = [id(part) for network in networks for part in {network, *network.parameters()}]
    if len(set(parts)) < len(parts):
        raise ConfigError(
            f"policies {list(specs)} share weights; expected separate networks, or one shared policy, as in 'a+b'"
        )
    named = [role for name in specs for role in name.split("+")]
    if sorted(named) != sorted(known):
        raise ConfigError(f"policies are for {list(specs)}; expected each of the roles {known} once")
    for name, spec in specs.items():
        for key in RUN_WIDE_KEYS if spec.config else ():
            own, common = getattr(spec.config, key), getattr(config, key)
            if own != common:
                raise ConfigError(f"{key} of {name} is {own!r}; expected {common!r}, as in the trainer's config")
    return dict(sorted(specs.items(), key=lambda item: known.index(item[0].split("+")[0])))


def policy_of_spec(name: str, spec: PolicySpec, config: PPOConfig, game: Env, obs: torch.Tensor) -> Policy:
    """The policy that a specification describes, on the device of ``obs`` (num_envs, num_agents, *shape).

    Raises:
        ConfigError: Its network returns other shapes than the roles' actions need, or cannot be trained; or its weights
            do not fit.
    """
    policy = make_policy(game, name.split("+"), config, spec.network, obs.device)
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
