"""EnvPool's CartPole: C++ environments in a pool of threads, on the CPU."""

from __future__ import annotations

import os

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "cartpole", 1000, 100), Workload("simulation", "cartpole", 10_000, 20))
PEER = Peer(
    "EnvPool",
    ("envpool", "gymnasium", "numpy"),
    ("envpool>=1.1",),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)


def prepare(request: Request) -> Prepared:
    """Synchronous steps with random actions; ended episodes are reset in the step after."""
    import envpool
    import numpy as np

    workload = request.workload
    threads = len(os.sched_getaffinity(0))  # its default is all processors, even those that it may not use
    env = envpool.make_gymnasium("CartPole-v1", num_envs=workload.num_envs, num_threads=threads, seed=1)
    env.reset()
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            env.step(rng.integers(0, 2, workload.num_envs).astype(np.int32))

    return Prepared(run, 1)
