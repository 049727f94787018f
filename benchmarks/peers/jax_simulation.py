"""Random play of environments in JAX: one compiled scan over steps, shared by the peers in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workload import Precision, Request

PACKAGES = ("jax", "jaxlib", "numpy")
REQUIREMENTS = ("jax>=0.5",)
CUDA_REQUIREMENTS = ("jax[cuda12]>=0.5",)  # drivers of CUDA 13 run it too
PRECISIONS: dict[Precision, str] = {"float32": "float32", "tf32": "tensorfloat32"}


def configure(request: Request) -> dict[str, Any]:
    """Set the precision of matrix products and check the device; returns facts for the results."""
    import jax

    jax.config.update("jax_default_matmul_precision", PRECISIONS[request.precision])
    (device, *_) = jax.devices("gpu" if request.device == "cuda" else "cpu")
    return {"peer_device_name": device.device_kind}


def simulation(
    reset: Callable[[Any], Any], step: Callable[[Any, Any, Any], Any], draw: Callable[[Any, Any], Any], request: Request
) -> Callable[[], object]:
    """One run of the workload, which continues where the run before ended.

    ``reset(key)`` gives (observations, state) of one environment, ``step(key, state, action)`` (outputs, state), and
    ``draw(key, state)`` a random action. Everything in ``outputs`` enters a sum, so that nothing is optimised away.
    """
    import jax
    import jax.numpy as jnp

    workload = request.workload
    steps, draws = jax.vmap(step), jax.vmap(draw)

    def tick(carry: Any, _: None) -> tuple[Any, None]:
        key, state, total = carry
        key, draw_key, step_key = jax.random.split(key, 3)
        actions = draws(jax.random.split(draw_key, workload.num_envs), state)
        outputs, state = steps(jax.random.split(step_key, workload.num_envs), state, actions)
        total += sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(outputs))
        return (key, state, total), None

    @jax.jit
    def play(carry: Any) -> Any:
        return jax.lax.scan(tick, carry, None, length=workload.num_steps)[0]

    _, state = jax.jit(jax.vmap(reset))(jax.random.split(jax.random.PRNGKey(0), workload.num_envs))
    carry = (jax.random.PRNGKey(1), state, jnp.float32(0))

    def run() -> object:
        nonlocal carry
        carry = jax.block_until_ready(play(carry))
        return carry[2]

    return run
