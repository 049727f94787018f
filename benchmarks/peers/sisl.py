"""PettingZoo's SISL games: a Python loop over its parallel environments, on the CPU."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "pursuit", 100, 10),)
PEER = Peer(
    "PettingZoo SISL",
    ("pettingzoo", "numpy", "scipy"),
    ("pettingzoo>=1.25", "pygame-ce>=2.5", "scipy>=1.11"),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)
NUM_ACTIONS = 5


def prepare(request: Request) -> Prepared:
    """Steps with random actions; an environment whose episode has ended is reset at once."""
    import numpy as np
    from pettingzoo.sisl.pursuit.pursuit import parallel_env

    workload = request.workload
    envs = [parallel_env() for _ in range(workload.num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    agents = envs[0].possible_agents
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            for env, actions in zip(envs, rng.integers(0, NUM_ACTIONS, (len(envs), len(agents))), strict=True):
                env.step(dict(zip(agents, actions, strict=True)))
                if not env.agents:
                    env.reset()

    return Prepared(run, len(agents))
