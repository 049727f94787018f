"""Tianshou's PPO on 64 environments of cartpole."""

import time

import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from gpu_vecenv.adapters import tianshou

torch.manual_seed(1)
env, test_env = tianshou.make("cartpole", num_envs=64), tianshou.make("cartpole", num_envs=64)
env.seed(1), test_env.seed(2)
actor = DiscreteActor(preprocess_net=Net(state_shape=4, hidden_sizes=[64, 64]), action_shape=2, softmax_output=False)
critic = DiscreteCritic(preprocess_net=Net(state_shape=4, hidden_sizes=[64, 64]))
policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space[0])
ppo = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=1e-3))
collector, test = Collector(ppo, env, VectorReplayBuffer(64 * 64, 64)), Collector(ppo, test_env)
steps = {"epoch_num_steps": 20_000, "collection_step_num_env_steps": 64 * 64, "update_step_num_repetitions": 8}
params = OnPolicyTrainerParams(training_collector=collector, batch_size=512, max_epochs=3, **steps)
test.reset()
at_random, start = test.collect(n_episode=64, random=True).returns.mean(), time.perf_counter()
ppo.run_training(params)
seconds = time.perf_counter() - start
trained = test.collect(n_episode=64).returns.mean()
print(f"return at random {at_random:.0f}, trained {trained:.0f} (500 at most), after {seconds:.0f} s")
