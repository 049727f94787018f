"""PufferLib's CartPole of its Ocean games: C, on the CPU."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "cartpole", 1000, 100), Workload("simulation", "cartpole", 10_000, 20))
PEER = Peer(
    "PufferLib",
    ("pufferlib", "torch", "numpy"),
    ("pufferlib>=3.0,<4",),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
    note="pufferlib is a source distribution; its build downloads libraries from GitHub and needs a C compiler.",
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions; ended episodes, at most 200 steps here, are reset in the same step."""
    import numpy as np
    from pufferlib.ocean.cartpole.cartpole import Cartpole

    workload = request.workload
    env = Cartpole(num_envs=workload.num_envs)
    env.reset(seed=1)
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            env.step(rng.integers(0, 2, workload.num_envs))

    return Prepared(run, 1)
