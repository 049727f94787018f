"""Train on all GPUs of a machine: a process and a shard of the environments for each, gradients averaged.

    torchrun --standalone --nproc-per-node=8 examples/multi_gpu.py --num-envs 8192 --total-steps 50000000

Without a GPU the processes share the CPU; without torchrun there is one. ``gpu-vecenv train`` does the same under
torchrun, and writes curves and checkpoints as well.
"""

from dataclasses import dataclass

import tyro

import gpu_vecenv


@dataclass
class Options:
    """Train a policy for each role of a game, on several GPUs."""

    game: str = "tag_gridworld"
    num_envs: int = 1024  # environments of all processes together
    total_steps: int = 1_000_000  # env-steps of all processes together
    episodes: int = 1000  # of the evaluation
    device: str | None = None  # cpu or cuda; by default cuda if usable


if __name__ == "__main__":
    options = tyro.cli(Options)
    with gpu_vecenv.train.distributed.process_group(options.device) as (world, device):
        share = world.envs_per_process(options.num_envs)
        # Random numbers follow the number of the environment, so no two processes have the same episodes.
        env = gpu_vecenv.make(options.game, share, device, first_env_index=world.rank * share)
        trainer = gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig(total_steps=options.total_steps, learning_rate=1e-3))
        last = trainer.train()  # metrics of all processes; every process has the same weights
        last_index = env.first_env_index + share - 1
        print(f"process {world.rank} of {world.size}: environments {env.first_env_index} to {last_index}")
        if world.rank == 0:
            found = trainer.evaluate(options.episodes)
            returns = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if name.startswith("return_"))
            print(f"{last['env_steps']:,.0f} env-steps by {world.size} processes; {returns}")
