"""Train one role of a game of tag against a script that plays the other, and compare it with the role's own script.

A script is a policy that does not learn: a module whose logits leave one choice.

    python examples/train_against_script.py --role runner --total-steps 4000000
"""

from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tag_baselines import Actor, flee, play, pursuit

from gpu_vecenv import PolicySpec, PPOConfig, Trainer, VecEnv, configure


class Scripted(torch.nn.Module):
    """What the trainer takes for a network: logits and values of observations (num_envs, n, numbers)."""

    def __init__(self, script: Actor) -> None:
        super().__init__()
        self.script = script

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (num_envs, n, 5), of which one is far above the others; values (num_envs, n), which are not used."""
        choices = torch.arange(5, device=obs.device)
        return 100.0 * (self.script(obs)[..., None] == choices), torch.zeros_like(obs[..., 0])


def main(
    role: Literal["tagger", "runner"] = "runner",
    total_steps: int = 8_000_000,
    num_envs: int = 512,
    device: str | None = None,
    seed: int = 0,
    episodes: int = 1000,
) -> None:
    """Train and compare.

    Args:
        role: Who learns.
        total_steps: Env-steps, all environments together.
        num_envs: Number of environments.
        device: cpu or cuda; by default cuda if usable.
        seed: Of everything.
        episodes: Of each comparison.
    """
    game = configure("tag_gridworld", random_start=True)
    scripts = {"tagger": pursuit(game), "runner": flee(game)}
    other = "runner" if role == "tagger" else "tagger"
    env = VecEnv(game, num_envs, device, autoreset_mode="next_step")
    config = PPOConfig(
        total_steps=total_steps, learning_rate=1e-3, hidden_sizes=(128, 128), final_entropy_coefficient=0.0
    )
    opponent = PolicySpec(network=Scripted(scripts[other]), train=False)
    trainer = Trainer(env, config, seed=seed, policies={role: PolicySpec(), other: opponent})
    trainer.train()
    torch.manual_seed(seed)  # of the policy's draws below
    table = Table("who plays the " + role, "caught", "steps", "return", title=f"against {scripts[other]!r}")
    for name, actor in (("random", None), ("its script", scripts[role]), ("trained", trainer.policies[role].act)):
        found = play(game, {role: actor, other: scripts[other]}, min(episodes, 1000), seed + 1, device, episodes)
        metrics = (
            f"{found['terminated_fraction']:.1%}",
            f"{found['episode_length']:.1f}",
            f"{found[f'return_{role}']:.2f}",
        )
        table.add_row(name, *metrics)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
