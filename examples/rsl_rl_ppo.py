"""rsl_rl's PPO on 128 pendulums."""

import time

import torch
from rsl_rl.runners import OnPolicyRunner

from gpu_vecenv.adapters import rsl_rl

torch.manual_seed(1)
env = rsl_rl.make("pendulum", num_envs=128)
env.reset(seed=1)
net = {"class_name": "MLPModel", "hidden_dims": [64, 64]}
actor, groups = net | {"distribution_cfg": {"class_name": "GaussianDistribution"}}, {"actor": ["policy"]}
ppo = {"class_name": "PPO", "gamma": 0.95, "entropy_coef": 0.0}
config = {"num_steps_per_env": 32, "obs_groups": groups, "actor": actor, "critic": net, "algorithm": ppo}
runner = OnPolicyRunner(env, config, device=str(env.device))
start = time.perf_counter()
runner.learn(50, init_at_random_ep_len=True)
seconds = time.perf_counter() - start


def mean_return(policy):
    """Of one episode, and of 128 pendulums."""
    obs, _ = env.reset(seed=1)
    total = torch.zeros(env.num_envs, device=env.device)
    with torch.inference_mode():
        for _ in range(env.max_episode_length):
            obs, rewards, _, _ = env.step(policy(obs))
            total += rewards
    return total.mean().item()


at_random = mean_return(lambda obs: env.env.sample_actions())
trained = mean_return(runner.get_inference_policy())
print(f"return at random {at_random:.0f}, trained {trained:.0f} (0 at most), after {seconds:.0f} s")
