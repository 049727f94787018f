"""VMAS's simple_spread: torch operations on the device, called one by one."""

from __future__ import annotations

from benchmarks.workload import Peer, Prepared, Request, Workload

EPISODE = 25  # steps, as in MPE's game
NUM_ACTIONS = 5
PEER = Peer(
    "VMAS",
    ("vmas", "torch", "numpy", "gym"),
    ("vmas>=1.5",),
    cpu=(Workload("simulation", "simple_spread", 1000, 25),),
    cuda=(Workload("simulation", "simple_spread", 4096, 25), Workload("simulation", "simple_spread", 100_000, 25)),
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions. All episodes end in the same step: VMAS resets all environments at once."""
    import torch
    import vmas

    workload = request.workload
    env = vmas.make_env(
        scenario=workload.game,
        num_envs=workload.num_envs,
        device=request.device,
        continuous_actions=False,
        max_steps=EPISODE,
        seed=1,
    )
    env.reset()
    elapsed = 0

    def run() -> None:
        nonlocal elapsed
        for _ in range(workload.num_steps):
            size = (workload.num_envs, 1)
            env.step([torch.randint(0, NUM_ACTIONS, size, device=request.device) for _ in env.agents])
            elapsed += 1
            if elapsed == EPISODE:
                env.reset()
                elapsed = 0
        if request.device == "cuda":
            torch.cuda.synchronize()

    return Prepared(run, env.n_agents)
