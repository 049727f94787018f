"""PureJaxRL: PPO on gymnax's CartPole, all of it compiled."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from benchmarks.peers import jax_ppo, jax_simulation
from benchmarks.workload import Peer, Prepared, Request, Workload

PEER = Peer(
    "PureJaxRL",
    ("gymnax", "distrax", *jax_ppo.PACKAGES, *jax_simulation.PACKAGES),
    ("gymnax>=1.0", "six", "distrax>=0.1.5", *jax_ppo.REQUIREMENTS, *jax_simulation.REQUIREMENTS),
    cpu=(Workload("training", "cartpole", 64, 128, updates=10),),
    cuda=(Workload("training", "cartpole", 16_384, 32, updates=50),),
    cuda_requirements=jax_simulation.CUDA_REQUIREMENTS,
)


def prepare(request: Request) -> Prepared:
    """A whole training; PureJaxRL's own ppo.py with --published, otherwise jax_ppo.py."""
    facts = jax_simulation.configure(request)
    if request.published:
        train, script = _published(request), "ppo.py as published"
    else:
        train, script = jax_ppo.make_train(_actors(request), request.workload), "jax_ppo.py, after PureJaxRL's ppo.py"
    return Prepared(jax_ppo.runner(train), 1, {**facts, "script": script})


def _actors(request: Request) -> jax_ppo.Actors:
    import gymnax
    import jax
    from gymnax.wrappers.purerl import FlattenObservationWrapper, LogWrapper

    env, params = gymnax.make("CartPole-v1")
    env = LogWrapper(FlattenObservationWrapper(env))
    num_envs = request.workload.num_envs

    def reset(key: Any) -> Any:
        return jax.vmap(lambda key: env.reset(key, params))(jax.random.split(key, num_envs))

    def step(key: Any, state: Any, actions: Any) -> Any:
        keys = jax.random.split(key, num_envs)
        stepped = jax.vmap(lambda key, state, action: env.step(key, state, action, params))(keys, state, actions)
        obs, state, reward, terminated, truncated, info = stepped
        return obs, state, reward, terminated | truncated, info["returned_episode_returns"]

    (obs_size,) = env.observation_space(params).shape
    return jax_ppo.Actors(reset, step, num_envs, obs_size, env.action_space(params).n)


def _published(request: Request) -> Any:
    """``make_train`` of ppo.py, whose wrappers.py is stood in for by gymnax's: it imports Brax and NAVIX."""
    from gymnax.wrappers.purerl import FlattenObservationWrapper, GymnaxWrapper, LogWrapper

    class JoinedFlags(GymnaxWrapper):
        """gymnax 1.0 gives terminations and truncations; PureJaxRL takes one flag for both."""

        def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
            obs, state, reward, terminated, truncated, info = self._env.step(key, state, action, params)
            return obs, state, reward, terminated | truncated, info

    wrappers: Any = types.ModuleType("wrappers")
    wrappers.FlattenObservationWrapper = FlattenObservationWrapper
    wrappers.LogWrapper = lambda env: JoinedFlags(LogWrapper(env))
    sys.modules["wrappers"] = wrappers
    jax_ppo.provide_distrax()
    sys.path.insert(0, str(request.published))
    script = importlib.import_module("ppo")
    return script.make_train({**jax_ppo.settings(request.workload), "ENV_NAME": "CartPole-v1"})
