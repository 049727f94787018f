"""Domain randomisation: each environment draws its own physics at each reset. What depends on it, and how to pin it.

Whatever varies from environment to environment is a field of the state that ``reset`` writes; the rules are in
domain_randomisation.cu. ``gpu-vecenv train domain_randomisation.py`` trains one policy for all masses.
"""

from dataclasses import dataclass

import numpy as np
import torch
import tyro
from gymnasium.spaces import Discrete

import gpu_vecenv
from gpu_vecenv import Env, Field, VecEnv, param


@dataclass(frozen=True, kw_only=True)
class Cart(Env):
    """A cart of unknown mass is pushed to the middle of its track."""

    low_mass: float = param(0.5, low=1e-3)  # kg; each episode draws a mass between these two
    high_mass: float = param(5.0, low=1e-3)  # kg
    force: float = 1.0  # N, of a push
    track: float = 1.0  # m, the farthest start from the middle
    dt: float = param(0.1, low=1e-6)  # s, of a step
    max_steps: int = param(100, low=1)  # steps until the episode is truncated
    show_mass: bool = False  # True: the mass is part of the observation

    state = (
        Field("mass", np.float32),  # kg
        Field("position", np.float32),  # m
        Field("velocity", np.float32),  # m/s
    )

    def validate(self) -> None:
        """Raise where the range is empty."""
        if self.low_mass > self.high_mass:
            raise ValueError(f"Cart.low_mass = {self.low_mass} exceeds high_mass = {self.high_mass}")

    @property
    def obs_dim(self) -> int:
        """Position, velocity and, if it is shown, mass."""
        return 3 if self.show_mass else 2

    @property
    def action_space(self) -> Discrete:
        """Push to the left, not at all, to the right."""
        return Discrete(3)


def episode(env: VecEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses and returns, both (num_envs,) f32, of one episode in each environment.

    The pushes are those of one rule for all masses: against where the cart will be in a second.
    """
    obs, _ = env.reset(seed=3)
    mass, returns = env.state["mass"].clone(), torch.zeros(env.num_envs, device=env.device)
    for _ in range(env.game.max_steps):
        position, velocity = obs[..., 0], obs[..., 1]
        push = -torch.sign(position + velocity)
        obs, rewards, _, _, _ = env.step((push + 1).int())
        returns += rewards[:, 0]
    return mass, returns


def main(num_envs: int = 3000, device: str | None = None) -> None:
    """Play an episode with random masses, then with pinned ones.

    Args:
        num_envs: Number of environments.
        device: cpu, cuda or cuda:1; by default cuda if usable, else cpu.
    """
    mass, returns = episode(gpu_vecenv.make(Cart, num_envs, device, autoreset_mode="disabled"))
    print(f"{num_envs} environments, {mass.min():.2f} to {mass.max():.2f} kg, mean return {returns.mean():.2f}")
    for name, part in zip(("lightest", "middle", "heaviest"), mass.argsort().tensor_split(3), strict=True):
        print(f"{name} third, {mass[part].mean():.2f} kg on average: {returns[part].mean():.2f}")

    for pinned in (0.5, 5.0):
        # A pool of one saved start; fields that it does not name are still drawn by the game's own reset.
        initial_states = {"mass": np.array([pinned], np.float32)}
        mass, returns = episode(
            gpu_vecenv.make(Cart, num_envs, device, autoreset_mode="disabled", initial_states=initial_states)
        )
        print(f"pinned to {mass.unique().tolist()} kg: {returns.mean():.2f}")


gpu_vecenv.register(Cart)

if __name__ == "__main__":
    tyro.cli(main)
