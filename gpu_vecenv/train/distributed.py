"""Several processes that train together: one shard of replicas each, gradients averaged. Started by ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gpu_vecenv.errors import ConfigError, RankLostError

TIMEOUT = timedelta(seconds=60)  # a process that hears nothing from the others for so long gives up


@dataclass(frozen=True)
class World:
    """This process among those that train together: number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """What torch.distributed says; alone where it is not set up."""
        return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, in every process, by the sum of all."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, in every process, by the mean of all."""
        if self.size > 1:
            dist.all_reduce(tensor)
            tensor /= self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, in every process, by that of the first."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()

    def all_agree(self, any_wants: bool, first_wants: bool) -> tuple[bool, bool]:
        """Whether any process wants the one, and whether the first wants the other: the same answer everywhere."""
        if self.size == 1:
            return any_wants, first_wants
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        wishes = torch.tensor([any_wants, first_wants and self.rank == 0], dtype=torch.int32, device=device)
        dist.all_reduce(wishes)
        one, other = wishes.tolist()
        return one > 0, other > 0

    def envs_per_process(self, num_envs: int) -> int:
        """Replicas of each process.

        Raises:
            ConfigError: They cannot be dealt out evenly.
        """
        if num_envs % self.size:
            raise ConfigError(
                f"num_envs is {num_envs}; expected a multiple of the {self.size} processes, "
                f"{num_envs // self.size * self.size} or {-(-num_envs // self.size) * self.size}"
            )
        return num_envs // self.size


def is_torchelastic_launched() -> bool:
    """Whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def process_group(device: str | None) -> Iterator[tuple[World, str | None]]:
    """Join the processes that ``torchrun`` has started; alone, and the device as given, where it has not.

    Yields this process's place and its device: the GPU of its number on its machine (NCCL), or the CPU (gloo).

    Raises:
        ConfigError: A single GPU was asked for by number.
        RankLostError: Inside, when another process is lost.
    """
    if not is_torchelastic_launched():
        yield World(), device
        return
    if device is not None and ":" in device:
        raise ConfigError(f"device is {device!r}; under torchrun expected 'cuda', of which each process takes its own")
    on_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    own = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(own)
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
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
        if dist.is_initialized():
            dist.destroy_process_group()
