"""skrl: games of several agents for its multi-agent algorithms (IPPO, MAPPO), games of one agent for the others.

skrl acts next on the observation of a step and does not track active agents. So the adapter fixes "same_step" and
``agents_as_envs=True``: an agent that leaves early ends there, is zeros until its environment ends, and then terminates
once more; no learner bootstraps across a reset. Tensors stay on the device: skrl's wrappers for Isaac Lab, which do not
need Isaac Lab, get views of the step buffers. Copied are the joint state if roles have different observation sizes, and
Box actions, which are clipped because skrl's Gaussian policies are unbounded.

To be set by the user:

* ``time_limit_bootstrap=True`` in the algorithm's configuration: without it, advantages leak across truncations.
* ``with_final_obs(agent)``: skrl bootstraps truncated episodes from the next observation, the first of the next
  episode; with this, from their own final observation.
* ``skrl.utils.set_seed`` before ``make``: the environment takes this seed, else 0.
* IPPO and MAPPO reject their own defaults, empty dictionaries of keyword arguments. Pass one for each agent,
  ``learning_rate_scheduler_kwargs={agent: {} for agent in env.possible_agents}``, and without skrl's ``Runner``
  likewise for the observation, state and value preprocessors.

skrl's trainer logs ``infos["episode"]``, the means of ``EpisodeLog``, which synchronises with the device;
``environment_info=""`` in its configuration disables that. In its own multi-agent log an episode ends when the first
agent leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpu_vecenv import BatchedParallelEnv, EpisodeLog, GymnasiumVectorEnv
from gpu_vecenv.adapters import check_actions, check_argument, checked_vector_env, requires_extra, split_config
from gpu_vecenv.errors import refuse_counterparts

with requires_extra("skrl"):
    from skrl.envs.wrappers.torch import MultiAgentEnvWrapper, Wrapper, wrap_env


class LazyMeans:
    """``infos["episode"]`` of skrl's trainer, computed on the device when read."""

    def __init__(self, log: EpisodeLog) -> None:
        check_argument("log", log, isinstance(log, EpisodeLog), "a gpu_vecenv.EpisodeLog")
        self._log = log

    def items(self) -> Any:
        """Name -> mean over the episodes completed since the last call, see ``EpisodeLog.means``."""
        return self._log.means().items()


class MultiAgentEnv:
    """A BatchedParallelEnv with an episode log; other attributes are forwarded."""

    def __init__(self, env: Any) -> None:
        fits = isinstance(getattr(env, "unwrapped", None), BatchedParallelEnv | GymnasiumVectorEnv)
        check_argument("env", env, fits, "a gpu_vecenv.BatchedParallelEnv or GymnasiumVectorEnv")
        self.env, self._episode = env, LazyMeans(EpisodeLog(env.unwrapped.vec_env))

    @property
    def unwrapped(self) -> MultiAgentEnv:
        """The environment itself: skrl reads attributes from it."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet while copying
            raise AttributeError(name)
        return getattr(self.env.unwrapped, name)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As ``BatchedParallelEnv.step``, with "episode" in extras."""
        *outputs, extras = self.env.step(actions)
        return *outputs, {**extras, "episode": self._episode}


class SingleAgentEnv(MultiAgentEnv):
    """The same for a GymnasiumVectorEnv, with observations under "policy"."""

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        super().__init__(env)
        self.single_observation_space = {"policy": env.single_observation_space}
        self.single_action_space = env.single_action_space

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """As ``GymnasiumVectorEnv.reset``."""
        obs, info = self.env.reset(seed=seed)
        return {"policy": obs}, info

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As ``GymnasiumVectorEnv.step``; Discrete actions have a last axis of length 1."""
        discrete = isinstance(self.single_action_space, Discrete)
        obs, *outputs, info = self.env.step(actions.squeeze(-1) if discrete else actions)
        return {"policy": obs}, *outputs, {**info, "episode": self._episode}


def with_final_obs(agent: Any) -> Any:
    """Patch an agent of skrl: the next observation (and state) of a last step is the final observation.

    Each step then copies the observations, and once more for the state.
    """
    is_agent = callable(getattr(agent, "record_transition", None))
    check_argument("agent", agent, is_agent, "an agent of skrl, with a method record_transition")
    record = agent.record_transition
    active: dict[str, torch.Tensor] | None = None  # of the current step, from the previous infos

    def replaced(ended: torch.Tensor, final_obs: torch.Tensor, next_obs: torch.Tensor) -> torch.Tensor:
        return torch.where(ended[:, None], final_obs.flatten(1), next_obs)

    def record_transition(*, next_observations: Any, next_states: Any, infos: dict[str, Any], **others: Any) -> None:
        nonlocal active
        ended, final_obs = infos["_final_obs"], infos["final_obs"]
        if isinstance(next_observations, dict):
            if active is not None:  # inactive agents stay zeros, as in all other states
                final_obs = {key: torch.where(active[key][:, None], final_obs[key].flatten(1), 0) for key in active}
            active = infos["active"]
            next_observations = {
                key: replaced(ended[key], final_obs[key], obs) for key, obs in next_observations.items()
            }
            joint = torch.cat(list(next_observations.values()), 1)
            next_states = {key: torch.where(ended[key][:, None], joint, state) for key, state in next_states.items()}
        else:
            next_observations = replaced(ended, final_obs, next_observations)
        record(next_observations=next_observations, next_states=next_states, infos=infos, **others)

    agent.record_transition = record_transition
    return agent


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> Wrapper | MultiAgentEnvWrapper:
    """``num_envs`` environments of a game, multi-agent if it has several agents; ``config`` as for the view."""
    game, config = split_config(game, config, agents_as_envs=True)
    if game.layout.num_agents > 1:
        return wrap(BatchedParallelEnv(game, num_envs, device, **config))
    del config["agents_as_envs"]  # always True in this view
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **{"fill_final_obs": False, **config}))


def wrap(env: BatchedParallelEnv | GymnasiumVectorEnv) -> Wrapper | MultiAgentEnvWrapper:
    """A batched view with ``agents_as_envs=True`` for multi-agent, or a Gymnasium view for single-agent algorithms."""
    if not isinstance(env, BatchedParallelEnv):
        return wrap_env(SingleAgentEnv(checked_vector_env(env, "skrl")), "isaaclab-single-agent", verbose=False)
    inner = env.vec_env
    found = f"group_by={env.group_by!r}, agents_as_envs={inner.agents_as_envs}, autoreset_mode={inner.autoreset_mode!r}"
    if found != (expected := "group_by='agent', agents_as_envs=True, autoreset_mode='same_step'"):
        raise ValueError(f"env has {found}; expected {expected}")
    for space in env.action_spaces.values():
        check_actions("skrl", space, (Discrete, MultiDiscrete, Box), env.game.layout.masks_actions)
    return wrap_env(MultiAgentEnv(env), "isaaclab-multi-agent", verbose=False)
