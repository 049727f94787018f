"""BatchedParallelEnv: many replicas as dictionaries of agents or roles, views of the tensors that a step writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from gymnasium.spaces import Discrete, Space
from torch.nn.functional import pad

from gpu_vecenv.engine.arguments import ActionValidator, construct, reset_mask
from gpu_vecenv.engine.make import make
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import AutoresetMode
from gpu_vecenv.envs.registry import Game, with_max_steps
from gpu_vecenv.errors import ResetNeededError
from gpu_vecenv.views.agents import (
    action_mask_slices,
    agent_space,
    agent_spaces,
    check_keys,
    joint_obs,
    joint_space,
    role_obs,
    role_of_agents,
    sample_mask,
    versioned_name,
)
from gpu_vecenv.views.frames import Frames, checked_render_mode, render_metadata, viewer_of

Tensors = dict[str, torch.Tensor]
Extras = dict[str, dict[str, Any]]


class BatchedParallelEnv:
    """Replicas of a game as dictionaries of tensors, whose first axis is the replica.

    PettingZoo's API has no place for replicas. This is the shape of Isaac Lab's DirectMARLEnv, with the last
    observations of episodes added. Observations, rewards and flags are views of the tensors that the step wrote, each
    observation as wide as its own role's; nothing is copied, and no step reads anything on the host.

    With ``group_by="agent"`` keys are agents (``tagger_0``) and values have the shape ``(num_envs, …)``; with "role"
    keys are roles (``tagger``) and values have ``(num_envs, agents of the role, …)``. Spaces are those of one agent.
    ``agents`` never shrinks: who plays on differs from replica to replica, ``extras["active"]`` says it. A learner that
    does not look there takes ``agents_as_envs=True``: each agent then has episodes of its own, see ``VecEnv``.

    Args:
        game: A registered name, an Env class or an Env.
        num_envs: Replicas.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        group_by: "agent" or "role".
        autoreset_mode: "same_step" (default, as in Isaac Lab), "next_step" or "disabled"; see ``VecEnv``.
        agents_as_envs: Each agent has episodes of its own: where it leaves early it gives its "final_obs", is zeros until its
            replica ends, and then terminates once more.
        render_mode: "rgb_array" (``render`` gives frames), "human" (a window shows every reset and step) or None.
        render_env_indices: Which replicas the window shows, one or several; None: the first ones, at most 16.
        max_cycles: PettingZoo's word for the game's ``max_steps``.
        **arguments: Of ``gpu_vecenv.make``.

    Raises:
        TypeError, ValueError, ConfigError, CapacityError: As ``gpu_vecenv.make``.
    """

    def __init__(
        self,
        game: Game,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        *,
        group_by: Literal["agent", "role"] = "agent",
        autoreset_mode: AutoresetMode = "same_step",
        agents_as_envs: bool = False,
        render_mode: str | None = None,
        render_env_indices: int | Sequence[int] | None = None,
        max_cycles: int | None = None,
        **arguments: Any,
    ) -> None:
        self._arguments: dict[str, Any] = {"game": game, "num_envs": num_envs, "device": device, "group_by": group_by}
        self._arguments |= {
            "autoreset_mode": autoreset_mode,
            "agents_as_envs": agents_as_envs,
            "render_mode": render_mode,
        }
        self._arguments |= {"render_env_indices": render_env_indices, "max_cycles": max_cycles, **arguments}
        if group_by not in ("agent", "role"):
            raise ValueError(f'group_by is {group_by!r}; expected "agent" or "role"')
        config = with_max_steps(arguments, "max_cycles", max_cycles)
        self.vec_env = make(
            game, num_envs, device, autoreset_mode=autoreset_mode, agents_as_envs=agents_as_envs, **config
        )
        self.game, self.device, self.num_envs = self.vec_env.game, self.vec_env.device, self.vec_env.num_envs
        self.group_by = group_by
        self.render_mode = checked_render_mode(self.game, render_mode)
        self._viewer = viewer_of(self.vec_env, render_mode, render_env_indices)
        self.metadata = {"name": versioned_name(game, self.game), **render_metadata(self.game)}
        self._counts = {role: count for role, count in self.game.layout.roles.items() if count}
        self._roles = {role: role for role in self._counts} if group_by == "role" else role_of_agents(self.game)
        self.possible_agents = list(self._roles)
        self.observation_spaces = agent_spaces(self._roles, self.game.layout.observation.spaces)
        self.action_spaces = agent_spaces(self._roles, self.game.layout.action.spaces)
        self.state_space = joint_space(self.game)
        self._masks = action_mask_slices(self.game)
        self._check = ActionValidator(self.game.layout, self.vec_env.buffers_layout.batch, self.device)
        self._batch = (self.num_envs, self.game.layout.num_agents)
        self._obs: torch.Tensor | None = None

    @property
    def unwrapped(self) -> BatchedParallelEnv:
        """The environment itself."""
        return self

    @property
    def agents(self) -> list[str]:
        """All agents, or roles."""
        return list(self.possible_agents)

    @property
    def num_agents(self) -> int:
        """Number of ``agents``."""
        return len(self.possible_agents)

    @property
    def max_num_agents(self) -> int:
        """The same."""
        return len(self.possible_agents)

    @property
    def max_episode_length(self) -> int | None:
        """The game's ``max_steps``; None if it has none."""
        return getattr(self.game, "max_steps", None)

    @property
    def episode_length_buf(self) -> torch.Tensor:
        """Ticks since each replica's reset, (num_envs,) int32, live."""
        return self.vec_env.elapsed_steps

    def observation_space(self, agent: str) -> Space[Any]:
        """One agent's observation space, always the same object.

        Raises:
            AgentKeyError: There is no such agent, or role.
        """
        return agent_space(self.observation_spaces, agent)

    def action_space(self, agent: str) -> Space[Any]:
        """One agent's action space, always the same object.

        Raises:
            AgentKeyError: There is no such agent, or role.
        """
        return agent_space(self.action_spaces, agent)

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None, out: StepBuffers | None = None
    ) -> tuple[Tensors, Extras]:
        """Begin new episodes.

        Args:
            seed: 0 … 2**64 - 1; see ``VecEnv.reset``.
            options: ``{"reset_mask": mask}`` resets some replicas, (num_envs,) bool.
            out: Where to write (``vec_env.step_buffers()``); None allocates.

        Returns:
            Observations, and extras with "active" and, if the game has one, "action_mask", see ``step``.

        Raises:
            InvalidSeedError, ConfigError, TypeError, ValueError: An argument is wrong; nothing has changed.
        """
        self._obs, info = self.vec_env.reset(seed=seed, mask=reset_mask(options), out=out)
        if self._viewer is not None:
            self._viewer.draw()
        return self._own(self._obs), self._extras(info)

    def step(
        self, actions: Mapping[str, torch.Tensor] | torch.Tensor, out: StepBuffers | None = None
    ) -> tuple[Tensors, Tensors, Tensors, Tensors, Extras]:
        """One step of every replica.

        Args:
            actions: For every agent (num_envs, *shape of its space), or for every role (num_envs, agents, *shape), on
                the device, int32 or int64, or float32; a Discrete action may have a last axis of length 1, as
                DirectMARLEnv has it. They are joined by one copy. Or, without any, the action tensor of ``VecEnv``
                itself, (num_envs, num_agents[, heads]), with ``agents_as_envs`` (num_envs * num_agents[, heads]).
            out: Where to write (``vec_env.step_buffers()``); None allocates.

        Returns:
            Observations, rewards (float32), terminated, time_out (bool) and extras, whose values are dictionaries of
            the same keys: "active" (whose next action counts); in "same_step" mode "final_obs" and "_final_obs" (which
            of its rows are meant); if the game has one, "action_mask", a (…, choices) bool tensor, or a tuple of these,
            one for each number of a MultiDiscrete action.

        Raises:
            AgentKeyError: A key is missing, or no agent's (role's); nothing has changed.
            TypeError, ValueError, InvalidActionError, ResetNeededError, ClosedEnvError: As ``VecEnv.step``.
        """
        if not isinstance(actions, torch.Tensor):
            self.vec_env.check_ready("step")
            actions = self._joined(actions)
            actions = actions.flatten(0, 1) if self.vec_env.agents_as_envs else actions
        self._obs, rewards, terminations, truncations, info = self.vec_env.step(actions, out)
        if self._viewer is not None:
            self._viewer.draw()
        return (
            self._own(self._obs),
            self._split(rewards),
            self._split(terminations),
            self._split(truncations),
            self._extras(info),
        )

    def state(self) -> torch.Tensor:
        """All agents' own observations, one after the other, (num_envs, elements); a view where roles see equally much.

        Raises:
            ResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        self.vec_env.check_ready("state")
        if self._obs is None:  # a state_dict has been loaded
            raise ResetNeededError("state before reset: call reset() or step() first")
        return joint_obs(self.game, self._by_agent(self._obs))

    def sample_actions(self) -> torch.Tensor:
        """Uniform valid actions drawn on the device, one tensor for all agents, see ``VecEnv.sample_actions``."""
        return self.vec_env.sample_actions()

    def render(self) -> Frames | None:
        """With "rgb_array" one frame per replica, (height, width, 3) uint8, drawn when it is looked at, else None."""
        return Frames(self.vec_env) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Let go of all memory, and of the window."""
        self.vec_env.close()
        if self._viewer is not None:
            self._viewer.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return construct, (type(self), self._arguments)

    def __repr__(self) -> str:
        device = str(self.device)
        return f"BatchedParallelEnv({self.game!r}, num_envs={self.num_envs}, {device=}, group_by={self.group_by!r})"

    def _split(self, tensor: torch.Tensor) -> Tensors:
        """Views along the agent axis."""
        tensor, by_role = self._by_agent(tensor), self.group_by == "role"
        views = tensor.split(list(self._counts.values()), 1) if by_role else tensor.unbind(1)
        return dict(zip(self._roles, views, strict=True))

    def _by_agent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the engine's as (num_envs, num_agents, …); a view."""
        return tensor.unflatten(0, self._batch) if self.vec_env.agents_as_envs else tensor

    def _own(self, obs: torch.Tensor) -> Tensors:
        rows = self._split(obs)
        if not self.game.layout.observation.padded:
            return rows
        return {key: role_obs(self.game, role, rows[key]) for key, role in self._roles.items()}

    def _extras(self, info: Mapping[str, torch.Tensor]) -> Extras:
        extras: Extras = {"active": self._split(info["active"])}
        if "final_obs" in info:
            extras |= {"final_obs": self._own(info["final_obs"]), "_final_obs": self._split(info["_final_obs"])}
        if "action_mask" in info:
            rows = self._split(info["action_mask"])
            extras["action_mask"] = {
                key: sample_mask(rows[key], self._masks[role], self.action_spaces[key])
                for key, role in self._roles.items()
            }
        return extras

    def _joined(self, actions: Any) -> torch.Tensor:
        check_keys(actions, self._roles, self._roles)
        columns = [self._columns(key, role, actions[key]) for key, role in self._roles.items()]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def _columns(self, key: str, role: str, given: Any) -> torch.Tensor:
        """What one key's agents do, (num_envs, agents of the key[, heads]), heads that their role lacks added."""
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"step: {key}'s actions are a {type(given).__name__}; expected a tensor on {self.device}")
        kinds, space, layout = self._check.kinds, self.action_spaces[key], self.game.layout.action
        if given.dtype not in kinds:
            raise TypeError(f"step: {key}'s actions have dtype {given.dtype}; expected {' or '.join(map(str, kinds))}")
        if given.device != self.device:
            raise ValueError(f"step: {key}'s actions are on {given.device}; expected {self.device}")
        agents = self._counts[role] if self.group_by == "role" else 1
        shape = (*((self.num_envs, agents) if self.group_by == "role" else (self.num_envs,)), *(space.shape or ()))
        if given.shape != shape and not (isinstance(space, Discrete) and given.shape == (*shape, 1)):
            raise ValueError(
                f"step: {key}'s actions have shape {tuple(given.shape)}; expected {shape}, nothing is broadcast"
            )
        columns = given.reshape(self.num_envs, agents, *([-1] if layout.shape else []))
        missing = layout.heads - len(layout.sizes[role])
        return pad(columns, (0, missing)) if missing else columns


batched_parallel_env = BatchedParallelEnv  # PettingZoo's way of naming what makes an environment
