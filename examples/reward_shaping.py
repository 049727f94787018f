"""Train a car in a valley with a reward shaped in Python, and measure it by the game's own.

The game pays 100 at the flag and takes a little for each use of the motor: nothing says that swinging helps. The
function adds what a step gains in energy. Added as a difference of potentials (Ng, Harada and Russell, "Policy
invariance under reward transformations", 1999), it leaves the best policy as it is.

    python examples/reward_shaping.py
    gpu-vecenv train continuous_mountain_car --reward examples/reward_shaping.py:shaped
"""

import torch
import tyro

from gpu_vecenv import PPOConfig, Trainer, Transition, make

GAMMA = 0.99
SCALE = 1e5  # brings the energies, of 0.001, to the size of the reward at the flag


def energy(obs: torch.Tensor) -> torch.Tensor:
    """Energy of the car, (E, A), of positions and velocities (E, A, 2)."""
    position, velocity = obs.unbind(-1)
    return velocity.square() / 2 + 0.0025 / 3 * torch.sin(3 * position)


def shaped(t: Transition) -> torch.Tensor:
    """The game's rewards and the discounted gain in energy, (E, A) float32; a terminal state has potential 0."""
    after = torch.where(t.terminations, 0.0, energy(t.next_obs))
    return t.rewards + SCALE * (GAMMA * after - energy(t.obs))


def main(
    total_steps: int = 50_000, num_envs: int = 64, device: str | None = None, seed: int = 0, episodes: int = 200
) -> None:
    """Train with and without the function, and print the returns of the game.

    Args:
        total_steps: Env-steps of each training, all environments together.
        num_envs: Number of environments.
        device: cpu or cuda; by default cuda if usable.
        seed: Of everything.
        episodes: Of each evaluation.
    """
    config = PPOConfig(
        total_steps=total_steps,
        num_steps=128,
        gamma=GAMMA,
        learning_rate=1e-3,
        entropy_coefficient=0.0,
        normalize_obs=True,
        normalize_returns=True,
    )
    for name, reward in (("the game's rewards", None), ("shaped rewards", shaped)):
        trainer = Trainer(make("continuous_mountain_car", num_envs, device), config, seed=seed, reward=reward)
        trainer.train()
        metrics = trainer.evaluate(episodes)
        print(f"{name}: return {metrics['return_agent']:.1f}, {metrics['terminated_fraction']:.1%} reach the flag")


if __name__ == "__main__":
    tyro.cli(main)
