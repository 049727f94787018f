"""tag_continuous, 5 taggers and 100 runners with a policy for each role, trained by PyTorch Lightning's Trainer.

Everything in the folder ``out`` is Lightning's: ``metrics.csv``, and checkpoints for ``--resume``.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from gpu_vecenv import PPOConfig
from gpu_vecenv.adapters import lightning


@dataclass
class Options:
    """Train taggers and runners; evaluate who is trained against who acts at random."""

    num_envs: int = 100  # environments
    iterations: int = 200  # rollouts of num_steps steps, each with an update
    num_steps: int = 32  # steps
    max_steps: int = 500  # steps of an episode
    episodes: int = 200  # of each evaluation
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    out: Path = Path("lightning_tag")  # folder for metrics and checkpoints
    resume: Path | None = None  # checkpoint to go on from


if __name__ == "__main__":
    options = tyro.cli(Options)
    total_steps = options.iterations * options.num_steps * options.num_envs
    config = PPOConfig(num_steps=options.num_steps, total_steps=total_steps, learning_rate=1e-3)
    game = {"num_taggers": 5, "num_runners": 100, "max_steps": options.max_steps}
    module = lightning.make("tag_continuous", options.num_envs, options.device, config, seed=1, **game)
    device = module.inner.env.device
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index] if device.type == "cuda" else 1,
        max_epochs=-1,  # total_steps ends the run
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[ModelCheckpoint(options.out / "checkpoints", save_last=True)],
    )

    def returns(*at_random: str) -> str:
        """What a tagger and a runner get in an episode, where these roles act at random."""
        metrics = module.inner.evaluate(options.episodes, random_roles=at_random)
        return f"tagger {metrics['return_tagger']:.2f}, runner {metrics['return_runner']:.2f}"

    print(f"returns, all random: {returns('tagger', 'runner')}")
    trainer.fit(module, ckpt_path=options.resume)
    print(f"returns, taggers trained, runners random: {returns('runner')}")
    print(f"returns, runners trained, taggers random: {returns('tagger')}")
    print(f"returns, all trained: {returns()}")
