"""VecEnv: a vectorised environment on one device."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import gymnasium.vector
import numpy as np
import torch

from gpu_vecenv.absent import OF_VEC_ENV, RESET, absent_attribute, with_hint
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.compile.engine_kernels import GUARD_ROWS, BuildOptions
from gpu_vecenv.compile.forks import forks
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.randomize import checked_ranges
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.arguments import (
    MODES,
    AutoresetMode,
    construct,
    initial_state_arrays,
    shared_field_arrays,
    validate_autoreset_mode,
    validate_int,
    validate_mask,
    validate_seeds,
)
from gpu_vecenv.engine.data_manager import TORCH_TYPES, ArrayLike, DataManager, Fields
from gpu_vecenv.engine.launches import Closed, Kernels
from gpu_vecenv.engine.step_buffers import StepBuffers, StepBuffersLayout, StepBuffersPool
from gpu_vecenv.engine.tuning_cache import resolve_launches
from gpu_vecenv.errors import (
    CapacityError,
    ClosedEnvError,
    ConfigError,
    DeviceFaultError,
    ForkedProcessError,
    InvalidActionError,
    NonFiniteError,
    ResetNeededError,
)

Info = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Info]  # of a step


class Fault(IntFlag):
    """Bits of an environment's fault word (actions.cuh), kept until the next call of ``reset`` for it.

    After an action that is invalid or NaN the game's state is unchanged and its episode ends: truncated, reward NaN,
    not counted in the episode statistics. A step after the end of an episode (``autoreset_mode="disabled"``) changes
    nothing: reward 0, flags False. ``info["fault"]`` marks both. With ``end_on_nonfinite``, a state, reward or
    observation that is not finite ends the episode: terminated, reward and observations 0.
    """

    INVALID_ACTION = 1
    NONFINITE_ACTION = 2
    STEPPED_AFTER_END = 4
    NONFINITE = 8


class VecEnv:
    """``num_envs`` environments of a game. All tensors are on ``device``; the axes are environment, agent, ….

    Args:
        game: The game and its configuration.
        num_envs: Number of environments, at least 1.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        autoreset_mode: When an environment whose agents have all ended is reset: "same_step" (in that step; its last
            observation is in ``info["final_obs"]``), "next_step" (by the next step, whose actions are ignored) or
            "disabled" (by ``reset(mask=…)`` only); or a member of Gymnasium's AutoresetMode, or its value.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.
        validate: "async": after an invalid action the environment is truncated with reward NaN, ``info["fault"]`` and
            a bit of its fault word, see ``faults()``. "sync": ``step`` validates the actions first and raises
            InvalidActionError, which synchronises with the device.
        end_on_nonfinite: Check state, rewards and observations in each step: an environment in which one is NaN or
            infinite ends its episode, with a fault bit in ``faults()``; the next episode starts from finite numbers.
        arrays: Values of shared state fields.
        agents_as_envs: Each agent is a sub-environment: actions, observations and all other outputs have one axis of
            num_envs * num_agents, and each row has episodes of its own. An agent that terminates early ends its episode
            there ("same_step" returns its "final_obs"); its row is zero until its environment ends, when it terminates
            once more.
        initial_states: Saved states: field name -> (number of states, *field shape). After the game's own reset, each
            new episode takes one of them at random, the same for all of these fields.
        randomize: Parameter -> (low, high): replaces ``game.randomize``. Each environment draws the parameter anew at
            each reset, uniformly in [low, high); ``state[parameter]``, (num_envs,) float32, holds the values, and what
            is written there counts from the next step until the environment's next reset.
        first_env_index: Index of the first environment in the random streams; shards of one run have different ones.
        threads_per_env: Threads that run one environment on a GPU: 1, 2, 4, 8, 16 or a multiple of 32 up to 1024.
            Affects speed only. None: the result of ``gpu_vecenv.engine.tuning.tune`` for this game, size and GPU, else
            a default.
        threads_per_block: Threads per block, a power of two from 32 to 1024; groups of more than 32 threads have a
            block each. Affects speed only. None: as for ``threads_per_env``; if either is given, no tuning result is
            used.
        fuse_sampling: Whether ``Sampler.step`` draws actions and steps with one kernel on a GPU, instead of two.
            Affects speed only. None: the result of ``tune``, else by the sizes of the game and the GPU.
        thread_order: Debug builds: 1 is backwards, 2 shuffled: of every range on the host, of blocks on a GPU. Results
            must be bitwise equal.
        guards: Debug builds: an index out of bounds of a state field, or of an array or action of ``io``, is not
            accessed, and guard bytes around environments, in state and outputs, find writes through other pointers;
            each call checks both and raises EnvContractError. Not with ``agents_as_envs``.
        races: Debug builds of the CPU: guards, and accesses that would race on a GPU, where an environment is run by a
            group of threads: each call raises DataRaceError. Some hundred times slower.

    Raises:
        TypeError, ValueError, ConfigError: An argument is wrong.
        CapacityError: The environments do not fit in memory.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's source fails.

    Example:
        >>> env = gpu_vecenv.make("tag_gridworld", num_envs=100, num_taggers=4)  # a VecEnv
        >>> obs, info = env.reset(seed=7)
        >>> obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
        >>> obs.shape, rewards.dtype
        (torch.Size([100, 5, 21]), torch.float32)
    """

    def __init__(
        self,
        game: Env,
        num_envs: int,
        device: str | torch.device | None = None,
        *,
        autoreset_mode: AutoresetMode | gymnasium.vector.AutoresetMode = "same_step",
        agents_as_envs: bool = False,
        driver: str | None = None,
        validate: Literal["async", "sync"] = "async",
        arrays: Mapping[str, ArrayLike] | None = None,
        initial_states: Mapping[str, ArrayLike] | None = None,
        randomize: Mapping[str, tuple[float, float]] | None = None,
        first_env_index: int = 0,
        threads_per_env: int | None = None,
        threads_per_block: int | None = None,
        fuse_sampling: bool | None = None,
        end_on_nonfinite: bool = False,
        thread_order: int = 0,
        guards: bool = False,
        races: bool = False,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if not isinstance(game, Env):
            raise TypeError(f"game is {game!r:.128}; expected a configured Env: make() takes names and classes too")
        if randomize is not None:
            game = dataclasses.replace(game, randomize=checked_ranges("randomize", randomize))
        self.game, self.layout = game, game.layout
        self.num_envs = validate_int("num_envs", num_envs, 1)
        self.first_env_index = validate_int("first_env_index", first_env_index, 0, 2**63 - 1)
        if not isinstance(validate, str) or validate not in ("async", "sync"):
            raise ValueError(f'validate is {validate!r}; expected "async" or "sync"')
        for name, flag in (
            ("agents_as_envs", agents_as_envs),
            ("end_on_nonfinite", end_on_nonfinite),
            ("guards", guards),
            ("races", races),
        ):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is {flag!r} ({type(flag).__name__}); expected True or False")
        guards |= races
        if agents_as_envs and guards:
            raise ConfigError(
                "guards=True or races=True needs outputs with an axis of environments; use agents_as_envs=False"
            )
        if not isinstance(fuse_sampling, bool | None):
            raise TypeError(
                f"fuse_sampling is {fuse_sampling!r} ({type(fuse_sampling).__name__}); expected True, False or None"
            )
        thread_order = validate_int("thread_order", thread_order, 0, 2)
        self.autoreset_mode, self.validate = validate_autoreset_mode(autoreset_mode), validate
        self.functions = FunctionManager(device, driver)
        self.device = self.functions.device
        if races and not self.functions.backend.traces_accesses:
            raise ConfigError(
                f'races=True on {self.device}: expected device="cpu", and a C++ compiler that has -fsanitize=thread '
                "and gets no other sanitizer from $GPU_VECENV_CXXFLAGS"
            )
        choice = resolve_launches(
            game, self.num_envs, self.functions.backend, threads_per_env, threads_per_block, fuse_sampling
        )
        self.group_shape = choice.group_shape  # None on the host
        self.closed = False
        self._process = forks() if self.device.type == "cuda" else None
        self._data = DataManager(self.device)
        self.agents_as_envs = agents_as_envs
        self.buffers_layout = StepBuffersLayout(
            (self.num_envs * self.layout.num_agents,) if agents_as_envs else (self.num_envs, self.layout.num_agents),
            self.layout.observation.shape,
            TORCH_TYPES[self.layout.observation.dtype],
            self.autoreset_mode == "same_step",
            self.layout.num_choices,
            self.device,
            GUARD_ROWS if guards else 0,
            self.layout.tracks_acting,
        )
        self._buffers_pool = StepBuffersPool(self.buffers_layout)
        self._action_check = ActionValidator(self.layout, self.buffers_layout.batch, self.device)
        shared, initial_states = (
            shared_field_arrays(game, {} if arrays is None else arrays),
            initial_state_arrays(self.layout, {} if initial_states is None else initial_states),
        )
        self._check_capacity()
        self.build = BuildOptions(
            tuple(initial_states), end_on_nonfinite, guards=guards, races=races, thread_order=thread_order
        )
        self._allocate(shared, initial_states)
        self._kernels = Kernels(
            self.functions,
            self.layout,
            self._data,
            self.num_envs,
            choice=choice,
            build=self.build,
            mode=MODES[self.autoreset_mode],
            agents_as_envs=agents_as_envs,
            first_env_index=self.first_env_index,
        )
        self.program, self.fuse_sampling = self._kernels.program, self._kernels.fuse_sampling
        self.seed: int | tuple[int, ...] | None = None  # of the last seeded reset
        self._begun = False
        # Number of calls of load_state_dict and clear_episode_statistics: caches of derived values compare them.
        self.loads = self.clears = 0

    def like(self, **changes: Any) -> VecEnv:
        """A new environment of the same class, constructed with the same arguments except ``changes``.

        Shared fields, initial states and ranges of randomised parameters have their present values, also where they
        were written to since; those that ``changes`` gives do not.

        Raises:
            ConfigError: A method of this instance was replaced, which a new environment would not have.
            ClosedEnvError: After ``close``.
        """
        self._check_open("like")
        if replaced := sorted(name for name in vars(self) if callable(getattr(type(self), name, None))):
            raise ConfigError(
                f"like: {', '.join(replaced)} of this environment was replaced, which an environment like it would not "
                "have; override it in a class derived from VecEnv"
            )
        environment = construct(type(self), {**self._arguments, **changes})
        assert isinstance(environment, VecEnv)
        if "game" not in changes:
            environment.copy_shared_values(self, without=changes)
        return environment

    def copy_shared_values(self, source: VecEnv, without: Container[str] = ()) -> None:
        """Copy the values of shared fields, initial states and ranges of randomised parameters.

        Args:
            source: An environment of the same game and as many initial states.
            without: Those of these constructor arguments are left as they are: "arrays", "initial_states",
                "randomize".
        """
        fields = self.layout.fields if "arrays" not in without else ()
        names = [f"state_{field.name}" for field in fields if field.shared]
        if "initial_states" not in without:
            names += [f"initial_{name}" for name in self.build.initial_fields]
        if self.layout.randomized and "randomize" not in without:
            names.append("engine_ranges")
        for name in names:
            self.data[name].copy_(source.data[name])

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_VEC_ENV, "env")

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as its constructor arguments, without device handles; state_dict() transfers the state.
        return construct, (type(self), self._arguments)

    @property
    def data(self) -> DataManager:
        """All tensors, by name."""
        self._check_open("data")
        return self._data

    @property
    def num_agents(self) -> int:
        """Agents of one environment."""
        return self.layout.num_agents

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Field name -> live, writable tensor (num_envs, *shape); shared fields without the environment axis.

        Randomised parameters are fields too, (num_envs,) float32.
        """
        return Fields((field.name, self.data[f"state_{field.name}"]) for field in self.layout.fields)

    @property
    def elapsed_steps(self) -> torch.Tensor:
        """Steps since reset, (num_envs,) int32, live."""
        return self.data["engine_elapsed_steps"][:, 0]

    @property
    def action_mask(self) -> torch.Tensor:
        """Choices allowed in the next step, (num_envs, num_agents, num_logits) bool, live.

        Raises:
            KeyError: The game declares no action masks.
        """
        return self.data["engine_action_mask"]

    @property
    def active(self) -> torch.Tensor:
        """Agents whose episode has not ended, (num_envs, num_agents) bool, live."""
        return self.data["engine_active"]

    @property
    def acting(self) -> torch.Tensor:
        """Active agents whose next action counts, (num_envs, num_agents) bool, live.

        Those that would act next where an episode has ended, see ``Env.takes_turns`` and ``Env.team_reward``. All
        active ones in games that declare neither.
        """
        return self.data["engine_acting" if self.layout.tracks_acting else "engine_active"]

    def step_buffers(self, **tensors: torch.Tensor) -> StepBuffers:
        """New step buffers: unused memory, or the caller's tensors, given by name.

        Raises:
            TypeError, ValueError: A tensor's name, shape, dtype, device or strides are wrong.
        """
        self._check_open("step_buffers")
        if tensors and self.build.guards:
            raise ConfigError(
                f"step_buffers: {', '.join(tensors)} have no guard bytes between environments; call "
                "step_buffers() without them"
            )
        return (
            StepBuffers.around(self.buffers_layout, tensors) if tensors else StepBuffers.allocate(self.buffers_layout)
        )

    @with_hint(RESET)
    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        mask: ArrayLike | None = None,
        out: StepBuffers | None = None,
    ) -> tuple[torch.Tensor, Info]:
        """Start new episodes in all environments, or in those where ``mask`` is True.

        Args:
            seed: 0 … 2**64 - 1. Restarts the random streams of the environments that are reset, each with a stream of
                its own. Or a sequence of num_envs seeds: environment e is then bitwise equal to one that is made alone
                and reset with the e-th. Without a seed the streams continue; the first reset then draws one, which is
                ``env.seed``.
            mask: (num_envs,) bool, torch or NumPy.
            out: Buffers to write to; None allocates.

        Returns:
            ``obs`` of all environments, (num_envs, num_agents, *obs_shape) float32 or uint8, and ``info`` with
            "active", (num_envs, num_agents) bool, and, if the game declares them, "action_mask", (num_envs, num_agents,
            num_logits) bool, and "acting", (num_envs, num_agents) bool. With ``agents_as_envs`` the first two axes are
            one, here and in ``step``.

        Raises:
            InvalidSeedError, TypeError, ValueError: An argument is wrong; nothing has changed.
            ResetNeededError: The first reset has a ``mask``.
            ClosedEnvError: After ``close``.
        """
        self._check_open("reset")
        out = self.output(out)
        begins = None if mask is None else validate_mask(mask, self.num_envs, self.device)
        if begins is not None and not self._begun:
            raise ResetNeededError("reset(mask=…) before the first reset: call reset() without a mask first")
        if seed is None and not self._begun:
            seed = secrets.randbits(63)
        checked = None if seed is None else validate_seeds(seed, self.num_envs)
        if isinstance(checked, tuple):
            bits = np.array(checked, np.uint64).view(np.int64)  # torch has few operations on uint64
            self._kernels.reset(begins, None, torch.from_numpy(bits).to(self.device), out)
        else:
            self._kernels.reset(begins, checked, None, out)
        self.seed = self.seed if checked is None else checked
        self._begun = True
        return out.obs, _info(out)

    def step(self, actions: torch.Tensor, out: StepBuffers | None = None) -> Outputs:
        """Step every environment.

        Args:
            actions: (num_envs, num_agents[, heads]) int32 or int64, or, if a role has a Box, (num_envs, num_agents, n)
                float32, see ``ActionLayout``; with ``agents_as_envs``, (num_envs * num_agents, …).
            out: Buffers to write to; None allocates, so that earlier outputs never change.

        Returns:
            ``obs``, (num_envs, num_agents, *obs_shape) float32 or uint8; ``rewards``, (num_envs, num_agents) float32;
            ``terminations`` and ``truncations``, (num_envs, num_agents) bool; ``info``, as that of ``reset``, with
            "fault", (num_envs, num_agents) bool, and in "same_step" mode "final_obs", like ``obs``, and "_final_obs",
            (num_envs, num_agents) bool, the mask of its valid rows.

        Raises:
            TypeError, ValueError: Dtype, shape or device of ``actions`` or ``out`` is wrong; nothing has changed.
            InvalidActionError: With ``validate="sync"``, a value is outside the action space; nothing has changed.
            ResetNeededError: Before the first ``reset``.
            ClosedEnvError: After ``close``.
        """
        self.check_ready("step")
        actions = self._action_check(actions)
        if self.validate == "sync":
            acting = self.active & self.acting
            self._action_check.values(actions, acting, self.action_mask if self.layout.masks_actions else None)
        out = self.output(out)
        self._kernels.step(actions, out)
        return _outputs(out)

    def step_sampled(self, squash: str, sample_arguments: Mapping[str, Any], out: StepBuffers) -> Outputs | None:
        """For ``Sampler.step``: a step that draws its own actions; None if they must be drawn before ``step``."""
        if self.why_not_fused() is not None or not self._kernels.fuses_sampling(squash):
            return None
        self._kernels.step_sampled(squash, sample_arguments, out)
        return _outputs(out)

    def why_not_fused(self) -> str | None:
        """Why other kernels cannot step these environments in place of ``step``, in a few words; None if they can."""
        if type(self).step is not VecEnv.step or "step" in vars(self):
            return "an overridden step"
        return 'validate="sync"' if self.validate == "sync" else None

    def prepare(self, program: Program, kernel: str, shape: LaunchShape, **arguments: object) -> Launch:
        """A launch, for ``launch``, of a kernel that takes ``engine_kernels.state_arguments``: those of this."""
        return self._kernels.prepare(program, kernel, shape, **arguments)

    def launch(self, launch: Launch, call: str, **fields: int | None) -> None:
        """Run a prepared launch on this environment's tensors, unchecked; ``Sampler`` draws with it."""
        self._kernels.run(launch, call, None, **fields)

    def observe(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Observations of the current state, for instance after writing to ``state``.

        Args:
            out: Tensor to write to, as ``step_buffers`` takes it; None allocates.

        Raises:
            ResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
            ValueError: ``out`` does not fit.
        """
        self.check_ready("observe")
        buffers = self.step_buffers() if out is None else self.step_buffers(obs=out)
        self._kernels.observe(buffers)
        return buffers.obs

    def sample_actions(self) -> torch.Tensor:
        """Uniform valid actions for the next step, drawn on the device from the environments' own random streams.

        (num_envs, num_agents[, heads]) int32, or (…, n) float32 if a role has a Box; with ``agents_as_envs``,
        (num_envs * num_agents, …).
        The same on every call until the next step. Where choices are masked, uniform among the allowed ones.

        Raises:
            ResetNeededError, ClosedEnvError: Before ``reset``, after ``close``.
        """
        self.check_ready("sample_actions")
        action = self.layout.action
        kind = TORCH_TYPES[action.dtype]
        actions = torch.empty((*self.buffers_layout.batch, *action.shape), dtype=kind, device=self.device)
        self._kernels.random_actions(actions)
        return actions

    def faults(self) -> torch.Tensor:
        """(num_envs,) int32, bits of ``Fault`` since the last ``reset`` of each environment; live, on the device."""
        return self.data["engine_fault"][:, 0]

    def raise_for_faults(self) -> None:
        """Raise if ``faults()`` has any; synchronises with the device.

        Raises:
            InvalidActionError: An environment got an invalid action, or was stepped after its end.
            NonFiniteError: With ``end_on_nonfinite``, an environment had a non-finite number.
        """
        words = self.faults().cpu()
        for error, bits in ((InvalidActionError, ~Fault.NONFINITE), (NonFiniteError, Fault.NONFINITE)):
            faulted = (words & int(bits)).nonzero()[:, 0].tolist()
            if faulted:
                names = " and ".join(str(fault.name) for fault in Fault if fault & int(words[faulted[0]]))
                invalid = int(words[faulted[0]]) & (Fault.INVALID_ACTION | Fault.NONFINITE_ACTION)
                raise error(
                    f"{len(faulted)} of {self.num_envs} environments have faults; the first, {faulted[0]}: {names}"
                    + '. With validate="sync", step names the agent and the value at once' * bool(invalid)
                )

    def episode_statistics(self) -> dict[str, torch.Tensor]:
        """Sums over the episodes completed since ``clear_episode_statistics``, live tensors on the device.

        ``returns`` (num_envs, num_agents) float64, ``lengths``, ``episodes`` and ``terminations`` (num_envs,) int64:
        the last counts episodes whose last step truncated no agent.
        """
        return {
            "returns": self.data["engine_completed_returns"],
            "lengths": self.data["engine_completed_lengths"][:, 0],
            "episodes": self.data["engine_completed_episodes"][:, 0],
            "terminations": self.data["engine_completed_terminations"][:, 0],
        }

    def clear_episode_statistics(self) -> None:
        """Set the sums of ``episode_statistics`` to 0."""
        sums = self.episode_statistics()
        with self._kernels.exclusive("clear_episode_statistics"):
            for tensor in sums.values():
                tensor.zero_()
            self.clears += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all that the next step depends on: state, clocks, random streams, statistics."""
        data = self.data
        with self._kernels.exclusive("state_dict"):
            return {name: data[name].clone() for name in self._own}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a ``state_dict`` of an environment of the same game and size."""
        self._check_open("load_state_dict")
        with self._kernels.exclusive("load_state_dict"):
            self._data.load_state_dict(state, self._own)
            self._begun = True
            self.loads += 1

    def poison(self, byte: int) -> None:
        """Debug builds: fill state, action masks, scratch memory and outputs, the last two before each call.

        What is computed may not depend on it: ``reset`` writes all of the state, ``observe`` all observations, and
        scratch memory is not kept.

        Args:
            byte: 0 … 255; flags get its last bit.

        Raises:
            ConfigError: The environment is not one with ``guards=True``.
            TypeError, ValueError: ``byte`` is no such number.
        """
        self._check_open("poison")
        if not self.build.guards:
            raise ConfigError("poison: the environment has no debug build; make it with guards=True")
        self._kernels.poison = byte = validate_int("byte", byte, 0, 255)
        masks = [self.action_mask] if self.layout.masks_actions else []
        for tensor in (*(self.state[f.name] for f in self.layout.fields if not f.shared), *masks):
            value = torch.tensor([byte] * tensor.element_size(), dtype=torch.uint8, device=self.device)
            tensor.fill_(bool(byte & 1) if tensor.dtype == torch.bool else value.view(tensor.dtype)[0])

    def close(self) -> None:
        """Free all tensors. Further calls do nothing.

        Raises:
            ConcurrentUseError: Another thread is in a call; nothing has changed.
        """
        if self.closed:
            return
        with suppress(ForkedProcessError), self._kernels.exclusive("close"):  # a thread of before the fork is not here
            pass
        # A call of another thread that finds the environment open ends as before this, or with ClosedEnvError.
        self.closed = True
        self._data = self._buffers_pool = self.program = self._kernels = cast(Any, Closed())

    def __repr__(self) -> str:
        return f"VecEnv({self.game!r}, num_envs={self.num_envs}, device={str(self.device)!r}, {self.autoreset_mode!r})"

    def bytes_per_env(self) -> int:
        """Device memory of one environment: state, engine fields, scratch memory and its part of a set of step buffers.

        Scratch memory of the CPU, which has as much for each thread, is not counted.
        """
        self._check_open("bytes_per_env")
        return self._bytes_without_scratch() + self._kernels.scratch_bytes_per_env

    def _bytes_without_scratch(self) -> int:
        fields = (*self.layout.fields, *self.layout.engine_fields)
        own = sum(field.nbytes for field in fields if not field.shared)
        return own + self.buffers_layout.nbytes // self.num_envs + 1

    def _check_capacity(self) -> None:
        free, each = free_bytes(self.device), self._bytes_without_scratch()
        if each * self.num_envs > free:
            raise CapacityError(
                f"num_envs = {self.num_envs:,} environments of {self.layout.name} need "
                f"{each * self.num_envs:,} bytes ({each:,} each); {free:,} bytes are free on {self.device}: "
                f"at most num_envs = {free // each:,} fit"
            )

    @property
    def _own(self) -> list[str]:
        """Names of the tensors with an environment axis: neither shared fields nor tensors that users pushed."""
        fields = [("engine", self.layout.engine_fields), ("state", self.layout.fields)]
        return [f"{kind}_{field.name}" for kind, group in fields for field in group if not field.shared]

    def _allocate(self, shared: Mapping[str, ArrayLike], initial_states: Mapping[str, ArrayLike]) -> None:
        for name, field in self.layout.state_tensors(initial_states):
            if name == "engine_ranges":
                ranges = [(each.low, each.high, each.last) for each in self.layout.randomized]
                self.data.push(name, np.array(ranges, np.float32))
            elif name.startswith("initial_"):
                self.data.push(name, initial_states[field.name])
            elif field.shared:
                self.data.push(name, shared[field.name])
            else:
                shape, guard_items = (self.num_envs, *field.shape), self.build.guard_items(field)
                self.data.allocate(name, shape, field.dtype, guard_items=guard_items)

    def check_ready(self, method: str) -> None:
        """Raise ClosedEnvError after ``close``, ResetNeededError before the first ``reset``."""
        self._check_open(method)
        if not self._begun:
            raise ResetNeededError(f"{method} before reset: call reset() first")

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise ClosedEnvError(f"{method} after close: make a new environment")
        if self._process is not None:
            if self._process != forks():
                raise ForkedProcessError(
                    f"{method} in a forked process: GPU memory is not inherited; make environments in "
                    "processes started "
                    'with the start method "spawn"'
                )
            if fault := self.functions.backend.fault:
                raise DeviceFaultError(
                    f"{method} after a fault; restart the process, {self.device} is unusable in this one: {fault}"
                )

    def output(self, out: StepBuffers | None) -> StepBuffers:
        """The buffers that a call writes to: ``out``, if they fit this environment, or new ones.

        Raises:
            ValueError: ``out`` is not from ``step_buffers`` of such an environment.
        """
        if out is None:
            return self._buffers_pool.take()
        if not isinstance(out, StepBuffers) or (
            out.layout is not self.buffers_layout and out.layout != self.buffers_layout
        ):
            raise ValueError(
                f"out is {type(out).__name__}; expected StepBuffers made by this environment's step_buffers()"
            )
        return out


def _outputs(buffers: StepBuffers) -> Outputs:
    info = _info(buffers)
    info["fault"] = buffers.fault
    if buffers.final_obs is not None:
        info |= {"final_obs": buffers.final_obs, "_final_obs": buffers.final_mask}
    return buffers.obs, buffers.rewards, buffers.terminations, buffers.truncations, info


def _info(buffers: StepBuffers) -> Info:
    info = {"active": buffers.active}
    if buffers.action_mask is not None:
        info["action_mask"] = buffers.action_mask
    if buffers.acting is not None:
        info["acting"] = buffers.acting
    return info
