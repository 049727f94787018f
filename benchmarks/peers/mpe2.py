"""MPE2's particle games: a Python loop over PettingZoo's parallel environments, on the CPU."""

from __future__ import annotations

import importlib

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "simple_spread", 100, 10), Workload("simulation", "simple_tag", 100, 10))
PEER = Peer("mpe2", ("mpe2", "pettingzoo", "numpy"), ("mpe2>=1.1",), cpu=WORKLOADS, cuda=WORKLOADS, cpu_only=True)
NUM_ACTIONS = 5


def prepare(request: Request) -> Prepared:
    """Steps with random actions; an environment whose episode has ended is reset at once."""
    import numpy as np

    workload = request.workload
    module = importlib.import_module(f"mpe2.{workload.game}_v3")
    envs = [module.parallel_env() for _ in range(workload.num_envs)]
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
