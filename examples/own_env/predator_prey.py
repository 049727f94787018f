"""Predators and prey on a torus, which die and are born again. The rules are in predator_prey.cu.

``gpu-vecenv train predator_prey.py`` trains it, ``python predator_prey.py`` steps it with random actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gymnasium.spaces import Discrete

import gpu_vecenv
from gpu_vecenv.declare.env import Env, Field, boolean, i32, param
from gpu_vecenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PredatorPrey(Env):
    """Predators eat or starve; prey are eaten and, after a while, born again."""

    num_predators: int = param(4, low=1, high=255)  # agents that hunt
    num_prey: int = param(12, low=1, high=255)  # agents that flee
    grid: int = param(12, low=1, high=1024)  # cells per side; the torus has no edge
    sight: int = param(2, low=0)  # cells that an agent observes in each direction
    hunger: int = param(25, low=1, high=1_000_000)  # steps that a full predator lives without eating
    meal: int = param(12, low=0, high=1_000_000)  # steps of energy per prey, up to hunger
    rebirth: int = param(10, low=0)  # steps until an eaten prey is born again; 0: never
    max_steps: int = param(200, low=1)  # steps until the episode is truncated
    meal_reward: float = 1.0  # to a predator for each prey that it eats
    starving_penalty: float = 1.0  # subtracted from a predator that starves
    eaten_penalty: float = 1.0  # subtracted from a prey that is eaten
    living_reward: float = 0.01  # to a prey for each step that it survives

    state = (
        Field("cell", i32, ("num_agents", 2)),  # row, column, in [0, grid)
        Field("alive", boolean, ("num_agents",)),  # on the torus
        Field("energy", i32, ("num_predators",)),  # steps that a predator can still live without eating
        Field("unborn", i32, ("num_prey",)),  # steps until a prey is born again; 0 while it lives or if it never is
    )
    derived = ("view",)  # VIEW in the device code, like every configuration value
    termination_label = "one side died out"

    def validate(self) -> None:
        """A window wider than the torus would show cells twice."""
        if 2 * self.sight + 1 > self.grid:
            raise ConfigError(f"PredatorPrey.sight = {self.sight} sees {2 * self.sight + 1} cells of {self.grid}")

    @property
    def view(self) -> int:
        """Cells in an observation."""
        return (2 * self.sight + 1) ** 2

    @property
    def roles(self) -> Mapping[str, int]:
        """Predators first."""
        return {"predator": self.num_predators, "prey": self.num_prey}

    @property
    def obs_dim(self) -> Mapping[str, int]:
        """Other predators and other prey in each observed cell; for predators also the own energy."""
        return {"predator": 2 * self.view + 1, "prey": 2 * self.view}

    @property
    def action_space(self) -> Discrete:
        """Stay, row + 1, row - 1, column + 1, column - 1."""
        return Discrete(5)


gpu_vecenv.register(PredatorPrey)

if __name__ == "__main__":
    env = gpu_vecenv.make("predator_prey", num_envs=100)
    env.reset(seed=1)
    for _ in range(400):
        env.step(env.sample_actions())
    ended = {name: tensor.sum().item() for name, tensor in env.episode_statistics().items()}
    print(f"{ended['episodes']} episodes of {ended['lengths'] / ended['episodes']:.1f} steps by random actions")
    print(f"{env.game.termination_label} in {ended['terminations'] / ended['episodes']:.1%} of them")
