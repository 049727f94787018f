"""JaxMARL: its particle games under random play, and its IPPO on simple_spread."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from benchmarks.peers import jax_ppo, jax_simulation
from benchmarks.workload import Peer, Prepared, Request, Workload

PEER = Peer(
    "JaxMARL",
    ("jaxmarl", *jax_ppo.PACKAGES, *jax_simulation.PACKAGES),
    ("jaxmarl>=0.2", "distrax>=0.1.5", *jax_ppo.REQUIREMENTS, *jax_simulation.REQUIREMENTS),
    cpu=(
        Workload("simulation", "simple_spread", 1000, 25),
        Workload("simulation", "simple_tag", 1000, 25),
        Workload("training", "simple_spread", 64, 128, updates=5),
    ),
    cuda=(
        Workload("simulation", "simple_spread", 100_000, 100),
        Workload("simulation", "simple_tag", 100_000, 100),
        Workload("training", "simple_spread", 4096, 32, updates=50),
    ),
    cuda_requirements=jax_simulation.CUDA_REQUIREMENTS,
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions, or a whole training: JaxMARL's own script with --published, otherwise jax_ppo.py."""
    import jaxmarl

    facts: dict[str, Any] = jax_simulation.configure(request)
    name = f"MPE_{request.workload.game}_v3"
    env = jaxmarl.make(name)
    if request.workload.kind == "simulation":
        return Prepared(_simulation(env, request), env.num_agents, facts)
    facts["title"] = "JaxMARL IPPO"
    if request.published:
        train, facts["script"] = _published(name, request), "ippo_ff_mpe.py as published"
    else:
        train = jax_ppo.make_train(_actors(env, request), request.workload)
        facts["script"] = "jax_ppo.py, after JaxMARL's ippo_ff_mpe.py"
    return Prepared(jax_ppo.runner(train), env.num_agents, facts)


def _simulation(env: Any, request: Request) -> Any:
    import jax

    def step(key: Any, state: Any, actions: Any) -> Any:
        obs, state, rewards, dones, _ = env.step(key, state, actions)
        return (obs, rewards, dones), state

    def draw(key: Any) -> Any:
        keys = jax.random.split(key, env.num_agents)
        return {agent: env.action_space(agent).sample(key) for agent, key in zip(env.agents, keys, strict=True)}

    return jax_simulation.simulation(env.reset, step, draw, request)


def _actors(env: Any, request: Request) -> jax_ppo.Actors:
    """One row for each agent of each environment, agent after agent."""
    import jax
    import jax.numpy as jnp
    from jaxmarl.wrappers.baselines import MPELogWrapper

    logged, agents, num_envs = MPELogWrapper(env), env.agents, request.workload.num_envs
    num_rows = num_envs * len(agents)

    def rows(values: Any) -> Any:
        stacked = jnp.stack([values[agent] for agent in agents])
        return stacked.reshape((num_rows, *stacked.shape[2:]))

    def reset(key: Any) -> Any:
        obs, state = jax.vmap(logged.reset)(jax.random.split(key, num_envs))
        return rows(obs), state

    def step(key: Any, state: Any, actions: Any) -> Any:
        by_agent = dict(zip(agents, actions.reshape((len(agents), num_envs)), strict=True))
        stepped = jax.vmap(logged.step)(jax.random.split(key, num_envs), state, by_agent)
        obs, state, reward, done, info = stepped
        return rows(obs), state, rows(reward), rows(done), info["returned_episode_returns"].reshape(-1)

    (obs_size,) = env.observation_space(agents[0]).shape
    return jax_ppo.Actors(reset, step, num_rows, obs_size, env.action_space(agents[0]).n)


def _published(name: str, request: Request) -> Any:
    """``make_train`` of ippo_ff_mpe.py; the modules that only its logs and command line use are stood in for."""
    for absent in ("wandb", "hydra", "omegaconf"):
        sys.modules[absent] = types.ModuleType(absent)
    stand_ins: Any = sys.modules
    stand_ins["wandb"].log = lambda metrics: None
    stand_ins["hydra"].main = lambda **_: lambda function: function
    stand_ins["omegaconf"].OmegaConf = None
    jax_ppo.provide_distrax()
    sys.path.insert(0, str(request.published))
    script = importlib.import_module("ippo_ff_mpe")
    return script.make_train({**jax_ppo.settings(request.workload), "ENV_NAME": name, "ENV_KWARGS": {}})
