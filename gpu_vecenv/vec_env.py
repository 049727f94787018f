"""VecEnv, the machine: replicas of one game on one device, reset, stepped and reset again without leaving it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import IntFlag
from typing import Any, Literal

import numpy as np
import torch

from gpu_vecenv.arguments import checked_seed, count, pool_arrays, shared_arrays
from gpu_vecenv.backends import Argument, LaunchShape
from gpu_vecenv.data_manager import TORCH_TYPES, ArrayLike, DataManager
from gpu_vecenv.device import free_bytes
from gpu_vecenv.env import Env
from gpu_vecenv.errors import (
    CapacityError,
    ClosedEnvError,
    InvalidActionError,
    ResetNeededError,
)
from gpu_vecenv.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.prologue import MACHINE_STATE, kernel_fields
from gpu_vecenv.slab import Slab, SlabLayout

AutoresetMode = Literal["same_step", "next_step", "disabled"]
MODES: dict[str, int] = {"next_step": 0, "same_step": 1, "disabled": 2}  # machine.cuh, enum AutoresetMode
TEAMS = (1, 2, 4, 8, 16, *range(32, 1025, 32))
Info = dict[str, torch.Tensor]


class Fault(IntFlag):
    """Bits of a replica's fault word (machine.cuh). A faulted tick does not step its replica: reward 0, flags False."""

    INVALID_ACTION = 1
    NON_FINITE_ACTION = 2
    STEPPED_AFTER_END = 4


class VecEnv:
    """``num_envs`` replicas of a game. All tensors live on ``device``; replica is the first axis, agent the second.

    Args:
        game: The game and its configuration.
        num_envs: Replicas, at least 1.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        autoreset_mode: When a replica whose agents have all ended begins anew: "same_step" (at once; its last
            observation is in ``info["final_obs"]``), "next_step" (at the next tick, whose actions it ignores) or
            "disabled" (by ``reset(mask=…)`` only).
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.
        validate: "async": invalid actions set a replica's fault word, read by ``faults()``. "sync": ``step`` looks at
            the actions before it runs and raises InvalidActionError; that waits for the device.
        arrays: Values of shared state fields.
        starts: A pool of saved starts: field name -> (number of starts, *field shape). After the game's own reset,
            each new episode takes one start at random, the same for all these fields.
        first_replica: Number of the first replica in the random streams; shards of one run start at different ones.
        team: Lanes per replica on a GPU; None chooses. It changes speed only, never a bit.
        lane_order: Host debug builds: 1 visits every range backwards, 2 shuffled. Bits must not change.

    Raises:
        TypeError, ValueError, ConfigError: An argument is wrong.
        CapacityError: The replicas do not fit in memory.
        DeviceUnavailableError, CompilerError, KernelCompileError: The device, a compiler or the game's text fails.
    """

    def __init__(
        self,
        game: Env,
        num_envs: int,
        device: str | torch.device | None = None,
        *,
        autoreset_mode: AutoresetMode = "same_step",
        driver: str | None = None,
        validate: Literal["async", "sync"] = "async",
        arrays: Mapping[str, ArrayLike] | None = None,
        starts: Mapping[str, ArrayLike] | None = None,
        first_replica: int = 0,
        team: int | None = None,
        lane_order: int = 0,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.game = game
        self.num_envs = count("num_envs", num_envs, 1)
        self.first_replica = count("first_replica", first_replica, 0, 2**63 - 1)
        if autoreset_mode not in MODES:
            raise ValueError(f"autoreset_mode is {autoreset_mode!r}; expected one of {', '.join(map(repr, MODES))}")
        if validate not in ("async", "sync"):
            raise ValueError(f'validate is {validate!r}; expected "async" or "sync"')
        if lane_order not in (0, 1, 2):
            raise ValueError(f"lane_order is {lane_order!r}; expected 0, 1 or 2")
        if team is not None and team not in TEAMS:
            raise ValueError(f"team is {team!r}; expected None, 1, 2, 4, 8, 16 or a multiple of 32 up to 1024")
        self.autoreset_mode, self.validate = autoreset_mode, validate
        self.functions = FunctionManager(device, driver)
        self.device = self.functions.device
        self.closed = False
        self._data = DataManager(self.device)
        self.layout = SlabLayout(
            self.num_envs,
            game.num_agents,
            game.obs_shape,
            TORCH_TYPES[np.dtype(game.obs_dtype)],
            autoreset_mode == "same_step",
            self.device,
        )
        shared, pool = shared_arrays(game, arrays or {}), pool_arrays(game, starts or {})
        self._check_capacity()
        self._team = team or self.functions.backend.team(game.num_agents)
        self.program = self.functions.compile_game(game, team=self._team, pooled=pool, lane_order=lane_order)
        self._allocate(shared, pool)
        self._prepare(self.program, len(next(iter(pool.values()))) if pool else 0)
        self.seed: int | None = None  # of the last seeded reset
        self._begun = False

    def like(self, **changes: Any) -> VecEnv:
        """A new environment made with the same arguments, but for ``changes``."""
        return VecEnv(**{**self._arguments, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as its constructor arguments: a device handle never travels, state does by state_dict().
        return _made, (self._arguments,)

    @property
    def data(self) -> DataManager:
        """Every tensor, by name."""
        self._check_open("data")
        return self._data

    @property
    def num_agents(self) -> int:
        """Agents of one replica."""
        return self.game.num_agents

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Field name -> live, writable tensor (num_envs, *shape); shared fields without the replica axis."""
        return {field.name: self.data[f"state_{field.name}"] for field in self.game.state}

    @property
    def time(self) -> torch.Tensor:
        """Ticks since reset, (num_envs,) int32, live."""
        return self.data["machine_time"][:, 0]

    @property
    def active(self) -> torch.Tensor:
        """Agents whose next action counts, (num_envs, num_agents) bool, live."""
        return self.data["machine_active"]

    def slab(self, **tensors: torch.Tensor) -> Slab:
        """A new place for outputs: fresh memory, or the caller's own tensors under the slab's names.

        Raises:
            TypeError, ValueError: A tensor's name, shape, dtype, device or strides are wrong.
        """
        self._check_open("slab")
        return Slab.around(self.layout, tensors) if tensors else Slab.allocate(self.layout)

    def reset(
        self, *, seed: int | None = None, mask: ArrayLike | None = None, out: Slab | None = None
    ) -> tuple[torch.Tensor, Info]:
        """Begin new episodes in all replicas, or in those where ``mask`` is True.

        Args:
            seed: 0 … 2**64 - 1. Starts the random streams of the reset replicas anew. Without a seed they go on; the
                very first reset then draws one (``env.seed`` tells it).
            mask: (num_envs,) bool, torch or NumPy.
            out: Where to write; None allocates.

        Returns:
            ``obs`` of all replicas, and ``info`` with "active".

        Raises:
            InvalidSeedError, TypeError, ValueError: An argument is wrong; nothing has changed.
            ClosedEnvError: After ``close``.
        """
        self._check_open("reset")
        out = self._output(out)
        rows = None if mask is None else self._checked_mask(mask)
        if rows is not None and not self._begun:
            raise ResetNeededError("reset(mask=…) before the first reset: call reset() for all replicas first")
        if seed is None and not self._begun:
            seed = secrets.randbits(63)
        if seed is not None:
            seed = checked_seed(seed)
        launch = self._reset
        launch.raw[self._mask] = 0 if rows is None else rows.data_ptr()
        launch.raw[self._mask + 1 : self._mask + 3] = np.int32(seed is not None), np.uint64(seed or 0)
        launch.raw[self._mask + 4 : self._mask + 6] = out.obs.data_ptr(), out.active.data_ptr()
        launch()
        self.seed = self.seed if seed is None else seed
        self._begun = True
        return out.obs, {"active": out.active}

    def step(
        self, actions: torch.Tensor, out: Slab | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Info]:
        """One tick of every replica.

        Args:
            actions: (num_envs, num_agents[, heads]) int32 or int64, or (num_envs, num_agents, n) float32.
            out: Where to write; None allocates one fresh slab, so that earlier outputs stay as they are.

        Returns:
            ``obs``, ``rewards``, ``terminations``, ``truncations`` and ``info`` with "active" and, in "same_step" mode,
            "final_obs" and "_final_obs" (which of its rows are meant).

        Raises:
            TypeError, ValueError: Dtype, shape or device of ``actions`` or ``out`` is wrong; nothing has changed.
            InvalidActionError: With ``validate="sync"``, a value is outside the action space; nothing has changed.
            ResetNeededError: Before the first ``reset``.
            ClosedEnvError: After ``close``.
        """
        self.check_ready("step")
        actions = self._checked_actions(actions)
        out = self._output(out)
        raw, first = self._step.raw, self._actions
        raw[first] = actions.data_ptr()
        raw[first + 1] = np.int32(actions.dtype == torch.int64)
        raw[first + 3 : first + 10] = (
            out.obs.data_ptr(),
            out.rewards.data_ptr(),
            out.terminations.data_ptr(),
            out.truncations.data_ptr(),
            out.active.data_ptr(),
            0 if out.final_obs is None else out.final_obs.data_ptr(),
            out.final_mask.data_ptr(),
        )
        self._step()
        info = {"active": out.active}
        if out.final_obs is not None:
            info |= {"final_obs": out.final_obs, "_final_obs": out.final_mask}
        return out.obs, out.rewards, out.terminations, out.truncations, info

    def observe(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Observations of the state as it is now, for instance after writing to ``state``."""
        self._check_open("observe")
        slab = self.slab() if out is None else self.slab(obs=out)
        self._observe.raw[self._obs] = slab.obs.data_ptr()
        self._observe()
        return slab.obs

    def sample_actions(self) -> torch.Tensor:
        """Uniform valid actions for the coming tick, drawn on the device from the replicas' own random streams.

        The same until the next tick: (num_envs, num_agents[, heads]) int32, or (…, n) float32.
        """
        self._check_open("sample_actions")
        action = self.game.action
        kind = torch.float32 if action.continuous else torch.int32
        actions = torch.empty((self.num_envs, self.num_agents, *action.shape), dtype=kind, device=self.device)
        self._random_actions.raw[self._obs] = actions.data_ptr()
        self._random_actions()
        return actions

    def faults(self) -> torch.Tensor:
        """(num_envs,) int32, bits of ``Fault`` since each replica's last reset by hand; live, on the device."""
        return self.data["machine_fault"][:, 0]

    def episode_statistics(self) -> dict[str, torch.Tensor]:
        """Sums over the episodes completed since ``clear_episode_statistics``, live tensors on the device.

        ``returns`` (num_envs, num_agents) f32, ``lengths``, ``episodes`` and ``terminations`` (num_envs,) int64:
        the last counts episodes whose last tick truncated no agent.
        """
        return {
            "returns": self.data["machine_completed_returns"],
            "lengths": self.data["machine_completed_lengths"][:, 0],
            "episodes": self.data["machine_completed_episodes"][:, 0],
            "terminations": self.data["machine_completed_terminations"][:, 0],
        }

    def clear_episode_statistics(self) -> None:
        """Start the sums of ``episode_statistics`` anew."""
        for tensor in self.episode_statistics().values():
            tensor.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the next tick depends on, copied: state, clocks, random streams, statistics."""
        return {name: self.data[name].clone() for name in self._own}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a ``state_dict`` of an environment of the same game and size."""
        self._check_open("load_state_dict")
        self.data.load_state_dict(state, self._own)
        self._begun = True

    def close(self) -> None:
        """Let go of all memory. Calling it again does nothing."""
        if not self.closed:
            self.closed = True
            del self._data, self.program, self._step, self._reset, self._observe, self._random_actions, self._scratch

    def __repr__(self) -> str:
        return f"VecEnv({self.game!r}, num_envs={self.num_envs}, device={str(self.device)!r}, {self.autoreset_mode!r})"

    def bytes_per_env(self) -> int:
        """Device memory of one replica: state, machine and one slab."""
        fields = [*self.game.state, *MACHINE_STATE]
        own = sum(int(np.prod(self.game.shape(f))) * f.dtype.itemsize for f in fields if not f.shared)
        return own + self.layout.nbytes // self.num_envs + 1

    def _check_capacity(self) -> None:
        free, each = free_bytes(self.device), self.bytes_per_env()
        if each * self.num_envs > free:
            raise CapacityError(
                f"num_envs = {self.num_envs:,} replicas of {type(self.game).__name__} need "
                f"{each * self.num_envs:,} bytes ({each:,} each); {free:,} bytes are free on {self.device}: "
                f"at most num_envs = {free // each:,} fit"
            )

    @property
    def _own(self) -> list[str]:
        """Names of the tensors that hold the replicas: neither shared fields nor what users pushed."""
        fields = [("machine", MACHINE_STATE), ("state", self.game.state)]
        return [f"{kind}_{field.name}" for kind, group in fields for field in group if not field.shared]

    def _allocate(self, shared: Mapping[str, ArrayLike], pool: Mapping[str, ArrayLike]) -> None:
        for name, field in kernel_fields(self.game, pool):
            if name.startswith("pool_"):
                self.data.push(name, pool[field.name])
            elif field.shared:
                self.data.push(name, shared[field.name])
            else:
                self.data.allocate(name, (self.num_envs, *self.game.shape(field)), field.dtype)

    def _prepare(self, program: Program, pool_size: int) -> None:
        layout = torch.zeros(2, dtype=torch.int64, device=self.device)
        program.launch("vecenv_layout", 1, layout)
        scratch_bytes, scratch_is_shared = layout.tolist()
        shape, copies = self._shape(scratch_bytes if scratch_is_shared else 0), self.num_envs
        if self.device.type == "cpu":
            from gpu_vecenv.backends.host import workers

            copies = workers()  # one for each thread
        size = 1 if scratch_is_shared else scratch_bytes * copies
        self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        common: list[Argument] = [self.data[name] for name, _ in kernel_fields(self.game, self._pooled())]
        common.append(np.int64(pool_size))
        end: list[Argument] = [self._scratch, np.int64(self.num_envs)]
        self._mask = self._actions = self._obs = len(common)  # places of the arguments that vary
        mode = np.int32(MODES[self.autoreset_mode])
        varying: dict[str, list[Argument]] = {
            "vecenv_reset": [None, np.int32(0), np.uint64(0), np.uint64(self.first_replica), None, None, *end],
            "vecenv_step": [None, np.int32(0), mode, *[None] * 7, *end],
            "vecenv_observe": [None, *end],
            "vecenv_random_actions": [None, np.int64(self.num_envs)],
        }
        launches: dict[str, Launch] = {
            kernel: program.prepare(kernel, shape, [*common, *arguments]) for kernel, arguments in varying.items()
        }
        self._reset, self._step = launches["vecenv_reset"], launches["vecenv_step"]
        self._observe, self._random_actions = launches["vecenv_observe"], launches["vecenv_random_actions"]

    def _pooled(self) -> list[str]:
        return [name.removeprefix("pool_") for name in self.data if name.startswith("pool_")]

    def _shape(self, scratch_bytes: int) -> LaunchShape:
        if self.device.type == "cpu":
            return LaunchShape(self.num_envs, work=self.num_envs * self.num_agents)
        from gpu_vecenv.backends.cuda import block_of

        block = block_of(self._team)
        return LaunchShape(self.num_envs, self._team, block, scratch_bytes * (block // self._team))

    def check_ready(self, method: str) -> None:
        """Raise ClosedEnvError after ``close``, ResetNeededError before the first ``reset``."""
        self._check_open(method)
        if not self._begun:
            raise ResetNeededError(f"{method} before reset: call reset() first")

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise ClosedEnvError(f"{method} after close: make a new environment")

    def _output(self, out: Slab | None) -> Slab:
        if out is None:
            return Slab.allocate(self.layout)
        if not isinstance(out, Slab) or (out.layout is not self.layout and out.layout != self.layout):
            raise ValueError(f"out is {type(out).__name__}; expected a Slab made by this environment's slab()")
        return out

    def _checked_actions(self, actions: torch.Tensor) -> torch.Tensor:
        action = self.game.action
        kinds = (torch.float32,) if action.continuous else (torch.int32, torch.int64)
        shape = (self.num_envs, self.num_agents, *action.shape)
        if not isinstance(actions, torch.Tensor):
            raise TypeError(f"step: actions are a {type(actions).__name__}; expected a torch tensor on {self.device}")
        if actions.dtype not in kinds:
            raise TypeError(
                f"step: actions have dtype {actions.dtype}; expected {' or '.join(map(str, kinds))}"
                + ("" if action.continuous else " (use actions.long())")
            )
        if actions.shape != shape:
            raise ValueError(f"step: actions have shape {tuple(actions.shape)}; expected {shape}, nothing is broadcast")
        if actions.device != self.device:
            raise ValueError(f"step: actions are on {actions.device}; expected {self.device}")
        if actions.layout != torch.strided:
            raise ValueError(f"step: actions are {actions.layout}; expected a dense tensor")
        if actions.requires_grad:
            raise TypeError("step: actions require a gradient, which no kernel passes on; use actions.detach()")
        if self.validate == "sync":
            self._check_action_values(actions)
        return actions if actions.is_contiguous() else actions.contiguous()

    def _check_action_values(self, actions: torch.Tensor) -> None:
        action, rows = self.game.action, actions.view(self.num_envs, self.num_agents, -1)
        if action.continuous:
            low, high = (torch.tensor(bound, device=self.device) for bound in (action.low, action.high))
            expected = f"[{list(action.low)}, {list(action.high)}]"
            wrong = ~((rows >= low) & (rows <= high))
        else:
            sizes = [action.sizes[role] for role, n in self.game.roles.items() for _ in range(n)]
            table = torch.tensor([(*s, *[2**62] * (action.heads - len(s))) for s in sizes], device=self.device)
            expected = f"0 to size - 1, sizes {dict(action.sizes)}"
            wrong = (rows < 0) & (table < 2**62) | (rows >= table)
        wrong &= self.active[..., None]
        places = wrong.nonzero()
        if len(places):
            replica, agent, head = places[0].tolist()
            raise InvalidActionError(
                f"step: {len(places)} invalid action values; the first: replica {replica}, agent "
                f"{self.game.agent_names[agent]}, number {head}: {rows[replica, agent, head].item()}; "
                f"expected {expected}"
            )

    def _checked_mask(self, mask: ArrayLike) -> torch.Tensor:
        if not isinstance(mask, np.ndarray | torch.Tensor) or mask.dtype not in (torch.bool, np.bool_):
            raise TypeError(
                f"reset: mask is {getattr(mask, 'dtype', type(mask).__name__)}; expected bool, torch or NumPy"
            )
        if mask.shape != (self.num_envs,):
            raise ValueError(f"reset: mask has shape {tuple(mask.shape)}; expected ({self.num_envs},)")
        if isinstance(mask, torch.Tensor) and mask.device != self.device:
            raise ValueError(f"reset: mask is on {mask.device}; expected {self.device}")
        return torch.as_tensor(mask).to(self.device).contiguous()


def _made(arguments: Mapping[str, Any]) -> VecEnv:
    return VecEnv(**arguments)
