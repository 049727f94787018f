"""PettingZoo views of one environment, ParallelEnv and AECEnv, and a PettingZoo-style module for each game.

``from gpu_vecenv.views.pettingzoo_env import tag_continuous_v1`` provides
``tag_continuous_v1.parallel_env(max_cycles=100)``, ``.env()`` (AEC) and ``.raw_env()`` (AEC without checks), which
return arrays and run on the CPU unless ``output`` and ``device`` say otherwise; likewise for every registered game.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pettingzoo
import torch
from gymnasium.spaces import Box, Space
from gymnasium.utils import seeding
from pettingzoo.utils.env_logger import EnvLogger
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, ClipOutOfBoundsWrapper, OrderEnforcingWrapper

from gpu_vecenv.declare.arguments import check_choice
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.arguments import construct, validate_seed
from gpu_vecenv.engine.make import make_for
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.envs.registry import GAMES, Game, configuration_names, versions
from gpu_vecenv.errors import AgentKeyError, PettingZooResetNeededError, UnknownModuleError, nearest
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
from gpu_vecenv.views.host_copy import Arrays, HostCopy, HostCopyWithoutObs, HostMasks

Infos = dict[str, dict[str, Any]]


class ParallelEnv(pettingzoo.ParallelEnv[str, Any, Any]):
    """One environment as PettingZoo's ParallelEnv: ``pettingzoo.make("parallel", "gpu_vecenv/tag_continuous-v1")``.

    An agent that ends leaves ``agents`` until ``reset``; the episode is over when ``agents`` is empty. Each agent has
    its own space objects, of its role's size: seeding one does not seed the others. Rewards are Python floats, flags
    Python bools. For many environments use ``BatchedParallelEnv``.

    Args:
        game: A registered name, an Env class or an Env.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        output: "torch": observations are tensors on the device, views of the step buffers. "numpy": arrays, views of
            one copy. A step synchronises with the device once in both cases.
        render_mode: "rgb_array" (``render`` returns a frame), "human" (a window shows every reset and step) or None.
        max_cycles: PettingZoo's name for ``max_steps``.
        **arguments: For ``gpu_vecenv.make``; the game's configuration by its own names or those of
            ``Env.reference_arguments``.

    Names of the configuration are attributes too, ``env.local_ratio``, ``env.N``; so are shared state fields of one
    number, ``env.curriculum_stage``, and ``Env.reference_methods``, ``env.advance_curriculum()``.

    Raises:
        TypeError, ValueError, ConfigError: As ``gpu_vecenv.make``.
    """

    def __init__(
        self,
        game: Game,
        device: str | torch.device | None = None,
        *,
        output: Literal["torch", "numpy"] = "torch",
        render_mode: str | None = None,
        max_cycles: int | None = None,
        **arguments: Any,
    ) -> None:
        self._arguments = {"game": game, "device": device, "output": output, "render_mode": render_mode, **arguments}
        self._arguments |= {"max_cycles": max_cycles}
        check_choice("output", output, ("torch", "numpy"))
        if "num_envs" in arguments:
            raise TypeError(
                "num_envs is given, but a ParallelEnv is one environment; for more use batched_parallel_env"
            )
        if max_cycles is not None:
            arguments = {"max_cycles": max_cycles, **arguments}
        self.vec_env = make_for(type(self), game, 1, device, arguments, autoreset_mode="disabled", agents_as_envs=False)
        self.game, self.device = self.vec_env.game, self.vec_env.device
        self.render_mode = checked_render_mode(self.game, render_mode)
        self._viewer = viewer_of(self.vec_env, render_mode)
        self.metadata = {"name": versioned_name(game, self.game), **render_metadata(self.game)}
        self.metadata["is_parallelizable"] = True
        self._roles = role_of_agents(self.game)
        self._agent_index = {agent: i for i, agent in enumerate(self._roles)}
        self.possible_agents = list(self._roles)
        self.observation_spaces = agent_spaces(self._roles, self.game.layout.observation.spaces)
        self.action_spaces = agent_spaces(self._roles, self.game.layout.action.spaces)
        self.state_space: Box = joint_space(self.game)
        self._masks = action_mask_slices(self.game)
        layout = self.vec_env.buffers_layout
        self._check = ActionValidator(self.game.layout, layout.batch, self.device)
        self.output, self._numpy = output, output == "numpy"
        self._warns_of_clipping = self._numpy and _clips(self.game)
        self._bounds = _bounds(self.game)
        self._host: HostCopy | HostCopyWithoutObs = HostCopy(layout) if self._numpy else HostCopyWithoutObs(layout)
        self._host_masks: HostMasks | None = None  # None before reset
        self._live: dict[str, int] = {}  # live agent -> its index
        self._seed: int | None = None
        self._np_random: np.random.Generator | None = None

    def __getattr__(self, name: str) -> Any:
        """The game's configuration by the names that ``make`` takes, its shared fields of one number, its methods."""
        if (game := self.__dict__.get("game")) is not None:
            if name in (names := configuration_names(game)):
                return names[name]
            if any(field.name == name and field.shared and not field.shape for field in game.layout.fields):
                return self.vec_env.state[name].item()
            if name in game.reference_methods:
                return partial(game.reference_methods[name], self.vec_env.state)
        return self.__getattribute__(name)  # raises the AttributeError that led here

    @property
    def max_cycles(self) -> int | None:
        """The game's ``max_steps``; None if it has none. Assigning it has no effect: the limit is compiled."""
        return getattr(self.game, "max_steps", None)

    @max_cycles.setter
    def max_cycles(self, limit: int | None) -> None:
        """PettingZoo's test of parallel environments assigns it."""

    @property
    def steps(self) -> int:
        """Steps since the last reset; reading it synchronises with the device."""
        return int(self.vec_env.elapsed_steps[0])

    @property
    def np_random(self) -> np.random.Generator:
        """A generator for wrappers that draw, seeded by ``reset(seed)``. The game itself does not draw from it."""
        if self._np_random is None:
            self._np_random = seeding.np_random(self._seed)[0]
        return self._np_random

    @property
    def agents(self) -> list[str]:  # type: ignore[override]
        """Agents whose episode has not ended, in agent order.

        Raises:
            PettingZooResetNeededError: Before ``reset``.
        """
        if self._host_masks is None:
            raise PettingZooResetNeededError("agents before reset: call reset() first")
        return list(self._live if self.vec_env.closed else self._ready("agents"))

    def observation_space(self, agent: str) -> Space[Any]:
        """Observation space of an agent, always the same object.

        Raises:
            AgentKeyError: There is no such agent.
        """
        return agent_space(self.observation_spaces, agent)

    def action_space(self, agent: str) -> Space[Any]:
        """Action space of an agent, always the same object.

        Raises:
            AgentKeyError: There is no such agent.
        """
        return agent_space(self.action_spaces, agent)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Infos]:
        """Start a new episode.

        Args:
            seed: In [0, 2**64 - 1]; see ``VecEnv.reset``.
            options: Ignored: PettingZoo's API test passes options to every environment.

        Returns:
            Observations and infos of all agents, see ``step``.

        Raises:
            InvalidSeedError: Nothing has changed.
            ClosedEnvError: After ``close``.
        """
        seed = None if seed is None else validate_seed(seed)
        buffers = self._host.step_buffers()
        self.vec_env.reset(seed=seed, out=buffers)
        if seed is not None:
            self._seed, self._np_random = seed, None
        observations, infos, _ = self._outputs(buffers, self._agent_index)
        if self._viewer is not None:
            self._viewer.draw()
        return observations, infos

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], Infos]:
        """One step. Without live agents, ``step({})`` does nothing and returns five empty dictionaries.

        Args:
            actions: One for each live agent, of its action space: a number, a list, an array or a tensor, on the host
                or on the device, of any numeric dtype; see ``ActionValidator.cast``. Continuous actions outside their
                bounds are clipped as in the game's reference; with ``output="numpy"`` PettingZoo's logger warns of it.

        Returns:
            Observations, rewards, terminations, truncations and infos of the agents that were live before the step.
            If the game masks actions, an info has "action_mask", the valid choices of the next step, unless the agent's
            space is a Box: with
            ``output="numpy"`` int8 arrays as ``action_space(agent).sample(mask)`` takes them, else bool tensors on the
            device; one for a Discrete space, a tuple with one for each head for a MultiDiscrete one. If the game
            declares turns or team reward, an info has "acting", a bool: where it is False the agent's next action is
            ignored, and every choice is valid.

        Raises:
            AgentKeyError: The keys are not exactly the live agents; nothing has changed.
            TypeError, ValueError, InvalidActionError: An action is not in its agent's space; nothing has changed.
            PettingZooResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        live = self._ready("step")
        check_keys(actions, live, self._agent_index)
        if not live:
            return {}, {}, {}, {}, {}
        array = self._joined({agent: self._checked(agent, actions[agent]) for agent in live})
        masks = self._host_masks
        assert masks is not None, "reset() sets it"
        mask = None if masks.action_mask is None else torch.from_numpy(masks.action_mask)
        self._check.values(torch.from_numpy(array), torch.from_numpy(masks.acting), mask)
        if self._warns_of_clipping:
            self._warn_of_clipping(actions, array[0], live)
        buffers = self._host.step_buffers()
        self.vec_env.step(self._check.tensor(array), buffers)
        observations, infos, arrays = self._outputs(buffers, live)
        if self._viewer is not None:
            self._viewer.draw()
        rewards, terminations, truncations = (
            arrays[name][0].tolist() for name in ("rewards", "terminations", "truncations")
        )
        return (
            observations,
            {agent: rewards[i] for agent, i in live.items()},
            {agent: terminations[i] for agent, i in live.items()},
            {agent: truncations[i] for agent, i in live.items()},
            infos,
        )

    def state(self) -> Any:
        """Observations of all agents concatenated, (elements,), an array or a tensor like them.

        A view of them if no role is padded. Agents that have ended are included. What the game declares for critics,
        ``critic_state`` and ``agent_critic_state``, is no part of it.

        Raises:
            PettingZooResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        self._ready("state")
        state = joint_obs(self.game, self._obs)[0]
        return state.numpy() if self._numpy else state

    def render(self) -> np.ndarray[Any, Any] | None:
        """With "rgb_array" a frame, (height, width, 3) uint8, else None.

        Raises:
            PettingZooResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        self._ready("render")
        return Frames(self.vec_env)[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free all memory and close the window. Calling it again does nothing."""
        self.vec_env.close()
        if self._viewer is not None:
            self._viewer.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return construct, (type(self), self._arguments)

    def __repr__(self) -> str:
        return f"ParallelEnv({self.game!r}, device={str(self.device)!r})"

    def _ready(self, method: str) -> dict[str, int]:
        """The live agents; with masks and observation they are read anew if a state has been loaded since."""
        if self._host_masks is None and not self.vec_env.closed:
            raise PettingZooResetNeededError(f"{method} before reset: call reset() first")
        self.vec_env.check_ready(method)
        masks = HostMasks.current(self.vec_env, self._host_masks)
        if masks is not self._host_masks:
            obs = self.vec_env.observe()
            self._set_current(obs.cpu() if self._numpy else obs, masks)
        return self._live

    def _set_current(self, obs: torch.Tensor, masks: HostMasks) -> None:
        """Observation and masks of the present state."""
        self._obs, self._host_masks = obs, masks
        live = masks.active[0].tolist()
        self._live = {agent: i for agent, i in self._agent_index.items() if live[i]}

    def _outputs(self, buffers: StepBuffers, agents: Mapping[str, int]) -> tuple[dict[str, Any], Infos, Arrays]:
        """Observations and infos of these agents, and the arrays of all outputs in the buffers."""
        arrays = self._host.arrays()
        obs, masks = torch.from_numpy(arrays["obs"]) if self._numpy else buffers.obs, arrays.get("action_mask")
        current = HostMasks(self.vec_env, arrays)
        self._set_current(obs, current)
        rows: Any = arrays["obs"][0] if self._numpy else buffers.obs[0].unbind()
        observations = {agent: role_obs(self.game, self._roles[agent], rows[i]) for agent, i in agents.items()}
        infos: Infos = {agent: {} for agent in agents}
        if "acting" in arrays:
            acts = current.acting[0].tolist()
            for agent, i in agents.items():
                infos[agent]["acting"] = acts[i]
        if masks is not None:
            own: Any = masks[0].astype(np.int8) if self._numpy else buffers.action_mask[0].unbind()  # type: ignore[index]
            for agent, i in agents.items():
                if (slices := self._masks.get(self._roles[agent])) is not None:
                    infos[agent]["action_mask"] = sample_mask(own[i], slices, self.action_spaces[agent])
        return observations, infos, arrays

    def _checked(self, agent: str, action: Any) -> torch.Tensor | np.ndarray[Any, Any]:
        """An agent's action, cast: a tensor if it is on a GPU, else an array."""
        on_device = isinstance(action, torch.Tensor) and action.device.type != "cpu"
        cast = self._check.cast if on_device else self._check.array
        return cast(action, self.action_spaces[agent].shape, f"{agent}'s action", self._roles[agent])

    def _warn_of_clipping(
        self, actions: Mapping[str, Any], array: np.ndarray[Any, Any], live: Mapping[str, int]
    ) -> None:
        """The warning of PettingZoo's ClipOutOfBoundsWrapper for each live agent whose action will be clipped."""
        low, high = self._bounds
        outside = np.any((array < low) | (array > high), axis=1).tolist()
        for agent, i in live.items():
            if outside[i]:
                EnvLogger.warn_action_out_of_bound(actions[agent], self.action_spaces[agent], "clipping to space")

    def _joined(self, actions: Mapping[str, torch.Tensor | np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """The action array of all agents; actions on the device are copied to the host at once."""
        action = self.game.layout.action
        joined = np.zeros((self.game.layout.num_agents, action.heads), np.int64 if action.discrete else np.float32)
        on_device = {agent: given.reshape(-1) for agent, given in actions.items() if isinstance(given, torch.Tensor)}
        if on_device:
            parts = torch.cat(list(on_device.values())).cpu().split([len(part) for part in on_device.values()])
            actions = {**actions, **{agent: part.numpy() for agent, part in zip(on_device, parts, strict=True)}}
        for agent, given in actions.items():
            joined[self._agent_index[agent], : given.size] = given.reshape(-1)
        return joined.reshape(self._check.shape)


parallel_env = ParallelEnv  # PettingZoo's name for the constructor


class AECEnv(pettingzoo.AECEnv[str, Any, Any]):
    """One environment as PettingZoo's AECEnv, without checks of actions and order, which ``aec_env`` adds.

    Agents act in turn, and the step runs after the last of them. Public attributes of the ParallelEnv, such as
    ``max_cycles`` and ``vec_env``, are attributes here too.

    Args:
        env: The environment that steps, with ``output="numpy"``.
    """

    def __init__(self, env: ParallelEnv) -> None:
        self.parallel_env = env
        self.metadata, self.render_mode, self.possible_agents = env.metadata, env.render_mode, env.possible_agents

    def __getattr__(self, name: str) -> Any:
        if name in _SET_BY_RESET:
            raise PettingZooResetNeededError(f"{name} before reset: call reset() first")
        if name.startswith("_") or name == "parallel_env":
            raise AttributeError(f"AECEnv has no attribute {name!r}")
        return getattr(self.parallel_env, name)

    def observation_space(self, agent: str) -> Space[Any]:
        """As that of ``ParallelEnv``."""
        return self.parallel_env.observation_space(agent)

    def action_space(self, agent: str) -> Space[Any]:
        """As that of ``ParallelEnv``."""
        return self.parallel_env.action_space(agent)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start a new episode; arguments and errors as those of ``ParallelEnv.reset``."""
        self._observations, self.infos = self.parallel_env.reset(seed, options)
        self.agents = self.parallel_env.agents
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self._begin_round()

    def step(self, action: Any) -> None:
        """Take the action of ``agent_selection``: None if it has ended. The last of the live agents steps the game.

        Raises:
            ValueError: An agent that has ended acts.
            TypeError, ValueError, InvalidActionError: An agent's action is not in its space; raised at the step of the
                last agent. The game has not changed, and all agents act again, from the first.
            PettingZooResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._actions[agent] = action
        if len(self._actions) < len(self._order):
            if len(self._actions) == 1:
                self._clear_rewards()
            self.agent_selection = self._order[len(self._actions)]
            return
        try:
            outputs = self.parallel_env.step(self._actions)
        except Exception:
            self._begin_round()
            raise
        self._observations, self.rewards, self.terminations, self.truncations, self.infos = outputs
        self._cumulative_rewards = dict(self.rewards)
        live = self.parallel_env.agents
        self.agents = [*live, *(agent for agent in self._order if agent not in live)]
        self._begin_round()
        self._deads_step_first()

    def _begin_round(self) -> None:
        """The live agents act next, in agent order."""
        self._actions: dict[str, Any] = {}
        if live := self.parallel_env.agents:
            self._order, self.agent_selection = live, live[0]

    def observe(self, agent: str) -> Any:
        """The agent's last observation, an array.

        Raises:
            PettingZooResetNeededError: Before ``reset``.
            AgentKeyError: There is no such agent, or it has ended.
        """
        if agent not in self._observations:
            raise AgentKeyError(f"observe: no observation of {agent!r}; {nearest(str(agent), self._observations)}")
        return self._observations[agent]

    def state(self) -> Any:
        """As that of ``ParallelEnv``."""
        return self.parallel_env.state()

    def render(self) -> np.ndarray[Any, Any] | None:
        """As that of ``ParallelEnv``."""
        return self.parallel_env.render()

    def close(self) -> None:
        """As that of ``ParallelEnv``."""
        self.parallel_env.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return construct, (type(self), {"env": self.parallel_env})


_SET_BY_RESET = frozenset("agents agent_selection rewards terminations truncations infos _observations".split())


def _clips(game: Env) -> bool:
    """Whether the engine clips actions of the game to their bounds."""
    return not game.layout.action.discrete and game.layout.clips_actions


def _bounds(game: Env) -> np.ndarray[Any, Any]:
    """Lower and upper bounds of the action array, (2, num_agents, heads); infinite where there is no Box."""
    action, shape = game.layout.action, (game.layout.num_agents, game.layout.action.heads)
    both = np.stack([np.full(shape, -np.inf, np.float32), np.full(shape, np.inf, np.float32)])
    for role, bounds in action.bounds.items():
        both[:, game.layout.role_slices[role], : len(bounds[0])] = np.array(bounds, np.float32)[:, None]
    return both


class _AssertChoicesWrapper(AssertOutOfBoundsWrapper[str, Any, Any]):
    """AssertOutOfBoundsWrapper for the agents without a Box; the ParallelEnv clips the others' actions and warns."""

    def step(self, action: Any) -> None:
        if isinstance(self.action_space(self.agent_selection), Box):
            self.env.step(action)
        else:
            super().step(action)


def aec_env(
    game: Game, device: str | torch.device | None = "cpu", **arguments: Any
) -> pettingzoo.AECEnv[str, Any, Any]:
    """``AECEnv`` in PettingZoo's wrappers, as mpe2 has them, which check the order of calls and every action.

    A discrete action outside its space raises AssertionError; a Box action is clipped to its space, with a warning of
    PettingZoo's logger, and NaN raises AssertionError, or in a game that also has discrete actions InvalidActionError
    at the step of the last agent. Games with ``clip_actions = False`` take Box actions as given.

    Args:
        game: A registered name, an Env class or an Env.
        device: By default the CPU, which is sufficient for one environment.
        **arguments: For ``ParallelEnv``, without ``output``.
    """
    env = _raw_env(game, device, **arguments)
    if not env.game.layout.action.continuous:
        return OrderEnforcingWrapper(_AssertChoicesWrapper(env))
    return OrderEnforcingWrapper(ClipOutOfBoundsWrapper(env) if _clips(env.game) else env)


def _raw_env(game: Game, device: str | torch.device | None = "cpu", **arguments: Any) -> AECEnv:
    return AECEnv(ParallelEnv(game, device, output="numpy", **arguments))


def _array_env(game: Game, device: str | torch.device | None = "cpu", **arguments: Any) -> ParallelEnv:
    return ParallelEnv(game, device, **{"output": "numpy", **arguments})


def __getattr__(name: str) -> ModuleType:
    """PettingZoo-style modules such as ``tag_continuous_v1``.

    Raises:
        UnknownModuleError: No registered game has this name and version.
    """
    if name not in (modules := _modules()):
        raise UnknownModuleError(f"module {__name__} has no attribute {name!r}; {nearest(name, modules)}")
    return _module(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


def _modules() -> list[str]:
    return [f"{title}_v{version}" for title, game in GAMES.items() for version in versions(game)]


@cache
def _module(name: str) -> ModuleType:
    title, _, version = name.rpartition("_v")
    module, config = ModuleType(f"{__name__}.{name}"), versions(GAMES[title])[int(version)]
    module.__doc__ = f"The game {title}, version {version}, for PettingZoo."
    vars(module).update(
        parallel_env=partial(_array_env, title, **config),
        env=partial(aec_env, title, **config),
        raw_env=partial(_raw_env, title, **config),
    )
    return module
