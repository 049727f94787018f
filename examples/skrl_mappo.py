"""skrl's MAPPO on 128 environments of simple_spread: policies see what their agents see, critics see everything."""

import time

from skrl.utils.runner.torch import Runner

from gpu_vecenv import EpisodeLog
from gpu_vecenv.adapters import skrl

env = skrl.make("simple_spread", num_envs=128)
net = {"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "elu"}
policy = {"class": "CategoricalMixin", "network": [net], "output": "ACTIONS"}
critic = {"class": "DeterministicMixin", "network": [{**net, "input": "STATES"}], "output": "ONE"}
learner = {"class": "MAPPO", "rollouts": 32, "learning_epochs": 4, "mini_batches": 4, "time_limit_bootstrap": True}
learner["learning_rate_scheduler_kwargs"] = {key: {} for key in env.possible_agents}  # skrl refuses its own default
config = {"models": {"separate": True, "policy": policy, "value": critic}, "agent": learner, "seed": 1}
config |= {"memory": {"class": "RandomMemory", "memory_size": -1}}
runner = Runner(env, config | {"trainer": {"class": "SequentialTrainer", "timesteps": 600}})
skrl.with_final_obs(runner.agent)
log = EpisodeLog(env.vec_env)
env.reset()
for _ in range(50):
    env.env.step(env.sample_actions())
at_random, start = log.means()["return_agent"], time.time()
runner.run()
seconds = time.time() - start
log.means()  # of training: what comes after counts
runner.trainer.cfg.timesteps = 50
runner.run("eval")
print(f"return at random {at_random:.1f}, after {seconds:.0f} s of training {log.means()['return_agent']:.1f}")
