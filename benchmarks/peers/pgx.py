"""pgx's Connect Four in JAX."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import jax_simulation
from benchmarks.workload import Peer, Prepared, Request, Workload

GAME = "connect_four"
PEER = Peer(
    "pgx",
    ("pgx", *jax_simulation.PACKAGES),
    ("pgx>=2.6", *jax_simulation.REQUIREMENTS),
    cpu=(Workload("simulation", GAME, 1000, 20),),
    cuda=(Workload("simulation", GAME, 1024, 200), Workload("simulation", GAME, 100_000, 100)),
    cuda_requirements=jax_simulation.CUDA_REQUIREMENTS,
)


def prepare(request: Request) -> Prepared:
    """Legal moves at random by the player whose turn it is; ended games are reset in the same step."""
    import jax
    import jax.numpy as jnp
    import pgx
    from pgx.experimental import auto_reset

    facts = jax_simulation.configure(request)
    env = pgx.make(request.workload.game)
    steps = auto_reset(env.step, env.init)

    def reset(key: Any) -> Any:
        state = env.init(key)
        return state.observation, state

    def step(key: Any, state: Any, action: Any) -> Any:
        state = steps(state, action, key)
        return (state.observation, state.rewards, state.terminated, state.truncated, state.legal_action_mask), state

    def draw(key: Any, state: Any) -> Any:
        return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))

    return Prepared(jax_simulation.simulation(reset, step, draw, request), env.num_players, facts)
