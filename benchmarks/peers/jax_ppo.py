"""PPO in JAX after the published form of PureJaxRL's ppo.py and JaxMARL's ippo_ff_mpe.py, which are not on PyPI.

As there: separate networks of two hidden tanh layers with orthogonal weights, Adam with a clipped norm of gradients,
clipped values, advantages normalised per minibatch, a permutation of the whole batch in each epoch, and rollout, update
and loop in one compiled function. An episode that was cut off counts as terminated there, and so here. Their
Categorical is distrax's; its three formulas are written out here.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.workload import Workload

PACKAGES = ("flax", "optax")
REQUIREMENTS = ("flax>=0.10", "optax>=0.2")
LEARNING_RATE, MAX_GRAD_NORM, ADAM_EPSILON = 2.5e-4, 0.5, 1e-5
GAMMA, GAE_LAMBDA, CLIP, VALUE_COEFFICIENT, ENTROPY_COEFFICIENT = 0.99, 0.95, 0.2, 0.5, 0.01


@dataclass(frozen=True)
class Actors:
    """Environments as rows, one for each agent of each: ``reset(key)`` and ``step(key, state, actions)``.

    ``reset`` gives (observations, state), ``step`` (observations, state, rewards, dones, returns), where ``returns``
    are those of the episodes that have ended last.
    """

    reset: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], Any]
    num_rows: int
    obs_size: int
    num_actions: int


class Transition(NamedTuple):
    """One step of all rows."""

    done: Any
    action: Any
    value: Any
    reward: Any
    log_prob: Any
    obs: Any
    episode_return: Any


def settings(workload: Workload) -> dict[str, Any]:
    """The configuration of the published scripts."""
    return {
        "LR": LEARNING_RATE,
        "NUM_ENVS": workload.num_envs,
        "NUM_STEPS": workload.num_steps,
        "TOTAL_TIMESTEPS": workload.env_steps,
        "UPDATE_EPOCHS": workload.num_epochs,
        "NUM_MINIBATCHES": workload.num_minibatches,
        "GAMMA": GAMMA,
        "GAE_LAMBDA": GAE_LAMBDA,
        "CLIP_EPS": CLIP,
        "ENT_COEF": ENTROPY_COEFFICIENT,
        "VF_COEF": VALUE_COEFFICIENT,
        "MAX_GRAD_NORM": MAX_GRAD_NORM,
        "ACTIVATION": "tanh",
        "ANNEAL_LR": True,
        "DEBUG": False,
    }


def make_train(actors: Actors, workload: Workload) -> Callable[[Any], Any]:
    """A function of a key that trains from nothing and returns (parameters, mean return of each update)."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, obs: Any) -> tuple[Any, Any]:
            def network(outputs: int, last_scale: float) -> Any:
                hidden = obs
                for _ in range(2):
                    initial = nn.initializers.orthogonal(np.sqrt(2))
                    hidden = nn.tanh(nn.Dense(workload.hidden_size, kernel_init=initial)(hidden))
                return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(last_scale))(hidden)

            logits = network(actors.num_actions, 0.01)
            return logits, network(1, 1.0).squeeze(-1)

    network = ActorCritic()
    batch_size = actors.num_rows * workload.num_steps

    def learning_rate(count: Any) -> Any:
        updates = count // (workload.num_minibatches * workload.num_epochs)
        return LEARNING_RATE * (1.0 - updates / workload.updates)

    def log_prob_of(logits: Any, action: Any) -> Any:
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1).squeeze(-1)

    def rollout_step(carry: Any, _: None) -> tuple[Any, Transition]:
        train_state, env_state, obs, key = carry
        key, action_key, step_key = jax.random.split(key, 3)
        logits, value = network.apply(train_state.params, obs)
        action = jax.random.categorical(action_key, logits)
        next_obs, env_state, reward, done, returns = actors.step(step_key, env_state, action)
        transition = Transition(done, action, value, reward, log_prob_of(logits, action), obs, returns)
        return (train_state, env_state, next_obs, key), transition

    def advantages_of(rollout: Transition, last_value: Any) -> Any:
        def backward(carry: Any, transition: Transition) -> tuple[Any, Any]:
            gae, next_value = carry
            going_on = 1 - transition.done
            delta = transition.reward + GAMMA * next_value * going_on - transition.value
            gae = delta + GAMMA * GAE_LAMBDA * going_on * gae
            return (gae, transition.value), gae

        start = (jnp.zeros_like(last_value), last_value)
        return jax.lax.scan(backward, start, rollout, reverse=True, unroll=16)[1]

    def loss(parameters: Any, rows: Transition, advantage: Any, target: Any) -> Any:
        logits, value = network.apply(parameters, rows.obs)
        clipped_value = rows.value + (value - rows.value).clip(-CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2).mean()
        ratio = jnp.exp(log_prob_of(logits, rows.action) - rows.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
        log_probs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return -surrogate + VALUE_COEFFICIENT * value_loss - ENTROPY_COEFFICIENT * entropy

    def minibatch(train_state: Any, rows: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(train_state.params, *rows)
        return train_state.apply_gradients(grads=gradients), value

    def update(carry: Any, _: None) -> tuple[Any, Any]:
        (train_state, env_state, obs, key), rollout = jax.lax.scan(rollout_step, carry, None, workload.num_steps)
        _, last_value = network.apply(train_state.params, obs)
        advantages = advantages_of(rollout, last_value)
        batch = (rollout, advantages, advantages + rollout.value)
        batch = jax.tree.map(lambda x: x.reshape((batch_size, *x.shape[2:])), batch)

        def epoch(carry: Any, _: None) -> tuple[Any, Any]:
            train_state, key = carry
            key, order_key = jax.random.split(key)
            order = jax.random.permutation(order_key, batch_size)
            shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), batch)
            parts = jax.tree.map(lambda x: x.reshape((workload.num_minibatches, -1, *x.shape[1:])), shuffled)
            train_state, losses = jax.lax.scan(minibatch, train_state, parts)
            return (train_state, key), losses

        (train_state, key), losses = jax.lax.scan(epoch, (train_state, key), None, workload.num_epochs)
        return (train_state, env_state, obs, key), (rollout.episode_return.mean(), losses.mean())

    def train(key: Any) -> Any:
        key, network_key, reset_key = jax.random.split(key, 3)
        parameters = network.init(network_key, jnp.zeros(actors.obs_size))
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(learning_rate, eps=ADAM_EPSILON))
        train_state = TrainState.create(apply_fn=network.apply, params=parameters, tx=optimizer)
        obs, env_state = actors.reset(reset_key)
        carry, metrics = jax.lax.scan(update, (train_state, env_state, obs, key), None, workload.updates)
        return carry[0].params, metrics

    return train


def provide_distrax() -> None:
    """For published scripts: distrax, or its Categorical where TensorFlow Probability does not import beside JAX."""
    import jax
    import jax.numpy as jnp

    class Categorical:
        def __init__(self, logits: Any) -> None:
            self.logits = logits

        def sample(self, seed: Any) -> Any:
            return jax.random.categorical(seed, self.logits)

        def log_prob(self, value: Any) -> Any:
            return jnp.take_along_axis(jax.nn.log_softmax(self.logits), value[..., None], -1).squeeze(-1)

        def entropy(self) -> Any:
            log_probs = jax.nn.log_softmax(self.logits)
            return -(jnp.exp(log_probs) * log_probs).sum(-1)

    try:
        importlib.import_module("distrax")
    except (ImportError, AttributeError):
        stand_in: Any = types.ModuleType("distrax")
        stand_in.Categorical = Categorical
        sys.modules["distrax"] = stand_in


def runner(train: Callable[[Any], Any]) -> Callable[[], Any]:
    """Runs of the whole training, compiled, each with another key."""
    import jax

    compiled, seeds = jax.jit(train), itertools.count(1)
    return lambda: jax.block_until_ready(compiled(jax.random.PRNGKey(next(seeds))))
