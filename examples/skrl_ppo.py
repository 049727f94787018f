"""skrl's PPO on 128 environments of cartpole."""

import time

from skrl.utils.runner.torch import Runner

from gpu_vecenv import EpisodeLog
from gpu_vecenv.adapters import skrl

env = skrl.make("cartpole", num_envs=128)
net = {"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "elu"}
policy = {"class": "CategoricalMixin", "network": [net], "output": "ACTIONS"}
critic = {"class": "DeterministicMixin", "network": [net], "output": "ONE"}
learner = {"class": "PPO", "rollouts": 32, "learning_epochs": 4, "mini_batches": 4, "time_limit_bootstrap": True}
learner["value_clip"] = 0.0  # values of up to 100, not normalised
config = {"models": {"separate": True, "policy": policy, "value": critic}, "agent": learner, "seed": 1}
config |= {"memory": {"class": "RandomMemory", "memory_size": -1}}
runner = Runner(env, config | {"trainer": {"class": "SequentialTrainer", "timesteps": 1000}})
skrl.with_final_obs(runner.agent)
log = EpisodeLog(env.vec_env)
env.reset()
for _ in range(200):
    env.env.step(env.sample_actions())
at_random, start = log.means()["return_agent"], time.time()
runner.run()
seconds = time.time() - start
log.means()  # of training: what comes after counts
runner.trainer.cfg.timesteps = 1000
runner.run("eval")
trained = log.means()["return_agent"]
print(f"return at random {at_random:.0f}, after {seconds:.0f} s of training {trained:.0f} (500 at most)")
