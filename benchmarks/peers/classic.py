"""PettingZoo's Connect Four: a Python loop over its AEC environments, on the CPU."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "connect_four", 100, 10),)
PEER = Peer(
    "PettingZoo classic",
    ("pettingzoo", "numpy"),
    ("pettingzoo>=1.25", "pygame-ce>=2.5"),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)


def prepare(request: Request) -> Prepared:
    """Moves into a random open column, each with the observation of whoever has the turn; ended games restart."""
    import numpy as np
    from pettingzoo.classic.connect_four.connect_four import raw_env

    workload = request.workload
    envs = [raw_env() for _ in range(workload.num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            for env, draw in zip(envs, rng.random(len(envs)), strict=True):
                observation, _, terminated, truncated, _ = env.last()
                if terminated or truncated:
                    env.reset()
                    observation, *_ = env.last()
                columns = np.flatnonzero(observation["action_mask"])
                env.step(int(columns[int(draw * len(columns))]))

    return Prepared(run, len(envs[0].possible_agents))
