"""Our side of each workload."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.workload import Peer, Prepared, Request
from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.engine.timing import captured, provenance, synchronize
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

PEER = Peer("gpu_vecenv", ("torch", "numpy"), ())


def prepare(request: Request) -> Prepared:
    """The side of gpu_vecenv."""
    return _simulation(request) if request.workload.kind == "simulation" else _training(request)


def _simulation(request: Request) -> Prepared:
    """Random actions drawn in each step, environments reset automatically; on a GPU all steps are in one graph."""
    workload, device = request.workload, torch.device(request.device)
    env = VecEnv(configure(workload.game, **workload.config), workload.num_envs, device)
    buffers = env.step_buffers()
    env.reset(seed=1, out=buffers)
    sampler = Sampler(env)
    parameters = torch.zeros((env.num_envs, env.num_agents, sampler.num_parameters), device=device)
    sample = dataclasses.replace(sampler.sample(parameters), entropies=None)

    def steps() -> None:
        for _ in range(workload.num_steps):
            sampler.step(parameters, sample=sample, out=buffers)

    repeat = captured(steps, device)

    def run() -> None:
        repeat()
        synchronize(device)

    return Prepared(run, env.num_agents, _facts(device))


def _training(request: Request) -> Prepared:
    """Iterations of the trainer with the hyperparameters that PureJaxRL publishes, at a constant learning rate."""
    workload, device = request.workload, torch.device(request.device)
    game = configure(workload.game, **workload.config)
    config = PPOConfig(
        total_steps=10**12,
        num_steps=workload.num_steps,
        num_epochs=workload.num_epochs,
        num_minibatches=workload.num_minibatches,
        hidden_sizes=(workload.hidden_size, workload.hidden_size),
        shared_trunk=False,
        activation="tanh",
        learning_rate=2.5e-4,
        final_learning_rate=None,
        gamma=0.99,
        gae_lambda=0.95,
        clip=0.2,
        value_clip=0.2,
        entropy_coefficient=0.01,
        max_grad_norm=0.5,
        precision=request.precision,
    )
    roles = "+".join(game.layout.present_roles)
    trainer = Trainer(VecEnv(game, workload.num_envs, device), config, policies={roles: PolicySpec()})

    def run() -> None:
        for _ in range(workload.updates):
            trainer.train_iteration()
        synchronize(device)

    return Prepared(run, game.num_agents, _facts(device))


def _facts(device: torch.device) -> dict[str, Any]:
    return {"provenance": provenance(device)}
