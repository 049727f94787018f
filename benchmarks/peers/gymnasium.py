"""Gymnasium's vectorised CartPole, in NumPy on the CPU."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "cartpole", 1000, 100), Workload("simulation", "cartpole", 10_000, 20))
PEER = Peer("Gymnasium", ("gymnasium", "numpy"), ("gymnasium>=1.1,<2",), cpu=WORKLOADS, cuda=WORKLOADS, cpu_only=True)


def prepare(request: Request) -> Prepared:
    """Steps with random actions; ended episodes are reset in the step after."""
    import gymnasium
    import numpy as np

    workload = request.workload
    env = gymnasium.make_vec("CartPole-v1", num_envs=workload.num_envs, vectorization_mode="vector_entry_point")
    env.reset(seed=1)
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            env.step(rng.integers(0, 2, workload.num_envs))

    return Prepared(run, 1)
