"""Gymnasium views: GymnasiumVectorEnv, with agents as sub-environments, and GymnasiumEnv, one environment in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from gpu_vecenv.absent import OF_GYMNASIUM_VECTOR_ENV, absent_attribute
from gpu_vecenv.declare.arguments import check_choice, check_flag
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.spaces import with_zero
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.arguments import construct, validate_autoreset_mode, validate_mask, validate_seed, validate_seeds
from gpu_vecenv.engine.make import make_for
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import Game
from gpu_vecenv.errors import ConfigError, ResetNeededError, UnsupportedGameError
from gpu_vecenv.views.agents import action_mask_slices, only_with_masks
from gpu_vecenv.views.frames import Frames, Viewer, checked_render_mode, render_metadata, viewer_of
from gpu_vecenv.views.host_copy import HostCopy, HostMasks, fill_final_obs
from gpu_vecenv.views.reset_options import move_initial_state, parse_reset_options

Output = Literal["torch", "numpy"]
Step = tuple[Any, Any, Any, Any, dict[str, Any]]

STEP_LIMITS = frozenset({"max_steps", "max_cycles"})  # names of the game's own limit, its field and PettingZoo's


class GymnasiumVectorEnv(VectorEnv[Any, Any, Any]):
    """A game as Gymnasium's vector env: ``gymnasium.make_vec("gpu_vecenv/TagContinuous-v1", num_envs=1000)``.

    Each agent is a sub-environment: agent ``a`` of environment ``e`` is row ``e * num_agents + a``. The attribute
    ``num_envs`` counts these rows, as Gymnasium requires; ``vec_env.num_envs`` counts environments. An agent that
    leaves early ends its row's episode there; the row is then zeros until the environment ends, and terminates once
    more, so that no learner bootstraps across a reset. Smaller observations are padded with zeros. An invalid action
    raises where actions are validated on the host (``output="numpy"``, or ``validate="sync"``), and otherwise sets the
    environment's word in ``vec_env.faults()``.

    Args:
        game: A registered name, an Env class or an Env.
        num_envs: Number of environments.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        output: "torch": tensors on the device; no step synchronises. "numpy": arrays; one copy and one synchronisation
            per step.
        autoreset_mode: A member of Gymnasium's AutoresetMode, its value, or "same_step" (default), "next_step",
            "disabled".
        render_mode: "rgb_array" (``render`` returns frames), "human" (a window shows every reset and step) or None.
        render_env_indices: Environments that the window shows, one or several; None: the first ones, at most 16.
        max_episode_steps: Gymnasium's name for ``max_steps``.
        fill_final_obs: Give rows of ``info["final_obs"]`` that did not end the observation, which reads and writes all
            observations once more in each step. False leaves them unspecified: use the mask ``info["_final_obs"]``.
        **arguments: For ``gpu_vecenv.make``: the game's configuration, and driver, validate, arrays, initial_states,
            first_env_index, end_on_nonfinite.

    Raises:
        TypeError, ValueError, ConfigError, CapacityError: As ``gpu_vecenv.make``.
    """

    def __init__(
        self,
        game: Game,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        *,
        output: Output = "torch",
        autoreset_mode: AutoresetMode | str = "same_step",
        render_mode: str | None = None,
        render_env_indices: int | Sequence[int] | None = None,
        max_episode_steps: int | None = None,
        fill_final_obs: bool = True,
        **arguments: Any,
    ) -> None:
        self._arguments: dict[str, Any] = {"game": game, "num_envs": num_envs, "device": device, "output": output}
        self._arguments |= {"autoreset_mode": autoreset_mode, "render_mode": render_mode, **arguments}
        self._arguments |= {"max_episode_steps": max_episode_steps, "render_env_indices": render_env_indices}
        self._arguments["fill_final_obs"] = self._fills_final_obs = fill_final_obs
        mode = validate_autoreset_mode(autoreset_mode)
        check_choice("output", output, ("torch", "numpy"))
        check_flag("fill_final_obs", fill_final_obs)
        self.output = output
        if max_episode_steps is not None:
            for name in sorted(STEP_LIMITS & arguments.keys()):
                if type(arguments[name]) is type(max_episode_steps) is int and arguments[name] != max_episode_steps:
                    raise ConfigError(
                        f"{name} is {arguments[name]}, but max_episode_steps, by default that of the id, is "
                        f"{max_episode_steps}; expected one of them: gymnasium.make_vec(…, max_episode_steps=…)"
                    )
            arguments = {"max_episode_steps": max_episode_steps, **arguments}
        self._viewer: Viewer | None = None
        self.vec_env = make_for(type(self), game, num_envs, device, arguments, autoreset_mode=mode, agents_as_envs=True)
        self.game, self.device = self.vec_env.game, self.vec_env.device
        _check_one_action_space(self.vec_env)
        self.render_mode = checked_render_mode(self.game, render_mode)
        self._viewer = viewer_of(self.vec_env, render_mode, render_env_indices)
        self.num_agents = self.game.layout.num_agents
        self.num_envs = self.vec_env.num_envs * self.num_agents
        self.autoreset_mode = AutoresetMode[mode.upper()]
        self.metadata = {"autoreset_mode": self.autoreset_mode, **render_metadata(self.game)}
        widest = self.game.layout.observation.widest
        # With several agents, rows of inactive agents are zeros.
        self.single_observation_space = widest if self.num_agents == 1 else with_zero(widest)
        self.single_action_space = self.game.layout.action.widest
        self._check = ActionValidator(self.game.layout, self.vec_env.buffers_layout.batch, self.device)
        self._host = HostCopy(self.vec_env.buffers_layout) if output == "numpy" else None
        # Gymnasium's "_key" marks the rows that have "key": all of them here. The array is read-only.
        self._all_true = None if self._host is None else np.broadcast_to(True, self.num_envs)
        self._host_masks: HostMasks | None = None

    # Lazy: batched spaces hold bounds for every row.
    @cached_property
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        """The space of all rows' observations."""
        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> Space[Any]:  # type: ignore[override]
        """The space of all rows' actions, with the choices of each row's role."""
        return _batched_action_space(self.game, self.vec_env.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: One int in [0, 2**64 - 1] for all rows, or one for each of the ``vec_env.num_envs`` environments; see
                ``VecEnv.reset``.
            options: ``{"reset_mask": mask}`` resets some environments: (num_envs,) bool, torch or NumPy, equal for all
                rows of an environment. Further options are those of the game in Gymnasium, ``game.reset_options``, such
                as ``{"low": -0.1, "high": 0.1}``: ranges of the initial state, for this reset only.

        Raises:
            InvalidSeedError, ConfigError, TypeError, ValueError: An argument is wrong; nothing has changed.
        """
        if seed is not None:
            seed = validate_seeds(seed, self.vec_env.num_envs)
        parsed = parse_reset_options(self.vec_env, options)
        mask = None if parsed.mask is None else self._env_mask(validate_mask(parsed.mask, self.num_envs, self.device))
        buffers = None if self._host is None else self._host.step_buffers()
        obs, info = self.vec_env.reset(seed=seed, mask=mask, out=buffers)
        move_initial_state(self.vec_env, parsed, mask, obs)
        super().reset(seed=seed if isinstance(seed, int) else None)
        if self._host is not None:
            arrays = self._host.arrays()
            self._host_masks = HostMasks(self.vec_env, arrays)
        if self._viewer is not None:
            self._viewer.draw()
        if self._host is not None:
            return arrays["obs"], self._with_masks({name: arrays[name] for name in info})
        return obs, self._with_masks(info)

    def step(self, actions: Any, out: StepBuffers | None = None) -> Step:
        """Step all environments.

        Args:
            actions: (num_envs[, heads]): a tensor on the device, a NumPy array, a list or anything with
                ``__dlpack__``, of any numeric dtype; see ``ActionValidator.cast``. Continuous actions outside their
                bounds are clipped as in the game's reference.
            out: Buffers to write to (``vec_env.step_buffers()``), with ``output="torch"`` only; None allocates.

        Returns:
            Observations, rewards (float32), terminations, truncations and info: "active" (rows whose episode has not
            ended), "action_mask" and "acting" if the game has them, in "same_step" mode "final_obs" and "final_info"
            with their masks "_final_obs" and "_final_info"; with ``output="numpy"`` every key has a mask. Rows of
            "final_obs" outside its mask hold the observation; with ``fill_final_obs=False`` they are unspecified.

        Raises:
            TypeError, ValueError: Actions or ``out`` have a wrong type, dtype, shape or device; nothing has changed.
            InvalidActionError: Validation on the host finds a value outside the space; nothing has changed.
            ResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        if self._host is None:
            actions = self._check.cast(actions)
            if isinstance(actions, np.ndarray):
                actions = self._check.tensor(actions)
            obs, rewards, terminations, truncations, info = self.vec_env.step(actions, out)
            if self._fills_final_obs and "final_obs" in info:
                mask = info["_final_obs"].view(-1, *[1] * (obs.ndim - 1))
                torch.where(mask, info["final_obs"], obs, out=info["final_obs"])
            if self._viewer is not None:
                self._viewer.draw()
            return obs, rewards, terminations, truncations, self._with_masks(info)
        if out is not None:
            raise ValueError('step: out is given, but output is "numpy"; expected None')
        *_, written = self.vec_env.step(self._validated(actions), self._host.step_buffers())
        arrays = self._host.arrays()
        if self._fills_final_obs:
            fill_final_obs(arrays)
        self._host_masks = HostMasks(self.vec_env, arrays)
        named = {name: arrays["final_mask" if name == "_final_obs" else name] for name in written}
        outputs = [arrays[name] for name in ("obs", "rewards", "terminations", "truncations")]
        if self._viewer is not None:
            self._viewer.draw()
        return outputs[0], outputs[1], outputs[2], outputs[3], self._with_masks(named)

    @property
    def action_masks(self) -> Callable[[], Any]:
        """Method: valid choices of the next step, (num_envs, num_logits) bool, as in ``info["action_mask"]``.

        It exists only if the game masks actions: clients look for it to find out.
        """
        return only_with_masks(self.game, self._action_masks)

    def _action_masks(self) -> Any:
        mask = self.vec_env.action_mask.flatten(0, 1).clone()
        return mask if self._host is None else mask.cpu().numpy()

    def sample_actions(self) -> torch.Tensor:
        """Uniform valid actions drawn on the device, see ``VecEnv.sample_actions``."""
        return self.vec_env.sample_actions()

    def render(self) -> Sequence[np.ndarray[Any, Any]] | None:  # type: ignore[override]
        """With "rgb_array" one frame per row, (height, width, 3) uint8, drawn on access, else None.

        Rows of an environment share their frame.
        """
        return Frames(self.vec_env, self.num_agents) if self.render_mode == "rgb_array" else None

    def close_extras(self, **kwargs: Any) -> None:
        """Free all memory and close the window."""
        if hasattr(self, "vec_env"):  # Gymnasium's __del__ also closes after a failed constructor
            self.vec_env.close()
            self._host = self._host_masks = None
            if self._viewer is not None:
                self._viewer.close()

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_GYMNASIUM_VECTOR_ENV, "view")

    def __reduce__(self) -> tuple[Any, ...]:
        return construct, (type(self), self._arguments), {"spec": self.spec}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.game!r}, num_envs={self.vec_env.num_envs}, device={str(self.device)!r})"

    def _validated(self, actions: Any) -> torch.Tensor:
        """The actions on the device, after a check of their values on the host."""
        self.vec_env.check_ready("step")
        array = self._check.array(actions)
        self._host_masks = HostMasks.current(self.vec_env, self._host_masks)
        self._check.host_values(array, self._host_masks.acting, self._host_masks.action_mask)
        return self._check.tensor(array)

    def _with_masks(self, info: Mapping[str, Any]) -> dict[str, Any]:
        masked = dict(info)
        if self._all_true is not None:
            masked |= {f"_{name}": self._all_true for name in info if f"_{name}" not in info and name[0] != "_"}
        if "final_obs" in info:
            masked |= {"final_info": {}, "_final_info": info["_final_obs"]}
        return masked

    def _env_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask of environments (vec_env.num_envs,); a host read if an environment has several rows."""
        if self.num_agents == 1:
            return mask
        rows = mask.reshape(self.vec_env.num_envs, self.num_agents)
        if bool((rows.any(1) != rows.all(1)).any()):
            raise ValueError(
                f"reset: reset_mask differs among the {self.num_agents} rows of an environment, whose agents "
                "reset together; "
                "expected equal values for all rows of an environment"
            )
        return rows[:, 0]


class GymnasiumEnv(gymnasium.Env[Any, Any]):
    """One environment in NumPy: ``gymnasium.make("gpu_vecenv/CartPole-v1")``.

    A game of several agents becomes one agent that controls all of them: observations and actions have a leading agent
    axis, the reward is the sum, and the episode ends when all agents have ended.

    Args:
        game: A registered name, an Env class or an Env.
        device: By default the CPU, which is sufficient for one environment.
        render_mode: "rgb_array" (``render`` returns a frame), "human" (a window shows every reset and step) or None.
        **arguments: Of ``gpu_vecenv.make``.
    """

    # Read by gymnasium.make before construction; an instance has the metadata of its game.
    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    def __init__(
        self, game: Game, device: str | torch.device = "cpu", *, render_mode: str | None = None, **arguments: Any
    ) -> None:
        self._arguments = {"game": game, "device": device, "render_mode": render_mode, **arguments}
        if "num_envs" in arguments:
            raise TypeError("num_envs is given, but a GymnasiumEnv is one environment; for more use gymnasium.make_vec")
        self.vec_env = make_for(type(self), game, 1, device, arguments, autoreset_mode="disabled", agents_as_envs=False)
        self.game = self.vec_env.game
        _check_one_action_space(self.vec_env)
        self.render_mode = checked_render_mode(self.game, render_mode)
        self._viewer = viewer_of(self.vec_env, render_mode)
        self.metadata = render_metadata(self.game)
        alone = self.game.layout.num_agents == 1
        space = self.game.layout.observation.widest
        self.observation_space = space if alone else batch_space(space, self.game.layout.num_agents)
        self.action_space = self.game.layout.action.widest if alone else _batched_action_space(self.game, 1)
        self._agent_axis = () if alone else (self.game.layout.num_agents,)
        self._shape = (*self._agent_axis, *self.game.layout.action.shape)
        self._check = ActionValidator(self.game.layout, self.vec_env.buffers_layout.batch, self.vec_env.device)
        self._host = HostCopy(self.vec_env.buffers_layout)
        self._host_masks: HostMasks | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Start a new episode.

        Args:
            seed: In [0, 2**64 - 1].
            options: Those of the game in Gymnasium, ``game.reset_options``: ranges of the initial state.

        Raises:
            InvalidSeedError, ConfigError, TypeError: An argument is wrong; nothing has changed.
        """
        parsed = parse_reset_options(self.vec_env, options, masks=False)
        seed = None if seed is None else validate_seed(seed)
        obs, _ = self.vec_env.reset(seed=seed, out=self._host.step_buffers())
        move_initial_state(self.vec_env, parsed, None, obs)
        super().reset(seed=seed)
        arrays = self._host.arrays()
        info = self._info(arrays)
        if self._viewer is not None:
            self._viewer.draw()
        return self._entry(arrays["obs"]), info

    def step(self, action: Any) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """One step.

        Raises:
            TypeError, ValueError, InvalidActionError: The action is not in the space; nothing has changed.
            ResetNeededError, ClosedEnvError: Before ``reset``, after the end of an episode, or after ``close``.
        """
        self.vec_env.check_ready("step")
        self._host_masks = HostMasks.current(self.vec_env, self._host_masks)
        if not self._host_masks.active.any():
            raise ResetNeededError("step after the end of an episode: call reset() first")
        array = self._check.array(action, self._shape)
        self._check.host_values(array, self._host_masks.acting, self._host_masks.action_mask)
        self.vec_env.step(self._check.tensor(array), self._host.step_buffers())
        arrays = self._host.arrays()
        info = self._info(arrays)
        ended = not arrays["active"].any()
        truncated = ended and bool(arrays["truncations"].any())
        if self._viewer is not None:
            self._viewer.draw()
        return (
            self._entry(arrays["obs"]),
            float(arrays["rewards"].sum(dtype=np.float64) if self._agent_axis else arrays["rewards"][0, 0]),
            ended and not truncated,
            truncated,
            info,
        )

    @property
    def action_masks(self) -> Callable[[], np.ndarray[Any, Any]]:
        """Method: valid choices of the next step, bool, as sb3-contrib's MaskablePPO takes them.

        (number of choices,): those of all agents, and of each agent's heads, concatenated, as many as
        ``action_space`` has. It exists only if the game masks actions: clients look for it to find out.
        """
        return only_with_masks(self.game, self._action_masks)

    def _action_masks(self) -> np.ndarray[Any, Any]:
        slices, heads = action_mask_slices(self.game), self.game.layout.action.heads
        parts: list[np.ndarray[Any, Any]] = []
        for mask, role in zip(self.vec_env.action_mask[0].cpu().numpy(), self.game.layout.agent_roles, strict=True):
            parts += [mask[choices] for choices in slices[role]]
            parts += [np.ones(1, bool)] * (heads - len(slices[role]))  # action_space: one choice for a missing head
        return np.concatenate(parts)

    def render(self) -> np.ndarray[Any, Any] | None:
        """With "rgb_array" a frame, (height, width, 3) uint8, else None."""
        return Frames(self.vec_env)[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free all memory and close the window."""
        self.vec_env.close()
        if self._viewer is not None:
            self._viewer.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return construct, (type(self), self._arguments), {"spec": self.spec}

    def _entry(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The entry of the environment; without the agent axis if there is one agent."""
        entry: np.ndarray[Any, Any] = array[0] if self._agent_axis else array[0, 0]
        return entry

    def _info(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        self._host_masks = HostMasks(self.vec_env, arrays)
        info = {"active": arrays["active"][0]} if self._agent_axis else {}
        if "action_mask" in arrays:
            info["action_mask"] = self._entry(arrays["action_mask"])
        if "acting" in arrays:
            info["acting"] = self._entry(arrays["acting"])
        return info


class UnlimitedGymnasiumEnv(GymnasiumEnv):
    """A GymnasiumEnv without the game's own time limit: ``gymnasium.make`` limits its episodes by ``TimeLimit``.

    The entry point of games that declare ``gymnasium_time_limit``.
    """

    def __init__(self, game: Game, device: str | torch.device = "cpu", **arguments: Any) -> None:
        if given := sorted(STEP_LIMITS & arguments.keys()):
            raise ConfigError(
                f"{given[0]} is {arguments[given[0]]!r}, but Gymnasium's TimeLimit ends the episodes here; use "
                "gymnasium.make(…, max_episode_steps=…)"
            )
        super().__init__(game, device, **arguments, max_steps=2**31 - 1)
        del self._arguments["max_steps"]


def _check_one_action_space(env: VecEnv) -> None:
    """Close the environment and raise UnsupportedGameError if some role has a Box that another does not have."""
    if env.game.layout.action.mixed:
        env.close()
        raise UnsupportedGameError(
            f"{env.game.layout.name}: the action spaces {dict(env.game.layout.action.spaces)} are not equal, but "
            "Gymnasium's interface has one for all agents; use gpu_vecenv.parallel_env or "
            "gpu_vecenv.batched_parallel_env, where each agent has its own"
        )


def _batched_action_space(game: Env, num_envs: int) -> Space[Any]:
    """The space of the actions of all agents, with the choices of each agent's role."""
    action, rows = game.layout.action, num_envs * game.layout.num_agents
    if action.continuous or len(set(action.sizes.values())) == 1:
        return batch_space(action.widest, rows)
    own = [(*action.sizes[role], *[1] * action.heads)[: action.heads] for role in game.layout.agent_roles]
    return MultiDiscrete(np.tile(np.array(own), (num_envs, 1)).reshape(rows, *action.shape))
