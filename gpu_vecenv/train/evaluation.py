"""Evaluation: whole episodes, played by policies, scripts or a random policy."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.errors import ConfigError, EnvContractError, NonFiniteError
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.train.fixed_policy import FixedActor, FixedPolicy, Function, function_of
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, capture_stream, ordered_on
from gpu_vecenv.train.layers import has_hooks
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.recurrent import kept
from gpu_vecenv.train.role_view import RoleView, agents_of, check_each_agent_once, sides_with_returns

# The actor of some agents: a policy, a function from their observations (num_envs, count, *shape) to actions of their
# action space, "random" or None for uniform actions, or "still" for the no-op that the game declares. Functions are
# called for up to 15 steps after the last episode has ended.
RolePolicy: TypeAlias = Policy | FixedActor | None
MAX_STEPS = 1_000_000  # of an episode, of games without max_steps
OWN_PACKAGES = ("gpu_vecenv", "torch")  # the modules of these do all their work on the device
STEPS_PER_SYNC = 16  # steps between the host's checks whether all episodes have ended


class RolePolicies:
    """Actions for all agents of an environment, from one actor for each role, agent, or several of them.

    Policies and random actions draw from the random streams of each environment: an episode depends on the seed and on
    the environment's index, not on the number of environments.

    It keeps the states of recurrent policies: one for each agent, which begins at 0 with each episode.

    Attributes:
        capturable: Whether a call can be captured in a CUDA graph: no actor is a function, and no network has a module
            or a hook of a user's, which may do on the host what replays of a graph would leave out.

    Args:
        env: The environment, without ``agents_as_envs``.
        role_policies: Role or agent -> its actor, or several joined by "+"; roles without agents may be omitted. A
            GamePolicy stands for its ``policies``.
        greedy: Policies take the most likely action instead of sampling.

    Raises:
        TypeError: ``role_policies`` is neither, or an actor is none of the three.
        ConfigError: An agent has no actor or several, a policy does not match its agents, or policies differ in
            ``squash``.
    """

    def __init__(self, env: VecEnv, role_policies: GamePolicy | Mapping[str, RolePolicy], greedy: bool = False) -> None:
        check_kind("env", env, VecEnv, "a VecEnv (of a view: view.vec_env)")
        check_flag("greedy", greedy)
        game = env.game
        roles = list(game.layout.present_roles)
        if isinstance(role_policies, GamePolicy):
            role_policies = role_policies.policies
        if not isinstance(role_policies, Mapping):
            raise TypeError(
                f"role_policies is a {type(role_policies).__name__}; expected a GamePolicy, or a mapping, role name -> "
                f"a Policy, a function of observations, or None for random actions; roles: {roles}"
            )
        present = [name for name in role_policies if game.layout.roles.get(name) != 0]
        check_each_agent_once(game, present, "role_policies")
        for role, actor in role_policies.items():
            if not isinstance(actor, str | None) and not callable(actor):
                raise TypeError(
                    f"the actor of {role!r} is a {type(actor).__name__}; expected a Policy, a function of observations "
                    'that returns actions, "still", or "random" or None for random actions'
                )
        self.env, self.greedy = env, greedy
        self.role_policies = {name: role_policies[name] for name in present}
        self.views = {name: RoleView(game, name.split("+"), env.device) for name in present}
        self._policies, functions = divided(game, self.role_policies, env.device)
        for name, policy in self._policies.items():
            check_fits_agents(f"the policy of {name}", policy, self.views[name])
        modules = [module for policy in self._policies.values() for module in policy.modules()]
        self.capturable = all(function is None for function in functions.values())
        self.capturable &= not any(
            has_hooks(module) or type(module).__module__.split(".")[0] not in OWN_PACKAGES for module in modules
        )
        self._agents = {
            name: positions_of(env, name, self.views[name], policy)
            for name, policy in self._policies.items()
            if policy.agent_ids
        }
        squashes = {policy.squash for policy in self._policies.values()} or {"clip"}
        if len(squashes) > 1:
            raise ConfigError(f"policies have squash {sorted(squashes)}; expected one value")
        self._sampler = Sampler(env, squash=squashes.pop())
        shape = (env.num_envs, game.layout.num_agents, self._sampler.num_parameters)
        self._parameters = torch.zeros(shape, device=env.device)
        self._states = {
            name: torch.zeros((env.num_envs, self.views[name].num_agents, policy.acting_state_size), device=env.device)
            for name, policy in self._policies.items()
            if policy.acting_state_size
        }
        self._write_actions = FunctionActions(env, self.views, functions)

    @torch.no_grad()
    def __call__(self, obs: torch.Tensor, action_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Actions for ``VecEnv.step``, a new tensor. No device synchronisation.

        Args:
            obs: (num_envs, num_agents, *shape), observations of the last ``reset`` or ``step``.
            action_mask: Its ``info["action_mask"]``, for games with masks.

        Raises:
            TypeError, ValueError: A function returned something else than an action tensor of its agents,
                (num_envs, count) int32 or int64; with several heads or a Box (num_envs, count, n), of a Box float32.
        """
        parameters = self._parameters
        for name, policy in self._policies.items():
            view = self.views[name]
            own_obs = view.obs(obs)
            if name in self._states:
                begins = (self.env.elapsed_steps == 0)[:, None].expand(own_obs.shape[:2])
                outputs, state = policy.acting(own_obs, kept(self._states[name], ~begins), self._agents.get(name))
                assert state is not None
                self._states[name].copy_(kept(state, self.env.active[:, view.agents]))
            else:
                outputs = policy.parameters_of(own_obs, self._agents.get(name))
            mask = None if action_mask is None else view.mask(action_mask[:, view.agents])
            view.write_parameters(policy.distribution(outputs, mask, greedy=self.greedy), parameters)
        actions = self._sampler.sample(parameters, greedy=self.greedy).actions
        self._write_actions(obs, actions)
        return actions


def divided(
    game: Env, actors: Mapping[str, RolePolicy], device: torch.device
) -> tuple[dict[str, Policy], dict[str, Function | None]]:
    """Of actors the policies with a network, and the functions that the others are; None: random actions.

    Args:
        game: The game.
        actors: Role or agent -> its actor, or several joined by "+".
        device: Of the observations.

    Raises:
        ConfigError: An actor is "still" in a game that declares no no-op, another word, or a function that a checkpoint
            does not have.
    """
    policies, functions = dict[str, Policy](), dict[str, Function | None]()
    for name, actor in actors.items():
        if isinstance(actor, FixedPolicy):
            functions[name] = actor.function(device)
        elif isinstance(actor, Policy):
            policies[name] = actor
        else:
            functions[name] = None if actor is None else function_of(game, name.split("+"), actor, device)
    return policies, functions


class FunctionActions:
    """Writes the actions of agents that have no network into those of a step.

    Args:
        env: The environment; observations are of all or of the last of its environments.
        views: Name -> agents.
        functions: Name -> function of their observations, or None for random actions; some of the names.
        num_envs: Of the observations; None: all.
        owner: What messages add to the name of a function.
    """

    def __init__(
        self,
        env: VecEnv,
        views: Mapping[str, RoleView],
        functions: Mapping[str, Function | None],
        num_envs: int | None = None,
        owner: str = "",
    ) -> None:
        self._env, self._functions, self._owner = env, dict(functions), owner
        self.views = {name: views[name] for name in functions}
        count = env.num_envs if num_envs is None else num_envs
        self._envs = slice(env.num_envs - count, None)
        self._validator = ActionValidator(env.game.layout, (count, env.game.layout.num_agents), env.device)

    def __call__(self, obs: torch.Tensor, actions: torch.Tensor) -> None:
        """Write the actions for observations (num_envs, num_agents, *shape) into (num_envs, num_agents[, heads]).

        Raises:
            TypeError, ValueError: A function returned something else than an action tensor of its agents, see
                ``RolePolicies``.
        """
        random = self._env.sample_actions()[self._envs] if None in self._functions.values() else None
        for name, function in self._functions.items():
            view = self.views[name]
            if function is None:
                assert random is not None
                actions[:, view.agents] = random[:, view.agents]
            else:
                what = f"the function of {name!r}{self._owner}"
                write_actions_of_function(function, what, view, self._validator, view.obs(obs), actions)


def write_actions_of_function(
    function: Callable[[torch.Tensor], Any],
    what: str,
    view: RoleView,
    validator: ActionValidator,
    obs: torch.Tensor,
    actions: torch.Tensor,
) -> None:
    """Write the actions that a function returns for its agents' observations.

    Args:
        function: Of ``obs``.
        what: What error messages call it.
        view: Of its agents.
        validator: Of the game.
        obs: (num_envs, count, *shape).
        actions: (num_envs, num_agents[, heads]), of which those of its agents are written.

    Raises:
        TypeError, ValueError: It returned something else than an action tensor of its agents, see ``RolePolicies``.
    """
    own: tuple[Any, ...] = (slice(None), view.agents)
    shape: tuple[int, ...] = (len(actions), view.num_agents)
    if actions.ndim > 2:
        own, shape = (*own, slice(view.num_heads)), (*shape, view.num_heads)
    given = validator(function(obs), shape, f"{what}: actions", view.roles[0])
    if given.dtype is torch.int64:  # a value that the int32 of the tensor cannot hold is no choice
        given = torch.where((given >= 0) & (given < 2**31), given, -1)
    actions[own] = given.to(actions.dtype)


def replaced(
    game: Env, role_policies: Mapping[str, RolePolicy], others: Mapping[str, RolePolicy]
) -> dict[str, RolePolicy]:
    """The actors with ``others`` in place of those of the same agents; names may be joined by "+"."""
    taken = set(agents_of(game, [part for name in others for part in name.split("+")]))
    left = dict[str, RolePolicy]()
    for name, actor in role_policies.items():
        own = agents_of(game, name.split("+"))
        if taken.isdisjoint(own):
            left[name] = actor
        else:
            left |= {game.layout.agent_names[agent]: actor for agent in own if agent not in taken}
    return left | dict(others)


def actors_of(players: Mapping[str, GamePolicy | FixedActor]) -> dict[str, RolePolicy]:
    """The same with the policies of each GamePolicy in its place; names may be joined by "+".

    Raises:
        AgentKeyError: A GamePolicy has no policy of such a role or agent.
    """
    found = dict[str, RolePolicy]()
    for name, player in players.items():
        if isinstance(player, GamePolicy):
            for part_of_name in name.split("+"):
                found |= player.policies_of(part_of_name)
        else:
            found[name] = player
    return found


def check_fits_agents(what: str, policy: Policy, own: RoleView) -> None:
    """Raise ConfigError unless a policy, which ``what`` names, is of observations and choices of these agents."""
    found, expected = (
        (view.obs_shape, (0,) * view.num_heads if view.continuous else view.head_sizes) for view in (policy.view, own)
    )
    if found != expected:
        raise ConfigError(f"{what} has observations and choices {found}; expected those of the game: {expected}")


def positions_of(env: VecEnv, name: str, own: RoleView, policy: Policy) -> torch.Tensor:
    """Numbers of an actor's agents among those of its policy, (count,) int64.

    Args:
        env: The environment.
        name: Of the actor, for messages.
        own: Of its agents.
        policy: With ``agent_ids``.

    Raises:
        ConfigError: The policy is of another number of agents than the game has.
    """
    game, view = env.game, policy.view
    known = {*game.layout.roles, *game.layout.agent_names}
    shared = RoleView(game, view.names, env.device) if known.issuperset(view.names) else own
    if not set(own.agent_numbers) <= set(shared.agent_numbers):
        shared = own
    if shared.num_agents != view.num_agents:
        raise ConfigError(
            f"the policy of {name}, with agent_ids, is of {view.num_agents} agents; the game has "
            f"{shared.num_agents} of {shared.name}"
        )
    return shared.positions()[own.agents]


def evaluation_env(env: VecEnv, num_envs: int, first_env_index: int = 0) -> VecEnv:
    """A copy of ``env`` with its own state, in "disabled" mode: one episode per environment; ``env`` is not stepped."""
    return env.like(
        num_envs=num_envs,
        autoreset_mode="disabled",
        validate="async",
        agents_as_envs=False,
        first_env_index=first_env_index,
    )


def steps_until_all_done(env: VecEnv, on_progress: OnProgress = no_progress) -> Iterator[None]:
    """Yield once per step until all episodes have ended, and up to 15 times more: the host checks every 16 steps.

    The progress is that of the longest possible episode, or of the episodes that have ended if the game has no
    ``max_steps``.

    Raises:
        NonFiniteError: An environment received an invalid action.
        EnvContractError: An episode goes on after the game's ``max_steps``, or after MAX_STEPS if it has none.
    """
    declared = getattr(env.game, "max_steps", None)
    limit = declared if type(declared) is int else MAX_STEPS
    for steps in itertools.count(0, STEPS_PER_SYNC):
        running = env.active.any(1)
        num_running = int(running.sum())
        ended = env.num_envs - num_running
        fraction = min(steps / limit, 1.0) if limit == declared else ended / env.num_envs
        text = f"step {steps:,}, {ended:,} of {env.num_envs:,} episodes ended"
        on_progress(fraction if num_running else 1.0, text)
        if not num_running:
            return
        if steps >= limit:
            raise EnvContractError(
                f"{env.layout.name}: {num_running} of {env.num_envs} episodes go on after {limit:,} steps, the "
                f"first in environment {int(running.nonzero()[0])}; expected step() to set io.terminations or "
                "io.truncations of every agent, for example io.truncations[i] = io.elapsed_steps >= MAX_STEPS"
            )
        yield from itertools.repeat(None, STEPS_PER_SYNC)
        _check_actions(env)


def _check_actions(env: VecEnv) -> None:
    if bool((env.faults() & (Fault.INVALID_ACTION | Fault.NONFINITE_ACTION)).any()):
        raise NonFiniteError(
            "an environment received an invalid action: a network returned NaN, a mask forbids every choice, or a "
            "function returned an action that its role does not have"
        )


class Evaluator:
    """Plays whole episodes in a copy of ``env``, which is made once; ``env`` is not stepped.

    What a call returns depends on its arguments, and on the shared fields of ``env`` at that time, alone. On a GPU a
    step with its actions is one CUDA graph, if the actors are ``capturable``.

    Attributes:
        env: The copy. After a call its state is that in which the episodes of the last round ended.

    Args:
        env: The template.
        num_envs: Number of environments of the copy.
        first_env_index: Index of the first of them, which decides its random numbers.
    """

    def __init__(self, env: VecEnv, num_envs: int, first_env_index: int = 0) -> None:
        self._template, self.env = env, evaluation_env(env, num_envs, first_env_index)
        self._buffers = self.env.step_buffers()
        sides = (name for name in sides_with_returns(env.game) if name not in env.game.layout.roles)
        self._sides = {name: RoleView(env.game, [name], env.device) for name in sides}

    def __call__(
        self,
        role_policies: GamePolicy | Mapping[str, RolePolicy],
        episodes: int,
        *,
        greedy: bool = False,
        seed: int = 1,
        on_progress: OnProgress = no_progress,
    ) -> dict[str, float]:
        """Play the episodes; arguments, metrics and errors as for ``evaluate``."""
        totals, worst, digests = dict[str, float](), dict[str, float](), list[torch.Tensor]()
        for played, digest in self._rounds(role_policies, episodes, greedy, seed, on_progress):
            for name, tensor in played.items():
                totals[name] = totals.get(name, 0.0) + float(tensor.sum())
                if name.startswith("return_"):
                    lowest = float(tensor.min())
                    worst[f"worst_{name}"] = min(worst.get(f"worst_{name}", lowest), lowest)
            if digest is not None:
                digests.append(digest)
        distinct = {"distinct_episodes": torch.cat(digests).unique().numel()} if digests else {}
        means = {name: total / episodes for name, total in totals.items()}
        return {"episodes": episodes, **distinct, **means, **worst}

    def of_each_episode(
        self,
        role_policies: GamePolicy | Mapping[str, RolePolicy],
        episodes: int,
        *,
        greedy: bool = False,
        seed: int = 1,
        on_progress: OnProgress = no_progress,
    ) -> dict[str, torch.Tensor]:
        """The same episodes: metric, as of ``evaluate`` -> (episodes,) float64, on the environment's device."""
        rounds = [played for played, _ in self._rounds(role_policies, episodes, greedy, seed, on_progress)]
        return {name: torch.cat([played[name] for played in rounds]) for name in rounds[0]}

    def _rounds(
        self,
        role_policies: GamePolicy | Mapping[str, RolePolicy],
        episodes: int,
        greedy: bool,
        seed: int,
        on_progress: OnProgress,
    ) -> list[tuple[dict[str, torch.Tensor], torch.Tensor | None]]:
        """An episode of each environment at a time: metric -> (episodes of the round,) float64; digests if greedy."""
        env, buffers, rounds = self.env, self._buffers, -(-episodes // self.env.num_envs)
        env.copy_shared_values(self._template)
        act = RolePolicies(env, role_policies, greedy)
        digest = Digest(env.functions, env.num_envs) if greedy else None

        def step() -> None:
            env.step(act(buffers.obs, buffers.action_mask), out=buffers)

        def step_and_add(digest: Digest) -> None:
            running, before = env.active.any(1), digest.words.clone()
            step()
            digest.add_outputs(buffers.obs, buffers.rewards)
            digest.words.copy_(torch.where(running, digest.words, before))

        stream, graph_pool = None, None
        if env.device.type == "cuda" and act.capturable and env.why_not_fused() is None:
            stream, graph_pool = capture_stream(env.functions.backend, threading.get_ident()), GraphPool()
        graphed = GraphedCallable(
            step if digest is None else partial(step_and_add, digest), "the evaluation", graph_pool
        )
        played = []
        with ordered_on(stream, env.device):
            for index in range(rounds):
                first = index * env.num_envs
                label = f"episodes {first + 1:,} to {min(first + env.num_envs, episodes):,} of {episodes:,}"
                env.reset(seed=seed if index == 0 else None, out=buffers)
                env.clear_episode_statistics()
                if digest is not None:
                    digest.words.zero_()
                    digest.add_outputs(buffers.obs)
                for _ in steps_until_all_done(env, part(on_progress, index, rounds, label)):
                    graphed()
                counted = slice(0, min(env.num_envs, episodes - first))
                digests = None if digest is None else digest.words[counted].clone()
                played.append((self._metrics(act, counted), digests))
        return played

    def _metrics(self, act: RolePolicies, counted: slice) -> dict[str, torch.Tensor]:
        """Of the episodes that have ended in some of the environments; copies."""
        env = self.env
        statistics = {name: tensor[counted] for name, tensor in env.episode_statistics().items()}
        metrics = {"episode_length": statistics["lengths"], "terminated_fraction": statistics["terminations"]}
        for role, where in env.game.layout.role_slices.items():
            metrics[f"return_{role}"] = statistics["returns"][:, where].sum(-1) / max(env.game.layout.roles[role], 1)
        for name, view in {**act.views, **self._sides}.items():
            if name not in env.game.layout.roles:
                metrics[f"return_{name}"] = statistics["returns"][:, view.agents].mean(-1)
        for name in env.game.state_metrics:  # the state stays as it is at the end of an episode
            metrics[f"state_{name}"] = env.state[name][counted, None].flatten(1).double().mean(1)
        return {name: tensor.to(torch.float64, copy=True) for name, tensor in metrics.items()}

    def close(self) -> None:
        """Release the memory of the copy."""
        self.env.close()


def evaluate(
    env: VecEnv,
    role_policies: GamePolicy | Mapping[str, RolePolicy],
    episodes: int = 1000,
    *,
    greedy: bool = False,
    seed: int = 1,
    on_progress: OnProgress = no_progress,
) -> dict[str, float]:
    """Play whole episodes in a copy of ``env``, with at most as many environments; ``env`` is not stepped.

    Args:
        env: The template.
        role_policies: Role or agent -> its actor: a ``Policy``, a function from their observations to their actions, or
            None for random actions. Several may be joined by "+". Or a GamePolicy, such as ``load_policy`` returns.
        episodes: Number of episodes.
        greedy: Policies take the most likely action instead of sampling.
        seed: Seed of the environments and of the actions.
        on_progress: Called with the fraction that is done and a text.

    Returns:
        "episodes", "episode_length" (mean steps), "terminated_fraction" (fraction of episodes whose last step truncated
        no agent) and "return_<role>" (mean over episodes and the role's agents); of actors of single agents, or of
        several roles, "return_<name>" too, and of both agents of a zero-sum game of one role, whose mean is always 0.
        "state_<field>" is the mean of a field in the game's ``state_metrics`` as episodes end. "worst_return_<name>" is
        the lowest of an episode. With ``greedy`` also "distinct_episodes": how many of them differ in an observation or
        a reward. Where that is 1, nothing is drawn at random, and more episodes tell no more.

    Raises:
        ConfigError: An agent has no actor or several, or ``episodes`` is not a positive int.
        TypeError, ValueError: An actor is none of these, or a function returned a tensor of another dtype, shape or
            device than its agents' actions: (num_envs, count) int32 or int64; with several heads or a Box
            (num_envs, count, n), of a Box float32.
        NonFiniteError: A network returned NaN, a mask forbids every choice, or a function returned an invalid action.
        EnvContractError: An episode does not end.
    """
    check_kind("env", env, VecEnv, "a VecEnv (of a view: view.vec_env)")
    check_kind("on_progress", on_progress, Callable, "a function of a fraction and a text")
    if type(episodes) is not int or episodes < 1:
        raise ConfigError(f"episodes is {episodes!r}; expected an int >= 1")
    rounds = -(-episodes // env.num_envs)
    with contextlib.closing(Evaluator(env, -(-episodes // rounds))) as evaluator:
        return evaluator(role_policies, episodes, greedy=greedy, seed=seed, on_progress=on_progress)
