"""Data-parallel training by ``torchrun``: each process has a shard of environments; gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from gpu_vecenv.errors import ConfigError, RankLostError

TIMEOUT = timedelta(seconds=60)  # of a collective operation


class Releasable(Protocol):
    """Uses the process group, such as a CUDA graph with its collectives."""

    def release(self) -> None:
        """Destroy what uses it."""


_to_release: WeakSet[Releasable] = WeakSet()


def release_before_the_group(owner: Releasable) -> None:
    """Let ``process_group`` call ``release`` before it destroys the group, which waits for graphs with collectives."""
    _to_release.add(owner)


@dataclass(frozen=True)
class World:
    """This process's rank, and the number of processes."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """Rank and world size of torch.distributed; 0 of 1 if it is not initialised."""
        return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Sum the tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Average the tensor over all processes, in place."""
        if self.size > 1 and dist.get_backend() == "nccl":
            dist.all_reduce(tensor, dist.ReduceOp.AVG)  # in one launch
        elif self.size > 1:
            dist.all_reduce(tensor)
            tensor /= self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, in every process, by that of rank 0."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def all_agree(self, any_rank: bool, rank_0: bool) -> tuple[bool, bool]:
        """Whether ``any_rank`` is True in any process, and whether ``rank_0`` is True in rank 0: equal everywhere."""
        if self.size == 1:
            return any_rank, rank_0
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flags = torch.tensor([any_rank, rank_0 and self.rank == 0], dtype=torch.int32, device=device)
        dist.all_reduce(flags)
        a, b = flags.tolist()
        return a > 0, b > 0

    def envs_per_process(self, num_envs: int) -> int:
        """Environments of each process, of ``num_envs`` in total.

        Raises:
            ConfigError: ``num_envs`` is not a multiple of the number of processes.
        """
        if num_envs % self.size:
            raise ConfigError(
                f"num_envs is {num_envs}; expected a multiple of the {self.size} processes, "
                f"{num_envs // self.size * self.size} or {-(-num_envs // self.size) * self.size}"
            )
        return num_envs // self.size


def is_torchelastic_launched() -> bool:
    """Whether ``torchrun`` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_processes() -> int:
    """How many processes ``torchrun`` started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if is_torchelastic_launched() else 1


@contextmanager
def process_group(device: str | None) -> Iterator[tuple[World, str | None]]:
    """Initialise torch.distributed if ``torchrun`` started this process.

    Yields the World and this process's device: the GPU of its local rank (NCCL) or the CPU (gloo); without torchrun a
    World of one process and ``device``. CUDA graphs of Trainers with collectives are destroyed at the end.

    Raises:
        ConfigError: ``device`` names one GPU by its number.
        RankLostError: Another process was lost during the with block.
    """
    if not is_torchelastic_launched():
        yield World(), device
        return
    if device is not None and ":" in device:
        raise ConfigError(
            f"device is {device!r}; expected 'cuda' under torchrun: each process uses the GPU of its local rank"
        )
    on_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    own = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(own)
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    # NCCL may choose another algorithm for memory that it registers, which it does in graphs alone, and so another
    # order of a sum: replays would not be bit-identical with the eager iteration after a resume.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        yield World.current(), own
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in str(error):
            raise RankLostError(
                f"rank {rank} of {size} lost the others: {str(error).splitlines()[0]}; "
                "torchrun's report names the process that failed first"
            ) from error
        raise
    finally:
        for owner in list(_to_release):
            owner.release()
        if dist.is_initialized():
            dist.destroy_process_group()
