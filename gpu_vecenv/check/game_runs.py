"""Runs of a game that ``check_game`` compares step by step: other memory before each call, other orders of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import DataRaceError, EnvContractError

POISONS = 0x41, 0x3E  # bytes of floats and ints that are ordinary numbers, and differ
PROBED_ENVS = 16  # environments of debug builds
RACED_ENVS = 2  # of those in which races are searched for, which are slower
LONGEST = 5000  # steps in search of a time limit
Tensors = dict[str, torch.Tensor]


class Cause(NamedTuple):
    """What a run found first: the check that it belongs to, and one sentence."""

    check: str
    text: str


@dataclass(frozen=True, kw_only=True)
class GameRun:
    """What the stages of a check share: the arguments of ``check_game``, resolved."""

    game: Env
    device: torch.device
    driver: str | None
    num_envs: int
    steps: int
    max_steps: int | None
    seed: int
    call_seconds: float
    checks: frozenset[str]

    @property
    def probed_envs(self) -> int:
        """Number of environments of debug builds."""
        return min(self.num_envs, PROBED_ENVS)


def first_fault(run: GameRun, device: torch.device, at: Callable[[str], None]) -> Cause | None:
    """Play with checked indices, twice with other bytes in memory that must be written before it is read.

    Args:
        run: The game.
        device: Where to play.
        at: Called before each call with its name.

    Raises:
        KernelCompileError: The game does not compile with checked indices.
    """
    calls = [""]

    def at_call(call: str) -> None:
        calls.append(call)
        at(call)

    try:
        return _first_fault(run, device, at_call)
    except EnvContractError as error:
        return Cause("G01", f"{error} (in {calls[-1]})")


def _first_fault(run: GameRun, device: torch.device, at: Callable[[str], None]) -> Cause | None:
    limit = None if run.max_steps is None or run.max_steps > LONGEST else run.max_steps
    driver = run.driver if device == run.device else None

    def first(env: VecEnv, outputs: list[Tensors], call: str) -> Cause | None:
        causes = _unwritten(env, outputs, call), _nonfinite(env, outputs[0], call), _beyond_limit(env, limit)
        return next((cause for cause in causes if cause is not None), None)

    at("")
    envs = [
        VecEnv(run.game, run.probed_envs, device, driver=driver, guards=True, autoreset_mode="disabled")
        for _ in POISONS
    ]
    for env, byte in zip(envs, POISONS, strict=True):
        env.poison(byte)
    at("reset")
    outputs = [_outputs(env.reset(seed=run.seed)) | _state(env) for env in envs]
    if (cause := first(envs[0], outputs, "reset")) is not None:
        return cause
    for step in range(1, max(run.steps, 0 if limit is None else limit + 1) + 1):
        at(f"step {step}")
        ended = ~envs[0].active.any(1)
        if ended.any():
            for env in envs:
                env.reset(mask=ended)
        actions = envs[0].sample_actions()
        outputs = [_outputs(env.step(actions)) | _state(env) for env in envs]
        if (cause := first(envs[0], outputs, f"step {step}")) is not None:
            return cause
    return None


def first_race(run: GameRun, at: Callable[[str], None]) -> Cause | None:
    """Play on the CPU, where accesses are recorded that would race between the threads of a group on a GPU.

    Args:
        run: The game.
        at: Called before each call with its name.

    Raises:
        ConfigError: The compiler does not report accesses.
        KernelCompileError: The game does not compile with checked indices.
    """
    call = ""
    try:
        at(call)
        env = VecEnv(run.game, min(run.num_envs, RACED_ENVS), "cpu", races=True)
        for step in range(run.steps + 1):
            call = f"step {step}" if step else "reset"
            at(call)
            if step:
                env.step(env.sample_actions())
            else:
                env.reset(seed=run.seed)
    except DataRaceError as error:
        return Cause("G06", f"{error} (in {call})")
    except EnvContractError as error:
        return Cause("G01", f"{error} (in {call})")
    return None


def first_difference(expected: VecEnv, other: VecEnv, steps: int, seed: int) -> str:
    """Step both with the actions of the first: a sentence on what differs first, among the environments of both."""
    count = min(expected.num_envs, other.num_envs)
    wanted, got = (_outputs(env.reset(seed=seed)) | _state(env) for env in (expected, other))
    for step in range(steps + 1):
        if step:
            actions = expected.sample_actions()
            wanted = _outputs(expected.step(actions)) | _state(expected)
            got = _outputs(other.step(actions[:count].to(other.device))) | _state(other)
        place = _difference(wanted, got, count)
        if place is not None:
            name, index = place
            values = (f"{tensors[name][index].item():.9g}" for tensors in (got, wanted))
            call = f"step {step}" if step else "reset"
            return f"{_place(expected, name, index)} is {' instead of '.join(values)} after {call}"
    return f"no difference in {steps} further steps: it is not the same in each run"


def _state(env: VecEnv) -> Tensors:
    """Name in the game's source -> tensor, of what a step leaves in the state; shared fields have no environments."""
    return {f"s.{f.name}": env.state[f.name] for f in env.layout.fields if not f.shared}


def _outputs(outputs: tuple[Any, ...]) -> Tensors:
    """Name in the game's source -> tensor, (num_envs, …), of what reset or step returned."""
    *tensors, info = outputs
    found = dict(zip(("io.obs", "io.rewards", "io.terminations", "io.truncations"), tensors, strict=False))
    found |= {f"io.{name}": info.get(name) for name in ("action_mask", "acting")}
    if "final_obs" in info:
        rows = info["_final_obs"]
        found["final_obs"] = info["final_obs"].masked_fill(
            ~rows.view(*rows.shape, *[1] * len(info["final_obs"][0, 0].shape)), 0
        )
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, with one NaN: processors may differ in its payload."""
    if not tensor.is_floating_point():
        return tensor.to("cpu", torch.int64)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.nan_to_num(torch.nan).where(~tensor.isnan(), torch.nan).cpu().contiguous().view(integers)


def _difference(one: Tensors, other: Tensors, count: int) -> tuple[str, tuple[int, ...]] | None:
    """Name and index of the first difference among the first ``count`` environments: in the state, if there is one."""
    for name in sorted(one, key=lambda name: not name.startswith("s.")):
        differs = _bits(one[name][:count]) != _bits(other[name][:count])
        if differs.any():
            return name, tuple(differs.nonzero()[0].tolist())
    return None


def _unwritten(env: VecEnv, outputs: list[Tensors], call: str) -> Cause | None:
    one, other = outputs
    place = _difference(one, other, env.num_envs)
    if place is None:
        return None
    name, index = place
    where, values = _place(env, name, index), [tensors[name][index] for tensors in outputs]
    flag = values[0].dtype == torch.bool  # each of its two values is a poison
    if call == "reset" if flag else all(map(_is_poison, values, POISONS)):
        function = "reset" if name.startswith("s.") else "observe"
        return Cause("G02", f"{where} is not written by {function} (in {call})")
    return Cause("G02", f"{where} depends on memory that was not written before: of Scratch, or of io.obs (in {call})")


def _is_poison(value: torch.Tensor, byte: int) -> bool:
    return bool(value.reshape(1).view(torch.uint8).eq(byte).all())


def _nonfinite(env: VecEnv, outputs: Tensors, call: str) -> Cause | None:
    for name, tensor in outputs.items():
        if name.startswith("io.") and tensor.is_floating_point() and not tensor.isfinite().all():
            index = tuple((~tensor.isfinite()).nonzero()[0].tolist())
            return Cause("G03", f"{_place(env, name, index)} is {tensor[index].item()} (in {call})")
    return None


def _beyond_limit(env: VecEnv, limit: int | None) -> Cause | None:
    if limit is None:
        return None
    late = (env.active & (env.elapsed_steps >= limit)[:, None]).nonzero()
    if not len(late):
        return None
    env_index, agent = late[0].tolist()
    return Cause(
        "G04",
        f"agent {env.layout.agent_names[agent]} of environment {env_index} is still active after max_steps = {limit} "
        "steps: set io.truncations for every agent there",
    )


def _place(env: VecEnv, name: str, index: tuple[int, ...]) -> str:
    """An element as the game's source names it, with environment and agent."""
    env_index, *rest = index
    agents = not name.startswith("s.") or (rest and env.layout.num_agents == env.state[name[2:]].shape[1] > 1)
    agent = f", agent {env.layout.agent_names[rest[0]]}" if agents else ""
    if name in ("io.obs", "final_obs"):  # one axis in the source
        shape = env.layout.observation.shape
        rest = [rest[0], sum(k * math.prod(shape[axis + 1 :]) for axis, k in enumerate(rest[1:]))]
    return f"{name}{''.join(f'[{k}]' for k in rest) or '[0]'} of environment {env_index}{agent}"


def ways(num_envs: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to run a game that must not change a bit, with the arguments of VecEnv."""
    same: dict[str, Any] = {"num_envs": num_envs, "device": device}
    few = max(1, num_envs // 2)
    yield f"{few} of {num_envs} environments", {**same, "num_envs": few}
    yield "guard bands between environments", {**same, "guards": True}
    if device.type == "cpu":
        yield "ranges backwards", {**same, "thread_order": 1}
        yield "ranges shuffled", {**same, "thread_order": 2}
        return
    yield "blocks backwards", {**same, "thread_order": 1}
    for threads_per_env in (1, 32, 64):
        yield f"{threads_per_env} threads per environment", {**same, "threads_per_env": threads_per_env}
    yield "on the CPU", {**same, "device": torch.device("cpu"), "driver": None}
