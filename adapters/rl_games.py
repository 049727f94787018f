"""rl_games: every agent of every replica is a row; ``num_actors`` counts replicas, rl_games' "agents" those of one.

rl_games goes on from the observation that ``step`` returns, so this adapter fixes "same_step". Tensors stay on the
device and nothing is copied, but for masks of choices, which rl_games accepts from the host alone.

rl_games has no place for last observations: where time runs out ("time_outs") it bootstraps from the value of the one
before. It learns from every row, those of zeros behind an agent that left early included. Its "rewards" are returns of
each ``num_agents``-th row that is done, first agents' unless some leave early; ``VecEnv.episode_statistics`` has all.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Tuple, flatten_space
from gymnasium.vector.utils import batch_space

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import ActionClip, checked_vector_env, requires_extra
from gpu_vecenv.errors import ConfigError, UnsupportedGameError

with requires_extra("rl-games"):
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv


class RLGamesVecEnv(IVecEnv):
    """Row ``e * num_agents + a`` is agent ``a`` of replica ``e``.

    "states", for ``central_value_config``, are a replica's rows one after the other, padding included. rl_games trains
    a central value on first agents' rewards and takes it for all: right where agents share their reward.

    Box actions are clipped to their bounds: with ``clip_actions: True`` rl_games scales from [-1, 1] to the bounds, and
    may miss them by rounding; with False it leaves the clipping to the environment.

    Raises:
        TypeError, ValueError: ``env`` is another env, or not in "same_step" mode with ``output="torch"``.
        UnsupportedGameError: Roles have actions of their own sizes; or several numbers of an action have, and masks.
    """

    def __init__(self, env: GymnasiumVectorEnv) -> None:
        self.env = checked_vector_env(env, "rl_games", masks=True)
        self.gymnasium_env: GymnasiumVectorEnv = env.unwrapped  # without wrappers
        self._seed: int | None = None
        space = env.single_action_space
        self._shape = (env.num_envs, *(space.shape or ()))
        self._clip = ActionClip(space, self.gymnasium_env.device)
        if isinstance(space, Box) and not space.is_bounded("both"):
            raise ValueError(f"env has actions {space}, which rl_games cannot scale to; expected finite bounds")
        sizes = space.nvec.tolist() if isinstance(space, MultiDiscrete) else []
        if len(set(sizes)) > 1 and self.has_action_masks():
            raise UnsupportedGameError(
                f"rl_games cuts masks of several choices into equal parts; the game masks choices of {sizes}. "
                "gpu_vecenv.adapters for it: torchrl"
            )
        self.action_space = Tuple([Discrete(size) for size in sizes]) if sizes else space  # rl_games' word for it
        self.observation_space = self.state_space = env.single_observation_space
        if self.gymnasium_env.num_agents > 1:
            self.state_space = flatten_space(batch_space(self.observation_space, self.gymnasium_env.num_agents))

    def reset(self) -> dict[str, torch.Tensor]:
        """{"obs": (rows, …), "states": (replicas, …)} of new episodes; begins with the seed given to ``seed``."""
        obs, _ = self.env.reset(seed=self._seed)
        self._seed = None
        return self._named(obs)

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """As ``reset``, rewards (rows,) float32, dones (rows,) bool, and {"time_outs": (rows,) bool}."""
        actions = self._clip(actions.reshape(self._shape))  # rl_games' players squeeze
        obs, rewards, terminations, truncations, _ = self.env.step(actions)
        return self._named(obs), rewards, terminations | truncations, {"time_outs": truncations & ~terminations}

    def get_env_info(self) -> dict[str, Any]:
        """Spaces of a row and, "state_space", of a replica; "agents" of a replica."""
        spaces = {name: getattr(self, name) for name in ("observation_space", "action_space", "state_space")}
        return {**spaces, "agents": self.gymnasium_env.num_agents, "value_size": 1}

    def get_number_of_agents(self) -> int:
        """Agents of one replica."""
        return self.gymnasium_env.num_agents

    def has_action_masks(self) -> bool:
        """Whether the game masks choices."""
        return self.gymnasium_env.game.layout.masks_actions

    def get_action_masks(self) -> Any:
        """Choices that are allowed, (rows, num_logits) bool, in NumPy: of tensors rl_games refuses those on a GPU."""
        return self.gymnasium_env.action_masks().cpu().numpy()

    has_action_mask, get_action_mask = has_action_masks, get_action_masks  # as rl_games' players call them

    def set_train_info(self, env_frames: int, agent: Any, **kwargs: Any) -> None:
        """Here an agent shows itself before its first step: ConfigError for what would go wrong without a word."""
        if self.has_action_masks() and not agent.use_action_masks:
            raise ConfigError("the game masks choices: rl_games' config needs use_action_masks: True")
        roles = {role: count for role, count in self.gymnasium_env.game.layout.roles.items() if count}
        if len(roles) > 1 and agent.has_central_value:
            raise UnsupportedGameError(
                "rl_games trains a central value on the first agent's rewards and takes it for all; the game has "
                f"roles {roles}. Leave central_value_config out; gpu_vecenv.adapters for it: benchmarl, skrl"
            )

    def get_env_state(self) -> dict[str, Any]:
        """For checkpoints: the state of all replicas, random streams included."""
        return {"num_envs": self.gymnasium_env.vec_env.num_envs, "state": self.gymnasium_env.vec_env.state_dict()}

    def set_env_state(self, env_state: dict[str, Any] | None) -> None:
        """Go on with a checkpoint's random streams; of another number of replicas, it is left with a warning."""
        if env_state is not None and env_state["num_envs"] != self.gymnasium_env.vec_env.num_envs:
            found = f"{env_state['num_envs']} replicas, this environment {self.gymnasium_env.vec_env.num_envs}"
            warnings.warn(f"the checkpoint has {found}: not loaded", stacklevel=2)
        elif env_state is not None:
            self.gymnasium_env.vec_env.load_state_dict(env_state["state"])
            self._seed = None  # it would start the streams anew

    def seed(self, seed: int | None) -> None:
        """For the next ``reset``."""
        self._seed = seed

    def close(self) -> None:
        """Let go of all memory."""
        self.env.close()

    def _named(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"obs": obs, "states": obs.reshape(-1, *(self.state_space.shape or ()))}


def make(game: Any, num_envs: int, device: Any = None, *, seed: int | None = None, **config: Any) -> RLGamesVecEnv:
    """``num_envs`` replicas of a game; ``config`` as for ``gpu_vecenv.GymnasiumVectorEnv``, ``seed`` for ``reset``."""
    env = wrap(GymnasiumVectorEnv(game, num_envs, device, **config))
    env.seed(seed)
    return env


def wrap(env: GymnasiumVectorEnv) -> RLGamesVecEnv:
    """A Gymnasium view with ``output="torch"`` as rl_games' IVecEnv."""
    return RLGamesVecEnv(env)


def register(name: str = "gpu_vecenv") -> None:
    """Make ``env_name: gpu_vecenv`` known to rl_games' Runner; ``env_config`` holds the arguments of ``make``.

    Training takes ``num_actors`` replicas; ``num_envs`` counts those of a player, 1 if left out.
    """
    vecenv.register(name, lambda _, num_actors, num_envs=None, **config: make(num_envs=num_actors, **config))
    player = {"vecenv_type": name, "env_creator": lambda num_envs=1, **config: make(num_envs=num_envs, **config)}
    env_configurations.register(name, player)
