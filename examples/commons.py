"""Independent PPO in a social dilemma, for one's own reward or for a common one, and what becomes of the commons.

    python examples/commons.py --game harvest --common-reward mean

The four numbers are those of Perolat et al., "A multi-agent reinforcement learning model of common-pool resource
appropriation", 2017: see gpu_vecenv.envs.commons.social_metrics.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Literal

import numpy as np
import tyro

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, VecEnv
from gpu_vecenv.envs.commons import social_metrics
from gpu_vecenv.train.evaluation import Evaluator
from gpu_vecenv.train.policy import Policy


def society(
    game: gpu_vecenv.Env, policy: Policy | None, episodes: int, seed: int, device: str | None
) -> dict[str, float]:
    """Means over one episode of each of so many environments; episodes in which nobody eats have no equality."""
    with closing(VecEnv(game, episodes, device)) as env, closing(Evaluator(env, episodes)) as evaluator:
        evaluator({"player": policy}, episodes, seed=seed)
        counted = {name: evaluator.env.state[name].cpu().numpy() for name in ("eaten", "eaten_at", "steps_out")}
    found = social_metrics(counted, game.max_steps)
    return {name: float(np.nanmean(values)) if np.isfinite(values).any() else np.nan for name, values in found.items()}


def make_trainer(game: gpu_vecenv.Env, total_steps: int, num_envs: int, seed: int, device: str | None) -> Trainer:
    """A trainer of all players, with the preset of the game but for the sizes."""
    preset = {key: value for key, value in game.preset.items() if key not in ("num_envs", "total_steps")}
    return Trainer(VecEnv(game, num_envs, device), PPOConfig(total_steps=total_steps, **preset), seed=seed)


def societies(
    game: gpu_vecenv.Env, players: Mapping[str, Policy | None], episodes: int, seed: int, device: str | None
) -> Iterator[tuple[str, dict[str, float]]]:
    """What a society of each kind of players is like; None is for random ones."""
    for name, policy in players.items():
        yield name, society(game, policy, episodes, seed, device)


def main(
    game: Literal["harvest", "cleanup"] = "harvest",
    common_reward: Literal["none", "mean", "sum"] = "none",
    layout_name: str | None = None,
    num_agents: int = 7,
    max_steps: int = 1000,
    total_steps: int = 5_000_000,
    num_envs: int = 64,
    episodes: int = 32,
    device: str | None = None,
    seed: int = 0,
) -> None:
    """Train one policy for all players, and print what a society of it is like, beside one of random players.

    Args:
        game: Which of the games.
        common_reward: What each player receives in place of its own reward.
        layout_name: The map; by default Melting Pot's.
        num_agents: Players.
        max_steps: Steps of an episode.
        total_steps: Env-steps, all environments together.
        num_envs: Number of environments.
        episodes: Of each measurement.
        device: cpu or cuda; by default cuda if usable.
        seed: Of everything.
    """
    layout = {"layout_name": layout_name} if layout_name else {}
    played = gpu_vecenv.configure(
        game, common_reward=common_reward, num_agents=num_agents, max_steps=max_steps, **layout
    )
    trainer = make_trainer(played, total_steps, num_envs, seed, device)
    trainer.train()
    print(f"{'players':8} {'utility':>8} {'equality':>9} {'sustainability':>15} {'peace':>6}")
    players = {"random": None, "trained": trainer.policies["player"]}
    for name, found in societies(played, players, episodes, seed + 1, device):
        print(
            f"{name:8} {found['utility']:8.3f} {found['equality']:9.3f} {found['sustainability']:15.1f} "
            f"{found['peace']:6.2f}"
        )


if __name__ == "__main__":
    tyro.cli(main)
