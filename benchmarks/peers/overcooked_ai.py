"""overcooked_ai: a Python loop over its environments, on the CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.workload import Peer, Prepared, Request, Workload

NUM_PLAYERS = 2
WORKLOADS = (Workload("simulation", "overcooked", 100, 10, config={"layout_name": "cramped_room"}),)
PEER = Peer(
    "overcooked_ai",
    ("overcooked-ai", "numpy"),
    ("overcooked-ai==1.1.0", "numpy<2", "scipy"),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions and the lossless encoding of both players; ended episodes are reset at once."""
    import numpy as np
    from overcooked_ai_py.mdp.actions import Action
    from overcooked_ai_py.mdp.overcooked_env import OvercookedEnv
    from overcooked_ai_py.mdp.overcooked_mdp import OvercookedGridworld

    by_hand = OvercookedGridworld.step_environment_effects

    def with_old_dynamics(self: Any, state: Any) -> None:
        """What the repository's old_dynamics=True does, which 1.1.0 does not have: full pots cook by themselves."""
        for thing in state.objects.values():
            if thing.name == "soup" and thing.is_idle and len(thing.ingredients) == 3:
                thing.begin_cooking()
        by_hand(self, state)

    OvercookedGridworld.step_environment_effects = with_old_dynamics
    OvercookedGridworld.soup_to_be_cooked_at_location = lambda self, state, pos: False
    workload = request.workload
    rules = OvercookedGridworld.from_layout_name(workload.config["layout_name"])
    envs = [OvercookedEnv.from_mdp(rules, horizon=400, info_level=0) for _ in range(workload.num_envs)]
    for env in envs:
        env.reset()
    rng, actions = np.random.default_rng(1), Action.ALL_ACTIONS

    def run() -> None:
        for _ in range(workload.num_steps):
            draws = rng.integers(0, len(actions), (len(envs), NUM_PLAYERS)).tolist()
            for env, (first, second) in zip(envs, draws, strict=True):
                state, _, done, _ = env.step((actions[first], actions[second]))
                if done:
                    env.reset()
                    state = env.state
                rules.lossless_state_encoding(state)

    return Prepared(run, NUM_PLAYERS)
