"""BatchedParallelEnv: many environments as dictionaries of agents or roles, views of the step buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.spaces import Discrete, Space
from torch.nn.functional import pad

from gpu_vecenv.declare.arguments import check_choice
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.arguments import AutoresetMode, construct, validate_mask
from gpu_vecenv.engine.make import make_for
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.envs.registry import Game
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
from gpu_vecenv.views.reset_options import move_initial_state, parse_reset_options

Tensors = dict[str, torch.Tensor]
Extras = dict[str, dict[str, Any]]


class BatchedParallelEnv:
    """Environments of a game as dictionaries of tensors, whose first axis is the environment.

    PettingZoo has no batched API; this class has the interface of Isaac Lab's DirectMARLEnv, plus final observations.
    Observations, rewards and flags are views of the step buffers, observations without the padding of their role;
    nothing is copied, and no step synchronises with the device.

    With ``group_by="agent"`` keys are agents (``tagger_0``) and values have the shape ``(num_envs, …)``; with "role"
    keys are roles (``tagger``) and values have ``(num_envs, agents of the role, …)``. Spaces are those of one agent.
    ``agents`` is constant; ``extras["active"]`` marks the active agents of each environment. For a trainer that ignores
    it pass ``agents_as_envs=True``: each agent then has its own episodes, see ``VecEnv``.

    Args:
        game: A registered name, an Env class or an Env.
        num_envs: Number of environments.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        group_by: "agent" or "role".
        autoreset_mode: "same_step" (default, as in Isaac Lab), "next_step" or "disabled"; see ``VecEnv``.
        agents_as_envs: Each agent has its own episodes: when it leaves early, its "final_obs" is set; it is then zeros
            until its environment ends, and terminates once more.
        render_mode: "rgb_array" (``render`` returns frames), "human" (a window shows every reset and step) or None.
        render_env_indices: Environments that the window shows, one or several; None: the first ones, at most 16.
        max_cycles: PettingZoo's name for ``max_steps``.
        **arguments: For ``gpu_vecenv.make``.

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
        check_choice("group_by", group_by, ("agent", "role"))
        if max_cycles is not None:
            arguments = {"max_cycles": max_cycles, **arguments}
        self.vec_env = make_for(
            type(self),
            game,
            num_envs,
            device,
            arguments,
            autoreset_mode=autoreset_mode,
            agents_as_envs=agents_as_envs,
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
        self._obs: torch.Tensor | None = None  # after so many loads of a state
        self._loads = 0

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
        """Number of ``possible_agents``."""
        return len(self.possible_agents)

    @property
    def max_episode_length(self) -> int | None:
        """The game's ``max_steps``; None if it has none."""
        return getattr(self.game, "max_steps", None)

    @property
    def episode_length_buf(self) -> torch.Tensor:
        """Steps since the reset of each environment, (num_envs,) int32, a live view."""
        return self.vec_env.elapsed_steps

    def observation_space(self, agent: str) -> Space[Any]:
        """Observation space of an agent, always the same object.

        Raises:
            AgentKeyError: There is no such agent, or role.
        """
        return agent_space(self.observation_spaces, agent)

    def action_space(self, agent: str) -> Space[Any]:
        """Action space of an agent, always the same object.

        Raises:
            AgentKeyError: There is no such agent, or role.
        """
        return agent_space(self.action_spaces, agent)

    def reset(
        self,
        seed: int | Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        out: StepBuffers | None = None,
    ) -> tuple[Tensors, Extras]:
        """Start new episodes.

        Args:
            seed: In [0, 2**64 - 1], one or one for each environment; see ``VecEnv.reset``.
            options: ``{"reset_mask": mask}`` resets some environments, (num_envs,) bool. Further options are those of
                the game in Gymnasium, see ``GymnasiumVectorEnv.reset``.
            out: Buffers to write to (``vec_env.step_buffers()``); None allocates.

        Returns:
            Observations, and extras with "active" and, if the game has one, "action_mask", see ``step``.

        Raises:
            InvalidSeedError, ConfigError, TypeError, ValueError: An argument is wrong; nothing has changed.
        """
        parsed = parse_reset_options(self.vec_env, options)
        mask = None if parsed.mask is None else validate_mask(parsed.mask, self.num_envs, self.device)
        self._obs, info = self.vec_env.reset(seed=seed, mask=mask, out=out)
        self._loads = self.vec_env.loads
        move_initial_state(self.vec_env, parsed, mask, self._obs)
        if self._viewer is not None:
            self._viewer.draw()
        return self._own(self._obs), self._extras(info)

    def step(
        self, actions: Mapping[str, Any] | torch.Tensor, out: StepBuffers | None = None
    ) -> tuple[Tensors, Tensors, Tensors, Tensors, Extras]:
        """Step all environments.

        Args:
            actions: For every agent (num_envs, *shape of its space), or for every role (num_envs, agents, *shape), of
                any numeric dtype, see ``ActionValidator.cast``, preferably tensors on the device; a Discrete action may
                have a last axis of length 1, as in DirectMARLEnv. One copy concatenates them. Or, without a copy, the
                action tensor of ``VecEnv``: (num_envs, num_agents[, heads]), with ``agents_as_envs``
                (num_envs * num_agents[, heads]).
            out: Buffers to write to (``vec_env.step_buffers()``); None allocates.

        Returns:
            Observations, rewards (float32), terminated, time_out (bool) and extras, whose values are dictionaries of
            the same keys: "active" (the episode has not ended); if the game has it, "acting" (the next action counts);
            "fault", see ``VecEnv.faults``; in "same_step" mode "final_obs" and "_final_obs" (its valid rows); if the
            game has one, "action_mask", a (…, choices) bool tensor, or for a MultiDiscrete action a tuple with one for
            each head.

        Raises:
            AgentKeyError: A key is missing or unknown; nothing has changed.
            TypeError, ValueError, InvalidActionError, ResetNeededError, ClosedEnvError: As ``VecEnv.step``.
        """
        if hasattr(actions, "__dlpack__"):
            actions = self._on_device(actions)
        else:
            self.vec_env.check_ready("step")
            actions = self._joined(actions)
            actions = actions.flatten(0, 1) if self.vec_env.agents_as_envs else actions
        self._obs, rewards, terminations, truncations, info = self.vec_env.step(actions, out)
        self._loads = self.vec_env.loads
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
        """Observations of all agents concatenated, (num_envs, elements); a view if no role is padded.

        What the game declares for critics, ``critic_state`` and ``agent_critic_state``, is no part of it.

        Raises:
            ResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        self.vec_env.check_ready("state")
        if self._obs is None or self._loads != self.vec_env.loads:
            self._obs, self._loads = self.vec_env.observe(), self.vec_env.loads
        return joint_obs(self.game, self._by_agent(self._obs))

    def sample_actions(self) -> torch.Tensor:
        """Uniform valid actions drawn on the device, one tensor for all agents, see ``VecEnv.sample_actions``."""
        return self.vec_env.sample_actions()

    def render(self) -> Frames | None:
        """With "rgb_array" one frame per environment, (height, width, 3) uint8, drawn on access, else None."""
        return Frames(self.vec_env) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free all memory and close the window."""
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
        """A tensor of the engine viewed as (num_envs, num_agents, …)."""
        return tensor.unflatten(0, self._batch) if self.vec_env.agents_as_envs else tensor

    def _own(self, obs: torch.Tensor) -> Tensors:
        """Views along the agent axis, without padding."""
        padded = self._split(obs)
        if not self.game.layout.observation.padded:
            return padded
        return {key: role_obs(self.game, role, padded[key]) for key, role in self._roles.items()}

    def _extras(self, info: Mapping[str, torch.Tensor]) -> Extras:
        extras: Extras = {name: self._split(info[name]) for name in ("active", "acting", "fault") if name in info}
        if "final_obs" in info:
            extras |= {"final_obs": self._own(info["final_obs"]), "_final_obs": self._split(info["_final_obs"])}
        if "action_mask" in info:
            masks = self._split(info["action_mask"])
            extras["action_mask"] = {
                key: sample_mask(masks[key], self._masks[role], self.action_spaces[key])
                for key, role in self._roles.items()
                if role in self._masks
            }
        return extras

    def _on_device(
        self, actions: Any, shape: tuple[int, ...] | None = None, name: str = "actions", role: str | None = None
    ) -> torch.Tensor:
        """Actions cast to the engine's dtypes; those on the host are copied to the device."""
        actions = self._check.cast(actions, shape, name, role)
        return actions if isinstance(actions, torch.Tensor) else self._check.tensor(actions, actions.shape)

    def _joined(self, actions: Any) -> torch.Tensor:
        check_keys(actions, self._roles, self._roles)
        columns = [self._columns(key, role, actions[key]) for key, role in self._roles.items()]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def _columns(self, key: str, role: str, actions: Any) -> torch.Tensor:
        """Actions of the agents of one key, (num_envs, agents of the key[, heads]), padded to the heads of the game."""
        space, layout = self.action_spaces[key], self.game.layout.action
        agents = self._counts[role] if self.group_by == "role" else 1
        shape = (*((self.num_envs, agents) if self.group_by == "role" else (self.num_envs,)), *(space.shape or ()))
        if isinstance(space, Discrete) and np.shape(actions) == (*shape, 1):
            shape = (*shape, 1)
        columns = self._on_device(actions, shape, f"{key}'s actions", role).reshape(
            self.num_envs, agents, *([-1] if layout.shape else [])
        )
        if layout.mixed:
            columns = columns.float()  # choices beside a Box; what is rounded is no choice before and after
        missing = layout.heads - len(layout.sizes[role])
        return pad(columns, (0, missing)) if missing else columns


batched_parallel_env = BatchedParallelEnv  # named as PettingZoo's parallel_env
