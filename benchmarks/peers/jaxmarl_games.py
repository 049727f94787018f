"""JaxMARL's environments with the rules that gpu_vecenv's games repeat, and their random play."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import jax_simulation
from benchmarks.workload import Request, Workload

LAYOUTS = {  # of overcooked: the name here -> there
    "cramped_room": "cramped_room",
    "asymmetric_advantages": "asymm_advantages",
    "coordination_ring": "coord_ring",
    "forced_coordination": "forced_coord",
    "counter_circuit_o_1order": "counter_circuit",
}


def name_of(workload: Workload) -> str:
    """The name of the environment in JaxMARL."""
    return {"overcooked": "overcooked", "skirmish": "HeuristicEnemySMAX"}.get(workload.game, f"MPE_{workload.game}_v3")


def arguments_of(workload: Workload) -> dict[str, Any]:
    """What the environment is made with, beside its name; scenarios of skirmish and SMAX have the same names."""
    if workload.game == "overcooked":
        from jaxmarl.environments.overcooked import overcooked_layouts

        return {"layout": overcooked_layouts[LAYOUTS[workload.config["layout_name"]]]}
    if workload.game == "skirmish":
        from jaxmarl.environments.smax import map_name_to_scenario

        return {"scenario": map_name_to_scenario(workload.config["scenario"])}
    return {}


def environment(workload: Workload) -> Any:
    """The environment."""
    import jaxmarl

    return jaxmarl.make(name_of(workload), **arguments_of(workload))


def simulation(env: Any, request: Request) -> Callable[[], object]:
    """Steps with random actions, of which a game with masks allows each agent its own."""
    import jax
    import jax.numpy as jnp

    def step(key: Any, state: Any, actions: Any) -> Any:
        obs, state, rewards, dones, infos = env.step(key, state, actions)
        return (obs, rewards, dones, infos), state

    def draw(key: Any, state: Any) -> Any:
        keys = jax.random.split(key, env.num_agents)
        return {agent: env.action_space(agent).sample(key) for agent, key in zip(env.agents, keys, strict=True)}

    def draw_allowed(key: Any, state: Any) -> Any:
        masks = env.get_avail_actions(state)
        logits = jnp.where(jnp.stack([masks[agent] for agent in env.agents]) != 0, 0.0, -jnp.inf)
        return dict(zip(env.agents, jax.random.categorical(key, logits), strict=True))

    masked = request.workload.game == "skirmish"
    return jax_simulation.simulation(env.reset, step, draw_allowed if masked else draw, request)
