"""RWARE: a Python loop over its environments, on the CPU."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

NUM_AGENTS, NUM_ACTIONS = 4, 5
WORKLOADS = (Workload("simulation", "warehouse", 100, 10, config={"num_agents": NUM_AGENTS}),)
PEER = Peer("RWARE", ("rware", "networkx", "numpy"), ("rware==2.0.0",), cpu=WORKLOADS, cuda=WORKLOADS, cpu_only=True)


def prepare(request: Request) -> Prepared:
    """Steps with random actions; an environment whose episode has ended is reset at once."""
    import gymnasium
    import numpy as np

    workload = request.workload
    name = f"rware:rware-tiny-{NUM_AGENTS}ag-v2"
    envs = [gymnasium.make(name, disable_env_checker=True).unwrapped for _ in range(workload.num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            for env, actions in zip(envs, rng.integers(0, NUM_ACTIONS, (len(envs), NUM_AGENTS)).tolist(), strict=True):
                *_, terminated, truncated, _ = env.step(actions)
                if terminated or truncated:
                    env.reset()

    return Prepared(run, NUM_AGENTS)
