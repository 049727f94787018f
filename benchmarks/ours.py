"""Our side of each workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cnn import PublishedCNN
from benchmarks.workload import Peer, Prepared, Request, Workload
from gpu_vecenv import Curriculum, PiecewiseLinear, Sampler, VecEnv
from gpu_vecenv.engine.random_play import UniformParameters
from gpu_vecenv.engine.timing import captured, provenance, synchronize
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.reward import Transition
from gpu_vecenv.train.trainer import Trainer

PEER = Peer("gpu_vecenv", ("torch", "numpy"), ())


def prepare(request: Request) -> Prepared:
    """The side of gpu_vecenv."""
    return simulation(request)[0] if request.workload.kind == "simulation" else _training(request)


def simulation(request: Request) -> tuple[Prepared, VecEnv]:
    """Random actions drawn in each step, environments reset automatically; on a GPU all steps are in one graph.

    Of games with masks the allowed actions alone.
    """
    workload, device = request.workload, torch.device(request.device)
    env = VecEnv(configure(workload.game, **workload.config), workload.num_envs, device)
    buffers = env.step_buffers()
    env.reset(seed=1, out=buffers)
    sampler = Sampler(env)
    parameters = UniformParameters(sampler, buffers)
    sample = dataclasses.replace(sampler.sample(parameters.tensor), entropies=None)

    def steps() -> None:
        for _ in range(workload.num_steps):
            parameters.refresh()
            sampler.step(parameters.tensor, sample=sample, out=buffers)

    repeat = captured(steps, device)

    def run() -> None:
        repeat()
        synchronize(device)

    return Prepared(run, env.num_agents, _facts(device)), env


def _training(request: Request) -> Prepared:
    """Iterations of the trainer with the hyperparameters that the peer publishes, at a constant learning rate."""
    workload, device = request.workload, torch.device(request.device)
    trainer = trainer_of(request, total_steps=10**12, final_learning_rate=None)

    def run() -> None:
        for _ in range(workload.updates):
            trainer.train_iteration()
        synchronize(device)

    return Prepared(run, trainer.env.num_agents, _facts(device))


def watch(request: Request, seed: int, log: Callable[[int, float], bool]) -> dict[str, Any]:
    """Train as the published configuration says until ``log(env_steps, score)`` is True; returns facts."""
    workload, device = request.workload, torch.device(request.device)
    scores = torch.full((workload.num_envs,), torch.nan, device=device)

    def keeping_scores(env: VecEnv) -> Callable[[Transition], torch.Tensor]:
        final = env.state[SCORES[workload.game]]
        scale = REWARD_SCALES.get((workload.game, workload.algorithm), 1.0)

        def rewards(step: Transition) -> torch.Tensor:
            ended = (step.terminations | step.truncations)[:, 0]
            scores.copy_(torch.where(ended, final.float(), scores))
            return step.rewards * scale

        return rewards

    options: dict[str, Any] = {"total_steps": workload.env_steps, "final_learning_rate": 0.0}
    if workload.game == "overcooked":
        fading = PiecewiseLinear([(0, 1.0), (SHAPING_STEPS / workload.env_steps, 0.0)])
        options["curriculum"] = Curriculum(shared={"shaping_weight": fading})
    trainer = trainer_of(request, seed, keeping_scores, **options)
    scores.fill_(torch.nan)  # the trainer has called the function once, to check it
    while trainer.iteration < workload.updates:
        trainer.train_iteration()
        synchronize(device)
        if log(trainer.iteration * trainer.env_steps_per_iteration, float(scores.nanmean())):
            break
    return _facts(device)


def trainer_of(
    request: Request,
    seed: int = 0,
    reward_of: Callable[[VecEnv], Callable[[Transition], torch.Tensor]] | None = None,
    curriculum: Curriculum | None = None,
    **schedule: Any,
) -> Trainer:
    """The trainer of a workload, one policy for all agents, with these options beside those of the workload."""
    workload = request.workload
    game = configure(workload.game, **workload.config)
    sizes: dict[str, Any] = {
        "num_steps": workload.num_steps,
        "num_epochs": workload.num_epochs,
        "num_minibatches": workload.num_minibatches,
        "precision": request.precision,
        **schedule,
    }
    config = CONFIGS[workload.game, workload.algorithm](sizes, workload.hidden_size)
    roles = "+".join(game.layout.present_roles)
    env = VecEnv(game, workload.num_envs, torch.device(request.device), autoreset_mode="next_step")
    policies = {roles: PolicySpec(network=_network(game, workload, seed))}
    reward = None if reward_of is None else reward_of(env)
    return Trainer(env, config, seed=seed, reward=reward, policies=policies, curriculum=curriculum)


def _network(game: Any, workload: Workload, seed: int) -> PublishedCNN | None:
    """The peer's network where the default one of this library is another."""
    if workload.algorithm != "ppo_cnn":
        return None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return PublishedCNN(game.observation_space.shape, game.action_space.n, workload.hidden_size)


def _ppo(sizes: dict[str, Any], units: int) -> PPOConfig:
    """As PureJaxRL and JaxMARL publish it."""
    return PPOConfig(**sizes, **PPO, hidden_sizes=(units, units), shared_trunk=False, activation="tanh")


def _recurrent(sizes: dict[str, Any], units: int, **changes: Any) -> PPOConfig:
    """A dense layer, a GRU and a dense layer; the sequences of an update are whole rollouts."""
    network = {"network": "gru", "hidden_sizes": (units, units), "post_hidden_sizes": (units,), "activation": "relu"}
    return PPOConfig(**{**sizes, **PPO, **network, **changes})


def _ppo_cnn(sizes: dict[str, Any], units: int) -> PPOConfig:
    """JaxMARL's ippo_cnn_overcooked, whose network is that of cnn.py."""
    return PPOConfig(**{**sizes, **PPO, "learning_rate": 5e-4})


def _ppo_rnn(sizes: dict[str, Any], units: int) -> PPOConfig:
    """JaxMARL's ippo_rnn_mpe, but that actor and critic have a GRU each where they share one there."""
    return _recurrent(sizes, units, learning_rate=5e-4, clip=0.3, value_clip=0.3, value_coefficient=1.0)


def _mappo_rnn(sizes: dict[str, Any], units: int) -> PPOConfig:
    """JaxMARL's mappo_rnn_mpe."""
    return _recurrent(sizes, units, learning_rate=2e-3, critic="central", critic_max_grad_norm=0.5)


def _mappo_rnn_smax(sizes: dict[str, Any], units: int) -> PPOConfig:
    """JaxMARL's mappo_rnn_smax, but that the actor sees too which agent a row is of."""
    changes = {"learning_rate": 2e-3, "entropy_coefficient": 0.0, "max_grad_norm": 0.25}
    return _recurrent(sizes, units, critic="central", agent_ids=True, **changes)


def _pqn_vdn_rnn(sizes: dict[str, Any], units: int, **changes: Any) -> PQNConfig:
    """JaxMARL's pqn_vdn_rnn with its configuration for MPE."""
    epsilons = {"epsilon": 1.0, "final_epsilon": 0.1, "epsilon_decay": 0.1}
    learning = {"optimizer": "radam", "learning_rate": 5e-4, "max_grad_norm": 1.0, "gamma": 0.9, "q_lambda": 0.3}
    network = {"network": "gru", "hidden_sizes": (units, units, units), "agent_ids": True}
    return PQNConfig.vdn(**{**sizes, **epsilons, **learning, **network, **changes})


def _pqn_vdn_rnn_smax(sizes: dict[str, Any], units: int) -> PQNConfig:
    """JaxMARL's pqn_vdn_rnn with its configuration for SMAX.

    Layers are normalised, where there they are batch-normalised; sequences have no steps of the rollout before.
    """
    changes = {"final_epsilon": 0.01, "learning_rate": 2.5e-4, "gamma": 0.99, "q_lambda": 0.85}
    return _pqn_vdn_rnn(sizes, units, normalize_obs=True, **changes)


PPO = {
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "value_clip": 0.2,
    "value_coefficient": 0.5,
    "entropy_coefficient": 0.01,
    "max_grad_norm": 0.5,
}
SCORES = {"overcooked": "sparse_return", "skirmish": "won"}  # fields of the state at the end of an episode
REWARD_SCALES = {("skirmish", "pqn_vdn_rnn"): 10.0}  # of the published configurations; others 1
SHAPING_STEPS = 2_500_000  # env-steps in which overcooked's shaped rewards fall to 0
CONFIGS = {  # game, algorithm
    ("cartpole", "ppo"): _ppo,
    ("simple_spread", "ppo"): _ppo,
    ("simple_spread", "ppo_rnn"): _ppo_rnn,
    ("simple_spread", "mappo_rnn"): _mappo_rnn,
    ("simple_spread", "pqn_vdn_rnn"): _pqn_vdn_rnn,
    ("overcooked", "ppo_cnn"): _ppo_cnn,
    ("skirmish", "mappo_rnn"): _mappo_rnn_smax,
    ("skirmish", "pqn_vdn_rnn"): _pqn_vdn_rnn_smax,
}


def learn(request: Request, seeds: int) -> tuple[list[float], dict[str, Any]]:
    """Of each seed the mean return of an agent over the last episode of every environment, and facts.

    Raises:
        NonFiniteError: A loss or gradient of a seed became NaN or infinite.
    """
    workload, device = request.workload, torch.device(request.device)
    # The published scripts of PPO let the learning rate fall to 0, that of PQN does not.
    final_rate = None if workload.algorithm == "pqn_vdn_rnn" else 0.0
    options: dict[str, Any] = {"total_steps": workload.env_steps, "final_learning_rate": final_rate}
    trainers = [trainer_of(request, seed, **options) for seed in range(seeds)]
    together, metrics = ParallelTrainers(trainers), list[dict[str, Any]]()
    while trainers[0].iteration < workload.updates:
        metrics = []
        for result in together.train_interval(trainers, log_interval=100):
            if isinstance(result, NonFiniteError):
                raise result
            metrics.append(result)
    (role,) = trainers[0].env.game.layout.present_roles
    return [own[f"return_{role}"] for own in metrics], _facts(device)


def _facts(device: torch.device) -> dict[str, Any]:
    return {"provenance": provenance(device)}
