"""Whole episodes, played by policies, scripts or chance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch

from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.distributions import masked
from gpu_vecenv.train.policy import Policy

# Who acts for a role: a policy, a function from the role's observations (num_envs, count, *shape) to its actions, as
# its action space says, or chance (None). Functions are asked for up to 15 steps after the last episode's end.
RolePolicy: TypeAlias = Policy | Callable[[torch.Tensor], torch.Tensor] | None
STEPS_PER_SYNC = 16  # the device is asked whether all is over only now and then


class RolePolicies:
    """Who acts for all agents of an environment.

    Draws, those of policies and those of chance, come from the replicas' own random streams: the same replica with the
    same seed is played the same, however many there are.

    Args:
        env: Where they act; without ``rows``.
        role_policies: Role -> who acts for it, a role without agents may be left out.
        greedy: Policies take the likeliest action instead of sampling.

    Raises:
        ConfigError: A role has no player, or a policy does not fit its role, or policies squash differently.
    """

    def __init__(self, env: VecEnv, role_policies: Mapping[str, RolePolicy], greedy: bool = False) -> None:
        game = env.game
        roles = list(game.layout.present_roles)
        if not set(roles) <= set(role_policies) <= set(game.layout.roles):
            raise ConfigError(f"role_policies are for {sorted(role_policies)}; the roles are {roles}")
        self.env, self.role_policies, self.greedy = env, dict(role_policies), greedy
        self._policies = {role: player for role, player in role_policies.items() if isinstance(player, Policy)}
        for role, policy in self._policies.items():
            found = policy.view.obs_shape, policy.view.head_sizes
            expected = (
                game.layout.observation.shapes[role],
                () if game.layout.action.continuous else game.layout.action.sizes[role],
            )
            if found != expected:
                raise ConfigError(
                    f"the policy of {role} takes observations and choices {found}; the game has {expected}"
                )
        squashes = {policy.squash for policy in self._policies.values()} or {"clip"}
        if len(squashes) > 1:
            raise ConfigError(f"policies squash their draws by {sorted(squashes)}; expected one way")
        self._sampler = Sampler(env, squash=squashes.pop())
        shape = (env.num_envs, game.layout.num_agents, self._sampler.num_parameters)
        self._parameters = torch.zeros(shape, device=env.device)

    @torch.no_grad()
    def __call__(self, obs: torch.Tensor, action_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Actions of the coming step, fresh memory, as ``VecEnv.step`` takes them. Waits for no device.

        Args:
            obs: (num_envs, num_agents, *shape), what the last ``reset`` or ``step`` gave.
            action_mask: Its ``info["action_mask"]``, of games that have it.
        """
        game, parameters = self.env.game, self._parameters
        for role, policy in self._policies.items():
            where = game.layout.role_slices[role]
            own = obs[(slice(None), where, *policy.view.obs_slice)]
            parameters[:, where][..., policy.view.parameter_columns] = policy(own)[0]
        actions = self._sampler.sample(masked(parameters, action_mask), greedy=self.greedy).actions
        drawn = self.env.sample_actions()
        for role, player in self.role_policies.items():
            where = game.layout.role_slices[role]
            if player is None:
                actions[:, where] = drawn[:, where]
            elif role not in self._policies:
                own = obs[(slice(None), where, *game.layout.observation.own(role))]
                heads = len(game.layout.action.sizes[role])
                part = actions[:, where, :heads] if game.layout.action.shape else actions[:, where]
                part.copy_(player(own))
        return actions


def evaluation_env(env: VecEnv, num_envs: int, first_env_index: int = 0) -> VecEnv:
    """Where episodes like those of ``env`` are played, one in each replica, while ``env`` itself rests."""
    eval_env = env.like(
        num_envs=num_envs,
        autoreset_mode="disabled",
        validate="async",
        agents_as_envs=False,
        first_env_index=first_env_index,
    )
    for field in env.game.layout.fields:
        if field.shared:  # they may have been changed, as by a curriculum
            eval_env.state[field.name].copy_(env.state[field.name])
    return eval_env


def steps_until_all_done(env: VecEnv) -> Iterator[None]:
    """Once for each step until all replicas have ended, and for up to 15 more: whether they have is asked now and then.

    Raises:
        NonFiniteError: Some replica was given an action that is none, and stands still.
    """
    while bool(env.active.any()):
        yield from itertools.repeat(None, STEPS_PER_SYNC)
        _check_actions(env)


def _check_actions(env: VecEnv) -> None:
    if bool((env.faults() & (Fault.INVALID_ACTION | Fault.NONFINITE_ACTION)).any()):
        raise NonFiniteError("a policy gives NaN, or excludes every choice, or a script an action that its role lacks")


def evaluate(
    env: VecEnv, role_policies: Mapping[str, RolePolicy], episodes: int = 1000, *, greedy: bool = False, seed: int = 1
) -> dict[str, float]:
    """Play whole episodes in an environment like ``env``, with as many replicas or fewer; ``env`` itself rests.

    Args:
        env: The pattern.
        role_policies: Role -> who acts for it.
        episodes: How many.
        greedy: Policies take the likeliest action instead of sampling.
        seed: Of the random streams.

    Returns:
        "episodes", "episode_length" (mean steps), "terminated_fraction" (of the episodes, those whose last step truncated
        no agent) and "return_<role>" (mean over episodes and the role's agents).

    Raises:
        ConfigError: A role has no player, or ``episodes`` is no positive int.
        NonFiniteError: A policy gives NaN, or excludes every choice.
    """
    if type(episodes) is not int or episodes < 1:
        raise ConfigError(f"episodes is {episodes}; at least 1 is needed")
    rounds = -(-episodes // env.num_envs)
    num_envs = -(-episodes // rounds)
    env = evaluation_env(env, num_envs)
    try:
        act, buffers, totals = RolePolicies(env, role_policies, greedy), env.step_buffers(), dict[str, float]()
        for played in range(0, episodes, num_envs):
            obs, _ = env.reset(seed=seed if played == 0 else None, out=buffers)
            env.clear_episode_statistics()
            for _ in steps_until_all_done(env):
                env.step(act(obs, buffers.action_mask), out=buffers)
            counted = slice(0, min(num_envs, episodes - played))
            statistics = {name: tensor[counted] for name, tensor in env.episode_statistics().items()}
            sums = {"episode_length": statistics["lengths"], "terminated_fraction": statistics["terminations"]}
            for role, where in env.game.layout.role_slices.items():
                sums[f"return_{role}"] = statistics["returns"][:, where].sum(-1) / max(env.game.layout.roles[role], 1)
            for name, tensor in sums.items():
                totals[name] = totals.get(name, 0.0) + float(tensor.double().sum())
    finally:
        env.close()
    return {"episodes": episodes, **{name: total / episodes for name, total in totals.items()}}
