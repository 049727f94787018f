"""PufferLib's PPO on 64 environments of cartpole, below its dashboard what it reached."""

import tempfile

import numpy as np
import pufferlib.models
import pufferlib.vector
import torch
from pufferlib.pufferl import PuffeRL

from gpu_vecenv.adapters import pufferlib as adapter

config = {"env": "cartpole", "seed": 1, "device": "cpu", "torch_deterministic": True, "cpu_offload": False}
config |= {"total_timesteps": 100_000, "batch_size": "auto", "bptt_horizon": 32, "minibatch_size": 512}
config |= {"max_minibatch_size": 512, "update_epochs": 8, "use_rnn": False, "compile": False, "precision": "float32"}
config |= {"optimizer": "adam", "learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
config |= {"anneal_lr": False, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": 0.0}
config |= {"vf_clip_coef": 10.0, "max_grad_norm": 0.5, "prio_alpha": 0.0, "prio_beta0": 1.0, "vtrace_rho_clip": 1.0}
config |= {"vtrace_c_clip": 1.0, "checkpoint_interval": 1_000, "data_dir": tempfile.mkdtemp()}
torch.manual_seed(1)
env = pufferlib.vector.make(adapter.make, env_args=["cartpole", 64])  # PufferLib's native backend
trainer = PuffeRL(config, env, pufferlib.models.Default(env, hidden_size=64))
returns = []
while trainer.global_step < config["total_timesteps"]:
    returns.append(np.mean(trainer.evaluate()["episode_return"]))
    trainer.stats.clear()
    trainer.train()
trainer.close()
print(f"return at random {returns[0]:.0f}, of the last rollouts {np.mean(returns[-5:]):.0f} (500 at most)")
