"""rl_games' PPO on 64 envs of cartpole; what ``params`` holds may as well be a YAML file for rl_games' runner."""

import time

from rl_games.common.algo_observer import DefaultAlgoObserver
from rl_games.torch_runner import Runner

import gpu_vecenv
from gpu_vecenv.adapters import rl_games

rl_games.register()
config = {"name": "cartpole", "env_name": "gpu_vecenv", "env_config": {"game": "cartpole", "device": "cpu"}}
config |= {"device": "cpu", "num_actors": 64, "horizon_length": 32, "minibatch_size": 512, "mini_epochs": 4}
config |= {"learning_rate": 1e-3, "lr_schedule": None, "gamma": 0.99, "tau": 0.95, "e_clip": 0.2, "entropy_coef": 0.0}
config |= {"normalize_input": True, "normalize_advantage": True, "clip_value": True, "critic_coef": 1, "grad_norm": 1.0}
config |= {"reward_shaper": {"scale_value": 0.1}, "max_epochs": 25, "torch_compile": False}  # compiling takes longer
mlp = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
params = {"seed": 1, "torch_threads": 1, "algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}}
params["network"] = {"name": "actor_critic", "separate": True, "space": {"discrete": None}, "mlp": mlp}
runner = Runner(observer := DefaultAlgoObserver())
runner.load({"params": params | {"config": config}})

env = gpu_vecenv.make("cartpole", 64, "cpu")
env.reset(seed=1)
for _ in range(200):
    env.step(env.sample_actions())
done = env.episode_statistics()
at_random = (done["returns"].sum() / done["episodes"].sum()).item()
start = time.perf_counter()
runner.run({"train": True})
trained, seconds = observer.algo.game_rewards.get_mean()[0], time.perf_counter() - start
print(f"return at random {at_random:.0f}, of the last 100 episodes {trained:.0f}, {seconds:.0f} s")
