"""The engine's kernels on one environment's tensors: prepared once, launched with the arguments of each call."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.compile.engine_kernels import BuildOptions
from gpu_vecenv.compile.forks import forks
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.data_manager import DataManager
from gpu_vecenv.engine.guards import check, check_records, fill, new_records, output_guard_bands, state_guard_bands
from gpu_vecenv.engine.races import Memory
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.tuning_cache import LaunchChoice, fused_sampling_pays_off
from gpu_vecenv.errors import CapacityError, ClosedEnvError, ConcurrentUseError, ForkedProcessError

OUTPUTS = StepBuffers._fields[2:]  # names of the tensors, and of the kernels' arguments; the last may be missing
OBS, ACTIVE, ACTION_MASK, ACTING = (OUTPUTS.index(name) for name in ("obs", "active", "action_mask", "acting"))


class Kernels:
    """The kernels of entry_points.cuh on one environment's tensors: reset, step, observe, random_actions.

    Args:
        functions: The FunctionManager of the device.
        layout: The configured game.
        data: The environment's tensors.
        num_envs: Number of environments.
        choice: Threads per environment and per block, and whether a step that draws its actions is one kernel.
        build: Build options of the engine.
        mode: Autoreset mode, a value of the enum in step.cuh.
        agents_as_envs: Whether each agent is a row.
        first_env_index: Index of the first environment in the random streams.

    Raises:
        DeviceUnavailableError, EnvDefinitionError, KernelCompileError: As ``FunctionManager.compile_game``.
        CapacityError: Scratch memory does not fit.
    """

    def __init__(
        self,
        functions: FunctionManager,
        layout: GameLayout,
        data: DataManager,
        num_envs: int,
        *,
        choice: LaunchChoice,
        build: BuildOptions,
        mode: int,
        agents_as_envs: bool,
        first_env_index: int,
    ) -> None:
        self._functions, self._game_layout, self._num_envs = functions, layout, num_envs
        self._outputs = OUTPUTS if layout.tracks_acting else OUTPUTS[:ACTING]
        self._group_shape = choice.group_shape
        self.data, self.build = data, build
        self._lock = threading.RLock()  # reentrant: an interrupt may prevent the release, and its thread calls again
        self._holder = forks()  # of the process in which the lock was acquired last
        self._step_settings = {"mode": mode, "agents_as_envs": agents_as_envs}
        self._state: dict[str, object] = {
            name: data.memory(name) for name, _ in layout.state_tensors(build.initial_fields)
        }
        self._state["num_initial_states"] = (
            len(data[f"initial_{build.initial_fields[0]}"]) if build.initial_fields else 0
        )
        self._records = new_records(num_envs, data.device) if build.guards else None
        if self._records is not None:
            self._state["violations"] = self._records
        self.program = functions.compile_game(layout, group_shape=choice.group_shape, build=build)
        scratch_bytes, shared_bytes, may_pay_off = self._layout(self.program)
        self.fuse_sampling = self._fuse_sampling(choice, bool(may_pay_off))
        shape, copies = self._shape(shared_bytes)
        self._scratch_bytes = scratch_bytes
        self.scratch_bytes_per_env = 0 if self._group_shape is None else scratch_bytes
        try:
            scratch = torch.empty(max(1, scratch_bytes * copies), dtype=torch.uint8, device=data.device)
        except torch.OutOfMemoryError as error:
            free = free_bytes(data.device)
            raise CapacityError(
                f"num_envs = {num_envs:,} environments of {layout.name} need {scratch_bytes * copies:,} bytes of "
                f"scratch memory ({scratch_bytes:,} each); {free:,} bytes are free on {data.device}: at most num_envs "
                f"= {free // scratch_bytes:,} fit"
            ) from error
        self._scratch = scratch
        self._work: dict[str, object] = {"scratch": scratch, "num_envs": num_envs}

        def prepare(kernel: str, **arguments: object) -> Launch:
            return self.program.prepare(kernel, shape, **self._state, **arguments)

        self._reset = prepare(
            "vecenv_reset", agents_as_envs=agents_as_envs, first_env_index=first_env_index, **self._work
        )
        self._step = prepare("vecenv_step", **self._step_settings, **self._work)
        self._observe = prepare("vecenv_observe", agents_as_envs=agents_as_envs, **self._work)
        self._random_actions = prepare("vecenv_random_actions", num_envs=num_envs)
        self._sampled_steps: dict[str, Launch] = {}  # by the way to draw actions, see Sampler
        self.poison: int | None = None  # debug builds: the byte that scratch and outputs hold before each call
        if build.guards:
            fill(state_guard_bands(data))

    def _layout(self, program: Program) -> list[int]:
        """Bytes of scratch per environment, of shared memory per block, and whether these allow a faster fused draw."""
        layout = torch.zeros(3, dtype=torch.int64, device=self.data.device)
        program.launch("vecenv_layout", 1, out=layout)
        return layout.tolist()

    def _fuse_sampling(self, choice: LaunchChoice, may_pay_off: bool) -> bool:
        """Whether a step that draws its actions is one kernel; ``may_pay_off``: its use of memory allows a gain."""
        if choice.fuse_sampling is not None or choice.group_shape is None:
            return bool(choice.fuse_sampling)
        resident_threads = self._functions.backend.resident_threads
        assert resident_threads is not None
        agents = self._game_layout.num_agents
        return may_pay_off and fused_sampling_pays_off(self._num_envs, agents, choice.group_shape, resident_threads)

    def _shape(self, shared_bytes: int) -> tuple[LaunchShape, int]:
        """The launch shape, and the number of environments that need scratch memory at the same time."""
        if self._group_shape is not None:
            return LaunchShape(
                self._num_envs, self._group_shape.threads_per_env, self._group_shape.threads_per_block, shared_bytes
            ), self._num_envs
        from gpu_vecenv.compile.backends.host import num_host_threads

        # The host steps several single-agent environments at a time with SIMD instructions, others one by one.
        agents = self._game_layout.num_agents
        work = self._num_envs * agents if agents > 1 else self._num_envs // 4
        return LaunchShape(self._num_envs, shared_bytes=shared_bytes, work=work), num_host_threads()

    def reset(self, mask: torch.Tensor | None, seed: int | None, seeds: torch.Tensor | None, out: StepBuffers) -> None:
        """Start new episodes where ``mask`` (num_envs,) is True, or everywhere; write all observations.

        ``seed`` is that of all environments, ``seeds`` (num_envs,) int64, the bits of unsigned numbers, one for each.
        """
        self.run(
            self._reset,
            "reset",
            out,
            mask=None if mask is None else mask.data_ptr(),
            reseed=seed is not None or seeds is not None,
            seed=seed or 0,
            seeds=None if seeds is None else seeds.data_ptr(),
            obs=out.pointers[OBS],
            active=out.pointers[ACTIVE],
            action_mask=out.pointers[ACTION_MASK] or None,
            **({"acting": out.pointers[ACTING]} if self._game_layout.tracks_acting else {}),
        )

    def step(self, actions: torch.Tensor, out: StepBuffers) -> None:
        """Step all environments."""
        int64_actions = actions.dtype == torch.int64
        self.run(
            self._step, "step", out, actions=actions.data_ptr(), int64_actions=int64_actions, **self._addresses(out)
        )

    def fuses_sampling(self, squash: str) -> bool:
        """Whether a kernel that draws actions and steps is to be used and compiled.

        Compiles it at the first call, which synchronises with the device; not during graph capture, where that fails.
        """
        if not self.fuse_sampling:
            return False
        if squash not in self._sampled_steps:
            if self.data.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            build = dataclasses.replace(self.build, sampled=True, squash=squash)
            program = self._functions.compile_game(self._game_layout, group_shape=self._group_shape, build=build)
            shape, _ = self._shape(self._layout(program)[1])
            self._sampled_steps[squash] = program.prepare(
                "vecenv_step", shape, **self._state, **self._step_settings, **self._work
            )
        return True

    def step_sampled(self, squash: str, sample_arguments: Mapping[str, Any], out: StepBuffers) -> None:
        """Draw actions and step; ``sample_arguments`` are those of ``engine_kernels.sample_arguments``."""
        self.run(self._sampled_steps[squash], "step", out, **sample_arguments, **self._addresses(out))

    def _addresses(self, out: StepBuffers) -> dict[str, int]:
        """Name of an output -> its address."""
        return dict(zip(self._outputs, out.pointers, strict=False))

    def observe(self, out: StepBuffers) -> None:
        """Write the observations of the current state."""
        self.run(self._observe, "observe", out, obs=out.pointers[OBS])

    def random_actions(self, actions: torch.Tensor) -> None:
        """Write random valid actions for the next step."""
        self.run(self._random_actions, "sample_actions", None, actions=actions.data_ptr())

    def prepare(self, program: Program, kernel: str, shape: LaunchShape, **arguments: object) -> Launch:
        """A launch, for ``run``, of another program's kernel that takes ``engine_kernels.state_arguments``."""
        return program.prepare(kernel, shape, **self._state, **arguments)

    def run(self, launch: Launch, call: str, out: StepBuffers | None, **varying: int | None) -> None:
        """Launch with these addresses and numbers, unchecked: the environment has allocated or checked the tensors."""
        self._acquire(call)
        try:
            if self.poison is not None:
                for tensor in (self._work["scratch"], *(() if out is None else out.tensors().values())):
                    tensor.view(torch.uint8).fill_(self.poison)
            if self.build.guards and out is not None:
                fill(output_guard_bands(out))
            for name, value in varying.items():
                setattr(launch.fields, name, value)
            launch.run()
            if self._records is not None:
                outputs = {} if out is None else out.tensors()
                memory = Memory(self.data.items(), outputs, self._scratch, self._scratch_bytes, self.program)
                check_records(self._records, self._game_layout, self.build, memory, call)
                check(state_guard_bands(self.data), call)
                check(() if out is None else output_guard_bands(out), call)
        finally:
            self._lock.release()

    @contextmanager
    def exclusive(self, call: str) -> Iterator[None]:
        """No other call in the meantime.

        Raises:
            ConcurrentUseError: Another thread is in a call.
            ForkedProcessError: It was when this process was forked, and no longer exists here.
        """
        self._acquire(call)
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self, call: str) -> None:
        if self._lock.acquire(blocking=False):
            self._holder = forks()
            return
        if self._holder != forks():
            raise ForkedProcessError(
                f"{call} in a forked process: another thread was in a call of this environment during the fork, so "
                "that its state is half written here; make a new environment, or fork while no thread is in a call"
            )
        raise ConcurrentUseError(
            f"{call}: another thread is in a call of this environment; use one environment per thread"
        )


class Closed:
    """What a closed environment has in place of its tensors and kernels."""

    def _refuse(self, *_: object) -> Any:
        raise ClosedEnvError("the environment has been closed: make a new environment")

    __getattr__ = __getitem__ = __iter__ = __contains__ = __len__ = _refuse
