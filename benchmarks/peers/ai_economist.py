"""The AI Economist's gather-trade-build: a Python loop over its environments, on the CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "economy", 10, 100),)  # ten repeats are a whole episode, 1,000 steps
IMPORTED = ("gputil>=1.4", "lz4>=3.1.3", "pandas>=2", "pycryptodome>=3.20", "scipy>=1.11")
PEER = Peer(
    "AI Economist",
    ("ai-economist", "numpy", "scipy"),
    (*IMPORTED, "setuptools; python_version >= '3.12'"),  # which has the distutils that GPUtil imports
    no_deps=("ai-economist==1.7.1",),  # it demands the versions of 2021
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)
# What ai-economist's defaults have otherwise than those of economy.
COMPONENTS = (
    ("Build", {"payment_max_skill_multiplier": 3, "skill_dist": "pareto"}),
    ("ContinuousDoubleAuction", {"max_num_orders": 5}),
    ("Gather", {"skill_dist": "pareto"}),
    ("PeriodicBracketTax", {}),
)
OPTIONS = {"n_agents": 4, "world_size": [25, 25], "fixed_four_skill_and_loc": True, "planner_gets_spatial_info": False}
PLANNER = "p"


def prepare(request: Request) -> Prepared:
    """Steps with random actions among the allowed ones; an environment whose episode has ended is reset at once."""
    import numpy as np

    workload = request.workload
    envs = [environment() for _ in range(workload.num_envs)]
    envs[0].seed(1)  # of NumPy's generator, which all of them use
    observations = [env.reset() for env in envs]
    brackets = len(envs[0].world.planner.action_spaces)
    rng = np.random.default_rng(1)

    def run() -> None:
        for _ in range(workload.num_steps):
            for i, env in enumerate(envs):
                masks = {agent: own["action_mask"] for agent, own in observations[i].items()}
                rates = masks.pop(PLANNER).reshape(brackets, -1)
                workers = choose(np.stack(list(masks.values())), rng.random(len(masks)))
                actions: dict[str, Any] = dict(zip(masks, workers, strict=True))
                actions[PLANNER] = choose(rates, rng.random(brackets))
                observations[i], _, done, _ = env.step(actions)
                if done["__all__"]:
                    observations[i] = env.reset()

    return Prepared(run, envs[0].num_agents)


def environment() -> Any:
    """A new environment with the rules and sizes of economy's defaults."""
    import numpy as np

    np.int = int  # type: ignore[attr-defined]  # which ai-economist uses and NumPy has no longer
    from ai_economist import foundation

    return foundation.make_env_instance("layout_from_file/simple_wood_and_stone", components=COMPONENTS, **OPTIONS)


def choose(masks: Any, draws: Any) -> list[int]:
    """For each row of ``masks`` the index of an entry that is not 0, all equally likely.

    Args:
        masks: (rows, choices), 0 or 1.
        draws: (rows,), uniform in [0, 1).
    """
    allowed = masks.cumsum(1)
    chosen: list[int] = (allowed > (draws * allowed[:, -1]).astype(int)[:, None]).argmax(1).tolist()
    return chosen
