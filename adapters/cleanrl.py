"""CleanRL: runs the unmodified scripts of its release 1.2.0 on our games.

    python -m gpu_vecenv.adapters.cleanrl ppo_continuous_action_isaacgym.py --env-id pendulum --num-envs 1024
    python -m gpu_vecenv.adapters.cleanrl ppo.py --env-id gpu_vecenv/CartPole-v1

They need gym 0.23. The first expects batches of tensors from Isaac Gym, whose environments reset in the same step: the
autoreset mode is fixed to "same_step". Nothing is copied and no step synchronises with the device. The second uses
single NumPy environments of ``gym.make``. Later releases use ``gymnasium.make`` and need no adapter:
``gpu_vecenv:gpu_vecenv/CartPole-v1``.
"""

from __future__ import annotations

import importlib
import math
import runpy  # noqa: TID251  (runs the script of CleanRL that the caller names)
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv

from gpu_vecenv import GymnasiumEnv, GymnasiumVectorEnv, configure
from gpu_vecenv.adapters import check_argument, checked_vector_env, requires_extra
from gpu_vecenv.errors import ConfigError, refuse_counterparts


class GymEnv:
    """A GymnasiumEnv with the API of gym before 0.26."""

    spec: Any = None
    reward_range = (-math.inf, math.inf)
    _seed: int | None = None

    def __init__(self, env: Any) -> None:
        fits = isinstance(getattr(env, "unwrapped", None), GymnasiumEnv | GymnasiumVectorEnv)
        check_argument("env", env, fits, "a gpu_vecenv.GymnasiumEnv or GymnasiumVectorEnv")
        self.env, self.metadata, self.unwrapped, self._batched = env, env.metadata, self, isinstance(env, VectorEnv)
        single = "single_" if self._batched else ""
        self.observation_space = _of_gym(getattr(env, f"{single}observation_space"))
        self.action_space = _of_gym(getattr(env, f"{single}action_space"))

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed the next ``reset``."""
        self._seed = seed
        return [seed]

    def reset(self, seed: int | None = None) -> Any:
        """Start new episodes; returns observations."""
        seed, self._seed = self._seed if seed is None else seed, None
        return self.env.reset(seed=seed)[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """One step: observation, reward, done and info, with "TimeLimit.truncated" when done."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        done = terminated or truncated
        return obs, reward, done, {**info, "TimeLimit.truncated": truncated} if done else info

    def render(self, mode: str = "rgb_array") -> Any:
        """A frame, (height, width, 3) uint8, of the first environment; None without ``render_mode="rgb_array"``."""
        frames = self.env.render()
        return frames[0] if self._batched and frames is not None else frames

    def close(self) -> None:
        """Free all memory."""
        self.env.close()


class IsaacGymEnv(GymEnv):
    """Implements the part of ``isaacgymenvs.make``'s environment that the script uses.

    Row ``e * num_agents + a`` is agent ``a`` of environment ``e``; ``num_envs`` counts rows; the spaces are those of
    one row. The script's Gaussian policy is unbounded; like Isaac Gym's environments, ours clip its actions. The script
    treats time-outs as terminations. When an agent leaves early, its row is zeros until the environment ends.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="torch"``.
        UnsupportedGameError: Actions are no Box, or masked.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        super().__init__(checked_vector_env(env, "CleanRL's GPU script", kinds=(Box,)))
        self.num_envs, self.device = env.num_envs, env.unwrapped.device

    def reset(self, seed: int | None = None) -> dict[str, torch.Tensor]:
        """Begin new episodes: {"obs": (rows, *shape)}."""
        return {"obs": super().reset(seed)}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One step with actions (rows, *shape) float32 on the device.

        Returns:
            {"obs": (rows, *shape)}, rewards (rows,) float32, dones (rows,) int64, which the script subtracts from 1,
            and infos: "time_outs" (rows,) bool, and the entries of the Gymnasium view such as "final_obs".
        """
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        infos = {**info, "time_outs": truncations & ~terminations}
        return {"obs": obs}, rewards, (terminations | truncations).long(), infos


def _of_gym(space: Any) -> Any:
    """The space as a space of gym, if gym is imported: scripts use isinstance."""
    kind = getattr(sys.modules.get("gym", gymnasium).spaces, type(space).__name__)
    if isinstance(space, Box):
        return kind(space.low, space.high, space.shape, space.dtype.type)
    return kind(space.n if isinstance(space, Discrete) else space.nvec)


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> IsaacGymEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``."""
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: GymnasiumVectorEnv) -> IsaacGymEnv:
    """A Gymnasium view with ``output="torch"`` as the environment of CleanRL's GPU script."""
    return IsaacGymEnv(env)


def run(script: str | Path, *arguments: Any, **config: Any) -> dict[str, Any]:
    """Run a script with its command line in this process, best a separate one; returns its globals such as ``agent``.

    Its import ``isaacgymenvs`` is replaced: ``--env-id`` is a game's name, and ``--num-envs`` counts rows; ConfigError
    unless it is a multiple of the game's agents. The Gymnasium ids of the games are registered with gym. ``config`` is
    the game's configuration.
    """
    check_argument("script", script, isinstance(script, str | Path), "the path of a script of CleanRL")
    if not Path(script).is_file():
        raise FileNotFoundError(f"no script at {script}; expected the path of a script of CleanRL")

    # `rest` are Isaac Gym's window options, and rl_device, which the script sets equal to sim_device.
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
    for spec in list(gymnasium.registry.values()):
        if spec.namespace == "gpu_vecenv":
            kwargs = {**spec.kwargs, **config}
            gym.register(spec.id, entry_point=lambda **given: GymEnv(GymnasiumEnv(**given)), kwargs=kwargs)
    isaacgymenvs: Any = ModuleType("isaacgymenvs")
    isaacgymenvs.make = make_rows
    sys.modules |= {"isaacgym": ModuleType("isaacgym"), "isaacgymenvs": isaacgymenvs}
    sys.argv = [str(script), *map(str, arguments)]
    return runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("expected a script of CleanRL 1.2.0, github.com/vwxyzjn/cleanrl/tree/v1.2.0/cleanrl, and its options")
    run(*sys.argv[1:])
