"""JAX by DLPack: arrays on the memory of our tensors, and trajectories that JAX's actions make."""

import jax
import jax.numpy as jnp
import pytest
import torch
from support.documented import documented

import gpu_vecenv


def test_observations_are_shared_and_unchanged(device):
    env = gpu_vecenv.make("simple_spread", 16, device)
    obs, _ = env.reset(seed=1)
    seen = jnp.from_dlpack(obs)
    assert seen.shape == obs.shape and seen.dtype == jnp.float32
    assert seen.unsafe_buffer_pointer() == obs.data_ptr()
    before = obs.clone()
    for _ in range(3):
        env.step(env.sample_actions())
    assert torch.equal(torch.from_dlpack(seen), before)  # JAX's arrays are immutable, and so is what a step returned
    _, rewards, terminations, _, _ = env.step(env.sample_actions())
    assert jnp.from_dlpack(rewards).dtype == jnp.float32 and jnp.from_dlpack(terminations).dtype == jnp.bool_


@pytest.mark.parametrize("view", [False, True])
def test_trajectories_are_those_of_torch(device, view):
    """Of the view with JAX's arrays as they are, of VecEnv with tensors on their memory."""
    twin = gpu_vecenv.make("cartpole", 32, device, agents_as_envs=True, max_steps=30)
    env = (
        gpu_vecenv.GymnasiumVectorEnv(twin.game, 32, device)
        if view
        else gpu_vecenv.make(twin.game, 32, device, agents_as_envs=True)
    )
    (obs, _), (expected, _) = env.reset(seed=3), twin.reset(seed=3)
    policy = jax.jit(lambda obs: (obs[..., 2] > 0).astype(jnp.int32))
    ends = 0
    for _ in range(60):
        actions = policy(jnp.from_dlpack(obs))
        assert actions.dtype == jnp.int32
        obs, rewards, terminations, truncations, _ = env.step(actions if view else torch.from_dlpack(actions))
        expected, *others, _ = twin.step((expected[..., 2] > 0).int())
        assert torch.equal(obs, expected)
        assert all(map(torch.equal, (rewards, terminations, truncations), others))
        ends += int((terminations | truncations).sum())
    assert ends > 32 and not (env.vec_env if view else env).faults().any()


def test_the_documented_lines_run():
    made = documented("JAX")
    assert torch.equal(made["view"].vec_env.observe().reshape(256, 1, 4), made["obs"]) and made["obs"].shape == (
        256,
        1,
        4,
    )
    assert not made["env"].faults().any()
