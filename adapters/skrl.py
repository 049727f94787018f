"""skrl: games of several agents for its multi-agent learners (IPPO, MAPPO), games of one agent for the others.

skrl acts next on what a step returns, and asks nobody who still plays. So this adapter fixes "same_step", and ``rows``:
an agent that leaves early ends there, is zeros until its replica ends, and then terminates once more; nothing is
learned across a new start. Tensors stay on the device: skrl's own wrappers for Isaac Lab, which need no Isaac Lab, take
views of what the engine wrote. Copied are the joint state where roles see unequally much, and Box actions: skrl's
Gaussian policies leave the action space, so the game gets a copy clipped to it.

What is left to the user:

* ``time_limit_bootstrap=True`` in the learner's configuration: without it, advantages leak across truncations.
* ``with_final_obs(agent)``: skrl bootstraps truncated episodes from the observation that follows, the next episode's
  first; with this, from their own last one.
* ``skrl.utils.set_seed`` before ``make``: the environment is seeded with its number, else with 0.
* IPPO and MAPPO refuse their own defaults, empty dictionaries of keyword arguments. Give each agent one,
  ``learning_rate_scheduler_kwargs={agent: {} for agent in env.possible_agents}``, and without skrl's ``Runner``
  likewise for the observation, state and value preprocessors.

skrl's trainer logs ``infos["episode"]``, the means of ``EpisodeLog``, and waits for the device to read them;
``environment_info=""`` in its configuration stops that. In its own log of several agents, an episode lasts until the
first agent leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from gpu_vecenv import BatchedParallelEnv, EpisodeLog, GymnasiumVectorEnv
from gpu_vecenv.adapters import ActionClip, check_actions, checked_vector_env, requires_extra, split_config

with requires_extra("skrl"):
    from skrl.envs.wrappers.torch import MultiAgentEnvWrapper, Wrapper, wrap_env


class LazyMeans:
    """What skrl's trainer looks at in each step's infos: worked out when it does, on the device."""

    def __init__(self, log: EpisodeLog) -> None:
        self._log = log

    def items(self) -> Any:
        """Name -> mean over the episodes that ended since the last look, see ``EpisodeLog.means``."""
        return self._log.means().items()


class MultiAgentEnv:
    """A BatchedParallelEnv that clips Box actions and logs episodes. All other attributes are its own."""

    def __init__(self, env: Any, action_space: Space[Any]) -> None:
        self.env, self._episode = env, LazyMeans(EpisodeLog(env.unwrapped.vec_env))
        self._clip = ActionClip(action_space, self.device)  # a Box is the same for all roles

    @property
    def unwrapped(self) -> MultiAgentEnv:
        """Itself: skrl looks for attributes there."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not there yet: somebody copies
            raise AttributeError(name)
        return getattr(self.env.unwrapped, name)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As ``BatchedParallelEnv.step``, with "episode" in extras."""
        *outputs, extras = self.env.step({agent: self._clip(given) for agent, given in actions.items()})
        return *outputs, {**extras, "episode": self._episode}


class SingleAgentEnv(MultiAgentEnv):
    """A GymnasiumVectorEnv likewise, with its observations under "policy"."""

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        super().__init__(env, env.single_action_space)
        self.single_observation_space = {"policy": env.single_observation_space}
        self.single_action_space = env.single_action_space

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """As ``GymnasiumVectorEnv.reset``."""
        obs, info = self.env.reset(seed=seed)
        return {"policy": obs}, info

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As ``GymnasiumVectorEnv.step``; Discrete actions have a last axis of length 1."""
        actions = actions.squeeze(-1) if isinstance(self.single_action_space, Discrete) else self._clip(actions)
        obs, *outputs, info = self.env.step(actions)
        return {"policy": obs}, *outputs, {**info, "episode": self._episode}


def with_final_obs(agent: Any) -> Any:
    """A learner of skrl's, changed: what follows the last step of an episode is now its last observation (and state).

    Each step then copies the observations, once more for the state.
    """
    record = agent.record_transition
    acting: dict[str, torch.Tensor] | None = None  # in the step, by the infos of the one before

    def seen(ended: torch.Tensor, final_obs: torch.Tensor, next_obs: torch.Tensor) -> torch.Tensor:
        return torch.where(ended[:, None], final_obs.flatten(1), next_obs)

    def record_transition(*, next_observations: Any, next_states: Any, infos: dict[str, Any], **others: Any) -> None:
        nonlocal acting
        ended, final_obs = infos["_final_obs"], infos["final_obs"]
        if isinstance(next_observations, dict):
            if acting is not None:  # agents that had left are zeros at the end, too, as critics know them
                final_obs = {key: torch.where(acting[key][:, None], final_obs[key].flatten(1), 0) for key in acting}
            acting = infos["active"]
            next_observations = {key: seen(ended[key], final_obs[key], obs) for key, obs in next_observations.items()}
            joint = torch.cat(list(next_observations.values()), 1)
            next_states = {key: torch.where(ended[key][:, None], joint, state) for key, state in next_states.items()}
        else:
            next_observations = seen(ended, final_obs, next_observations)
        record(next_observations=next_observations, next_states=next_states, infos=infos, **others)

    agent.record_transition = record_transition
    return agent


def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> Wrapper | MultiAgentEnvWrapper:
    """``num_envs`` replicas of a game, for multi-agent learners if it has several agents; ``config`` as for a view."""
    game, config = split_config(game, config, agents_as_envs=True)
    if game.layout.num_agents > 1:
        return wrap(BatchedParallelEnv(game, num_envs, device, **config))
    del config["agents_as_envs"]  # the other view always has them
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: BatchedParallelEnv | GymnasiumVectorEnv) -> Wrapper | MultiAgentEnvWrapper:
    """A view with ``rows`` for multi-agent learners, or a Gymnasium view, agents as rows, for single-agent learners."""
    if not isinstance(env, BatchedParallelEnv):
        return wrap_env(SingleAgentEnv(checked_vector_env(env, "skrl")), "isaaclab-single-agent", verbose=False)
    found = f"group_by={env.group_by!r}, agents_as_envs={env.vec_env.agents_as_envs}, autoreset_mode={env.vec_env.autoreset_mode!r}"
    if found != (expected := "group_by='agent', agents_as_envs=True, autoreset_mode='same_step'"):
        raise ValueError(f"env has {found}; expected {expected}")
    space = next(iter(env.action_spaces.values()))
    check_actions("skrl", space, (Discrete, MultiDiscrete, Box), env.game.layout.masks_actions)
    return wrap_env(MultiAgentEnv(env, space), "isaaclab-multi-agent", verbose=False)
