"""A small game, policy and PPO configuration that several tests train, evaluate and record."""

import torch
from torch import nn

import gpu_vecenv
from gpu_vecenv.train.policy import Policy, default_network
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.role_view import RoleView

# Runners leave one by one, so that some agents are inactive in running episodes; two action heads.
LEAVING = {"num_taggers": 3, "num_runners": 4, "side": 3.0, "tagging_distance": 0.2, "max_steps": 13}
LEAVING |= {"num_neighbors": 2, "acceleration_levels": 3, "turn_levels": 4}
SMALL = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=4, hidden_sizes=(16,))


def leaving(device, num_envs=6, **arguments):
    arguments = {"autoreset_mode": "next_step", **arguments}
    return gpu_vecenv.make("tag_continuous", num_envs, device, **arguments, **LEAVING)


def policy_of(env, *roles, seed=0, **settings):
    """A policy whose choices are far from even."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = default_network(RoleView(env.game, roles), (8,))
        for p in network.parameters():
            nn.init.normal_(p)
    return Policy(env.game, roles, network, device=env.device, **settings)
