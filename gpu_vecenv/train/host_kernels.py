"""The default network on a CPU, by its vector instructions: the kernels of ``perceptron.py`` in other sources.

Results do not depend on the number of threads.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.backends.host import num_host_threads
from gpu_vecenv.compile.engine_kernels import squash_source
from gpu_vecenv.declare.field import f32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.perceptron import (
    FORWARD,
    Compiled,
    Perceptron,
    PerceptronKernels,
    TileShape,
    padded,
    perceptron_of,
    why_torch,
)
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.rollout_storage import Rollout

TILE, PAD = 64, 16  # rows; the same as TILE in host_perceptron.cuh and PAD in host_vectors.cuh
PART_ROWS, MAX_PARTS = 512, 64  # of a part of a minibatch, at least; parts, at most
MAX_FLOATS = 1 << 20  # of a worker: more does not stay in its caches
WORK = 128  # parameters of a row that count as one of LaunchShape.work


def floats_of_worker(perceptron: Perceptron) -> int:
    """Memory of a worker in floats, at most."""
    columns = [padded(size, PAD) for size in (*perceptron.sizes, perceptron.head_outputs)]
    weights = sum(n * (k + 1) for k, n in pairwise(columns))
    return 3 * weights + 2 * TILE * sum(columns)


def why_not_on_host(policy: Policy, rollout: Rollout, precision: Precision) -> str | None:
    """Why ``HostKernels`` do not compute a policy, in a few words; None if they do."""
    backend = rollout.env.functions.backend
    if backend.device.type != "cpu" or backend.tensor_cores is not None:
        return "no CPU"
    if reason := why_torch(policy, rollout):
        return reason
    if precision == "bfloat16":
        return "bfloat16 on a CPU"
    perceptron = perceptron_of(policy, rollout.flat_obs(policy.view), precision)
    return None if floats_of_worker(perceptron) <= MAX_FLOATS else "a network too large for a CPU's caches"


class HostKernels(PerceptronKernels):
    """The kernels of one policy on a CPU, in float32.

    Args:
        policy: Its network is an ActorCritic for which ``why_not_on_host`` is None.
        rollout: The samples.
        precision: As ``PerceptronKernels``; TF32 is float32 here.
    """

    def compile(
        self, kernel: KernelSignature, rows: int, tile: TileShape | None, most_parts: int, ranges: int = 1
    ) -> Compiled:
        """A kernel for so many rows in each range, in at most so many parts, a number that threads do not change."""
        env, floats = self.rollout.env, floats_of_worker(self.perceptron)
        parts = max(1, min(rows // PART_ROWS, MAX_PARTS, most_parts))
        own = (Array("scratch", f32), Scalar("num_parts", i64))
        program = env.functions.compile(
            cuda_folder() / f"learner/{kernel.name.replace('perceptron', 'host')}.cu",
            kernels=[KernelSignature(kernel.name, (*kernel.arguments, *own))],
            game=env.game,
            constants=squash_source(self.perceptron.squash) + self.perceptron.network_source({"SCRATCH": floats}),
        )
        items = self.perceptron.towers * (ranges * -(-rows // TILE) if kernel is FORWARD else parts)
        shape = LaunchShape(items, work=ranges * rows * self.perceptron.num_parameters // WORK)
        scratch = torch.zeros(min(items, num_host_threads()), floats)
        return Compiled(program, shape, parts, {"scratch": scratch, "num_parts": parts})
