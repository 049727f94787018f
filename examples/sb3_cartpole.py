"""Stable-Baselines3's PPO on 64 replicas of cartpole."""

from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

from gpu_vecenv.adapters import sb3

env = sb3.make("cartpole", num_envs=64)
model = PPO("MlpPolicy", env, n_steps=64, batch_size=512, n_epochs=8, learning_rate=1e-3, seed=1, device="cpu")
before, _ = evaluate_policy(model, env, 64, warn=False)
model.learn(60_000)
after, _ = evaluate_policy(model, env, 64, warn=False)
print(f"return before training {before:.0f}, after {after:.0f} (500 at most)")
