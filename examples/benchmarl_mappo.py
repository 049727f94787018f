"""BenchMARL's MAPPO on 64 environments of simple_spread."""

import tempfile
import time
from dataclasses import replace

import torch
from benchmarl.algorithms import MappoConfig
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig

from gpu_vecenv.adapters import benchmarl

size = {"on_policy_n_envs_per_worker": 64, "on_policy_collected_frames_per_batch": 64 * 25, "max_n_iters": 30}
learn = {"on_policy_n_minibatch_iters": 8, "lr": 3e-3, "gamma": 0.9, "max_n_frames": None}
quiet = {"loggers": [], "evaluation": False, "save_folder": tempfile.mkdtemp()}
config = replace(ExperimentConfig.get_from_yaml(), **size, **learn, **quiet)
model = replace(MlpConfig.get_from_yaml(), num_cells=[64, 64])
experiment = Experiment(benchmarl.task("simple_spread"), MappoConfig.get_from_yaml(), model, seed=1, config=config)
env = benchmarl.make("simple_spread", num_envs=256)


def mean_return(policy=None) -> float:
    """Of one agent over an episode of 25 steps; without a policy, of random actions."""
    env.set_seed(7)
    with torch.no_grad():
        return env.rollout(25, policy)["next", "agent", "reward"].sum(1).mean().item()


before, start = mean_return(), time.time()
experiment.run()
trained, seconds = mean_return(experiment.policy), time.time() - start
print(f"return of random actions {before:.1f}, after {seconds:.0f} s of training {trained:.1f}")
