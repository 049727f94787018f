"""Stable-Baselines3's PPO on 64 environments of cartpole."""

import time

from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

from gpu_vecenv.adapters import sb3

env = sb3.make("cartpole", num_envs=64)
model = PPO("MlpPolicy", env, n_steps=64, batch_size=512, n_epochs=8, learning_rate=1e-3, seed=1, device="cpu")
at_random, _ = evaluate_policy(model, env, 64, deterministic=False)  # a new policy's choices are all but random
start = time.perf_counter()
model.learn(60_000)
seconds = time.perf_counter() - start
trained, _ = evaluate_policy(model, env, 64)
print(f"return at random {at_random:.0f}, trained {trained:.0f} (500 at most), after {seconds:.0f} s")
