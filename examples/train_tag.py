"""Train tag_gridworld from Python; ``gpu-vecenv train tag_gridworld`` does this and writes curves as well."""

from dataclasses import dataclass
from pathlib import Path

import tyro

import gpu_vecenv


@dataclass
class Options:
    """Train a policy for the taggers and one for the runner; evaluate the taggers against a runner acting at random."""

    total_steps: int = 200_000  # env-steps, all environments together
    num_envs: int = 512  # environments
    episodes: int = 1000  # of each evaluation
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    out: Path = Path("tag.safetensors")  # checkpoint, for gpu_vecenv.load_policy or to go on from


if __name__ == "__main__":
    options = tyro.cli(Options)
    env = gpu_vecenv.make("tag_gridworld", options.num_envs, options.device)
    trainer = gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig(total_steps=options.total_steps))
    before = trainer.evaluate(options.episodes, random_roles=["tagger", "runner"])["terminated_fraction"]
    last = trainer.train()
    after = trainer.evaluate(options.episodes, random_roles=["runner"])["terminated_fraction"]
    print(f"{last['env_steps']:,.0f} env-steps; runner caught: {before:.1%} by random, {after:.1%} by trained taggers")
    print(f"checkpoint: {trainer.save(options.out).resolve()}")
