"""CleanRL, which is scripts and no library: those of its release 1.2.0 run unchanged on our games.

    python -m gpu_vecenv.adapters.cleanrl ppo_continuous_action_isaacgym.py --env-id pendulum --num-envs 1024
    python -m gpu_vecenv.adapters.cleanrl ppo.py --env-id gpu_vecenv/CartPole-v1

They want gym 0.23. The first takes batches of tensors from Isaac Gym, whose environments reset in the same step: this
adapter fixes "same_step". Nothing is copied and no step waits for the device. The second takes single environments, in
NumPy, from ``gym.make``; later releases from Gymnasium's, without adapter: ``gpu_vecenv:gpu_vecenv/CartPole-v1``.
"""

from __future__ import annotations

import importlib
import math
import runpy  # noqa: TID251  (runs the script of CleanRL that the caller names)
import sys
from types import ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv

from gpu_vecenv import GymnasiumEnv, GymnasiumVectorEnv, configure
from gpu_vecenv.adapters import ActionClip, checked_vector_env, requires_extra
from gpu_vecenv.errors import ConfigError


class GymEnv:
    """A GymnasiumEnv as gym before 0.26 has it."""

    spec: Any = None
    reward_range = (-math.inf, math.inf)
    _seed: int | None = None

    def __init__(self, env: Any) -> None:
        self.env, self.metadata, self.unwrapped, self._batched = env, env.metadata, self, isinstance(env, VectorEnv)
        single = "single_" if self._batched else ""
        self.observation_space = _of_gym(getattr(env, f"{single}observation_space"))
        self.action_space = _of_gym(getattr(env, f"{single}action_space"))

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed the next ``reset``."""
        self._seed = seed
        return [seed]

    def reset(self, seed: int | None = None) -> Any:
        """Observations of new episodes."""
        seed, self._seed = self._seed if seed is None else seed, None
        return self.env.reset(seed=seed)[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """One step: observation, reward, done and info, which at an end has "TimeLimit.truncated"."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        done = terminated or truncated
        return obs, reward, done, {**info, "TimeLimit.truncated": truncated} if done else info

    def render(self, mode: str = "rgb_array") -> Any:
        """A frame, (height, width, 3) uint8, of the first replica; None without ``render_mode="rgb_array"``."""
        frames = self.env.render()
        return frames[0] if self._batched and frames is not None else frames

    def close(self) -> None:
        """Let go of all memory."""
        self.env.close()


class IsaacGymEnv(GymEnv):
    """What ``isaacgymenvs.make`` gives, as the script uses it. Row ``e * num_agents + a``: agent ``a``, replica ``e``.

    ``num_envs`` counts rows; the spaces are one row's. The script's Gaussian has no bounds and Isaac Gym's environments
    clip: actions are clipped to the game's Box here, on the device. The script knows no time-outs: every end is a
    termination. Where an agent leaves early, an episode of zeros follows in its row, until its replica ends.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="torch"``.
        UnsupportedGameError: Actions are no Box, or masked.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        super().__init__(checked_vector_env(env, "CleanRL's GPU script", kinds=(Box,)))
        self.num_envs, self.device = env.num_envs, env.unwrapped.device
        self._clip = ActionClip(env.single_action_space, self.device)

    def reset(self, seed: int | None = None) -> dict[str, torch.Tensor]:
        """Begin new episodes: {"obs": (rows, *shape)}."""
        return {"obs": super().reset(seed)}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One step, of actions (rows, *shape) float32 on the device.

        Returns:
            {"obs": (rows, *shape)}, rewards (rows,) float32, dones (rows,) int64, which the script subtracts from 1,
            and infos: "time_outs" (rows,) bool, and what the Gymnasium view has, "final_obs" for instance.
        """
        obs, rewards, terminations, truncations, info = self.env.step(self._clip(actions))
        infos = {**info, "time_outs": truncations & ~terminations}
        return {"obs": obs}, rewards, (terminations | truncations).long(), infos


def _of_gym(space: Any) -> Any:
    """A space as one of gym's, if that has been imported: scripts ask whether it is."""
    kind = getattr(sys.modules.get("gym", gymnasium).spaces, type(space).__name__)
    if isinstance(space, Box):
        return kind(space.low, space.high, space.shape, space.dtype.type)
    return kind(space.n if isinstance(space, Discrete) else space.nvec)


def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> IsaacGymEnv:
    """``num_envs`` replicas of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: GymnasiumVectorEnv) -> IsaacGymEnv:
    """A Gymnasium view with ``output="torch"`` as the environment of CleanRL's GPU script."""
    return IsaacGymEnv(env)


def run(script: str, *arguments: Any, **config: Any) -> dict[str, Any]:
    """Run a script with its command line; returns its globals, ``agent`` among them. Give it a process of its own.

    What it imports as ``isaacgymenvs`` finds games by name and counts rows: ConfigError if ``--num-envs`` is no
    multiple of the game's agents. ``gym.make`` knows the ids that Gymnasium knows. ``config`` is the game's.
    """

    # `rest` is about Isaac Gym's windows, and rl_device, for which the script has no other value than sim_device's.
    def make_rows(seed: int, task: str, num_envs: int, sim_device: str, **rest: Any) -> IsaacGymEnv:
        game, mode = configure(task, **config), "rgb_array" if rest.get("virtual_screen_capture") else None
        if num_envs % game.layout.num_agents:
            raise ConfigError(
                f"--num-envs is {num_envs}; expected a multiple of {task}'s {game.layout.num_agents} agents"
            )
        envs = make(game, num_envs // game.layout.num_agents, sim_device, render_mode=mode)
        envs.seed(seed)
        return envs

    with requires_extra("cleanrl"):
        gym = importlib.import_module("gym")
    for known in list(gymnasium.registry.values()):
        if known.namespace == "gpu_vecenv":
            kwargs = {**known.kwargs, **config}
            gym.register(known.id, entry_point=lambda **given: GymEnv(GymnasiumEnv(**given)), kwargs=kwargs)
    isaacgymenvs: Any = ModuleType("isaacgymenvs")
    isaacgymenvs.make = make_rows
    sys.modules |= {"isaacgym": ModuleType("isaacgym"), "isaacgymenvs": isaacgymenvs}
    sys.argv = [script, *map(str, arguments)]
    return runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("expected a script of CleanRL 1.2.0, github.com/vwxyzjn/cleanrl/tree/v1.2.0/cleanrl, and its options")
    run(*sys.argv[1:])
