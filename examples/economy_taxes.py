"""Taxes that are learnt, against a free market, the US federal income tax and Saez's formula: productivity, equality.

    python examples/economy_taxes.py --total-steps 50000000

Trains workers and planner by the two phases of Zheng et al., "The AI Economist", 2022, as a curriculum, and measures
each tax policy with these workers. To compare policies fairly, train workers under each: --tax-model.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Literal, get_args

import tyro

import gpu_vecenv
from gpu_vecenv import Curriculum, GamePolicy, PiecewiseLinear, PPOConfig, Trainer
from gpu_vecenv.train.evaluation import Evaluator

TaxModel = Literal["planner", "free_market", "us_federal", "saez"]


def measured(
    policy: GamePolicy | None, game: gpu_vecenv.Env, episodes: int, seed: int, device: str | None
) -> list[float]:
    """Means of productivity, equality and their product at the end of one episode of each environment.

    Rates by Saez's formula are random until enough incomes have been observed, in episodes that do not count.
    """
    incomes = game.num_workers * (game.max_steps // game.period)
    before = -(-game.saez_buffer_size // incomes) if game.tax_model == "saez" else 0
    with closing(gpu_vecenv.VecEnv(game, episodes, device)) as env, closing(Evaluator(env, episodes)) as evaluator:
        actors = {role: policy[role] if policy else None for role in game.roles}
        found = evaluator.of_each_episode(actors, (before + 1) * episodes, seed=seed)
    productivity, equality = (found[f"state_{name}"][-episodes:] for name in ("productivity", "equality"))
    return [value.mean().item() for value in (productivity, equality, productivity * equality)]


def make_trainer(
    tax_model: TaxModel, total_steps: int, num_envs: int, num_steps: int, seed: int, device: str | None, **sizes: int
) -> Trainer:
    """A trainer of workers and planner by the two phases; ``sizes`` are parameters of the game."""
    ranges = {"energy_cost": (0, 0.5), "tax_limit": (0, 1)}
    env = gpu_vecenv.make("economy", num_envs, device, tax_model=tax_model, randomize=ranges, **sizes)
    phases = {
        "energy_cost": PiecewiseLinear([(0, (0, 0)), (0.3, (0.21, 0.21))]),
        "tax_limit": PiecewiseLinear([(0.5, (0.1, 0.1)), (0.8, (1, 1))]),
    }
    preset = {key: value for key, value in env.game.preset.items() if key != "num_envs"}
    config = PPOConfig(**{**preset, "total_steps": total_steps, "num_steps": num_steps})
    return Trainer(env, config, curriculum=Curriculum(randomize=phases), seed=seed)


def economies(
    workers: Mapping[str, GamePolicy | None], episodes: int, seed: int, device: str | None, **sizes: int
) -> Iterator[tuple[str, str, list[float]]]:
    """Taxes, workers and what is measured of them: each tax policy with each kind of workers; None for random ones."""
    for model in get_args(TaxModel):
        game = gpu_vecenv.configure("economy", tax_model=model, **sizes)
        for name, policy in workers.items():
            yield model, name, measured(policy, game, episodes, seed, device)


def main(
    tax_model: TaxModel = "planner",
    total_steps: int = 50_000_000,
    num_envs: int = 64,
    num_steps: int = 200,
    max_steps: int = 1000,
    period: int = 100,
    saez_buffer_size: int = 500,
    episodes: int = 32,
    device: str | None = None,
    seed: int = 0,
) -> None:
    """Train under one tax policy, and print what the economy is like under each.

    Args:
        tax_model: Under which workers are trained.
        total_steps: Env-steps, all environments together.
        num_envs: Number of environments.
        num_steps: Of each environment between two updates.
        max_steps: Steps of an episode.
        period: Steps from one tax day to the next.
        saez_buffer_size: Latest incomes that Saez's formula is applied to.
        episodes: Of each measurement.
        device: cpu or cuda; by default cuda if usable.
        seed: Of everything.
    """
    sizes = {"max_steps": max_steps, "period": period, "saez_buffer_size": saez_buffer_size}
    trainer = make_trainer(tax_model, total_steps, num_envs, num_steps, seed, device, **sizes)
    trainer.train()
    kinds = {"random": None, "trained": GamePolicy(trainer.env.game, trainer.policies)}
    print(f"{'taxes':14} {'workers':8} {'productivity':>12} {'equality':>9} {'product':>9}")
    for model, workers, found in economies(kinds, episodes, seed + 1, device, **sizes):
        print(f"{model:14} {workers:8} {found[0]:12.1f} {found[1]:9.3f} {found[2]:9.1f}")


if __name__ == "__main__":
    tyro.cli(main)
