"""Whether the collectives of several processes can be part of CUDA graphs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.graph import captured, first_line


def why_not_captured(world: World) -> str | None:
    """Why CUDA graphs cannot have collectives, in a few words; None: they can, or there is one process.

    All processes call it, each with its GPU as the current device and a stream that is not the default one; they
    find the same. It captures a small sum.
    """
    if world.size == 1:
        return None
    if (backend := dist.get_backend()) != "nccl":
        return f"collectives of the backend {backend}"
    reason, number = None, torch.zeros(1, device="cuda")
    world.all_reduce_sum(number)  # connects the processes, which is not possible during capture
    try:
        captured(lambda: world.all_reduce_sum(number))
    except RuntimeError as error:
        reason = first_line(error)
    some_failed, _ = world.all_agree(reason is not None, False)
    if not some_failed:
        return None
    return f"NCCL cannot be captured: {reason or 'another process has the reason'}"
