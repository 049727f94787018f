"""gymnax's CartPole in JAX."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import jax_simulation
from benchmarks.workload import Peer, Prepared, Request, Workload

PEER = Peer(
    "gymnax",
    ("gymnax", *jax_simulation.PACKAGES),
    ("gymnax>=1.0", "six", *jax_simulation.REQUIREMENTS),
    cpu=(Workload("simulation", "cartpole", 1000, 100), Workload("simulation", "cartpole", 10_000, 20)),
    cuda=(Workload("simulation", "cartpole", 100_000, 200), Workload("simulation", "cartpole", 1_000_000, 100)),
    cuda_requirements=jax_simulation.CUDA_REQUIREMENTS,
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions; ended episodes are reset in the same step."""
    import gymnax

    facts = jax_simulation.configure(request)
    env, params = gymnax.make("CartPole-v1")

    def step(key: Any, state: Any, action: Any) -> Any:
        obs, state, reward, terminated, truncated, _ = env.step(key, state, action, params)
        return (obs, reward, terminated, truncated), state

    def draw(key: Any, state: Any) -> Any:
        return env.action_space(params).sample(key)

    run = jax_simulation.simulation(lambda key: env.reset(key, params), step, draw, request)
    return Prepared(run, 1, facts)
