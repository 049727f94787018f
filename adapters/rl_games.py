"""rl_games: each agent of each environment is a row; ``num_actors`` counts environments, "agents" those of one.

rl_games acts next on the observation that ``step`` returns, so the autoreset mode is fixed to "same_step". Tensors stay
on the device and nothing is copied, except action masks, which rl_games accepts only from the host.

rl_games does not use final observations: at a time limit ("time_outs") it bootstraps from the value of the previous
observation. It trains on all rows, including the zeros after an agent left early. Its "rewards" are the returns of
every ``num_agents``-th done row, those of first agents unless some leave early; see ``VecEnv.episode_statistics`` for
all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Tuple, flatten_space
from gymnasium.vector.utils import batch_space

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import check_argument, checked_vector_env, requires_extra
from gpu_vecenv.errors import ConfigError, InvalidSeedError, UnsupportedGameError, refuse_counterparts
from gpu_vecenv.escapes import warn

with requires_extra("rl-games"):
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv


class RLGamesVecEnv(IVecEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of environment ``e``.

    "states", for ``central_value_config``, are the concatenated rows of an environment, padding included. rl_games
    trains a central value on the rewards of the first agents and uses it for all: correct if agents share their reward.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="torch"``.
        UnsupportedGameError: Roles have different action sizes; or action heads of different sizes are masked.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        self.env = checked_vector_env(env, "rl_games", masks=True)
        self.gymnasium_env: GymnasiumVectorEnv = env.unwrapped  # without wrappers
        self._seed: int | None = None
        space = env.single_action_space
        self._shape = (env.num_envs, *(space.shape or ()))
        if isinstance(space, Box) and not space.is_bounded("both"):
            raise ValueError(f"env has actions {space}, to which rl_games cannot scale; expected finite bounds")
        sizes = space.nvec.tolist() if isinstance(space, MultiDiscrete) else []
        if len(set(sizes)) > 1 and self.has_action_masks():
            raise UnsupportedGameError(
                f"rl_games splits action masks into equal parts; the game masks heads of sizes {sizes}. "
                "gpu_vecenv.adapters that support it: torchrl"
            )
        self.action_space = (
            Tuple([Discrete(size) for size in sizes]) if sizes else space
        )  # rl_games' form of MultiDiscrete
        self.observation_space = self.state_space = env.single_observation_space
        if self.gymnasium_env.num_agents > 1:
            self.state_space = flatten_space(batch_space(self.observation_space, self.gymnasium_env.num_agents))

    def reset(self) -> dict[str, torch.Tensor]:
        """Start new episodes, with the seed set by ``seed``: {"obs": (rows, …), "states": (environments, …)}."""
        obs, _ = self.env.reset(seed=self._seed)
        self._seed = None
        return self._named(obs)

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """One step: observations, rewards (rows,) float32, dones (rows,) bool, {"time_outs": (rows,) bool}."""
        # rl_games' players squeeze actions
        obs, rewards, terminations, truncations, _ = self.env.step(actions.reshape(self._shape))
        return self._named(obs), rewards, terminations | truncations, {"time_outs": truncations & ~terminations}

    def get_env_info(self) -> dict[str, Any]:
        """Spaces of a row, "state_space" of an environment, and the number of "agents" of an environment."""
        spaces = {name: getattr(self, name) for name in ("observation_space", "action_space", "state_space")}
        return {**spaces, "agents": self.gymnasium_env.num_agents, "value_size": 1}

    def get_number_of_agents(self) -> int:
        """Number of agents of an environment."""
        return self.gymnasium_env.num_agents

    def has_action_masks(self) -> bool:
        """Whether the game masks actions."""
        return self.gymnasium_env.game.layout.masks_actions

    def get_action_masks(self) -> Any:
        """Valid choices, (rows, num_logits) bool, in NumPy: rl_games does not accept tensors on a GPU."""
        return self.gymnasium_env.action_masks().cpu().numpy()

    has_action_mask, get_action_mask = has_action_masks, get_action_masks  # names used by rl_games' players

    def set_train_info(self, env_frames: int, agent: Any, **kwargs: Any) -> None:
        """Check the configuration of rl_games' agent, which calls this before the first step.

        Raises:
            ConfigError, UnsupportedGameError: Training would silently be wrong.
        """
        if self.has_action_masks() and not agent.use_action_masks:
            raise ConfigError(
                "the game masks actions, but use_action_masks is False in rl_games' config; expected True"
            )
        roles = {role: count for role, count in self.gymnasium_env.game.layout.roles.items() if count}
        if len(roles) > 1 and agent.has_central_value:
            raise UnsupportedGameError(
                "rl_games trains one central value on the rewards of the first agents; the game has roles "
                f"{roles}. Leave central_value_config out; gpu_vecenv.adapters that support it: benchmarl, skrl"
            )

    def get_env_state(self) -> dict[str, Any]:
        """State of all environments for checkpoints, including the random streams."""
        return {"num_envs": self.gymnasium_env.vec_env.num_envs, "state": self.gymnasium_env.vec_env.state_dict()}

    def set_env_state(self, env_state: dict[str, Any] | None) -> None:
        """Restore a checkpoint; with another number of environments it is ignored with a warning."""
        if env_state is not None and env_state["num_envs"] != self.gymnasium_env.vec_env.num_envs:
            found = f"{env_state['num_envs']} environments, expected {self.gymnasium_env.vec_env.num_envs}"
            warn(f"the checkpoint has the state of {found}: not loaded", stacklevel=2)
        elif env_state is not None:
            self.gymnasium_env.vec_env.load_state_dict(env_state["state"])
            self._seed = None  # a pending seed would reset the random streams

    def seed(self, seed: int | None) -> None:
        """Seed the next ``reset``."""
        self._seed = seed

    def close(self) -> None:
        """Free all memory."""
        self.env.close()

    def _named(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"obs": obs, "states": obs.reshape(-1, *(self.state_space.shape or ()))}


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, *, seed: int | None = None, **config: Any) -> RLGamesVecEnv:
    """``num_envs`` environments of a game; ``config`` as for ``GymnasiumVectorEnv``, ``seed`` for ``reset``."""
    is_seed = isinstance(seed, int | np.integer) and not isinstance(seed, bool) and 0 <= seed < 2**64
    check_argument("seed", seed, seed is None or is_seed, "an int in [0, 2**64 - 1] or None", InvalidSeedError)
    env = wrap(GymnasiumVectorEnv(game, num_envs, device, **{"fill_final_obs": False, **config}))
    env.seed(seed)
    return env


def wrap(env: GymnasiumVectorEnv) -> RLGamesVecEnv:
    """A Gymnasium view with ``output="torch"`` as rl_games' IVecEnv."""
    return RLGamesVecEnv(env)


def register(name: str = "gpu_vecenv") -> None:
    """Register ``env_name: gpu_vecenv`` with rl_games' Runner; ``env_config`` holds the arguments of ``make``.

    Training uses ``num_actors`` environments, a player ``num_envs`` (default 1).
    """
    check_argument("name", name, isinstance(name, str), "a str, the env_name of rl_games' configuration")
    vecenv.register(name, lambda _, num_actors, num_envs=None, **config: make(num_envs=num_actors, **config))
    player = {"vecenv_type": name, "env_creator": lambda num_envs=1, **config: make(num_envs=num_envs, **config)}
    env_configurations.register(name, player)
