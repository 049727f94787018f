"""CleanRL's ppo_continuous_action_isaacgym.py, unchanged, on 32 pendulums; its file is the argument.

github.com/vwxyzjn/cleanrl/blob/v1.2.0/cleanrl/ppo_continuous_action_isaacgym/ppo_continuous_action_isaacgym.py
"""

import sys
import time

import torch

from gpu_vecenv.adapters import cleanrl

if not sys.argv[1:]:
    sys.exit(__doc__)
options = "--env-id pendulum --num-envs 32 --num-steps 33 --total-timesteps 60000 --learning-rate 1e-3 --gamma 0.95"
options += " --num-minibatches 4 --update-epochs 8 --vf-coef 0.02"
start = time.perf_counter()
agent = cleanrl.run(sys.argv[1], *options.split())["agent"]
seconds = time.perf_counter() - start


def mean_return(policy):
    """Of one episode, and of 128 pendulums."""
    envs.seed(1)
    obs, total = envs.reset(), 0
    for _ in range(200):
        obs, rewards, _, _ = envs.step(policy(obs["obs"]))
        total += rewards
    return total.mean().item()


with torch.no_grad():
    envs = cleanrl.make("pendulum", 128, next(agent.parameters()).device)
    at_random, trained = mean_return(lambda obs: envs.env.sample_actions()), mean_return(agent.actor_mean)
print(f"return at random {at_random:.0f}, trained {trained:.0f} (0 at most), after {seconds:.0f} s")
