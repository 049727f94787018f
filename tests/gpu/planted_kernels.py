"""One faulty kernel for each tool of compute-sanitizer: a tool that lets its own pass has shown nothing.

compute-sanitizer --tool memcheck python3 tests/gpu/planted_kernels.py write_past_the_end
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar

THREADS = 256
TEXT = """#include "kernel.cuh"
// memcheck: an element too many. All kernels get two tensors of one number for each thread of one block.
KERNEL(write_past_the_end) { FOR_ITEMS (k, args.n) { args.x[k] = 1; args.x[k + 1] = 2; } }

// racecheck: no barrier between what one warp writes and another reads.
KERNEL(shared_memory_race) {
    __shared__ float s[256];
    s[threadIdx.x] = args.x[threadIdx.x];
    args.y[threadIdx.x] = s[255 - threadIdx.x];
}

// initcheck: y has never been written.
KERNEL(uninitialised_read) { FOR_ITEMS (k, args.n) args.x[k] += args.y[k]; }

// synccheck: half of each warp's threads, and half of the block's warps, never come to the barrier.
KERNEL(divergent_warp) {
    if (threadIdx.x % 2 == 0) {
        args.x[threadIdx.x] = 1;
        __syncthreads();
    }
    args.x[threadIdx.x] += 1;
}
KERNEL(divergent_block) {
    if (threadIdx.x < 128) {
        args.x[threadIdx.x] = 1;
        __syncthreads();
    }
    args.x[threadIdx.x] += 1;
}
"""
# Of several, one must be seen: how a barrier diverges decides what becomes of it on which GPU.
PLANTED = {
    "memcheck": ("write_past_the_end",),
    "racecheck": ("shared_memory_race",),
    "initcheck": ("uninitialised_read",),
    "synccheck": ("divergent_warp", "divergent_block"),
}


ARGUMENTS = Array("x", np.float32), Array("y", np.float32), Scalar("n", np.int64)
KERNELS = [KernelSignature(name, ARGUMENTS) for names in PLANTED.values() for name in names]


def main(kernel: str) -> None:
    """Launch one of them on a GPU, once."""
    functions = FunctionManager("cuda", driver="cuda_core")
    x = torch.zeros(THREADS, device="cuda")
    y = torch.empty(THREADS, device="cuda")
    program = functions.compile(TEXT, "planted_kernels.cu", kernels=KERNELS)
    launch = program.prepare(kernel, LaunchShape(THREADS, threads_per_block=THREADS), x=x, y=y, n=THREADS)
    launch()
    torch.cuda.synchronize()
    print(f"{kernel} ran")


if __name__ == "__main__":
    main(sys.argv[1])
