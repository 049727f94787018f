"""A Python loop over PettingZoo's parallel environments, on the CPU: what several peers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workload import Prepared, Request

NUM_ACTIONS = 5


def prepare_loop(request: Request, make: Callable[[], Any]) -> Prepared:
    """Steps with random actions, one of five for each agent; an environment whose episode has ended is reset at once.

    Args:
        request: Its workload has the numbers of environments and steps.
        make: A new parallel environment.
    """
    import numpy as np

    workload = request.workload
    envs = [make() for _ in range(workload.num_envs)]
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
