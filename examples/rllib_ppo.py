"""RLlib's PPO on 64 environments of a small tag_gridworld: 3 agents each, 192 rows that share one policy."""

import time

from ray.rllib.algorithms.ppo import PPOConfig

from gpu_vecenv.adapters import rllib

config = rllib.shared_policy(PPOConfig(), "tag_gridworld", num_envs=64, grid=8, max_steps=50, num_taggers=2)
config.env_runners(num_env_runners=0)  # in this process; with more, each has 64 environments in a process of its own
config.training(train_batch_size_per_learner=8192, minibatch_size=1024, num_epochs=6, lr=1e-3, lambda_=0.95)
algo = config.debugging(seed=1).build_algo()


def mean_return(**how: bool) -> float:
    """Of 384 rows' episodes."""
    episodes = algo.env_runner.sample(num_episodes=384, **how)
    return sum(episode.get_return() for episode in episodes) / len(episodes)


at_random, start = mean_return(random_actions=True), time.time()
for _ in range(8):
    algo.train()
trained, seconds = mean_return(), time.time() - start
print(f"mean return of a row {at_random:.2f} at random, {trained:.2f} after {seconds:.0f} s of training")
algo.stop()
