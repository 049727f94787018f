"""JaxMARL: its particle games under random play, and its IPPO on simple_spread."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from benchmarks.peers import jax_ppo, jax_simulation
from benchmarks.workload import Peer, Prepared, Request, Workload

# Algorithm -> the published script, and what is printed in the results.
SCRIPTS = {
    "ppo": ("ippo_ff_mpe", "JaxMARL IPPO"),
    "ppo_rnn": ("ippo_rnn_mpe", "JaxMARL IPPO with a GRU"),
    "mappo_rnn": ("mappo_rnn_mpe", "JaxMARL MAPPO with a GRU"),
    "pqn_vdn_rnn": ("pqn_vdn_rnn", "JaxMARL PQN-VDN with a GRU"),
}


# Of pqn_vdn_rnn_mpe.yaml, beside what the workload names; without its evaluations, which ours has no part of either.
# Of ippo_rnn_mpe.yaml and mappo_homogenous_rnn_mpe.yaml, where they differ from those of the scripts without a GRU.
RECURRENT_SETTINGS: dict[str, dict[str, Any]] = {
    "ppo_rnn": {"LR": 5e-4, "CLIP_EPS": 0.3, "VF_COEF": 1.0},
    "mappo_rnn": {"LR": 2e-3},
}
PQN_SETTINGS = {
    "MEMORY_WINDOW": 0,
    "NUM_LAYERS": 2,
    "NORM_INPUT": False,
    "NORM_TYPE": "layer_norm",
    "EPS_START": 1.0,
    "EPS_FINISH": 0.1,
    "EPS_DECAY": 0.1,
    "MAX_GRAD_NORM": 1,
    "LR": 5e-4,
    "LR_LINEAR_DECAY": False,
    "GAMMA": 0.9,
    "LAMBDA": 0.3,
    "NUM_EPOCHS": 4,
    "TEST_DURING_TRAINING": False,
    "TEST_NUM_ENVS": 1,
    "TEST_NUM_STEPS": 1,
}


def recurrent(num_envs: int, updates: int) -> tuple[Workload, ...]:
    """Training with a GRU: lengths, epochs, minibatches and units of the published configurations."""
    ppo: dict[str, Any] = {"num_steps": 128, "num_epochs": 4, "hidden_size": 128}
    common: dict[str, Any] = {"kind": "training", "game": "simple_spread", "num_envs": num_envs, "updates": updates}
    return (
        Workload(**common, **ppo, algorithm="ppo_rnn", num_minibatches=2),
        Workload(**common, **ppo, algorithm="mappo_rnn", num_minibatches=4),
        Workload(**common, algorithm="pqn_vdn_rnn", num_steps=16, num_epochs=4, num_minibatches=16, hidden_size=256),
    )


PEER = Peer(
    "JaxMARL",
    ("jaxmarl", *jax_ppo.PACKAGES, *jax_simulation.PACKAGES),
    ("jaxmarl>=0.2", "distrax>=0.1.5", *jax_ppo.REQUIREMENTS, *jax_simulation.REQUIREMENTS),
    cpu=(
        Workload("simulation", "simple_spread", 1000, 25),
        Workload("simulation", "simple_tag", 1000, 25),
        Workload("training", "simple_spread", 64, 128, updates=5),
        *recurrent(num_envs=64, updates=5),
    ),
    cuda=(
        Workload("simulation", "simple_spread", 100_000, 100),
        Workload("simulation", "simple_tag", 100_000, 100),
        Workload("training", "simple_spread", 4096, 32, updates=50),
        *recurrent(num_envs=1024, updates=10),
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
    script, facts["title"] = SCRIPTS[request.workload.algorithm]
    if request.published:
        train, facts["script"] = _published(script, name, request), f"{script}.py as published"
    else:
        train = jax_ppo.make_train(_actors(env, request), request.workload)
        facts["script"] = "jax_ppo.py, after JaxMARL's ippo_ff_mpe.py"
    return Prepared(jax_ppo.runner(train), env.num_agents, facts)


def learn(request: Request, seeds: int) -> tuple[list[float], dict[str, Any]]:
    """As ``benchmarks.ours.learn``: all seeds at once by the published script, on JaxMARL's own environment."""
    import jax
    import jaxmarl

    facts: dict[str, Any] = jax_simulation.configure(request)
    name = f"MPE_{request.workload.game}_v3"
    script, facts["title"] = SCRIPTS[request.workload.algorithm]
    facts["script"] = f"{script}.py as published"
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    trained = jax.jit(jax.vmap(_published(script, name, request)))(keys)["runner_state"]

    def has_returns(node: Any) -> bool:
        return hasattr(node, "returned_episode_returns")

    logs = [log for log in jax.tree.leaves(trained, is_leaf=has_returns) if has_returns(log)]
    # Of evaluations too, whose environments are fewer: the first state is that of the training.
    returns = logs[0].returned_episode_returns.reshape(seeds, -1).mean(1)
    num_agents = jaxmarl.make(name).num_agents  # by which its logs multiply rewards
    return [float(x) / num_agents for x in returns], facts


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


def _published(script: str, env_name: str, request: Request) -> Any:
    """``make_train`` of a script; the modules that only its logs and command line use are stood in for."""
    for absent in ("wandb", "hydra", "omegaconf"):
        sys.modules[absent] = types.ModuleType(absent)
    stand_ins: Any = sys.modules
    stand_ins["wandb"].log = lambda metrics: None
    stand_ins["hydra"].main = lambda **_: lambda function: function
    stand_ins["omegaconf"].OmegaConf = None
    jax_ppo.provide_distrax()
    sys.path.insert(0, str(request.published))
    module, workload = importlib.import_module(script), request.workload
    common = {**jax_ppo.settings(workload), "ENV_NAME": env_name, "ENV_KWARGS": {}, "WANDB_MODE": "disabled"}
    if workload.algorithm == "pqn_vdn_rnn":
        config = {**common, **PQN_SETTINGS, "HIDDEN_SIZE": workload.hidden_size}
        return module.make_train(config, module.env_from_config(config)[0])
    common |= RECURRENT_SETTINGS.get(workload.algorithm, {})
    units = {"FC_DIM_SIZE": workload.hidden_size, "GRU_HIDDEN_DIM": workload.hidden_size, "SCALE_CLIP_EPS": False}
    return module.make_train({**common, **units})
