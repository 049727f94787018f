"""JaxMARL: its particle games, Overcooked and SMAX under random play, and its learners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from benchmarks.peers import jax_ppo, jax_simulation, jaxmarl_games
from benchmarks.peers.jaxmarl_scripts import published, script_of
from benchmarks.workload import Algorithm, Peer, Prepared, Request, Workload

KITCHEN = {"layout_name": "cramped_room"}
LARGE_KITCHEN = {"layout_name": "counter_circuit_o_1order"}
ARMIES = {"scenario": "3s5z"}
MARINES = {"scenario": "10m_vs_11m"}
SKIRMISH = {  # of the published configurations
    "mappo_rnn": {"num_minibatches": 4, "hidden_size": 128},
    "pqn_vdn_rnn": {"num_minibatches": 16, "hidden_size": 512},
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


def encoded(num_envs: int, num_steps: int, updates: int) -> Workload:
    """IPPO with a CNN on overcooked: epochs, minibatches, units and layout of the published configuration."""
    sizes: dict[str, Any] = {"num_epochs": 4, "num_minibatches": 16, "hidden_size": 64}
    return Workload("training", "overcooked", num_envs, num_steps, updates, LARGE_KITCHEN, algorithm="ppo_cnn", **sizes)


def battles(num_envs: int, updates: int, algorithm: Algorithm = "mappo_rnn") -> Workload:
    """MAPPO or PQN-VDN on skirmish: lengths, epochs, minibatches and units of the published configurations."""
    sizes: dict[str, Any] = {"num_epochs": 4, **SKIRMISH[algorithm]}
    return Workload("training", "skirmish", num_envs, 128, updates, ARMIES, algorithm=algorithm, **sizes)


PEER = Peer(
    "JaxMARL",
    ("jaxmarl", *jax_ppo.PACKAGES, *jax_simulation.PACKAGES),
    ("jaxmarl>=0.2", "distrax>=0.1.5", *jax_ppo.REQUIREMENTS, *jax_simulation.REQUIREMENTS),
    cpu=(
        Workload("simulation", "simple_spread", 1000, 25),
        Workload("simulation", "simple_tag", 1000, 25),
        Workload("simulation", "overcooked", 1000, 25, config=KITCHEN),
        Workload("simulation", "skirmish", 100, 25, config=ARMIES),
        Workload("training", "simple_spread", 64, 128, updates=5),
        *recurrent(num_envs=64, updates=5),
        encoded(num_envs=16, num_steps=64, updates=2),
        battles(num_envs=8, updates=2),
    ),
    cuda=(
        Workload("simulation", "simple_spread", 100_000, 100),
        Workload("simulation", "simple_tag", 100_000, 100),
        Workload("simulation", "overcooked", 1024, 200, config=KITCHEN),
        Workload("simulation", "overcooked", 100_000, 100, config=KITCHEN),
        Workload("simulation", "overcooked", 100_000, 100, config=LARGE_KITCHEN),
        Workload("simulation", "skirmish", 1024, 100, config=ARMIES),
        Workload("simulation", "skirmish", 16_384, 50, config=ARMIES),
        Workload("simulation", "skirmish", 100_000, 20, config=ARMIES),
        Workload("simulation", "skirmish", 1024, 100, config=MARINES),
        Workload("training", "simple_spread", 4096, 32, updates=50),
        *recurrent(num_envs=1024, updates=10),
        encoded(num_envs=64, num_steps=256, updates=10),
        encoded(num_envs=1024, num_steps=128, updates=5),
        battles(num_envs=128, updates=10),
        battles(num_envs=128, updates=5, algorithm="pqn_vdn_rnn"),
        battles(num_envs=1024, updates=5),
    ),
    cuda_requirements=jax_simulation.CUDA_REQUIREMENTS,
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions, or a whole training: JaxMARL's own script with --published, otherwise jax_ppo.py."""
    workload = request.workload
    facts: dict[str, Any] = jax_simulation.configure(request)
    env = jaxmarl_games.environment(workload)
    if workload.kind == "simulation":
        return Prepared(jaxmarl_games.simulation(env, request), env.num_agents, facts)
    script = script_of(workload)
    facts["title"] = script.title
    if request.published:
        train, facts["script"] = published(workload, request.published), f"{script.module}.py as published"
    else:
        train = jax_ppo.make_train(_actors(env, request), workload)
        facts["script"] = "jax_ppo.py, after JaxMARL's ippo_ff_mpe.py"
    return Prepared(jax_ppo.runner(train), env.num_agents, facts)


def learn(request: Request, seeds: int) -> tuple[list[float], dict[str, Any]]:
    """As ``benchmarks.ours.learn``: all seeds at once by the published script, on JaxMARL's own environment."""
    import jax

    assert request.published
    facts: dict[str, Any] = jax_simulation.configure(request)
    script = script_of(request.workload)
    facts |= {"title": script.title, "script": f"{script.module}.py as published"}
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    trained = jax.jit(jax.vmap(published(request.workload, request.published)))(keys)["runner_state"]

    def has_returns(node: Any) -> bool:
        return hasattr(node, "returned_episode_returns")

    logs = [log for log in jax.tree.leaves(trained, is_leaf=has_returns) if has_returns(log)]
    # Of evaluations too, whose environments are fewer: the first state is that of the training.
    returns = logs[0].returned_episode_returns.reshape(seeds, -1).mean(1)
    num_agents = jaxmarl_games.environment(request.workload).num_agents  # by which its logs multiply rewards
    return [float(x) / num_agents for x in returns], facts


def watch(request: Request, seed: int, log: Callable[[int, float], bool]) -> dict[str, Any]:
    """As ``benchmarks.ours.watch``, by the published script, which goes on in a thread after ``log`` is True."""
    import jax
    import numpy as np

    assert request.published
    facts: dict[str, Any] = jax_simulation.configure(request)
    script, over, errors = script_of(request.workload), threading.Event(), list[BaseException]()

    def logged(metrics: Any, step: int | None = None) -> None:
        names = "win_rate", "returned_won_episode", "returned_episode_returns"
        score = next(metrics[name] for name in names if name in metrics)
        if not over.is_set() and log(int(metrics["env_step"]), float(np.mean(score))):
            over.set()

    def run() -> None:
        try:
            train = published(request.workload, str(request.published), logged)
            jax.block_until_ready(jax.jit(train)(jax.random.PRNGKey(seed)))
        except BaseException as error:  # raised by the thread that waits
            errors.append(error)
        over.set()

    threading.Thread(target=run, daemon=True).start()
    over.wait()
    if errors:
        raise errors[0]
    return {**facts, "title": script.title, "script": f"{script.module}.py as published"}


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
