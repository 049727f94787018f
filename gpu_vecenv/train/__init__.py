"""The trainer: policies, PPO and A2C, rollouts, evaluation, checkpoints, runs, logs and plots."""
