"""Environments are made, stepped and closed repeatedly and leave nothing behind."""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gpu_vecenv
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer
from reliability.experiment import Experiment, Metrics, said

MEASUREMENTS = 20  # measurements, spread over all cycles
# Caches fill by some hundred bytes a cycle. Growth is the median between two measurements, since a table that doubles
# once is no leak. Resident memory is no measure: megabytes of free memory inside the heap hide a leak, and become
# resident at any time.
GROWTH_LIMITS = {"heap_bytes": 1024.0, "python_blocks": 16.0}
DRIVER_LIMIT = 2 << 20  # bytes that the driver may keep in pools after the first cycles
CONFIG = PPOConfig(total_steps=10**6, num_steps=4, num_epochs=1, num_minibatches=1, hidden_sizes=(8,))


class Mallinfo2(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap_bytes() -> int:
    """Bytes in use in malloc's heaps, with those that have a mapping each; glibc 2.33 or newer."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    found = mallinfo2()
    return found.uordblks + found.hblkhd


class UsersError(Exception):
    """Raised while an environment is used."""


@dataclass(kw_only=True)
class Leaks(Experiment):
    """Make, step and close environments and trainers; every second time an error is raised in between."""

    count: int = 500
    """Cycles."""
    num_envs: int = 64
    """Environments."""
    alone: bool = True
    """Whether no other process uses the GPU: only then is the driver's memory that of this process."""

    depends_on = (
        "gpu_vecenv/train/trainer.py",
        "gpu_vecenv/train/rollout_storage.py",
        "gpu_vecenv/train/ppo.py",
        "gpu_vecenv/train/graph.py",
        "gpu_vecenv/views/gymnasium_env.py",
    )

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        for number in range(2 * len(USES) + 2):  # one-time allocations: pools, modules, memory of the driver
            self.use(number)
        looks, apart = [self._look()], max(self.count // MEASUREMENTS, 1)
        for number in range(self.count):
            self.use(number)
            if (number + 1) % apart == 0:
                looks.append(self._look())
        first, last = looks[0], looks[-1]
        for name in ("tensor_bytes", "tensors", "files", "threads", "modules"):
            seen = sorted({look[name] for look in looks})
            self.check(seen == [first[name]], f"{name} were {first[name]} at first, and then {seen}")
        metrics: Metrics = {f"{name}_left": last[name] - first[name] for name in first if name not in GROWTH_LIMITS}
        for name, limit in GROWTH_LIMITS.items():
            seen = [look[name] for look in looks]
            growth = float(np.median(np.diff(seen))) / apart
            self.check(growth < limit, f"{name} grow by {growth:.0f} a cycle: {seen}")
            metrics[f"{name}_a_cycle"] = round(growth, 1)
        if "driver_bytes" in first:
            grown = last["driver_bytes"] - first["driver_bytes"]
            self.check(grown <= DRIVER_LIMIT, f"the driver has {grown} bytes more")
        return {"cycles": self.count, **metrics}

    def use(self, number: int) -> None:
        """One cycle: every second one with an error in the middle."""
        use = USES[number // 2 % len(USES)]
        try:
            use(self.device, self.num_envs, number % 2 == 1)
        except (UsersError, ValueError) as error:
            self.check(number % 2 == 1, f"cycle {number}: {error!r}")
        else:
            self.check(number % 2 == 0, f"cycle {number}: no error came")

    def _look(self) -> dict[str, int]:
        """Resources of the process now."""
        gc.collect()
        # isinstance accesses __class__, which some objects warn about.
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type != "meta"]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        look = {
            "tensor_bytes": sum(storages.values()),
            "tensors": len(tensors),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")) + threading.active_count(),
            "modules": len(sys.modules),
            "heap_bytes": heap_bytes(),
            "python_blocks": sys.getallocatedblocks(),  # of at most 512 bytes; larger ones are malloc's
        }
        if self.device.startswith("cuda"):
            look["tensor_bytes"] = torch.cuda.memory_allocated(self.device)
        if self.device.startswith("cuda") and self.alone:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            look["driver_bytes"] = total - free
        return look

    def plant(self) -> Metrics:
        return {
            "one output of each cycle is kept": said(Keeping(count=4, device=self.device)),
            "a file of each cycle stays open": said(Opening(count=4, device=self.device)),
            "4,000 bytes of each cycle are kept": said(KeepingBytes(count=4, device=self.device)),
            "small objects of each cycle are kept": said(KeepingObjects(count=4, device=self.device)),
        }


class Keeping(Leaks):
    def use(self, number: int) -> None:
        super().use(number % 2)
        vars(self).setdefault("kept", []).append(torch.zeros(1, device=self.device))


class KeepingBytes(Leaks):
    def use(self, number: int) -> None:
        super().use(number % 2)
        vars(self).setdefault("kept", []).append(bytes(4000))


class KeepingObjects(Leaks):
    def use(self, number: int) -> None:
        super().use(number % 2)
        vars(self).setdefault("kept", []).append([float(k) for k in range(50)])


class Opening(Leaks):
    def use(self, number: int) -> None:
        super().use(number % 2)
        vars(self).setdefault("kept", []).append(os.open(os.devnull, os.O_RDONLY))


def engine_case(game: str, mode: str, **config: Any) -> Callable[[str, int, bool], None]:
    def use(device: str, num_envs: int, fails: bool) -> None:
        rows = config.get("agents_as_envs", False)
        settings = {key: value for key, value in config.items() if key != "agents_as_envs"}
        env = gpu_vecenv.make(game, num_envs, device, autoreset_mode=mode, agents_as_envs=rows, **settings)
        try:
            env.reset(seed=1)
            for _ in range(5):
                env.step(env.sample_actions())
            env.load_state_dict(env.state_dict())
            if fails:
                env.step(env.sample_actions()[:-1])  # wrong shape
        finally:
            env.close()

    return use


def abandoned(device: str, num_envs: int, fails: bool) -> None:
    """Not closed explicitly."""
    env = gpu_vecenv.make("cartpole", num_envs, device)
    env.reset(seed=1)
    buffers = env.step_buffers()
    for _ in range(5):
        env.step(env.sample_actions(), out=buffers)
    if fails:
        raise UsersError


def gymnasium(device: str, num_envs: int, fails: bool) -> None:
    env = gpu_vecenv.GymnasiumVectorEnv("cartpole", num_envs, device, output="numpy", max_episode_steps=3)
    try:
        env.reset(seed=1)
        for _ in range(5):
            env.step(env.vec_env.sample_actions().cpu().numpy())
        if fails:
            raise UsersError
    finally:
        env.close()


def trained(device: str, num_envs: int, fails: bool) -> None:
    trainer = Trainer(gpu_vecenv.make("tag_gridworld", num_envs, device, grid=5, max_steps=9), CONFIG)
    try:
        trainer.train_iteration()
        if fails:
            raise UsersError
        trainer.train_iteration()
    finally:
        trainer.close()


USES = (
    engine_case("tag_gridworld", "same_step", grid=5, max_steps=3),
    engine_case("tag_continuous", "next_step", num_taggers=2, num_runners=3, num_neighbors=2, max_steps=3),
    engine_case("tag_gridworld", "disabled", grid=5, max_steps=3, agents_as_envs=True),
    engine_case("pendulum", "same_step", max_steps=3),
    abandoned,
    gymnasium,
    trained,
)
