"""MAPPO from TorchRL's parts, on 64 environments of simple_spread: agents share a policy, the critic sees all of them.

TorchRL leaves networks, loss and loop to its users: that is why this takes more lines than the examples of others.
"""

import time

import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from gpu_vecenv.adapters import torchrl

torch.manual_seed(1)
env = torchrl.make("simple_spread", num_envs=64)
env.set_seed(1)
test_env = torchrl.make("simple_spread", num_envs=256)
see, score, act, value, log_prob = (("agent", key) for key in ("observation", "logits", "action", "value", "log_prob"))
like = {"n_agents": 3, "share_params": True, "num_cells": [64, 64], "device": env.device}
actor = TensorDictModule(MultiAgentMLP(18, 5, centralised=False, **like), [see], [score])
sampled = {"distribution_class": Categorical, "return_log_prob": True, "log_prob_key": log_prob}
policy = ProbabilisticActor(actor, [score], [act], **sampled)
critic = TensorDictModule(MultiAgentMLP(18, 1, centralised=True, **like), [see], [value])
loss = ClipPPOLoss(policy, critic)
loss.set_keys(action=act, value=value, sample_log_prob=log_prob)
loss.set_keys(**{key: ("agent", key) for key in ("reward", "done", "terminated")})
loss.make_value_estimator(ValueEstimators.GAE, gamma=0.95, lmbda=0.9, average_gae=True)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)


def mean_return(policy=None) -> float:
    """Of one agent over an episode of 25 steps; without a policy, of random actions."""
    test_env.set_seed(7)
    with torch.no_grad():
        return test_env.rollout(25, policy)["next", "agent", "reward"].sum(1).mean().item()


before, start = mean_return(), time.time()
for batch in Collector(env, policy, device=env.device, frames_per_batch=64 * 25, total_frames=64 * 25 * 30):
    with torch.no_grad():
        loss.value_estimator(batch, params=loss.critic_network_params, target_params=loss.target_critic_network_params)
    rows = batch.reshape(-1)
    for _ in range(8):
        for part in torch.randperm(len(rows), device=env.device).split(400):
            losses = loss(rows[part])
            optimizer.zero_grad()
            sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
            optimizer.step()
trained, seconds = mean_return(policy), time.time() - start
print(f"return of random actions {before:.1f}, after {seconds:.0f} s of training {trained:.1f}")
